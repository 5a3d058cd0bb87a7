"""The native format: any model, bit for bit, whole or not at all."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ligerformer import build
from ligerformer.blocks import Context, constant
from ligerformer.configs import BlockConfig, ConfigError, ModelConfig, register, unregister
from ligerformer.convert import native, write
from ligerformer.convert.errors import CheckpointError
from ligerformer.convert.native import load, save


@pytest.fixture
def gain() -> Iterator[type[nn.Module]]:
    """A block of one's own, with a buffer that a checkpoint must hold."""

    @register("mlp", "gain")
    class Gain(nn.Module):
        @dataclasses.dataclass(frozen=True)
        class Config(BlockConfig):
            start: float = 1.0

        def __init__(self, config: Any, model_config: ModelConfig, layer_index: int) -> None:
            super().__init__()
            self.start = config.start
            self.gain = nn.Parameter(torch.empty(model_config.hidden_size))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def initial_values(self) -> dict[str, Any]:
            return {"gain": constant(self.start), "calls": constant(0.0)}

        def forward(self, x: Tensor, ctx: Context, shared: dict[str, Tensor]) -> Tensor:
            return x * self.gain

    yield Gain
    unregister("mlp", "gain")


def tiny(**changes: Any) -> dict[str, Any]:
    norm = {"type": "rms_norm", "eps": 1e-5}
    attention = {"type": "softmax_attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope": {"theta": 1e4}}
    mlp = {"type": "gated_mlp", "intermediate_size": 20}
    config = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_layers": 2,
        "max_position_embeddings": 64,
        "tie_embeddings": True,
        "embed": {"type": "token_embedding"},
        "residual": {"type": "add"},
        "layers": {"main": {"norm": norm, "attention": attention, "mlp": mlp}},
        "pattern": ["main"],
        "final_norm": norm,
        "head": {"type": "lm_head"},
        "init": {"std": 0.3},
    }
    return config | changes


def with_gain() -> dict[str, Any]:
    config = tiny()
    config["layers"]["main"]["mlp"] = {"type": "gain"}
    return config


def same_tensors(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["5GB", 1500])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: torch.dtype, tied: bool, max_shard_size: int | str) -> None:
    model = build(tiny(tie_embeddings=tied), dtype=dtype, seed=0)
    save(model, tmp_path / "m", max_shard_size=max_shard_size)
    assert ((tmp_path / "m" / "model.safetensors.index.json").exists()) == (max_shard_size == 1500)
    again = load(tmp_path / "m")
    assert again.config == model.config and same_tensors(model, again)
    ids = torch.randint(32, (1, 9))
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert again.load_report is not None and len(again.load_report.loaded) == len(model.state_dict())


def test_the_files_are_safetensors_that_the_library_reads(tmp_path: Path) -> None:
    model = build(tiny(), dtype=torch.bfloat16, seed=0)
    save(model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(tensors[k], v) for k, v in model.state_dict().items())


def test_a_block_of_ones_own_and_several_dtypes(tmp_path: Path, gain: type[nn.Module]) -> None:
    model = build(with_gain(), dtype=torch.bfloat16, seed=0)
    model.layers[1].norms[0].float()
    model.layers[0].mlp.calls.fill_(7)
    save(model, tmp_path / "m")
    again = load(tmp_path / "m")
    assert same_tensors(model, again) and again.layers[0].mlp.calls == 7 and again.layers[1].norms[0].weight.dtype == torch.float32
    assert load(tmp_path / "m", dtype="float32").embed.weight.dtype == torch.float32


def test_an_unknown_type_is_named(tmp_path: Path, gain: type[nn.Module]) -> None:
    save(build(with_gain(), seed=0), tmp_path / "m")
    unregister("mlp", "gain")
    try:
        with pytest.raises(ConfigError, match=r"ligerformer.json: layers.main.mlp.type: unknown mlp type 'gain'.*@register"):
            load(tmp_path / "m")
    finally:
        register("mlp", "gain")(gain)


def test_all_that_is_wrong_is_in_one_error_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(build(tiny(), seed=0), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["final_norm.weight"]
    tensors["embed.weight"] = tensors["embed.weight"][:-1].clone()
    tensors["stray"] = torch.zeros(3)
    tensors["layers.0.norms.0.weight"] = torch.zeros(16, dtype=torch.int64)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    monkeypatch.setattr(native, "allocate", None)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "m")
    text = str(error.value)
    assert "4 problems" in text
    assert "missing: final_norm.weight [16]" in text
    assert "mis-shaped: embed.weight is [31, 16] in the file; embed.weight takes [32, 16]" in text
    assert "unexpected: stray F32 [3] in model.safetensors" in text
    assert "mistyped: layers.0.norms.0.weight is I64" in text


def test_an_interrupted_save_leaves_the_old_folder_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = build(tiny(), seed=0)
    save(old, tmp_path / "m", max_shard_size=1500)
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    for victim in ("_write_file", "write_json", "_sync_folder"):
        calls = []
        original = getattr(write, victim)

        def failing(*args: Any, calls: list[Any] = calls, original: Any = original, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) == (2 if original.__name__ == "_write_file" else 1):
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(write, victim, failing)
            with pytest.raises(KeyboardInterrupt):
                save(build(tiny(), seed=1), tmp_path / "m", max_shard_size=1500)
        assert calls, victim
        assert {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert same_tensors(load(tmp_path / "m"), old)


def test_a_failing_exchange_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = build(tiny(), seed=0)
    save(old, tmp_path / "m")
    original, calls = write.os.rename, []

    def rename(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError("no space left")
        original(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(write.os, "rename", rename)
        save(build(tiny(), seed=1), tmp_path / "m")
    assert same_tensors(load(tmp_path / "m"), old) and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_save_replaces_what_is_ours_and_keeps_what_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save(build(tiny(), seed=0), folder, max_shard_size=1500)
    (folder / "README.md").write_text("mine")
    (folder / "tokenizer.json").write_text("mine too")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    folder.chmod(0o750)
    model = build(tiny(), seed=1)
    save(model, folder)
    assert {p.name for p in folder.iterdir()} == {"README.md", "tokenizer.json", ".git", "ligerformer.json", "model.safetensors"}
    assert (folder / ".git" / "HEAD").read_text() == "ref" and folder.stat().st_mode & 0o777 == 0o750
    assert same_tensors(load(folder), model) and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_where_a_save_cannot_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(tiny(), seed=0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        save(model, tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is the current directory"):
        save(model, ".")
    save(model, "made/on/the/way")
    assert same_tensors(load("made/on/the/way"), model)
    with pytest.raises(CheckpointError, match=r"embed.weight is on the meta device"):
        save(build(tiny(), device="meta"), tmp_path / "meta")
    assert not (tmp_path / "meta").exists()


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    save(build(tiny(), seed=0), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model = build(tiny(), seed=1)
    save(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and same_tensors(load(tmp_path / "real"), model)


def test_other_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="open it with from_hf"):
        load(tmp_path)
    (tmp_path / "ligerformer.json").write_text(json.dumps(tiny(layer=3)))
    with pytest.raises(ConfigError, match=r"ligerformer.json: layer: unknown key"):
        load(tmp_path)


def test_a_damaged_source_is_an_error_before_anything_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(build(tiny(), seed=0), tmp_path / "m")
    (tmp_path / "m" / "ligerformer_source.json").write_text('{"model_type": 3}')
    monkeypatch.setattr(native, "allocate", None)
    with pytest.raises(CheckpointError, match=r"ligerformer_source.json: holds model_type; expected model_type and inert"):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    ("size", "expected"), [(7, 7), ("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2**31), ("64kib", 2**16), ("12B", 12)]
)
def test_shard_sizes(size: int | str, expected: int) -> None:
    assert write.parse_size(size) == expected


@pytest.mark.parametrize("size", [0, -1, True, "5", "GB", "5 XB", "-5GB", "0GB", None, 1.5])
def test_shard_sizes_that_mean_nothing(size: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size is"):
        write.parse_size(size)


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "half precision", torch.float8_e4m3fn])
def test_dtypes_that_a_model_cannot_have(tmp_path: Path, dtype: Any) -> None:
    save(build(tiny(), seed=0), tmp_path / "m")
    with pytest.raises(ValueError, match="dtype is"):
        load(tmp_path / "m", dtype=dtype)
