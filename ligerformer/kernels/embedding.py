"""Embedding: ``out[..., :] = weight[ids[...], :]``.

    dweight[v, :] = sum of grad[p, :] over the positions p with ids[p] == v,   zero where there is none

The forward copies bits. An id out of range gives a row of NaN and gets no gradient (on the CPU the public function raises).

Cost: the forward reads and writes (tokens, C). The backward sorts the ids on the device and gives each run of equal ids to one
program, which sums its rows in fp32, in the order of positions: no atomics, the same bits every time. It reads (tokens, C) and
writes (V, C). Saved for the backward: the ids.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, dispatch, library
from ._triton import cdiv, launch, next_power_of_2, on_device, tl, triton

_WHY = "tensors on a device that Triton serves"


# ---- reference ----


def _embedding_reference(ids: Tensor, weight: Tensor) -> Tensor:
    dtype = weight.dtype
    if dtype in (torch.bfloat16, torch.float16) and weight.requires_grad and torch.is_grad_enabled():
        weight = weight.float()  # torch sums the gradient of a row in the weight's dtype
    valid = (ids >= 0) & (ids < weight.shape[0])
    rows = F.embedding(torch.where(valid, ids, 0), weight).to(dtype)
    return torch.where(valid.unsqueeze(-1), rows, float("nan"))


# ---- Triton ----


@triton.jit
def _embedding_forward_kernel(
    ids_ptr,  # (tokens,)
    weight_ptr,  # (V, C), row stride weight_stride
    out_ptr,  # (tokens, C)
    vocab_size,
    hidden_size,
    weight_stride,
    BLOCK: tl.constexpr,
):
    num_blocks = tl.cdiv(hidden_size, BLOCK)
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden_size
    index = tl.load(ids_ptr + token).to(tl.int64)
    valid = (index >= 0) & (index < vocab_size)
    row = tl.load(weight_ptr + index * weight_stride + columns, mask=mask & valid, other=float("nan"))
    tl.store(out_ptr + token * hidden_size + columns, row, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _embedding_backward_kernel(
    grad_ptr,  # (tokens, C), row stride grad_stride
    sorted_ids_ptr,  # (tokens,), ascending
    order_ptr,  # (tokens,): where in grad each of the sorted ids stood
    grad_weight_ptr,  # (V, C), zeros
    num_tokens,
    vocab_size,
    hidden_size,
    grad_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_blocks = tl.cdiv(hidden_size, BLOCK)
    first = tl.program_id(0) // num_blocks
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    column_mask = columns < hidden_size
    index = tl.load(sorted_ids_ptr + first).to(tl.int64)
    before = tl.load(sorted_ids_ptr + first - 1, mask=first > 0, other=-1).to(tl.int64)
    if (index != before) & (index >= 0) & (index < vocab_size):  # else another program has this run, or nobody wants it
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        position = first + tl.arange(0, ROWS)
        more = True
        while more:  # ROWS positions of the run at a time
            in_run = position < num_tokens
            in_run = in_run & (tl.load(sorted_ids_ptr + position, mask=in_run, other=-1) == index)
            row = tl.load(order_ptr + position, mask=in_run, other=0).to(tl.int64)
            tile = tl.load(grad_ptr + row[:, None] * grad_stride + columns[None, :], mask=in_run[:, None] & column_mask[None, :], other=0.0)
            total += tl.sum(tile.to(tl.float32), axis=0)
            position += ROWS
            more = tl.sum(in_run.to(tl.int32), axis=0) == ROWS
        tl.store(grad_weight_ptr + index * hidden_size + columns, total.to(grad_weight_ptr.dtype.element_ty), mask=column_mask)


# Forward: a row in few programs. Backward: few columns and many rows of a run at once, since one id may be a tenth of all tokens.
_FORWARD_BLOCK, _BACKWARD_BLOCK, _BACKWARD_ROWS = 2048, 256, 16


def _block(hidden_size: int, largest: int) -> int:
    return min(largest, max(16, next_power_of_2(hidden_size)))


def _forward(ids: Tensor, weight: Tensor) -> Tensor:
    dispatch.ran("embedding", "forward", "triton", _WHY)
    out = _forward_fake(ids, weight)
    ids = ids.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    vocab_size, hidden_size = weight.shape
    block = _block(hidden_size, _FORWARD_BLOCK)
    grid = (ids.numel() * cdiv(hidden_size, block),)
    with on_device(weight):
        launch(_embedding_forward_kernel, grid, ids, weight, out, vocab_size, hidden_size, weight.stride(0), BLOCK=block, num_warps=4)
    return out


def _forward_fake(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(*ids.shape, weight.shape[1], dtype=weight.dtype, device=weight.device)


def _backward(grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    dispatch.ran("embedding", "backward", "triton", _WHY)
    hidden_size = grad.shape[-1]
    grad_weight = torch.zeros(vocab_size, hidden_size, dtype=grad.dtype, device=grad.device)
    grad = grad.reshape(ids.numel(), hidden_size)
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    block = _block(hidden_size, _BACKWARD_BLOCK)
    grid = (ids.numel() * cdiv(hidden_size, block),)
    with on_device(grad):
        launch(
            _embedding_backward_kernel,
            grid,
            *(grad, sorted_ids, order, grad_weight),
            *(ids.numel(), vocab_size, hidden_size, grad.stride(0)),
            ROWS=_BACKWARD_ROWS,
            BLOCK=block,
            num_warps=4,
        )
    return grad_weight


def _backward_fake(grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    return torch.empty(vocab_size, grad.shape[-1], dtype=grad.dtype, device=grad.device)


_embedding_forward = library.define("embedding_forward(Tensor ids, Tensor weight) -> Tensor", _forward, _forward_fake)
_embedding_backward = library.define("embedding_backward(Tensor grad, Tensor ids, SymInt vocab_size) -> Tensor", _backward, _backward_fake)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.vocab_size = weight.shape[0]
        return _embedding_forward(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        return None, _embedding_backward(grad, ids, ctx.vocab_size)


# ---- public ----


def _unsupported(ids: Tensor, weight: Tensor) -> str | None:
    return None if weight.dtype in dispatch.TRITON_DTYPES else f"weight is {weight.dtype}, which is served by the reference alone"


_EMBEDDING = dispatch.Op("embedding", _embedding_reference, _Embedding.apply, _unsupported)


def embedding(ids: Tensor, weight: Tensor, /) -> Tensor:
    """Row ``weight[id]`` for each of ``ids``.

    Args:
        ids: int64 or int32, any shape, values in [0, V).
        weight: (V, C), floating. Its gradient is dense: (V, C), summed in fp32.

    Returns:
        (\\*ids.shape, C) in weight's dtype.

    Raises:
        TypeError: ids are no integers, or weight is not floating.
        ValueError: weight is not (V, C), or the devices differ.
        IndexError: an id is out of range, on the CPU outside of compiled code. On a GPU that row is NaN and gets no gradient.
    """
    checks.is_tensor("embedding", "ids", ids, checks.INTS)
    checks.is_tensor("embedding", "weight", weight)
    checks.has_shape("embedding", "weight", weight, ("vocab_size", "hidden_size"))
    checks.same_device("embedding", ids=ids, weight=weight)
    checks.in_range("embedding", "ids", ids, weight.shape[0])
    return _EMBEDDING(ids, weight)
