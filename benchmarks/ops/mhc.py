"""mhc: coefficients, read and write of one sublayer. Least bytes, in elements of the width C a token with n streams of bf16:

forward, write fused with the next statistics: the stream in once for the coefficients and the read, once for the write, and out
(3n), the read's output and the branch's output (2): 3n + 2 = 14 for n = 4. The backward: 19 more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerformer import kernels

from ..harness import Call, Row, Work, peer
from . import draw

liger = peer("liger_kernel.transformers.functional")
EPS, STREAMS, ITERATIONS = 1e-6, 4, 20
FORWARD, FULL = 14.0, 33.0  # elements of C a token


def ours(x: Tensor, y: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    pre, post, mix = kernels.mhc_coefficients(x, phi, bias, alpha, eps=EPS, iterations=ITERATIONS)
    return kernels.mhc_read(x, pre), kernels.mhc_write(x, y, post, mix)


def eager(x: Tensor, y: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    n = x.shape[-2]
    flat = x.flatten(-2).to(compute)
    scales = alpha.repeat_interleave(torch.tensor([n, n, n * n], device=x.device))
    m = (flat @ phi.to(compute)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS) * scales + bias
    pre, post, mix = m.split((n, n, n * n), -1)
    pre, post = pre.sigmoid(), 2 * post.sigmoid()
    mix = mix.unflatten(-1, (n, n))
    mix = (mix - mix.amax((-2, -1), keepdim=True)).exp()
    for _ in range(ITERATIONS):
        mix = mix / mix.sum(-2, keepdim=True)
        mix = mix / mix.sum(-1, keepdim=True)
    wide = x.to(compute)
    read = (pre.unsqueeze(-1) * wide).sum(-2)
    write = post.unsqueeze(-1) * y.to(compute).unsqueeze(-2) + mix @ wide
    return read.to(x.dtype), write.to(x.dtype)


def _liger(x: Tensor, y: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    pre, post, mix = liger.liger_mhc_coeffs(x, phi, bias, *alpha, tmax=ITERATIONS, rms_eps=EPS)
    return liger.liger_mhc_pre(x, pre), liger.liger_mhc_post_res(x, y, post, mix)


def _row(tokens: int, width: int) -> Row:
    size = 2.0 * tokens * width
    outputs = STREAMS * STREAMS + 2 * STREAMS

    def make(tokens: int) -> tuple[Any, ...]:
        phi = draw.normal(STREAMS * width, outputs, std=0.02, dtype=torch.float32)
        bias, alpha = draw.normal(outputs, dtype=torch.float32), draw.normal(3, std=0.1, dtype=torch.float32)
        return draw.normal(tokens, STREAMS, width), draw.normal(tokens, width), phi, bias, alpha

    # Liger's Sinkhorn ends otherwise (its rows are approximate): near, not equal.
    peers: dict[str, Call] = {"liger": _liger} if liger else {}
    shape = f"{tokens}x{STREAMS}x{width}"
    return Row("mhc", shape, tokens, make, ours, eager, Work(FORWARD * size), Work(FULL * size), peers, tolerance=5e-2)


ROWS = [_row(8192, 4096)]
