"""Triton kernels for mhc_coefficients: a projection with its sum of squares, and what turns it into coefficients.

Forward: one pass over x gives v @ phi and the sum of v^2 (partial over column splits), then a small kernel on (tokens, K) numbers applies
the sigmoids and Sinkhorn in registers. Backward: the small kernel again, walking Sinkhorn's iterations back, then one
pass over x that gives dx and dphi. K = n*n + 2n, or n for the reading coefficients alone.
"""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def _dot(a, b, total):
    """total + a @ b in fp32, where a has x's dtype and b, of that or a wider dtype, keeps its precision.

    bf16: b is split into two bf16 terms (16 bits of mantissa). fp16 has not the range for that: b stays fp32, multiplied at the
    backend's default precision for fp32 (tf32 on NVIDIA GPUs, which holds fp16 exactly).
    """
    if a.dtype == tl.float32:
        total = tl.dot(a, b.to(tl.float32), total, input_precision="ieee")
    elif a.dtype == b.dtype:
        total = tl.dot(a, b, total)
    elif a.dtype == tl.bfloat16:
        wide = b.to(tl.float32)
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(a, low, tl.dot(a, high, total))
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return total


@triton.jit(do_not_specialize=["tokens", "steps_per_split"])
def _mhc_project_forward_kernel(
    x_ptr,  # (tokens, N, hidden_size), strided
    phi_ptr,  # (N * hidden_size, K)
    product_ptr,  # (splits, tokens, K) fp32: v @ phi over the columns of one split
    squares_ptr,  # (splits, tokens) fp32: the sum of v^2 over them
    tokens,
    hidden_size,
    x_token_stride,
    x_stream_stride,
    steps_per_split,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    token_blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    split = tl.program_id(0) // token_blocks
    rows = (tl.program_id(0) % token_blocks) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row_mask = rows < tokens
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_token_stride
    k = tl.arange(0, PADDED_K)
    column_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)  # a step is one block of columns of one stream
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, N * column_blocks)
    product = tl.zeros((BLOCK_TOKENS, PADDED_K), tl.float32)
    squares = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    for step in range(first, last):
        columns = (step % column_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        stream = step // column_blocks + tl.zeros((BLOCK_COLUMNS,), tl.int64)
        column_mask = columns < hidden_size
        x = tl.load(x_rows + (stream * x_stream_stride + columns)[None, :], mask=row_mask[:, None] & column_mask[None, :], other=0.0)
        phi_rows = phi_ptr + (stream * hidden_size + columns)[:, None] * K
        phi = tl.load(phi_rows + k[None, :], mask=column_mask[:, None] & (k < K)[None, :], other=0.0)
        product = _dot(x, phi, product)
        wide = x.to(tl.float32)
        squares += wide * wide
    out_rows = split.to(tl.int64) * tokens + rows
    tl.store(product_ptr + out_rows[:, None] * K + k[None, :], product, mask=row_mask[:, None] & (k < K)[None, :])
    tl.store(squares_ptr + out_rows, tl.sum(squares, axis=1), mask=row_mask)


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
    dproduct_ptr,  # (tokens, K) fp32: the gradient of v @ phi
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
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row_mask = rows < tokens
    rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
    i, is_stream, res, is_entry = _indices(N, PADDED_N, IN_OUT)
    partial_ptr += tl.program_id(0).to(tl.int64) * (2 * K)
    inner = tl.zeros((BLOCK_TOKENS,), tl.float32)  # sum_k dm_k m_k

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
        tl.store(dproduct_ptr + flat + offset, dz * alpha * rstd[:, None], mask=mask)
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
        tl.store(dproduct_ptr + flat, dz * alpha * rstd[:, None, None], mask=entry_mask)
        inner += tl.sum(tl.sum(dz * alpha * m, axis=2), axis=1)
        tl.store(partial_ptr + res, tl.sum(dz, axis=0)[None, :, :], mask=is_entry)
        tl.store(partial_ptr + K + res, tl.sum(dz * m, axis=0)[None, :, :], mask=is_entry)
    tl.store(radial_ptr + rows, -rstd * rstd * inner / width, mask=row_mask)


@triton.jit(do_not_specialize=["tokens", "tokens_per_split"])
def _mhc_project_backward_kernel(
    dproduct_ptr,  # (tokens, K) fp32
    radial_ptr,  # (tokens,) fp32
    x_ptr,  # (tokens, N, hidden_size), strided
    phi_ptr,  # (N * hidden_size, K)
    dx_ptr,  # (tokens, N, hidden_size)
    dphi_ptr,  # (splits, N * hidden_size, K) fp32
    tokens,
    hidden_size,
    x_token_stride,
    x_stream_stride,
    tokens_per_split,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_PHI: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A program owns one block of columns of one stream and one range of tokens."""
    column_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)
    split = tl.program_id(0) // (N * column_blocks)
    stream = ((tl.program_id(0) // column_blocks) % N).to(tl.int64)
    columns = (tl.program_id(0) % column_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = columns < hidden_size
    x_columns = x_ptr + stream * x_stream_stride + columns[None, :]
    k = tl.arange(0, PADDED_K)
    phi_rows = stream * hidden_size + columns
    phi_mask = column_mask[:, None] & (k < K)[None, :]
    if NEED_X:
        phi = tl.load(phi_ptr + phi_rows[:, None] * K + k[None, :], mask=phi_mask, other=0.0).to(tl.float32)
        phi = tl.trans(phi)  # (PADDED_K, BLOCK_COLUMNS)
    dphi = tl.zeros((BLOCK_COLUMNS, PADDED_K), tl.float32)
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, tokens)
    for start in range(first, last, BLOCK_TOKENS):
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        row_mask = rows < last
        mask = row_mask[:, None] & column_mask[None, :]
        dproduct = tl.load(dproduct_ptr + rows[:, None] * K + k[None, :], mask=row_mask[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(x_columns + rows[:, None] * x_token_stride, mask=mask, other=0.0)
        if NEED_PHI:
            dphi = _dot(tl.trans(x), dproduct, dphi)
        if NEED_X:
            radial = tl.load(radial_ptr + rows, mask=row_mask, other=0.0)
            dx = x.to(tl.float32) * radial[:, None]
            # For half dtypes the backend's default precision (tf32 on NVIDIA GPUs): finer than what dx is rounded to.
            dx = tl.dot(dproduct, phi, dx, input_precision="ieee" if x.dtype == tl.float32 else None)
            tl.store(dx_ptr + (rows[:, None] * N + stream) * hidden_size + columns[None, :], dx, mask=mask)
    if NEED_PHI:
        dphi_rows = split.to(tl.int64) * N * hidden_size + phi_rows
        tl.store(dphi_ptr + dphi_rows[:, None] * K + k[None, :], dphi, mask=phi_mask)
