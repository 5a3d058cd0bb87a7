"""Manifold-constrained hyper-connections (arXiv 2512.24880) as a residual block.

The state of a token is n streams X (n, C). Each sublayer reads one mixture of them and writes back

    u = sum_i pre_i X_i        y = branch(norm(u))        X'_o = post_o y + sum_i mix_oi X_i

with pre, post and the doubly stochastic mix computed from X itself. The streams start as copies of the embedding and end as their mean.

The start is exactly the plain residual model: the projection is 0, pre sums to 1 over the streams (2/(n+1) on one of them, cycled by
sublayer, 1/(n+1) on the others), post is 1, mix has rows that sum to 1. That pre differs between streams is what lets them separate.
These starting values are constants; the learned ``bias`` is the departure from them and starts at 0, in any dtype exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..configs import MHCConfig, ModelConfig
from ..configs.registry import block
from .fixed import FixedBuffers
from .init import Fill, constant
from .norm import Norm
from .residual import apply_post_norms
from .state import State

SURE = 40.0  # a logit whose sigmoid is 1


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of coefficients: fp32, or fp64 in a model of that dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class MHCSite(FixedBuffers):
    """One sublayer's coefficients. The stream is (X (B, T, n, C), the coefficients of the sublayer that is being read or None)."""

    def __init__(self, config: MHCConfig, model_config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        n, hidden = config.streams, model_config.hidden_size
        self.phi = nn.Parameter(torch.empty(n * hidden, n * n + 2 * n))
        self.bias = nn.Parameter(torch.empty(n * n + 2 * n))
        self.alpha = nn.Parameter(torch.empty(3))
        self.register_fixed()

    def initial_values(self) -> dict[str, Fill]:
        return {"phi": constant(0.0), "bias": constant(0.0), "alpha": constant(0.01)}

    def fixed(self) -> dict[str, Tensor]:
        n = self.config.streams
        own = SURE if n == 1 else math.log(2 / (n - 1))  # sigmoid: 2 / (n + 1)
        pre = torch.full((n,), -math.log(n), dtype=torch.float64)  # sigmoid: 1 / (n + 1)
        pre[self.index % n] = own
        mix = torch.full((n, n), self.config.mix_off_diagonal, dtype=torch.float64).fill_diagonal_(0.0)
        return {"start": torch.cat([pre, torch.zeros(n), mix.flatten()])}

    def read(self, state: State, norm: Norm | None) -> tuple[Tensor, State]:
        x, _ = state.stream
        config = self.config
        bias = self.bias.to(_wide(x)) + self.start.to(_wide(x))
        pre, post, mix = kernels.mhc_coefficients(x, self.phi, bias, self.alpha, eps=config.eps, iterations=config.iterations)
        u = kernels.mhc_read(x, pre)
        return (u if norm is None else norm(u)), State((x, (post, mix)), state.shared)

    def write(self, state: State, ys: Sequence[Tensor], post_norms: Sequence[nn.Module | None], shared: dict[str, Tensor]) -> State:
        x, (post, mix) = state.stream
        first, *others = apply_post_norms(ys, post_norms)
        for y in others:
            first = first + y
        return State((kernels.mhc_write(x, first, post, mix), None), shared)


class MHCEnds(nn.Module):
    """Copies of the embedding at the start, the mean of the streams at the end."""

    def __init__(self, config: MHCConfig, model_config: ModelConfig, index: int) -> None:
        super().__init__()
        self.streams = config.streams

    def expand(self, x: Tensor) -> State:
        return State((x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]).contiguous(), None), {})

    def collapse(self, state: State, final_norm: Norm | None) -> Tensor:
        x, _ = state.stream
        weights = torch.full((), 1.0 / self.streams, dtype=_wide(x), device=x.device).expand(x.shape[:-1])
        mean = kernels.mhc_read(x, weights)
        return mean if final_norm is None else final_norm(mean)

    def settle(self, state: State) -> State:
        return state

    def hidden(self, state: State) -> Tensor:
        return state.stream[0]


@block(MHCConfig)
class MHC:
    """Manifold-constrained hyper-connections."""

    Site: Any = MHCSite
    Ends: Any = MHCEnds
