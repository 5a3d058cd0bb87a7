"""Attention's forward kernels.

One program takes a tile of queries of one head (or, when queries are few, of all the heads that share a key-value head) through the keys
that it can see, holding the running maximum, the sum and the output in registers. Scores are kept in units of log2, so that a
probability is one exp2.
"""

from __future__ import annotations

from ._triton import tl, triton
from .attention_common import (
    DOCUMENT_BLOCK,
    LOG2E,
    full_key_tiles,
    host_or_device,
    key_bounds,
    key_tile_seen,
    load_tile,
    past_gap,
    score_tile,
)

_LOG2E = tl.constexpr(LOG2E)
_DOCUMENT_BLOCK = tl.constexpr(DOCUMENT_BLOCK)


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
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
    """Take the tile of queries through the keys of [first, end) but for the tiles of [gap_first, gap_end)."""
    DOCUMENTS: tl.constexpr = key_ids_ptr is not None
    for step in tl.range(first, end - (gap_end - gap_first), BLOCK_N):
        start = past_gap(step, gap_first, gap_end)
        keys = start + tl.arange(0, BLOCK_N)
        row = tl.cast(start, tl.int64)
        keys_ok = keys < kv_end
        k = load_tile(k_ptr + row * k_stride_t, k_offsets, keys_ok, dims_ok, MASKED, MASK_DIMS)  # (BLOCK_N, BLOCK_D)
        scores = score_tile(q, k, score_scale, SOFTCAP)  # (BLOCK_M, BLOCK_N) fp32
        factor = score_cap if SOFTCAP else score_scale
        if MASKED:
            seen = key_tile_seen(keys, keys_ok, kv_end, slots, query_ids, key_ids_ptr, window, CAUSAL, WINDOWED, DOCUMENTS)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = new_top
        if MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query that has seen nothing yet
        p = tl.exp2(scores * factor - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        v = load_tile(v_ptr + row * v_stride_t, v_offsets, keys_ok, dims_ok, MASKED, MASK_DIMS)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "batch", "num_queries", "num_keys", "query_start", "kv_length", "window", "num_splits",
        "q_batch_rows", "k_batch_rows", "v_batch_rows", "query_ids_stride", "key_ids_stride",
    ]
)  # fmt: skip
def attention_forward_kernel(
    q_ptr,  # (B, Tq, H, D), by row (token) and head strides; a batch is *_batch_rows rows, so that tile addresses keep their divisibility
    k_ptr,  # (B, Tk, H_kv, D)
    v_ptr,
    sinks_ptr,  # (H,) or None
    out_ptr,  # (B, Tq, H, D) contiguous; with SPLIT (num_splits, B, Tq, H, D) in fp32
    lse_ptr,  # (B, H, Tq) fp32, in units of log2; with SPLIT (num_splits, B, H, Tq)
    query_ids_ptr,  # (B, Tq) or None
    key_ids_ptr,  # (B, Tk) or None
    ranges_ptr,  # (B, ceil(Tq / DOCUMENT_BLOCK), 2) or None
    query_start_ptr,  # one int, or None: then query_start is meant
    kv_length_ptr,
    batch,
    num_queries,
    num_keys,
    query_start,
    kv_length,
    window,
    num_splits,
    score_scale,  # scale * log2(e); with SOFTCAP scale / softcap
    score_cap,  # softcap * log2(e)
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
    PACK: tl.constexpr,  # heads a tile: its rows are (query, head) pairs
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Output and log-sum-exp of one tile of queries: walks the tiles of keys at the edges of the mask, then the whole ones without it."""
    MASK_DIMS: tl.constexpr = HEAD_DIM != BLOCK_D
    DOCUMENTS: tl.constexpr = query_ids_ptr is not None
    query_start = host_or_device(query_start, query_start_ptr)
    kv_end = tl.minimum(host_or_device(kv_length, kv_length_ptr), num_keys)

    program = tl.program_id(0)
    split = 0
    if SPLIT:
        split = program % num_splits
        program = program // num_splits
    num_tiles = tl.cdiv(num_queries * PACK, BLOCK_M)
    tile = num_tiles - 1 - program % num_tiles  # the longest first: late queries see the most keys
    program = program // num_tiles
    head = program % (NUM_HEADS // PACK) * PACK
    b = (program // (NUM_HEADS // PACK)).to(tl.int64)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = rows // PACK
    first_query = tile * BLOCK_M // PACK
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // PACK, num_queries - 1)
    rows_ok = queries < num_queries
    dims = tl.arange(0, BLOCK_D)
    dims_ok = dims < HEAD_DIM

    q_ptr += (b * q_batch_rows + first_query) * q_stride_t + head * q_stride_h
    q_offsets = ((queries - first_query) * q_stride_t + rows % PACK * q_stride_h)[:, None] + dims[None, :]
    q = load_tile(q_ptr, q_offsets, rows_ok, dims_ok, True, MASK_DIMS)
    k_ptr += b * k_batch_rows * k_stride_t + kv_head * k_stride_h
    v_ptr += b * v_batch_rows * v_stride_t + kv_head * v_stride_h
    k_offsets = tl.arange(0, BLOCK_N)[:, None] * k_stride_t + dims[None, :]
    v_offsets = tl.arange(0, BLOCK_N)[:, None] * v_stride_t + dims[None, :]

    slots = query_start + queries
    query_ids = slots[:, None]
    if DOCUMENTS:
        query_ids = tl.load(query_ids_ptr + b * query_ids_stride + queries, mask=rows_ok, other=0)[:, None]
        key_ids_ptr += b * key_ids_stride
    if ranges_ptr is not None:
        ranges_ptr += (b * tl.cdiv(num_queries, _DOCUMENT_BLOCK) + first_query // _DOCUMENT_BLOCK) * 2

    low_slot = query_start + first_query
    high_slot = query_start + last_query
    first, end = key_bounds(low_slot, high_slot, kv_end, window, ranges_ptr, CAUSAL, WINDOWED, BLOCK_N)
    if SPLIT:  # an equal share of the tiles that there are to see, whatever the capacity of the cache
        share = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N), num_splits) * BLOCK_N
        first += split * share
        end = tl.minimum(end, first + share)
    full_first, full_end = full_key_tiles(low_slot, high_slot, first, end, window, CAUSAL, WINDOWED, DOCUMENTS, BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # a key without a value, seen first (by one of the splits)
        top = tl.load(sinks_ptr + head + rows % PACK).to(tl.float32) * _LOG2E
        if SPLIT:
            top = tl.where(split == 0, top, float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)

    # The tiles at both edges, then what lies between them; both loops carry all arguments, for there are no closures.
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, k_stride_t, v_stride_t, k_offsets, v_offsets, dims_ok, first, end, full_first, full_end,
        end, slots, query_ids, key_ids_ptr, window, score_scale, score_cap, True, CAUSAL, WINDOWED, SOFTCAP, MASK_DIMS, BLOCK_N,
    )  # fmt: skip
    if not DOCUMENTS:
        acc, top, total = _attend(
            acc, top, total, q, k_ptr, v_ptr, k_stride_t, v_stride_t, k_offsets, v_offsets, dims_ok, full_first, full_end, 0, 0,
            end, slots, query_ids, key_ids_ptr, window, score_scale, score_cap, False, CAUSAL, WINDOWED, SOFTCAP, MASK_DIMS, BLOCK_N,
        )  # fmt: skip

    # A query that sees nothing: output 0, and a log-sum-exp that gives it (in the backward: p = exp2(s - inf)) or its split no weight.
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf") if SPLIT else float("inf"), top + tl.log2(total))
    b += split * batch
    out_offsets = ((queries - first_query) * (NUM_HEADS * HEAD_DIM) + rows % PACK * HEAD_DIM)[:, None] + dims[None, :]
    out_ptr += ((b * num_queries + first_query) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=rows_ok[:, None] & dims_ok[None, :])
    tl.store(lse_ptr + (b * NUM_HEADS + head + rows % PACK) * num_queries + queries, lse, mask=rows_ok)


@triton.jit(do_not_specialize=["num_queries", "num_splits", "batch"])
def attention_combine_kernel(
    partial_ptr,  # (num_splits, B, Tq, H, D) fp32
    partial_lse_ptr,  # (num_splits, B, H, Tq)
    out_ptr,  # (B, Tq, H, D)
    lse_ptr,  # (B, H, Tq)
    batch,
    num_queries,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the splits of one query and head, in order: weights are each split's share of the softmax's sum."""
    row = tl.program_id(0).to(tl.int64)  # of B * Tq * H
    dims = tl.arange(0, BLOCK_D)
    dims_ok = dims < HEAD_DIM
    query = (row // NUM_HEADS) % num_queries
    lse_row = (row // NUM_HEADS // num_queries * NUM_HEADS + row % NUM_HEADS) * num_queries + query
    num_rows = tl.cast(batch, tl.int64) * num_queries * NUM_HEADS

    acc = tl.zeros([BLOCK_D], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for split in range(num_splits):
        lse = tl.load(partial_lse_ptr + split * num_rows + lse_row)
        part = tl.load(partial_ptr + (split * num_rows + row) * HEAD_DIM + dims, mask=dims_ok, other=0.0)
        new_top = tl.where(lse > top, lse, top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - base)
        decay = tl.exp2(top - base)
        acc = acc * decay + part * weight
        total = total * decay + weight
        top = new_top
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=dims_ok)
    tl.store(lse_ptr + lse_row, tl.where(nothing, float("inf"), top + tl.log2(total)))


@triton.jit(do_not_specialize=["num_rows", "num_columns", "row_stride", "column_stride"])
def document_ranges_kernel(
    row_ids_ptr,  # (B, num_rows)
    column_ids_ptr,  # (B, num_columns)
    ranges_ptr,  # (B, ceil(num_rows / DOCUMENT_BLOCK), 2) int32: [first, end) of the columns
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    CHUNK: tl.constexpr,
):
    """For each block of rows, the columns from the first to the last whose id lies between the block's least and greatest.

    Tight where ids are sorted; with ids in any order it still holds every column of an id that the block has.
    """
    num_blocks = tl.cdiv(num_rows, _DOCUMENT_BLOCK)
    block = tl.program_id(0) % num_blocks
    b = (tl.program_id(0) // num_blocks).to(tl.int64)
    rows = tl.minimum(block * _DOCUMENT_BLOCK + tl.arange(0, _DOCUMENT_BLOCK), num_rows - 1)
    ids = tl.load(row_ids_ptr + b * row_stride + rows)
    least = tl.min(ids, 0)
    greatest = tl.max(ids, 0)
    first = num_columns
    end = 0
    for start in range(0, num_columns, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        columns_ok = columns < num_columns
        column_ids = tl.load(column_ids_ptr + b * column_stride + columns, mask=columns_ok, other=0)
        within = columns_ok & (column_ids >= least) & (column_ids <= greatest)
        first = tl.minimum(first, tl.min(tl.where(within, columns, num_columns), 0))
        end = tl.maximum(end, tl.max(tl.where(within, columns + 1, 0), 0))
    tl.store(ranges_ptr + tl.program_id(0) * 2, first)
    tl.store(ranges_ptr + tl.program_id(0) * 2 + 1, end)
