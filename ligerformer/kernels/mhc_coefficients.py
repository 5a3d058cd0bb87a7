r"""The coefficients of manifold-constrained hyper-connections: how one sublayer reads, writes and mixes n residual streams.

With a token's streams flattened stream-major, v in R^(nC), one statistic for all of them, and phi's columns in three groups:

    m    = (v @ phi) / sqrt(mean(v^2) + eps)
    pre  = sigmoid(a_pre m + b) + pre_eps        (n)     what the sublayer reads of each stream
    post = 2 sigmoid(a_post m + b)               (n)     what each stream takes of the sublayer's output
    mix  = Sinkhorn(a_res m + b)                 (n, n)  [out, in]: what each new stream takes of each old one

Sinkhorn starts from the softmax over the outputs (each column sums to 1) and then normalises rows, columns, rows, ..., rows: one
iteration is columns and rows, rows last, so that every new stream is a convex combination of the old ones. ``sinkhorn_eps`` is added
to that softmax and to every later sum. With 0 the softmax and the first rows are taken in the log domain, after which no sum
can fall below 1/n: no logits, however far apart, give 0/0.

Sources: mHC (arXiv 2512.24880), hyper-connections (arXiv 2409.19606). A published variant stores the mixing logits as [in, out]
and has eps = 1e-6 in ``pre`` and in Sinkhorn. These are options, since such an eps changes an entry by up to 0.1 where logits spread by 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import library
from ._triton import cdiv, device_info, launch, on_device
from .checks import has_shape, is_tensor, one_of, same_device
from .dispatch import Op, ran
from .mhc_coefficients_triton import (
    _mhc_finish_backward_kernel,
    _mhc_finish_forward_kernel,
    _mhc_project_backward_kernel,
    _mhc_project_forward_kernel,
)

__all__ = ["mhc_coefficients", "mhc_pre"]

MAX_STREAMS = 8


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: fp64 where any input is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _project_reference(x: Tensor, phi: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    """(..., n, C), (n*C, K) -> (..., K): the normalised projection. The division comes after the product: exact, and cheaper."""
    v = x.flatten(-2).to(wide)  # (..., n*C)
    with torch.autocast(x.device.type, enabled=False):
        return (v @ phi.to(wide)) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def _sinkhorn_reference(logits: Tensor, iterations: int, sinkhorn_eps: float) -> Tensor:
    """(..., n, n) logits [out, in] -> the matrix; its rows (dim -1) are normalised last."""
    if sinkhorn_eps == 0:
        mix = torch.softmax(torch.log_softmax(logits, dim=-2), dim=-1)
    else:
        mix = torch.softmax(logits, dim=-2) + sinkhorn_eps
        mix = mix / (mix.sum(-1, keepdim=True) + sinkhorn_eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-2, keepdim=True) + sinkhorn_eps)
        mix = mix / (mix.sum(-1, keepdim=True) + sinkhorn_eps)
    return mix


def _mhc_coefficients_reference(
    x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, eps: float, iterations: int, pre_eps: float, sinkhorn_eps: float, res_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[-2]
    wide = _wide(x, phi, bias, alpha)
    m = _project_reference(x, phi, eps, wide)
    bias, alpha = bias.to(wide), alpha.to(wide)
    pre = torch.sigmoid(alpha[0] * m[..., :n] + bias[:n]) + pre_eps
    post = 2 * torch.sigmoid(alpha[1] * m[..., n : 2 * n] + bias[n : 2 * n])
    logits = (alpha[2] * m[..., 2 * n :] + bias[2 * n :]).unflatten(-1, (n, n))
    if res_layout == "in_out":
        logits = logits.transpose(-1, -2)
    return pre, post, _sinkhorn_reference(logits, iterations, sinkhorn_eps)


def _mhc_pre_reference(x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, eps: float, pre_eps: float) -> Tensor:
    wide = _wide(x, phi, bias, alpha)
    return torch.sigmoid(alpha.to(wide) * _project_reference(x, phi, eps, wide) + bias.to(wide)) + pre_eps


# ---- Triton ----

_WHY = "tensors on a device that Triton serves"


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def tokens_first(x: Tensor, inner: int) -> Tensor:
    """(..., `inner` dims) -> (tokens, `inner` dims) with adjacent columns: a view where strides allow, else one copy."""
    x = x.unsqueeze(0) if x.dim() == inner else x.flatten(0, -inner - 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _project_sizes(x: Tensor, columns: int) -> dict[str, int]:
    """Constants of both projection kernels: smaller blocks where fp32 products or many columns fill the registers."""
    small = columns > 32 or x.dtype == torch.float32
    padded, block_columns = max(16, _padded(columns)), 64 if small else 128
    return {
        "N": x.shape[1],
        "K": columns,
        "PADDED_K": padded,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": 8,
        "num_stages": 2 if small else 3,
    }


def _project(x: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, n, C), (n*C, K) -> v @ phi (splits, tokens, K) and the sum of v^2 (splits, tokens), each over a split of the columns."""
    tokens, n, hidden_size = x.shape
    columns = phi.shape[1]
    sizes = _project_sizes(x, columns)
    block_tokens, block_columns = (16 if tokens <= 512 else 64), sizes["BLOCK_COLUMNS"]
    token_blocks, steps = cdiv(tokens, block_tokens), n * cdiv(hidden_size, block_columns)
    wanted = cdiv(2 * device_info(x.device).num_sms, max(token_blocks, 1))  # splits that fill the device twice
    steps_per_split = max(cdiv(steps, wanted), min(steps, 4))
    splits = cdiv(steps, steps_per_split)
    product = torch.empty(splits, tokens, columns, dtype=torch.float32, device=x.device)
    squares = torch.empty(splits, tokens, dtype=torch.float32, device=x.device)
    args = (x, phi, product, squares, tokens, hidden_size, x.stride(0), x.stride(1), steps_per_split)
    launch(_mhc_project_forward_kernel, (token_blocks * splits,), *args, BLOCK_TOKENS=block_tokens, **sizes)
    return product, squares


def _finish_sizes(n: int, columns: int, iterations: int, sinkhorn_eps: float, in_out: bool) -> dict[str, int | bool]:
    """The constants that the small kernels share."""
    options = {"HAS_MIX": columns != n, "IN_OUT": in_out, "ITERATIONS": iterations, "LOG_START": sinkhorn_eps == 0}
    return {"N": n, "PADDED_N": _padded(n), "K": columns, **options, "BLOCK_TOKENS": 32 if n <= 4 else 16, "num_warps": 4}


def _coefficients_empty(x: Tensor, phi: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """pre, post, mix, and for the backward m (tokens, K) and rstd (tokens,); empty where not wanted."""
    lead, n, columns = x.shape[:-2], x.shape[-2], phi.shape[1]
    tokens = math.prod(lead)
    has_mix = columns != n
    shapes = ([*lead, n], [*lead, n] if has_mix else [0], [*lead, n, n] if has_mix else [0])
    saved = ([tokens, columns], [tokens]) if save else ([0], [0])
    pre, post, mix, m, rstd = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (*shapes, *saved))
    return pre, post, mix, m, rstd


def _forward_impl(
    x: Tensor,
    phi: Tensor,
    bias: Tensor,
    alpha: Tensor,
    eps: float,
    iterations: int,
    pre_eps: float,
    sinkhorn_eps: float,
    in_out: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _coefficients_empty(x, phi, save)
    columns = phi.shape[1]
    x, phi, bias, alpha = tokens_first(x, 2), phi.contiguous(), bias.contiguous(), alpha.contiguous()
    tokens, n, hidden_size = x.shape
    ran("mhc_coefficients" if columns != n else "mhc_pre", "forward", "triton", _WHY)
    with on_device(x):
        product, squares = _project(x, phi)
        sizes = _finish_sizes(n, columns, iterations, sinkhorn_eps, in_out)
        numbers = (tokens, product.shape[0], n * hidden_size, eps, pre_eps, sinkhorn_eps)
        grid = (cdiv(tokens, sizes["BLOCK_TOKENS"]),)
        launch(_mhc_finish_forward_kernel, grid, product, squares, bias, alpha, *outputs, *numbers, SAVE=save, **sizes)
    return outputs


def _backward_empty(x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, needed: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four gradients' shapes and dtypes; empty where not wanted."""
    return tuple(
        torch.empty(t.shape if need else [0], dtype=t.dtype, device=t.device) for t, need in zip((x, phi, bias, alpha), needed, strict=True)
    )


def _project_backward(
    x: Tensor, phi: Tensor, dproduct: Tensor, radial: Tensor, need_x: bool, need_phi: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dx (tokens, n, C) in x's dtype and dphi (n*C, K) in fp32, each None where not needed."""
    tokens, n, hidden_size = x.shape
    columns = phi.shape[1]
    sizes = _project_sizes(x, columns)
    block_tokens, block_columns = 32, sizes["BLOCK_COLUMNS"]
    column_blocks = n * cdiv(hidden_size, block_columns)
    wanted = cdiv(4 * device_info(x.device).num_sms, column_blocks)  # splits of the tokens that fill the device four times
    tokens_per_split = block_tokens * max(cdiv(tokens, block_tokens * wanted), 1)
    splits = cdiv(tokens, tokens_per_split)
    dx = torch.empty(tokens, n, hidden_size, dtype=x.dtype, device=x.device) if need_x else None
    dphi = torch.empty(splits, n * hidden_size, columns, dtype=torch.float32, device=x.device) if need_phi else None
    args = (dproduct, radial, x, phi, dx, dphi, tokens, hidden_size, x.stride(0), x.stride(1), tokens_per_split)
    options = {"NEED_X": need_x, "NEED_PHI": need_phi, "BLOCK_TOKENS": block_tokens}
    launch(_mhc_project_backward_kernel, (column_blocks * splits,), *args, **sizes, **options)
    return dx, dphi if dphi is None else dphi.sum(0)


def _backward_impl(
    dpre: Tensor | None, dpost: Tensor | None, dmix: Tensor | None,
    x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, m: Tensor, rstd: Tensor,
    iterations: int, sinkhorn_eps: float, in_out: bool, needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    need_x, need_phi, need_bias, need_alpha = needed
    grads = list(_backward_empty(x, phi, bias, alpha, [False] * 4))
    shape, columns = x.shape, phi.shape[1]
    x, phi = tokens_first(x, 2), phi.contiguous()
    tokens, n, hidden_size = x.shape
    ran("mhc_coefficients" if columns != n else "mhc_pre", "backward", "triton", _WHY)
    sizes = _finish_sizes(n, columns, iterations, sinkhorn_eps, in_out)
    programs = cdiv(tokens, sizes["BLOCK_TOKENS"])
    sums, dproduct, radial, partial = (
        torch.empty(shape, dtype=torch.float32, device=x.device)
        for shape in ((tokens, 2 * (iterations - 1), n), (tokens, columns), (tokens,), (programs, 2, columns))
    )
    incoming = (g if g is None else g.contiguous() for g in (dpre, dpost, dmix))
    with on_device(x):
        args = (
            *incoming,
            m,
            rstd,
            bias.contiguous(),
            alpha.contiguous(),
            sums,
            dproduct,
            radial,
            partial,
            tokens,
            n * hidden_size,
            sinkhorn_eps,
        )
        launch(_mhc_finish_backward_kernel, (programs,), *args, **sizes)
        if need_x or need_phi:
            dx, dphi = _project_backward(x, phi, dproduct, radial, need_x, need_phi)
            if need_x:
                grads[0] = dx.view(shape)
            if need_phi:
                grads[1] = dphi.to(phi.dtype)
    if need_bias or need_alpha:
        dbias, dalpha = partial.sum(0)
        if need_bias:
            grads[2] = dbias.to(bias.dtype, copy=True)
        if need_alpha:
            groups = [n] if columns == n else [n, n, n * n]
            grads[3] = torch.stack([group.sum() for group in dalpha.split(groups)]).to(alpha.dtype)
    return tuple(grads)


_forward = library.define(
    "mhc_coefficients_forward(Tensor x, Tensor phi, Tensor bias, Tensor alpha, float eps, int iterations, float pre_eps, "
    "float sinkhorn_eps, bool in_out, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward_impl,
    lambda x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, in_out, save: _coefficients_empty(x, phi, save),
)
_backward = library.define(
    "mhc_coefficients_backward(Tensor? dpre, Tensor? dpost, Tensor? dmix, Tensor x, Tensor phi, Tensor bias, Tensor alpha, Tensor m, "
    "Tensor rstd, int iterations, float sinkhorn_eps, bool in_out, bool[4] needed) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    lambda dpre, dpost, dmix, x, phi, bias, alpha, m, rstd, iterations, sinkhorn_eps, in_out, needed: _backward_empty(
        x, phi, bias, alpha, needed
    ),
)


class _Coefficients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, in_out):
        pre, post, mix, m, rstd = _forward(x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, in_out, True)
        ctx.save_for_backward(x, phi, bias, alpha, m, rstd)
        ctx.options = (iterations, sinkhorn_eps, in_out)
        ctx.set_materialize_grads(False)
        return pre, post, mix

    @staticmethod
    @once_differentiable
    def backward(ctx, dpre, dpost, dmix):
        needed = ctx.needs_input_grad[:4]
        if dpre is None and dpost is None and dmix is None:
            return (None,) * 9
        grads = _backward(dpre, dpost, dmix, *ctx.saved_tensors, *ctx.options, needed)
        return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 5)


def _coefficients_triton(
    x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, eps: float, iterations: int, pre_eps: float, sinkhorn_eps: float, res_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    args = (x, phi, bias, alpha, eps, iterations, pre_eps, sinkhorn_eps, res_layout == "in_out")
    if torch.is_grad_enabled() and any(t.requires_grad for t in args[:4]):
        return _Coefficients.apply(*args)
    return _forward(*args, False)[:3]


def _pre_triton(x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, eps: float, pre_eps: float) -> Tensor:
    return _coefficients_triton(x, phi, bias, alpha, eps, 1, pre_eps, 0.0, "out_in")[0]


def float64_input(*args: object) -> str | None:
    """Why Triton does not serve a call with these arguments: it computes in fp32."""
    return "float64 is served by the reference alone" if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args) else None


_coefficients = Op("mhc_coefficients", _mhc_coefficients_reference, _coefficients_triton, float64_input)
_pre = Op("mhc_pre", _mhc_pre_reference, _pre_triton, float64_input)


def _check(op: str, x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, numbers: dict[str, float], groups: int) -> None:
    """What both public functions ask of their arguments; ``groups`` is the length of ``alpha``."""
    for name, tensor in (("x", x), ("phi", phi), ("bias", bias), ("alpha", alpha)):
        is_tensor(op, name, tensor)
    if x.dim() < 2 or not 1 <= x.shape[-2] <= MAX_STREAMS or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., n, C) with 1 <= n <= {MAX_STREAMS} streams and C >= 1")
    n, hidden_size = x.shape[-2:]
    columns = n * n + 2 * n if groups == 3 else n
    has_shape(op, "phi", phi, (n * hidden_size, columns))
    has_shape(op, "bias", bias, (columns,))
    has_shape(op, "alpha", alpha, (groups,))
    same_device(op, x=x, phi=phi, bias=bias, alpha=alpha)
    for name, number in numbers.items():
        if not isinstance(number, (int, float)) or not number >= 0:
            raise ValueError(f"{op}: {name} is {number!r}; expected a number that is not negative")


def mhc_coefficients(
    x: Tensor,  # (..., n, C)
    phi: Tensor,  # (n*C, n*n + 2n)
    bias: Tensor,  # (n*n + 2n,)
    alpha: Tensor,  # (3,)
    /,
    *,
    eps: float,
    iterations: int = 20,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 0.0,
    res_layout: str = "out_in",
) -> tuple[Tensor, Tensor, Tensor]:
    """How a sublayer reads, writes and mixes the streams ``x``: (pre (..., n), post (..., n), mix (..., n, n) as [out, in]).

    ``phi``'s and ``bias``'s columns are pre (n), post (n), res (n*n); ``alpha`` is (a_pre, a_post, a_res). n is 1 to 8.
    ``res_layout`` says how the res columns are laid out: row-major "out_in" or "in_out"; ``mix`` is [out, in] for both. All inputs
    may differ in dtype. The results are fp32 (fp64 where an input is): rounded to bf16, the gain of a deep stack would drift.

    Permuting the streams (with phi and bias) permutes the results; scaling ``x`` leaves them, but for eps. Formula and sources: this
    module's docstring. Raises TypeError or ValueError that names the argument.

    Cost: forward reads x once; backward reads x once more and writes its gradient. Saved: x, and n*n + 2n + 1 fp32 numbers a token; the
    iterations are run again in the backward, and differentiated exactly.
    """
    op = "mhc_coefficients"
    _check(op, x, phi, bias, alpha, {"eps": eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps}, groups=3)
    one_of(op, "res_layout", res_layout, ("out_in", "in_out"))
    if not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"{op}: iterations is {iterations!r}; expected an int, at least 1")
    return _coefficients(x, phi, bias, alpha, float(eps), iterations, float(pre_eps), float(sinkhorn_eps), res_layout)


def mhc_pre(
    x: Tensor,  # (..., n, C)
    phi: Tensor,  # (n*C, n)
    bias: Tensor,  # (n,)
    alpha: Tensor,  # (1,)
    /,
    *,
    eps: float,
    pre_eps: float = 0.0,
) -> Tensor:
    """The reading coefficients alone, (..., n): what a learned collapse of the streams needs; :func:`mhc_read` applies them.

    As ``pre`` of :func:`mhc_coefficients`, in its dtypes, with its errors and at its cost.
    """
    _check("mhc_pre", x, phi, bias, alpha, {"eps": eps, "pre_eps": pre_eps}, groups=1)
    return _pre(x, phi, bias, alpha, float(eps), float(pre_eps))
