"""The norm of queries and keys a head, and their rotation, in one pass (Qwen3, Gemma 3).

    q' = rope(rms_norm(q, q_weight)),  k' = rope(rms_norm(k, k_weight))       norms over D, one weight for all heads

with the roundings of the two ops run one after the other: see ``norms.py`` and ``rope.py``.

Cost: q and k read and written once forward; backward, they and the incoming gradients read and their gradients written, which is about
half the traffic of the two ops in sequence. Saved for the backward: q, k, the weights, the tables and one fp32 number a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, dispatch, library
from .norms import Casting, _rms_norm_reference, check_norm_options, fp64_among, normed_dtype
from .qk_norm_rope_triton import launch_backward, launch_forward
from .rope import _rope_reference, check_rope_inputs

_WHY = "tensors on a device that Triton serves"


# ---- reference ----


def _qk_norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    q, k = _rms_norm_reference(q, q_weight, eps, offset, casting), _rms_norm_reference(k, k_weight, eps, offset, casting)
    return _rope_reference(q, k, cos, sin)


# ---- Triton ----


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dispatch.ran("qk_norm_rope", "forward", "triton", _WHY)
    outputs = _forward_fake(q, k, q_weight, k_weight, cos, sin, eps, offset, round_first)
    launch_forward(q, k, q_weight, k_weight, cos, sin, outputs, eps, offset, round_first)
    return outputs


def _forward_fake(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = normed_dtype(q.dtype, q_weight, round_first)
    q_out, k_out = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k))
    q_rstd, k_rstd = (torch.empty(x.shape[:3], dtype=torch.float32, device=x.device) for x in (q, k))
    return q_out, k_out, q_rstd, k_rstd


def _backward(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.ran("qk_norm_rope", "backward", "triton", _WHY)
    want_q, want_k, *want_weights = wanted
    dq, dk, nothing = _backward_fake(
        q_grad, k_grad, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, offset, [want_q, want_k, False, False]
    )
    tensors = (q_grad, k_grad, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, dq if want_q else None, dk if want_k else None)
    dweights = launch_backward(*tensors, offset, *want_weights)
    return dq, dk, nothing if dweights is None else dweights


def _backward_fake(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """An unwanted gradient is empty, as an operator returns tensors, never None; the wanted weights' gradients are the rows of one."""
    want_q, want_k, *want_weights = wanted
    dq, dk = (torch.empty(x.shape if want else 0, dtype=x.dtype, device=x.device) for x, want in ((q, want_q), (k, want_k)))
    return dq, dk, torch.empty(sum(want_weights), q.shape[3], dtype=q_weight.dtype, device=q.device)


_qk_norm_rope_forward = library.define(
    "qk_norm_rope_forward(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps, float offset,"
    " bool round_first) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_qk_norm_rope_backward = library.define(
    "qk_norm_rope_backward(Tensor q_grad, Tensor k_grad, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor q_rstd,"
    " Tensor k_rstd, Tensor cos, Tensor sin, float offset, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        offset: float,
        round_first: bool,
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out, q_rstd, k_rstd = _qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, eps, offset, round_first)
        ctx.save_for_backward(q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin)
        ctx.offset = offset
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:4])
        dq, dk, dweights = _qk_norm_rope_backward(q_grad, k_grad, *ctx.saved_tensors, ctx.offset, wanted)
        found = (dq, dk, dweights[0] if wanted[2] else None, dweights[-1] if wanted[3] else None)
        return *(x if want else None for x, want in zip(found, wanted, strict=True)), None, None, None, None, None


def _qk_norm_rope_triton(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    round_first = casting == "input"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or q_weight.requires_grad or k_weight.requires_grad):
        return _QKNormRope.apply(q, k, q_weight, k_weight, cos, sin, eps, offset, round_first)
    return _qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, eps, offset, round_first)[:2]


def _unsupported(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *options: Any) -> str | None:
    return fp64_among(q_weight, cos, sin)


_qk_norm_rope = dispatch.Op("qk_norm_rope", _qk_norm_rope_reference, _qk_norm_rope_triton, _unsupported)


# ---- public ----


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    /,
    *,
    eps: float,
    offset: float = 0.0,
    casting: Casting = "input",
) -> tuple[Tensor, Tensor]:
    """``rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)`` in one pass; returns new contiguous tensors ``(q', k')``.

    ``q`` is (B, T, Hq, D) and ``k`` (B, T, Hk, D) of one dtype, the weights (D,) of one dtype, ``cos`` and ``sin`` fp32 tables
    (1 or B, T, R/2) that take no gradient. ``eps``, ``offset`` and ``casting`` are those of :func:`rms_norm`. Roundings are those of
    the two ops in sequence.

    Raises TypeError and ValueError for shapes, dtypes and devices that do not fit together.
    """
    check_rope_inputs("qk_norm_rope", q, k, cos, sin)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        checks.is_tensor("qk_norm_rope", name, weight)
        checks.has_shape("qk_norm_rope", name, weight, (q.shape[-1],))
    if k_weight.dtype != q_weight.dtype:
        raise TypeError(f"qk_norm_rope: k_weight has dtype {k_weight.dtype} and q_weight {q_weight.dtype}; expected one dtype")
    checks.same_device("qk_norm_rope", q=q, q_weight=q_weight, k_weight=k_weight)
    check_norm_options("qk_norm_rope", eps, offset, casting)
    return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset, casting)
