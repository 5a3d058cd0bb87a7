"""Outputs that are made again in the backward instead of kept: what ``recompute="cheap"`` is made of.

An op that can make its output again from what its autograd function saves anyway, by pointwise work alone, *declares* that output. While
a :func:`scope` is open, autograd is handed the recipe wherever it would keep a declared output, or any view of one, whoever the consumer
is: a linear module, adapted, sharded or quantised, or a user's own code. In the backward the recipe gives the same bits.

Cost: one pointwise kernel a use in the backward; nothing is kept beyond what the op's own backward needs. What a consumer keeps of its
own (autocast's copy in another dtype) stays.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dispatch

_WHY = "recompute='cheap'"


class _Kept:
    """A tensor that is kept, and the version that the backward expects: under hooks autograd itself does not look."""

    __slots__ = ("tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.tensor = x.detach()  # not x: an output that its own node saves would hold that node, and neither would be freed
        self.version = x._version

    @property
    def intact(self) -> bool:
        return self.tensor._version == self.version


class _Recipe:
    """How to make an op's output again: ``make(*kept, *options)``."""

    __slots__ = ("implementation", "kept", "make", "op", "options")

    def __init__(
        self, op: str, implementation: str, make: Callable[..., Tensor], tensors: Sequence[Tensor | None], options: tuple[Any, ...]
    ) -> None:
        self.op, self.implementation, self.make, self.options = op, implementation, make, options
        self.kept = tuple(None if x is None else _Kept(x) for x in tensors)

    @property
    def intact(self) -> bool:
        return all(kept is None or kept.intact for kept in self.kept)

    def __call__(self) -> Tensor:
        if not self.intact:
            raise RuntimeError(
                f"{self.op}: an input was modified in place between forward and backward; recompute='cheap' makes the output again from it"
            )
        dispatch.ran(self.op, "remade", self.implementation, _WHY)
        with torch.no_grad():
            return self.make(*(None if kept is None else kept.tensor for kept in self.kept), *self.options)


class _View:
    """A view of a declared output: the recipe, and where the view lies in what it makes."""

    __slots__ = ("geometry", "recipe")

    def __init__(self, recipe: _Recipe, view: Tensor) -> None:
        self.recipe, self.geometry = recipe, (view.shape, view.stride(), view.storage_offset())

    def __call__(self) -> Tensor:
        return self.recipe().as_strided(*self.geometry)


class _Scope:
    """What was declared, by storage. A storage's address says whose it is only while it lives, so its tensor is held weakly and asked."""

    def __init__(self) -> None:
        self.declared: dict[int, tuple[weakref.ref[Tensor], int, _Recipe]] = {}

    def declare(self, output: Tensor, recipe: _Recipe) -> None:
        if output.is_contiguous() and output.storage_offset() == 0:  # a view's geometry then holds in what is made again
            self.declared[_storage(output)] = weakref.ref(output), output._version, recipe

    def pack(self, x: Tensor) -> _Kept | _View:
        """What autograd keeps of a tensor that a node saves."""
        found = self.declared.get(_storage(x)) if x.layout is torch.strided else None
        if found is not None:
            reference, version, recipe = found
            output = reference()
            alive = output is not None and _storage(output) == _storage(x)  # else x lies where a declared output lay
            if alive and x.dtype == output.dtype and x._version == version and recipe.intact:
                return _View(recipe, x)
        return _Kept(x)


class _Open(threading.local):
    scope: _Scope | None = None


_open = _Open()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _unpack(packed: _Kept | _View) -> Tensor:
    if isinstance(packed, _View):
        return packed()
    if not packed.intact:
        x = packed.tensor
        raise RuntimeError(
            f"a tensor that the backward needs, {x.dtype} of shape {tuple(x.shape)}, was modified in place after the forward: it is at "
            f"version {x._version}; expected version {packed.version}"
        )
    return packed.tensor


def declare(
    output: Tensor, op: str, implementation: str, make: Callable[..., Tensor], tensors: Sequence[Tensor | None], *options: Any
) -> None:
    """Say that ``make(*tensors, *options)`` gives the bits of ``output`` again; nothing happens where no scope is open.

    ``tensors`` must be what the op's autograd function saves anyway, and ``make`` must form no matrix product.
    """
    if torch.compiler.is_compiling() or _open.scope is None:
        return
    _open.scope.declare(output, _Recipe(op, implementation, make, tensors, options))


def available() -> bool:
    """Whether a scope can be opened here; where not, ``explain()`` lists why, and everything is kept as without one."""
    if torch.compiler.is_compiling():
        why = "torch.compile decides what its backward makes again"
    elif torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        why = "the saved_tensors_hooks around the call decide what is kept"
    else:
        return True
    dispatch.ran("recompute='cheap'", "remade", "none", why)
    return False


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Within the scope, in this thread, declared outputs are made again in the backward rather than kept."""
    before, current = _open.scope, _Scope()
    _open.scope = current
    try:
        with torch.autograd.graph.saved_tensors_hooks(current.pack, _unpack):
            yield
    finally:
        _open.scope = before
        current.declared.clear()
