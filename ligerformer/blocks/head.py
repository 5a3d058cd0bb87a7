"""The head: from hidden states to logits, or straight to the loss.

The head owns its weight, bias, soft-cap and logit scale: nobody else touches them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..configs import LMHeadConfig, ModelConfig
from ..configs.registry import block
from .init import Fill, constant, normal


class Head(nn.Module):
    """Base of the ``head`` slot: ``logits(h)`` and ``loss(h, labels)`` over a weight (V, C).

    Built as ``Head(config, model_config, layer_index)``; where embeddings are tied, the decoder calls ``tie(embed)``.
    """

    softcap: float | None = None
    logit_scale: float = 1.0
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)  # no class attribute: it would hide the parameter of a head that has one

    @property
    def weight(self) -> Tensor:
        """(V, C); the embedding's where tied."""
        raise AttributeError(f"{type(self).__name__} gives no weight")

    def logits(self, h: Tensor) -> Tensor:  # (..., C) -> (..., V)
        """softcap(logit_scale * (h @ weight.T + bias)) in the dtype of ``h``."""
        logits = nn.functional.linear(h, self.weight, self.bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def loss(self, h: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Mean cross-entropy of ``labels`` (...) (already shifted; -100 is ignored), fp32, without ever holding all logits.

        ``options`` are those of ``kernels.linear_cross_entropy`` (num_items, num_valid, label_smoothing, z_loss, reduction ...).
        """
        return kernels.linear_cross_entropy(
            h, self.weight, labels, bias=self.bias, logit_scale=self.logit_scale, softcap=self.softcap, **options
        )


@block(LMHeadConfig)
class LMHead(Head):
    """A linear head, its weight tied to the embedding's or its own."""

    def __init__(self, config: LMHeadConfig, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.softcap, self.logit_scale, self.std = config.softcap, config.logit_scale, model_config.init.std
        self._tied: tuple[nn.Module, ...] = ()  # in a tuple, so that the embedding is not registered a second time
        if not model_config.tie_embeddings:
            self._parameters["weight"] = nn.Parameter(torch.empty(model_config.vocab_size, model_config.hidden_size))
        if config.bias:
            self.bias = nn.Parameter(torch.empty(model_config.vocab_size))

    @property
    def weight(self) -> Tensor:
        """(V, C); the embedding's where tied (read through its module, so that no conversion of it can break the tie)."""
        return self._tied[0].weight if self._tied else self._parameters["weight"]

    def tie(self, embed: nn.Module) -> None:
        """Take the weight of ``embed`` from now on."""
        self._tied = (embed,)

    def initial_values(self) -> dict[str, Fill]:
        return {"weight": normal(self.std), "bias": constant(0.0)}
