r"""Divergences of two distributions over V classes: Kullback-Leibler, generalised Jensen-Shannon, total variation.

With x and y the two inputs, Q = exp(x) and P = exp(y) where they hold logarithms, a row's divergence is the sum over its classes of::

    kl_div        y * (log y - x)                                      d/dx = -y                     d/dy = log y - x + 1
    (log target)  P * (y - x)                                          d/dx = -P                     d/dy = P * (y - x + 1)
    jsd           beta * P * (y - log m) + (1 - beta) * Q * (x - log m),     m = beta * P + (1 - beta) * Q
                  d/dx = (1 - beta) * Q * (x - log m)                  d/dy = beta * P * (y - log m)
    tvd           abs(x - y) / 2                                       d/dx = sign(x - y) / 2        d/dy = -d/dx

(kl_div: ``torch.nn.functional.kl_div``; jsd: GKD, arXiv:2306.13649.) A term whose probability is 0 is 0, and so are its gradients.

Cost, in passes over rows x V: the forward reads both inputs. The gradient of ``kl_div`` by its input needs the target alone and is
made in the backward: 4 passes in all, nothing new saved. Every other gradient needs both inputs, and is made while the forward holds them,
with the reduction's factor: 3 passes for one gradient, and the backward only multiplies it by the upstream gradient. Where the graph is not
retained, nobody sees that kept buffer again: it is scaled where it lies, which is no pass at all for an upstream of 1 (``loss.backward()``)
and 2 for another; in a retained graph it is scaled into a new one. That is 3 or 5 passes, where a backward from the inputs takes 5.
Made in the backward from the inputs even so: gradients of ``reduction="none"``, whose upstream is not one number, and of fp16
inputs, in which a gradient that the loss scale has not yet reached would underflow. Saved: both inputs (the caller's), or the gradients.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, dispatch
from .cross_entropy import mean_scale
from .dispatch import Op
from .divergences_triton import divergence_backward, divergence_forward, scale_in_place

Reduction = Literal["batchmean", "sum", "mean", "none"]
REDUCTIONS = ("batchmean", "sum", "mean", "none")
_LOWEST = -1e4  # the logarithm of 0 in every dtype, and finite


# ---- reference ----


def _kl_terms(x: Tensor, y: Tensor, log_target: bool) -> Tensor:
    """Terms of KL(y || x); those of probability 0 are cut off before they can turn NaN, forward and backward."""
    zero = (y.exp() if log_target else y) == 0
    x, y = torch.where(zero, 0.0, x), torch.where(zero, 0.0 if log_target else 1.0, y)
    return torch.where(zero, 0.0, y.exp() * (y - x) if log_target else y * (y.log() - x))


def _jsd_terms(x: Tensor, y: Tensor, beta: float) -> Tensor:
    if beta == 0.0:
        return _kl_terms(x, y, True)
    if beta == 1.0:
        return _kl_terms(y, x, True)
    x, y = x.clamp(min=_LOWEST), y.clamp(min=_LOWEST)
    log_p, log_q = x.new_full((), math.log(beta)), x.new_full((), math.log1p(-beta))
    of_x = torch.logaddexp(log_p + (y - x), log_q)  # log m - x, each by its own difference: neither loses the other's digits
    of_y = torch.logaddexp(log_q + (x - y), log_p)
    return -beta * y.exp() * of_y - (1.0 - beta) * x.exp() * of_x


def _terms(kind: str, x: Tensor, y: Tensor, beta: float) -> Tensor:
    if kind == "tvd":
        return 0.5 * (x - y).abs()
    return _jsd_terms(x, y, beta) if kind == "jsd" else _kl_terms(x, y, kind == "kl_log")


def _in_loss_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype), y.to(dtype)


def _rows_scale(labels: Tensor | None, ignore_index: int, reduction: str, dtype: torch.dtype) -> Tensor | None:
    """One over the number of rows that count, on the device; None without labels or where no mean is taken."""
    return None if labels is None or reduction in ("sum", "none") else mean_scale(labels, ignore_index, None, None, dtype)


def _divisor(x: Tensor, reduction: str, labelled: bool) -> int:
    """What a mean over rows, or over their elements, divides by besides :func:`_rows_scale`."""
    if reduction in ("sum", "none"):
        return 1
    rows = 1 if labelled else x.shape[:-1].numel()
    return rows * x.shape[-1] if reduction == "mean" else rows


def _kl_div_reference(x: Tensor, y: Tensor, reduction: str, log_target: bool) -> Tensor:
    terms = _kl_terms(*_in_loss_dtype(x, y), log_target)
    return terms if reduction == "none" else terms.sum() / max(_kl_divisor(x, reduction), 1)


def _rows_reference(kind: str, x: Tensor, y: Tensor, labels: Tensor | None, ignore_index: int, reduction: str, beta: float = 0.0) -> Tensor:
    x, y = _in_loss_dtype(x, y)
    if labels is not None:
        kept = (labels != ignore_index).unsqueeze(-1)
        x, y = torch.where(kept, x, 0.0), torch.where(kept, y, 0.0)
    losses = _terms(kind, x, y, beta).sum(-1)
    if labels is not None:
        losses = torch.where(labels != ignore_index, losses, 0.0)
    if reduction == "none":
        return losses
    scale = _rows_scale(labels, ignore_index, reduction, losses.dtype)
    loss = losses.sum() / max(_divisor(x, reduction, labels is not None), 1)
    return loss if scale is None else loss * scale


def _jsd_reference(x: Tensor, y: Tensor, labels: Tensor | None, ignore_index: int, reduction: str, beta: float) -> Tensor:
    return _rows_reference("jsd", x, y, labels, ignore_index, reduction, beta)


def _tvd_reference(x: Tensor, y: Tensor, labels: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    return _rows_reference("tvd", x, y, labels, ignore_index, reduction)


# ---- Triton ----


class _Divergence(torch.autograd.Function):
    """``options`` are those of the operators, from labels to output. Where ``keep``, the forward makes the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, wanted: tuple[bool, bool], keep: bool, *options: Any) -> Tensor:
        loss, dx, dy = divergence_forward(x, y, *options, keep and wanted[0], keep and wanted[1])
        labels, scale, *constants = options
        if keep:
            ctx.save_for_backward(dx if wanted[0] else None, dy if wanted[1] else None)
        else:
            ctx.save_for_backward(x, y, labels, scale)
        ctx.keep, ctx.constants, ctx.wanted = keep, constants, wanted
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.wanted
        if ctx.keep:
            dx, dy = (None if kept is None else _scaled(kept, upstream) for kept in ctx.saved_tensors)
        else:
            x, y, labels, scale = ctx.saved_tensors
            dx, dy = divergence_backward(upstream, x, y, labels, scale, *ctx.constants, *wanted)
        return dx if wanted[0] else None, dy if wanted[1] else None, *[None] * (4 + len(ctx.constants))


def _scaled(kept: Tensor, upstream: Tensor) -> Tensor:
    """``upstream`` times a gradient that the forward made: written over it where no later backward can ask for it again."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return kept * upstream
    scale_in_place(kept, upstream)
    return kept


def _apply(op: str, kind: str, x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, ignore_index: int, divisor: int,
           beta: float, output: str) -> Tensor:  # fmt: skip
    wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in (x, y))
    of_both = wanted[1] or kind in ("jsd", "tvd")  # the gradient needs both inputs
    keep = any(wanted) and of_both and output == "total" and torch.float16 not in (x.dtype, y.dtype)
    return _Divergence.apply(x, y, wanted, keep, labels, scale, ignore_index, divisor, op, kind, beta, output)


def _kl_divisor(x: Tensor, reduction: str) -> int:
    return {"batchmean": x.shape[0], "mean": x.numel(), "sum": 1, "none": 1}[reduction]


def _kl_div_triton(x: Tensor, y: Tensor, reduction: str, log_target: bool) -> Tensor:
    output = "elements" if reduction == "none" else "total"
    return _apply("kl_div", "kl_log" if log_target else "kl", x, y, None, None, 0, _kl_divisor(x, reduction), 0.0, output)


def _rows_triton(
    op: str, kind: str, x: Tensor, y: Tensor, labels: Tensor | None, ignore_index: int, reduction: str, beta: float = 0.0
) -> Tensor:
    scale = _rows_scale(labels, ignore_index, reduction, torch.float32)
    divisor = _divisor(x, reduction, labels is not None)
    return _apply(op, kind, x, y, labels, scale, ignore_index, divisor, beta, "rows" if reduction == "none" else "total")


def _jsd_triton(x: Tensor, y: Tensor, labels: Tensor | None, ignore_index: int, reduction: str, beta: float) -> Tensor:
    if beta == 1.0:
        return _rows_triton("jsd", "kl_log", y, x, labels, ignore_index, reduction)
    return _rows_triton("jsd", "kl_log" if beta == 0.0 else "jsd", x, y, labels, ignore_index, reduction, beta)


def _tvd_triton(x: Tensor, y: Tensor, labels: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    return _rows_triton("tvd", "tvd", x, y, labels, ignore_index, reduction)


# ---- public ----


def _unsupported(x: Tensor, y: Tensor, *_: Any) -> str | None:
    return None if y.dtype in dispatch.TRITON_DTYPES else f"the second input is {y.dtype}, which is served by the reference alone"


_KL_DIV = Op("kl_div", _kl_div_reference, _kl_div_triton, _unsupported)
_JSD = Op("jsd", _jsd_reference, _jsd_triton, _unsupported)
_TVD = Op("tvd", _tvd_reference, _tvd_triton, _unsupported)


def _check(op: str, names: tuple[str, str], x: Tensor, y: Tensor, labels: Tensor | None, reduction: str) -> None:
    checks.is_tensor(op, names[0], x)
    checks.is_tensor(op, names[1], y)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: {names[0]} has shape {tuple(x.shape)}; expected (..., V) with V >= 1")
    checks.has_shape(op, names[1], y, tuple(x.shape))
    checks.same_device(op, **{names[0]: x, names[1]: y}, labels=labels)
    if labels is not None:
        checks.is_tensor(op, "labels", labels, checks.INTS)
        checks.has_shape(op, "labels", labels, tuple(x.shape[:-1]))
    checks.one_of(op, "reduction", reduction, REDUCTIONS)


def kl_div(
    log_probs: Tensor,  # (..., V)
    target: Tensor,  # (..., V)
    /,
    *,
    reduction: Reduction = "batchmean",
    log_target: bool = False,
) -> Tensor:
    """Kullback-Leibler divergence KL(target || exp(log_probs)), as ``torch.nn.functional.kl_div`` defines it.

    Each element gives ``target * (log(target) - log_probs)``, or ``exp(target) * (target - log_probs)`` with ``log_target``. An element
    whose target has probability 0 (target 0, or -inf as a logarithm) gives 0 and gradients of 0, whatever the log-probability; one of
    positive probability against a log-probability of -inf gives inf.

    Args:
        log_probs: (..., V), the logarithm of the predicted distribution, any floating dtype.
        target: of the same shape; may be of another floating dtype.
        reduction: "batchmean", the sum over the first dimension's size; "sum"; "mean", over all elements; "none", all elements.
        log_target: whether target holds logarithms.

    Returns:
        A scalar, or the elements with ``reduction="none"``; fp32 (fp64 where an input is), 0 where there are no rows. Both inputs
        get gradients where they require them. For rows that a label excludes from the mean, :func:`jsd` with ``beta=0`` is this divergence.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices or options.

    Cost, passes over the inputs: 2 forward; backward 2 for the gradient of log_probs alone; see the module for both.
    """
    _check("kl_div", ("log_probs", "target"), log_probs, target, None, reduction)
    return _KL_DIV(log_probs, target, reduction, bool(log_target))


def jsd(
    log_probs: Tensor,  # (..., V)
    target_log_probs: Tensor,  # (..., V)
    /,
    *,
    beta: float = 0.5,
    labels: Tensor | None = None,  # (...)
    ignore_index: int = -100,
    reduction: Reduction = "batchmean",
) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student Q = exp(log_probs) from a teacher P = exp(target_log_probs).

    For 0 < beta < 1, with the mixture ``m = beta * P + (1 - beta) * Q``, a row's divergence is
    ``beta * KL(P || m) + (1 - beta) * KL(Q || m)``. At the ends, where that is 0, the common convention holds: ``beta=0`` is the forward
    KL(P || Q) and ``beta=1`` the reverse KL(Q || P). (GKD, arXiv:2306.13649; Liger-Kernel 0.8.5
    has the same, ends and mean included, so a loss carries over.)

    Args:
        log_probs: (..., V), log-probabilities of the student, any floating dtype. -inf is probability 0.
        target_log_probs: of the same shape, those of the teacher; may be of another floating dtype.
        beta: from 0 to 1.
        labels: (...), int64 or int32: rows whose label is ``ignore_index`` have no loss, a gradient of zero, and do not count in
            a mean. No other label is looked at.
        ignore_index: see labels.
        reduction: "batchmean", the mean over the rows that count; "sum"; "mean", which is batchmean / V; "none", one divergence a row.

    Returns:
        A scalar, or (...) with ``reduction="none"``; fp32 (fp64 where an input is). A mean over no row is 0 with zero gradients.
        Both inputs get gradients where they require them. Finite for any log-probabilities where 0 < beta < 1.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices or options.

    Cost, passes over the inputs: 2 to evaluate; forward and backward 3 for ``loss.backward()``, 5 in general (see the module).
    """
    _check("jsd", ("log_probs", "target_log_probs"), log_probs, target_log_probs, labels, reduction)
    if not isinstance(beta, (int, float)) or not 0.0 <= beta <= 1.0:
        raise ValueError(f"jsd: beta is {beta!r}; expected a number from 0 to 1")
    return _JSD(log_probs, target_log_probs, labels, ignore_index, reduction, float(beta))


def tvd(
    probs: Tensor,  # (..., V)
    target: Tensor,  # (..., V)
    /,
    *,
    labels: Tensor | None = None,  # (...)
    ignore_index: int = -100,
    reduction: Reduction = "batchmean",
) -> Tensor:
    """Total variation distance of two distributions: a row gives ``sum(abs(probs - target)) / 2``.

    Its gradient is half the sign of the difference, and 0 where the two are equal.

    Args:
        probs: (..., V), probabilities (not their logarithms), any floating dtype.
        target: of the same shape; may be of another floating dtype.
        labels: (...), int64 or int32: rows whose label is ``ignore_index`` have no loss, a gradient of zero, and do not count in
            a mean. No other label is looked at.
        ignore_index: see labels.
        reduction: "batchmean", the mean over the rows that count; "sum"; "mean", which is batchmean / V; "none", one distance a row.

    Returns:
        A scalar, or (...) with ``reduction="none"``; fp32 (fp64 where an input is). A mean over no row is 0 with zero gradients.
        Both inputs get gradients where they require them.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices or options.

    Cost, passes over the inputs: 2 to evaluate; forward and backward 3 for ``loss.backward()``, 5 in general (see the module).
    """
    _check("tvd", ("probs", "target"), probs, target, labels, reduction)
    return _TVD(probs, target, labels, ignore_index, reduction)
