"""How the tensors of a Hugging Face checkpoint map to the parameters of a model, in both directions.

A rule binds one native parameter to the tensors that hold its values in a checkpoint. It says where each of them lies *inside* the
parameter, as a view of it; loading writes into the views, saving reads from them, and a view of a meta tensor has the shape that the
checkpoint must show. One function is thus the rule, its inverse and its effect on shapes.

A family makes its table of rules from a config. It gives rules for the blocks that it knows and none for others (a user's own block in
a family's model has no place in that family's checkpoints).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """Base of all rules: ``native`` is the name of the parameter in our model."""

    native: str

    @property
    @abstractmethod
    def sources(self) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make up the parameter, in order."""

    @abstractmethod
    def views(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """The place of each source inside ``parameter`` (shaped as in the checkpoint), sharing its storage."""


@dataclasses.dataclass(frozen=True)
class Rename(Rule):
    """The parameter is the checkpoint's tensor, under another name."""

    source: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def views(self, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter,)


@dataclasses.dataclass(frozen=True)
class Concat(Rule):
    """The parameter holds several tensors one below the other; ``rows`` is the first size of each, in the same order as ``parts``."""

    parts: tuple[str, ...]
    rows: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.parts

    def views(self, parameter: Tensor) -> tuple[Tensor, ...]:
        if parameter.shape[0] != sum(self.rows):
            raise ValueError(f"{self.native} has {parameter.shape[0]} rows; the rule joins {' + '.join(map(str, self.rows))}")
        return parameter.split(self.rows)


def fused_linear(
    native: str,
    sources: Mapping[str, str],
    rows: Mapping[str, int],
    *,
    packed: bool,
    bias: bool = False,
) -> list[Rule]:
    """The rules of a fused linear module: one joined parameter where the model packs it, one for each part where it stores them apart.

    ``native`` is the module's path (``layers.0.attention.qkv_proj``), ``sources`` gives the checkpoint's module for each part, in the
    order of the packed rows (``{"q_proj": "model.layers.0.self_attn.q_proj", ...}``), ``rows`` the output width of each part.
    """
    rules: list[Rule] = []
    for kind in ["weight", "bias"] if bias else ["weight"]:
        if packed:
            names = tuple(f"{source}.{kind}" for source in sources.values())
            rules.append(Concat(f"{native}.{kind}", names, tuple(rows[part] for part in sources)))
        else:
            rules += [Rename(f"{native}.{part}.{kind}", f"{source}.{kind}") for part, source in sources.items()]
    return rules


def check_table(rules: Sequence[Rule]) -> None:
    """Raise a ValueError where two rules claim one parameter, or one tensor of the checkpoint."""
    for what, names in (("parameter", [r.native for r in rules]), ("tensor", [s for r in rules for s in r.sources])):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"the table of rules names a {what} more than once: {', '.join(twice)}")
