"""Attention on Triton: tile sizes, launches, operators and their autograd function. attention.py says what it computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import dispatch, library
from ._triton import DeviceInfo, cdiv, device_info, launch, next_power_of_2, on_device
from .attention_backward import attention_delta_kernel, attention_dkdv_kernel, attention_dq_kernel
from .attention_common import DOCUMENT_BLOCK, LOG2E
from .attention_forward import attention_combine_kernel, attention_forward_kernel, document_ranges_kernel
from .attention_tiles import tiles

_WHY = "tensors on a device that Triton serves"
_FEW_QUERIES = 16  # up to so many, a tile holds all the heads of a key-value head, and the keys are split over programs
_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 64
_LONGEST_WINDOW = 1 << 30  # no more tokens than this in a row, so that slots fit in int32


class _Masks(NamedTuple):
    """What decides which query sees which key, in the order in which the operators take it."""

    document_ids: Tensor | None
    key_document_ids: Tensor | None
    query_start_at: Tensor | None
    kv_length_at: Tensor | None
    query_start: int
    kv_length: int
    causal: bool
    window: int  # 0: none
    scale: float
    softcap: float  # 0: none


_MASKS = (
    "Tensor? document_ids, Tensor? key_document_ids, Tensor? query_start_at, Tensor? kv_length_at, SymInt query_start, SymInt kv_length, "
    "bool causal, SymInt window, float scale, float softcap"
)


def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    sinks: Tensor | None,
    document_ids: Tensor | None,
    key_document_ids: Tensor | None,
    query_start: int | Tensor,
    kv_length: int | Tensor,
) -> Tensor:
    """The Triton implementation of ``attention``, for checked and completed arguments."""
    start_at = query_start if isinstance(query_start, Tensor) else None
    length_at = kv_length if isinstance(kv_length, Tensor) else None
    return _Attention.apply(
        q,
        k,
        v,
        sinks,
        document_ids,
        key_document_ids,
        start_at,
        length_at,
        query_start if start_at is None else 0,
        kv_length if length_at is None else 0,
        causal,
        0 if window is None else min(window, _LONGEST_WINDOW),
        scale,
        0.0 if softcap is None else float(softcap),
    )


def unsupported(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any) -> str | None:
    """Why Triton does not serve a call whose device and dtype it serves, or None."""
    if not scale > 0:
        return f"a scale of {scale}, where the maximum of the scores is not the scaled maximum of the products"
    return None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *masks: Any) -> Tensor:
        out, lse = _forward_operator(q, k, v, sinks, *masks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *masks[:4])
        ctx.numbers = masks[4:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:4]
        gradients = _backward_operator(d_out, q, k, v, sinks, out, lse, *tensors, *ctx.numbers, *wanted)
        return *(g if want else None for g, want in zip(gradients, wanted, strict=True)), *(None,) * 10


# ---- operators ----


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *masks: Any) -> tuple[Tensor, Tensor]:
    dispatch.ran("attention", "forward", "triton", _WHY)
    m = _Masks(*masks)
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    info = device_info(q.device)
    few = num_queries <= _FEW_QUERIES
    pack = group if few else 1
    size = tiles("few" if few else "forward", head_dim, q.dtype, info)
    block_m = 16 if few and num_queries * pack <= 16 else size.block_m
    programs = batch * (num_heads // pack) * cdiv(num_queries * pack, block_m)
    splits = _num_splits(programs, num_keys, info) if few else 1

    out = torch.empty((batch, num_queries, num_heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, num_heads, num_queries), dtype=torch.float32, device=q.device)
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    sinks = None if sinks is None else sinks.contiguous()
    with on_device(q):
        ranges = None if few else _document_ranges(m.document_ids, m.key_document_ids)
        q, k, v, strides, batch_rows = _by_rows(q, k, v)
        query_ids, key_ids, ids_strides = _ids(m)
        launch(
            attention_forward_kernel,
            (programs * splits,),
            *(q, k, v, sinks, part_out, part_lse, query_ids, key_ids, ranges, m.query_start_at, m.kv_length_at),
            *(batch, num_queries, num_keys, m.query_start, m.kv_length, m.window, splits, *_score_factors(m)),
            *(*batch_rows, *ids_strides, *strides),
            PACK=pack,
            SPLIT=splits > 1,
            BLOCK_M=block_m,
            BLOCK_N=size.block_n,
            num_warps=size.num_warps,
            num_stages=size.num_stages,
            **_constants(num_heads, num_kv_heads, head_dim, m),
        )
        if splits > 1:
            launch(
                attention_combine_kernel,
                (batch * num_queries * num_heads,),
                *(part_out, part_lse, out, lse, batch, num_queries, splits),
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                BLOCK_D=_padded(head_dim),
                num_warps=1,
            )
    return out, lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *masks: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *masks_and_wanted: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dispatch.ran("attention", "backward", "triton", _WHY)
    m = _Masks(*masks_and_wanted[:10])
    want_dq, want_dk, want_dv, want_dsinks = masks_and_wanted[10:]
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    info = device_info(q.device)
    dq, dk, dv, _ = gradients = _backward_fake(d_out, q, k, v, sinks, out, lse, *masks_and_wanted)
    d_out = d_out.contiguous()
    delta = torch.empty_like(lse)  # (B, H, Tq)
    q, k, v, strides, batch_rows = _by_rows(q, k, v)
    query_ids, key_ids, ids_strides = _ids(m)
    numbers = (
        num_queries,
        num_keys,
        m.query_start,
        m.kv_length,
        m.window,
        m.scale,
        *_score_factors(m),
        *batch_rows,
        *ids_strides,
        *strides,
    )
    constants = _constants(num_heads, num_kv_heads, head_dim, m)
    with on_device(q):
        if want_dq or want_dk or want_dsinks:
            launch(
                attention_delta_kernel,
                (batch * num_heads * cdiv(num_queries, 32),),
                *(out, d_out, delta, num_queries),
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                BLOCK_D=_padded(head_dim),
                BLOCK_M=32,
                num_warps=4,
            )
        if want_dk or want_dv:
            size = tiles("dkdv", head_dim, q.dtype, info)
            launch(
                attention_dkdv_kernel,
                (batch * num_kv_heads * cdiv(num_keys, size.block_n),),
                *(q, k, v, d_out, lse, delta, dk, dv, query_ids, key_ids),
                *(_document_ranges(m.key_document_ids, m.document_ids), m.query_start_at, m.kv_length_at, *numbers),
                WANT_DK=want_dk,
                WANT_DV=want_dv,
                BLOCK_M=size.block_m,
                BLOCK_N=size.block_n,
                num_warps=size.num_warps,
                num_stages=size.num_stages,
                **constants,
            )
        if want_dq:
            size = tiles("dq", head_dim, q.dtype, info)
            launch(
                attention_dq_kernel,
                (batch * num_heads * cdiv(num_queries, size.block_m),),
                *(q, k, v, d_out, lse, delta, dq, query_ids, key_ids),
                *(_document_ranges(m.document_ids, m.key_document_ids), m.query_start_at, m.kv_length_at, *numbers),
                BLOCK_M=size.block_m,
                BLOCK_N=size.block_n,
                num_warps=size.num_warps,
                num_stages=size.num_stages,
                **constants,
            )
    if want_dsinks:  # the sink's share of each softmax; its value is zero, so only delta remains
        share = torch.exp2(sinks.float()[None, :, None] * LOG2E - lse)
        return *gradients[:3], -(share * delta).sum((0, 2)).to(sinks.dtype)
    return gradients


def _backward_fake(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *masks_and_wanted: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = masks_and_wanted[10:]
    shapes = (q.shape, k.shape, v.shape, (q.shape[2],))
    dtypes = (q.dtype, q.dtype, q.dtype, q.dtype if sinks is None else sinks.dtype)
    return tuple(
        torch.empty(shape if want else (0,), dtype=dtype, device=q.device)
        for shape, dtype, want in zip(shapes, dtypes, wanted, strict=True)
    )  # an unwanted gradient is empty


_forward_operator = library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_MASKS}) -> (Tensor, Tensor)", _forward, _forward_fake
)
_backward_operator = library.define(
    f"attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, {_MASKS}, "
    "bool want_dq, bool want_dk, bool want_dv, bool want_dsinks) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


# ---- launches' arguments ----


def _padded(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, m: _Masks) -> dict[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _padded(head_dim),
        "CAUSAL": m.causal,
        "WINDOWED": m.window > 0,
        "SOFTCAP": m.softcap > 0,
    }


def _score_factors(m: _Masks) -> tuple[float, float]:
    """What a kernel multiplies products by, and (with a soft-cap) their tanh by, to get scores in units of log2."""
    return (m.scale / m.softcap, m.softcap * LOG2E) if m.softcap > 0 else (m.scale * LOG2E, 0.0)


def _num_splits(programs: int, num_keys: int, info: DeviceInfo) -> int:
    """Over how many programs the keys of a tile are split: enough to fill the device twice, none of them too short."""
    return max(1, min(2 * info.num_sms // max(programs, 1), num_keys // _KEYS_PER_SPLIT, _MAX_SPLITS))


def _by_rows(*tensors: Tensor) -> tuple[Any, ...]:
    """Each (B, T, H, D) tensor as the kernels address it; then all (token, head) strides, and all batch strides counted in tokens.

    A batch stride grows with the tokens, so a kernel must not specialise on it, and would then know nothing of its divisibility; counted
    in tokens it needs no such knowledge. What cannot be addressed so is copied.
    """
    strides: list[int] = []
    batch_rows: list[int] = []
    given = []
    for x in tensors:
        batch, num_tokens, num_heads, head_dim = x.shape
        b, t, h, d = x.stride()
        if num_tokens == 1 and batch > 1:
            t = b
        dense = d == 1 or head_dim == 1
        if not dense or (num_tokens > 1 and t == 0) or (batch > 1 and (t == 0 or b % t)):
            x = x.contiguous()
            h, t, b = head_dim, num_heads * head_dim, num_tokens * num_heads * head_dim
        given.append(x)
        strides += (t, h)
        batch_rows.append(b // t if batch > 1 and t else 0)
    return *given, tuple(strides), tuple(batch_rows)


def _ids(m: _Masks) -> tuple[Tensor | None, Tensor | None, tuple[int, int]]:
    """Ids of queries and keys with dense rows, and their batch strides."""
    if m.document_ids is None or m.key_document_ids is None:
        return None, None, (0, 0)
    query_ids, key_ids = _dense(m.document_ids), _dense(m.key_document_ids)
    return query_ids, key_ids, (query_ids.stride(0), key_ids.stride(0))


def _dense(ids: Tensor) -> Tensor:
    return ids if ids.stride(1) == 1 else ids.contiguous()


def _document_ranges(row_ids: Tensor | None, column_ids: Tensor | None) -> Tensor | None:
    """For each block of rows the range of columns outside which no id is shared; None without documents."""
    if row_ids is None or column_ids is None:
        return None
    row_ids, column_ids = _dense(row_ids), _dense(column_ids)
    batch, num_rows = row_ids.shape
    num_blocks = cdiv(num_rows, DOCUMENT_BLOCK)
    ranges = torch.empty((batch, num_blocks, 2), dtype=torch.int32, device=row_ids.device)
    launch(
        document_ranges_kernel,
        (batch * num_blocks,),
        *(row_ids, column_ids, ranges, num_rows, column_ids.shape[1], row_ids.stride(0), column_ids.stride(0)),
        CHUNK=1024,
        num_warps=4,
    )
    return ranges
