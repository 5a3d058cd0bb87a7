"""The output of an RMS norm once more, from its input and the statistics that its backward needs anyway (see ``remake.py``).

Pointwise, by the rounding steps of the forward: the same bits. Reads x and writes y, 2 passes over (rows, width).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import library
from ._rows import as_rows
from ._triton import cdiv, launch, next_power_of_2, on_device, tl, triton
from .norms_triton import _apply_weight, _laid_out

_BLOCK, _NUM_WARPS = 2048, 4  # columns a program takes: 16 elements a thread, two 16-byte accesses in bf16


@triton.jit
def _rms_norm_remake_kernel(
    x_ptr,  # (rows, width), row stride x_stride
    weight_ptr,  # (width,); or None
    rstd_ptr,  # (rows,) fp32
    y_ptr,  # (rows, width), contiguous
    width,
    x_stride,
    offset,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.load(rstd_ptr + row)
    y = _apply_weight(normed, weight_ptr, columns, mask, offset, x_ptr.dtype.element_ty, ROUND_FIRST)
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def _remake(x: Tensor, weight: Tensor | None, rstd: Tensor, dtype: torch.dtype, offset: float, round_first: bool) -> Tensor:
    y = _remake_fake(x, weight, rstd, dtype, offset, round_first)
    x, weight = as_rows(x), _laid_out(weight)
    rows, width = x.shape
    block = min(_BLOCK, max(64, next_power_of_2(width)))
    meta = {"ROUND_FIRST": round_first, "BLOCK": block, "num_warps": max(1, _NUM_WARPS * block // _BLOCK)}
    with on_device(x):
        launch(_rms_norm_remake_kernel, (rows * cdiv(width, block),), x, weight, rstd, y, width, x.stride(0), offset, **meta)
    return y


def _remake_fake(x: Tensor, weight: Tensor | None, rstd: Tensor, dtype: torch.dtype, offset: float, round_first: bool) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


rms_norm_remake = library.define(
    "rms_norm_remake(Tensor x, Tensor? weight, Tensor rstd, ScalarType dtype, float offset, bool round_first) -> Tensor",
    _remake,
    _remake_fake,
)
