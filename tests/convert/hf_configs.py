"""Small config.json dicts of every model type served, and strategies that draw them."""

from typing import Any

import pytest
from hypothesis import strategies as st

from ligerformer.configs import ConfigError, ModelConfig
from ligerformer.convert import config_from_hf

TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu", "sliding_window": 5},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json in the old dialect, with head_dim apart from hidden_size / heads; ``changes`` replace or add keys."""
    return {
        "model_type": model_type,
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "rope_theta": 20000.0,
        "rope_scaling": None,
        **TINY[model_type],
        **changes,
    }


def multimodal(**changes: Any) -> dict[str, Any]:
    """A config.json of Gemma 3 with a vision tower, as published: the text part says little."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14},
        **changes,
    }


def new_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json with ``rope_parameters``."""
    result = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "rope_local_base_freq")}
    parameters = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    if "rope_theta" in config:
        parameters["rope_theta"] = config["rope_theta"]
    if config["model_type"] == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
        return result | {"rope_parameters": {"sliding_attention": local, "full_attention": parameters}}
    return result | {"rope_parameters": parameters}


def positive(top: float) -> st.SearchStrategy[float]:
    return st.floats(1e-6, top, allow_nan=False)


ROPE_SCALINGS = {
    "linear": st.fixed_dictionaries({"factor": positive(64)}),
    "dynamic": st.fixed_dictionaries({"factor": positive(64)}),
    "llama3": st.fixed_dictionaries(
        {"factor": positive(64), "low_freq_factor": st.floats(0.5, 2), "high_freq_factor": st.floats(3, 8)},
        optional={"original_max_position_embeddings": st.integers(1, 63)},
    ),
    "yarn": st.fixed_dictionaries(
        {"factor": st.none() | positive(64)},
        optional={
            "original_max_position_embeddings": st.integers(1, 63),
            "attention_factor": st.none() | positive(2),
            "beta_fast": st.none() | st.floats(16, 64),
            "beta_slow": st.none() | st.floats(0.5, 2),
            "mscale": st.none() | positive(2),
            "mscale_all_dim": st.none() | positive(2),
        },
    ),
    "longrope": st.fixed_dictionaries(
        {"short_factor": st.lists(positive(9), min_size=4, max_size=4), "long_factor": st.lists(positive(9), min_size=4, max_size=4)},
        optional={
            "factor": st.none() | positive(64),
            "attention_factor": st.none() | positive(2),
            "original_max_position_embeddings": st.integers(2, 63),
        },
    ),
}


@st.composite
def rope_scalings(draw: st.DrawFn) -> dict[str, Any] | None:
    """A rope_scaling of any type, or none."""
    kind = draw(st.sampled_from([None, *ROPE_SCALINGS]))
    return None if kind is None else {draw(st.sampled_from(["rope_type", "type"])): kind} | draw(ROPE_SCALINGS[kind])


@st.composite
def hf_configs(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """A config.json of a model type, in the old dialect."""
    layers, heads = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 4]))
    config = tiny(
        model_type,
        vocab_size=draw(st.integers(1, 300)),
        hidden_size=4 * draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 200)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (1, 2, 4) if n <= heads])),
        rms_norm_eps=draw(st.floats(0, 1)),
        tie_word_embeddings=draw(st.booleans()),
        initializer_range=draw(st.floats(0, 1)),
        rope_theta=draw(positive(1e7)),
        rope_scaling=draw(rope_scalings()),
    )
    for name in ("attention_bias", "mlp_bias"):
        if name in config:
            config[name] = draw(st.booleans())
    kinds = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers)
    window = draw(st.integers(1, 64))
    if model_type == "mistral":
        config["sliding_window"] = draw(st.none() | st.just(window))
    elif model_type.startswith("qwen") and draw(st.booleans()):
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": draw(st.integers(0, layers + 1))}
        if draw(st.booleans()):
            config["layer_types"] = draw(kinds)
    elif model_type in ("gemma2", "gemma3_text"):
        config |= {"sliding_window": window, "query_pre_attn_scalar": draw(st.integers(1, 300))}
        config |= {f"{name}_logit_softcapping": draw(st.none() | positive(100)) for name in ("attn", "final")}
        if draw(st.booleans()):
            config.pop("sliding_window_pattern", None)
            config["layer_types"] = draw(kinds)
    if model_type == "gemma3_text":
        config["rope_local_base_freq"] = draw(positive(1e6))
    return config


def error_of(data: Any) -> str:
    """The message with which a config.json is refused."""
    with pytest.raises(ConfigError) as caught:
        config_from_hf(data)
    return str(caught.value)


def attention_of(config: ModelConfig, layer: int = 0) -> Any:
    """The attention of a layer."""
    return config.layer(layer).branches["attention"].block
