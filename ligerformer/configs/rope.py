"""Rotary position embeddings as data: base, rotated dimensions, and how positions past the trained context are scaled."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from . import registry
from .block import BlockConfig
from .schema import Bound, Config, ConfigError, NonNegativeFloat, PositiveFloat, PositiveInt, Slot


@registry.config("rope_scaling", "linear")
@dataclasses.dataclass(frozen=True)
class LinearScaling(BlockConfig):
    """Positions divided by ``factor``."""

    factor: PositiveFloat


@registry.config("rope_scaling", "dynamic")
@dataclasses.dataclass(frozen=True)
class DynamicScaling(BlockConfig):
    """NTK-aware: the base grows with the longest position of the call, once it is past the original context."""

    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


@registry.config("rope_scaling", "llama3")
@dataclasses.dataclass(frozen=True)
class Llama3Scaling(BlockConfig):
    """Low frequencies divided by ``factor``, high ones kept, a smooth ramp between."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt

    def check(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(f"high_freq_factor: is {self.high_freq_factor}; expected more than low_freq_factor ({self.low_freq_factor})")


@registry.config("rope_scaling", "yarn")
@dataclasses.dataclass(frozen=True)
class YarnScaling(BlockConfig):
    """YaRN (arXiv 2309.00071): a ramp over dimensions between interpolation and extrapolation, and a factor on the logits.

    ``attention_factor`` multiplies cos and sin; where it is null it follows from ``factor`` (and ``mscale``, ``mscale_all_dim``).
    """

    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None
    truncate: bool = True

    def check(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ConfigError(f"beta_fast: is {self.beta_fast}; expected at least beta_slow ({self.beta_slow})")


@registry.config("rope_scaling", "longrope")
@dataclasses.dataclass(frozen=True)
class LongRopeScaling(BlockConfig):
    """LongRoPE (arXiv 2402.13753): one divisor a frequency, a short list inside the original context and a long one past it.

    ``attention_factor`` multiplies cos and sin; where it is null it follows from ``factor`` = extended over original context.
    """

    short_factor: tuple[PositiveFloat, ...]
    long_factor: tuple[PositiveFloat, ...]
    original_max_position_embeddings: PositiveInt
    factor: PositiveFloat
    attention_factor: PositiveFloat | None = None

    def check(self) -> None:
        if len(self.short_factor) != len(self.long_factor):
            raise ConfigError(
                f"long_factor: has {len(self.long_factor)} entries; expected as many as short_factor ({len(self.short_factor)})"
            )


@dataclasses.dataclass(frozen=True)
class RopeConfig(Config):
    """Rotary embedding in the half-rotation layout.

    ``partial_rotary_factor`` is the share of a head's dimensions, the first ones, that is rotated; the rest passes through.
    """

    theta: PositiveFloat
    partial_rotary_factor: Annotated[float, Bound(above=0.0, at_most=1.0)] = 1.0
    scaling: Annotated[Config, Slot("rope_scaling")] | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated dimensions of a head; a ConfigError where it is odd, or differs from the lists of ``scaling``."""
        dim = int(head_dim * self.partial_rotary_factor)
        if dim % 2 or dim == 0:
            raise ConfigError(
                f"partial_rotary_factor: is {self.partial_rotary_factor:g}, which rotates {dim} of head_dim {head_dim}; expected an even number"
            )
        if isinstance(self.scaling, LongRopeScaling) and len(self.scaling.short_factor) != dim // 2:
            raise ConfigError(f"scaling.short_factor: has {len(self.scaling.short_factor)} entries; expected one a frequency ({dim // 2})")
        return dim
