"""attention: causal, grouped queries. Least work: the two products of the causal half forward; 3.5 times that with the backward's five."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ligerformer import kernels

from ..harness import Call, Row, Work, peer
from . import draw

flash4 = peer("flash_attn.cute")


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, so that it serves as the oracle; too slow, and too large, to be timed at full length."""
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _sdpa(backend: SDPBackend) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            heads = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)

    return call


def _auto(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernels.attention(q, k, v)


def _own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernels.attention(q, k, v, impl="triton")


def _row(batch: int, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Row:
    products = 2 * 2.0 * batch * num_heads * tokens * tokens * head_dim / 2

    def make(tokens: int) -> tuple[Any, ...]:
        return draw.normal(batch, tokens, num_heads, head_dim), *(draw.normal(batch, tokens, num_kv_heads, head_dim) for _ in range(2))

    peers: dict[str, Callable[..., Any]] = {
        "auto": _auto,
        "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    if flash4:
        peers["FA4"] = lambda q, k, v: flash4.flash_attn_func(q, k, v, causal=True)
    shape = f"{batch}x{tokens}, {num_heads}/{num_kv_heads} heads x{head_dim}"
    return Row(
        "attention",
        shape,
        tokens,
        make,
        _own,
        _eager,
        Work(flops=products),
        Work(flops=3.5 * products),
        peers,
        checked=512,
        time_eager=False,
    )


ROWS = [_row(4, 4096, 32, 8, 128), _row(1, 16384, 32, 8, 128), _row(4, 4096, 16, 8, 256), _row(4, 4096, 32, 8, 64)]
