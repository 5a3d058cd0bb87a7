"""Rotary position embedding of queries and keys, in the half-rotation layout that Hugging Face checkpoints use.

    out[i]          = x[i] * cos[i] - x[i + R/2] * sin[i]
    out[i + R/2]    = x[i + R/2] * cos[i] + x[i] * sin[i]        for i < R/2; columns from R on pass through

(Su et al. 2021, arXiv:2104.09864.) The tables are cast to the queries' dtype, and each product and the sum are rounded to it, as eager
transformers does: the forward has the bits of that formula. The backward is the rotation by the opposite angle, rounded once.

Cost: q and k read and written once, forward and backward alike. Saved for the backward: the two tables alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, dispatch, library
from ._triton import launch, next_power_of_2, on_device, tl, triton
from .norms import fp64_among

_WHY = "tensors on a device that Triton serves"


# ---- reference ----


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (B, T, H, D) rotated by ``cos`` and ``sin`` (1 or B, T, 1, R), whose halves repeat, the first of sin negated."""
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        first, rest = x.split((rotated, x.shape[-1] - rotated), dim=-1)
        return torch.cat((_rotate_reference(first, cos, sin), rest), dim=-1)
    if torch.compiler.is_compiling():  # roll is the fastest, but its traced strides are not those it has: a compiled backward fails on them
        swapped = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    else:
        swapped = x.roll(rotated // 2, -1)
    return x * cos + swapped * sin


def _rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos = torch.cat((cos, cos), dim=-1).to(q.dtype).unsqueeze(2)
    sin = torch.cat((-sin, sin), dim=-1).to(q.dtype).unsqueeze(2)
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def check_rope_inputs(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse queries, keys and tables whose shapes, dtypes or devices do not fit together."""
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        checks.is_tensor(op, name, x)
    checks.has_shape(op, "q", q, ("B", "T", "H", "D"))
    batch, tokens, _, head_dim = q.shape
    checks.has_shape(op, "k", k, (batch, tokens, "H", head_dim))
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: k has dtype {k.dtype} and q {q.dtype}; expected one dtype")
    checks.has_shape(op, "cos", cos, ("1 or B", tokens, "R/2"))
    if cos.shape[0] not in (1, batch) or not 1 <= cos.shape[2] <= head_dim // 2:
        raise ValueError(
            f"{op}: cos has shape {tuple(cos.shape)}; expected (1 or {batch}, {tokens}, R/2) with R/2 from 1 to {head_dim // 2}"
        )
    checks.has_shape(op, "sin", sin, tuple(cos.shape))
    checks.same_device(op, q=q, k=k, cos=cos, sin=sin)
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(f"{op}: {'cos' if cos.requires_grad else 'sin'} requires a gradient, which is not computed; detach it")


# ---- Triton: a program takes one token with all its heads, and loads the tables once ----


@triton.jit
def load_table(table_ptr, table_type: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """A token's row of a table as (1, BLOCK_HALF) in fp32, rounded to ``table_type``."""
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    return tl.load(table_ptr + columns, mask=columns < HALF, other=0.0).to(table_type).to(tl.float32)


@triton.jit
def rotate(first, second, cos, sin, x_type: tl.constexpr, ROUND: tl.constexpr):
    """Both halves rotated, in fp32. With ROUND the products are rounded to ``x_type``, as eager code rounds them."""
    first_cos, second_sin = first * cos, second * sin
    second_cos, first_sin = second * cos, first * sin
    if ROUND:
        first_cos, second_sin = first_cos.to(x_type).to(tl.float32), second_sin.to(x_type).to(tl.float32)
        second_cos, first_sin = second_cos.to(x_type).to(tl.float32), first_sin.to(x_type).to(tl.float32)
    return first_cos - second_sin, second_cos + first_sin


@triton.jit
def _rotate_heads(
    x_ptr,  # a token's (HEADS, HEAD_DIM), row stride head_stride
    out_ptr,  # the same, contiguous
    head_stride,
    cos,  # (1, BLOCK_HALF) fp32
    sin,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROUND: tl.constexpr,
):
    x_type: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    for start in range(0, HEADS, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)
        x_at = heads.to(tl.int64) * head_stride
        if ALIGNED:
            x_at = tl.multiple_of(x_at, 16)
        x_at = x_ptr + x_at[:, None]
        out_at = out_ptr + heads[:, None] * HEAD_DIM
        exists = (heads < HEADS)[:, None]
        mask = exists & (columns < HALF)
        first = tl.load(x_at + columns, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_at + HALF + columns, mask=mask, other=0.0).to(tl.float32)
        first, second = rotate(first, second, cos, sin, x_type, ROUND)
        tl.store(out_at + columns, first.to(x_type), mask=mask)
        tl.store(out_at + HALF + columns, second.to(x_type), mask=mask)
        if HEAD_DIM > 2 * HALF:
            mask = exists & (rest < HEAD_DIM)
            tl.store(out_at + rest, tl.load(x_at + rest, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "table_batch_stride",
        "q_batch_stride",
        "q_token_stride",
        "q_head_stride",
        "k_batch_stride",
        "k_token_stride",
        "k_head_stride",
    ]
)
def _rope_kernel(
    q_ptr,  # (B, T, Q_HEADS, HEAD_DIM), last stride 1; or None
    k_ptr,  # (B, T, K_HEADS, HEAD_DIM), last stride 1; or None
    q_out_ptr,  # contiguous
    k_out_ptr,  # contiguous
    cos_ptr,  # (1 or B, T, HALF), last stride 1
    sin_ptr,  # the same strides
    tokens,  # T
    table_batch_stride,  # 0 for one table
    table_token_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCK_HEADS: tl.constexpr,
    K_BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ALIGNED: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    batch, position = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    table_at = batch * table_batch_stride + position * table_token_stride
    table_type: tl.constexpr = q_out_ptr.dtype.element_ty if q_ptr is not None else k_out_ptr.dtype.element_ty
    cos = load_table(cos_ptr + table_at, table_type, HALF, BLOCK_HALF)
    sin = load_table(sin_ptr + table_at, table_type, HALF, BLOCK_HALF)
    if BACKWARD:
        sin = -sin
    if q_ptr is not None:
        q_at = batch * q_batch_stride + position * q_token_stride
        if ALIGNED:  # a promise that 16-byte accesses need: the compiler knows nothing of a stride that it does not specialise on
            q_at = tl.multiple_of(q_at, 16)
        out_at = q_out_ptr + token * Q_HEADS * HEAD_DIM
        _rotate_heads(
            q_ptr + q_at,
            out_at,
            q_head_stride,
            cos,
            sin,
            Q_HEADS,
            HEAD_DIM,
            HALF,
            Q_BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
            ALIGNED,
            not BACKWARD,
        )
    if k_ptr is not None:
        k_at = batch * k_batch_stride + position * k_token_stride
        if ALIGNED:
            k_at = tl.multiple_of(k_at, 16)
        out_at = k_out_ptr + token * K_HEADS * HEAD_DIM
        _rotate_heads(
            k_ptr + k_at,
            out_at,
            k_head_stride,
            cos,
            sin,
            K_HEADS,
            HEAD_DIM,
            HALF,
            K_BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
            ALIGNED,
            not BACKWARD,
        )


# ---- launches ----

TILE = 2048  # elements of half heads that a program holds: 32 heads of 128
ELEMENTS_PER_THREAD = 16


def head_layout(q: Tensor, k: Tensor, half: int) -> dict[str, int]:
    """The constants of a kernel over the heads of one token, and its warps; 0 heads stand for absent queries or keys."""
    head_dim = q.shape[3]
    block_half = next_power_of_2(half)
    most = max(1, TILE // block_half)
    q_block, k_block = (min(most, next_power_of_2(max(1, x.shape[2]))) for x in (q, k))
    return {
        "Q_HEADS": q.shape[2],
        "K_HEADS": k.shape[2],
        "HEAD_DIM": head_dim,
        "HALF": half,
        "Q_BLOCK_HEADS": q_block,
        "K_BLOCK_HEADS": k_block,
        "BLOCK_HALF": block_half,
        "BLOCK_REST": next_power_of_2(max(1, head_dim - 2 * half)),
        "num_warps": min(8, max(1, max(q_block, k_block) * block_half // (32 * ELEMENTS_PER_THREAD))),
    }


def last_stride_one(x: Tensor) -> Tensor:
    """``x``, copied once if its last dimension is not laid out side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def table_strides(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """The tables with a last stride of 1 and the same strides, and these: (between batches, 0 for one table; between tokens)."""
    cos, sin = last_stride_one(cos), last_stride_one(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)


def is_aligned(head_dim: int, half: int, *tensors: Tensor | None) -> bool:
    """Whether every head of every token, and its second half, starts at a multiple of 16 elements from the first."""
    return head_dim % 16 == 0 and half % 16 == 0 and all(x is None or all(s % 16 == 0 for s in x.stride()[:3]) for x in tensors)


def _rotate(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    dispatch.ran("rope", "backward" if backward else "forward", "triton", _WHY)
    out = _rotate_fake(q, k, cos, sin, backward)
    cos, sin, *strides = table_strides(cos, sin)
    inputs = [None if x is None else last_stride_one(x) for x in (q, k)]
    present = q if q is not None else k
    for x in inputs:
        strides += (0, 0, 0) if x is None else x.stride()[:3]
    layout = head_layout(*out, cos.shape[2])
    alignment = is_aligned(layout["HEAD_DIM"], layout["HALF"], *inputs)
    with on_device(cos):
        # Without contraction into fused multiply-adds, which would round fp32 products and their sum once where eager rounds twice.
        launch(
            _rope_kernel,
            (present.shape[0] * present.shape[1],),
            *inputs,
            *out,
            cos,
            sin,
            present.shape[1],
            *strides,
            ALIGNED=alignment,
            BACKWARD=backward,
            enable_fp_fusion=False,
            **layout,
        )
    return out


def _rotate_fake(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """An absent input gives an output without heads: an operator returns tensors, never None."""
    present = q if q is not None else k
    batch, tokens, _, head_dim = present.shape
    heads = [0 if x is None else x.shape[2] for x in (q, k)]
    return tuple(torch.empty(batch, tokens, n, head_dim, dtype=present.dtype, device=present.device) for n in heads)


_rope_rotate = library.define(
    "rope_rotate(Tensor? q, Tensor? k, Tensor cos, Tensor sin, bool backward) -> (Tensor, Tensor)", _rotate, _rotate_fake
)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)  # a gradient that nobody sent costs no pass
        return _rope_rotate(q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        dq, dk = (x if wanted else None for x, wanted in zip((dq, dk), ctx.needs_input_grad[:2], strict=True))
        if dq is None and dk is None:
            return None, None, None, None
        q_out, k_out = _rope_rotate(dq, dk, *ctx.saved_tensors, True)
        return None if dq is None else q_out, None if dk is None else k_out, None, None


def _rope_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _Rope.apply(q, k, cos, sin)
    return _rope_rotate(q, k, cos, sin, False)


_rope = dispatch.Op("rope", _rope_reference, _rope_triton, lambda q, k, cos, sin: fp64_among(cos, sin))


# ---- public ----


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, /) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their position; returns new contiguous tensors ``(q', k')``.

    ``q`` is (B, T, Hq, D) and ``k`` (B, T, Hk, D) of one dtype; ``cos`` and ``sin`` are fp32 tables (1 or B, T, R/2) with any scaling of
    frequencies or attention folded in. R < D rotates the first R columns of a head and passes the rest through. The tables take no
    gradient: one that requires it is refused. The forward is bit-identical to the eager formula in q's dtype.

    Raises TypeError and ValueError for shapes, dtypes and devices that do not fit together.
    """
    check_rope_inputs("rope", q, k, cos, sin)
    return _rope(q, k, cos, sin)
