"""Rope tables equal transformers' bit for bit: every scaling type, partial rotation, every published config, positions 0 to 100,000."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, GlmConfig, LlamaConfig
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ligerformer import ModelConfig, kernels, presets
from ligerformer.blocks import Context, Decoder, Rope
from ligerformer.configs import ConfigError, RopeConfig
from ligerformer.convert import config_from_hf
from ligerformer.convert.families import model_types
from tests.blocks.contract import made, tokens
from tests.configs.examples import plain
from tests.make_presets import PRESETS, PUBLISHED

LAST = 100_000


def positions(last: int = LAST) -> Tensor:
    """(1, T): the first ones, both sides of every power of two, a few hundred at random, and the last."""
    powers = [2**k + d for k in range(6, 17) for d in (-1, 0, 1)]
    drawn = torch.randint(0, last, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([sorted(p for p in {*range(64), *powers, *drawn, last - 1, last} if p <= last)])


def assert_same_tables(rope: Rope, theirs: Any, at: Tensor, **options: Any) -> None:
    cos, sin = rope(at)
    half = cos.shape[-1]
    for ours, full in zip((cos, sin), theirs(torch.zeros(1, dtype=torch.float32), at, **options), strict=True):
        assert ours.dtype == torch.float32 and full.shape[-1] == 2 * half
        assert torch.equal(ours, full[..., :half]) and torch.equal(ours, full[..., half:])


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 3.0, "original_max_position_embeddings": 2048},
    "llama3": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "llama3 short": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 512},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn with all": {
        "factor": 16.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn with a factor": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3},
    "longrope": {"factor": 16.0, "original_max_position_embeddings": 2048},
    "longrope with a factor": {"factor": 16.0, "original_max_position_embeddings": 2048, "attention_factor": 1.19},
}


def pair(name: str, *, theta: float, head_dim: int, partial: float) -> tuple[Rope, Any]:
    """Our rope and transformers' of the same numbers."""
    type_, scaling = name.split()[0], dict(SCALINGS[name])
    dim = int(head_dim * partial)
    if type_ == "longrope":
        scaling |= {"short_factor": [1.0 + 0.03 * i for i in range(dim // 2)], "long_factor": [1.0 + 0.7 * i for i in range(dim // 2)]}
    ours = RopeConfig.from_dict(
        {"theta": theta, "partial_rotary_factor": partial, "scaling": {"type": type_, **scaling} if scaling else None}
    )
    context = scaling.get("original_max_position_embeddings", 4096) if type_ == "dynamic" else 131072
    given = {"rope_type": type_, "rope_theta": theta, **scaling} | ({"partial_rotary_factor": partial} if partial != 1.0 else {})
    cls, embedding = (LlamaConfig, LlamaRotaryEmbedding) if partial == 1.0 else (GlmConfig, GlmRotaryEmbedding)
    config = cls(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=context, rope_parameters=given)
    return Rope(ours, head_dim), embedding(config)


@pytest.mark.parametrize("last", [100, 2047, 2048, 5000, LAST])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_of_every_scaling_type(name, last):
    """The last position decides for the types that look at a call's length: inside, at the edge of, and past the original context."""
    rope, theirs = pair(name, theta=10000.0, head_dim=64, partial=1.0)
    assert_same_tables(rope, theirs, positions(last))


@pytest.mark.parametrize(("theta", "head_dim", "partial"), [(500000.0, 128, 1.0), (1e6, 80, 1.0), (10000.0, 64, 0.5), (1e4, 96, 0.25)])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_of_other_bases_widths_and_parts(name, theta, head_dim, partial):
    rope, theirs = pair(name, theta=theta, head_dim=head_dim, partial=partial)
    assert rope.dim == int(head_dim * partial)
    assert_same_tables(rope, theirs, positions())


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_call_leaves_no_trace_in_the_next(name):
    rope, _ = pair(name, theta=10000.0, head_dim=64, partial=1.0)
    short, long = positions(100), positions(50_000)
    before = rope(short)
    stretched = rope(long)
    assert all(torch.equal(a, b) for a, b in zip(rope(short), before, strict=True))
    assert not torch.equal(stretched[0][:, :64], before[0][:, :64])  # a long call rotates its first positions otherwise


# ---- published configs ----

SERVED = {name: entry["config"] for name, entry in PUBLISHED.items() if entry["config"]["model_type"] in model_types()}


def hf_rotary(config: Any) -> Any:
    """The rotary embedding that transformers makes of a config."""
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    return getattr(module, f"{name}RotaryEmbedding")(config)


def ropes(config: ModelConfig) -> list[Rope]:
    return [
        Rope(attention.rope, attention.head_dim)
        for attention in (config.layer(i).branches["attention"].block for i in range(config.num_layers))
    ]


@pytest.mark.parametrize("name", SERVED)
def test_tables_of_every_layer_of_every_published_config(name):
    hf = AutoConfig.for_model(**SERVED[name])
    theirs, checked = hf_rotary(hf), set()
    kinds = hf.layer_types if hasattr(theirs, "layer_types") else [None] * hf.num_hidden_layers
    for kind, rope in zip(kinds, ropes(config_from_hf(SERVED[name])), strict=True):
        if (kind, rope.key) not in checked:  # layers of one kind share their numbers: compared once
            checked.add((kind, rope.key))
            assert_same_tables(rope, theirs, positions(), **({} if kind is None else {"layer_type": kind}))
    assert len(checked) == len(set(kinds))


def test_presets_and_published_configs_are_all_there():
    assert len(SERVED) >= 40
    assert set(PRESETS.values()) <= set(SERVED)
    assert presets.names() == sorted(PRESETS)


# ---- in a model ----


def test_a_partial_rotation_leaves_the_rest_of_a_head(device):
    rope = Rope(RopeConfig(theta=10000.0, partial_rotary_factor=0.5), 16).to(device)
    q = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0)).to(device)
    rotated, _ = kernels.rope(q, q, *rope(torch.arange(5, device=device)[None]))
    assert torch.equal(rotated[..., 8:], q[..., 8:])
    assert not torch.equal(rotated[:, 1:, :, :8], q[:, 1:, :, :8]) and torch.equal(rotated[:, 0], q[:, 0])
    pairs, before = rotated[..., :8].unflatten(-1, (2, 4)), q[..., :8].unflatten(-1, (2, 4))
    assert torch.allclose(pairs.square().sum(-2), before.square().sum(-2), rtol=1e-5)  # a rotation


def test_tables_are_made_once_a_forward_for_each_distinct_rope(monkeypatch):
    data = plain() | {"num_layers": 6, "pattern": ["main", "other"]}
    data["layers"]["other"] = plain()["layers"]["main"]
    data["layers"]["other"]["attention"]["rope"] = {"theta": 5e5}
    model: Decoder = made(data)
    calls = []
    forward = Rope.forward
    monkeypatch.setattr(Rope, "forward", lambda self, at: calls.append(self.key) or forward(self, at))
    model(tokens())
    assert len(calls) == 2 and len(set(calls)) == 2


def test_a_context_gives_each_row_its_positions():
    rope = Rope(RopeConfig(theta=10000.0), 8)
    at = torch.tensor([[0, 1, 2], [7, 8, 9]])
    cos, _ = Context(at).rope(rope)
    assert torch.equal(cos[1], rope(torch.arange(10)[None])[0][0, 7:])


@pytest.mark.parametrize("partial", [0.1, 0.45])
def test_an_odd_number_of_rotated_dimensions_is_refused(partial):
    with pytest.raises(ConfigError, match="expected an even number"):
        Rope(RopeConfig(theta=1e4, partial_rotary_factor=partial), 12)
