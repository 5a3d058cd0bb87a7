"""From a config to a model with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..configs import ModelConfig
from .decoder import Decoder, Recompute
from .init import allocate, initialize


def build(
    config: ModelConfig | Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    recompute: Recompute = "none",
) -> Decoder:
    """A model with freshly drawn weights.

    ``config`` is a dict or a ModelConfig; ``device`` and ``dtype`` default to torch's defaults ("meta" allocates nothing). Each parameter is
    drawn from a generator seeded by (``seed``, its name); without a seed, one is drawn from torch's global generator.
    ``recompute``: "none" keeps all activations; "cheap" makes norms' outputs and gated products again in the backward, and no matrix
    product; "layer" keeps the state before each layer and runs the layer again. All three give the same bits.

    Raises a ConfigError for a config that cannot be used, a ValueError for another ``recompute``.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"build: dtype is {dtype!r}; expected a torch.dtype, such as torch.bfloat16")
    if not isinstance(config, ModelConfig):
        config = ModelConfig.from_dict(config)
    model = Decoder(config, recompute=recompute)
    allocate(model, device or torch.get_default_device(), dtype or torch.get_default_dtype())
    initialize(model, int(torch.randint(2**62, ()).item()) if seed is None else seed)
    return model
