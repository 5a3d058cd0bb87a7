"""The Triton kernels of cross-entropy, shared by ``cross_entropy`` and ``linear_cross_entropy``. See cross_entropy.py for the formula.

One program a token. It walks the row in blocks of columns: once for the statistics, once more for the gradient. Exponentials are
base 2, of differences times log2(e); all arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import library
from ._triton import cdiv, launch, next_power_of_2, on_device, tl, triton
from .dispatch import ran

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)  # below any logit, and finite: a block of -inf must not give -inf minus -inf
# One value a program: how a chunk's part of them is aligned makes no difference, and shall make no further compilation.
A_VALUE_A_ROW = ["labels", "losses", "lses", "upstream"]
WHY = "tensors on a device and of a dtype that Triton serves"


@triton.jit
def _tanh(x):
    """tanh without libdevice: 1 - 2 / (e^2x + 1) cancels near 0, where the series takes over (both within 3 ulp of fp32)."""
    magnitude = tl.abs(x)
    square = x * x
    decay = tl.exp2(magnitude * -2.8853900817779268)  # e^(-2|x|)
    far = (1.0 - decay) / (1.0 + decay)
    series = square * (0.021869488536155203 + square * -0.008863235529902197)  # 62/2835, -1382/155925
    series = square * (-0.3333333333333333 + square * (0.13333333333333333 + square * (-0.05396825396825397 + series)))
    near = magnitude + magnitude * series
    result = tl.where(magnitude < 0.35, near, far)
    return tl.where(x < 0, -result, result)


@triton.jit
def _softcapped(pointers, mask, logit_scale, softcap, MASKED: tl.constexpr):
    """The logits that the loss sees: scaled, then soft-capped, in fp32. Where masked: 0."""
    x = tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)
    z = x.to(tl.float32) * logit_scale
    if softcap is not None:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def _class_weights(class_weight, columns, mask, MASKED: tl.constexpr):
    if class_weight is None:
        weights = tl.full(columns.shape, 1.0, tl.float32)
    else:
        weights = tl.load(class_weight + columns, mask=mask if MASKED else None).to(tl.float32)
    return weights


@triton.jit
def _label(labels, class_weight, row, num_classes):
    """(label, column, weight) of a token; a label out of range has column -1 and weight NaN, so that its row turns NaN."""
    label = tl.load(labels + row).to(tl.int64)
    in_range = (label >= 0) & (label < num_classes)
    column = tl.where(in_range, label, -1).to(tl.int32)
    if class_weight is None:
        weight = tl.where(in_range, 1.0, float("nan"))
    else:
        weight = tl.where(in_range, tl.load(class_weight + tl.maximum(column, 0)).to(tl.float32), float("nan"))
    return label, column, weight


@triton.jit
def _accumulate(
    maximum,
    total,
    weighted,
    row_ptr,
    columns,
    class_weight,
    num_classes,
    logit_scale,
    softcap,
    SMOOTHED: tl.constexpr,
    MASKED: tl.constexpr,
):
    mask = columns < num_classes
    z = _softcapped(row_ptr + columns, mask, logit_scale, softcap, MASKED)
    if SMOOTHED:
        weighted += z * tl.where(mask, _class_weights(class_weight, columns, mask, MASKED), 0.0)
    if MASKED:
        z = tl.where(mask, z, float("-inf"))
    raised = tl.maximum(maximum, tl.max(z, 0))
    # The difference first: z * LOG2E - raised * LOG2E becomes one fused multiply-add, in which z = raised does not give 0.
    total = total * tl.exp2((maximum - raised) * LOG2E) + tl.exp2((z - raised) * LOG2E)
    return raised, total, weighted


@triton.jit
def _row_loss(
    row_ptr, column, weight, class_weight, weight_sum, num_classes, kept_share, class_share, z_loss, logit_scale, softcap,
    SMOOTHED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(loss, lse, sum of all class weights) of one row.

    Sums stay in vectors of BLOCK columns until the end: one reduction a block (the maximum), not three.
    """
    target_ptr = row_ptr + tl.maximum(column, 0)
    target = _softcapped(target_ptr, None, logit_scale, softcap, False)  # before any gradient is written over the row
    offsets = tl.arange(0, BLOCK)
    maximum = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    whole = num_classes // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        maximum, total, weighted = _accumulate(
            maximum, total, weighted, row_ptr, start + offsets, class_weight, num_classes, logit_scale, softcap, SMOOTHED, False
        )
    if whole < num_classes:
        maximum, total, weighted = _accumulate(
            maximum, total, weighted, row_ptr, whole + offsets, class_weight, num_classes, logit_scale, softcap, SMOOTHED, True
        )
    log_total = tl.log(tl.sum(total, 0))
    lse = maximum + log_total
    # (maximum - target) is exact where it matters: a confident token's loss is not drowned by the size of its logits.
    loss = kept_share * weight * (log_total + (maximum - target)) + z_loss * weight * lse * lse
    if SMOOTHED:
        all_weights = num_classes * 1.0 if weight_sum is None else tl.load(weight_sum)
        loss += class_share * (all_weights * lse - tl.sum(weighted, 0))
    return loss, lse


@triton.jit
def _write_gradient_block(
    row_ptr, out_ptr, columns, column, class_weight, lse, p_factor, label_factor, class_factor, num_classes, logit_scale, softcap,
    SMOOTHED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    mask = columns < num_classes
    z = _softcapped(row_ptr + columns, mask, logit_scale, softcap, MASKED)
    # The difference first: rounding then grows with its size, which is small where p matters, and not with that of the logits.
    gradient = p_factor * tl.exp2((z - lse) * LOG2E)
    gradient = tl.where(columns == column, gradient - label_factor, gradient)
    if SMOOTHED:
        gradient -= class_factor * _class_weights(class_weight, columns, mask, MASKED)
    if softcap is not None:
        gradient *= 1.0 - (z / softcap) * (z / softcap)
    tl.store(out_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=mask if MASKED else None)


@triton.jit
def _row_gradient(
    row_ptr, out_ptr, column, weight, lse, upstream, class_weight, weight_sum, num_classes, kept_share, class_share, z_loss,
    logit_scale, softcap, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the row's gradient, ``upstream`` times that of its loss, to ``out_ptr``, which may be the row itself."""
    upstream = upstream * logit_scale
    label_factor = upstream * kept_share * weight
    class_factor = upstream * class_share
    p_factor = label_factor + upstream * 2.0 * z_loss * weight * lse
    if SMOOTHED:
        p_factor += class_factor * (num_classes * 1.0 if weight_sum is None else tl.load(weight_sum))
    offsets = tl.arange(0, BLOCK)
    whole = num_classes // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        _write_gradient_block(
            row_ptr, out_ptr, start + offsets, column, class_weight, lse, p_factor, label_factor, class_factor, num_classes,
            logit_scale, softcap, SMOOTHED, False,
        )  # fmt: skip
    if whole < num_classes:
        _write_gradient_block(
            row_ptr, out_ptr, whole + offsets, column, class_weight, lse, p_factor, label_factor, class_factor, num_classes,
            logit_scale, softcap, SMOOTHED, True,
        )  # fmt: skip


@triton.jit
def _write_zeros(out_ptr, num_classes, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    for start in range(0, num_classes, BLOCK):
        tl.store(out_ptr + start + offsets, zeros, mask=start + offsets < num_classes)


@triton.jit
def _row_pointer(logits, row, inner, outer_rows, row_stride):
    """Row ``row`` of (outer, inner, V) logits whose outer stride is ``outer_rows`` rows: what ``logits[:, :-1]`` looks like."""
    index = (row // inner).to(tl.int64) * outer_rows + row % inner
    return logits + index * row_stride


@triton.jit(do_not_specialize=["inner", "outer_rows", "ignore_index"], do_not_specialize_on_alignment=A_VALUE_A_ROW)
def _cross_entropy_forward_kernel(
    logits, labels, class_weight, weight_sum, losses, lses, inner, outer_rows, row_stride, num_classes, ignore_index,
    kept_share, class_share, z_loss, logit_scale, softcap, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    label, column, weight = _label(labels, class_weight, row, num_classes)
    loss = 0.0
    lse = 0.0
    if label != ignore_index:
        row_ptr = _row_pointer(logits, row, inner, outer_rows, row_stride)
        loss, lse = _row_loss(
            row_ptr, column, weight, class_weight, weight_sum, num_classes, kept_share, class_share, z_loss, logit_scale, softcap,
            SMOOTHED, BLOCK, STAGES,
        )  # fmt: skip
    tl.store(losses + row, loss)
    if lses is not None:
        tl.store(lses + row, lse)


@triton.jit(do_not_specialize=["inner", "outer_rows", "ignore_index", "upstream_stride"], do_not_specialize_on_alignment=A_VALUE_A_ROW)
def _cross_entropy_backward_kernel(
    upstream, logits, labels, class_weight, weight_sum, lses, gradient, inner, outer_rows, row_stride, num_classes, ignore_index,
    upstream_stride, kept_share, class_share, z_loss, softcap, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    label, column, weight = _label(labels, class_weight, row, num_classes)
    out_ptr = gradient + row.to(tl.int64) * num_classes
    if label != ignore_index:
        row_ptr = _row_pointer(logits, row, inner, outer_rows, row_stride)
        _row_gradient(
            row_ptr, out_ptr, column, weight, tl.load(lses + row), tl.load(upstream + row * upstream_stride), class_weight, weight_sum,
            num_classes, kept_share, class_share, z_loss, 1.0, softcap, SMOOTHED, BLOCK, STAGES,
        )  # fmt: skip
    else:
        _write_zeros(out_ptr, num_classes, BLOCK)


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=A_VALUE_A_ROW)
def _cross_entropy_in_place_kernel(
    logits, labels, class_weight, weight_sum, upstream, losses, row_stride, num_classes, ignore_index,
    kept_share, class_share, z_loss, logit_scale, softcap, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loss and gradient of a row in one program, the gradient over the logits: the row may still be in the L2 cache."""
    row = tl.program_id(0)
    label, column, weight = _label(labels, class_weight, row, num_classes)
    row_ptr = logits + row.to(tl.int64) * row_stride
    loss = 0.0
    if label != ignore_index:
        loss, lse = _row_loss(
            row_ptr, column, weight, class_weight, weight_sum, num_classes, kept_share, class_share, z_loss, logit_scale, softcap,
            SMOOTHED, BLOCK, STAGES,
        )  # fmt: skip
        factor = 1.0 if upstream is None else tl.load(upstream + row)
        _row_gradient(
            row_ptr, row_ptr, column, weight, lse, factor, class_weight, weight_sum, num_classes, kept_share, class_share, z_loss,
            logit_scale, softcap, SMOOTHED, BLOCK, STAGES,
        )  # fmt: skip
    else:
        _write_zeros(row_ptr, num_classes, BLOCK)
    tl.store(losses + row, loss)


@triton.jit(do_not_specialize=["count"])
def _scale_kernel(x, scale, out, count, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    factor = tl.load(scale)
    if start + BLOCK <= count:  # unmasked, so that accesses stay wide though the count is not known to be a multiple of anything
        tl.store(out + offsets, (tl.load(x + offsets).to(tl.float32) * factor).to(out.dtype.element_ty))
    else:
        mask = offsets < count
        tl.store(out + offsets, (tl.load(x + offsets, mask=mask).to(tl.float32) * factor).to(out.dtype.element_ty), mask=mask)


def _blocks(num_classes: int, smoothed: bool) -> dict[str, int]:
    """Launch constants: 16 columns a thread, 8 where smoothing keeps a second sum a column (16 would spill registers)."""
    block = min(2048 if smoothed else 4096, max(32, next_power_of_2(num_classes)))
    return {"BLOCK": block, "STAGES": 1, "num_warps": 8 if block >= 2048 else 4 if block >= 512 else 1}


def _as_rows(logits: Tensor) -> tuple[Tensor, int, int, int]:
    """(logits, inner, outer_rows, row_stride) for :func:`_row_pointer`: by stride where that is possible, else after one copy."""
    if logits.stride(-1) != 1 and logits.shape[-1] != 1:
        logits = logits.contiguous()
    if logits.dim() == 3:
        inner, outer_stride, row_stride = logits.shape[1], logits.stride(0), logits.stride(1)
        if row_stride > 0 and outer_stride % row_stride == 0:
            return logits, max(inner, 1), outer_stride // row_stride, row_stride
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    return rows, max(rows.shape[0], 1), 0, rows.stride(0)


def _weights(class_weight: Tensor | None, label_smoothing: float) -> tuple[Tensor | None, Tensor | None]:
    """(class_weight, its sum) as the kernels read them; the sum only where smoothing needs it."""
    if class_weight is None:
        return None, None
    return class_weight.contiguous(), class_weight.sum(dtype=torch.float32) if label_smoothing else None


def launch_forward(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, losses: Tensor, lses: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float = 1.0,
) -> None:  # fmt: skip
    """Write each row's loss, and its log-sum-exp where ``lses`` is given. ``labels`` (N,), ``losses`` and ``lses`` are contiguous."""
    num_classes = logits.shape[-1]
    logits, inner, outer_rows, row_stride = _as_rows(logits)
    class_weight, weight_sum = _weights(class_weight, label_smoothing)
    with on_device(logits):
        launch(
            _cross_entropy_forward_kernel, (labels.numel(),),
            logits, labels, class_weight, weight_sum, losses, lses, inner, outer_rows, row_stride, num_classes, ignore_index,
            1.0 - label_smoothing, label_smoothing / num_classes, z_loss, logit_scale, softcap,
            SMOOTHED=label_smoothing != 0, **_blocks(num_classes, label_smoothing != 0),
        )  # fmt: skip


def launch_in_place(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, upstream: Tensor | None, losses: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float,
) -> None:  # fmt: skip
    """Write each row's loss, and over (N, V) ``logits`` the gradient of ``upstream`` (N,) times it (of the loss itself for None)."""
    num_classes = logits.shape[1]
    class_weight, weight_sum = _weights(class_weight, label_smoothing)
    with on_device(logits):
        launch(
            _cross_entropy_in_place_kernel, (labels.numel(),),
            logits, labels, class_weight, weight_sum, upstream, losses, logits.stride(0), num_classes, ignore_index,
            1.0 - label_smoothing, label_smoothing / num_classes, z_loss, logit_scale, softcap,
            SMOOTHED=label_smoothing != 0, **_blocks(num_classes, label_smoothing != 0),
        )  # fmt: skip


def launch_scale(x: Tensor, scale: Tensor, out: Tensor) -> None:
    """``out = scale * x`` for contiguous tensors and a 0-d fp32 ``scale``, rounded once."""
    with on_device(x):
        launch(_scale_kernel, (cdiv(x.numel(), 4096),), x, scale, out, x.numel(), BLOCK=4096, num_warps=8)


def _forward(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    ran("cross_entropy", "forward", "triton", WHY)
    losses, lses = _forward_fake(logits, labels, class_weight, ignore_index, label_smoothing, z_loss, softcap)
    launch_forward(logits, labels.reshape(-1).contiguous(), class_weight, losses, lses, ignore_index, label_smoothing, z_loss, softcap)
    return losses, lses


def _forward_fake(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    return logits.new_empty(labels.shape, dtype=torch.float32), logits.new_empty(labels.shape, dtype=torch.float32)


def _backward(
    upstream: Tensor, logits: Tensor, labels: Tensor, class_weight: Tensor | None, lses: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    ran("cross_entropy", "backward", "triton", WHY)
    num_classes = logits.shape[-1]
    gradient = logits.new_empty(logits.shape)
    rows, inner, outer_rows, row_stride = _as_rows(logits)
    class_weight, weight_sum = _weights(class_weight, label_smoothing)
    upstream = upstream.reshape(-1)  # a stride of 0 (from .sum() or .mean()) stays one
    with on_device(logits):
        launch(
            _cross_entropy_backward_kernel, (labels.numel(),),
            upstream, rows, labels.reshape(-1).contiguous(), class_weight, weight_sum, lses, gradient, inner, outer_rows, row_stride,
            num_classes, ignore_index, upstream.stride(0), 1.0 - label_smoothing, label_smoothing / num_classes, z_loss, softcap,
            SMOOTHED=label_smoothing != 0, **_blocks(num_classes, label_smoothing != 0),
        )  # fmt: skip
    return gradient


def _backward_fake(upstream: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


cross_entropy_forward = library.define(
    "cross_entropy_forward(Tensor logits, Tensor labels, Tensor? class_weight, SymInt ignore_index, float label_smoothing, float z_loss, "
    "float? softcap) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
cross_entropy_backward = library.define(
    "cross_entropy_backward(Tensor upstream, Tensor logits, Tensor labels, Tensor? class_weight, Tensor lse, SymInt ignore_index, "
    "float label_smoothing, float z_loss, float? softcap) -> Tensor",
    _backward,
    _backward_fake,
)
