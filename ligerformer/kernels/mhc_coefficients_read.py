r"""A sublayer's coefficients and what it reads with them, as one op: the streams' gradient is then one tensor, written once.

    pre, post, mix = mhc_coefficients(x)        u = mhc_read(x, pre)        and x itself, passed on to mhc_write

Apart, each of the three ops gives the streams a gradient that autograd adds up, in the streams' dtype. Here x goes through the op, so that
what comes back from the write meets the other two parts inside one kernel:

    dx = dx_write + pre du + dm phi^T + radial x        summed in fp32 and rounded once

In elements of C a token: forward 2n + 1 (x twice, u); backward 4n + 2 (x and du once for dpre; x, du and dx_write in, dx out). Saved: x, and
n*n + 3n + 1 fp32 numbers a token. Formula and sources: mhc_coefficients.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import library
from ._triton import on_device
from .dispatch import Op, ran
from .mhc_coefficients import (
    _mhc_coefficients_reference,
    check_coefficients,
    coefficients_backward,
    coefficients_empty,
    coefficients_forward,
    float64_input,
    gradients_empty,
    tokens_first,
)
from .mhc_stream import _mhc_read_reference, read_backward, read_forward

__all__ = ["mhc_coefficients_read"]


def _mhc_coefficients_read_reference(
    x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pre, post, mix = _mhc_coefficients_reference(x, phi, bias, alpha, *options)
    return _mhc_read_reference(x, pre), post, mix, x.view_as(x)


# ---- Triton ----

_WHY = "tensors on a device that Triton serves"


def _empty(x: Tensor, phi: Tensor, save: bool) -> tuple[Tensor, ...]:
    """u, pre, post, mix, m, rstd."""
    return x.new_empty(*x.shape[:-2], x.shape[-1]), *coefficients_empty(x, phi, save)


def _forward_impl(x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, *options: Any) -> tuple[Tensor, ...]:
    u, pre, *others = _empty(x, phi, options[-1])
    ran("mhc_coefficients_read", "forward", "triton", _WHY)
    with on_device(x):
        flat = tokens_first(x, 2)
        coefficients_forward(flat, phi, bias, alpha, (pre, *others), *options)
        read_forward(flat, pre, u)
    return u, pre, *others


def _backward_impl(
    du: Tensor | None, dpost: Tensor | None, dmix: Tensor | None, through: Tensor | None,
    x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, pre: Tensor, m: Tensor, rstd: Tensor,
    iterations: int, sinkhorn_eps: float, in_out: bool, needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ran("mhc_coefficients_read", "backward", "triton", _WHY)
    flat, dpre = tokens_first(x, 2), None
    through = None if through is None else tokens_first(through, 2)
    with on_device(x):
        if du is not None:
            du, dpre = tokens_first(du, 1), torch.empty_like(pre)
            read_backward(du, flat, pre, None, dpre)
        inputs, options = (flat, phi, bias, alpha, m, rstd), (iterations, sinkhorn_eps, in_out, needed)
        dx, *others = coefficients_backward((dpre, dpost, dmix), *inputs, *options, (du, pre, through))
    return dx.view(x.shape) if needed[0] else dx, *others


_forward = library.define(
    "mhc_coefficients_read_forward(Tensor x, Tensor phi, Tensor bias, Tensor alpha, float eps, int iterations, float pre_eps, "
    "float sinkhorn_eps, bool in_out, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward_impl,
    lambda x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, in_out, save: _empty(x, phi, save),
)
_backward = library.define(
    "mhc_coefficients_read_backward(Tensor? du, Tensor? dpost, Tensor? dmix, Tensor? through, Tensor x, Tensor phi, Tensor bias, "
    "Tensor alpha, Tensor pre, Tensor m, Tensor rstd, int iterations, float sinkhorn_eps, bool in_out, bool[4] needed) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    lambda du, dpost, dmix, through, x, phi, bias, alpha, pre, m, rstd, iterations, sinkhorn_eps, in_out, needed: gradients_empty(
        x, phi, bias, alpha, needed
    ),
)


class _CoefficientsRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, in_out):
        u, pre, post, mix, m, rstd = _forward(x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, in_out, True)
        ctx.save_for_backward(x, phi, bias, alpha, pre, m, rstd)
        ctx.options = (iterations, sinkhorn_eps, in_out)
        ctx.set_materialize_grads(False)
        return u, post, mix, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, du, dpost, dmix, through):
        needed = ctx.needs_input_grad[:4]
        if du is None and dpost is None and dmix is None:  # the streams were passed on and not read
            return through if needed[0] else None, *(None,) * 8
        grads = _backward(du, dpost, dmix, through, *ctx.saved_tensors, *ctx.options, needed)
        return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 5)


def _triton(
    x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, eps: float, iterations: int, pre_eps: float, sinkhorn_eps: float, res_layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = (x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, res_layout == "in_out")
    if torch.is_grad_enabled() and any(t.requires_grad for t in args[:4]):
        return _CoefficientsRead.apply(*args)
    u, _, post, mix, *_ = _forward(*args, False)
    return u, post, mix, x.view_as(x)


_op = Op("mhc_coefficients_read", _mhc_coefficients_read_reference, _triton, float64_input)


def mhc_coefficients_read(
    x: Tensor,  # (..., n, C)
    phi: Tensor,  # (n*C, n*n + 2n)
    bias: Tensor,  # (n*n + 2n,)
    alpha: Tensor,  # (3,)
    /,
    *,
    eps: float,
    iterations: int = 20,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 0.0,
    res_layout: str = "out_in",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a sublayer reads of the streams, how it writes to them, and the streams: (u (..., C), post (..., n), mix (..., n, n), x).

    :func:`mhc_coefficients`, then :func:`mhc_read`, with their arguments, dtypes and errors. The last result is ``x`` itself, as a view: give
    that one to :func:`mhc_write`, and the gradient of the streams is made in one pass, where apart it is the sum of three tensors.
    Cost: this module's docstring.
    """
    op = "mhc_coefficients_read"
    check_coefficients(op, x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, res_layout)
    return _op(x, phi, bias, alpha, float(eps), iterations, float(pre_eps), float(sinkhorn_eps), res_layout)
