"""Models as Hugging Face checkpoints: bit for bit, opened by transformers, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ligerformer import build
from ligerformer.configs import ModelConfig
from ligerformer.convert import CannotExpress, CheckpointError, config_from_hf, from_hf, load, save, save_hf, write
from tests.convert.hf_models import MODELS, SIZES, hf_model
from tests.convert.test_native import gain, same_tensors, tiny, with_gain

transformers = pytest.importorskip("transformers")
__all__ = ["gain"]  # a fixture


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_exact_and_transformers_opens_it(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    hf_model(model_type).to(dtype).save_pretrained(tmp_path / "theirs")
    save_hf(from_hf(tmp_path / "theirs"), tmp_path / "ours", max_shard_size="9KB")
    theirs, ours = all_tensors(tmp_path / "theirs"), all_tensors(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    assert all(theirs[k].dtype == ours[k].dtype and torch.equal(theirs[k], ours[k]) for k in theirs)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    options = {"dtype": "auto", "attn_implementation": "eager"}
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", **options)
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True, **options)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(opened) is type(before) and opened.dtype == dtype
    ids = torch.randint(40, (2, 17))
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, before(ids).logits)
    said, published = opened.config.to_dict(), before.config.to_dict()
    differing = {k: (published.get(k), said.get(k)) for k in said.keys() | published.keys() if said.get(k) != published.get(k)}
    assert differing.keys() <= {"_name_or_path", "transformers_version", "sliding_window_pattern"}, (
        differing
    )  # the last: layer_types, as old versions say it
    again = from_hf(tmp_path / "ours")
    assert again.config == config_from_hf(tmp_path / "theirs") and same_tensors(again, from_hf(tmp_path / "theirs"))


def test_parts_stored_apart_are_saved_alike(tmp_path: Path) -> None:
    hf_model("qwen3").save_pretrained(tmp_path / "theirs")
    apart = from_hf(tmp_path / "theirs", overrides={"layers.main.attention.packed": False, "layers.main.mlp.packed": False})
    save_hf(apart, tmp_path / "ours")
    theirs, ours = all_tensors(tmp_path / "theirs"), all_tensors(tmp_path / "ours")
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[k], ours[k]) for k in theirs)


def test_a_model_from_a_dict_takes_the_first_family_that_can_say_it(tmp_path: Path) -> None:
    model = build(tiny(), seed=0)
    save_hf(model, tmp_path / "m")
    data = json.loads((tmp_path / "m" / "config.json").read_text())
    assert data["model_type"] == "llama" and data["architectures"] == ["LlamaForCausalLM"] and data["dtype"] == "float32"
    again = from_hf(tmp_path / "m")
    assert again.config == model.config and same_tensors(again, model)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").num_parameters() == model.config.num_params()
    windowed = tiny()
    windowed["layers"]["main"]["attention"]["window"] = 8
    save_hf(build(windowed, seed=0), tmp_path / "w")
    assert json.loads((tmp_path / "w" / "config.json").read_text())["model_type"] == "mistral"


def test_what_no_family_can_say_is_named(tmp_path: Path, gain: Any) -> None:
    with pytest.raises(CannotExpress, match=r"layers.main.mlp.*'gain'"):
        save_hf(build(with_gain(), seed=0), tmp_path / "m")
    with pytest.raises(CannotExpress, match="multiplier"):
        config = ModelConfig.from_dict(tiny()).replace("layers.main.mlp.multiplier", 0.5)
        save_hf(build(config, seed=0), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_checkpoint_is_saved_as_its_own_type_or_not_at_all(tmp_path: Path) -> None:
    hf_model("llama", attention_bias=False, mlp_bias=False).save_pretrained(tmp_path / "theirs")
    model = from_hf(tmp_path / "theirs", overrides={"layers.main.attention.window": 8})
    with pytest.raises(CannotExpress, match=r"'llama' cannot say: layers.main.attention.window"):
        save_hf(model, tmp_path / "ours")
    save(model, tmp_path / "native")
    assert same_tensors(load(tmp_path / "native"), model)


def test_parameters_without_a_place_are_named(tmp_path: Path) -> None:
    model = build(tiny(), seed=0)
    model.layers[0].attention.o_proj.adapter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"no place for layers.0.attention.o_proj.adapter"):
        save_hf(model, tmp_path / "m")


def test_companions_and_inert_keys_come_along(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "theirs")
    data = json.loads((tmp_path / "theirs" / "config.json").read_text()) | {"bos_token_id": 7, "eos_token_id": [8, 9]}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(data))
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    (tmp_path / "theirs" / "training_args.bin").write_text("not ours")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    model = from_hf(tmp_path / "theirs")
    assert model.source.generation_config == {"eos_token_id": [8, 9]}
    save_hf(model, tmp_path / "ours")
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert ours["bos_token_id"] == 7 and ours["eos_token_id"] == [8, 9]
    assert model.source.eos_token_id() == [8, 9] and model.source.tokenizer_file() == tmp_path / "theirs" / "tokenizer.json"
    save(model, tmp_path / "native")  # and through the native format
    again = load(tmp_path / "native")
    assert again.source.inert == model.source.inert and again.source.tokenizer_file() == tmp_path / "native" / "tokenizer.json"
    save_hf(again, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == ours and (tmp_path / "again" / "tokenizer.json").exists()


def test_a_tokenizer_that_is_gone_does_not_lose_the_weights(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    model = from_hf(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    with pytest.warns(UserWarning, match=r"no longer there: .*tokenizer.json"):
        save_hf(model, tmp_path / "ours")
    assert same_tensors(from_hf(tmp_path / "ours"), model)


def test_a_tokenizer_that_links_to_the_outside_is_not_copied(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "theirs")
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "theirs" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"'tokenizer.json' is a link to .*secret, outside"):
        from_hf(tmp_path / "theirs")


def test_saving_over_the_folder_it_came_from(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    model = from_hf(tmp_path / "m")
    model.embed.weight.data.add_(1)
    save_hf(model, tmp_path / "m")
    assert same_tensors(from_hf(tmp_path / "m"), model) and (tmp_path / "m" / "tokenizer.json").read_text() == "{}"


def test_an_interrupted_save_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model("llama").save_pretrained(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    model = from_hf(tmp_path / "m")
    written = []

    def interrupted(path: Path, *args: Any) -> None:
        path.write_bytes(b"half")
        written.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "_write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_hf(model, tmp_path / "m")
    assert written and {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("error, raised", [(OSError("disk"), CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_what_cannot_be_moved_out_of_the_old_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README.md").write_text("kept")
    rename = write.os.rename

    def failing(source: Path, target: Path) -> None:
        if target.name == "README.md":
            raise error
        rename(source, target)

    monkeypatch.setattr(write.os, "rename", failing)
    with pytest.raises(raised) as caught, write.replacing(tmp_path / "m") as folder:
        (folder / "config.json").write_text("{}")
    (old,) = tmp_path.glob(".m.old-*")
    assert str(old) in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert (old / "README.md").read_text() == "kept" and (tmp_path / "m" / "config.json").is_file()


@pytest.fixture
def multimodal(tmp_path: Path) -> Path:
    """A tiny Gemma 3 that sees, as a folder."""
    text = {**SIZES, **MODELS["gemma3_text"]}
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=39)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path / "multimodal")
    return tmp_path / "multimodal"


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path, multimodal: Path) -> None:
    model = from_hf(multimodal)
    theirs = all_tensors(multimodal)
    vision = {name for name in theirs if "language_model" not in name and "lm_head" not in name}
    assert vision and set(model.load_report.ignored) == vision
    assert set(model.load_report.ignored.values()) == {"vision tower", "multi modal projector"}
    save_hf(model, tmp_path / "text")
    ours = all_tensors(tmp_path / "text")
    text = {name.replace("language_model.model.", "model.").replace("model.language_model.", "model."): x for name, x in theirs.items()}
    assert len(ours) == len(theirs) - len(vision) and all(torch.equal(x, text[name]) for name, x in ours.items())
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert type(opened).__name__ == "Gemma3ForCausalLM" and not info["missing_keys"] and not info["unexpected_keys"]
    oracle = transformers.Gemma3ForConditionalGeneration.from_pretrained(multimodal, attn_implementation="eager").eval()
    ids = torch.randint(39, (1, 12))
    with torch.no_grad():
        expected, logits = oracle(ids).logits, model(ids).logits
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 2**-23 * 200
