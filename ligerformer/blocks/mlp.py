"""Gated feed-forward networks (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from .. import kernels
from ..configs import GatedMLPConfig, ModelConfig
from ..configs.registry import block
from .linear import FusedLinear, Linear
from .state import Context

ACTIVATIONS = {  # name: (of two tensors, of one packed tensor)
    "silu": (kernels.swiglu, kernels.swiglu_packed),
    "gelu_tanh": (kernels.geglu, kernels.geglu_packed),
}


@block(GatedMLPConfig)
class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: GatedMLPConfig, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        hidden, inner, std = model_config.hidden_size, config.intermediate_size, model_config.init.std
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = FusedLinear(hidden, parts, bias=config.bias, std=std, packed=config.packed)
        self.down_proj = Linear(inner, hidden, bias=config.bias, std=std)
        self.gated, self.gated_packed = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, ctx: Context, shared: dict[str, Tensor]) -> Tensor:  # (B, T, C)
        if self.gate_up_proj.packed:
            return self.down_proj(self.gated_packed(self.gate_up_proj.product(x)))
        return self.down_proj(self.gated(*self.gate_up_proj(x)))
