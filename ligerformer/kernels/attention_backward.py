"""Attention's backward kernels: delta, dK and dV by tiles of keys, dQ by tiles of queries.

With p = exp2(s - lse) recomputed from the saved log-sum-exp and delta_i = <o_i, do_i>:

    dv_j = sum_i p_ij do_i,   ds_ij = p_ij (<do_i, v_j> - delta_i) [(1 - tanh^2) with a soft-cap],
    dk_j = scale sum_i ds_ij q_i,   dq_i = scale sum_j ds_ij k_j

A program for dK and dV walks all the query heads of its key-value head, so every sum has one owner and one order: no atomics.
"""

from __future__ import annotations

from ._triton import tl, triton
from .attention_common import (
    DOCUMENT_BLOCK,
    full_key_tiles,
    host_or_device,
    key_bounds,
    key_tile_seen,
    load_row,
    load_tile,
    past_gap,
    score_tile,
    visible,
)

_DOCUMENT_BLOCK = tl.constexpr(DOCUMENT_BLOCK)


@triton.jit(do_not_specialize=["num_queries"])
def attention_delta_kernel(
    out_ptr,  # (B, Tq, H, D) contiguous, as is its gradient
    d_out_ptr,
    delta_ptr,  # (B, H, Tq) fp32
    num_queries,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Each query's sum of d_out * out, which both backward kernels take off the gradient of its weights."""
    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    head = tl.program_id(0) % NUM_HEADS
    tile = tl.program_id(0) // NUM_HEADS % num_tiles
    b = (tl.program_id(0) // NUM_HEADS // num_tiles).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    rows_ok = rows < num_queries
    ok = rows_ok[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = ((b * num_queries + rows)[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    out = tl.load(out_ptr + offsets, mask=ok, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + offsets, mask=ok, other=0.0).to(tl.float32)
    tl.store(delta_ptr + (b * NUM_HEADS + head) * num_queries + rows, tl.sum(out * d_out, 1), mask=rows_ok)


@triton.jit
def _gather_dkdv(
    dk,
    dv,
    k,
    v,
    q_ptr,
    d_out_ptr,
    lse_ptr,
    delta_ptr,
    q_stride_t,
    q_stride_h,
    q_offsets,
    d_out_offsets,
    dims_ok,
    first,
    end,
    gap_first,
    gap_end,
    num_queries,
    kv_end,
    query_start,
    keys,
    query_ids_ptr,
    key_ids,
    window,
    score_scale,
    score_cap,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    MASK_DIMS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_OUT_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add to dk and dv what queries [first, end) without [gap_first, gap_end) give, of all the group's heads; tiles are (keys, queries).

    One loop over (tile, head) pairs: with a loop of heads around one of tiles the software pipeline would run dry between heads, and what
    the outer loop holds would spill the accumulators.
    """
    DOCUMENTS: tl.constexpr = query_ids_ptr is not None
    rows = tl.arange(0, BLOCK_M)
    num_tiles = tl.maximum(tl.cdiv(end - first - (gap_end - gap_first), BLOCK_M), 0)
    for step in tl.range(num_tiles * GROUP):
        member = step % GROUP
        start = past_gap(first + step // GROUP * BLOCK_M, gap_first, gap_end)
        q_head = q_ptr + member * q_stride_h
        d_out_head = d_out_ptr + member * HEAD_DIM
        statistics = tl.cast(member, tl.int64) * num_queries + start
        queries = start + rows
        row = tl.cast(start, tl.int64)
        queries_ok = queries < num_queries
        q = load_tile(q_head + row * q_stride_t, q_offsets, queries_ok, dims_ok, MASKED, MASK_DIMS)  # (BLOCK_M, BLOCK_D)
        lse = load_row(lse_ptr + statistics, rows, queries_ok, float("inf"), MASKED)
        scores = score_tile(k, q, score_scale, SOFTCAP)  # (BLOCK_N, BLOCK_M)
        factor = score_cap if SOFTCAP else score_scale
        p = tl.exp2(scores * factor - lse[None, :])
        if MASKED:
            query_ids = key_ids
            if DOCUMENTS:
                query_ids = tl.load(query_ids_ptr + queries, mask=queries_ok, other=0)[None, :]
            slots = query_start + queries
            seen = visible(slots[None, :], keys[:, None], kv_end, window, query_ids, key_ids, CAUSAL, WINDOWED, DOCUMENTS)
            p = tl.where(seen & queries_ok[None, :], p, 0.0)
        d_out = load_tile(d_out_head + row * D_OUT_STRIDE, d_out_offsets, queries_ok, dims_ok, MASKED, MASK_DIMS)
        if WANT_DV:
            dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision="ieee")
        if WANT_DK:
            delta = load_row(delta_ptr + statistics, rows, queries_ok, 0.0, MASKED)
            dp = tl.broadcast_to(-delta[None, :], p.shape)  # the product is added to it: delta needs no registers of its own
            dp = tl.dot(v, tl.trans(d_out), dp, input_precision="ieee")
            ds = p * dp
            if SOFTCAP:
                ds = ds * (1.0 - scores * scores)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_queries", "num_keys", "query_start", "kv_length", "window",
        "q_batch_rows", "k_batch_rows", "v_batch_rows", "query_ids_stride", "key_ids_stride",
    ]
)  # fmt: skip
def attention_dkdv_kernel(
    q_ptr,  # as in the forward
    k_ptr,
    v_ptr,
    d_out_ptr,  # (B, Tq, H, D) contiguous
    lse_ptr,  # (B, H, Tq), units of log2
    delta_ptr,  # (B, H, Tq)
    dk_ptr,  # (B, Tk, H_kv, D) contiguous, as is dv
    dv_ptr,
    query_ids_ptr,
    key_ids_ptr,
    ranges_ptr,  # (B, ceil(Tk / DOCUMENT_BLOCK), 2): the queries that a block of keys can meet
    query_start_ptr,
    kv_length_ptr,
    num_queries,
    num_keys,
    query_start,
    kv_length,
    window,
    scale,
    score_scale,
    score_cap,
    q_batch_rows,
    k_batch_rows,
    v_batch_rows,
    query_ids_stride,
    key_ids_stride,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dK and dV of one tile of keys: walks the tiles of queries that may see it, and in each the query heads of the group."""
    MASK_DIMS: tl.constexpr = HEAD_DIM != BLOCK_D
    DOCUMENTS: tl.constexpr = query_ids_ptr is not None
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    query_start = host_or_device(query_start, query_start_ptr)
    kv_end = tl.minimum(host_or_device(kv_length, kv_length_ptr), num_keys)
    if CAUSAL:
        kv_end = tl.minimum(kv_end, query_start + num_queries)

    num_tiles = tl.cdiv(num_keys, BLOCK_N)
    tile = tl.program_id(0) % num_tiles  # the longest first: early keys meet the most queries
    kv_head = tl.program_id(0) // num_tiles % NUM_KV_HEADS
    b = (tl.program_id(0) // num_tiles // NUM_KV_HEADS).to(tl.int64)
    low_key = tile * BLOCK_N
    keys = low_key + tl.arange(0, BLOCK_N)
    keys_ok = keys < kv_end
    dims = tl.arange(0, BLOCK_D)
    dims_ok = dims < HEAD_DIM

    # Queries [first, end) meet a key of the tile; those of [full_first, full_end) see them all (keys past kv_end are zeroed at the end).
    first = 0
    end = num_queries
    full_first = 0
    if CAUSAL:
        first = tl.maximum(low_key - query_start, 0)
        full_first = tl.maximum(low_key + BLOCK_N - 1 - query_start, 0)
    if WINDOWED:
        end = tl.minimum(end, tl.minimum(low_key + BLOCK_N, kv_end) - 1 + window - query_start)
    if ranges_ptr is not None:
        ranges_ptr += (b * tl.cdiv(num_keys, _DOCUMENT_BLOCK) + low_key // _DOCUMENT_BLOCK) * 2
        first = tl.maximum(first, tl.load(ranges_ptr))
        end = tl.minimum(end, tl.load(ranges_ptr + 1))
    end = tl.where(low_key < kv_end, end, 0)
    first = first // BLOCK_M * BLOCK_M
    full_first = tl.maximum(tl.cdiv(full_first, BLOCK_M) * BLOCK_M, first)
    full_end = tl.minimum(num_queries, end) // BLOCK_M * BLOCK_M
    if WINDOWED:
        full_end = tl.minimum(full_end, (low_key + window - query_start) // BLOCK_M * BLOCK_M)
    if DOCUMENTS:
        full_end = full_first
    full_end = tl.maximum(full_end, full_first)

    # Queries' offsets within a tile stay in int32; what grows with the batch or the tokens is added to the pointers in int64.
    k_ptr += (b * k_batch_rows + low_key) * k_stride_t + kv_head * k_stride_h
    v_ptr += (b * v_batch_rows + low_key) * v_stride_t + kv_head * v_stride_h
    key_rows = tl.arange(0, BLOCK_N)[:, None]
    k = load_tile(k_ptr, key_rows * k_stride_t + dims[None, :], keys_ok, dims_ok, True, MASK_DIMS)
    v = load_tile(v_ptr, key_rows * v_stride_t + dims[None, :], keys_ok, dims_ok, True, MASK_DIMS)
    key_ids = keys[:, None]
    if DOCUMENTS:
        key_ids = tl.load(key_ids_ptr + b * key_ids_stride + keys, mask=keys_ok, other=0)[:, None]
        query_ids_ptr += b * query_ids_stride
    D_OUT_STRIDE: tl.constexpr = NUM_HEADS * HEAD_DIM
    query_rows = tl.arange(0, BLOCK_M)[:, None]
    q_offsets = query_rows * q_stride_t + dims[None, :]
    d_out_offsets = query_rows * D_OUT_STRIDE + dims[None, :]

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    q_ptr += b * q_batch_rows * q_stride_t + kv_head * GROUP * q_stride_h
    d_out_ptr += (b * num_queries * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    statistics = (b * NUM_HEADS + kv_head * GROUP) * num_queries
    dk, dv = _gather_dkdv(
        dk, dv, k, v, q_ptr, d_out_ptr, lse_ptr + statistics, delta_ptr + statistics, q_stride_t, q_stride_h, q_offsets, d_out_offsets,
        dims_ok, first, end, full_first, full_end, num_queries, kv_end, query_start, keys, query_ids_ptr, key_ids, window,
        score_scale, score_cap, True, CAUSAL, WINDOWED, SOFTCAP, WANT_DK, WANT_DV, MASK_DIMS, GROUP, HEAD_DIM, D_OUT_STRIDE, BLOCK_M,
    )  # fmt: skip
    if not DOCUMENTS:
        dk, dv = _gather_dkdv(
            dk, dv, k, v, q_ptr, d_out_ptr, lse_ptr + statistics, delta_ptr + statistics, q_stride_t, q_stride_h, q_offsets, d_out_offsets,
            dims_ok, full_first, full_end, 0, 0, num_queries, kv_end, query_start, keys, query_ids_ptr, key_ids, window,
            score_scale, score_cap, False, CAUSAL, WINDOWED, SOFTCAP, WANT_DK, WANT_DV, MASK_DIMS, GROUP, HEAD_DIM, D_OUT_STRIDE, BLOCK_M,
        )  # fmt: skip

    stored = (keys < num_keys)[:, None] & dims_ok[None, :]
    row = (b * num_keys + low_key) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    offsets = key_rows * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
    if WANT_DK:
        tl.store(dk_ptr + row + offsets, tl.where(keys_ok[:, None], dk * scale, 0.0).to(dk_ptr.dtype.element_ty), mask=stored)
    if WANT_DV:
        tl.store(dv_ptr + row + offsets, tl.where(keys_ok[:, None], dv, 0.0).to(dv_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _gather_dq(
    dq,
    q,
    d_out,
    lse,
    delta,
    k_ptr,
    v_ptr,
    k_stride_t,
    v_stride_t,
    k_offsets,
    v_offsets,
    dims_ok,
    first,
    end,
    gap_first,
    gap_end,
    kv_end,
    slots,
    query_ids,
    key_ids_ptr,
    window,
    score_scale,
    score_cap,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK_DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add to dq what the keys of [first, end) give, without those of [gap_first, gap_end)."""
    DOCUMENTS: tl.constexpr = key_ids_ptr is not None
    for step in tl.range(first, end - (gap_end - gap_first), BLOCK_N):
        start = past_gap(step, gap_first, gap_end)
        keys = start + tl.arange(0, BLOCK_N)
        row = tl.cast(start, tl.int64)
        keys_ok = keys < kv_end
        k = load_tile(k_ptr + row * k_stride_t, k_offsets, keys_ok, dims_ok, MASKED, MASK_DIMS)
        v = load_tile(v_ptr + row * v_stride_t, v_offsets, keys_ok, dims_ok, MASKED, MASK_DIMS)
        scores = score_tile(q, k, score_scale, SOFTCAP)
        factor = score_cap if SOFTCAP else score_scale
        p = tl.exp2(scores * factor - lse[:, None])
        if MASKED:
            seen = key_tile_seen(keys, keys_ok, kv_end, slots, query_ids, key_ids_ptr, window, CAUSAL, WINDOWED, DOCUMENTS)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(d_out, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - scores * scores)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(
    do_not_specialize=[
        "num_queries", "num_keys", "query_start", "kv_length", "window",
        "q_batch_rows", "k_batch_rows", "v_batch_rows", "query_ids_stride", "key_ids_stride",
    ]
)  # fmt: skip
def attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,  # (B, Tq, H, D) contiguous, as is dq
    lse_ptr,
    delta_ptr,
    dq_ptr,
    query_ids_ptr,
    key_ids_ptr,
    ranges_ptr,  # (B, ceil(Tq / DOCUMENT_BLOCK), 2), as in the forward
    query_start_ptr,
    kv_length_ptr,
    num_queries,
    num_keys,
    query_start,
    kv_length,
    window,
    scale,
    score_scale,
    score_cap,
    q_batch_rows,
    k_batch_rows,
    v_batch_rows,
    query_ids_stride,
    key_ids_stride,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dQ of one tile of queries of one head: walks the tiles of keys that it may see."""
    MASK_DIMS: tl.constexpr = HEAD_DIM != BLOCK_D
    DOCUMENTS: tl.constexpr = query_ids_ptr is not None
    query_start = host_or_device(query_start, query_start_ptr)
    kv_end = tl.minimum(host_or_device(kv_length, kv_length_ptr), num_keys)

    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % NUM_HEADS
    b = (tl.program_id(0) // num_tiles // NUM_HEADS).to(tl.int64)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    queries_ok = queries < num_queries
    dims = tl.arange(0, BLOCK_D)
    dims_ok = dims < HEAD_DIM

    query_rows = tl.arange(0, BLOCK_M)[:, None]
    q_ptr += (b * q_batch_rows + first_query) * q_stride_t + head * q_stride_h
    q = load_tile(q_ptr, query_rows * q_stride_t + dims[None, :], queries_ok, dims_ok, True, MASK_DIMS)
    row = ((b * num_queries + first_query) * NUM_HEADS + head) * HEAD_DIM
    row_offsets = query_rows * (NUM_HEADS * HEAD_DIM) + dims[None, :]
    d_out = load_tile(d_out_ptr + row, row_offsets, queries_ok, dims_ok, True, MASK_DIMS)
    statistics = (b * NUM_HEADS + head) * num_queries + queries
    lse = tl.load(lse_ptr + statistics, mask=queries_ok, other=float("inf"))
    delta = tl.load(delta_ptr + statistics, mask=queries_ok, other=0.0)
    k_ptr += b * k_batch_rows * k_stride_t + kv_head * k_stride_h
    v_ptr += b * v_batch_rows * v_stride_t + kv_head * v_stride_h
    k_offsets = tl.arange(0, BLOCK_N)[:, None] * k_stride_t + dims[None, :]
    v_offsets = tl.arange(0, BLOCK_N)[:, None] * v_stride_t + dims[None, :]

    slots = query_start + queries
    query_ids = slots[:, None]
    if DOCUMENTS:
        query_ids = tl.load(query_ids_ptr + b * query_ids_stride + queries, mask=queries_ok, other=0)[:, None]
        key_ids_ptr += b * key_ids_stride
        ranges_ptr += (b * tl.cdiv(num_queries, _DOCUMENT_BLOCK) + first_query // _DOCUMENT_BLOCK) * 2
    low_slot = query_start + first_query
    high_slot = query_start + tl.minimum(first_query + BLOCK_M, num_queries) - 1
    first, end = key_bounds(low_slot, high_slot, kv_end, window, ranges_ptr, CAUSAL, WINDOWED, BLOCK_N)
    full_first, full_end = full_key_tiles(low_slot, high_slot, first, end, window, CAUSAL, WINDOWED, DOCUMENTS, BLOCK_N)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _gather_dq(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, k_stride_t, v_stride_t, k_offsets, v_offsets, dims_ok, first, end, full_first, full_end,
        end, slots, query_ids, key_ids_ptr, window, score_scale, score_cap, True, CAUSAL, WINDOWED, SOFTCAP, MASK_DIMS, BLOCK_N,
    )  # fmt: skip
    if not DOCUMENTS:
        dq = _gather_dq(
            dq, q, d_out, lse, delta, k_ptr, v_ptr, k_stride_t, v_stride_t, k_offsets, v_offsets, dims_ok, full_first, full_end, 0, 0,
            end, slots, query_ids, key_ids_ptr, window, score_scale, score_cap, False, CAUSAL, WINDOWED, SOFTCAP, MASK_DIMS, BLOCK_N,
        )  # fmt: skip
    tl.store(dq_ptr + row + row_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=queries_ok[:, None] & dims_ok[None, :])
