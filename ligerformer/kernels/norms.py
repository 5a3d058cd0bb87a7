"""Root-mean-square norm, alone and fused with the residual add before it.

    y = x * rsqrt(mean(x^2) + eps) * (weight + offset)          (Zhang & Sennrich 2019, arXiv:1910.07467)

over the last dimension, in fp32 inside (fp64 where an input is). What is rounded when differs between model families, and is
``casting``: "input" rounds the normalised value to x's dtype before the weight multiplies (Llama, Qwen), "fp32" rounds once, at the
end (Gemma).

Cost: the forward reads x and writes y, 2 passes over (rows, width); the backward reads x and the incoming gradient and writes dx, 3
passes. The add costs 2 more in the forward (residual in, sum out) and 1 in the backward (the sum's gradient, folded into dx).
Rows wider than 8192 (16384 in the forward) are read twice. Saved for the backward: x (the sum, with the add), the weight, and one
fp32 number a row; from these y can be made again (``remake.py``).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, dispatch, library, remake
from .norms_remake import rms_norm_remake
from .norms_triton import launch_backward, launch_forward

Casting = Literal["input", "fp32"]

_WHY = "tensors on a device that Triton serves"


# ---- reference ----


def _rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: Casting) -> Tensor:
    if x.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == x.dtype):  # nothing is rounded in between
        return F.rms_norm(x, x.shape[-1:], weight if weight is None or offset == 0 else weight + offset, eps)
    compute = torch.float64 if weight is not None and torch.float64 in (x.dtype, weight.dtype) else torch.float32
    wide = x.to(compute)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting == "fp32":
        return (normed * (weight.to(compute) + offset)).to(x.dtype)
    scale = weight if offset == 0 else weight.to(compute) + offset
    return (normed.to(x.dtype) * scale).to(torch.promote_types(x.dtype, weight.dtype))


def _add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return _rms_norm_reference(summed, weight, eps, offset, casting), summed


# ---- Triton ----


def normed_dtype(x: torch.dtype, weight: Tensor | None, round_first: bool) -> torch.dtype:
    """The dtype of a norm's result: with the rounding first, that of a product with the weight."""
    return torch.promote_types(x, weight.dtype) if round_first and weight is not None else x


def _forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool) -> tuple[Tensor, Tensor]:
    dispatch.ran("rms_norm", "forward", "triton", _WHY)
    y, rstd = _forward_fake(x, weight, eps, offset, round_first)
    launch_forward(x, None, weight, y, None, rstd, eps, offset, round_first)
    return y, rstd


def _forward_fake(x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=normed_dtype(x.dtype, weight, round_first), device=x.device)
    return y, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.ran("add_rms_norm", "forward", "triton", _WHY)
    y, summed, rstd = _add_forward_fake(x, residual, weight, eps, offset, round_first)
    launch_forward(x, residual, weight, y, summed, rstd, eps, offset, round_first)
    return y, summed, rstd


def _add_forward_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    summed = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    y, rstd = _forward_fake(summed, weight, eps, offset, round_first)
    return y, summed, rstd


def _nothing(x: Tensor) -> Tensor:
    """Stands for a gradient that is not wanted: an operator returns tensors, never None."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def _backward(
    op: str,
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    want_dx: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dispatch.ran(op, "backward", "triton", _WHY)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_dx else None
    dweight = launch_backward(dy, dsummed, x, weight, rstd, dx, offset, want_dweight)
    return _nothing(x) if dx is None else dx, _nothing(x) if dweight is None else dweight


def _backward_fake(
    op: str,
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    want_dx: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_dx else _nothing(x)
    return dx, torch.empty(weight.shape, dtype=weight.dtype, device=x.device) if want_dweight else _nothing(x)


_rms_norm_forward = library.define(
    "rms_norm_forward(Tensor x, Tensor? weight, float eps, float offset, bool round_first) -> (Tensor, Tensor)", _forward, _forward_fake
)
_add_rms_norm_forward = library.define(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool round_first)"
    " -> (Tensor, Tensor, Tensor)",
    _add_forward,
    _add_forward_fake,
)
_rms_norm_backward = library.define(
    "rms_norm_backward(str op, Tensor dy, Tensor? dsummed, Tensor x, Tensor? weight, Tensor rstd, float offset, bool want_dx,"
    " bool want_dweight) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool) -> Tensor:
        y, rstd = _rms_norm_forward(x, weight, eps, offset, round_first)
        remake.declare(y, "rms_norm", "triton", rms_norm_remake, (x, weight, rstd), y.dtype, offset, round_first)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        want_dx, want_dweight = ctx.needs_input_grad[:2]
        dx, dweight = _rms_norm_backward("rms_norm", dy, None, x, weight, rstd, ctx.offset, want_dx, want_dweight)
        return dx if want_dx else None, dweight if want_dweight else None, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool
    ) -> tuple[Tensor, Tensor]:
        y, summed, rstd = _add_rms_norm_forward(x, residual, weight, eps, offset, round_first)
        remake.declare(y, "add_rms_norm", "triton", rms_norm_remake, (summed, weight, rstd), y.dtype, offset, round_first)
        ctx.save_for_backward(summed, weight, rstd)
        ctx.offset, ctx.dtypes = offset, (x.dtype, residual.dtype)
        ctx.set_materialize_grads(False)  # a gradient that nobody sent costs no pass
        return y, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsummed: Tensor | None) -> tuple[Tensor | None, ...]:
        summed, weight, rstd = ctx.saved_tensors
        want_x, want_residual, want_dweight = ctx.needs_input_grad[:3]
        want_dx = want_x or want_residual
        if dy is None:  # only the sum was used; its gradient passes through
            dx, want_dweight, dweight = dsummed, False, None
        else:
            dx, dweight = _rms_norm_backward("add_rms_norm", dy, dsummed, summed, weight, rstd, ctx.offset, want_dx, want_dweight)
        # One tensor serves both inputs, as in torch's own add: autograd adds into a gradient in place only where it is the sole owner.
        dx, dresidual = (None if dx is None else dx.to(dtype) for dtype in ctx.dtypes)
        return dx if want_x else None, dresidual if want_residual else None, dweight if want_dweight else None, None, None, None


def _tracked(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: Casting) -> Tensor:
    if _tracked(x, weight):
        return _RMSNorm.apply(x, weight, eps, offset, casting == "input")
    return _rms_norm_forward(x, weight, eps, offset, casting == "input")[0]


def _add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    if _tracked(x, residual, weight):
        return _AddRMSNorm.apply(x, residual, weight, eps, offset, casting == "input")
    return _add_rms_norm_forward(x, residual, weight, eps, offset, casting == "input")[:2]


def fp64_among(*tensors: Tensor | None) -> str | None:
    """Why Triton does not serve a call with such inputs; None where it does."""
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        return "an input is float64, which is served by the reference alone"
    return None


def _rms_norm_plain(x: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    y = _rms_norm_reference(x, weight, *options)
    if y.requires_grad:
        remake.declare(y, "rms_norm", "reference", _rms_norm_reference, (x, weight), *options)
    return y


def _add_rms_norm_plain(x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    y, summed = _add_rms_norm_reference(x, residual, weight, *options)
    if y.requires_grad:
        remake.declare(y, "add_rms_norm", "reference", _rms_norm_reference, (summed, weight), *options)
    return y, summed


_rms_norm = dispatch.Op("rms_norm", _rms_norm_plain, _rms_norm_triton, lambda x, weight, *options: fp64_among(weight))
_add_rms_norm = dispatch.Op(
    "add_rms_norm", _add_rms_norm_plain, _add_rms_norm_triton, lambda x, residual, weight, *options: fp64_among(residual, weight)
)


# ---- public ----


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
