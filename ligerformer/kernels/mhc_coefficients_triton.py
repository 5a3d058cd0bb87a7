"""Triton kernels for mhc_coefficients: what turns the projection and the sum of squares into coefficients, and back.

Small kernels on (tokens, K) numbers, K = n*n + 2n, or n for the reading coefficients alone. Forward: the sigmoids, and Sinkhorn in registers.
Backward: the same, then Sinkhorn's iterations walked back; it leaves what the large products (mhc_project.py) need.
"""

from __future__ import annotations

from ._triton import tl, triton
from .mhc_project import store_terms


@triton.jit
def _sum_splits(ptrs, mask, split_stride, splits):
    """The sum over splits, in their order."""
    total = tl.load(ptrs, mask=mask, other=0.0)
    for _ in range(1, splits):
        ptrs += split_stride
        total += tl.load(ptrs, mask=mask, other=0.0)
    return total


@triton.jit
def _indices(N: tl.constexpr, PADDED_N: tl.constexpr, IN_OUT: tl.constexpr):
    """Columns of phi for pre (1, n) and for mix (1, n, n) as [out, in], and which of these exist."""
    i = tl.arange(0, PADDED_N)[None, :]
    out, into = tl.arange(0, PADDED_N)[None, :, None], tl.arange(0, PADDED_N)[None, None, :]
    res = 2 * N + (into * N + out if IN_OUT else out * N + into)
    return i, i < N, res, (out < N) & (into < N)


@triton.jit
def _sinkhorn_start(logits, valid, padding, sinkhorn_eps, LOG_START: tl.constexpr):
    """(tokens, out, in) logits -> softmax over out; the same with its rows normalised; the rows' sums (1 in the log domain).

    ``padding`` (1, n) is 1 for a line that does not exist: it keeps 0/0 out of there.
    """
    peak = tl.max(tl.where(valid, logits, float("-inf")), axis=1)
    shifted = logits - tl.where(padding > 0, 0.0, peak)[:, None, :]
    exponentials = tl.where(valid, tl.exp(tl.where(valid, shifted, 0.0)), 0.0)
    sums = tl.sum(exponentials, axis=1) + padding
    columns = exponentials / sums[:, None, :]
    if LOG_START:
        logs = shifted - tl.log(sums)[:, None, :]
        peak = tl.where(padding > 0, 0.0, tl.max(tl.where(valid, logs, float("-inf")), axis=2))
        mix = tl.where(valid, tl.exp(tl.where(valid, logs - peak[:, :, None], 0.0)), 0.0)
        rows = tl.sum(mix, axis=2) + padding
        mix = mix / rows[:, :, None]
    else:
        mix = tl.where(valid, columns + sinkhorn_eps, 0.0)
        rows = tl.sum(mix, axis=2) + sinkhorn_eps + padding
        mix = mix / rows[:, :, None]
    return columns, mix, rows


@triton.jit
def _sinkhorn_iterate(mix, padding, sinkhorn_eps):
    """One iteration, columns then rows -> the matrix and what its columns and rows were divided by."""
    columns = tl.sum(mix, axis=1) + sinkhorn_eps + padding
    mix = mix / columns[:, None, :]
    rows = tl.sum(mix, axis=2) + sinkhorn_eps + padding
    return mix / rows[:, :, None], columns, rows


@triton.jit(do_not_specialize=["tokens", "splits"])
def _mhc_finish_forward_kernel(
    product_ptr,  # (splits, tokens, K) fp32
    squares_ptr,  # (splits, tokens) fp32
    bias_ptr,  # (K,)
    alpha_ptr,  # (3,), or (1,) without a mix
    pre_ptr,  # (tokens, N) fp32, and so on
    post_ptr,
    mix_ptr,
    m_ptr,  # (tokens, K) fp32: the normalised projection, for the backward
    rstd_ptr,  # (tokens,) fp32
    tokens,
    splits,
    width,  # N * hidden_size
    eps,
    pre_eps,
    sinkhorn_eps,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    K: tl.constexpr,
    HAS_MIX: tl.constexpr,
    IN_OUT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    LOG_START: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row_mask = rows < tokens
    split_stride = tokens * tl.full((1,), K, tl.int64)
    mean_square = _sum_splits(squares_ptr + rows, row_mask, tokens, splits) / width
    rstd = tl.rsqrt(tl.where(row_mask, mean_square + eps, 1.0))
    if SAVE:
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    i, is_stream, res, is_entry = _indices(N, PADDED_N, IN_OUT)

    mask = row_mask[:, None] & is_stream
    flat = rows[:, None] * K + i
    m = _sum_splits(product_ptr + flat, mask, split_stride[:, None], splits) * rstd[:, None]
    bias = tl.load(bias_ptr + i, mask=is_stream, other=0.0).to(tl.float32)
    pre = tl.sigmoid(tl.load(alpha_ptr).to(tl.float32) * m + bias) + pre_eps
    tl.store(pre_ptr + rows[:, None] * N + i, pre, mask=mask)
    if SAVE:
        tl.store(m_ptr + flat, m, mask=mask)
    if HAS_MIX:
        m = _sum_splits(product_ptr + flat + N, mask, split_stride[:, None], splits) * rstd[:, None]
        bias = tl.load(bias_ptr + N + i, mask=is_stream, other=0.0).to(tl.float32)
        post = 2.0 * tl.sigmoid(tl.load(alpha_ptr + 1).to(tl.float32) * m + bias)
        tl.store(post_ptr + rows[:, None] * N + i, post, mask=mask)
        if SAVE:
            tl.store(m_ptr + flat + N, m, mask=mask)

        mask = row_mask[:, None, None] & is_entry
        flat = rows[:, None, None] * K + res
        m = _sum_splits(product_ptr + flat, mask, split_stride[:, None, None], splits) * rstd[:, None, None]
        if SAVE:
            tl.store(m_ptr + flat, m, mask=mask)
        bias = tl.load(bias_ptr + res, mask=is_entry, other=0.0).to(tl.float32)
        padding = tl.where(is_stream, 0.0, 1.0)
        logits = tl.load(alpha_ptr + 2).to(tl.float32) * m + bias
        _, mix, _ = _sinkhorn_start(logits, is_entry, padding, sinkhorn_eps, LOG_START)
        for _ in range(ITERATIONS - 1):
            mix, _, _ = _sinkhorn_iterate(mix, padding, sinkhorn_eps)
        entry = tl.arange(0, PADDED_N)[None, :, None] * N + tl.arange(0, PADDED_N)[None, None, :]
        tl.store(mix_ptr + rows[:, None, None] * (N * N) + entry, mix, mask=mask)


@triton.jit
def _sinkhorn_backward(
    grad, logits, valid, padding, sinkhorn_eps, sums_ptrs, sums_mask, N: tl.constexpr, ITERATIONS: tl.constexpr, LOG_START: tl.constexpr
):
    """The gradient of the logits. ``sums_ptrs`` (tokens, n) is this program's scratch for 2 (ITERATIONS - 1) sums a line.

    The iterations are run forward, keeping only what lines were divided by; on the way back multiplying by that restores each matrix.
    Of y = a / (sum(a) + eps), the gradient is (dy - sum(dy y)) / (sum(a) + eps).
    """
    softmax, mix, first_rows = _sinkhorn_start(logits, valid, padding, sinkhorn_eps, LOG_START)
    for step in range(ITERATIONS - 1):
        mix, columns, rows = _sinkhorn_iterate(mix, padding, sinkhorn_eps)
        tl.store(sums_ptrs + (2 * step) * N, columns, mask=sums_mask)
        tl.store(sums_ptrs + (2 * step + 1) * N, rows, mask=sums_mask)
    tl.debug_barrier()  # other threads of this program may load what this one stored
    for back in range(ITERATIONS - 1):
        step = ITERATIONS - 2 - back
        rows = tl.load(sums_ptrs + (2 * step + 1) * N, mask=sums_mask, other=1.0)
        columns = tl.load(sums_ptrs + (2 * step) * N, mask=sums_mask, other=1.0)
        grad = (grad - tl.sum(grad * mix, axis=2)[:, :, None]) / rows[:, :, None]
        mix = mix * rows[:, :, None]
        grad = (grad - tl.sum(grad * mix, axis=1)[:, None, :]) / columns[:, None, :]
        mix = mix * columns[:, None, :]
    grad = grad - tl.sum(grad * mix, axis=2)[:, :, None]
    if LOG_START:
        grad = grad * mix
        grad = grad - softmax * tl.sum(grad, axis=1)[:, None, :]
    else:
        grad = grad / first_rows[:, :, None]
        grad = softmax * (grad - tl.sum(grad * softmax, axis=1)[:, None, :])
    return grad


@triton.jit(do_not_specialize=["tokens"])
def _mhc_finish_backward_kernel(
    dpre_ptr,  # (tokens, N), None where no gradient came; so are the next two
    dpost_ptr,
    dmix_ptr,
    m_ptr,  # (tokens, K) fp32
    rstd_ptr,  # (tokens,) fp32
    bias_ptr,
    alpha_ptr,
    sums_ptr,  # (tokens, 2 (ITERATIONS - 1), N) fp32: scratch
    dproduct_ptr,  # (tokens, TERMS, PADDED_K): the gradient of v @ phi, 0 past column K
    radial_ptr,  # (tokens,) fp32: through the statistic, v's gradient is radial * v
    partial_ptr,  # (programs, 2, K) fp32: sums over the program's tokens of dz and dz * m, where z = alpha m + bias
    tokens,
    width,
    sinkhorn_eps,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    K: tl.constexpr,
    HAS_MIX: tl.constexpr,
    IN_OUT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    LOG_START: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TERMS: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row_mask = rows < tokens
    rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
    i, is_stream, res, is_entry = _indices(N, PADDED_N, IN_OUT)
    partial_ptr += tl.program_id(0).to(tl.int64) * (2 * K)
    inner = tl.zeros((BLOCK_TOKENS,), tl.float32)  # sum_k dm_k m_k
    dproduct_rows = dproduct_ptr + rows * (TERMS * PADDED_K)
    if K < PADDED_K:
        padding = K + tl.arange(0, PADDED_K)[None, :]
        nothing = tl.zeros((BLOCK_TOKENS, PADDED_K), tl.float32)
        store_terms(dproduct_rows[:, None] + padding, nothing, row_mask[:, None] & (padding < PADDED_K), TERMS, PADDED_K)

    mask = row_mask[:, None] & is_stream
    flat = rows[:, None] * K + i
    for group in tl.static_range(2 if HAS_MIX else 1):  # pre, post
        grad_ptr = dpre_ptr if group == 0 else dpost_ptr
        offset = group * N
        m = tl.load(m_ptr + flat + offset, mask=mask, other=0.0)
        alpha = tl.load(alpha_ptr + group).to(tl.float32)
        gate = tl.sigmoid(alpha * m + tl.load(bias_ptr + offset + i, mask=is_stream, other=0.0).to(tl.float32))
        dz = tl.zeros((BLOCK_TOKENS, PADDED_N), tl.float32)
        if grad_ptr is not None:
            dz = tl.load(grad_ptr + rows[:, None] * N + i, mask=mask, other=0.0).to(tl.float32) * ((group + 1) * gate * (1.0 - gate))
        store_terms(dproduct_rows[:, None] + offset + i, dz * alpha * rstd[:, None], mask, TERMS, PADDED_K)
        inner += tl.sum(dz * alpha * m, axis=1)
        tl.store(partial_ptr + offset + i, tl.sum(dz, axis=0)[None, :], mask=is_stream)
        tl.store(partial_ptr + K + offset + i, tl.sum(dz * m, axis=0)[None, :], mask=is_stream)
    if HAS_MIX:
        entry_mask = row_mask[:, None, None] & is_entry
        flat = rows[:, None, None] * K + res
        m = tl.load(m_ptr + flat, mask=entry_mask, other=0.0)
        alpha = tl.load(alpha_ptr + 2).to(tl.float32)
        dz = tl.zeros((BLOCK_TOKENS, PADDED_N, PADDED_N), tl.float32)
        if dmix_ptr is not None:
            entry = tl.arange(0, PADDED_N)[None, :, None] * N + tl.arange(0, PADDED_N)[None, None, :]
            dmix = tl.load(dmix_ptr + rows[:, None, None] * (N * N) + entry, mask=entry_mask, other=0.0).to(tl.float32)
            logits = alpha * m + tl.load(bias_ptr + res, mask=is_entry, other=0.0).to(tl.float32)
            sums_ptrs = sums_ptr + rows[:, None] * (2 * (ITERATIONS - 1) * N) + i
            padding = tl.where(is_stream, 0.0, 1.0)
            dz = _sinkhorn_backward(dmix, logits, is_entry, padding, sinkhorn_eps, sums_ptrs, mask, N, ITERATIONS, LOG_START)
        dproduct = dz * alpha * rstd[:, None, None]
        store_terms(dproduct_rows[:, None, None] + res, dproduct, entry_mask, TERMS, PADDED_K)
        inner += tl.sum(tl.sum(dz * alpha * m, axis=2), axis=1)
        tl.store(partial_ptr + res, tl.sum(dz, axis=0)[None, :, :], mask=is_entry)
        tl.store(partial_ptr + K + res, tl.sum(dz * m, axis=0)[None, :, :], mask=is_entry)
    tl.store(radial_ptr + rows, -rstd * rstd * inner / width, mask=row_mask)


@triton.jit(do_not_specialize=["programs"])
def _mhc_parameters_backward_kernel(
    partial_ptr,  # (programs, 2, K) fp32
    dbias_ptr,  # (K,), None where not needed; so is the next
    dalpha_ptr,  # (3,), or (1,) without a mix
    programs,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_MIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the partial sums, in an order that does not depend on the device."""
    k = tl.arange(0, PADDED_K)
    dz = tl.zeros((BLOCK, PADDED_K), tl.float32)
    dz_m = tl.zeros((BLOCK, PADDED_K), tl.float32)
    for first in range(0, programs, BLOCK):
        rows = first + tl.arange(0, BLOCK)[:, None]
        ptrs = partial_ptr + rows.to(tl.int64) * (2 * K) + k[None, :]
        mask = (rows < programs) & (k < K)[None, :]
        dz += tl.load(ptrs, mask=mask, other=0.0)
        dz_m += tl.load(ptrs + K, mask=mask, other=0.0)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + k, tl.sum(dz, axis=0), mask=k < K)
    if dalpha_ptr is not None:
        sums = tl.sum(dz_m, axis=0)
        tl.store(dalpha_ptr, tl.sum(tl.where(k < N, sums, 0.0)))
        if HAS_MIX:
            tl.store(dalpha_ptr + 1, tl.sum(tl.where((k >= N) & (k < 2 * N), sums, 0.0)))
            tl.store(dalpha_ptr + 2, tl.sum(tl.where(k >= 2 * N, sums, 0.0)))
