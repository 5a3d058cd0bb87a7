"""What kernels that walk the rows of a (rows, width) matrix share on the host: layouts, tiles, checks, the dtype under autocast."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import checks
from ._triton import DeviceInfo, triton

TILE = 4096  # elements of a tile of narrow rows
MOST_THREADS = 512
WIDE_ROW = {"BLOCK_COLUMNS": 4096, "num_warps": 16}  # a program that walks one wide row in blocks of columns


def tile(width: int, device: DeviceInfo, elements: int = TILE, elements_per_thread: int = 16) -> dict[str, int]:
    """Rows a program takes at a time, and its warps. 16 elements a thread are two 16-byte accesses in bf16."""
    block_columns = triton.next_power_of_2(width)
    block_rows = max(1, elements // block_columns)
    threads = min(MOST_THREADS, block_rows * block_columns // elements_per_thread)
    return {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns, "num_warps": threads // device.warp_size}


def as_rows(x: Tensor) -> Tensor:
    """``x`` as (rows, width) with a last stride of 1: a view where the layout allows it, one copy elsewhere."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


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
