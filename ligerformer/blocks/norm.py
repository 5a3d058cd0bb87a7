"""Norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import kernels
from ..configs import ModelConfig, RMSNormConfig
from ..configs.registry import block
from .init import Fill, constant


class Norm(nn.Module):
    """Base of the ``norm`` slot: ``forward(x)`` normalises the last dimension of ``x``.

    Built as ``Norm(config, model_config, layer_index, size=...)``; ``size`` is the normalised width.
    """

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). A norm with a fused kernel for both overrides this."""
        summed = x + residual
        return self(summed), summed


@block(RMSNormConfig)
class RMSNorm(Norm):
    """Root mean square norm (arXiv 1910.07467)."""

    def __init__(self, config: RMSNormConfig, model_config: ModelConfig, layer_index: int, *, size: int | None = None) -> None:
        super().__init__()
        self.options = {"eps": config.eps, "offset": config.offset, "casting": config.casting}
        self.weight = nn.Parameter(torch.empty(size or model_config.hidden_size))

    def initial_values(self) -> dict[str, Fill]:
        return {"weight": constant(1.0 - self.options["offset"])}

    def forward(self, x: Tensor) -> Tensor:  # (..., C)
        return kernels.rms_norm(x, self.weight, **self.options)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, residual, self.weight, **self.options)
