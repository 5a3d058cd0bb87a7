"""The residual stream as a block: one *site* a sublayer, the *ends* once a model.

A residual block is a class with two module classes, ``Site`` and ``Ends``, both built as ``(config, model_config, index)``: a site's index
counts the sublayers of the whole model, the ends' is -1.

    normed, state = site.read(state, norm)              # norm may be None
    state = site.write(state, ys, post_norms, shared)   # ys and post_norms one a branch; a post norm may be None
    state = ends.expand(x)                              # x (B, T, C): the embedding
    h = ends.collapse(state, final_norm)                # (B, T, C)
    state = ends.settle(state)                          # completes a deferred write
    ends.hidden(state)                                  # of a settled state: (B, T, C), or (B, T, n, C) for n streams

A write may be deferred to the next read or collapse, so that add and norm become one kernel. What is deferred is activations, never parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..configs import AddConfig, ModelConfig
from ..configs.registry import block
from .norm import Norm
from .state import State


def apply_post_norms(ys: Sequence[Tensor], post_norms: Sequence[nn.Module | None]) -> list[Tensor]:
    """Each branch's output through its post norm, where it has one."""
    return [y if norm is None else norm(y) for y, norm in zip(ys, post_norms, strict=True)]


def _add_and_norm(stream: tuple[Tensor, Tensor | None], norm: Norm | None) -> tuple[Tensor, Tensor]:
    """(norm(x + pending), x + pending)."""
    x, pending = stream
    if pending is None:
        return (x if norm is None else norm(x)), x
    if norm is None:
        x = x + pending
        return x, x
    return norm.add(pending, x)


class AddSite(nn.Module):
    """x + y; the stream is (x, the branch output that is yet to be added or None)."""

    def __init__(self, config: AddConfig, model_config: ModelConfig, index: int) -> None:
        super().__init__()

    def read(self, state: State, norm: Norm | None) -> tuple[Tensor, State]:
        normed, x = _add_and_norm(state.stream, norm)
        return normed, State((x, None), state.shared)

    def write(self, state: State, ys: Sequence[Tensor], post_norms: Sequence[nn.Module | None], shared: dict[str, Tensor]) -> State:
        x, _ = state.stream
        *others, last = apply_post_norms(ys, post_norms)
        for y in others:
            x = x + y
        return State((x, last), shared)


class AddEnds(nn.Module):
    """The embedding is the stream, and the stream the output."""

    def __init__(self, config: AddConfig, model_config: ModelConfig, index: int) -> None:
        super().__init__()

    def expand(self, x: Tensor) -> State:
        return State((x, None), {})

    def collapse(self, state: State, final_norm: Norm | None) -> Tensor:
        return _add_and_norm(state.stream, final_norm)[0]

    def settle(self, state: State) -> State:
        _, x = _add_and_norm(state.stream, None)
        return State((x, None), state.shared)

    def hidden(self, state: State) -> Tensor:
        return state.stream[0]


@block(AddConfig)
class Add:
    """The plain residual stream."""

    Site: Any = AddSite
    Ends: Any = AddEnds
