"""Softmax along one dimension.

    y = exp(x - max x) / sum exp(x - max x),        dx = y * (dy - sum(dy * y))

in fp32 inside, rounded once. A row of -inf alone, or one that holds +inf or NaN, gives NaN, as in torch.

Cost: the forward reads x and writes y, 2 passes; the backward reads y and the incoming gradient and writes dx, 3 passes. Rows wider than
16384 are read twice (the forward keeps a running maximum and sum). A dimension other than the last costs a transposing copy there and
back. Saved for the backward: y alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import dispatch, library
from ._rows import WIDE_ROW, as_rows, autocast_dtype, check_rows, row_tile
from ._triton import cdiv, device_info, launch, on_device, tl, triton

_WHY = "tensors on a device that Triton serves"


# ---- reference ----


def _softmax_reference(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.softmax(x.to(compute), dim).to(dtype)


# ---- Triton ----


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)  # log2(e): exp2 is what the hardware has


@triton.jit(do_not_specialize=["rows"])
def _softmax_forward_kernel(
    x_ptr,  # (rows, WIDTH), row stride x_stride
    y_ptr,  # (rows, WIDTH), contiguous
    rows,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < rows) & (columns < WIDTH)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=-float("inf")).to(tl.float32)
    powers = _exp(x - tl.max(x, axis=1)[:, None])  # -inf - -inf, a row of -inf alone, is NaN
    powers = tl.where(columns < WIDTH, powers, 0.0)
    y = powers * (1.0 / tl.sum(powers, axis=1))[:, None]
    tl.store(y_ptr + row * WIDTH + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_wide_forward_kernel(
    x_ptr,  # arguments as above; a program takes one row
    y_ptr,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([BLOCK_COLUMNS], -float("inf"), dtype=tl.float32)  # of each lane; the lanes meet after the loop
    total = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)  # sum of exp(x - largest), of each lane
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < WIDTH, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        shift = tl.where(larger == -float("inf"), 0.0, larger)  # a lane that has seen -inf alone holds a total of 0
        total = total * _exp(largest - shift) + _exp(x - shift)
        largest = larger
    row_max = tl.max(largest, axis=0)
    scale = 1.0 / tl.sum(total * _exp(largest - row_max), axis=0)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * WIDTH + columns, (_exp(x - row_max) * scale).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _softmax_backward_kernel(
    dy_ptr,  # (rows, WIDTH), row stride dy_stride
    y_ptr,  # (rows, WIDTH), row stride y_stride
    dx_ptr,  # (rows, WIDTH), contiguous
    rows,
    dy_stride,
    y_stride,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < rows) & (columns < WIDTH)
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(dy * y, axis=1)[:, None])
    tl.store(dx_ptr + row * WIDTH + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_wide_backward_kernel(
    dy_ptr,  # arguments as above; a program takes one row
    y_ptr,
    dx_ptr,
    dy_stride,
    y_stride,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        products += dy * tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(products, axis=0)
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < WIDTH
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dx = tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32) * (dy - total)
        tl.store(dx_ptr + row * WIDTH + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


WIDEST = 16384  # columns held in registers


def _forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    dispatch.ran("softmax", "forward", "triton", _WHY)
    y = _forward_fake(x, dtype)
    x = as_rows(x)
    rows, width = x.shape
    with on_device(x):
        if width > WIDEST:
            launch(_softmax_wide_forward_kernel, (rows,), x, y, x.stride(0), WIDTH=width, **WIDE_ROW)
        else:
            meta = row_tile(width, device_info(x.device))
            launch(_softmax_forward_kernel, (cdiv(rows, meta["BLOCK_ROWS"]),), x, y, rows, x.stride(0), WIDTH=width, **meta)
    return y


def _forward_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    dispatch.ran("softmax", "backward", "triton", _WHY)
    dx = _backward_fake(dy, y, dtype)
    dy, y = as_rows(dy), as_rows(y)
    rows, width = y.shape
    strides = dy.stride(0), y.stride(0)
    with on_device(y):
        if width > WIDEST:
            launch(_softmax_wide_backward_kernel, (rows,), dy, y, dx, *strides, WIDTH=width, **WIDE_ROW)
        else:
            meta = row_tile(width, device_info(y.device))
            launch(_softmax_backward_kernel, (cdiv(rows, meta["BLOCK_ROWS"]),), dy, y, dx, rows, *strides, WIDTH=width, **meta)
    return dx


def _backward_fake(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(y.shape, dtype=dtype, device=y.device)


_softmax_forward = library.define("softmax_forward(Tensor x, ScalarType dtype) -> Tensor", _forward, _forward_fake)
_softmax_backward = library.define("softmax_backward(Tensor dy, Tensor y, ScalarType dtype) -> Tensor", _backward, _backward_fake)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = _softmax_forward(x, dtype)
        ctx.save_for_backward(y)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _softmax_backward(dy, *ctx.saved_tensors, ctx.dtype), None


def _softmax_triton(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    if dim not in (-1, x.dim() - 1):
        return _softmax_triton(x.movedim(dim, -1).contiguous(), -1, dtype).movedim(-1, dim).contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Softmax.apply(x, dtype)
    return _softmax_forward(x, dtype)


_softmax = dispatch.Op("softmax", _softmax_reference, _softmax_triton)


# ---- public ----


def softmax(x: Tensor, /, *, dim: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))`` along ``dim``, in fp32 inside (fp64 for an fp64 x), in x's dtype.

    ``x`` has any shape with at least one element along ``dim``; -inf stands for an excluded element, and a row of -inf alone gives NaN.
    Under autocast on a GPU the result is fp32, as torch's. Moves 2 passes over x in the forward and 3 in the backward, for which the
    result alone is saved; a ``dim`` other than the last costs transposing copies.

    Raises TypeError and ValueError for what is not a floating tensor, and for a ``dim`` that x has not.
    """
    check_rows("softmax", x, dim)
    return _softmax(x, dim, autocast_dtype(x))
