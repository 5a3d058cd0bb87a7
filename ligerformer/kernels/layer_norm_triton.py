"""Triton kernels of ``layer_norm.py``, and how they are launched.

A row is held in registers (up to 16384 columns in the forward, 8192 in the backward), narrow rows several to a program; wider rows are
read twice, in blocks of columns. The gradients of weight and bias are formed by a grid of fixed size: each program walks many rows and
writes one fp32 partial sum of each, and the partial sums are added in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import WIDE_ROW, as_rows, row_tile, sum_rows
from ._triton import cdiv, device_info, launch, on_device, tl, triton


@triton.jit
def _affine(normed, weight_ptr, bias_ptr, columns, mask):
    if weight_ptr is not None:
        normed = normed * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return normed


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_forward_kernel(
    x_ptr,  # (rows, WIDTH), row stride x_stride
    weight_ptr,  # (WIDTH,); or None
    bias_ptr,  # (WIDTH,); or None
    y_ptr,  # (rows, WIDTH), contiguous
    mean_ptr,  # (rows,) fp32
    rstd_ptr,  # (rows,) fp32
    rows,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < rows)[:, None] & (columns < WIDTH)
    x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / WIDTH
    centered = tl.where(columns < WIDTH, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / WIDTH + eps)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = _affine(centered * rstd[:, None], weight_ptr, bias_ptr, columns, columns < WIDTH)
    tl.store(y_ptr + row[:, None] * WIDTH + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_wide_forward_kernel(
    x_ptr,  # arguments as above; a program takes one row
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Mean and sum of squared deviations of each lane (Welford 1962); the lanes meet after the loop (Chan et al. 1979).
    means = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    counts = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        counts += mask.to(tl.float32)
        delta = tl.where(mask, x - means, 0.0)
        means += delta / (start // BLOCK_COLUMNS + 1)
        squares += delta * (x - means)
    mean = tl.sum(means * counts, axis=0) / WIDTH
    rstd = tl.rsqrt(tl.sum(squares + counts * (means - mean) * (means - mean), axis=0) / WIDTH + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        y = _affine((x - mean) * rstd, weight_ptr, bias_ptr, columns, mask)
        tl.store(y_ptr + row * WIDTH + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_backward_kernel(
    dy_ptr,  # (rows, WIDTH), row stride dy_stride
    x_ptr,  # (rows, WIDTH), row stride x_stride
    weight_ptr,  # (WIDTH,); or None
    mean_ptr,  # (rows,) fp32
    rstd_ptr,  # (rows,) fp32
    dx_ptr,  # (rows, WIDTH), contiguous; or None
    dweight_ptr,  # (programs, WIDTH) fp32: a program's part of the weight's gradient; or None
    dbias_ptr,  # (programs, WIDTH) fp32: of the bias's; or None
    rows,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    for step in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (columns < WIDTH)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None or dweight_ptr is not None:
            x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
            normed = (x - mean) * rstd  # not 0 where masked, but dy is
            if dweight_ptr is not None:
                dweight += dy * normed
            if dx_ptr is not None:
                if weight_ptr is not None:
                    dy *= scale
                along_x = (tl.sum(dy * normed, axis=1) / WIDTH)[:, None]
                dx = rstd * (dy - (tl.sum(dy, axis=1) / WIDTH)[:, None] - normed * along_x)
                tl.store(dx_ptr + row[:, None] * WIDTH + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + program * WIDTH + columns, tl.sum(dweight, axis=0)[None, :], mask=columns < WIDTH)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program * WIDTH + columns, tl.sum(dbias, axis=0)[None, :], mask=columns < WIDTH)


@triton.jit
def _layer_norm_wide_dx_kernel(
    dy_ptr,  # arguments as above; a program takes one row
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    sums = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    products = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dy = _affine(dy, weight_ptr, None, columns, mask)
        sums += dy
        products += dy * ((tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32) - mean) * rstd)
    along_one = tl.sum(sums, axis=0) / WIDTH
    along_x = tl.sum(products, axis=0) / WIDTH
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dy = _affine(dy, weight_ptr, None, columns, mask)
        normed = (tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        dx = rstd * (dy - along_one - normed * along_x)
        tl.store(dx_ptr + row * WIDTH + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_wide_parameters_kernel(
    dy_ptr,  # arguments as above; a program takes one block of columns of every split-th tile of rows
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_ptr,  # (splits, WIDTH) fp32; or None
    dbias_ptr,  # (splits, WIDTH) fp32; or None
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
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    for step in range(split, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0) // num_blocks):
        row = (step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (columns < WIDTH)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dbias += dy
        if dweight_ptr is not None:
            x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
            dweight += dy * ((x - mean) * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None])
    if dweight_ptr is not None:
        tl.store(dweight_ptr + split * WIDTH + columns, tl.sum(dweight, axis=0)[None, :], mask=columns < WIDTH)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + split * WIDTH + columns, tl.sum(dbias, axis=0)[None, :], mask=columns < WIDTH)


# ---- launches ----

WIDEST_FORWARD = 16384  # columns; wider rows are read twice
WIDEST_BACKWARD = 8192  # columns: the weight, two gradients and two rows in registers
WIDE_PARAMETERS = {"BLOCK_ROWS": 4, "BLOCK_COLUMNS": 1024, "num_warps": 8}
THREADS_PER_SM = 512  # of backward programs, which walk the rows: what registers allow
BACKWARD_TILE = 2048  # elements of a tile of narrow rows: a thread holds 16 of two rows, two gradients and the weight
PREFETCH = 48 * 1024  # bytes: a backward program fetches its next tile ahead, into shared memory, if all of it takes no more


def launch_forward(
    x: Tensor,  # (..., width)
    weight: Tensor | None,  # (width,)
    bias: Tensor | None,  # (width,)
    y: Tensor,  # (..., width), contiguous
    mean: Tensor,  # (rows,) fp32
    rstd: Tensor,  # (rows,) fp32
    eps: float,
) -> None:
    """Fill ``y``, ``mean`` and ``rstd``."""
    x = as_rows(x)
    rows, width = x.shape
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    tensors = (x, weight, bias, y, mean, rstd)
    with on_device(x):
        if width > WIDEST_FORWARD:
            launch(_layer_norm_wide_forward_kernel, (rows,), *tensors, x.stride(0), eps, WIDTH=width, **WIDE_ROW)
        else:
            meta = row_tile(width, device_info(x.device))
            grid = (cdiv(rows, meta["BLOCK_ROWS"]),)
            launch(_layer_norm_forward_kernel, grid, *tensors, rows, x.stride(0), eps, WIDTH=width, **meta)


def launch_backward(
    dy: Tensor,  # (..., width)
    x: Tensor,  # (..., width)
    weight: Tensor | None,  # (width,)
    mean: Tensor,  # (rows,) fp32
    rstd: Tensor,  # (rows,) fp32
    dx: Tensor | None,  # (..., width), contiguous: filled
    want_dweight: bool,
    want_dbias: bool,
) -> Tensor | None:
    """Fill ``dx`` if given; return the wanted gradients of weight and bias, in this order, as the rows of one fp32 tensor."""
    x, dy = as_rows(x), as_rows(dy)
    rows, width = x.shape
    strides = (dy.stride(0), x.stride(0))
    device = device_info(x.device)
    wanted = want_dweight + want_dbias
    weight = None if weight is None else weight.contiguous()

    def partials(programs: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        both = torch.empty(wanted, programs, width, dtype=torch.float32, device=x.device)
        return both, both[0] if want_dweight else None, both[-1] if want_dbias else None

    with on_device(x):
        if width <= WIDEST_BACKWARD:
            meta = row_tile(width, device, BACKWARD_TILE)
            fetched = meta["BLOCK_ROWS"] * meta["BLOCK_COLUMNS"] * (dy.element_size() + x.element_size())
            programs_per_sm = max(1, THREADS_PER_SM // (meta["num_warps"] * device.warp_size))
            programs = min(cdiv(rows, meta["BLOCK_ROWS"]), device.num_sms * programs_per_sm)
            both, dweight, dbias = partials(programs)
            arguments = (dy, x, weight, mean, rstd, dx, dweight, dbias, rows, *strides)
            launch(_layer_norm_backward_kernel, (programs,), *arguments, WIDTH=width, STAGES=2 if fetched <= PREFETCH else 1, **meta)
        else:
            if dx is not None:
                launch(_layer_norm_wide_dx_kernel, (rows,), dy, x, weight, mean, rstd, dx, *strides, WIDTH=width, **WIDE_ROW)
            if not wanted:
                return None
            blocks = cdiv(width, WIDE_PARAMETERS["BLOCK_COLUMNS"])
            splits = min(cdiv(rows, WIDE_PARAMETERS["BLOCK_ROWS"]), max(1, 8 * device.num_sms // blocks))
            both, dweight, dbias = partials(splits)
            arguments = (dy, x, mean, rstd, dweight, dbias, rows, *strides)
            launch(_layer_norm_wide_parameters_kernel, (blocks * splits,), *arguments, WIDTH=width, **WIDE_PARAMETERS)
        return sum_rows(both, torch.float32) if wanted else None
