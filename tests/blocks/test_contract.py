"""Every type of every slot, the built-in ones and those of custom.py, by one contract."""

from typing import Any

import pytest

import tests.blocks.custom  # noqa: F401 (registers its types)
from ligerformer.configs import registry
from tests.blocks.contract import CHECKS, around
from tests.configs.examples import SCALINGS, plain

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 10}
NORM = {"type": "rms_norm", "eps": 1e-5}


def only_post_norms() -> dict[str, Any]:
    """A model that reads and collapses without a norm."""
    layer = plain()["layers"]["main"]
    return {"layers": {"main": layer | {"norm": None, "post_norm": NORM}}, "final_norm": None}


BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "embedding": ("embed", {"type": "token_embedding"}, {"tie_embeddings": True}),
    "scaled embedding": ("embed", {"type": "token_embedding", "scale": 4.9}, {}),
    "norm": ("norm", NORM, {}),
    "norm with an offset": ("norm", NORM | {"offset": 1.0, "casting": "fp32"}, {}),
    "attention": ("attention", {"type": "softmax_attention", **HEADS, "rope": {"theta": 1e4}}, {}),
    "attention without rope": ("attention", {"type": "softmax_attention", **HEADS, "scale": 0.2}, {}),
    "windowed attention": ("attention", {"type": "softmax_attention", **HEADS, "window": 3, "rope": {"theta": 1e4}, "packed": False}, {}),
    "soft-capped attention": ("attention", {"type": "softmax_attention", **HEADS, "softcap": 5.0, "query_pre_attn_scalar": 7.0}, {}),
    "attention with all": (
        "attention",
        {
            "type": "softmax_attention",
            **HEADS,
            "rope": {"theta": 1e4, "partial_rotary_factor": 0.4},
            "qk_norm": NORM,
            "window": 4,
            "sinks": True,
            "qkv_bias": True,
            "o_bias": True,
        },
        {},
    ),
    "normed heads without rope": ("attention", {"type": "softmax_attention", **HEADS, "qk_norm": NORM, "qkv_bias": True}, {}),
    "value residual": ("attention", {"type": "value_residual", "num_heads": 3, "head_dim": 8, "rope": {"theta": 1e4}}, {}),
    "linear attention": ("attention", {"type": "linear_attention", "num_heads": 3, "head_dim": 8}, {}),
    "mlp": ("mlp", {"type": "gated_mlp", "intermediate_size": 40}, {}),
    "mlp with biases": (
        "mlp",
        {"type": "gated_mlp", "intermediate_size": 33, "activation": "gelu_tanh", "bias": True, "packed": False},
        {},
    ),
    "add": ("residual", {"type": "add"}, {}),
    "hyper-connections": ("residual", {"type": "mhc", "streams": 3}, {}),
    "one stream": ("residual", {"type": "mhc", "streams": 1}, {}),
    "delayed read": ("residual", {"type": "delayed_read", "streams": 3}, {}),
    "attention residuals": ("residual", {"type": "attention_residuals"}, {}),
    "add without norms": ("residual", {"type": "add"}, only_post_norms()),
    "hyper-connections without norms": ("residual", {"type": "mhc", "streams": 2}, only_post_norms()),
    "head": ("head", {"type": "lm_head"}, {}),
    "head with all": ("head", {"type": "lm_head", "softcap": 5.0, "logit_scale": 0.7, "bias": True}, {"tie_embeddings": True}),
    "head with a bias": ("head", {"type": "lm_head", "bias": True}, {}),
    **{f"{scaling['type']} rope": ("rope_scaling", scaling, {}) for scaling in SCALINGS},
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_keeps_the_contract_of_its_slot(name, check, device):
    slot, block, changes = BLOCKS[name]
    check(around(slot, block, **changes), device)


def test_every_registered_type_is_listed():
    listed = {(slot, block["type"]) for slot, block, _ in BLOCKS.values()}
    modules = ("ligerformer.", "tests.blocks.custom")
    registered = {
        (slot, type_)
        for slot in registry.slots()
        for type_ in registry.types(slot)
        if registry.config_class(slot, type_).__module__.startswith(modules)
    }
    assert listed == registered
