"""Triton kernels of ``qk_norm_rope.py``, and how they are launched.

A forward program takes one token with all its heads. A backward program walks many tokens and writes one fp32 partial sum of each
weight's gradient; these are added in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import sum_rows
from ._triton import device_info, launch, on_device, tl, triton
from .rope import head_layout, is_aligned, last_stride_one, load_table, rotate, table_strides


@triton.jit
def _load_scale(weight_ptr, columns, mask, offset):
    return tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + offset


@triton.jit
def _weigh(normed, scale, x_type: tl.constexpr, out_type: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """normed * scale with the roundings of the norm run alone, in fp32."""
    if ROUND_FIRST:
        normed = normed.to(x_type).to(tl.float32)
    return (normed * scale).to(out_type).to(tl.float32)


@triton.jit
def _forward_heads(
    x_ptr,  # a token's (HEADS, HEAD_DIM), row stride head_stride
    weight_ptr,  # (HEAD_DIM,)
    out_ptr,  # (HEADS, HEAD_DIM), contiguous
    rstd_ptr,  # (HEADS,) fp32
    head_stride,
    cos,  # (1, BLOCK_HALF) fp32
    sin,
    eps,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    x_type: tl.constexpr = x_ptr.dtype.element_ty
    out_type: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    first_scale = _load_scale(weight_ptr, columns, columns < HALF, offset)
    second_scale = _load_scale(weight_ptr + HALF, columns, columns < HALF, offset)
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
        squares = tl.sum(first * first + second * second, axis=1)
        if HEAD_DIM > 2 * HALF:
            rest_mask = exists & (rest < HEAD_DIM)
            passed = tl.load(x_at + rest, mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(passed * passed, axis=1)
        rstd = tl.rsqrt(squares / HEAD_DIM + eps)
        tl.store(rstd_ptr + heads, rstd, mask=heads < HEADS)
        first = _weigh(first * rstd[:, None], first_scale, x_type, out_type, ROUND_FIRST)
        second = _weigh(second * rstd[:, None], second_scale, x_type, out_type, ROUND_FIRST)
        first, second = rotate(first, second, cos, sin, out_type, True)
        tl.store(out_at + columns, first.to(out_type), mask=mask)
        tl.store(out_at + HALF + columns, second.to(out_type), mask=mask)
        if HEAD_DIM > 2 * HALF:
            rest_scale = _load_scale(weight_ptr, rest, rest < HEAD_DIM, offset)
            passed = _weigh(passed * rstd[:, None], rest_scale, x_type, out_type, ROUND_FIRST)
            tl.store(out_at + rest, passed.to(out_type), mask=rest_mask)


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
def _qk_norm_rope_forward_kernel(
    q_ptr,  # (B, T, Q_HEADS, HEAD_DIM), last stride 1
    k_ptr,  # (B, T, K_HEADS, HEAD_DIM), last stride 1
    q_weight_ptr,  # (HEAD_DIM,)
    k_weight_ptr,  # (HEAD_DIM,)
    q_out_ptr,  # contiguous
    k_out_ptr,  # contiguous
    q_rstd_ptr,  # (B * T, Q_HEADS) fp32
    k_rstd_ptr,  # (B * T, K_HEADS) fp32
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
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCK_HEADS: tl.constexpr,
    K_BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // tokens, token % tokens
    table_at = batch * table_batch_stride + position * table_token_stride
    cos = load_table(cos_ptr + table_at, q_out_ptr.dtype.element_ty, HALF, BLOCK_HALF)
    sin = load_table(sin_ptr + table_at, q_out_ptr.dtype.element_ty, HALF, BLOCK_HALF)
    q_at = batch * q_batch_stride + position * q_token_stride
    k_at = batch * k_batch_stride + position * k_token_stride
    if ALIGNED:  # see rope.py
        q_at, k_at = tl.multiple_of(q_at, 16), tl.multiple_of(k_at, 16)
    q_out_ptr += token * Q_HEADS * HEAD_DIM
    k_out_ptr += token * K_HEADS * HEAD_DIM
    # fmt: off
    _forward_heads(
        q_ptr + q_at, q_weight_ptr, q_out_ptr, q_rstd_ptr + token * Q_HEADS, q_head_stride, cos, sin, eps, offset,
        Q_HEADS, HEAD_DIM, HALF, Q_BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, ALIGNED, ROUND_FIRST,
    )
    _forward_heads(
        k_ptr + k_at, k_weight_ptr, k_out_ptr, k_rstd_ptr + token * K_HEADS, k_head_stride, cos, sin, eps, offset,
        K_HEADS, HEAD_DIM, HALF, K_BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, ALIGNED, ROUND_FIRST,
    )
    # fmt: on


@triton.jit
def _backward_heads(
    grad_ptr,  # a token's (HEADS, HEAD_DIM), contiguous
    x_ptr,  # a token's (HEADS, HEAD_DIM), row stride head_stride
    weight_ptr,  # (HEAD_DIM,)
    dx_ptr,  # (B * T, HEADS, HEAD_DIM), contiguous; or None
    rstd_ptr,  # (HEADS,) fp32
    head_stride,
    token,
    cos,  # (1, BLOCK_HALF) fp32
    sin,
    offset,
    dfirst,  # (BLOCK_HEADS, BLOCK_HALF) fp32: the weight's gradient so far, a row a head
    dsecond,
    drest,  # (BLOCK_HEADS, BLOCK_REST) fp32
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    for start in range(0, HEADS, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)
        x_at = heads.to(tl.int64) * head_stride
        if ALIGNED:
            x_at = tl.multiple_of(x_at, 16)
        x_at = x_ptr + x_at[:, None]
        grad_at = grad_ptr + heads[:, None] * HEAD_DIM
        exists = (heads < HEADS)[:, None]
        mask = exists & (columns < HALF)
        rest_mask = exists & (rest < HEAD_DIM)
        rstd = tl.load(rstd_ptr + heads, mask=heads < HEADS, other=0.0)[:, None]
        first = tl.load(x_at + columns, mask=mask, other=0.0).to(tl.float32) * rstd
        second = tl.load(x_at + HALF + columns, mask=mask, other=0.0).to(tl.float32) * rstd
        grad_first = tl.load(grad_at + columns, mask=mask, other=0.0).to(tl.float32)
        grad_second = tl.load(grad_at + HALF + columns, mask=mask, other=0.0).to(tl.float32)
        grad_first, grad_second = rotate(grad_first, grad_second, cos, -sin, tl.float32, False)
        dfirst += grad_first * first
        dsecond += grad_second * second
        if HEAD_DIM > 2 * HALF:
            passed = tl.load(x_at + rest, mask=rest_mask, other=0.0).to(tl.float32) * rstd
            grad_passed = tl.load(grad_at + rest, mask=rest_mask, other=0.0).to(tl.float32)
            drest += grad_passed * passed
        if dx_ptr is not None:
            grad_first *= _load_scale(weight_ptr, columns, columns < HALF, offset)
            grad_second *= _load_scale(weight_ptr + HALF, columns, columns < HALF, offset)
            products = tl.sum(grad_first * first + grad_second * second, axis=1)
            if HEAD_DIM > 2 * HALF:
                grad_passed *= _load_scale(weight_ptr, rest, rest < HEAD_DIM, offset)
                products += tl.sum(grad_passed * passed, axis=1)
            mean = (products / HEAD_DIM)[:, None]
            dx_type: tl.constexpr = dx_ptr.dtype.element_ty
            dx_at = dx_ptr + token * HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM
            tl.store(dx_at + columns, (rstd * (grad_first - first * mean)).to(dx_type), mask=mask)
            tl.store(dx_at + HALF + columns, (rstd * (grad_second - second * mean)).to(dx_type), mask=mask)
            if HEAD_DIM > 2 * HALF:
                tl.store(dx_at + rest, (rstd * (grad_passed - passed * mean)).to(dx_type), mask=rest_mask)
    return dfirst, dsecond, drest


@triton.jit
def _store_partial(
    partial_ptr, dfirst, dsecond, drest, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr
):
    """This program's sum of a weight's gradient over its tokens and heads, into its row of (programs, HEAD_DIM)."""
    row_ptr = partial_ptr + tl.program_id(0) * HEAD_DIM
    columns = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    tl.store(row_ptr + columns, tl.sum(dfirst, axis=0), mask=columns < HALF)
    tl.store(row_ptr + HALF + columns, tl.sum(dsecond, axis=0), mask=columns < HALF)
    if HEAD_DIM > 2 * HALF:
        tl.store(row_ptr + rest, tl.sum(drest, axis=0), mask=rest < HEAD_DIM)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
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
def _qk_norm_rope_backward_kernel(
    q_grad_ptr,  # (B, T, Q_HEADS, HEAD_DIM), contiguous
    k_grad_ptr,  # (B, T, K_HEADS, HEAD_DIM), contiguous
    q_ptr,  # arguments as above
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    dq_ptr,  # contiguous; or None
    dk_ptr,  # contiguous; or None
    q_partial_ptr,  # (programs, HEAD_DIM) fp32; or None
    k_partial_ptr,  # (programs, HEAD_DIM) fp32; or None
    q_rstd_ptr,
    k_rstd_ptr,
    cos_ptr,
    sin_ptr,
    num_tokens,  # B * T
    tokens,  # T
    table_batch_stride,
    table_token_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCK_HEADS: tl.constexpr,
    K_BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    table_type: tl.constexpr = q_grad_ptr.dtype.element_ty
    q_first = tl.zeros([Q_BLOCK_HEADS, BLOCK_HALF], dtype=tl.float32)
    q_second = tl.zeros([Q_BLOCK_HEADS, BLOCK_HALF], dtype=tl.float32)
    q_rest = tl.zeros([Q_BLOCK_HEADS, BLOCK_REST], dtype=tl.float32)
    k_first = tl.zeros([K_BLOCK_HEADS, BLOCK_HALF], dtype=tl.float32)
    k_second = tl.zeros([K_BLOCK_HEADS, BLOCK_HALF], dtype=tl.float32)
    k_rest = tl.zeros([K_BLOCK_HEADS, BLOCK_REST], dtype=tl.float32)
    for index in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        batch, position = token // tokens, token % tokens
        table_at = batch * table_batch_stride + position * table_token_stride
        cos = load_table(cos_ptr + table_at, table_type, HALF, BLOCK_HALF)
        sin = load_table(sin_ptr + table_at, table_type, HALF, BLOCK_HALF)
        q_at = batch * q_batch_stride + position * q_token_stride
        k_at = batch * k_batch_stride + position * k_token_stride
        if ALIGNED:
            q_at, k_at = tl.multiple_of(q_at, 16), tl.multiple_of(k_at, 16)
        # fmt: off
        if dq_ptr is not None or q_partial_ptr is not None:
            q_first, q_second, q_rest = _backward_heads(
                q_grad_ptr + token * Q_HEADS * HEAD_DIM, q_ptr + q_at, q_weight_ptr, dq_ptr, q_rstd_ptr + token * Q_HEADS, q_head_stride,
                token, cos, sin, offset, q_first, q_second, q_rest,
                Q_HEADS, HEAD_DIM, HALF, Q_BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, ALIGNED,
            )
        if dk_ptr is not None or k_partial_ptr is not None:
            k_first, k_second, k_rest = _backward_heads(
                k_grad_ptr + token * K_HEADS * HEAD_DIM, k_ptr + k_at, k_weight_ptr, dk_ptr, k_rstd_ptr + token * K_HEADS, k_head_stride,
                token, cos, sin, offset, k_first, k_second, k_rest,
                K_HEADS, HEAD_DIM, HALF, K_BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, ALIGNED,
            )
        # fmt: on
    if q_partial_ptr is not None:
        _store_partial(q_partial_ptr, q_first, q_second, q_rest, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST)
    if k_partial_ptr is not None:
        _store_partial(k_partial_ptr, k_first, k_second, k_rest, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST)


# ---- launches ----

THREADS_PER_SM = 512  # of backward programs, which walk the tokens: what registers allow


def launch_forward(
    q: Tensor,  # (B, T, Hq, D)
    k: Tensor,  # (B, T, Hk, D)
    q_weight: Tensor,  # (D,)
    k_weight: Tensor,  # (D,)
    cos: Tensor,  # (1 or B, T, R/2)
    sin: Tensor,
    outputs: tuple[Tensor, ...],  # q', k', contiguous, and their rstd, (B, T, H) fp32
    eps: float,
    offset: float,
    round_first: bool,
) -> None:
    """Fill the outputs."""
    q, k = last_stride_one(q), last_stride_one(k)
    cos, sin, *strides = table_strides(cos, sin)
    tensors = (q, k, q_weight.contiguous(), k_weight.contiguous(), *outputs, cos, sin)
    scalars = (q.shape[1], *strides, *q.stride()[:3], *k.stride()[:3], eps, offset)
    layout = head_layout(q, k, cos.shape[2])
    meta = {"ALIGNED": is_aligned(layout["HEAD_DIM"], layout["HALF"], q, k), "ROUND_FIRST": round_first}
    meta["enable_fp_fusion"] = False  # products in half precision round before they are added, as in the sequence of both ops
    with on_device(q):
        launch(_qk_norm_rope_forward_kernel, (q.shape[0] * q.shape[1],), *tensors, *scalars, **layout, **meta)


def launch_backward(
    q_grad: Tensor,  # (B, T, Hq, D)
    k_grad: Tensor,  # (B, T, Hk, D)
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,  # (D,)
    k_weight: Tensor,  # (D,)
    q_rstd: Tensor,  # (B, T, Hq) fp32
    k_rstd: Tensor,
    cos: Tensor,  # (1 or B, T, R/2)
    sin: Tensor,
    dq: Tensor | None,  # (B, T, Hq, D), contiguous: filled
    dk: Tensor | None,
    offset: float,
    want_q_weight: bool,
    want_k_weight: bool,
) -> Tensor | None:
    """Fill ``dq`` and ``dk`` if given; return the gradients of the wanted weights in their dtype, one row each."""
    q, k = last_stride_one(q), last_stride_one(k)
    cos, sin, *strides = table_strides(cos, sin)
    layout = head_layout(q, k, cos.shape[2])
    layout["num_warps"] = min(8, 2 * layout["num_warps"])  # holds the gradients and the weight's sums besides the heads
    device = device_info(q.device)
    num_tokens = q.shape[0] * q.shape[1]
    programs = min(num_tokens, device.num_sms * max(1, THREADS_PER_SM // (layout["num_warps"] * device.warp_size)))
    partial = torch.empty(want_q_weight + want_k_weight, programs, q.shape[3], dtype=torch.float32, device=q.device)
    q_partial, k_partial = partial[0] if want_q_weight else None, partial[-1] if want_k_weight else None
    q_grad, k_grad, q_weight, k_weight = (x.contiguous() for x in (q_grad, k_grad, q_weight, k_weight))
    tensors = (q_grad, k_grad, q, k, q_weight, k_weight, dq, dk, q_partial, k_partial, q_rstd, k_rstd, cos, sin)
    scalars = (num_tokens, q.shape[1], *strides, *q.stride()[:3], *k.stride()[:3], offset)
    alignment = is_aligned(layout["HEAD_DIM"], layout["HALF"], q, k)
    with on_device(q):
        launch(_qk_norm_rope_backward_kernel, (programs,), *tensors, *scalars, ALIGNED=alignment, **layout)
        return sum_rows(partial, q_weight.dtype) if want_q_weight or want_k_weight else None
