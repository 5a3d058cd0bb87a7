"""What kernels that walk the rows of a (rows, width) matrix share: layouts, tiles, checks, the sum of partial sums, the dtype under autocast."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import checks
from ._triton import DeviceInfo, cdiv, launch, next_power_of_2, tl, triton

TILE = 4096  # elements of a tile of narrow rows
MOST_THREADS = 512
WIDE_ROW = {"BLOCK_COLUMNS": 4096, "num_warps": 16}  # a program that walks one wide row in blocks of columns


@functools.lru_cache(maxsize=1024)
def row_tile(width: int, device: DeviceInfo, elements: int = TILE, elements_per_thread: int = 16) -> dict[str, int]:
    """Rows a program takes at a time, and its warps (one dict for all calls: not to be changed).

    16 elements a thread are two 16-byte accesses in bf16.
    """
    block_columns = next_power_of_2(width)
    block_rows = max(1, elements // block_columns)
    threads = min(MOST_THREADS, block_rows * block_columns // elements_per_thread)
    return {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns, "num_warps": threads // device.warp_size}


def as_rows(x: Tensor) -> Tensor:
    """``x`` as (rows, width) with a last stride of 1: a view where the layout allows it, one copy elsewhere."""
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit(do_not_specialize=["rows"])
def _sum_rows_kernel(
    x_ptr,  # (matrices, rows, WIDTH) fp32, contiguous
    out_ptr,  # (matrices, WIDTH)
    rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    num_blocks: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    matrix = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
        total += tl.load(x_ptr + (matrix * rows + row) * WIDTH + columns, mask=(row < rows) & (columns < WIDTH), other=0.0)
    out = tl.sum(total, axis=0)[None, :]
    tl.store(out_ptr + matrix * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


def sum_rows(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """(matrices, rows, width) fp32, contiguous -> (matrices, width): partial sums added in a fixed order, rounded once to ``dtype``."""
    matrices, rows, width = partial.shape
    out = torch.empty(matrices, width, dtype=dtype, device=partial.device)
    block_columns = min(32, next_power_of_2(width))
    launch(
        _sum_rows_kernel,
        (matrices * cdiv(width, block_columns),),
        partial,
        out,
        rows,
        WIDTH=width,
        BLOCK_ROWS=128,
        BLOCK_COLUMNS=block_columns,
        num_warps=8,
    )
    return out


def check_rows(op: str, x: Tensor, dim: int = -1) -> None:
    """Refuse what is no floating tensor, what has no element along ``dim``, and a ``dim`` that x has not."""
    checks.is_tensor(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (); expected at least one dimension")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{op}: dim is {dim!r}; expected an integer")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: dim is {dim}; expected an integer in [{-x.dim()}, {x.dim() - 1}]")
    if x.shape[dim] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected at least one element along dim {dim}")


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of torch's own norm or softmax of ``x``: x's, but fp32 under autocast on a GPU (on the CPU autocast leaves them alone)."""
    if x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return x.dtype
