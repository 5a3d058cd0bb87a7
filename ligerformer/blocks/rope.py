"""Rotary position embeddings (arXiv 2104.09864): frequencies out of a config, cos and sin out of positions.

The tables follow transformers' fp32 arithmetic step by step, so that they equal its tables bit for bit. The two types that look at the
length of the call (dynamic, longrope) do so on the device, by the call's largest position, without state.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..configs import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling, registry
from ..configs.registry import block
from .fixed import FixedBuffers

Frequencies = tuple[Tensor, Tensor, float]  # inverse frequencies (R/2,) inside and past the original context; a factor on cos and sin


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim))


@block(LinearScaling)
def _linear(scaling: LinearScaling, theta: float, dim: int) -> Frequencies:
    frequencies = _plain(theta, dim) / scaling.factor
    return frequencies, frequencies, 1.0


@block(Llama3Scaling)
def _llama3(scaling: Llama3Scaling, theta: float, dim: int) -> Frequencies:
    plain = _plain(theta, dim)
    old_length = scaling.original_max_position_embeddings
    low_wavelength = old_length / scaling.low_freq_factor
    high_wavelength = old_length / scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > low_wavelength, plain / scaling.factor, plain)
    smooth = (old_length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = ~(wavelength < high_wavelength) * ~(wavelength > low_wavelength)
    frequencies = torch.where(between, ramp, stretched)
    return frequencies, frequencies, 1.0


@block(YarnScaling)
def _yarn(scaling: YarnScaling, theta: float, dim: int) -> Frequencies:
    def correction(rotations: float) -> float:  # the dimension that turns this often over the original context
        return dim * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(scaling.beta_fast), correction(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    powers = theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    extrapolated = 1.0 / powers
    interpolated = 1.0 / (scaling.factor * powers)
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequencies = interpolated * (1 - kept) + extrapolated * kept
    return frequencies, frequencies, _yarn_factor(scaling)


def _yarn_factor(scaling: YarnScaling) -> float:
    def of(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return of(scaling.factor, scaling.mscale) / of(scaling.factor, scaling.mscale_all_dim)
    return of(scaling.factor)


@block(LongRopeScaling)
def _longrope(scaling: LongRopeScaling, theta: float, dim: int) -> Frequencies:
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    short, long = (
        1.0 / (torch.tensor(divisors, dtype=torch.float32) * theta**exponent) for divisors in (scaling.short_factor, scaling.long_factor)
    )
    factor = scaling.attention_factor
    if factor is None:
        factor = (
            1.0 if scaling.factor <= 1.0 else math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
        )
    return short, long, factor


@block(DynamicScaling)
def _dynamic(scaling: DynamicScaling, theta: float, dim: int) -> Frequencies:
    frequencies = _plain(theta, dim)
    return frequencies, frequencies, 1.0


@functools.lru_cache(maxsize=64)
def _frequencies(config: RopeConfig, dim: int) -> Frequencies:
    """The frequencies of a rope, on the CPU; the same for every layer that has it."""
    with torch.device("cpu"):
        if config.scaling is None:
            plain = _plain(config.theta, dim)
            return plain, plain, 1.0
        return registry.block_class(config.scaling.slot, config.scaling.type)(config.scaling, config.theta, dim)


class Rope(FixedBuffers):
    """Tables of one rope config for heads of ``head_dim``: ``forward(positions)`` gives fp32 cos and sin, scaling folded in.

    ``key`` tells distinct ropes apart, by config and number of rotated dimensions.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.config, self.dim = config, config.rotary_dim(head_dim)
        self.key = f"{self.dim} of {config}"  # text: its hash is kept, a config's is made anew each time
        self.factor = _frequencies(config, self.dim)[2]
        self.register_fixed()

    def fixed(self) -> dict[str, Tensor]:
        inside, past, _ = _frequencies(self.config, self.dim)
        return {"inv_freq": inside, "inv_freq_long": past}

    @torch.no_grad()
    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # (1 or B, T) -> (1 or B, T, R/2) twice
        angles = positions.to(torch.float32).unsqueeze(-1) * self._inv_freq(positions)
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        if positions.is_cuda:  # an error would be a sync: a negative position gives NaN
            outside = (positions < 0).unsqueeze(-1)
            return cos.masked_fill(outside, float("nan")), sin.masked_fill(outside, float("nan"))
        return cos, sin

    def _inv_freq(self, positions: Tensor) -> Tensor:
        """(R/2,): the frequencies for a call with these positions; a device-side choice where the call's length matters."""
        scaling = self.config.scaling
        if isinstance(scaling, LongRopeScaling):
            past = positions.max() + 1 > scaling.original_max_position_embeddings
            return torch.where(past, self.inv_freq_long, self.inv_freq)
        if isinstance(scaling, DynamicScaling):
            original = scaling.original_max_position_embeddings
            length = torch.clamp(positions.max() + 1, min=original).to(torch.float32)
            growth = (scaling.factor * length / original) - (scaling.factor - 1)
            base = self.config.theta * growth ** (self.dim / (self.dim - 2))
            exponent = torch.arange(0, self.dim, 2, dtype=torch.int64, device=positions.device).to(torch.float32) / self.dim
            return torch.where(length > original, 1.0 / (base**exponent), self.inv_freq)
        return self.inv_freq

    def extra_repr(self) -> str:
        scaling = self.config.scaling
        return f"theta={self.config.theta:g}, dim={self.dim}, scaling={scaling.type if scaling else None}"
