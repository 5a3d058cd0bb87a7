"""``summary``: what it says of a model, a config and a dict agrees with counting and with the built model."""

import re
from typing import Any

import pytest
import torch

import ligerformer
from ligerformer.configs import ConfigError, ModelConfig
from tests.configs.examples import full, plain


@pytest.mark.parametrize("data", [plain(), full()], ids=["plain", "full"])
def test_a_dict_a_config_and_a_model_read_the_same(data: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(data)
    model = ligerformer.build(config, device="meta", dtype=torch.bfloat16, recompute="layer")
    text = ligerformer.summary(config)
    assert ligerformer.summary(data) == text
    assert ligerformer.summary(model).splitlines() == [*text.splitlines(), "weights on meta in bfloat16, recompute='layer'"]


@pytest.mark.parametrize("data", [plain(), full()], ids=["plain", "full"])
def test_the_parts_add_up_to_the_parameters_of_the_model(data: dict[str, Any]) -> None:
    model = ligerformer.build(data, device="meta")
    lines = ligerformer.summary(data).splitlines()

    def last(line: str) -> int:
        return int(re.findall(r"\d[\d,]*(?= each|$)", line)[-1].replace(",", ""))

    embed, head = (last(line) for line in lines if line.startswith(("  embed", "  head")))
    layers, first = 0, 0
    for line in lines:
        if found := re.match(r"  layers? (\d+)(?:-(\d+))?: ", line):
            assert int(found[1]) == first
            count = int(found[2] or found[1]) - first + 1
            layers, first = layers + count * last(line), first + count
    total = sum(p.numel() for p in model.parameters())
    others = sum(p.numel() for part in (model.ends, model.final_norm) if part is not None for p in part.parameters())
    assert first == len(model.layers) and embed + layers + head + others == total
    assert lines[0].startswith(f"{total:,} parameters, {len(model.layers)} layers of width {model.config.hidden_size}")


def test_layers_of_a_kind_in_a_row_are_one_line() -> None:
    lines = ligerformer.summary(ligerformer.presets.load("gemma-3-270m")).splitlines()
    layers = [line.split(" (")[0] for line in lines if line.startswith("  layer")]
    assert layers[:3] == ["  layers 0-4: 'local'", "  layer 5: 'global'", "  layers 6-10: 'local'"]
    assert lines[0].endswith(", embeddings tied") and next(line for line in lines if line.startswith("  head")).endswith(", 0")


def test_branches_show_as_they_are_wired() -> None:
    data = plain()
    data["layers"]["main"] |= {"sublayers": [["attention", "mlp"], ["second"]]}
    data["layers"]["main"]["second"] = {"slot": "attention", "type": "softmax_attention", "num_heads": 1, "head_dim": 8}
    text = ligerformer.summary(data)
    assert "layers 0-2: 'main' (attention: softmax_attention+mlp: gated_mlp, second: softmax_attention)" in text


def test_flops_and_memory_are_those_of_counting() -> None:
    config = ModelConfig.from_dict(plain())
    line = next(line for line in ligerformer.summary(config, batch=4, seq_len=32).splitlines() if line.startswith("training:"))
    assert f"{config.flops_per_token(32) / 1e9:.3g} GFLOP a token at 32 tokens; 4 x 32 tokens" in line
    assert f"{config.training_memory(4, 32).peak / 2**30:.2f} GiB" in line


@pytest.mark.parametrize(("context", "length"), [(128, 128), (131072, 4096)])
def test_the_default_length_is_the_context_up_to_4096(context: int, length: int) -> None:
    assert f"at {length} tokens; 1 x {length} tokens" in ligerformer.summary(plain() | {"max_position_embeddings": context})


@pytest.mark.parametrize(
    ("options", "message"), [({"batch": 0}, "batch is 0"), ({"seq_len": 0}, "seq_len is 0"), ({"seq_len": -4}, "seq_len is -4")]
)
def test_less_than_one_token_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"summary: {message}; expected at least 1"):
        ligerformer.summary(plain(), **options)


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vocab_size'"):
        ligerformer.summary(plain() | {"vocab_sise": 3})
    with pytest.raises(ConfigError, match=r"is 'llama-3\.2-1b'; expected a dict"):
        ligerformer.summary("llama-3.2-1b")
