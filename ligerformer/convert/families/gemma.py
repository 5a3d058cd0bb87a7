"""Gemma 1, 2 and 3 (text; of a ``gemma3`` checkpoint with a vision tower the text part is read, and saved as ``gemma3_text``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...configs import ConfigError, ModelConfig, SoftmaxAttentionConfig
from ...configs.schema import PositiveFloat, PositiveInt
from ..rules import Rule
from . import decoder, rope
from .base import JSON, CannotExpress, Family, Translation
from .keys import COMMON, Inert, Keys, inert, take_dtype

ARCHITECTURE = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}

# Class defaults of transformers' GemmaConfig, Gemma2Config and Gemma3TextConfig. The published text parts of Gemma 3 lean on theirs.
GEMMA_DEFAULTS: dict[str, JSON] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "attention_bias": False,
}
GEMMA2_DEFAULTS: dict[str, JSON] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3_DEFAULTS: dict[str, JSON] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
GEMMA3_PATTERN = 6  # every sixth layer is full, where the file does not say

TANH = "gelu_pytorch_tanh"
BOTH_WAYS = {"use_bidirectional_attention": Inert("attention is causal", (False, None))}
GEMMA_INERT = COMMON | BOTH_WAYS | {"hidden_activation": Inert("the class reads hidden_act", (None, TANH))}
GEMMA2_INERT = COMMON | BOTH_WAYS | {"hidden_act": Inert("the class reads hidden_activation", (None, TANH))}
MULTIMODAL_INERT = COMMON | inert(
    "of the vision tower, which is not read",
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "initializer_range",
)

# The old dialect's key of the rope base of each layer type.
THETAS = {decoder.SLIDING: "rope_local_base_freq", decoder.FULL: "rope_theta"}

VISION_TENSORS = (
    r"(?:model\.)?(?P<vision_tower>vision_tower)\..*",
    r"(?:model\.)?(?P<multi_modal_projector>multi_modal_projector)\..*",
)
TEXT_PART = (  # the text model's names inside a multimodal checkpoint: those on the hub, and those of newer versions in memory
    (r"language_model\.model\.", "model."),
    (r"model\.language_model\.", "model."),
    (r"language_model\.lm_head\.", "lm_head."),
)


def _gemma(data: Mapping[str, JSON]) -> Translation:
    keys = Keys(data, GEMMA_DEFAULTS, GEMMA_INERT, of="gemma")
    sizes = decoder.read_sizes(keys, [ARCHITECTURE["gemma"]])
    bias = keys.take("attention_bias", bool)
    attention = SoftmaxAttentionConfig(
        **decoder.read_heads(keys, sizes["hidden_size"], divides=False),
        rope=rope.from_hf(keys, sizes["max_position_embeddings"]),
        qkv_bias=bias,
        o_bias=bias,
    )
    return decoder.assemble(
        keys,
        "gemma",
        sizes,
        kinds=[decoder.FULL] * sizes["num_layers"],
        attention={decoder.FULL: attention},
        # The published files say "gelu" and the weights were trained with its tanh form; transformers reads it so too.
        mlp=decoder.read_mlp(keys, "hidden_act", {"gelu": "gelu_tanh"}),
        norm=_norm(keys),
        embed_scale=sizes["hidden_size"] ** 0.5,
    )


def _gemma2(data: Mapping[str, JSON]) -> Translation:
    keys = Keys(data, GEMMA2_DEFAULTS, GEMMA2_INERT, of="gemma2")
    sizes = decoder.read_sizes(keys, [ARCHITECTURE["gemma2"]])
    default = [decoder.FULL if i % 2 else decoder.SLIDING for i in range(sizes["num_layers"])]
    kinds = decoder.read_layer_types(keys, sizes["num_layers"], default)
    shared = rope.from_hf(keys, sizes["max_position_embeddings"])
    return _second_and_third(keys, "gemma2", sizes, kinds, dict.fromkeys(THETAS, shared))


def _gemma3_text(data: Mapping[str, JSON], path: str = "") -> Translation:
    keys = Keys(data, GEMMA3_DEFAULTS, GEMMA2_INERT, of="gemma3_text", path=path)
    sizes = decoder.read_sizes(keys, [ARCHITECTURE["gemma3_text"]])
    kinds = _pattern(keys, sizes["num_layers"])
    ropes = rope.from_hf_by_layer_type(keys, sizes["max_position_embeddings"], THETAS)
    return _second_and_third(keys, "gemma3_text", sizes, kinds, ropes, per_head_norms=True)


def _second_and_third(
    keys: Keys,
    model_type: str,
    sizes: Mapping[str, Any],
    kinds: Sequence[str],
    ropes: Mapping[str, Any],
    *,
    per_head_norms: bool = False,
) -> Translation:
    norm = _norm(keys)
    bias = keys.take("attention_bias", bool)
    common: dict[str, Any] = dict(
        **decoder.read_heads(keys, sizes["hidden_size"], divides=True),
        qk_norm=norm if per_head_norms else None,
        softcap=keys.take("attn_logit_softcapping", PositiveFloat | None),
        query_pre_attn_scalar=float(keys.take("query_pre_attn_scalar", PositiveInt)),
        qkv_bias=bias,
        o_bias=bias,
    )
    window = decoder.read_window(keys, kinds)
    return decoder.assemble(
        keys,
        model_type,
        sizes,
        kinds=kinds,
        attention={
            decoder.FULL: SoftmaxAttentionConfig(**common, rope=ropes[decoder.FULL]),
            decoder.SLIDING: SoftmaxAttentionConfig(**common, rope=ropes[decoder.SLIDING], window=window),
        },
        mlp=decoder.read_mlp(keys, "hidden_activation"),
        norm=norm,
        post_norm=norm,
        embed_scale=sizes["hidden_size"] ** 0.5,
        softcap=keys.take("final_logit_softcapping", PositiveFloat | None),
    )


def _gemma3(data: Mapping[str, JSON]) -> Translation:
    top = Keys(data, {"tie_word_embeddings": True}, MULTIMODAL_INERT, of="gemma3")
    for name in ("model_type", "architectures"):
        top.get(name, Any)
    text = top.inner("text_config", {}, {})
    if text is None:
        raise ConfigError("text_config: is missing; expected a dict, the config of the text part")
    kind = text.data.get("model_type", "gemma3_text")
    if kind != "gemma3_text":
        raise ConfigError(f"text_config.model_type: is {kind!r}; expected 'gemma3_text'")
    take_dtype(top)
    tie = top.take("tie_word_embeddings", bool)
    if text.data.get("tie_word_embeddings", tie) != tie:
        raise ConfigError(f"text_config.tie_word_embeddings: is {not tie} while tie_word_embeddings is {tie}; expected both alike")
    top.finish()
    part = _gemma3_text(dict(text.data) | {"tie_word_embeddings": tie}, "text_config")
    shared = {name: value for name, value in top.found_inert.items() if name in COMMON or name == "dtype"}
    return dataclasses.replace(
        part,
        defaults=top.defaulted | part.defaults,
        inert=shared | part.inert,
        ignored_tensors=(*part.ignored_tensors, *VISION_TENSORS),
        renamed_tensors=TEXT_PART,
    )


def _norm(keys: Keys) -> Any:
    return decoder.read_norm(keys, offset=1.0, casting="fp32")


def _pattern(keys: Keys, num_layers: int) -> list[str]:
    """The attention of each layer: ``layer_types``, or every n-th layer full.

    transformers writes ``_sliding_window_pattern`` and never reads it, so beside ``layer_types`` it may say anything; otherwise the keys
    must agree.
    """
    said = keys.get("sliding_window_pattern", PositiveInt)
    kinds = decoder.read_layer_types(keys, num_layers, _every(said or GEMMA3_PATTERN, num_layers))
    written = keys.get("_sliding_window_pattern", PositiveInt) if keys.data.get("layer_types") is None else None
    keys.idle("_sliding_window_pattern")
    for name, n in (("sliding_window_pattern", said), ("_sliding_window_pattern", written)):
        if n is not None and _every(n, num_layers) != kinds:
            raise ConfigError(f"{keys.at(name)}: is {n}, which is not what the layers of this file follow; leave it out")
    return kinds


def _every(n: int, num_layers: int) -> list[str]:
    return [decoder.SLIDING if (i + 1) % n else decoder.FULL for i in range(num_layers)]


def _gemma_keys(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
    return {
        "hidden_act": decoder.activation_to_hf(config),
        "attention_bias": attention[0].qkv_bias,
        **rope.to_hf(attention[0].rope),
    }


def _gemma2_keys(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
    return _second_and_third_keys(config, attention) | rope.to_hf(attention[0].rope)


def _gemma3_keys(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
    kinds = decoder.kinds_of(attention)
    data = _second_and_third_keys(config, attention)
    data |= rope.to_hf_by_layer_type({kind: block.rope for kind, block in zip(kinds, attention)}, THETAS)
    # Versions that do not know layer_types read the pattern.
    patterns = [n for n in (GEMMA3_PATTERN, *range(1, len(kinds) + 2)) if _every(n, len(kinds)) == kinds]
    return data | ({"sliding_window_pattern": patterns[0]} if patterns else {})


def _second_and_third_keys(config: ModelConfig, attention: decoder.Attentions) -> dict[str, JSON]:
    kinds = decoder.kinds_of(attention)
    head: Any = config.head
    scalar = attention[0].query_pre_attn_scalar or attention[0].head_dim
    data: dict[str, JSON] = {
        "hidden_activation": decoder.activation_to_hf(config),
        "attention_bias": attention[0].qkv_bias,
        "query_pre_attn_scalar": max(1, round(scalar)),
        "attn_logit_softcapping": attention[0].softcap,
        "final_logit_softcapping": head.softcap,
        "layer_types": kinds,
    }
    if decoder.SLIDING in kinds:
        data["sliding_window"] = attention[kinds.index(decoder.SLIDING)].window
    return data


READERS = {"gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3_text, "gemma3": _gemma3}
WRITERS = {"gemma": _gemma_keys, "gemma2": _gemma2_keys, "gemma3_text": _gemma3_keys}


def from_hf(data: Mapping[str, JSON]) -> Translation:
    """The translation of a config.json of this family."""
    return READERS[data["model_type"]](data)


def to_hf(config: ModelConfig, model_type: str) -> dict[str, JSON]:
    """config.json of a model, as ``model_type``."""
    if model_type not in WRITERS:
        raise CannotExpress(model_type, ["a text model, which is saved as 'gemma3_text'"])
    return decoder.to_hf(config, model_type, ARCHITECTURE[model_type], WRITERS[model_type], from_hf)


def rules(config: ModelConfig, model_type: str) -> list[Rule]:
    """The tensors of this family."""
    if model_type == "gemma":
        return decoder.rules(config, mlp_norm="post_attention_layernorm")
    post_norms = {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
    return decoder.rules(config, mlp_norm="pre_feedforward_layernorm", post_norms=post_norms)


FAMILY = Family(tuple(ARCHITECTURE), ARCHITECTURE, from_hf, to_hf, rules, read_only=("gemma3",))
