"""Softmax attention over packed projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import kernels
from ..configs import ModelConfig, RMSNormConfig, SoftmaxAttentionConfig, registry
from ..configs.registry import block
from .cache import KVSpec
from .init import Fill, constant
from .linear import FusedLinear, Linear
from .rope import Rope
from .state import Context


@block(SoftmaxAttentionConfig)
class SoftmaxAttention(nn.Module):
    """Causal attention with grouped queries, optional QK-norm, RoPE, window, soft-cap and sinks."""

    path = ""  # this module's place in the model, set by the decoder: the key of its cache entry

    def __init__(self, config: SoftmaxAttentionConfig, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.config = config
        hidden, std, widths = model_config.hidden_size, model_config.init.std, config.widths
        self.qkv_proj = FusedLinear(hidden, widths, bias=config.qkv_bias, std=std, packed=config.packed)
        self.o_proj = Linear(widths["q_proj"], hidden, bias=config.o_bias, std=std)
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            norm = registry.block_class("norm", config.qk_norm.type)
            self.q_norm = norm(config.qk_norm, model_config, layer_index, size=config.head_dim)
            self.k_norm = norm(config.qk_norm, model_config, layer_index, size=config.head_dim)
        self.rope = None if config.rope is None else Rope(config.rope, config.head_dim)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None

    def initial_values(self) -> dict[str, Fill]:
        return {"sinks": constant(0.0)}

    def cache_spec(self, batch: int, capacity: int, dtype: torch.dtype) -> KVSpec:
        """Keys and values of this branch; with a window, of the window alone."""
        config = self.config
        return KVSpec(batch, capacity, config.num_kv_heads or config.num_heads, config.head_dim, dtype, config.window)

    def forward(self, x: Tensor, ctx: Context, shared: dict[str, Tensor]) -> Tensor:  # (B, T, C)
        config = self.config
        q, k, v = (part.view(*x.shape[:-1], -1, config.head_dim) for part in self.qkv_proj(x))  # (B, T, H, D)
        q, k = self._norm_and_rotate(q, k, ctx)
        mask = {"document_ids": ctx.document_ids}
        if ctx.cache is not None:
            visible = ctx.cache[self.path].append(k, v)
            k, v = visible.keys, visible.values
            mask |= {"key_document_ids": ctx.cache.key_document_ids(visible), "query_start": visible.query_start}
        elif self.q_norm is None and v.requires_grad:
            v = v.contiguous()  # rope keeps no input: with v out of it, the packed product is freed rather than saved whole
        y = kernels.attention(q, k, v, window=config.window, softcap=config.softcap, scale=config.softmax_scale, sinks=self.sinks, **mask)
        return self.o_proj(y.flatten(2))

    def _norm_and_rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        norm = self.config.qk_norm
        if self.rope is not None and isinstance(norm, RMSNormConfig):
            options = {"eps": norm.eps, "offset": norm.offset, "casting": norm.casting}
            return kernels.qk_norm_rope(q, k, self.q_norm.weight, self.k_norm.weight, *ctx.rope(self.rope), **options)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return kernels.rope(q, k, *ctx.rope(self.rope)) if self.rope is not None else (q, k)
