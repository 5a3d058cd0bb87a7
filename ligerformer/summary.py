"""A model or a config in a few lines: its parts, parameters, FLOPs and the memory of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from .blocks import Decoder
from .configs import LayerConfig, ModelConfig
from .configs.counting import GIB, layer_num_params


def summary(model: Decoder | ModelConfig | Mapping[str, Any], *, batch: int = 1, seq_len: int | None = None) -> str:
    """Describe a model, a ModelConfig or a config dict.

    FLOPs a token and the memory of an AdamW step (bf16 weights and states) are for ``batch`` x ``seq_len`` tokens; ``seq_len`` defaults to
    the smaller of max_position_embeddings and 4096. Raises a ConfigError for a dict that is no config, a ValueError for less than one token.
    """
    config = model.config if isinstance(model, Decoder) else model
    if not isinstance(config, ModelConfig):
        config = ModelConfig.from_dict(config)
    length = min(config.max_position_embeddings, 4096) if seq_len is None else seq_len
    for name, value in (("batch", batch), ("seq_len", length)):
        if value < 1:
            raise ValueError(f"summary: {name} is {value}; expected at least 1")
    lines = [
        f"{config.num_params():,} parameters, {config.num_layers} layers of width {config.hidden_size}, vocabulary {config.vocab_size:,}"
        + (", embeddings tied" if config.tie_embeddings else ""),
        f"  embed     {config.embed.type}, {config.embed.num_params(config):,}",
        f"  residual  {config.residual.type}",
    ]
    first = 0
    for name, run in groupby(config.layer_types):
        count = len(list(run))
        where = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
        lines.append(f"  {where}: {_layer_line(name, config.layers[name], config)}")
        first += count
    lines += [
        f"  head      {config.head.type}, {config.head.num_params(config):,}",
        f"training: {config.flops_per_token(length) / 1e9:.3g} GFLOP a token at {length} tokens; {batch} x {length} tokens in bf16 with "
        f"AdamW takes about {config.training_memory(batch, length).peak / GIB:.2f} GiB",
    ]
    if isinstance(model, Decoder):
        weight = next(model.parameters())
        lines.append(f"weights on {weight.device} in {str(weight.dtype).removeprefix('torch.')}, recompute={model.recompute!r}")
    return "\n".join(lines)


def _layer_line(name: str, layer: LayerConfig, config: ModelConfig) -> str:
    sublayers = ("+".join(f"{key}: {layer.branches[key].block.type}" for key in keys) for keys in layer.sublayers)
    return f"{name!r} ({', '.join(sublayers)}), {layer_num_params(config, layer):,} each"
