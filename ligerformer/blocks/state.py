"""What flows from layer to layer, and what a branch may read besides.

The state is the only thing that passes from layer to layer, so that checkpointing, pipelines and graph capture see every tensor.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from .cache import Cache
    from .rope import Rope

PADDING = -1  # the document id of padding
AUX_LOSS = "aux_loss"  # reserved name in State.shared: a scalar that the decoder adds to the loss; branches' contributions are summed


class State(NamedTuple):
    """``stream`` belongs to the residual block and is opaque to everyone else; ``shared`` holds named tensors of the branches."""

    stream: Any
    shared: dict[str, Tensor]

    def flatten(self) -> tuple[tuple[Tensor, ...], Structure]:
        """All tensors as a tuple (the form in which torch.utils.checkpoint sees every gradient), and how to put them back."""
        leaves, spec = pytree.tree_flatten(tuple(self))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return tensors, Structure(spec, tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves))


class Structure(NamedTuple):
    """Where the tensors of a flattened state belong; leaves that are no tensors are kept here."""

    spec: Any
    others: tuple[Any, ...]

    def restore(self, tensors: tuple[Tensor, ...]) -> State:
        """The state out of its tensors."""
        queue = iter(tensors)
        leaves = [next(queue) if other is None else other[0] for other in self.others]
        return State(*pytree.tree_unflatten(leaves, self.spec))


@dataclasses.dataclass
class Context:
    """What a branch may read and no block owns. Nothing is passed between layers through it.

    ``positions`` (1 or B, T) int64; ``document_ids`` (B, T) or None where each row is one document; ``cache`` the key-value cache of a
    generating call or None.
    """

    positions: Tensor
    document_ids: Tensor | None = None
    cache: Cache | None = None
    tables: dict[str, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    def rope(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin (1 or B, T, R/2) in fp32 of a rope, computed once a forward for each distinct rope config."""
        tables = self.tables.get(rope.key)
        if tables is None:
            tables = self.tables[rope.key] = rope(self.positions)
        return tables


def documents_of(
    tokens: tuple[int, int],  # B, T
    document_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor | None:
    """Document ids (B, T) of a call, or None where every row is one document.

    Padding (0 in ``attention_mask`` (B, T)) is a document of its own, -1. Without ids and mask, ``position_ids`` (B, T) that do not go up by
    one start a new document. Document ids are compared for equality alone; the tokens of a document lie side by side.
    """
    if document_ids is None and attention_mask is None:
        if position_ids is None:
            return None
        starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
        return torch.nn.functional.pad(starts.cumsum(1), (1, 0)).expand(tokens)
    if attention_mask is None:
        return document_ids
    inside = torch.zeros_like(attention_mask, dtype=torch.int64) if document_ids is None else document_ids
    return torch.where(attention_mask.bool(), inside, PADDING)


def positions_of(document_ids: Tensor) -> Tensor:
    """Positions (B, T) that count each document's tokens from 0, given document ids (B, T).

    The tokens of a document lie side by side, but for padding (-1), which is passed over and counts nothing (its own positions are 0).
    """
    kept = document_ids != PADDING
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    last_kept = torch.where(kept, index, -1).cummax(1).values  # the last token up to here that is no padding, -1 for none
    before = torch.nn.functional.pad(last_kept[:, :-1], (1, 0), value=-1)
    starts = kept & ((before < 0) | (document_ids.gather(1, before.clamp(min=0)) != document_ids))
    count = kept.cumsum(1) - 1
    first = torch.where(starts, count, 0).cummax(1).values
    return torch.where(kept, count - first, 0)


def shifted_labels(labels: Tensor, document_ids: Tensor | None) -> Tensor:
    """Labels (B, T) moved one to the left: what each token is to predict; -100 for the last token of a row and of a document."""
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    if document_ids is not None:
        ends = torch.nn.functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1), value=True)
        shifted = shifted.masked_fill(ends, -100)
    return shifted
