"""From token ids to vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import kernels
from ..configs import ModelConfig, TokenEmbeddingConfig
from ..configs.registry import block
from .init import Fill, normal


@block(TokenEmbeddingConfig)
class TokenEmbedding(nn.Module):
    """A table of vectors, times a scale that is rounded to the table's dtype before it multiplies (as Gemma publishes it)."""

    def __init__(self, config: TokenEmbeddingConfig, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.scale, self.std = config.scale, model_config.init.std
        self.weight = nn.Parameter(torch.empty(model_config.vocab_size, model_config.hidden_size))

    def initial_values(self) -> dict[str, Fill]:
        return {"weight": normal(self.std)}

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        x = kernels.embedding(input_ids, self.weight)
        if self.scale is None:
            return x
        return x * torch.tensor(self.scale, dtype=self.weight.dtype).item()
