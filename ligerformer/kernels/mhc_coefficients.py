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

import torch
from torch import Tensor

from .checks import has_shape, is_tensor, one_of, same_device
from .dispatch import Op

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


_NO_KERNEL = "no Triton kernel serves it"
_coefficients = Op("mhc_coefficients", _mhc_coefficients_reference, _mhc_coefficients_reference, lambda *_: _NO_KERNEL)
_pre = Op("mhc_pre", _mhc_pre_reference, _mhc_pre_reference, lambda *_: _NO_KERNEL)


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
