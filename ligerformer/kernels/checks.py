"""Argument checks shared by the ops: each error says which argument, what came and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32)


def is_tensor(op: str, name: str, x: Any, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """TypeError unless ``x`` is a tensor of one of ``dtypes``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} is a {type(x).__name__}; expected a tensor")
    if x.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {_name(x.dtype)}; expected {' or '.join(_name(d) for d in dtypes)}")


def has_shape(op: str, name: str, x: Tensor, expected: tuple[int | str, ...]) -> None:
    """ValueError unless ``x.shape`` matches ``expected``, in which a string stands for any size."""
    shape = x.shape
    if len(shape) == len(expected):
        for size, wanted in zip(shape, expected, strict=True):  # a plain loop: this runs several times an op
            if size != wanted and not isinstance(wanted, str):
                break
        else:
            return
    raise ValueError(f"{op}: {name} has shape {tuple(shape)}; expected ({', '.join(str(e) for e in expected)})")


def same_device(op: str, **tensors: Tensor | None) -> None:
    """ValueError that names both arguments where two of ``tensors`` are on different devices; None is passed over."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if first is None:
            first = (name, x.device)
        elif x.device != first[1]:
            raise ValueError(f"{op}: {name} is on {x.device} and {first[0]} on {first[1]}; move them to one device")


def one_of(op: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{op}: {name} is {value!r}; expected one of {', '.join(repr(a) for a in allowed)}")


def in_range(op: str, name: str, ids: Tensor, size: int) -> None:
    """IndexError unless all of ``ids`` are in [0, size); looked at on the CPU alone, and not while a graph is traced.

    On a GPU the look would be a host sync: there the op makes that row's result NaN.
    """
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise IndexError(f"{op}: {name} holds {low if low < 0 else high}; expected values in [0, {size})")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
