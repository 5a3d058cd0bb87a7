"""The key-value cache of a generating model: one entry a branch that declares one, found by the branch's module path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .state import positions_of


class CacheSpec(Protocol):
    """What a branch's ``cache_spec(batch, capacity, dtype)`` returns: a description that can allocate its entry."""

    def allocate(self, device: torch.device) -> Any:
        """The entry, empty."""


class Visible(NamedTuple):
    """Keys and values (B, S, Hkv, D) that the new queries may see, and the slot of the first query among them."""

    keys: Tensor
    values: Tensor
    query_start: int
    first_slot: int  # position in the whole sequence of keys[:, 0]


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """Keys and values of ``capacity`` tokens, or of the last ``window`` alone."""

    batch: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None

    def allocate(self, device: torch.device) -> KVEntry:
        return KVEntry(self, device)


class KVEntry:
    """One branch's keys and values.

    With a window only the last ``window - 1`` tokens are ever needed again: the buffer has room for twice the window, and what is still
    visible moves to its front when it is full, so that visible keys always lie side by side and moving costs one copy a window.
    """

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        self.spec = spec
        self.size = spec.capacity if spec.window is None else min(spec.capacity, 2 * spec.window)
        shape = (spec.batch, self.size, spec.num_kv_heads, spec.head_dim)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty(shape, dtype=spec.dtype, device=device)
        self.end = 0  # filled part of the buffer
        self.first_slot = 0  # position in the whole sequence of the buffer's first token

    def append(self, k: Tensor, v: Tensor) -> Visible:  # (B, T, Hkv, D) each
        """Store the keys and values of T new tokens; what they may see (their own included)."""
        new = k.shape[1]
        if self.end + new > self.size:
            if self.spec.window is None:
                raise ValueError(f"the cache holds {self.size} tokens, {self.end} are in use and {new} came; make a larger one")
            kept = min(self.end, self.spec.window - 1)
            if kept + new > self.size:
                return self._append_past_the_buffer(k, v, kept)
            for buffer in (self.keys, self.values):
                buffer[:, :kept] = buffer[:, self.end - kept : self.end].clone()
            self.first_slot += self.end - kept
            self.end = kept
        start, self.end = self.end, self.end + new
        self.keys.narrow(1, start, new).copy_(k)
        self.values.narrow(1, start, new).copy_(v)
        return Visible(self.keys.narrow(1, 0, self.end), self.values.narrow(1, 0, self.end), start, self.first_slot)

    def _append_past_the_buffer(self, k: Tensor, v: Tensor, kept: int) -> Visible:
        """A long prompt sees itself in full; only its last ``window - 1`` tokens are stored."""
        all_keys = torch.cat([self.keys[:, self.end - kept : self.end], k], dim=1)
        all_values = torch.cat([self.values[:, self.end - kept : self.end], v], dim=1)
        first_slot = self.first_slot + self.end - kept
        stored = min((self.spec.window or 1) - 1, all_keys.shape[1])
        self.keys[:, :stored] = all_keys[:, all_keys.shape[1] - stored :]
        self.values[:, :stored] = all_values[:, all_values.shape[1] - stored :]
        self.first_slot, self.end = first_slot + all_keys.shape[1] - stored, stored
        return Visible(all_keys, all_values, kept, first_slot)


class Cache:
    """Entries by module path, and what is known of the tokens that are in them.

    ``length`` counts the tokens (slots) that went through; ``document_ids`` (B, capacity) is kept only where rows are padded or packed.
    """

    def __init__(self, specs: Mapping[str, CacheSpec], batch: int, capacity: int, device: torch.device) -> None:
        self.batch, self.capacity, self.device = batch, capacity, device
        self.entries = {path: spec.allocate(device) for path, spec in specs.items()}
        self.length = 0
        self.document_ids: Tensor | None = None
        self.next_positions: Tensor | None = None  # (B, 1), where rows differ

    def __getitem__(self, path: str) -> Any:
        return self.entries[path]

    def positions_after(self, new: int, document_ids: Tensor | None) -> Tensor:
        """Positions (1 or B, T) of ``new`` tokens: they count on, and from 0 where a new document starts."""
        counted_on = self.next_positions + torch.arange(new, device=self.device)
        if document_ids is None:
            return counted_on
        ids = torch.cat([self._last_document(), document_ids], dim=1)
        restarted = positions_of(ids)[:, 1:]
        same = (ids[:, 1:] == ids[:, :-1]).cumprod(1).bool()  # up to the first new document
        return torch.where(same, counted_on, restarted)

    def extend(self, new: int, document_ids: Tensor | None, positions: Tensor) -> Tensor | None:
        """Account for ``new`` tokens with these document ids (B, T) and positions, before the layers see them.

        Returns their document ids: without any, they go on with their row's last document. None while every row is one document.
        """
        if self.length + new > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {self.length} are in use and {new} came; make a larger one")
        if document_ids is not None and self.document_ids is None:
            self.document_ids = torch.zeros(self.batch, self.capacity, dtype=torch.int64, device=self.device)
        elif document_ids is None and self.document_ids is not None:
            document_ids = self._last_document().expand(-1, new)
        if document_ids is not None:
            self.document_ids[:, self.length : self.length + new] = document_ids
        self.next_positions = positions[:, -1:] + 1
        self.length += new
        return document_ids

    def _last_document(self) -> Tensor:
        """(B, 1): the document that each row's last token belongs to."""
        if self.document_ids is None:
            return torch.zeros(self.batch, 1, dtype=torch.int64, device=self.device)
        return self.document_ids[:, self.length - 1 : self.length]

    def key_document_ids(self, visible: Visible) -> Tensor | None:
        """Document ids (B, S) of the visible keys."""
        if self.document_ids is None:
            return None
        return self.document_ids[:, visible.first_slot : visible.first_slot + visible.keys.shape[1]]
