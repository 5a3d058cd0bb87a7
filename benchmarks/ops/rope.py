"""rope, qk_norm_rope on (B, T, H, D). Least bytes: q and k in and out, forward and backward; with the norm, read once more in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerformer import kernels

from ..harness import DEVICE, Row, Work, peer
from . import draw

liger = peer("liger_kernel.ops.rope")
EPS = 1e-6


def _tables(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens, device=DEVICE)[None, :, None] * (1e4 ** -(torch.arange(half, device=DEVICE) / half))
    return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = (torch.cat((t, t), -1).to(x.dtype).unsqueeze(2) for t in (cos, sin))
    return x * cos + torch.cat((-b, a), -1) * sin


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _eager_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = F.rms_norm(q, q.shape[-1:], q_weight, EPS), F.rms_norm(k, k.shape[-1:], k_weight, EPS)
    return _eager(q, k, cos, sin)


def _liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """It writes over q and k, so it gets copies; its tables are as wide as a head and its layout is (B, H, T, D)."""
    tables = (torch.cat((t, t), -1).to(q.dtype) for t in (cos, sin))
    q, k = liger.LigerRopeFunction.apply(q.transpose(1, 2).clone(), k.transpose(1, 2).clone(), *tables)
    return q.transpose(1, 2), k.transpose(1, 2)


def _row(batch: int, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Row:
    size = 2.0 * batch * tokens * (num_heads + num_kv_heads) * head_dim

    def make(tokens: int) -> tuple[Any, ...]:
        tables = _tables(tokens, head_dim // 2)
        return draw.normal(batch, tokens, num_heads, head_dim), draw.normal(batch, tokens, num_kv_heads, head_dim), *tables

    shape = f"{batch}x{tokens}, {num_heads}/{num_kv_heads} heads x{head_dim}"
    return Row("rope", shape, tokens, make, kernels.rope, _eager, Work(2 * size), Work(4 * size), {"liger": _liger} if liger else {})


def _norm_row(batch: int, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Row:
    size = 2.0 * batch * tokens * (num_heads + num_kv_heads) * head_dim

    def make(tokens: int) -> tuple[Any, ...]:
        q, k = draw.normal(batch, tokens, num_heads, head_dim), draw.normal(batch, tokens, num_kv_heads, head_dim)
        return q, k, draw.normal(head_dim), draw.normal(head_dim), *_tables(tokens, head_dim // 2)

    shape = f"{batch}x{tokens}, {num_heads}/{num_kv_heads} heads x{head_dim}"

    def ours(*args: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.qk_norm_rope(*args, eps=EPS)

    return Row("qk_norm_rope", shape, tokens, make, ours, _eager_norm, Work(2 * size), Work(5 * size), checked=512)


ROWS = [_row(4, 2048, 32, 8, 128), _row(4, 4096, 32, 8, 64), _norm_row(4, 4096, 16, 8, 128), _norm_row(4, 4096, 4, 1, 256)]
