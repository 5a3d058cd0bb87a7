"""Rotary position embedding of queries and keys, in the half-rotation layout that Hugging Face checkpoints use.

    out[i]          = x[i] * cos[i] - x[i + R/2] * sin[i]
    out[i + R/2]    = x[i + R/2] * cos[i] + x[i] * sin[i]        for i < R/2; columns from R on pass through

(Su et al. 2021, arXiv:2104.09864.) The tables are cast to the queries' dtype, and each product and the sum are rounded to it, as eager
transformers does: the forward has the bits of that formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .dispatch import Op


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (B, T, H, D) rotated by ``cos``, ``sin`` (1 or B, T, R/2)."""
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype).unsqueeze(2), sin.to(x.dtype).unsqueeze(2)
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if rest.shape[-1] == 0 else (*parts, rest), dim=-1)


def _rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def check_rope_inputs(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse queries, keys and tables whose shapes, dtypes or devices do not fit together."""
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        checks.is_tensor(op, name, x)
    checks.has_shape(op, "q", q, ("B", "T", "H", "D"))
    batch, tokens, _, head_dim = q.shape
    checks.has_shape(op, "k", k, (batch, tokens, "H", head_dim))
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: k has dtype {k.dtype} and q {q.dtype}; expected one dtype")
    checks.has_shape(op, "cos", cos, ("1 or B", tokens, "R/2"))
    if cos.shape[0] not in (1, batch) or not 1 <= cos.shape[2] <= head_dim // 2:
        raise ValueError(
            f"{op}: cos has shape {tuple(cos.shape)}; expected (1 or {batch}, {tokens}, R/2) with R/2 from 1 to {head_dim // 2}"
        )
    checks.has_shape(op, "sin", sin, tuple(cos.shape))
    checks.same_device(op, q=q, k=k, cos=cos, sin=sin)
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(f"{op}: {'cos' if cos.requires_grad else 'sin'} requires a gradient, which is not computed; detach it")


_rope = Op("rope", _rope_reference, _rope_reference, lambda *args: "it has no Triton kernel yet")


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, /) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their position; returns new contiguous tensors ``(q', k')``.

    ``q`` is (B, T, Hq, D) and ``k`` (B, T, Hk, D) of one dtype; ``cos`` and ``sin`` are fp32 tables (1 or B, T, R/2) with any scaling of
    frequencies or attention folded in. R < D rotates the first R columns of a head and passes the rest through. The tables take no
    gradient: one that requires it is refused. The forward is bit-identical to the eager formula in q's dtype.

    Raises TypeError and ValueError for shapes, dtypes and devices that do not fit together.
    """
    check_rope_inputs("rope", q, k, cos, sin)
    return _rope(q, k, cos, sin)
