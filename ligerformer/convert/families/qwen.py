"""Qwen2, Qwen2.5 (both ``qwen2``: biases on q, k and v) and Qwen3 (norms on q and k)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...configs import ConfigError, ModelConfig, SoftmaxAttentionConfig
from ...configs.schema import NonNegativeInt, PositiveInt
from ..rules import Rule
from . import decoder, rope
from .base import JSON, Family, Translation
from .keys import COMMON, Inert, Keys

ARCHITECTURE = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Class defaults of transformers' Qwen2Config; None is derived (head_dim = hidden_size / heads).
QWEN2_DEFAULTS: dict[str, JSON] = {
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN3_DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128, "attention_bias": False}

QWEN2_INERT = COMMON | {"use_mrope": Inert("positions are of one dimension", (False,))}


def from_hf(data: Mapping[str, JSON]) -> Translation:
    """The translation of a config.json of this family."""
    model_type = data["model_type"]
    third = model_type == "qwen3"
    keys = Keys(data, QWEN3_DEFAULTS if third else QWEN2_DEFAULTS, COMMON if third else QWEN2_INERT, of=model_type)
    sizes = decoder.read_sizes(keys, [ARCHITECTURE[model_type]])
    norm = decoder.read_norm(keys)
    heads = decoder.read_heads(
        keys, sizes["hidden_size"], divides=False, kv_heads=PositiveInt | None, head_dim=PositiveInt if third else PositiveInt | None
    )
    bias = keys.take("attention_bias", bool) if third else False
    common: dict[str, Any] = dict(
        **heads,
        rope=rope.from_hf(keys, sizes["max_position_embeddings"]),
        qk_norm=norm if third else None,
        qkv_bias=bias if third else True,
        o_bias=bias,
    )
    kinds, window = _windows(keys, sizes["num_layers"])
    attention = {
        decoder.FULL: SoftmaxAttentionConfig(**common),
        decoder.SLIDING: SoftmaxAttentionConfig(**common, window=window),
    }
    mlp = decoder.read_mlp(keys, "hidden_act")
    return decoder.assemble(keys, model_type, sizes, kinds=kinds, attention=attention, mlp=mlp, norm=norm)


def _windows(keys: Keys, num_layers: int) -> tuple[list[str], int | None]:
    """The attention of each layer, and the window: with ``use_sliding_window``, layers from ``max_window_layers`` on have it."""
    window = keys.take("sliding_window", PositiveInt | None) if keys.take("use_sliding_window", bool) else None
    if window is None or keys.data.get("layer_types") is not None:
        full = num_layers
    else:
        full = keys.take("max_window_layers", NonNegativeInt)
    kinds = decoder.read_layer_types(keys, num_layers, [decoder.FULL if i < full else decoder.SLIDING for i in range(num_layers)])
    if decoder.SLIDING in kinds and window is None:
        raise ConfigError(f"layer_types: names {decoder.SLIDING!r} while use_sliding_window is false or sliding_window is null")
    if decoder.SLIDING not in kinds:
        keys.idle("sliding_window")
    keys.idle("max_window_layers")
    return kinds, window


def _own_keys(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
    return {
        "hidden_act": decoder.activation_to_hf(config),
        **rope.to_hf(attention[0].rope),
        **_window_keys(attention),
    }


def _window_keys(attention: decoder.Attentions) -> dict[str, JSON]:
    kinds = decoder.kinds_of(attention)
    if decoder.SLIDING not in kinds:
        return {"use_sliding_window": False}
    first = kinds.index(decoder.SLIDING)
    data = {"use_sliding_window": True, "sliding_window": attention[first].window, "layer_types": kinds}
    if decoder.FULL not in kinds[first:]:
        data["max_window_layers"] = first  # versions that do not know layer_types read it
    return data


def to_hf(config: ModelConfig, model_type: str) -> dict[str, JSON]:
    """config.json of a model, as ``model_type``."""

    def own(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
        return _own_keys(config, attention) | ({"attention_bias": attention[0].qkv_bias} if model_type == "qwen3" else {})

    return decoder.to_hf(config, model_type, ARCHITECTURE[model_type], own, from_hf)


def rules(config: ModelConfig, model_type: str) -> list[Rule]:
    """The tensors of this family."""
    return decoder.rules(config, mlp_norm="post_attention_layernorm")


FAMILY = Family(tuple(ARCHITECTURE), ARCHITECTURE, from_hf, to_hf, rules)
