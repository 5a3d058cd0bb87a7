"""Parameters, FLOPs and memory of a training step, from the config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from .block import BlockConfig

if TYPE_CHECKING:
    from .model import LayerConfig, ModelConfig

GIB = 1024**3


def _branches(layer: LayerConfig) -> Iterator[BlockConfig]:
    for sublayer in layer.sublayers:
        for name in sublayer:
            yield layer.branches[name].block


def _norms(layer: LayerConfig) -> Iterator[BlockConfig]:
    """One norm a sublayer, one post norm a branch."""
    for sublayer in layer.sublayers:
        if layer.norm is not None:
            yield layer.norm
        if layer.post_norm is not None:
            yield from [layer.post_norm] * len(sublayer)


def num_params(model: ModelConfig) -> int:
    """Number of parameters, a tied weight counted once."""
    total = model.embed.num_params(model) + model.head.num_params(model) + model.residual.ends_num_params(model)
    if model.final_norm is not None:
        total += model.final_norm.num_params(model)
    return total + sum(layer_num_params(model, model.layer(i)) for i in range(model.num_layers))


def layer_num_params(model: ModelConfig, layer: LayerConfig) -> int:
    """Number of parameters of one layer: branches, norms and residual sites."""
    blocks = [*_branches(layer), *_norms(layer), *[model.residual] * len(layer.sublayers)]
    return sum(block.num_params(model) for block in blocks)


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token's products, forward and backward (three times the forward), in a sequence of ``seq_len`` tokens."""
    forward = model.embed.flops(model, seq_len) + model.head.flops(model, seq_len) + model.residual.ends_flops(model, seq_len)
    for i in range(model.num_layers):
        layer = model.layer(i)
        blocks = [*_branches(layer), *_norms(layer), *[model.residual] * len(layer.sublayers)]
        forward += sum(block.flops(model, seq_len) for block in blocks)
    return 3.0 * forward


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes by kind. ``peak`` is the largest sum that stands at one time in a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment: the head's, when all activations are kept, or the optimiser's, when all gradients are."""
        states = self.weights + self.optimizer
        return max(states + self.activations + self.head, states + self.gradients)

    def __str__(self) -> str:
        rows = [f"{f.name} {getattr(self, f.name) / GIB:.2f} GiB" for f in dataclasses.fields(self)]
        return f"peak {self.peak / GIB:.2f} GiB ({', '.join(rows)})"


def training_memory(
    model: ModelConfig,
    batch: int,
    seq_len: int,
    *,
    dtype_bytes: int = 2,
    state_bytes: int = 2,
    recompute: Literal["none", "cheap", "layer"] = "none",
    chunk_bytes: int = GIB,
) -> TrainingMemory:
    """Memory of one AdamW step at ``batch`` x ``seq_len`` tokens on one device.

    ``dtype_bytes`` is the width of weights, gradients and activations, ``state_bytes`` that of each of AdamW's two states,
    ``chunk_bytes`` the budget of the fused head's logits. It is counted as 1 GiB, while on a GPU the head takes
    up to 2 GiB where hidden_size is so small that the rows of 1 GiB would not fill the GPU. The gradients left over from the step before are taken as freed.
    """
    params, tokens = num_params(model), batch * seq_len
    width = dtype_bytes * model.hidden_size
    per_layer = [_layer_saved_bytes(model, model.layer(i), seq_len, dtype_bytes) for i in range(model.num_layers)]
    if recompute == "layer":
        activations = tokens * (model.residual.stream_bytes(model, dtype_bytes) * model.num_layers + max(per_layer))
    elif recompute == "cheap":
        normed, inner = zip(
            *(_layer_remade_bytes(model, model.layer(i), seq_len, dtype_bytes) for i in range(model.num_layers)), strict=True
        )
        remade = sum(map(sum, normed)) + sum(map(sum, inner))
        transient = max(map(max, normed)) + max(map(max, inner))  # one of each stands at a time
        activations = tokens * (sum(per_layer) - remade + transient)
    else:
        activations = tokens * sum(per_layer)
    activations += tokens * (2 * width + 8)  # the last stream, its normed form; ids and labels
    head_weight = model.vocab_size * model.hidden_size
    logits = min(tokens * model.vocab_size * dtype_bytes, chunk_bytes)
    head = logits + head_weight * 4 + tokens * width + head_weight * dtype_bytes  # logits, dW in fp32, dX, dW
    return TrainingMemory(params * dtype_bytes, params * dtype_bytes, 2.0 * params * state_bytes, activations, head)


def _layer_saved_bytes(model: ModelConfig, layer: LayerConfig, seq_len: int, dtype_bytes: int) -> float:
    blocks = [*_branches(layer), *_norms(layer), *[model.residual] * len(layer.sublayers)]
    return sum(block.saved_bytes(model, seq_len, dtype_bytes) for block in blocks)


def _layer_remade_bytes(model: ModelConfig, layer: LayerConfig, seq_len: int, dtype_bytes: int) -> tuple[list[float], list[float]]:
    """What ``recompute="cheap"`` makes again: each sublayer's normed input (of the residual's count), and what is inside each branch."""
    kept = model.residual.saved_bytes(model, seq_len, dtype_bytes)
    normed = 0.0 if layer.norm is None else min(layer.norm.remade_bytes(model, dtype_bytes), kept)
    return [normed] * len(layer.sublayers), [block.remade_bytes(model, dtype_bytes) for block in _branches(layer)]
