"""Root-mean-square norm, alone and fused with the residual add before it.

    y = x * rsqrt(mean(x^2) + eps) * (weight + offset)          (Zhang & Sennrich 2019, arXiv:1910.07467)

over the last dimension, in fp32 inside (fp64 where an input is). What is rounded when differs between model families, and is
``casting``: "input" rounds the normalised value to x's dtype before the weight multiplies (Llama, Qwen), "fp32" rounds once, at the
end (Gemma).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import checks
from .dispatch import Op

Casting = Literal["input", "fp32"]


def _rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: Casting) -> Tensor:
    inputs = (x.dtype,) if weight is None else (x.dtype, weight.dtype)
    compute = torch.float64 if torch.float64 in inputs else torch.float32
    wide = x.to(compute)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting == "fp32":
        return (normed * (weight.to(compute) + offset)).to(x.dtype)
    scale = weight if offset == 0 else weight.to(compute) + offset
    return (normed.to(x.dtype) * scale).to(torch.result_type(x, weight))


def _add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return _rms_norm_reference(summed, weight, eps, offset, casting), summed


def _check(op: str, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> None:
    checks.is_tensor(op, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., width) with a width of at least 1")
    if weight is not None:
        checks.is_tensor(op, "weight", weight)
        checks.has_shape(op, "weight", weight, (x.shape[-1],))
        checks.same_device(op, x=x, weight=weight)
    check_norm_options(op, eps, offset, casting)


def check_norm_options(op: str, eps: float, offset: float, casting: str) -> None:
    """Refuse an eps that is not a number >= 0, an offset that is no number, a casting that is not one of the two."""
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise ValueError(f"{op}: eps is {eps!r}; expected a number of at least 0")
    if not isinstance(offset, (int, float)):
        raise TypeError(f"{op}: offset is {offset!r}; expected a number")
    checks.one_of(op, "casting", casting, ("input", "fp32"))


_rms_norm = Op("rms_norm", _rms_norm_reference, _rms_norm_reference, lambda *args: "it has no Triton kernel yet")
_add_rms_norm = Op("add_rms_norm", _add_rms_norm_reference, _add_rms_norm_reference, lambda *args: "it has no Triton kernel yet")


def rms_norm(x: Tensor, /, weight: Tensor | None = None, *, eps: float, offset: float = 0.0, casting: Casting = "input") -> Tensor:
    """Root-mean-square norm over the last dimension: ``x * rsqrt(mean(x^2) + eps) * (weight + offset)``.

    ``x`` is (..., width), ``weight`` (width,) or None for a plain norm. With ``casting="input"`` the normalised value is rounded to x's
    dtype before the weight multiplies, and the result has the promoted dtype of both; with "fp32" the product is formed in fp32 and
    rounded to x's dtype. Statistics are fp32 (fp64 where an input is fp64). ``offset=1.0`` is Gemma's ``1 + weight``.

    Raises TypeError and ValueError for what is not a floating tensor, a weight of another width or device, a negative eps.
    """
    _check("rms_norm", x, weight, eps, offset, casting)
    return _rms_norm(x, weight, eps, offset, casting)


def add_rms_norm(
    x: Tensor, residual: Tensor, /, weight: Tensor | None = None, *, eps: float, offset: float = 0.0, casting: Casting = "input"
) -> tuple[Tensor, Tensor]:
    """``summed = x + residual`` and ``normed = rms_norm(summed, weight)`` in one pass; returns ``(normed, summed)``.

    ``x`` and ``residual`` are (..., width) of one shape. ``summed`` has their promoted dtype and the bits of an eager add; options,
    dtypes and errors are those of :func:`rms_norm`.
    """
    _check("add_rms_norm", x, weight, eps, offset, casting)
    checks.is_tensor("add_rms_norm", "residual", residual)
    checks.has_shape("add_rms_norm", "residual", residual, tuple(x.shape))
    checks.same_device("add_rms_norm", x=x, residual=residual)
    return _add_rms_norm(x, residual, weight, eps, offset, casting)
