r"""Cross-entropy of logits against class labels, with label smoothing, z-loss, soft-cap and class weights.

For a token with logits ``x`` (V values), label ``y`` and class weights ``w`` (1 where there are none)::

    z    = cap * tanh(x / cap)  with a soft-cap (Gemma 2, arXiv:2408.00118), else x
    lse  = log sum_c exp(z_c)
    loss = (1 - s) * w_y * (lse - z_y)  +  s / V * sum_c w_c * (lse - z_c)  +  z_loss * w_y * lse**2
    dz_c = p_c * ((1 - s) * w_y + s / V * sum(w) + 2 * z_loss * w_y * lse)  -  (1 - s) * w_y * [c = y]  -  s / V * w_c
    dx_c = dz_c * (1 - (z_c / cap)**2)

with ``p = exp(z - lse)`` and ``s`` the label smoothing. That is ``torch.nn.functional.cross_entropy`` wherever it has the option; the
z-loss (PaLM, arXiv:2204.02311) carries the weight of the token's label, so that scaling all class weights changes no mean.

Cost: the forward reads the logits once and saves them (the caller's tensor, no copy) with one fp32 ``lse`` a token; the backward reads
them once more and writes the gradient: 3 passes over tokens x V in all.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks
from ._cross_entropy_kernels import cross_entropy_backward, cross_entropy_forward
from .dispatch import Op

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: Tensor,  # (..., V)
    labels: Tensor,  # (...)
    /,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,  # (V,)
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy loss of ``logits`` against ``labels``: a scalar, or one loss a token with ``reduction="none"``.

    The loss is fp32 (fp64 for fp64 logits) whatever the dtype of the logits; their gradient has their dtype. Logits are never written.

    Args:
        logits: (..., V), any floating dtype; a last dimension of unit stride is read in place, ``logits[:, :-1]`` included.
        labels: (...), int64 or int32, in [0, V) or ``ignore_index``.
        ignore_index: tokens with this label have no loss and a gradient of zero, and do not count in the mean.
        label_smoothing: in [0, 1]: this share of the target is spread evenly over the V classes.
        z_loss: adds ``z_loss * w_y * lse**2`` to each token's loss (w_y is the class weight of its label, 1 without weights).
        softcap: if given, ``softcap * tanh(logits / softcap)`` takes the logits' place.
        class_weight: (V,), a factor for each class as in torch; a constant (it gets no gradient).
        reduction: "sum"; "mean", which is the sum over the number of tokens kept, or over the sum of their labels' weights; or "none".

    A mean over no token (all ignored, or none at all) is 0 with zero gradients.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices or options.
        IndexError: a label outside [0, V) on the CPU (RuntimeError in compiled code). On a GPU, where
            looking would stall, that token's loss and gradient are NaN.

    Cost: one read of the logits forward, one read and one write backward; saved: the logits themselves and 4 bytes a token.
    """
    op = "cross_entropy"
    checks.is_tensor(op, "logits", logits)
    if logits.dim() == 0:
        raise ValueError(f"{op}: logits is a scalar; expected (..., V)")
    check_targets(op, labels, logits.shape[:-1], logits.shape[-1], ignore_index, class_weight, "logits", logits)
    check_options(op, label_smoothing, z_loss, softcap, reduction)
    return _OP(logits, labels, class_weight, ignore_index, float(label_smoothing), float(z_loss), softcap, reduction)


def check_targets(
    op: str, labels: Tensor, shape: torch.Size, num_classes: int, ignore_index: int, class_weight: Tensor | None, name: str, x: Tensor
) -> None:
    """Errors for labels or class weights that do not fit ``num_classes`` and tokens of ``shape``; ``x``, the argument ``name``, tells the device."""
    checks.is_tensor(op, "labels", labels, checks.INTS)
    checks.has_shape(op, "labels", labels, tuple(shape))
    if num_classes < 1:
        raise ValueError(f"{op}: there are {num_classes} classes; expected at least one")
    checks.same_device(op, **{name: x}, labels=labels, class_weight=class_weight)
    if class_weight is not None:
        checks.is_tensor(op, "class_weight", class_weight)
        checks.has_shape(op, "class_weight", class_weight, (num_classes,))
        if class_weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: class_weight requires a gradient, and none is computed for it; pass class_weight.detach()")
    if labels.device.type == "cpu":
        bad = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
        expected = f"expected 0 to {num_classes - 1}, or ignore_index ({ignore_index})"
        if torch.compiler.is_compiling():  # a branch on values would break the graph
            torch._assert_async(~bad.any(), f"{op}: labels holds a value out of range; {expected}")
        elif bad.any():
            raise IndexError(f"{op}: labels holds {int(labels[bad][0])} ({int(bad.sum())} out of range); {expected}")


def check_options(op: str, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str) -> None:
    """ValueError for an option out of its range."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing!r}; expected a number from 0 to 1")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"{op}: z_loss is {z_loss!r}; expected a finite number >= 0")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise ValueError(f"{op}: softcap is {softcap!r}; expected a finite number > 0, or None")
    checks.one_of(op, "reduction", reduction, ("mean", "sum", "none"))


def loss_dtype(x: Tensor) -> torch.dtype:
    """The dtype of losses and of all arithmetic inside: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def mean_scale(
    labels: Tensor, ignore_index: int, class_weight: Tensor | None, num_items: float | Tensor | None, dtype: torch.dtype
) -> Tensor:
    """One over the divisor of a mean, a 0-d tensor on the labels' device (nothing waits for it).

    It is 1 where every label is ignored: the sum of the losses is 0 there, and so is the mean, whatever the divisor.
    """
    kept = labels != ignore_index
    if num_items is None and class_weight is None:
        return kept.sum(dtype=dtype).clamp(min=1).reciprocal()
    if num_items is not None:
        # A number is filled in on the device, and a tensor stays where it is (a 0-d CPU tensor is read at launch): nothing waits.
        is_tensor = isinstance(num_items, Tensor)
        divisor = num_items.reshape(()).to(dtype) if is_tensor else torch.full((), num_items, dtype=dtype, device=labels.device)
    else:
        divisor = torch.where(kept, class_weight.to(dtype)[_safe(labels, class_weight.shape[0])], 0.0).sum()
    return torch.where(kept.any(), divisor.reciprocal(), 1.0)


def _safe(labels: Tensor, num_classes: int) -> Tensor:
    """Labels as int64 indices, with 0 for those out of range (ignored ones among them)."""
    return torch.where((labels >= 0) & (labels < num_classes), labels, 0).long()


def label_weights(
    labels: Tensor, num_classes: int, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(index, weight) of each token's label: weight 0 where ignored, NaN where out of range, so that the row turns NaN."""
    index = _safe(labels, num_classes)
    weight = torch.ones(labels.shape, dtype=dtype, device=labels.device) if class_weight is None else class_weight.to(dtype)[index]
    weight = torch.where(index == labels, weight, float("nan"))
    return index, torch.where(labels != ignore_index, weight, 0.0)


def token_losses(
    z: Tensor,  # (..., V) logits after the soft-cap, fp32 or fp64
    log_probs: Tensor,  # (..., V) log_softmax(z)
    labels: Tensor,  # (...)
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """One loss a token by the module's formula, in plain torch."""
    num_classes = z.shape[-1]
    index, weight = label_weights(labels, num_classes, class_weight, ignore_index, z.dtype)
    loss = (label_smoothing - 1.0) * weight * log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        weighted = log_probs if class_weight is None else log_probs * class_weight.to(z.dtype)
        loss = loss - label_smoothing / num_classes * weighted.sum(-1)
    if z_loss:
        loss = loss + z_loss * weight * torch.logsumexp(z, -1).square()
    return torch.where(labels != ignore_index, loss, 0.0)


def reduce_losses(losses: Tensor, labels: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """The sum, the mean (see :func:`mean_scale`), or the losses themselves."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() * mean_scale(labels, ignore_index, class_weight, None, losses.dtype)


def _cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    z = logits.to(loss_dtype(logits))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    losses = token_losses(z, torch.log_softmax(z, -1), labels, class_weight, ignore_index, label_smoothing, z_loss)
    return reduce_losses(losses, labels, class_weight, ignore_index, reduction)


class _CrossEntropy(torch.autograd.Function):
    """Losses a token; what a reduction does to them, and to their gradient, is torch's autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, class_weight: Tensor | None, *options: Any) -> Tensor:
        losses, lse = cross_entropy_forward(logits, labels, class_weight, *options)
        ctx.save_for_backward(logits, labels, class_weight, lse)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, class_weight, lse = ctx.saved_tensors
        return cross_entropy_backward(grad, logits, labels, class_weight, lse, *ctx.options), *[None] * 6


def _cross_entropy_triton(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    losses = _CrossEntropy.apply(logits, labels, class_weight, ignore_index, label_smoothing, z_loss, softcap)
    return reduce_losses(losses, labels, class_weight, ignore_index, reduction)


_OP = Op("cross_entropy", _cross_entropy_reference, _cross_entropy_triton)
