"""The large products of mhc_coefficients: one pass over x forward, and one backward that gives dx (all of it) and dphi.

Forward: v @ phi (K = n*n + 2n columns, or n for the reading coefficients alone) and the sum of v^2, partial over splits of the columns.
Backward: with dm (tokens, K) the gradient of v @ phi, dphi = v^T dm and dx = dm phi^T + radial x. Where the streams are also read and passed
on, pre du and the gradient that comes back through them join that sum in fp32: dx is rounded and written once.

Precision: fp32 streams are multiplied in fp32. With bf16 streams a factor wider than bf16 is two terms of it, high and low (16 bits of
mantissa). fp16 has not the range for that: its factor stays fp32, multiplied at the backend's default precision for fp32 (tf32
on NVIDIA GPUs, which holds fp16 exactly). Factors lie padded to a power of two columns, terms apart, as the matrix units load them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._triton import cdiv, device_info, launch, next_power_of_2, tl, triton

# (tokens, columns of x, warps, stages) of a tile, for half dtypes and fp32, with K up to 32 and with more.
FORWARD_TILES = {"half": (128, 64, 8, 4), "half, many": (64, 64, 8, 2), "fp32": (32, 64, 8, 2), "fp32, many": (32, 32, 8, 2)}
BACKWARD_TILES = {"half": (64, 64, 4, 3), "half, many": (64, 32, 4, 2), "fp32": (32, 64, 8, 2), "fp32, many": (32, 32, 8, 2)}
PROGRAMS_PER_SM = {"forward": 2, "backward": 2}  # as many as run at once: a second, smaller wave would leave the device idle


@triton.jit
def _dot(a, b, total, EXACT: tl.constexpr):
    """total + a @ b in fp32. ``a`` has b's dtype or is the narrower; EXACT: in full fp32."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="ieee" if EXACT else None)


@triton.jit
def store_terms(ptrs, value, mask, TERMS: tl.constexpr, PADDED_K: tl.constexpr):
    """Store an fp32 ``value``, as one term of the pointers' dtype or as two: its rounding, and what that leaves."""
    high = value.to(ptrs.dtype.element_ty)
    tl.store(ptrs, high, mask=mask)
    if TERMS == 2:
        tl.store(ptrs + PADDED_K, value - high.to(tl.float32), mask=mask)


@triton.jit
def _mhc_phi_terms_kernel(
    phi_ptr,  # (N * hidden_size, K), strided
    terms_ptr,  # (N * hidden_size, TERMS, PADDED_K)
    rows,
    phi_row_stride,
    phi_column_stride,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    k = tl.arange(0, PADDED_K)[None, :]
    phi = tl.load(phi_ptr + row * phi_row_stride + k * phi_column_stride, mask=(row < rows) & (k < K), other=0.0).to(tl.float32)
    store_terms(terms_ptr + row * (TERMS * PADDED_K) + k, phi, row < rows, TERMS, PADDED_K)


@triton.jit(do_not_specialize=["tokens", "steps_per_split"])
def _mhc_project_forward_kernel(
    x_ptr,  # (tokens, N, hidden_size), strided
    phi_ptr,  # (N * hidden_size, TERMS, PADDED_K)
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
    TERMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    token_blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    split = tl.program_id(0) // token_blocks
    rows = (tl.program_id(0) % token_blocks) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row_mask = rows < tokens
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_token_stride
    terms = tl.arange(0, TERMS * PADDED_K)
    column_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)  # a step is one block of columns of one stream
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, N * column_blocks)
    product = tl.zeros((BLOCK_TOKENS, TERMS * PADDED_K), tl.float32)
    squares = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS // 8), tl.float32)
    for step in range(first, last):
        columns = (step % column_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        stream = step // column_blocks
        column_mask = columns < hidden_size
        x_columns = stream.to(tl.int64) * x_stream_stride + columns
        x = tl.load(x_rows + x_columns[None, :], mask=row_mask[:, None] & column_mask[None, :], other=0.0)
        phi_rows = phi_ptr + (stream * hidden_size + columns)[:, None] * (TERMS * PADDED_K)
        phi = tl.load(phi_rows + terms[None, :], mask=column_mask[:, None], other=0.0)
        product = _dot(x, phi, product, x.dtype == tl.float32)
        wide = x.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, (BLOCK_TOKENS, BLOCK_COLUMNS // 8, 8)), axis=2)  # a thread's own: no exchange
    product = tl.sum(tl.reshape(product, (BLOCK_TOKENS, TERMS, PADDED_K)), axis=1)
    k = tl.arange(0, PADDED_K)
    out_rows = split.to(tl.int64) * tokens + rows
    tl.store(product_ptr + out_rows[:, None] * K + k[None, :], product, mask=row_mask[:, None] & (k < K)[None, :])
    tl.store(squares_ptr + out_rows, tl.sum(squares, axis=1), mask=row_mask)


@triton.jit(do_not_specialize=["tokens", "tokens_per_split"])
def _mhc_project_backward_kernel(
    dproduct_ptr,  # (tokens, TERMS, PADDED_K), 0 past column K
    radial_ptr,  # (tokens,) fp32
    x_ptr,  # (tokens, N, hidden_size), strided
    phi_ptr,  # (N * hidden_size, K), strided
    du_ptr,  # (tokens, hidden_size), strided: the gradient of what was read; None where nothing was
    pre_ptr,  # (tokens, N): what it was read with
    through_ptr,  # (tokens, N, hidden_size), strided: the gradient of the streams as they were passed on; None where none came
    dx_ptr,  # (tokens, N, hidden_size)
    dphi_ptr,  # (splits, N * hidden_size, K) fp32
    tokens,
    hidden_size,
    x_token_stride,
    x_stream_stride,
    phi_row_stride,
    phi_column_stride,
    du_token_stride,
    through_token_stride,
    through_stream_stride,
    tokens_per_split,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TERMS: tl.constexpr,
    PHI_TERMS: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_PHI: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A program owns one block of columns of one stream and one range of tokens; its neighbours own the other streams, to share du."""
    column_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)
    stream = (tl.program_id(0) % N).to(tl.int64)
    columns = (tl.program_id(0) // N % column_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    split = tl.program_id(0) // (N * column_blocks)
    column_mask = columns < hidden_size
    terms = tl.arange(0, TERMS * PADDED_K)
    phi_rows = stream * hidden_size + columns
    if NEED_X:
        k = (terms % PADDED_K)[:, None]
        phi_ptrs = phi_ptr + phi_rows[None, :] * phi_row_stride + k * phi_column_stride
        phi = tl.load(phi_ptrs, mask=column_mask[None, :] & (k < K), other=0.0).to(tl.float32)  # (TERMS * PADDED_K, BLOCK_COLUMNS)
        phi_high = phi.to(dproduct_ptr.dtype.element_ty)
        if PHI_TERMS == 2:  # multiplied with dproduct's first term alone
            phi_low = tl.where((terms < PADDED_K)[:, None], phi - phi_high.to(tl.float32), 0.0).to(phi_high.dtype)
    dphi = tl.zeros((BLOCK_COLUMNS, TERMS * PADDED_K), tl.float32)
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, tokens)
    for start in tl.range(first, last, BLOCK_TOKENS, num_stages=STAGES):  # named here, it holds for loads that no product takes too
        rows = start + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        row_mask = rows < last
        mask = row_mask[:, None] & column_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_token_stride + (stream * x_stream_stride + columns)[None, :], mask=mask, other=0.0)
        dproduct_ptrs = dproduct_ptr + rows[:, None] * (TERMS * PADDED_K) + terms[None, :]
        dproduct = tl.load(dproduct_ptrs, mask=row_mask[:, None], other=0.0)
        if NEED_PHI:
            dphi = _dot(tl.trans(x), dproduct, dphi, x.dtype == tl.float32)
        if NEED_X:
            dx = _dot(dproduct, phi_high, tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32), x.dtype == tl.float32)
            if PHI_TERMS == 2:
                dx = _dot(dproduct, phi_low, dx, x.dtype == tl.float32)
            dx += x.to(tl.float32) * tl.load(radial_ptr + rows, mask=row_mask, other=0.0)[:, None]
            if du_ptr is not None:
                du = tl.load(du_ptr + rows[:, None] * du_token_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                dx += du * tl.load(pre_ptr + rows * N + stream, mask=row_mask, other=0.0).to(tl.float32)[:, None]
            if through_ptr is not None:
                through_columns = (stream * through_stream_stride + columns)[None, :]
                dx += tl.load(through_ptr + rows[:, None] * through_token_stride + through_columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + (rows[:, None] * N + stream) * hidden_size + columns[None, :], dx, mask=mask)
    if NEED_PHI:
        dphi = tl.sum(tl.reshape(dphi, (BLOCK_COLUMNS, TERMS, PADDED_K)), axis=1)
        k = tl.arange(0, PADDED_K)
        dphi_rows = split.to(tl.int64) * N * hidden_size + phi_rows
        tl.store(dphi_ptr + dphi_rows[:, None] * K + k[None, :], dphi, mask=column_mask[:, None] & (k < K)[None, :])


def padded_columns(columns: int) -> int:
    """The columns of a factor as the matrix units take them."""
    return max(16, next_power_of_2(columns))


def terms_beside(x: Tensor, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """How many terms a factor of ``dtype`` is held in to be multiplied with the streams, and their dtype."""
    if x.dtype == torch.bfloat16:
        return 1 if dtype == torch.bfloat16 else 2, torch.bfloat16
    return 1, torch.float16 if x.dtype == dtype == torch.float16 else torch.float32


def _tile(tiles: dict[str, tuple[int, int, int, int]], x: Tensor, columns: int) -> tuple[int, dict[str, int]]:
    """(tokens of a tile, constants of the kernel but that one)."""
    kind = ("fp32" if x.dtype == torch.float32 else "half") + (", many" if columns > 32 else "")
    tokens, block_columns, num_warps, num_stages = tiles[kind]
    sizes = {"N": x.shape[1], "K": columns, "PADDED_K": padded_columns(columns), "BLOCK_COLUMNS": block_columns}
    return tokens, sizes | {"num_warps": num_warps, "num_stages": num_stages}


def project(x: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, n, C), (n*C, K) -> v @ phi (splits, tokens, K) and the sum of v^2 (splits, tokens), each over a split of the columns."""
    (tokens, n, hidden_size), (rows, columns) = x.shape, phi.shape
    block_tokens, sizes = _tile(FORWARD_TILES, x, columns)
    if tokens <= 512:
        block_tokens, sizes["num_warps"] = 16, 4
    count, dtype = terms_beside(x, phi.dtype)
    terms = torch.empty(rows, count, sizes["PADDED_K"], dtype=dtype, device=x.device)
    constants = {"K": columns, "PADDED_K": sizes["PADDED_K"], "TERMS": count, "BLOCK": 32, "num_warps": 4}
    launch(_mhc_phi_terms_kernel, (cdiv(rows, 32),), phi, terms, rows, phi.stride(0), phi.stride(1), **constants)

    token_blocks, steps = cdiv(tokens, block_tokens), n * cdiv(hidden_size, sizes["BLOCK_COLUMNS"])
    wanted = max(PROGRAMS_PER_SM["forward"] * device_info(x.device).num_sms // max(token_blocks, 1), 1)
    steps_per_split = max(cdiv(steps, wanted), min(steps, 4))
    splits = cdiv(steps, steps_per_split)
    product = torch.empty(splits, tokens, columns, dtype=torch.float32, device=x.device)
    squares = torch.empty(splits, tokens, dtype=torch.float32, device=x.device)
    args = (x, terms, product, squares, tokens, hidden_size, x.stride(0), x.stride(1), steps_per_split)
    launch(_mhc_project_forward_kernel, (token_blocks * splits,), *args, TERMS=count, BLOCK_TOKENS=block_tokens, **sizes)
    return product, squares


def project_backward(
    x: Tensor,  # (tokens, n, C)
    phi: Tensor,  # (n*C, K)
    dproduct: Tensor,  # (tokens, terms, padded K)
    radial: Tensor,  # (tokens,)
    du: Tensor | None,  # (tokens, C)
    pre: Tensor | None,  # (tokens, n)
    through: Tensor | None,  # (tokens, n, C)
    need_x: bool,
    need_phi: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dx (tokens, n, C) in x's dtype and dphi (n*C, K) in phi's, each None where not needed."""
    (tokens, n, hidden_size), columns = x.shape, phi.shape[1]
    block_tokens, sizes = _tile(BACKWARD_TILES, x, columns)
    column_blocks = n * cdiv(hidden_size, sizes["BLOCK_COLUMNS"])
    wanted = max(PROGRAMS_PER_SM["backward"] * device_info(x.device).num_sms // column_blocks, 1)
    tokens_per_split = block_tokens * max(cdiv(tokens, block_tokens * wanted), 1)
    splits = cdiv(tokens, tokens_per_split)
    dx = torch.empty(tokens, n, hidden_size, dtype=x.dtype, device=x.device) if need_x else None
    dphi = torch.empty(splits, n * hidden_size, columns, dtype=torch.float32, device=x.device) if need_phi else None
    du_stride = 0 if du is None else du.stride(0)
    through_strides = (0, 0) if through is None else (through.stride(0), through.stride(1))
    strides = (x.stride(0), x.stride(1), phi.stride(0), phi.stride(1), du_stride, *through_strides)
    args = (dproduct, radial, x, phi, du, pre, through, dx, dphi, tokens, hidden_size, *strides, tokens_per_split)
    terms = {"TERMS": dproduct.shape[1], "PHI_TERMS": terms_beside(x, phi.dtype)[0]}
    options = {"NEED_X": need_x, "NEED_PHI": need_phi, "STAGES": sizes["num_stages"], "BLOCK_TOKENS": block_tokens}
    launch(_mhc_project_backward_kernel, (column_blocks * splits,), *args, **terms, **options, **sizes)
    return dx, None if dphi is None else (dphi[0] if splits == 1 else dphi.sum(0)).to(phi.dtype)
