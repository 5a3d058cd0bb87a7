"""Configs of the built-in blocks, a class a type."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal, Self

from . import registry
from .block import BlockConfig, NormConfig, ResidualConfig
from .rope import RopeConfig
from .schema import Bound, ConfigError, Finite, NonNegativeFloat, PositiveFloat, PositiveInt, Slot, at

if TYPE_CHECKING:
    from .model import ModelConfig


@registry.config("embed", "token_embedding")
@dataclasses.dataclass(frozen=True)
class TokenEmbeddingConfig(BlockConfig):
    """A table of vocab_size rows. ``scale`` (Gemma: sqrt(hidden_size)) is rounded to the weight's dtype before it multiplies."""

    scale: PositiveFloat | None = None

    def num_params(self, model: ModelConfig) -> int:
        return model.vocab_size * model.hidden_size


@registry.config("norm", "rms_norm")
@dataclasses.dataclass(frozen=True)
class RMSNormConfig(NormConfig):
    """x / rms(x) * (weight + offset). ``casting``: "input" casts the normalised value back before the weight multiplies (Llama, Qwen);
    "fp32" casts at the end (Gemma, whose ``offset`` is 1)."""

    eps: NonNegativeFloat
    offset: Finite = 0.0
    casting: Literal["input", "fp32"] = "input"

    def num_params(self, model: ModelConfig, size: int | None = None) -> int:
        return size or model.hidden_size

    def remade_bytes(self, model: ModelConfig, dtype_bytes: int) -> float:
        return float(dtype_bytes * model.hidden_size)  # its output


@registry.config("attention", "softmax_attention")
@dataclasses.dataclass(frozen=True)
class SoftmaxAttentionConfig(BlockConfig):
    """Causal softmax attention with grouped queries.

    ``window`` counts the tokens a query sees, itself included. ``scale`` or ``query_pre_attn_scalar`` (scale is its -1/2 power) set the factor on
    q k; with neither it is head_dim ** -0.5. ``qk_norm`` normalises each head of q and k over head_dim; ``sinks`` adds one learned logit a head to the softmax.
    ``packed`` stores q, k and v as one weight (one product); false stores them apart.
    """

    num_heads: PositiveInt
    head_dim: Annotated[int, Bound(at_least=1, at_most=256)]
    num_kv_heads: PositiveInt | None = None
    rope: RopeConfig | None = None
    qk_norm: Annotated[NormConfig, Slot("norm")] | None = None
    window: PositiveInt | None = None
    softcap: PositiveFloat | None = None
    scale: PositiveFloat | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    packed: bool = True

    def check(self) -> None:
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads: is {self.num_kv_heads}; expected a divisor of num_heads ({self.num_heads})")
        if self.scale is not None and self.query_pre_attn_scalar is not None:
            raise ConfigError(f"scale: is {self.scale} while query_pre_attn_scalar is {self.query_pre_attn_scalar}; give one of the two")
        if self.rope is not None:
            with at("rope"):
                self.rope.rotary_dim(self.head_dim)

    def resolve(self, model: ModelConfig) -> Self:
        with at("qk_norm"):
            qk_norm = self.qk_norm and self.qk_norm.resolve(model)
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads or self.num_heads, qk_norm=qk_norm)

    @property
    def softmax_scale(self) -> float:
        """The factor on q k."""
        if self.scale is not None:
            return self.scale
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def widths(self) -> dict[str, int]:
        """Output widths of the three input projections."""
        kv = (self.num_kv_heads or self.num_heads) * self.head_dim
        return {"q_proj": self.num_heads * self.head_dim, "k_proj": kv, "v_proj": kv}

    def num_params(self, model: ModelConfig) -> int:
        qkv, inner = sum(self.widths.values()), self.widths["q_proj"]
        norms = 2 * self.qk_norm.num_params(model, self.head_dim) if self.qk_norm is not None else 0
        biases = self.qkv_bias * qkv + self.o_bias * model.hidden_size
        return model.hidden_size * (qkv + inner) + biases + norms + self.sinks * self.num_heads

    def flops(self, model: ModelConfig, seq_len: int) -> float:
        inner = self.widths["q_proj"]
        window = min(self.window or seq_len, seq_len)
        visible = window - window * window / (2 * seq_len)  # mean number of keys a query: half of them, less what the window hides
        return 2.0 * model.hidden_size * (sum(self.widths.values()) + inner) + 4.0 * inner * visible

    def saved_bytes(self, model: ModelConfig, seq_len: int, dtype_bytes: int) -> float:
        inner, qkv = self.widths["q_proj"], sum(self.widths.values())
        heads = self.num_heads + (self.num_kv_heads or self.num_heads)
        per_head_norms = dtype_bytes * heads * self.head_dim + 4 * heads if self.qk_norm is not None else 0  # q and k before them, and rstd
        return dtype_bytes * (qkv + inner) + 4 * self.num_heads + per_head_norms


@registry.config("mlp", "gated_mlp")
@dataclasses.dataclass(frozen=True)
class GatedMLPConfig(BlockConfig):
    """down(activation(gate(x)) * up(x)); ``packed`` stores gate and up as one weight (one product), false apart."""

    intermediate_size: PositiveInt
    activation: Literal["silu", "gelu_tanh"] = "silu"
    bias: bool = False
    packed: bool = True

    def num_params(self, model: ModelConfig) -> int:
        return 3 * model.hidden_size * self.intermediate_size + self.bias * (2 * self.intermediate_size + model.hidden_size)

    def flops(self, model: ModelConfig, seq_len: int) -> float:
        return 6.0 * model.hidden_size * self.intermediate_size

    def saved_bytes(self, model: ModelConfig, seq_len: int, dtype_bytes: int) -> float:
        return 3.0 * dtype_bytes * self.intermediate_size  # gate and up, and their product for the down projection's gradient

    def remade_bytes(self, model: ModelConfig, dtype_bytes: int) -> float:
        return float(dtype_bytes * self.intermediate_size)  # the product


@registry.config("residual", "add")
@dataclasses.dataclass(frozen=True)
class AddConfig(ResidualConfig):
    """The plain residual stream: x + y."""

    def stream_bytes(self, model: ModelConfig, dtype_bytes: int) -> float:
        return 2.0 * dtype_bytes * model.hidden_size  # the stream, and the branch output that is yet to be added

    def saved_bytes(self, model: ModelConfig, seq_len: int, dtype_bytes: int) -> float:
        return 2.0 * dtype_bytes * model.hidden_size + 4  # the stream, its normed form, rstd


@registry.config("residual", "mhc")
@dataclasses.dataclass(frozen=True)
class MHCConfig(ResidualConfig):
    """Manifold-constrained hyper-connections (arXiv 2512.24880): ``streams`` residual streams mixed by a doubly stochastic matrix.

    ``mix_off_diagonal`` is the start of the mixing logits off the diagonal (0 on it).
    """

    streams: Annotated[int, Bound(at_least=1, at_most=8)]
    iterations: PositiveInt = 20
    eps: PositiveFloat = 1e-6
    mix_off_diagonal: Finite = -4.0

    def num_params(self, model: ModelConfig) -> int:
        n = self.streams
        return (n * model.hidden_size + 1) * (n * n + 2 * n) + 3  # projection and bias, three scales

    def flops(self, model: ModelConfig, seq_len: int) -> float:
        n = self.streams
        return 2.0 * n * model.hidden_size * (n * n + 2 * n)

    def stream_bytes(self, model: ModelConfig, dtype_bytes: int) -> float:
        return float(dtype_bytes * self.streams * model.hidden_size)

    def saved_bytes(self, model: ModelConfig, seq_len: int, dtype_bytes: int) -> float:
        n = self.streams
        branch = 3.0 * dtype_bytes * model.hidden_size  # what is read, its normed form, and the branch's output
        return dtype_bytes * n * model.hidden_size + branch + 4 * (2 * (n * n + 2 * n) + 2)


@registry.config("head", "lm_head")
@dataclasses.dataclass(frozen=True)
class LMHeadConfig(BlockConfig):
    """Logits = logit_scale * (h @ weight.T + bias), then softcap * tanh(logits / softcap)."""

    softcap: PositiveFloat | None = None
    logit_scale: PositiveFloat = 1.0
    bias: bool = False

    def num_params(self, model: ModelConfig) -> int:
        weight = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
        return weight + self.bias * model.vocab_size

    def flops(self, model: ModelConfig, seq_len: int) -> float:
        return 2.0 * model.hidden_size * model.vocab_size
