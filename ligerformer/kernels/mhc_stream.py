r"""Reading and writing n residual streams with given coefficients (manifold-constrained hyper-connections, arXiv 2512.24880).

    read:   u      = sum_i pre_i x_i
    write:  x'_o   = post_o y + sum_i mix[o, i] x_i

in fp32 (fp64 for fp64 inputs), rounded once. In elements of C a token, read moves n + 1 and write 2n + 1 forward; backward, read
moves 2n + 1 and write 3n + 2. Saved for the backward: the inputs, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import library
from ._triton import cdiv, launch, next_power_of_2, on_device, tl, triton
from .checks import has_shape, is_tensor, same_device
from .dispatch import Op, ran
from .mhc_coefficients import MAX_STREAMS, _wide, float64_input, tokens_first

__all__ = ["mhc_read", "mhc_write"]


def _mhc_read_reference(x: Tensor, pre: Tensor) -> Tensor:
    wide = _wide(x, pre)
    return (pre.to(wide).unsqueeze(-1) * x.to(wide)).sum(-2).to(x.dtype)


def _mhc_write_reference(x: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    wide = _wide(x, y, post, mix)
    x_wide, mix = x.to(wide), mix.to(wide)
    out = post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(-2)  # (..., n, C)
    for i in range(x.shape[-2]):
        out = out + mix[..., i, None] * x_wide[..., i, None, :]
    return out.to(torch.promote_types(x.dtype, y.dtype))


# ---- Triton ----


@triton.jit
def _mhc_read_forward_kernel(
    x_ptr,  # (tokens, N, hidden_size), strided
    pre_ptr,  # (tokens, N)
    out_ptr,  # (tokens, hidden_size)
    hidden_size,
    x_token_stride,
    x_stream_stride,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program serves one token and one block of columns."""
    column_blocks = tl.cdiv(hidden_size, BLOCK)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    streams = tl.arange(0, PADDED_N)[:, None].to(tl.int64)
    x = _load(x_ptr + token * x_token_stride + streams * x_stream_stride + columns, (streams < N) & (columns < hidden_size))
    pre = _load(pre_ptr + token * N + streams, streams < N)
    tl.store(out_ptr + token * hidden_size + columns, tl.sum(pre * x, axis=0)[None, :], mask=columns < hidden_size)


@triton.jit
def _load(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _mhc_read_backward_kernel(
    grad_ptr,  # (tokens, hidden_size), strided
    x_ptr,  # (tokens, N, hidden_size), strided
    pre_ptr,  # (tokens, N)
    dx_ptr,  # (tokens, N, hidden_size)
    dpre_ptr,  # (tokens, N)
    hidden_size,
    grad_token_stride,
    x_token_stride,
    x_stream_stride,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_PRE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program serves one token."""
    token = tl.program_id(0).to(tl.int64)
    streams = tl.arange(0, PADDED_N)[:, None].to(tl.int64)
    pre = _load(pre_ptr + token * N + streams, streams < N)
    products = tl.zeros((PADDED_N, BLOCK), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = (streams < N) & (columns < hidden_size)
        grad = _load(grad_ptr + token * grad_token_stride + columns, columns < hidden_size)
        if NEED_PRE:
            products += grad * _load(x_ptr + token * x_token_stride + streams * x_stream_stride + columns, mask)
        if NEED_X:
            tl.store(dx_ptr + (token * N + streams) * hidden_size + columns, pre * grad, mask=mask)
    if NEED_PRE:
        tl.store(dpre_ptr + token * N + streams, tl.sum(products, axis=1)[:, None], mask=streams < N)


@triton.jit
def _mhc_write_forward_kernel(
    x_ptr,  # (tokens, N, hidden_size), strided
    y_ptr,  # (tokens, hidden_size), strided
    post_ptr,  # (tokens, N)
    mix_ptr,  # (tokens, N, N) [out, in]
    out_ptr,  # (tokens, N, hidden_size)
    hidden_size,
    x_token_stride,
    x_stream_stride,
    y_token_stride,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program serves one token and one block of columns; x is loaded once for all streams that it is mixed into."""
    column_blocks = tl.cdiv(hidden_size, BLOCK)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_mask = columns < hidden_size
    streams = tl.arange(0, PADDED_N)[:, None].to(tl.int64)
    x = _load(x_ptr + token * x_token_stride + streams * x_stream_stride + columns, (streams < N) & column_mask)
    y = _load(y_ptr + token * y_token_stride + columns, column_mask)
    for out in tl.static_range(N):
        post = tl.load(post_ptr + token * N + out).to(tl.float32)
        row = _load(mix_ptr + (token * N + out) * N + streams, streams < N)
        total = post * y + tl.sum(row * x, axis=0)[None, :]
        tl.store(out_ptr + (token * N + out) * hidden_size + columns, total, mask=column_mask)


@triton.jit
def _mhc_write_backward_kernel(
    grad_ptr,  # (tokens, N, hidden_size), strided
    x_ptr,  # (tokens, N, hidden_size), strided
    y_ptr,  # (tokens, hidden_size), strided
    post_ptr,  # (tokens, N)
    mix_ptr,  # (tokens, N, N) [out, in]
    dx_ptr,  # (tokens, N, hidden_size)
    dy_ptr,  # (tokens, hidden_size)
    dpost_ptr,  # (tokens, N)
    dmix_ptr,  # (tokens, N, N)
    hidden_size,
    grad_token_stride,
    grad_stream_stride,
    x_token_stride,
    x_stream_stride,
    y_token_stride,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_Y: tl.constexpr,
    NEED_POST: tl.constexpr,
    NEED_MIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program serves one token: four gradients in one pass over the incoming one."""
    token = tl.program_id(0).to(tl.int64)
    streams = tl.arange(0, PADDED_N)[:, None].to(tl.int64)
    post = _load(post_ptr + token * N + streams, streams < N)
    dpost = tl.zeros((PADDED_N, BLOCK), tl.float32)
    dmix = tl.zeros((PADDED_N, PADDED_N, BLOCK), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        column_mask = columns < hidden_size
        mask = (streams < N) & column_mask
        grad = _load(grad_ptr + token * grad_token_stride + streams * grad_stream_stride + columns, mask)
        if NEED_MIX:
            x = _load(x_ptr + token * x_token_stride + streams * x_stream_stride + columns, mask)
            dmix += grad[:, None, :] * x[None, :, :]
        if NEED_POST:
            dpost += grad * _load(y_ptr + token * y_token_stride + columns, column_mask)
        if NEED_Y:
            tl.store(dy_ptr + token * hidden_size + columns, tl.sum(post * grad, axis=0)[None, :], mask=column_mask)
        if NEED_X:
            for into in tl.static_range(N):
                column = _load(mix_ptr + (token * N + streams) * N + into, streams < N)
                dx = tl.sum(column * grad, axis=0)[None, :]
                tl.store(dx_ptr + (token * N + into) * hidden_size + columns, dx, mask=column_mask)
    if NEED_POST:
        tl.store(dpost_ptr + token * N + streams, tl.sum(dpost, axis=1)[:, None], mask=streams < N)
    if NEED_MIX:
        into = tl.arange(0, PADDED_N)[None, :]
        tl.store(dmix_ptr + (token * N + streams) * N + into, tl.sum(dmix, axis=2), mask=(streams < N) & (into < N))


_WHY = "tensors on a device that Triton serves"


def _sizes(x: Tensor, hidden_size: int) -> dict[str, int]:
    """Constants of the kernels: 16-byte loads; a thread holds all streams of its columns, so that sums over streams need no exchange."""
    n, per_thread = x.shape[1], 16 // x.element_size()
    num_warps = min(max(next_power_of_2(hidden_size) // (32 * per_thread), 1), 4)
    return {"N": n, "PADDED_N": next_power_of_2(n), "BLOCK": 32 * per_thread * num_warps, "num_warps": num_warps}


def _read_forward_impl(x: Tensor, pre: Tensor) -> Tensor:
    out = _read_forward_fake(x, pre)
    x, pre = tokens_first(x, 2), pre.contiguous()
    tokens, _, hidden_size = x.shape
    ran("mhc_read", "forward", "triton", _WHY)
    sizes = _sizes(x, hidden_size)
    with on_device(x):
        grid = (tokens * cdiv(hidden_size, sizes["BLOCK"]),)
        launch(_mhc_read_forward_kernel, grid, x, pre, out, hidden_size, x.stride(0), x.stride(1), **sizes)
    return out


def _read_forward_fake(x: Tensor, pre: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-2], x.shape[-1])


def _empty_like_needed(needed: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
    """A contiguous buffer for each gradient; empty where not needed."""
    return tuple(t.new_empty(t.shape if need else [0]) for need, t in zip(needed, tensors, strict=True))


def _read_backward_impl(grad: Tensor, x: Tensor, pre: Tensor, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    outputs = _empty_like_needed(needed, x, pre)
    grad, x, pre = tokens_first(grad, 1), tokens_first(x, 2), pre.contiguous()
    tokens, _, hidden_size = x.shape
    ran("mhc_read", "backward", "triton", _WHY)
    with on_device(x):
        args = (grad, x, pre, *outputs, hidden_size, grad.stride(0), x.stride(0), x.stride(1))
        launch(_mhc_read_backward_kernel, (tokens,), *args, NEED_X=needed[0], NEED_PRE=needed[1], **_sizes(x, hidden_size))
    return outputs


def _write_forward_impl(x: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    out = _write_forward_fake(x, y, post, mix)
    x, y, post, mix = tokens_first(x, 2), tokens_first(y, 1), post.contiguous(), mix.contiguous()
    tokens, _, hidden_size = x.shape
    ran("mhc_write", "forward", "triton", _WHY)
    sizes = _sizes(x, hidden_size)
    with on_device(x):
        grid = (tokens * cdiv(hidden_size, sizes["BLOCK"]),)
        args = (x, y, post, mix, out, hidden_size, x.stride(0), x.stride(1), y.stride(0))
        launch(_mhc_write_forward_kernel, grid, *args, **sizes)
    return out


def _write_forward_fake(x: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype))


def _write_backward_impl(grad: Tensor, x: Tensor, y: Tensor, post: Tensor, mix: Tensor, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    outputs = _empty_like_needed(needed, x, y, post, mix)
    grad, x, y, post, mix = tokens_first(grad, 2), tokens_first(x, 2), tokens_first(y, 1), post.contiguous(), mix.contiguous()
    tokens, _, hidden_size = x.shape
    ran("mhc_write", "backward", "triton", _WHY)
    sizes = _sizes(x, hidden_size)
    if sizes["PADDED_N"] > 4:  # the n*n sums a column leave registers for two columns a thread
        sizes |= {"BLOCK": 256, "num_warps": 4}
    elif sizes["num_warps"] < 4:
        sizes["BLOCK"] //= 2
    flags = dict(zip(("NEED_X", "NEED_Y", "NEED_POST", "NEED_MIX"), needed, strict=True))
    with on_device(x):
        strides = (grad.stride(0), grad.stride(1), x.stride(0), x.stride(1), y.stride(0))
        launch(_mhc_write_backward_kernel, (tokens,), grad, x, y, post, mix, *outputs, hidden_size, *strides, **flags, **sizes)
    return outputs


_read_forward = library.define("mhc_read_forward(Tensor x, Tensor pre) -> Tensor", _read_forward_impl, _read_forward_fake)
_read_backward = library.define(
    "mhc_read_backward(Tensor grad, Tensor x, Tensor pre, bool[2] needed) -> (Tensor, Tensor)",
    _read_backward_impl,
    lambda grad, x, pre, needed: _empty_like_needed(needed, x, pre),
)
_write_forward = library.define(
    "mhc_write_forward(Tensor x, Tensor y, Tensor post, Tensor mix) -> Tensor", _write_forward_impl, _write_forward_fake
)
_write_backward = library.define(
    "mhc_write_backward(Tensor grad, Tensor x, Tensor y, Tensor post, Tensor mix, bool[4] needed) -> (Tensor, Tensor, Tensor, Tensor)",
    _write_backward_impl,
    lambda grad, x, y, post, mix, needed: _empty_like_needed(needed, x, y, post, mix),
)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pre):
        ctx.save_for_backward(x, pre)
        return _read_forward(x, pre)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needed = ctx.needs_input_grad
        grads = _read_backward(grad, *ctx.saved_tensors, needed)
        return tuple(g if need else None for g, need in zip(grads, needed, strict=True))


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, post, mix):
        ctx.save_for_backward(x, y, post, mix)
        return _write_forward(x, y, post, mix)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needed = ctx.needs_input_grad
        grads = _write_backward(grad, *ctx.saved_tensors, needed)
        return tuple(g if need else None for g, need in zip(grads, needed, strict=True))


_read = Op("mhc_read", _mhc_read_reference, _Read.apply, float64_input)
_write = Op("mhc_write", _mhc_write_reference, _Write.apply, float64_input)


def _check_streams(op: str, x: Tensor) -> None:
    is_tensor(op, "x", x)
    if x.dim() < 2 or not 1 <= x.shape[-2] <= MAX_STREAMS or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., n, C) with 1 <= n <= {MAX_STREAMS} streams and C >= 1")


def mhc_read(
    x: Tensor,  # (..., n, C)
    pre: Tensor,  # (..., n)
    /,
) -> Tensor:
    """What a sublayer reads of the streams ``x``: sum_i pre_i x_i, (..., C), in ``x``'s dtype.

    Summed in fp32 (fp64 where an input is fp64) and rounded once. ``pre`` may have another dtype; its gradient has that. n is 1 to 8.
    Raises TypeError or ValueError that names the argument. Cost and source: this module's docstring.
    """
    _check_streams("mhc_read", x)
    is_tensor("mhc_read", "pre", pre)
    has_shape("mhc_read", "pre", pre, x.shape[:-1])
    same_device("mhc_read", x=x, pre=pre)
    return _read(x, pre)


def mhc_write(
    x: Tensor,  # (..., n, C)
    y: Tensor,  # (..., C)
    post: Tensor,  # (..., n)
    mix: Tensor,  # (..., n, n) [out, in]
    /,
) -> Tensor:
    """The new streams, (..., n, C): stream o is post_o y + sum_i mix[o, i] x_i, with the sublayer's output ``y``.

    Summed in fp32 (fp64 where an input is fp64) and rounded once, to the type that ``x + y`` has. The coefficients may have
    any floating dtype; their gradients have theirs. n is 1 to 8. Raises TypeError or ValueError that names the argument. Cost and source:
    this module's docstring.
    """
    op = "mhc_write"
    _check_streams(op, x)
    for name, tensor in (("y", y), ("post", post), ("mix", mix)):
        is_tensor(op, name, tensor)
    *lead, n, hidden_size = x.shape
    has_shape(op, "y", y, (*lead, hidden_size))
    has_shape(op, "post", post, (*lead, n))
    has_shape(op, "mix", mix, (*lead, n, n))
    same_device(op, x=x, y=y, post=post, mix=mix)
    return _write(x, y, post, mix)
