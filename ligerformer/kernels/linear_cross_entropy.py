r"""Cross-entropy of a language model's head, ``logits = logit_scale * (hidden @ weight.T + bias)``, without ever holding all the logits.

Rows are taken in chunks that fit a byte budget. A chunk's logits go into one buffer that every chunk reuses; where gradients are
wanted, the gradient of the loss is written over them at once, and is multiplied out before the next chunk comes::

    logits  = hidden[chunk] @ weight.T            (n, V), rounded to the compute dtype as an eager head rounds them
    losses  = cross_entropy(logits), logits := d(sum of losses) / d(logits)
    dhidden = logits @ weight                     (n, C)
    dweight += logits.T @ hidden[chunk]           (V, C), in accum_dtype

So the forward does the backward's products, for the *sum* of the losses; the backward multiplies by the scalar that the mean and the
upstream gradient make, in fp32 and out of place. (The gradient of the sum, not of the mean: fp16 would lose 1/N times a small
probability.) The formula of the loss is that of cross_entropy.py; the idea of chunking it is Liger-Kernel's (arXiv:2410.10989).

Cost: 3 products of 2 * tokens * V * C FLOPs with gradients, 1 without, 4 for ``reduction="none"`` with gradients (they wait for the
upstream gradient); besides them 3 passes over the logits. Saved for the backward: the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, library
from ._cross_entropy_kernels import WHY, launch_forward, launch_in_place, launch_scale
from ._triton import device_info
from .cross_entropy import Reduction, check_options, check_targets, label_weights, loss_dtype, mean_scale, token_losses
from .dispatch import Op, ran

MIB = 1024 * 1024


def linear_cross_entropy(
    hidden: Tensor,  # (..., C)
    weight: Tensor,  # (V, C)
    labels: Tensor,  # (...)
    /,
    *,
    bias: Tensor | None = None,  # (V,)
    logit_scale: float = 1.0,
    accum_dtype: torch.dtype = torch.float32,
    chunk_bytes: int | None = None,
    num_items: float | Tensor | None = None,
    num_valid: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,  # (V,)
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy loss of ``logit_scale * (hidden @ weight.T + bias)``, soft-capped after that, against ``labels``.

    The loss is fp32 (fp64 for fp64 inputs): a scalar, or one loss a token with ``reduction="none"``. Gradients come in each input's dtype,
    and only those asked for are computed; under ``no_grad`` the cost is one product. Under autocast the products run in its dtype.

    Args:
        hidden: (..., C). ``hidden``, ``weight`` and ``bias`` have one dtype, as an eager head demands, but under autocast.
        weight: (V, C).
        labels: (...), int64 or int32, in [0, V) or ``ignore_index``.
        bias: (V,), added before the scale.
        logit_scale: factor of the logits (1/16 in Granite, say), applied in fp32.
        accum_dtype: in what the weight's gradient is summed over chunks; a 16-bit type halves that memory and rounds at each chunk.
        chunk_bytes: budget of the logits buffer, at least one row. By default 1 GiB on a GPU, more (to 2 GiB) where a narrow ``hidden``
            would leave multiprocessors idle; 128 MiB on the CPU.
        num_items: divisor of the mean in place of this call's count, a number or a 0-d tensor: the count of a whole batch of
            micro-batches, whose losses then add up to the batch's.
        num_valid: how many labels are not ignored, where the host knows it: ignored rows are then dropped before the head. A wrong count
            makes the loss and its gradients NaN (looking for it on the host would stall).
        ignore_index, label_smoothing, z_loss, softcap, class_weight, reduction: as in :func:`cross_entropy`.

    A mean over no token (all ignored, or none at all) is 0 with zero gradients.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices or options.
        IndexError: a label outside [0, V) on the CPU (RuntimeError in compiled code). On a GPU, where
            looking would stall, that token's loss and gradients are NaN.

    Cost: 3 products of 2 * tokens * V * C FLOPs (1 without gradients, 4 with them for "none"). Memory: the logits buffer, the gradients
    saved for the backward, and the weight's gradient in ``accum_dtype`` where there are several chunks.
    """
    op = "linear_cross_entropy"
    compute_dtype = _check_inputs(op, hidden, weight, bias)
    check_targets(op, labels, hidden.shape[:-1], weight.shape[0], ignore_index, class_weight, "hidden", hidden)
    check_options(op, label_smoothing, z_loss, softcap, reduction)
    _check_counts(op, labels, chunk_bytes, num_items, num_valid, reduction)
    checks.one_of(op, "accum_dtype", accum_dtype, (torch.float32, torch.bfloat16, torch.float16))
    if not isinstance(logit_scale, (int, float)) or not abs(logit_scale) < float("inf"):
        raise ValueError(f"{op}: logit_scale is {logit_scale!r}; expected a finite number")
    options = (ignore_index, float(label_smoothing), float(z_loss), softcap, float(logit_scale))
    return _OP(
        hidden, weight, labels, bias, class_weight, options, compute_dtype, torch.promote_types(compute_dtype, accum_dtype), chunk_bytes,
        num_items, num_valid, reduction,
    )  # fmt: skip


def _check_inputs(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of the products; an error for a head that does not fit."""
    checks.is_tensor(op, "hidden", hidden)
    checks.is_tensor(op, "weight", weight)
    if hidden.dim() == 0:
        raise ValueError(f"{op}: hidden is a scalar; expected (..., C)")
    checks.has_shape(op, "weight", weight, ("V", hidden.shape[-1]))
    if bias is not None:
        checks.is_tensor(op, "bias", bias)
        checks.has_shape(op, "bias", bias, (weight.shape[0],))
    checks.same_device(op, hidden=hidden, weight=weight, bias=bias)
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in dtypes:  # autocast leaves fp64 alone
        return torch.get_autocast_dtype(device)
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            raise TypeError(f"{op}: {name} has dtype {x.dtype} and hidden {hidden.dtype}; cast one of them, or use torch.autocast")
    return hidden.dtype


def _check_counts(
    op: str, labels: Tensor, chunk_bytes: int | None, num_items: float | Tensor | None, num_valid: int | None, reduction: str
) -> None:
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"{op}: chunk_bytes is {chunk_bytes!r}; expected a positive number of bytes, or None")
    if num_valid is not None and not 0 <= num_valid <= labels.numel():
        raise ValueError(f"{op}: num_valid is {num_valid!r}; expected 0 to {labels.numel()}, the number of labels")
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f"{op}: num_items is the divisor of a mean; reduction is {reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"{op}: num_items has shape {tuple(num_items.shape)}; expected one number")
    elif num_items < 0:
        raise ValueError(f"{op}: num_items is {num_items!r}; expected a number >= 0")


def _run(
    triton: bool, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, class_weight: Tensor | None, options: tuple,
    compute_dtype: torch.dtype, accum_dtype: torch.dtype, chunk_bytes: int | None, num_items: float | Tensor | None, num_valid: int | None,
    reduction: str,
) -> Tensor:  # fmt: skip
    """Both implementations: what differs is who computes a chunk's losses and the gradient of its logits."""
    ignore_index = options[0]
    shape, dtype = labels.shape, loss_dtype(hidden)
    rows, row_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    kept = None
    if num_valid is not None and num_valid < labels.numel():
        # A stable sort brings the kept rows to the front in their order; how many they are is known, so nothing waits for the device.
        kept = torch.argsort((row_labels == ignore_index).to(torch.uint8), stable=True)[:num_valid]
        rows, row_labels = rows.index_select(0, kept), row_labels.index_select(0, kept)
    wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias))
    largest = _chunk_rows(hidden.device, weight, compute_dtype, chunk_bytes)
    # With one chunk the product is written in the weight's dtype, unless that is fp16: a sum over tokens may leave its range. A graph
    # that is compiled for any number of rows must not depend on the number of chunks.
    one_chunk = not torch.compiler.is_compiling() and rows.shape[0] <= largest
    dweight_dtype = weight.dtype if one_chunk and weight.dtype == compute_dtype != torch.float16 else accum_dtype
    loss = _LinearCrossEntropy.apply(
        rows, weight, bias, row_labels, class_weight, reduction != "none", wanted, *options, compute_dtype, dweight_dtype, largest, triton
    )
    scale = None
    if reduction == "mean":
        scale = mean_scale(row_labels, ignore_index, class_weight, num_items, dtype)
    if num_valid is not None:
        right = (labels != ignore_index).sum() == num_valid
        scale = torch.where(right, torch.ones((), dtype=dtype, device=labels.device) if scale is None else scale, float("nan"))
    if reduction == "none":
        if kept is not None:
            loss = loss.new_zeros(labels.numel()).index_copy(0, kept, loss)
        loss = loss.reshape(shape)
    return loss if scale is None else loss * scale


def _chunk_rows(device: torch.device, weight: Tensor, compute_dtype: torch.dtype, chunk_bytes: int | None) -> int:
    """The most rows of logits a chunk may hold."""
    vocab_size, hidden_size = weight.shape
    row_bytes = vocab_size * compute_dtype.itemsize
    if chunk_bytes is not None:
        return max(1, chunk_bytes // row_bytes)
    if device.type != "cuda":
        return max(1, 128 * MIB // row_bytes)
    # dhidden has rows x hidden_size elements, in tiles of 128 x 256: fewer tiles than multiprocessors leave some of these idle.
    filling = -(-device_info(device).num_sms * 128 * 256 // max(hidden_size, 1))
    return max(1, 1024 * MIB // row_bytes, min(filling, 2048 * MIB // row_bytes))


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses (``summed``) with gradients made on the way, or the losses themselves with gradients made in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, summed: bool,
        wanted: tuple[bool, bool, bool], *options: Any,
    ) -> Tensor:  # fmt: skip
        inputs = (hidden, weight, bias, labels, class_weight)
        losses, gradients = chunked(*inputs, None, list(wanted) if summed else [False] * 3, *options)
        ctx.summed, ctx.wanted, ctx.options = summed, wanted, options
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        ctx.save_for_backward(*(_spread(gradients, wanted) if summed else inputs))
        return losses.sum() if summed else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.summed:
            gradients = scale_gradients(*ctx.saved_tensors, upstream, *ctx.dtypes, ctx.options[-1])
        else:
            _, gradients = chunked(*ctx.saved_tensors, upstream.contiguous(), list(ctx.wanted), *ctx.options)
        spread = _spread(gradients, ctx.wanted)
        cast = (None if x is None else x.to(dtype) for x, dtype in zip(spread, ctx.dtypes, strict=True))
        return *cast, *[None] * (4 + len(ctx.options))


def _spread(gradients: list[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients wanted in their places, and None in the others."""
    remaining = list(gradients)
    return [remaining.pop(0) if want else None for want in wanted]


def _chunked(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    upstream: Tensor | None,  # (N,) gradient of each loss; None for that of their sum
    wanted: list[bool],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    compute_dtype: torch.dtype,
    dweight_dtype: torch.dtype,
    chunk_rows: int,
    triton: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Losses (N,), and the gradients wanted of (hidden, weight, bias), in the dtypes they were summed in."""
    if triton:
        ran("linear_cross_entropy", "forward" if upstream is None else "backward", "triton", WHY)
    losses, gradients = _outputs(hidden, weight, wanted, compute_dtype, dweight_dtype)
    dhidden, dweight, dbias = _spread(gradients, wanted)
    loss_and_gradient = _triton_chunk if triton else _torch_chunk
    num_rows, labels = hidden.shape[0], labels.contiguous()
    rows = _even_chunk(num_rows, chunk_rows)
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(compute_dtype)
        bias = None if bias is None else bias.to(compute_dtype)
        buffer = _logits_buffer(rows, head, triton)
        for start in range(0, num_rows, rows):
            chunk = slice(start, min(start + rows, num_rows))
            x = hidden[chunk].to(compute_dtype)
            logits = buffer[: x.shape[0]]
            if bias is None:
                torch.mm(x, head.t(), out=logits)
            else:
                torch.addmm(bias, x, head.t(), out=logits)
            gradient = loss_and_gradient(
                logits, labels[chunk], class_weight, None if upstream is None else upstream[chunk], losses[chunk], any(wanted),
                ignore_index, label_smoothing, z_loss, softcap, logit_scale,
            )  # fmt: skip
            if dhidden is not None:
                torch.mm(gradient, head, out=dhidden[chunk])
            if dweight is not None:
                _add_product(dweight, gradient.t(), x, first=start == 0)
            if dbias is not None:
                dbias += gradient.sum(0, dtype=dbias.dtype)
    if dweight is not None and num_rows == 0:
        dweight.zero_()
    return losses, gradients


def _outputs(
    hidden: Tensor, weight: Tensor, wanted: list[bool], compute_dtype: torch.dtype, dweight_dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Memory for what :func:`_chunked` returns; the bias's gradient is summed up from zero."""
    dtype = loss_dtype(hidden)
    gradients = []
    if wanted[0]:
        gradients.append(hidden.new_empty(hidden.shape, dtype=compute_dtype))
    if wanted[1]:
        gradients.append(weight.new_empty(weight.shape, dtype=dweight_dtype))
    if wanted[2]:
        gradients.append(weight.new_zeros(weight.shape[0], dtype=dtype))
    return hidden.new_empty(hidden.shape[0], dtype=dtype), gradients


def _chunked_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, upstream: Tensor | None,
    wanted: list[bool], ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float,
    compute_dtype: torch.dtype, dweight_dtype: torch.dtype, chunk_rows: int, triton: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    return _outputs(hidden, weight, wanted, compute_dtype, dweight_dtype)


def _even_chunk(num_rows: int, largest: int) -> int:
    """Rows a chunk, so that all chunks are about as long; whole tiles of 128 rows where they fit."""
    chunks = max(1, -(-num_rows // largest))
    even = max(1, -(-num_rows // chunks))
    return min(largest, -(-even // 128) * 128, max(1, num_rows))


def _logits_buffer(rows: int, head: Tensor, triton: bool) -> Tensor:
    """(rows, V); for kernels the rows start at multiples of 128 bytes or more, whatever the vocabulary (GPT-2's is odd)."""
    vocab_size = head.shape[0]
    padded = -(-vocab_size // 64) * 64 if triton else vocab_size
    return head.new_empty(rows, padded)[:, :vocab_size]


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """``total (+)= a @ b``, in total's dtype where that is wider than theirs."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # no such product on the CPU
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _triton_chunk(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, upstream: Tensor | None, losses: Tensor, with_gradient: bool, *options: Any
) -> Tensor:  # fmt: skip
    """Write a chunk's losses; return the gradient of ``upstream`` times them, which takes the place of the logits."""
    if with_gradient:
        launch_in_place(logits, labels, class_weight, upstream, losses, *options)
    else:
        launch_forward(logits, labels, class_weight, losses, None, *options)
    return logits


def _torch_chunk(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, upstream: Tensor | None, losses: Tensor, with_gradient: bool,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float,
) -> Tensor:  # fmt: skip
    """The same in plain torch, by the formulas of cross_entropy.py."""
    dtype, num_classes = losses.dtype, logits.shape[1]
    z = logits.to(dtype)
    if logit_scale != 1.0:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_probs = torch.log_softmax(z, 1)
    losses.copy_(token_losses(z, log_probs, labels, class_weight, ignore_index, label_smoothing, z_loss))
    if not with_gradient:
        return logits
    index, weight = label_weights(labels, num_classes, class_weight, ignore_index, dtype)
    upstream = torch.where(labels != ignore_index, 1.0 if upstream is None else upstream, 0.0).to(dtype) * logit_scale
    weight = weight * upstream
    label_factor, class_factor = (1.0 - label_smoothing) * weight, label_smoothing / num_classes * upstream
    p_factor = label_factor + class_factor * (num_classes if class_weight is None else class_weight.sum(dtype=dtype))
    if z_loss:
        p_factor = p_factor + 2.0 * z_loss * weight * torch.logsumexp(z, 1)
    gradient = log_probs.exp_().mul_(p_factor.unsqueeze(1))
    gradient[torch.arange(len(index), device=index.device), index] -= label_factor
    if label_smoothing:
        gradient -= class_factor.unsqueeze(1) * (1.0 if class_weight is None else class_weight.to(dtype))
    if softcap is not None:
        gradient *= 1.0 - (z / softcap).square()
    return gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)


def _scale(
    dhidden: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, scale: Tensor, hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype, bias_dtype: torch.dtype, triton: bool,
) -> list[Tensor]:  # fmt: skip
    """``scale`` (0-d, fp32 or fp64) times each gradient there is, multiplied in scale's dtype and rounded once."""
    gradients = [x for x in (dhidden, dweight, dbias) if x is not None]
    scaled = _scale_fake(dhidden, dweight, dbias, scale, hidden_dtype, weight_dtype, bias_dtype, triton)
    if triton:
        ran("linear_cross_entropy", "backward", "triton", WHY)
    for gradient, out in zip(gradients, scaled, strict=True):
        if triton:
            launch_scale(gradient, scale, out)
        else:
            torch.mul(gradient.to(scale.dtype), scale, out=out)  # rounds to out's dtype as it stores
    return scaled


def _scale_fake(
    dhidden: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, scale: Tensor, hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype, bias_dtype: torch.dtype, triton: bool,
) -> list[Tensor]:  # fmt: skip
    pairs = ((dhidden, hidden_dtype), (dweight, weight_dtype), (dbias, bias_dtype))
    return [x.new_empty(x.shape, dtype=dtype) for x, dtype in pairs if x is not None]


chunked = library.define(
    "linear_cross_entropy_chunked(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight, Tensor? upstream, "
    "bool[] wanted, SymInt ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale, ScalarType compute_dtype, "
    "ScalarType dweight_dtype, SymInt chunk_rows, bool triton) -> (Tensor, Tensor[])",
    _chunked,
    _chunked_fake,
)
scale_gradients = library.define(
    "linear_cross_entropy_scale(Tensor? dhidden, Tensor? dweight, Tensor? dbias, Tensor scale, ScalarType hidden_dtype, "
    "ScalarType weight_dtype, ScalarType bias_dtype, bool triton) -> Tensor[]",
    _scale,
    _scale_fake,
)


def _linear_cross_entropy_reference(*arguments: Any) -> Tensor:
    return _run(False, *arguments)


def _linear_cross_entropy_triton(*arguments: Any) -> Tensor:
    return _run(True, *arguments)


_OP = Op("linear_cross_entropy", _linear_cross_entropy_reference, _linear_cross_entropy_triton)
