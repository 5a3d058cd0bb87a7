"""What attention's forward and backward kernels share: loads, scores, masks, and the ranges of tiles that a mask leaves.

Tiles that a mask leaves whole go through a loop without mask arithmetic, those at the edges (causal, window, end of the cache) through
one with; the latter skips the gap that the former fills.
"""

from __future__ import annotations

from ._triton import tl, triton

LOG2E = 1.4426950408889634
DOCUMENT_BLOCK = 128  # rows that share one entry of the document ranges; every tile size divides it


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh from one exp; PRECISE (fp32 inputs) takes the odd series near 0, where the difference below cancels."""
    y = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    if PRECISE:
        x2 = x * x
        series = x * (1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854))))
        y = tl.where(x2 < 0.0625, series, y)
    return y


@triton.jit
def load_tile(ptr, offsets, rows_ok, dims_ok, MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """A (rows, dims) tile, zero where masked."""
    if MASK_ROWS and MASK_DIMS:
        x = tl.load(ptr + offsets, mask=rows_ok[:, None] & dims_ok[None, :], other=0.0)
    elif MASK_ROWS:
        x = tl.load(ptr + offsets, mask=rows_ok[:, None], other=0.0)
    elif MASK_DIMS:
        x = tl.load(ptr + offsets, mask=dims_ok[None, :], other=0.0)
    else:
        x = tl.load(ptr + offsets)
    return x


@triton.jit
def load_row(ptr, offsets, ok, other, MASKED: tl.constexpr):
    """Numbers a row, ``other`` where masked."""
    if MASKED:
        x = tl.load(ptr + offsets, mask=ok, other=other)
    else:
        x = tl.load(ptr + offsets)
    return x


@triton.jit
def score_tile(a, b, score_scale, SOFTCAP: tl.constexpr):
    """Products (rows of a, rows of b) in fp32, as they come; with SOFTCAP the tanh of the scaled products."""
    scores = tl.dot(a, tl.trans(b), input_precision="ieee")
    if SOFTCAP:
        scores = tanh(scores * score_scale, a.dtype == tl.float32)
    return scores


@triton.jit
def past_gap(step, gap_first, gap_end):
    """Where the step of a loop stands that skips [gap_first, gap_end)."""
    return step + tl.where(step >= gap_first, gap_end - gap_first, 0)


@triton.jit
def host_or_device(value, ptr):
    """``value``, or what lies at ``ptr`` where there is one, as int32."""
    if ptr is not None:
        return tl.load(ptr).to(tl.int32)
    else:
        return value


@triton.jit
def visible(slots, keys, kv_end, window, query_ids, key_ids, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Which query sees which key; slots and keys (and their ids) are shaped to broadcast against each other."""
    seen = (keys < kv_end) & (slots == slots)
    if CAUSAL:
        seen = seen & (keys <= slots)
    if WINDOWED:
        seen = seen & (slots - keys < window)
    if DOCUMENTS:
        seen = seen & (query_ids == key_ids)
    return seen


@triton.jit
def key_tile_seen(
    keys, keys_ok, kv_end, slots, query_ids, key_ids_ptr, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """``visible`` for a (queries, keys) tile, with the ids of its keys loaded."""
    key_ids = slots
    if DOCUMENTS:
        key_ids = tl.load(key_ids_ptr + keys, mask=keys_ok, other=0)[None, :]
    return visible(slots[:, None], keys[None, :], kv_end, window, query_ids, key_ids, CAUSAL, WINDOWED, DOCUMENTS)


@triton.jit
def key_bounds(low_slot, high_slot, kv_end, window, ranges_ptr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys [first, end) that slots low..high see, first rounded down to a tile; ``ranges_ptr`` narrows them to the documents' reach."""
    first = 0
    end = kv_end
    if CAUSAL:
        end = tl.minimum(end, high_slot + 1)
    if WINDOWED:
        first = tl.maximum(low_slot - window + 1, 0)
    if ranges_ptr is not None:
        first = tl.maximum(first, tl.load(ranges_ptr))
        end = tl.minimum(end, tl.load(ranges_ptr + 1))
    return first // BLOCK_N * BLOCK_N, end


@triton.jit
def full_key_tiles(
    low_slot, high_slot, first, end, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The key tiles [full_first, full_end) within [first, end) that every slot of low..high sees whole; empty with documents."""
    full_first = first
    full_end = end // BLOCK_N * BLOCK_N
    if CAUSAL:
        full_end = tl.minimum(full_end, (low_slot + 1) // BLOCK_N * BLOCK_N)
    if WINDOWED:
        full_first = tl.maximum(first, tl.cdiv(tl.maximum(high_slot - window + 1, 0), BLOCK_N) * BLOCK_N)
    if DOCUMENTS:
        full_end = full_first
    return full_first, tl.maximum(full_end, full_first)
