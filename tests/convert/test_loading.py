"""Checkpoints as models: everything in its place or one error, before a byte of weights is read."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligerformer.configs import ConfigError
from ligerformer.convert import CheckpointError, config_from_hf, from_hf
from tests.convert.hf_models import MODELS, hf_model

pytest.importorskip("transformers")
WEIGHTS = "model.safetensors"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    hf_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    hf_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({k: v.clone() for k, v in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v != "absent"}))


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("shards", [False, True])
def test_every_family_gives_transformers_logits(tmp_path: Path, model_type: str, shards: bool) -> None:
    oracle = hf_model(model_type)
    oracle.save_pretrained(tmp_path / "m", **({"max_shard_size": "12KB"} if shards else {}))
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == shards
    model = from_hf(tmp_path / "m")
    ids = torch.randint(40, (2, 17))
    with torch.no_grad():
        expected, logits = oracle(ids).logits, model(ids).logits
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    assert error < 2**-23 * 200  # fp32, a few layers of sums over some tens of terms
    assert not model.training and model.load_report.initialized == () and model.source.model_type == model_type
    assert len(model.load_report.files) == len(oracle.state_dict()) - oracle.config.tie_word_embeddings


def test_the_config_alone(llama: Path) -> None:
    config = config_from_hf(llama)
    assert config == from_hf(llama).config == config_from_hf(json.loads((llama / "config.json").read_text()))


def test_all_that_is_wrong_is_in_one_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].t().contiguous()
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(24, dtype=torch.int32)

    edit_tensors(llama, spoil)
    monkeypatch.setattr("ligerformer.convert.loading.allocate", None)
    with pytest.raises(CheckpointError) as error:
        from_hf(llama)
    text = str(error.value)
    assert "5 problems" in text
    assert "missing: model.layers.1.self_attn.k_proj.weight [20, 24], for layers.1.attention.qkv_proj.weight" in text
    assert "missing: model.norm.weight [24], for final_norm.weight" in text
    assert "mis-shaped: model.layers.0.mlp.up_proj.weight is [24, 28] in the file; layers.0.mlp.gate_up_proj.weight takes [28, 24]" in text
    assert "unexpected: model.layers.3.mlp.up_proj.weight F32 [2] in model.safetensors" in text
    assert "mistyped: model.layers.2.input_layernorm.weight is I32" in text


def test_quantised_weights_are_named(llama: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)

    edit_tensors(llama, quantise)
    with pytest.raises(CheckpointError, match=r"quantised: model.layers.0.mlp.up_proj.weight is F8_E4M3.*dequantise it first"):
        from_hf(llama)


def test_buffers_that_follow_from_the_config_are_ignored_by_name(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(llama, lambda tensors: tensors.update({name: torch.ones(5)}))
    assert from_hf(llama).load_report.ignored == {name: "rotary frequencies"}


# Tied and untied heads, present and absent in the file.


def test_tied_and_absent(tied: Path) -> None:
    assert "lm_head.weight" not in load_file(tied / WEIGHTS)
    model = from_hf(tied)
    assert model.head.weight is model.embed.weight and model.load_report.ties == {"head.weight": "is embed.weight"}


def test_tied_present_and_equal(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    model = from_hf(tied)
    assert model.head.weight is model.embed.weight
    assert model.load_report.ties["lm_head.weight"] == "equal to model.embed_tokens.weight, with which it is tied"


def test_tied_and_under_the_heads_name_alone(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    model = from_hf(tied)
    assert torch.equal(model.embed.weight, load_file(tied / WEIGHTS)["lm_head.weight"])


def test_tied_present_and_different(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight.*overrides=.*False"):
        from_hf(tied)
    model = from_hf(tied, overrides={"tie_embeddings": False})
    assert torch.equal(model.head.weight, model.embed.weight + 1)


def test_untied_and_absent(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight \[40, 24\], for head.weight; .*overrides=.*True"):
        from_hf(llama)
    model = from_hf(llama, overrides={"tie_embeddings": True})
    assert model.head.weight is model.embed.weight


def test_untying_a_tied_checkpoint_makes_no_random_head(tied: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight"):
        from_hf(tied, overrides={"tie_embeddings": False})


# Overrides.


def test_parts_stored_apart_hold_the_same_numbers(llama: Path) -> None:
    paths = {"layers.main.attention.packed": False, "layers.main.mlp.packed": False}
    apart, packed = from_hf(llama, overrides=paths), from_hf(llama)
    ids = torch.randint(40, (1, 9))
    assert torch.equal(apart.layers[1].attention.qkv_proj.part("k_proj"), packed.layers[1].attention.qkv_proj.part("k_proj"))
    torch.testing.assert_close(apart(ids).logits, packed(ids).logits)
    assert apart.load_report.initialized == () and apart.load_report.ignored == {}


def test_what_an_override_adds_is_initialised_and_listed(llama: Path) -> None:
    model = from_hf(llama, overrides={"layers.main.post_norm": {"type": "rms_norm", "eps": 1e-6}, "layers.main.attention.sinks": True})
    names = [f"layers.{i}.{rest}" for i in range(3) for rest in ("attention.sinks", "post_norms.attention.weight", "post_norms.mlp.weight")]
    assert sorted(model.load_report.initialized) == sorted(names)
    assert torch.equal(model.layers[2].post_norms["mlp"].weight, torch.ones(24))
    assert "layers.*.attention.sinks  (x3)" in str(model.load_report)
    more = from_hf(llama, overrides={"num_layers": 4})
    assert all(name.startswith("layers.3.") for name in more.load_report.initialized) and len(more.load_report.initialized) == 10
    assert torch.equal(more.layers[3].norms[0].weight, torch.ones(24))


def test_another_residual_is_initialised_and_starts_as_the_plain_model(llama: Path) -> None:
    plain, model = from_hf(llama), from_hf(llama, overrides={"residual": dict(type="mhc", streams=2)})
    added = model.load_report.initialized
    assert added and all(".sites." in name or name.startswith("ends.") for name in added)
    assert set(plain.state_dict()) | set(added) == set(model.state_dict())
    ids = torch.randint(40, (1, 9))
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_an_override_takes_away_is_listed(llama: Path) -> None:
    model = from_hf(llama, overrides={"num_layers": 2, "layers.main.mlp.bias": False})
    ignored = model.load_report.ignored
    assert len(ignored) == 16 + 2 * 3 and set(ignored.values()) == {"an override put something else in its place"}
    assert model.load_report.initialized == ()


def test_a_missing_tensor_stays_an_error_under_overrides(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.mlp.down_proj.weight"):
        from_hf(llama, overrides={"layers.main.attention.window": 8})


def test_an_override_that_leads_nowhere_is_an_error(llama: Path) -> None:
    with pytest.raises(ConfigError, match="windw"):
        from_hf(llama, overrides={"layers.main.attention.windw": 8})


# Dtypes.


def test_dtypes(tmp_path: Path) -> None:
    hf_model("llama").bfloat16().save_pretrained(tmp_path / "m")
    model = from_hf(tmp_path / "m")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.load_report.casts == {}
    wide = from_hf(tmp_path / "m", dtype=torch.float32)
    assert all(torch.equal(a.float(), b) for a, b in zip(model.parameters(), wide.parameters(), strict=True))
    assert set(wide.load_report.casts.values()) == {"bfloat16 -> float32"}
    edit_config(tmp_path / "m", dtype="float16", torch_dtype="absent")
    assert from_hf(tmp_path / "m").embed.weight.dtype == torch.float16
    edit_config(tmp_path / "m", dtype="absent", torch_dtype="float64")
    assert from_hf(tmp_path / "m").embed.weight.dtype == torch.float64
    edit_config(tmp_path / "m", dtype="absent", torch_dtype="absent")
    assert from_hf(tmp_path / "m").embed.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        from_hf(tmp_path / "m", dtype="int8")


def test_buffers_equal_a_fresh_build(llama: Path) -> None:
    from ligerformer import build

    model = from_hf(llama)
    fresh = dict(build(model.config, seed=0).named_buffers())
    assert fresh and all(torch.equal(fresh[name], x) for name, x in model.named_buffers())
    assert not any(p.is_meta for p in model.parameters()) and all(p.requires_grad for p in model.parameters())


# Folders.


def test_configs_that_cannot_be_read_name_the_file(llama: Path) -> None:
    edit_config(llama, hiden_size=3)
    with pytest.raises(ConfigError, match=r"config.json.*hiden_size"):
        from_hf(llama)
    edit_config(llama, hiden_size="absent", model_type="mamba")
    with pytest.raises(ConfigError, match=r"config.json: model_type: 'mamba' is not served"):
        from_hf(llama)
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        from_hf(llama)
    (llama / "ligerformer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="native format; open it with load"):
        from_hf(llama)


def test_truncated_weights_are_named(llama: Path) -> None:
    raw = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors.*truncated"):
        from_hf(llama)


def test_a_report_reads_well(llama: Path) -> None:
    text = str(from_hf(llama, dtype="bfloat16").load_report)
    assert text.startswith(f"{llama} (llama): 33 parameters in bfloat16 out of 51 tensors in 1 file")
    rows = "model.layers.*.mlp.gate_proj.weight | model.layers.*.mlp.up_proj.weight"
    assert f"layers.*.mlp.gate_up_proj.weight <- {rows}  (x3)" in text
    assert "model.norm.weight : float32 -> bfloat16" in text


MEASURE = """
import sys, threading, time
import torch, ligerformer
from ligerformer.convert import from_hf

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

torch.set_num_threads(1)
peak, running = 0, True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
before = anonymous()
thread = threading.Thread(target=watch, daemon=True); thread.start()
model = from_hf(sys.argv[1], dtype=sys.argv[2])
running = False; thread.join()
size = sum(p.nbytes for p in model.parameters())
print(peak - before, size, max(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_loading_takes_the_model_and_little_more(tmp_path: Path, dtype: str) -> None:
    sizes = {"vocab_size": 20_000, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6}
    hf_model("llama", **sizes).bfloat16().save_pretrained(tmp_path / "m")
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path / "m"), dtype], capture_output=True, text=True, check=True)
    peak, size, largest = map(int, run.stdout.split())
    assert size > 100e6 and peak <= size + largest + 40e6, f"peak {peak / 1e6:.0f} MB over a model of {size / 1e6:.0f} MB"
