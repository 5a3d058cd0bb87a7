"""What the families have in common: a decoder of attention and gated MLP layers, its config.json both ways, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from ...configs import (
    AddConfig,
    BranchConfig,
    ConfigError,
    GatedMLPConfig,
    InitConfig,
    LayerConfig,
    LMHeadConfig,
    ModelConfig,
    RMSNormConfig,
    SoftmaxAttentionConfig,
    TokenEmbeddingConfig,
)
from ...configs.schema import Bound, NonNegativeFloat, PositiveInt
from ..rules import Rename, Rule, fused_linear
from . import rope
from .base import JSON, CannotExpress, Translation
from .keys import Keys, take_dtype

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # names of transformers and ours
LayerType = Literal["full_attention", "sliding_attention"]
FULL, SLIDING = get_args(LayerType)
Attentions = Sequence[Any]  # the SoftmaxAttentionConfig of each layer, with a rope
LAYER_NAMES = {FULL: "global", SLIDING: "local"}  # in a config that has both
SUBLAYERS = (("attention",), ("mlp",))

# Buffers that files of old versions of transformers carry; they follow from the config.
ROTARY_BUFFERS = r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.(?P<rotary_frequencies>inv_freq)"


def read_sizes(keys: Keys, architectures: Sequence[str]) -> dict[str, Any]:
    """The fields of a model config that every family reads alike."""
    keys.get("model_type", str)
    for name in keys.get("architectures", tuple[str, ...] | None) or ():
        if name not in architectures:
            raise ConfigError(f"{keys.at('architectures')}: names {name!r}; expected {' or '.join(map(repr, architectures))}")
    take_dtype(keys)
    return {
        "vocab_size": keys.take("vocab_size", PositiveInt),
        "hidden_size": keys.take("hidden_size", PositiveInt),
        "num_layers": keys.take("num_hidden_layers", PositiveInt),
        "max_position_embeddings": keys.take("max_position_embeddings", PositiveInt),
        "tie_embeddings": keys.take("tie_word_embeddings", bool),
        "init": InitConfig(std=keys.take("initializer_range", Annotated[float, Bound(at_least=0.0, at_most=1.0)])),
    }


def read_heads(keys: Keys, hidden_size: int, *, divides: bool, kv_heads: Any = PositiveInt, head_dim: Any = PositiveInt) -> dict[str, Any]:
    """Numbers and width of the heads. ``divides``: transformers demands that num_attention_heads divides hidden_size. A ``None`` that
    the hints allow means as many kv heads as heads, and hidden_size / heads."""
    heads = keys.take("num_attention_heads", PositiveInt)
    kv = keys.take("num_key_value_heads", kv_heads)
    if kv is None:
        kv = _derive(keys, "num_key_value_heads", heads)
    if heads % kv:
        raise ConfigError(f"{keys.at('num_key_value_heads')}: is {kv}; expected a divisor of num_attention_heads ({heads})")
    dim = keys.take("head_dim", head_dim)
    if (divides or dim is None) and hidden_size % heads:
        raise ConfigError(f"{keys.at('hidden_size')}: is {hidden_size}; expected a multiple of num_attention_heads ({heads})")
    if dim is None:
        dim = _derive(keys, "head_dim", hidden_size // heads)
    return {"num_heads": heads, "num_kv_heads": kv, "head_dim": dim}


def _derive(keys: Keys, name: str, value: int) -> int:
    return value if name in keys.data else keys.default(name, value)


def read_mlp(keys: Keys, activation_key: str, more: Mapping[str, str] | None = None, *, bias: bool = False) -> GatedMLPConfig:
    """The MLP; ``more`` are activation names that this model type alone understands."""
    known: dict[str, Any] = ACTIVATIONS | dict(more or {})
    activation = keys.take(activation_key, Literal[tuple(known)])
    return GatedMLPConfig(keys.take("intermediate_size", PositiveInt), activation=known[activation], bias=bias)


def read_norm(keys: Keys, **options: Any) -> RMSNormConfig:
    """The norm that stands everywhere in the model."""
    return RMSNormConfig(eps=keys.take("rms_norm_eps", NonNegativeFloat), **options)


def read_layer_types(keys: Keys, num_layers: int, default: Sequence[str]) -> list[str]:
    """The attention of each layer: ``layer_types``, or what the model type has where the file does not say."""
    given = keys.get("layer_types", tuple[LayerType, ...] | None)
    if given is None:
        return list(default)
    if len(given) != num_layers:
        raise ConfigError(f"{keys.at('layer_types')}: has {len(given)} entries; expected num_hidden_layers ({num_layers})")
    return list(given)


def read_window(keys: Keys, kinds: Sequence[str]) -> int | None:
    """The window of the sliding layers, and None where there are none."""
    if SLIDING not in kinds:
        keys.idle("sliding_window")
        return None
    window = keys.take("sliding_window", PositiveInt | None)
    if window is None:
        raise ConfigError(f"{keys.at('sliding_window')}: is null; expected an int, as there are layers of {SLIDING!r}")
    return window


def assemble(
    keys: Keys,
    model_type: str,
    sizes: Mapping[str, Any],
    *,
    kinds: Sequence[str],
    attention: Mapping[str, SoftmaxAttentionConfig],
    mlp: GatedMLPConfig,
    norm: RMSNormConfig,
    post_norm: RMSNormConfig | None = None,
    embed_scale: float | None = None,
    softcap: float | None = None,
    ignored_tensors: Sequence[str] = (),
) -> Translation:
    """The translation, once every key is accounted for. ``attention`` has one entry for each of ``kinds``, the attention type of each layer."""
    keys.finish()
    names = {kind: LAYER_NAMES[kind] for kind in dict.fromkeys(kinds)} if len(set(kinds)) > 1 else {kinds[0]: "main"}
    layers = {
        name: LayerConfig(norm, {"attention": BranchConfig(attention[kind]), "mlp": BranchConfig(mlp)}, post_norm, SUBLAYERS)
        for kind, name in names.items()
    }
    config = ModelConfig(
        **sizes,
        embed=TokenEmbeddingConfig(scale=embed_scale),
        residual=AddConfig(),
        layers=layers,
        pattern=tuple(names[kind] for kind in shortest_cycle(kinds)),
        final_norm=norm,
        head=LMHeadConfig(softcap=softcap),
    )
    return Translation(config, model_type, keys.defaulted, keys.found_inert, (ROTARY_BUFFERS, *ignored_tensors))


def shortest_cycle(kinds: Sequence[str]) -> list[str]:
    """The shortest beginning of ``kinds`` that gives all of it when it is repeated."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return list(kinds[:length])
    return list(kinds)


# ------------------------------------------------------------------------------------------------------------------ to config.json


def to_hf(
    config: ModelConfig,
    model_type: str,
    architecture: str,
    own: Callable[[ModelConfig, Attentions], Mapping[str, JSON]],
    from_hf: Callable[[Mapping[str, JSON]], Translation],
) -> dict[str, JSON]:
    """config.json of ``config``; ``own`` gives the keys of the model type, from the config and the attention of each layer.

    What is written is translated back and compared, so that nothing the config says is lost unseen.
    """
    strangers = list(_strangers(config))
    if strangers:
        raise CannotExpress(model_type, strangers)
    attention = [config.layer(i).branches["attention"].block for i in range(config.num_layers)]
    first: Any = config.layer(0)
    data = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.branches["mlp"].block.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention[0].num_heads,
        "num_key_value_heads": attention[0].num_kv_heads,
        "head_dim": attention[0].head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": first.norm.eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": min(config.init.std, 1.0),
        **own(config, attention),
    }
    try:
        back = from_hf(data).config
    except ConfigError as error:
        raise CannotExpress(model_type, [str(error)]) from None
    differences = list(_differences(config, back))
    if differences:
        raise CannotExpress(model_type, differences)
    return data


def activation_to_hf(config: ModelConfig) -> str:
    """transformers' name of the activation of the first layer."""
    block: Any = config.layer(0).branches["mlp"].block
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == block.activation)


def kinds_of(attention: Attentions) -> list[str]:
    """transformers' name of the attention of each layer."""
    return [FULL if block.window is None else SLIDING for block in attention]


def _strangers(config: ModelConfig) -> Iterator[str]:
    """Blocks that no family here has, by path."""
    expected: list[tuple[str, Any, Any]] = [
        ("embed", config.embed, TokenEmbeddingConfig),
        ("residual", config.residual, AddConfig),
        ("final_norm", config.final_norm, RMSNormConfig),
        ("head", config.head, LMHeadConfig),
    ]
    for name, layer in config.layers.items():
        path = f"layers.{name}"
        expected.append((f"{path}.norm", layer.norm, RMSNormConfig))
        if layer.sublayers != SUBLAYERS:
            yield f"{path}.sublayers: is {[list(s) for s in layer.sublayers]}; expected {[list(s) for s in SUBLAYERS]}"
        if layer.post_norm is not None:
            expected.append((f"{path}.post_norm", layer.post_norm, RMSNormConfig))
        for key, branch in layer.branches.items():
            known = {"attention": SoftmaxAttentionConfig, "mlp": GatedMLPConfig}.get(key)
            if known is not None:
                expected.append((f"{path}.{key}", branch.block, known))
            block: Any = branch.block
            if isinstance(block, SoftmaxAttentionConfig):
                if block.rope is None:
                    yield f"{path}.{key}.rope: is null; expected a rope"
                elif block.rope.scaling is not None:
                    expected.append((f"{path}.{key}.rope.scaling", block.rope.scaling, tuple(rope.TYPES.values())))
                if block.qk_norm is not None:
                    expected.append((f"{path}.{key}.qk_norm", block.qk_norm, RMSNormConfig))
    for path, block, known in expected:
        if not isinstance(block, known):
            types = known if isinstance(known, tuple) else (known,)
            is_ = "is null" if block is None else f"has type {block.type!r}"
            yield f"{path}: {is_}; expected {' or '.join(repr(t.type) for t in types)}"


def _differences(config: ModelConfig, back: ModelConfig) -> Iterator[str]:
    """Where ``back`` means another model. Names of layers, the spelling of the pattern and ``packed`` (how a product's weights are stored,
    of which a config.json knows nothing) do not count."""
    ours, theirs = config.to_dict(), back.to_dict()
    pairs = [("", {k: v for k, v in ours.items() if k not in ("layers", "pattern")}, theirs)]
    for i, name in enumerate(config.layer_types):
        pairs.append((f"layers.{name}.", config.layer(i).to_dict(), back.layer(i).to_dict()))
    seen: dict[str, str] = {}
    for prefix, a, b in pairs:
        for path, is_, says in _unequal(a, b):
            seen.setdefault(f"{prefix}{path}", f"{prefix}{path}: is {is_!r}, where it can say {says!r} alone")
    yield from seen.values()


def _unequal(a: Mapping[str, JSON], b: Mapping[str, JSON], path: str = "") -> Iterator[tuple[str, JSON, JSON]]:
    for key, value in a.items():
        other = b.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _unequal(value, other, f"{path}{key}.")
        elif value != other and key != "packed":
            yield f"{path}{key}", value, other
    for key in b.keys() - a.keys():
        if path:
            yield f"{path}{key}", None, b[key]


# ------------------------------------------------------------------------------------------------------------------------ tensors


def rules(config: ModelConfig, *, mlp_norm: str, post_norms: Mapping[str, str] | None = None) -> list[Rule]:
    """The tensors of a model. ``mlp_norm`` is the checkpoint's name of the norm before the MLP, ``post_norms`` those after the branches.

    Blocks of other types than a family has get no rules.
    """
    found: list[Rule] = []
    if isinstance(config.embed, TokenEmbeddingConfig):
        found.append(Rename("embed.weight", "model.embed_tokens.weight"))
    norms = {"attention": "input_layernorm", "mlp": mlp_norm}
    for i in range(config.num_layers):
        found += _layer_rules(config.layer(i), f"layers.{i}", f"model.layers.{i}", norms, post_norms or {})
    if isinstance(config.final_norm, RMSNormConfig):
        found.append(Rename("final_norm.weight", "model.norm.weight"))
    if isinstance(config.head, LMHeadConfig) and not config.tie_embeddings:
        found.append(Rename("head.weight", "lm_head.weight"))
    return found


def _layer_rules(layer: LayerConfig, ours: str, theirs: str, norms: Mapping[str, str], post_norms: Mapping[str, str]) -> list[Rule]:
    found: list[Rule] = []
    for j, sublayer in enumerate(layer.sublayers):
        if isinstance(layer.norm, RMSNormConfig) and sublayer[0] in norms:
            found.append(Rename(f"{ours}.norms.{j}.weight", f"{theirs}.{norms[sublayer[0]]}.weight"))
    for key, branch in layer.branches.items():
        block: Any = branch.block
        if key == "attention" and isinstance(block, SoftmaxAttentionConfig):
            found += _attention_rules(block, f"{ours}.attention", f"{theirs}.self_attn")
        elif key == "mlp" and isinstance(block, GatedMLPConfig):
            found += _mlp_rules(block, f"{ours}.mlp", f"{theirs}.mlp")
        if isinstance(layer.post_norm, RMSNormConfig) and key in post_norms:
            found.append(Rename(f"{ours}.post_norms.{key}.weight", f"{theirs}.{post_norms[key]}.weight"))
    return found


def _attention_rules(block: SoftmaxAttentionConfig, ours: str, theirs: str) -> list[Rule]:
    sources = {part: f"{theirs}.{part}" for part in block.widths}
    found = fused_linear(f"{ours}.qkv_proj", sources, block.widths, packed=block.packed, bias=block.qkv_bias)
    found += _linear(f"{ours}.o_proj", f"{theirs}.o_proj", block.o_bias)
    if isinstance(block.qk_norm, RMSNormConfig):
        found += [Rename(f"{ours}.{name}.weight", f"{theirs}.{name}.weight") for name in ("q_norm", "k_norm")]
    return found


def _mlp_rules(block: GatedMLPConfig, ours: str, theirs: str) -> list[Rule]:
    rows = {"gate_proj": block.intermediate_size, "up_proj": block.intermediate_size}
    sources = {part: f"{theirs}.{part}" for part in rows}
    found = fused_linear(f"{ours}.gate_up_proj", sources, rows, packed=block.packed, bias=block.bias)
    return found + _linear(f"{ours}.down_proj", f"{theirs}.down_proj", block.bias)


def _linear(ours: str, theirs: str, bias: bool) -> list[Rule]:
    return [Rename(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in (["weight", "bias"] if bias else ["weight"])]
