"""What every block's config can say of itself: parameters, FLOPs and saved activations, from the config alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .schema import Config

if TYPE_CHECKING:
    from .model import ModelConfig


@dataclasses.dataclass(frozen=True)
class BlockConfig(Config):
    """Base of the configs that fill a slot. Override what the block has; the defaults stand for a block without parameters."""

    def num_params(self, model: ModelConfig) -> int:
        """Number of parameters of one such block."""
        return 0

    def flops(self, model: ModelConfig, seq_len: int) -> float:
        """FLOPs of the forward's products per token (a multiply and an add are 2), in a sequence of ``seq_len`` tokens."""
        return 0.0

    def saved_bytes(self, model: ModelConfig, seq_len: int, dtype_bytes: int) -> float:
        """Bytes per token that the forward keeps for the backward, in activations of ``dtype_bytes``."""
        return 0.0

    def remade_bytes(self, model: ModelConfig, dtype_bytes: int) -> float:
        """Bytes per token that ``recompute="cheap"`` makes again in the backward: of ``saved_bytes``, or (a norm) of the residual's."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class NormConfig(BlockConfig):
    """Base of the configs of the ``norm`` slot: over the residual stream, or over another width (each head of q and k)."""

    def num_params(self, model: ModelConfig, size: int | None = None) -> int:
        """Number of parameters of one norm over ``size`` values, by default over ``hidden_size``."""
        return 0


@dataclasses.dataclass(frozen=True)
class ResidualConfig(BlockConfig):
    """Base of the configs of the ``residual`` slot: one *site* a sublayer, the *ends* once a model.

    ``num_params`` and ``flops`` speak of one site; the ``ends_*`` methods of what stands once at both ends. ``read_saved_bytes``
    is what reading with a norm keeps (the norm's input and output), per token and site.
    """

    def stream_bytes(self, model: ModelConfig, dtype_bytes: int) -> float:
        """Bytes per token of the state between two layers: what recomputing layers keeps of each."""
        return float(dtype_bytes * model.hidden_size)

    def ends_num_params(self, model: ModelConfig) -> int:
        """Number of parameters of expand and collapse."""
        return 0

    def ends_flops(self, model: ModelConfig, seq_len: int) -> float:
        """FLOPs per token of expand and collapse."""
        return 0.0
