"""Triton kernels of ``norms.py``, and how they are launched.

A row is held in registers (up to 16384 columns in the forward, 8192 in the backward), narrow rows several to a program; wider rows are
read twice, in blocks of columns. The weight's gradient is formed by a grid of fixed size: each program walks many rows and writes one
fp32 partial sum, and the partial sums are added in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import WIDE_ROW, as_rows, row_tile, sum_rows
from ._triton import cdiv, device_info, launch, on_device, tl, triton


@triton.jit
def _load_sum(x_ptr, residual_ptr, x_at, residual_at, mask, sum_type: tl.constexpr):
    """x, or x + residual rounded to ``sum_type`` as an eager add rounds it; in fp32."""
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(sum_type).to(tl.float32)
    return x


@triton.jit
def _load_scale(weight_ptr, columns, mask, offset):
    return tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + offset


@triton.jit
def _apply_weight(normed, weight_ptr, columns, mask, offset, x_type: tl.constexpr, ROUND_FIRST: tl.constexpr):
    if weight_ptr is not None:
        if ROUND_FIRST:
            normed = normed.to(x_type).to(tl.float32)
        normed = normed * _load_scale(weight_ptr, columns, mask, offset)
    return normed


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_forward_kernel(
    x_ptr,  # (rows, WIDTH), row stride x_stride
    residual_ptr,  # (rows, WIDTH), row stride residual_stride; or None
    weight_ptr,  # (WIDTH,); or None
    y_ptr,  # (rows, WIDTH), contiguous
    sum_ptr,  # (rows, WIDTH), contiguous: x + residual; x itself, and not written, without a residual
    rstd_ptr,  # (rows,) fp32
    rows,
    x_stride,
    residual_stride,
    eps,
    offset,
    WIDTH: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    sum_type: tl.constexpr = sum_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < rows)[:, None] & (columns < WIDTH)
    at = row[:, None] * WIDTH + columns
    x = _load_sum(x_ptr, residual_ptr, row[:, None] * x_stride + columns, row[:, None] * residual_stride + columns, mask, sum_type)
    if residual_ptr is not None:
        tl.store(sum_ptr + at, x.to(sum_type), mask=mask)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = _apply_weight(x * rstd[:, None], weight_ptr, columns, columns < WIDTH, offset, sum_type, ROUND_FIRST)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_wide_forward_kernel(
    x_ptr,  # arguments as above; a program takes one row
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    eps,
    offset,
    WIDTH: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    sum_type: tl.constexpr = sum_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        x = _load_sum(x_ptr, residual_ptr, row * x_stride + columns, row * residual_stride + columns, mask, sum_type)
        if residual_ptr is not None:
            tl.store(sum_ptr + row * WIDTH + columns, x.to(sum_type), mask=mask)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, WIDTH, BLOCK_COLUMNS):  # adds again: what was stored above need not be visible to every thread
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        x = _load_sum(x_ptr, residual_ptr, row * x_stride + columns, row * residual_stride + columns, mask, sum_type)
        y = _apply_weight(x * rstd, weight_ptr, columns, mask, offset, sum_type, ROUND_FIRST)
        tl.store(y_ptr + row * WIDTH + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward_kernel(
    dy_ptr,  # (rows, WIDTH), row stride dy_stride
    dsum_ptr,  # (rows, WIDTH), row stride dsum_stride: added to dx; or None
    x_ptr,  # (rows, WIDTH), row stride x_stride
    weight_ptr,  # (WIDTH,); or None
    rstd_ptr,  # (rows,) fp32
    dx_ptr,  # (rows, WIDTH), contiguous; or None
    partial_ptr,  # (programs, WIDTH) fp32: a program's part of the weight's gradient; or None
    rows,
    dy_stride,
    dsum_stride,
    x_stride,
    offset,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    if weight_ptr is not None:
        scale = _load_scale(weight_ptr, columns, columns < WIDTH, offset)
    for tile in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (columns < WIDTH)
        x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = x * rstd
        if partial_ptr is not None:
            dweight += dy * normed
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy *= scale
            dx = rstd * (dy - normed * (tl.sum(dy * normed, axis=1) / WIDTH)[:, None])
            if dsum_ptr is not None:
                dx += tl.load(dsum_ptr + row[:, None] * dsum_stride + columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row[:, None] * WIDTH + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        tl.store(partial_ptr + program * WIDTH + columns, tl.sum(dweight, axis=0)[None, :], mask=columns < WIDTH)


@triton.jit
def _rms_norm_wide_dx_kernel(
    dy_ptr,  # arguments as above; a program takes one row
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    offset,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            dy *= _load_scale(weight_ptr, columns, mask, offset)
        products += dy * (tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32) * rstd)
    mean = tl.sum(products, axis=0) / WIDTH
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            dy *= _load_scale(weight_ptr, columns, mask, offset)
        dx = rstd * (dy - tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32) * rstd * mean)
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * dsum_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * WIDTH + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_wide_dweight_kernel(
    dy_ptr,  # arguments as above; a program takes one block of columns of every split-th tile of rows
    x_ptr,
    rstd_ptr,
    partial_ptr,  # (splits, WIDTH) fp32
    rows,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    num_blocks: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    split = tl.program_id(0) // num_blocks
    columns = (tl.program_id(0) % num_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    for tile in range(split, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0) // num_blocks):
        row = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (columns < WIDTH)
        x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dweight += dy * (x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None])
    tl.store(partial_ptr + split * WIDTH + columns, tl.sum(dweight, axis=0)[None, :], mask=columns < WIDTH)


# ---- launches ----

WIDEST_FORWARD = 16384  # columns; wider rows are read twice
WIDEST_BACKWARD = 8192  # columns: the weight, its gradient and two rows in registers
WIDE_DWEIGHT = {"BLOCK_ROWS": 4, "BLOCK_COLUMNS": 1024, "num_warps": 8}
THREADS_PER_SM = 512  # of backward programs, which walk the rows: what registers allow, and few partial sums
PREFETCH = 48 * 1024  # bytes: with a third input to wait for, a program fetches its next tile ahead if all of it takes no more


def _laid_out(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def launch_forward(
    x: Tensor,  # (..., width)
    residual: Tensor | None,  # (..., width)
    weight: Tensor | None,  # (width,)
    y: Tensor,  # (..., width), contiguous
    summed: Tensor | None,  # (..., width), contiguous; None without a residual
    rstd: Tensor,  # (rows,) fp32
    eps: float,
    offset: float,
    round_first: bool,
) -> None:
    """Fill ``y``, ``summed`` and ``rstd``."""
    x, weight = as_rows(x), _laid_out(weight)
    rows, width = x.shape
    residual_stride = 0
    if residual is not None:
        residual = as_rows(residual)
        residual_stride = residual.stride(0)
    tensors = (x, residual, weight, y, x if summed is None else summed, rstd)
    scalars = (x.stride(0), residual_stride, eps, offset)
    meta = {"WIDTH": width, "ROUND_FIRST": round_first}
    with on_device(x):
        if width > WIDEST_FORWARD:
            launch(_rms_norm_wide_forward_kernel, (rows,), *tensors, *scalars, **meta, **WIDE_ROW)
        else:
            sizes = row_tile(width, device_info(x.device))
            launch(_rms_norm_forward_kernel, (cdiv(rows, sizes["BLOCK_ROWS"]),), *tensors, rows, *scalars, **meta, **sizes)


def launch_backward(
    dy: Tensor,  # (..., width)
    dsum: Tensor | None,  # (..., width)
    x: Tensor,  # (..., width)
    weight: Tensor | None,  # (width,)
    rstd: Tensor,  # (rows,) fp32
    dx: Tensor | None,  # (..., width), contiguous: filled
    offset: float,
    want_dweight: bool,
) -> Tensor | None:
    """Fill ``dx`` if given; return the weight's gradient, in its dtype, if wanted."""
    x, dy, weight = as_rows(x), as_rows(dy), _laid_out(weight)
    rows, width = x.shape
    dsum_stride = 0
    if dsum is not None:
        dsum = as_rows(dsum)
        dsum_stride = dsum.stride(0)
    strides = (dy.stride(0), dsum_stride, x.stride(0))
    device = device_info(x.device)
    partial = None
    with on_device(x):
        if width <= WIDEST_BACKWARD:
            sizes = row_tile(width, device)
            fetched = sizes["BLOCK_ROWS"] * sizes["BLOCK_COLUMNS"] * sum(t.element_size() for t in (dy, dsum, x) if t is not None)
            programs_per_sm = max(1, THREADS_PER_SM // (sizes["num_warps"] * device.warp_size))
            programs = min(cdiv(rows, sizes["BLOCK_ROWS"]), device.num_sms * programs_per_sm)
            if want_dweight:
                partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
            arguments = (dy, dsum, x, weight, rstd, dx, partial, rows, *strides, offset)
            meta = {"WIDTH": width, "STAGES": 2 if dsum is not None and fetched <= PREFETCH else 1}
            launch(_rms_norm_backward_kernel, (programs,), *arguments, **meta, **sizes)
        else:
            if dx is not None:
                launch(_rms_norm_wide_dx_kernel, (rows,), dy, dsum, x, weight, rstd, dx, *strides, offset, WIDTH=width, **WIDE_ROW)
            if want_dweight:
                blocks = cdiv(width, WIDE_DWEIGHT["BLOCK_COLUMNS"])
                splits = min(cdiv(rows, WIDE_DWEIGHT["BLOCK_ROWS"]), max(1, 8 * device.num_sms // blocks))
                partial = torch.empty(splits, width, dtype=torch.float32, device=x.device)
                arguments = (dy, x, rstd, partial, rows, dy.stride(0), x.stride(0))
                launch(_rms_norm_wide_dweight_kernel, (blocks * splits,), *arguments, WIDTH=width, **WIDE_DWEIGHT)
        return None if partial is None else sum_rows(partial.unsqueeze(0), weight.dtype)[0]
