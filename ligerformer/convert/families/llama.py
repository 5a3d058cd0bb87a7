"""Llama 2 to 3.3 and what shares its layout (SmolLM2, TinyLlama), and Mistral, which has a window."""

from __future__ import annotations

from collections.abc import Mapping

from ...configs import ModelConfig, SoftmaxAttentionConfig
from ...configs.schema import PositiveInt
from ..rules import Rule
from . import decoder, rope
from .base import JSON, Family, Translation
from .keys import COMMON, Inert, Keys

ARCHITECTURE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

# Class defaults of transformers' LlamaConfig; None is derived (as many kv heads as heads, head_dim = hidden_size / heads).
LLAMA_DEFAULTS: dict[str, JSON] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
}

LLAMA_INERT = COMMON | {
    "pretraining_tp": Inert("products in slices, which transformers has given up", (1, None)),
    "rope_interleaved": Inert("pairs of rotated dimensions lie half a head apart", (False,)),
    "is_llama_config": Inert("says again that it is a Llama", (True,)),
}

MISTRAL_DEFAULTS: dict[str, JSON] = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}

MISTRAL_INERT = COMMON | {
    "attention_bias": Inert("the class has no biases", (False,)),
    "mlp_bias": Inert("the class has no biases", (False,)),
}


def _llama(data: Mapping[str, JSON]) -> Translation:
    keys = Keys(data, LLAMA_DEFAULTS, LLAMA_INERT, of="llama")
    sizes = decoder.read_sizes(keys, [ARCHITECTURE["llama"]])
    bias = keys.take("attention_bias", bool)
    attention = SoftmaxAttentionConfig(
        **decoder.read_heads(keys, sizes["hidden_size"], divides=True, kv_heads=PositiveInt | None, head_dim=PositiveInt | None),
        rope=rope.from_hf(keys, sizes["max_position_embeddings"]),
        qkv_bias=bias,
        o_bias=bias,
    )
    return decoder.assemble(
        keys,
        "llama",
        sizes,
        kinds=[decoder.FULL] * sizes["num_layers"],
        attention={decoder.FULL: attention},
        mlp=decoder.read_mlp(keys, "hidden_act", bias=keys.take("mlp_bias", bool)),
        norm=decoder.read_norm(keys),
    )


def _mistral(data: Mapping[str, JSON]) -> Translation:
    keys = Keys(data, MISTRAL_DEFAULTS, MISTRAL_INERT, of="mistral")
    sizes = decoder.read_sizes(keys, [ARCHITECTURE["mistral"]])
    attention = SoftmaxAttentionConfig(
        **decoder.read_heads(keys, sizes["hidden_size"], divides=False, kv_heads=PositiveInt | None, head_dim=PositiveInt | None),
        rope=rope.from_hf(keys, sizes["max_position_embeddings"]),
        window=keys.take("sliding_window", PositiveInt | None),
    )
    return decoder.assemble(
        keys,
        "mistral",
        sizes,
        kinds=[decoder.FULL] * sizes["num_layers"],
        attention={decoder.FULL: attention},
        mlp=decoder.read_mlp(keys, "hidden_act"),
        norm=decoder.read_norm(keys),
    )


def _llama_keys(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
    mlp = config.layer(0).branches["mlp"].block
    return {
        "hidden_act": decoder.activation_to_hf(config),
        "attention_bias": attention[0].qkv_bias,
        "mlp_bias": mlp.bias,
        **rope.to_hf(attention[0].rope),
    }


def _mistral_keys(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
    return {
        "hidden_act": decoder.activation_to_hf(config),
        "sliding_window": attention[0].window,
        **rope.to_hf(attention[0].rope),
    }


def from_hf(data: Mapping[str, JSON]) -> Translation:
    """The translation of a config.json of this family."""
    return {"llama": _llama, "mistral": _mistral}[data["model_type"]](data)


def to_hf(config: ModelConfig, model_type: str) -> dict[str, JSON]:
    """config.json of a model, as ``model_type``."""
    own = {"llama": _llama_keys, "mistral": _mistral_keys}[model_type]
    return decoder.to_hf(config, model_type, ARCHITECTURE[model_type], own, from_hf)


def rules(config: ModelConfig, model_type: str) -> list[Rule]:
    """The tensors of this family."""
    return decoder.rules(config, mlp_norm="post_attention_layernorm")


FAMILY = Family(tuple(ARCHITECTURE), ARCHITECTURE, from_hf, to_hf, rules)
