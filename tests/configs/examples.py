"""Whole model configs as plain data, which between them hold every built-in config class and every field of it."""

import json
from typing import Any

LINEAR = {"type": "linear", "factor": 8.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.1,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "truncate": False,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 64,
    "factor": 2.0,
    "attention_factor": 1.2,
}
SCALINGS = [LINEAR, DYNAMIC, LLAMA3, YARN, LONGROPE]


def plain() -> dict[str, Any]:
    """The least that a Llama-shaped model says."""
    return {
        "vocab_size": 97,
        "hidden_size": 24,
        "num_layers": 3,
        "max_position_embeddings": 128,
        "tie_embeddings": False,
        "embed": {"type": "token_embedding"},
        "residual": {"type": "add"},
        "layers": {
            "main": {
                "norm": {"type": "rms_norm", "eps": 1e-5},
                "attention": {"type": "softmax_attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": {"theta": 10000.0}},
                "mlp": {"type": "gated_mlp", "intermediate_size": 40},
            }
        },
        "pattern": ["main"],
        "final_norm": {"type": "rms_norm", "eps": 1e-5},
        "head": {"type": "lm_head"},
        "init": {"std": 0.02},
    }


def full(scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    """A model with two kinds of layers in which every field is given and stands off its default."""
    norm = {"type": "rms_norm", "eps": 1e-5, "offset": 1.0, "casting": "fp32"}
    rope = {"theta": 500000.0, "partial_rotary_factor": 0.5, "scaling": scaling}
    attention = {
        "type": "softmax_attention",
        "num_heads": 4,
        "head_dim": 16,
        "num_kv_heads": 2,
        "rope": rope,
        "qk_norm": dict(norm),
        "window": 5,
        "softcap": 50.0,
        "scale": 0.3,
        "query_pre_attn_scalar": None,
        "sinks": True,
        "qkv_bias": True,
        "o_bias": True,
        "packed": False,
    }
    mlp = {"type": "gated_mlp", "intermediate_size": 40, "activation": "gelu_tanh", "bias": True, "packed": False}
    sequential = {
        "norm": dict(norm),
        "post_norm": dict(norm),
        "sublayers": [["attention"], ["mlp"]],
        "attention": dict(attention),
        "mlp": {"multiplier": 0.5} | mlp,
    }
    parallel = {
        "norm": dict(norm),
        "post_norm": None,
        "sublayers": [["attention", "second", "mlp"]],
        "attention": attention | {"scale": None, "query_pre_attn_scalar": 24.0},
        "second": {"slot": "attention"} | attention | {"rope": None},
        "mlp": dict(mlp),
    }
    data = {
        "vocab_size": 97,
        "hidden_size": 24,
        "num_layers": 5,
        "max_position_embeddings": 128,
        "tie_embeddings": True,
        "embed": {"type": "token_embedding", "scale": 4.5},
        "residual": {"type": "mhc", "streams": 4, "iterations": 7, "eps": 1e-5, "mix_off_diagonal": -3.0},
        "layers": {"local": sequential, "global": parallel},
        "pattern": ["local", "local", "global"],
        "final_norm": dict(norm),
        "head": {"type": "lm_head", "softcap": 30.0, "logit_scale": 0.7, "bias": True},
        "init": {"std": 0.02},
    }
    return json.loads(json.dumps(data))  # no dict stands in two places
