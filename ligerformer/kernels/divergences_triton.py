"""The Triton kernels of the divergences. See divergences.py for the formulas, and for which gradient is made when.

One kernel serves forward and backward: a program walks a part of one row, and writes the part's sum, gradients, or both. Masked
columns and ignored rows load values whose terms are zero (-inf for "kl_log", else 0). All arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import library
from ._rows import as_rows
from ._triton import cdiv, device_info, launch, next_power_of_2, on_device, tl, triton
from .dispatch import ran

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # the logarithm of 0, and finite: -inf less -inf is no number
WHY = "tensors on a device and of a dtype that Triton serves"


@triton.jit
def _jsd_terms(x, y, beta):
    """Of each element: the terms of x and of y, which are the derivatives too; all in differences to the greater of the two."""
    x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    y = tl.maximum(y, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    distance = tl.abs(x - y)
    ratio = tl.exp2(-distance * LOG2E)  # the lesser probability over the greater
    x_leads = x >= y
    lesser_share = tl.where(x_leads, beta, 1.0 - beta)
    greater_share = tl.where(x_leads, 1.0 - beta, beta)  # no difference of 1: it may be tiny, and must not be 0
    # log(mixture / greater), where u is 1 less the quotient: a student close to its teacher lives in the digits that 1 - u rounds away.
    series = distance * (1.0 - distance * (0.5 - distance * (1 / 6 - distance * (1 / 24))))
    u = lesser_share * tl.where(distance < 0.0625, series, 1.0 - ratio)
    quotient = greater_share + lesser_share * ratio
    log_quotient = tl.log(quotient) + ((1.0 - quotient) - u)
    greater = tl.exp2(tl.maximum(x, y) * LOG2E)
    of_greater = -greater_share * greater * log_quotient
    of_lesser = -lesser_share * greater * ratio * (distance + log_quotient)
    return tl.where(x_leads, of_greater, of_lesser), tl.where(x_leads, of_lesser, of_greater)


@triton.jit
def _terms(x, y, beta, KIND: tl.constexpr):
    """(loss, its derivative by x, by y) of each element; what a launch does not use is not compiled."""
    if KIND == "kl":
        zero = y == 0.0
        surprise = tl.log(tl.where(zero, 1.0, y)) - tl.where(zero, 0.0, x)
        loss = y * surprise
        dx = -y
        dy = tl.where(zero, 0.0, surprise + 1.0)
    elif KIND == "kl_log":
        p = tl.exp2(y * LOG2E)
        loss = tl.where(p == 0.0, 0.0, p * (y - x))
        dx = -p
        dy = loss + p
    elif KIND == "jsd":
        dx, dy = _jsd_terms(x, y, beta)
        loss = dx + dy
    else:
        loss = 0.5 * tl.abs(x - y)
        dx = tl.where(x > y, 0.5, tl.where(x < y, -0.5, 0.0))
        dy = -dx
    return loss, dx, dy


@triton.jit(do_not_specialize=["splits", "blocks_per_split", "upstream_stride", "ignore_index"])
def _divergence_kernel(
    x_ptr,  # (rows, V), row stride x_stride
    y_ptr,  # (rows, V), row stride y_stride
    labels_ptr,  # (rows,) or None
    scale_ptr,  # () or None: on gradients, besides static_scale
    upstream_ptr,  # (rows, V) where ELEMENTWISE, else a value every upstream_stride a row; None: 1
    losses_ptr,  # (rows, V) where ELEMENTWISE, else (rows, splits); None: not wanted
    dx_ptr,  # (rows, V) or None
    dy_ptr,  # (rows, V) or None
    x_stride,
    y_stride,
    num_columns,
    splits,
    blocks_per_split,
    upstream_stride,
    ignore_index,
    static_scale,
    beta,
    KIND: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // splits).to(tl.int64)
    first = (tl.program_id(0) % splits) * blocks_per_split * BLOCK
    end = tl.minimum(first + blocks_per_split * BLOCK, num_columns)
    neutral: tl.constexpr = float("-inf") if KIND == "kl_log" else 0.0
    kept = True
    if labels_ptr is not None:
        kept = tl.load(labels_ptr + row) != ignore_index
    factor = static_scale
    if scale_ptr is not None:
        factor = factor * tl.load(scale_ptr)
    if upstream_ptr is not None and not ELEMENTWISE:
        factor = factor * tl.load(upstream_ptr + row * upstream_stride)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < num_columns
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask & kept, other=neutral).to(tl.float32)
        y = tl.load(y_ptr + row * y_stride + columns, mask=mask & kept, other=neutral).to(tl.float32)
        loss, dx, dy = _terms(x, y, beta, KIND)
        at = row * num_columns + columns
        if losses_ptr is not None:
            if ELEMENTWISE:
                tl.store(losses_ptr + at, loss, mask=mask)
            else:
                total += loss
        weight = factor
        if upstream_ptr is not None and ELEMENTWISE:
            weight = tl.load(upstream_ptr + at, mask=mask, other=0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, (dx * weight).to(dx_ptr.dtype.element_ty), mask=mask)
        if dy_ptr is not None:
            tl.store(dy_ptr + at, (dy * weight).to(dy_ptr.dtype.element_ty), mask=mask)
    if losses_ptr is not None and not ELEMENTWISE:
        tl.store(losses_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit(do_not_specialize=["count", "blocks"])
def _scale_in_place_kernel(x_ptr, scale_ptr, count, blocks, BLOCK: tl.constexpr):
    factor = tl.load(scale_ptr)
    if factor != 1.0:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            start = (block + tl.zeros((), tl.int64)) * BLOCK
            offsets = start + tl.arange(0, BLOCK)
            if start + BLOCK <= count:  # unmasked, so that accesses stay wide though the count is a multiple of nothing known
                tl.store(x_ptr + offsets, (tl.load(x_ptr + offsets).to(tl.float32) * factor).to(x_ptr.dtype.element_ty))
            else:
                mask = offsets < count
                x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
                tl.store(x_ptr + offsets, (x * factor).to(x_ptr.dtype.element_ty), mask=mask)


def _tiles(rows: int, num_columns: int, itemsize: int, num_sms: int) -> tuple[int, int, int]:
    """(block, splits, blocks_per_split): blocks of 8 or 16 columns a thread, and programs enough that the last ones to run are few."""
    block = min(2048 if itemsize == 4 else 4096, max(32, next_power_of_2(num_columns)))
    blocks = cdiv(num_columns, block)
    per_split = max(2, cdiv(blocks, cdiv(64 * num_sms, max(rows, 1))))
    return block, cdiv(blocks, per_split), per_split


def _launch(
    x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, upstream: Tensor | None, losses: bool, dx: Tensor | None,
    dy: Tensor | None, ignore_index: int, divisor: int, kind: str, beta: float, elementwise: bool,
) -> Tensor | None:  # fmt: skip
    """Run the kernel; the losses, (rows, V) or (rows, splits), where they are wanted."""
    x, y = as_rows(x), as_rows(y)
    rows, num_columns = x.shape
    block, splits, per_split = _tiles(rows, num_columns, max(x.element_size(), y.element_size()), device_info(x.device).num_sms)
    out = x.new_empty(rows, num_columns if elementwise else splits, dtype=torch.float32) if losses else None
    labels = None if labels is None else labels.reshape(-1).contiguous()
    stride = 0
    if upstream is not None and elementwise:
        upstream = upstream.contiguous()
    elif upstream is not None and upstream.dim():
        upstream = upstream.reshape(-1)  # a stride of 0 (from .sum()) stays one
        stride = upstream.stride(0)
    with on_device(x):
        launch(
            _divergence_kernel, (rows * splits,),
            x, y, labels, scale, upstream, out, dx, dy, x.stride(0), y.stride(0), num_columns, splits, per_split, stride, ignore_index,
            1.0 / max(divisor, 1), beta,
            KIND=kind, ELEMENTWISE=elementwise, BLOCK=block, num_warps=8 if block >= 2048 else 4 if block >= 512 else 1,
        )  # fmt: skip
    return out


def _wanted(x: Tensor, y: Tensor, want_dx: bool, want_dy: bool) -> tuple[Tensor, Tensor]:
    """Room for the gradients; one that is not wanted is empty."""
    return x.new_empty(x.shape if want_dx else 0), y.new_empty(y.shape if want_dy else 0)


def _forward(
    x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, ignore_index: int, divisor: int, op: str, kind: str, beta: float,
    output: str, want_dx: bool, want_dy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ran(op, "forward", "triton", WHY)
    dx, dy = _wanted(x, y, want_dx, want_dy)
    losses = _launch(
        x, y, labels, scale, None, True, dx if want_dx else None, dy if want_dy else None, ignore_index, divisor, kind, beta,
        output == "elements",
    )  # fmt: skip
    if output == "elements":
        return losses.reshape(x.shape), dx, dy
    if output == "rows":
        return losses.sum(1).reshape(x.shape[:-1]), dx, dy
    loss = losses.sum() * (1.0 / max(divisor, 1))
    return loss if scale is None else loss * scale, dx, dy


def _forward_fake(
    x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, ignore_index: int, divisor: int, op: str, kind: str, beta: float,
    output: str, want_dx: bool, want_dy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = {"elements": x.shape, "rows": x.shape[:-1], "total": ()}[output]
    return x.new_empty(shape, dtype=torch.float32), *_wanted(x, y, want_dx, want_dy)


def _backward(
    upstream: Tensor, x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, ignore_index: int, divisor: int, op: str,
    kind: str, beta: float, output: str, want_dx: bool, want_dy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ran(op, "backward", "triton", WHY)
    dx, dy = _wanted(x, y, want_dx, want_dy)
    _launch(
        x, y, labels, scale, upstream, False, dx if want_dx else None, dy if want_dy else None, ignore_index, divisor, kind, beta,
        output == "elements",
    )  # fmt: skip
    return dx, dy


def _backward_fake(
    upstream: Tensor, x: Tensor, y: Tensor, labels: Tensor | None, scale: Tensor | None, ignore_index: int, divisor: int, op: str,
    kind: str, beta: float, output: str, want_dx: bool, want_dy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _wanted(x, y, want_dx, want_dy)


def _scale_in_place(x: Tensor, scale: Tensor) -> None:
    block = 4096
    blocks = cdiv(x.numel(), block)
    with on_device(x):
        grid = (min(blocks, 8 * device_info(x.device).num_sms),)
        launch(_scale_in_place_kernel, grid, x, scale, x.numel(), blocks, BLOCK=block, num_warps=8)


_OPTIONS = "Tensor? labels, Tensor? scale, SymInt ignore_index, SymInt divisor, str op, str kind, float beta, str output, bool dx, bool dy"
divergence_forward = library.define(
    f"divergence_forward(Tensor x, Tensor y, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", _forward, _forward_fake
)
divergence_backward = library.define(
    f"divergence_backward(Tensor upstream, Tensor x, Tensor y, {_OPTIONS}) -> (Tensor, Tensor)", _backward, _backward_fake
)
scale_in_place = library.define("divergence_scale_(Tensor(a!) x, Tensor scale) -> ()", _scale_in_place, lambda x, scale: None)
