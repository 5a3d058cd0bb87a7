"""Layer norm.

    y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias          (Ba, Kiros & Hinton 2016, arXiv:1607.06450)

over the last dimension, in fp32 inside (fp64 where an input is), rounded once. The variance is the mean of (x - mean)^2, not of x^2 less
mean^2, which loses all of its digits where the mean is large.

Cost: the forward reads x and writes y, 2 passes over (rows, width); the backward reads x and the incoming gradient and writes dx, 3
passes. Rows wider than 8192 (16384 in the forward) are read twice. Saved for the backward: x, the weight, and two fp32 numbers a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, dispatch, library
from ._rows import autocast_dtype, check_rows
from .layer_norm_triton import launch_backward, launch_forward

_WHY = "tensors on a device that Triton serves"


# ---- reference ----


def _layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    compute = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in (x, weight, bias)) else torch.float32
    wide = (None if t is None else t.to(compute) for t in (weight, bias))
    return F.layer_norm(x.to(compute), x.shape[-1:], *wide, eps).to(dtype)


# ---- Triton ----


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.ran("layer_norm", "forward", "triton", _WHY)
    y, mean, rstd = _forward_fake(x, weight, bias, eps, dtype)
    launch_forward(x, weight, bias, y, mean, rstd, eps)
    return y, mean, rstd


def _forward_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, *(torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))


def _nothing(x: Tensor) -> Tensor:
    """Stands for a gradient that is not wanted: an operator returns tensors, never None."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    want_dx: bool,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.ran("layer_norm", "backward", "triton", _WHY)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_dx else None
    sums = launch_backward(dy, x, weight, mean, rstd, dx, want_dweight, want_dbias)
    # Copies even where no dtype changes: gradients of two parameters share no storage.
    dweight = sums[0].to(weight.dtype, copy=True) if want_dweight else _nothing(x)
    dbias = sums[-1].to(bias.dtype, copy=True) if want_dbias else _nothing(x)
    return _nothing(x) if dx is None else dx, dweight, dbias


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    want_dx: bool,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = ((x, want_dx), (weight, want_dweight), (bias, want_dbias))
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) if want else _nothing(x) for t, want in wanted)


_layer_norm_forward = library.define(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_layer_norm_backward = library.define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool want_dx, bool want_dweight,"
    " bool want_dbias) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        y, mean, rstd = _layer_norm_forward(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        grads = _layer_norm_backward(dy, *ctx.saved_tensors, *wanted)
        return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None


def _layer_norm_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _LayerNorm.apply(x, weight, bias, eps, dtype)
    return _layer_norm_forward(x, weight, bias, eps, dtype)[0]


def _unsupported(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> str | None:
    if any(t is not None and t.dtype == torch.float64 for t in (weight, bias)):
        return "an input is float64, which is served by the reference alone"
    return None


_layer_norm = dispatch.Op("layer_norm", _layer_norm_reference, _layer_norm_triton, _unsupported)


# ---- public ----


def layer_norm(x: Tensor, /, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """Layer norm over the last dimension: ``(x - mean) * rsqrt(var + eps) * weight + bias``.

    ``x`` is (..., width), ``weight`` and ``bias`` (width,) or None. Statistics and product are fp32 (fp64 where an input is fp64), rounded
    once to x's dtype, whatever those of weight and bias are; under autocast on a GPU the result is fp32: what torch gives in the
    combinations that it takes.

    Raises TypeError and ValueError for what is not a floating tensor, a weight or bias of another width or device, a negative eps.
    """
    check_rows("layer_norm", x)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            checks.is_tensor("layer_norm", name, t)
            checks.has_shape("layer_norm", name, t, (x.shape[-1],))
    checks.same_device("layer_norm", x=x, weight=weight, bias=bias)
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise ValueError(f"layer_norm: eps is {eps!r}; expected a number of at least 0")
    return _layer_norm(x, weight, bias, eps, autocast_dtype(x))
