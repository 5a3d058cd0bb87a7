"""What a model is, as data: :class:`ModelConfig` and its layers."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from torch import nn

from . import counting
from .block import BlockConfig, NormConfig, ResidualConfig
from .registry import slots
from .schema import (
    JSON,
    Config,
    ConfigError,
    Finite,
    FrozenDict,
    NonNegativeFloat,
    PositiveInt,
    Slot,
    at,
    hints,
    join,
    nearest,
    parse,
    parse_block,
    to_plain,
)

NOT_BRANCHES = ("embed", "norm", "residual", "head", "rope_scaling")  # slots that stand elsewhere than in a sublayer
OWN_KEYS = ("slot", "multiplier")  # of a branch; the rest of its dict is the block's
NO_BRANCH_NAMES = {*dir(nn.Module()), "sites", "norms", "post_norms", "sublayers", "multipliers"}  # what a layer, a module, has itself


@dataclasses.dataclass(frozen=True)
class InitConfig(Config):
    """Initial values: matrices and the embedding from a normal distribution of this standard deviation, cut nowhere.

    Biases start at 0, norm weights at 1 - offset; blocks with parameters of their own kind say theirs.
    """

    std: NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class BranchConfig(Config):
    """One branch of a sublayer: a block and a factor on what it returns. In plain data both stand in one dict.

    A branch's key names its slot; a branch of another name says its slot: ``second=dict(slot="attention", type=...)``.
    """

    block: Any
    multiplier: Finite = 1.0

    @classmethod
    def from_key(cls, key: str, data: JSON, path: str) -> Self:
        """Read the branch that stands under ``key``."""
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {key!r} is no string")
        if isinstance(data, cls):
            return data
        if isinstance(data, BlockConfig):
            return cls(data)
        known = [s for s in slots() if s not in NOT_BRANCHES]
        if not isinstance(data, Mapping) or ("slot" not in data and key not in known):
            raise ConfigError(
                f"{path}: is {data!r}, no field of a layer and no slot{nearest(key, [*hints(LayerConfig), *known])}; "
                f"a branch is a dict with a 'type', and one of another name says its 'slot' ({', '.join(known)})"
            )
        slot = data.get("slot", key)
        if slot not in known:
            raise ConfigError(f"{join(path, 'slot')}: is {slot!r}; expected one of {', '.join(known)}{nearest(str(slot), known)}")
        multiplier = parse(Finite, data.get("multiplier", 1.0), join(path, "multiplier"))
        rest = {k: v for k, v in data.items() if k not in OWN_KEYS}
        return cls(parse_block(slot, rest, path, beside=OWN_KEYS), multiplier)

    def plain(self, key: str) -> dict[str, JSON]:
        """Plain data for the place under ``key``; slot and multiplier only where they say something."""
        own = {"slot": self.block.slot} if self.block.slot != key else {}
        return own | ({"multiplier": self.multiplier} if self.multiplier != 1.0 else {}) | self.block.to_dict()


@dataclasses.dataclass(frozen=True)
class LayerConfig(Config):
    """A decoder layer: a list of sublayers, each a list of branches on one normed read of the residual stream.

    ``norm`` stands before each sublayer (null: none), ``post_norm`` after each branch (Gemma 2 and 3, OLMo 2). Every further key is a branch.
    """

    norm: Annotated[NormConfig, Slot("norm")] | None
    branches: dict[str, BranchConfig]
    post_norm: Annotated[NormConfig, Slot("norm")] | None = None
    sublayers: tuple[tuple[str, ...], ...] = (("attention",), ("mlp",))

    @classmethod
    def from_dict(cls, data: Mapping[str, JSON], path: str = "", *, beside: Iterable[str] = ()) -> Self:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path}: is {data!r}; expected a dict")
        own = {k: v for k, v in data.items() if k in hints(cls) and k != "branches"}
        branches = {k: BranchConfig.from_key(k, v, join(path, k)) for k, v in data.items() if k not in own}
        if "norm" not in own:  # after the branches, of which a misspelt "norm" would be one
            raise ConfigError(f"{join(path, 'norm')}: is missing; expected a norm dict or null")
        with at(path):
            return cls(branches=branches, **own)

    def to_dict(self) -> dict[str, JSON]:
        own = {k: to_plain(getattr(self, k)) for k in hints(LayerConfig) if k != "branches"}
        return own | {k: b.plain(k) for k, b in self.branches.items()}

    def check(self) -> None:
        named = [name for sublayer in self.sublayers for name in sublayer]
        if not named or not all(self.sublayers):
            raise ConfigError(f"sublayers: is {to_plain(self.sublayers)!r}; expected at least one branch in each")
        for name in named:
            if name not in self.branches:
                raise ConfigError(f"{name}: is missing; sublayers names it{nearest(name, self.branches)}")
        for name in self.branches:
            if name in NO_BRANCH_NAMES or not name.isidentifier():
                raise ConfigError(f"{name}: cannot name a branch; choose another key")
            if named.count(name) != 1:
                raise ConfigError(
                    f"{name}: stands {named.count(name)} times in sublayers ({to_plain(self.sublayers)!r}); expected once{nearest(name, named)}"
                )

    def resolve(self, model: ModelConfig) -> Self:
        branches = {}
        for key, branch in self.branches.items():
            with at(key):
                branches[key] = dataclasses.replace(branch, block=branch.block.resolve(model))
        with at("norm"):
            norm = self.norm and self.norm.resolve(model)
        with at("post_norm"):
            post_norm = self.post_norm and self.post_norm.resolve(model)
        return dataclasses.replace(self, branches=branches, norm=norm, post_norm=post_norm)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Config):
    """A decoder language model as plain data. See docs/configs.md for every field, and ``presets`` for whole examples.

    Raises :class:`ConfigError` for anything unknown, mistyped, out of range or contradictory, at any depth.
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    max_position_embeddings: PositiveInt
    tie_embeddings: bool
    embed: Annotated[BlockConfig, Slot("embed")]
    residual: Annotated[ResidualConfig, Slot("residual")]
    layers: dict[str, LayerConfig]
    pattern: tuple[str, ...]
    final_norm: Annotated[NormConfig, Slot("norm")] | None
    head: Annotated[BlockConfig, Slot("head")]
    init: InitConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = {}
        for name, layer in self.layers.items():
            with at(f"layers.{name}"):
                layers[name] = layer.resolve(self)
        object.__setattr__(self, "layers", FrozenDict(layers))
        for name in ("embed", "residual", "final_norm", "head"):
            block = getattr(self, name)
            with at(name):
                object.__setattr__(self, name, block and block.resolve(self))

    def check(self) -> None:
        for i, name in enumerate(self.pattern):
            if name not in self.layers:
                raise ConfigError(
                    f"pattern[{i}]: is {name!r}; expected a name out of layers ({', '.join(self.layers)}){nearest(name, self.layers)}"
                )
        if not 1 <= len(self.pattern) <= self.num_layers:
            raise ConfigError(f"pattern: has {len(self.pattern)} entries; expected 1 to num_layers ({self.num_layers})")
        for name in self.layers:
            if name not in self.pattern:
                raise ConfigError(f"layers.{name}: is not in pattern ({', '.join(self.pattern)}); name it there or leave it out")

    @classmethod
    def from_dict(cls, data: Mapping[str, JSON], path: str = "", *, beside: Iterable[str] = ()) -> Self:
        """Read plain data (a dict, JSON); every error names the dotted path, what came and what is allowed."""
        return super().from_dict(data, path, beside=beside)

    def to_dict(self) -> dict[str, JSON]:
        """Plain JSON data, every value written out (derived ones too); ``from_dict`` of it gives an equal config."""
        return super().to_dict()

    def replace(self, path: str, value: Any) -> ModelConfig:
        """A copy with the value at a dotted path replaced: ``config.replace("layers.main.attention.window", 512)``.

        A whole block may be replaced by a dict or a config. Raises a ConfigError for a path that leads nowhere.
        """
        return self.replace_all({path: value})

    def replace_all(self, values: Mapping[str, Any]) -> ModelConfig:
        """A copy with the value at every dotted path replaced, as ``replace`` does: in order, and checked once all are in place."""
        data = self.to_dict()
        placed: list[str] = []
        for path, value in values.items():
            _place(data, path, value, new=any(path.startswith(f"{parent}.") for parent in placed))
            placed.append(path)
        return type(self).from_dict(data)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The name of every layer's config, in order: ``pattern`` cycled over ``num_layers``."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    def layer(self, index: int) -> LayerConfig:
        """The config of layer ``index``."""
        return self.layers[self.layer_types[index]]

    def num_params(self) -> int:
        """Number of parameters, a tied weight counted once."""
        return counting.num_params(self)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's matrix products in a training step (forward and backward, no recompute), causal pairs counted once."""
        return counting.flops_per_token(self, seq_len)

    def training_memory(self, batch: int, seq_len: int, **options: Any) -> counting.TrainingMemory:
        """Bytes that a training step takes, by kind, and their peak; the options are those of ``counting.training_memory``."""
        return counting.training_memory(self, batch, seq_len, **options)

    def to_json_string(self) -> str:
        """``to_dict`` as JSON, by the name that transformers' Trainer and its loggers call."""
        return json.dumps(self.to_dict(), indent=2)

    def get_text_config(self) -> types.SimpleNamespace:
        """Where transformers' Trainer writes a tokenizer's special tokens. A model config has none: an empty namespace, of no effect."""
        return types.SimpleNamespace()


TRAINERS_KEYS = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
_set_frozen = ModelConfig.__setattr__


def _set(config: ModelConfig, name: str, value: Any) -> None:
    """Frozen, but that transformers' Trainer may set what it sets on the config of whatever it trains, without an effect: a call has a
    cache where it is given one, and special tokens are the tokenizer's."""
    if name not in TRAINERS_KEYS:
        _set_frozen(config, name, value)


ModelConfig.__setattr__ = _set  # type: ignore[method-assign, assignment]


def _place(data: dict[str, Any], path: str, value: Any, *, new: bool) -> None:
    """Put a value into plain data; in a ``new`` block, whose defaults are not written out, also where nothing stands yet."""
    node: Any = data
    *parents, last = path.split(".")
    walked: list[str] = []
    for key in parents:
        if not isinstance(node, dict) or key not in node:
            raise ConfigError(_leads_nowhere(path, walked, key, node))
        node = node[key]
        walked.append(key)
    branch = len(parents) == 2 and parents[0] == "layers"
    optional = isinstance(node, dict) and last in OWN_KEYS
    if not isinstance(node, dict) or (last not in node and not (branch or optional or new)):
        raise ConfigError(_leads_nowhere(path, walked, last, node))
    node[last] = to_plain(value)


def _leads_nowhere(path: str, walked: list[str], key: str, node: Any) -> str:
    if not isinstance(node, dict):
        return f"{path}: {'.'.join(walked)} is {node!r}, which has no field {key!r}"
    where = f"of {'.'.join(walked)}" if walked else "of a model config"
    return f"{path}: {key!r} is no field {where}{nearest(key, node)}; fields: {', '.join(node)}"
