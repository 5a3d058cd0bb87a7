"""Blocks that ligerformer does not have, written with its public parts alone: what a user can add without an edit to the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligerformer import kernels, register
from ligerformer.blocks import Context, FusedLinear, KVSpec, Linear, Norm, Rope, State, constant, normal
from ligerformer.configs import BlockConfig, ModelConfig, ResidualConfig, RopeConfig
from tests.configs.examples import plain


def _sum_of(ys: Sequence[Tensor], post_norms: Sequence[nn.Module | None]) -> Tensor:
    return sum(y if norm is None else norm(y) for y, norm in zip(ys, post_norms, strict=True))


# ---- a residual whose state carries a side value: a site's reading weights are used by the next site ----


@register("residual", "delayed_read")
class DelayedRead:
    """Hyper-connections as in DeepSeek-V4.1: the ``pre`` that a site computes is used by the next one, the last one's collapses."""

    @dataclasses.dataclass(frozen=True)
    class Config(ResidualConfig):
        streams: int

        def num_params(self, model: ModelConfig) -> int:
            return (self.streams * model.hidden_size + 1) * (self.streams**2 + 2 * self.streams) + 3

        def flops(self, model: ModelConfig, seq_len: int) -> float:
            return 2.0 * self.streams * model.hidden_size * (self.streams**2 + 2 * self.streams)

    class Site(nn.Module):
        def __init__(self, config: Any, model_config: ModelConfig, index: int) -> None:
            super().__init__()
            n, columns = config.streams, config.streams**2 + 2 * config.streams
            self.phi = nn.Parameter(torch.empty(n * model_config.hidden_size, columns))
            self.bias = nn.Parameter(torch.empty(columns))
            self.alpha = nn.Parameter(torch.empty(3))

        def initial_values(self) -> dict[str, Any]:
            return {"phi": normal(0.02), "bias": constant(0.0), "alpha": constant(1.0)}

        def read(self, state: State, norm: Norm | None) -> tuple[Tensor, State]:
            x, pre = state.stream  # (B, T, n, C), (B, T, n)
            following = kernels.mhc_coefficients(x, self.phi, self.bias, self.alpha, eps=1e-6)
            u = kernels.mhc_read(x, pre)
            return (u if norm is None else norm(u)), State((x, following), state.shared)

        def write(self, state: State, ys: Sequence[Tensor], post_norms: Sequence[Any], shared: dict[str, Tensor]) -> State:
            x, (pre, post, mix) = state.stream
            return State((kernels.mhc_write(x, _sum_of(ys, post_norms), post, mix), pre), shared)

    class Ends(nn.Module):
        def __init__(self, config: Any, model_config: ModelConfig, index: int) -> None:
            super().__init__()
            self.streams = config.streams

        def expand(self, x: Tensor) -> State:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            pre = torch.zeros(*x.shape[:-1], self.streams, dtype=wide, device=x.device)
            pre[..., 0] = 1.0
            return State((x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, -1).contiguous(), pre), {})

        def collapse(self, state: State, final_norm: Norm | None) -> Tensor:
            h = kernels.mhc_read(*state.stream)
            return h if final_norm is None else final_norm(h)

        def settle(self, state: State) -> State:
            return state

        def hidden(self, state: State) -> Tensor:
            return state.stream[0]


# ---- a residual whose state is a growing list ----


class _Pick(nn.Module):
    """A softmax over sources, scored by a learned query against each normalised source."""

    def __init__(self, config: Any, model_config: ModelConfig, index: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(model_config.hidden_size))

    def initial_values(self) -> dict[str, Any]:
        return {"query": constant(0.0)}

    def pick(self, sources: Sequence[Tensor], norm: Norm | None) -> Tensor:
        values = torch.stack(tuple(sources), dim=-2)  # (B, T, S, C)
        scores = kernels.rms_norm(values, eps=1e-6) @ self.query.unsqueeze(-1)  # (B, T, S, 1)
        h = (scores.softmax(-2).transpose(-1, -2) @ values).squeeze(-2)
        return h if norm is None else norm(h)


@register("residual", "attention_residuals")
class AttentionResiduals:
    """Each sublayer reads a softmax-weighted sum of the embedding and all earlier sublayers' outputs (arXiv 2603.15031)."""

    @dataclasses.dataclass(frozen=True)
    class Config(ResidualConfig):
        def num_params(self, model: ModelConfig) -> int:
            return model.hidden_size

        def ends_num_params(self, model: ModelConfig) -> int:
            return model.hidden_size

        def flops(self, model: ModelConfig, seq_len: int) -> float:  # site s has s + 1 sources: the mean over sites
            return self.ends_flops(model, seq_len) / 2

        def ends_flops(self, model: ModelConfig, seq_len: int) -> float:
            sites = sum(len(model.layer(i).sublayers) for i in range(model.num_layers))
            return 4.0 * model.hidden_size * (sites + 1)

    class Site(_Pick):
        def read(self, state: State, norm: Norm | None) -> tuple[Tensor, State]:
            return self.pick(state.stream, norm), state

        def write(self, state: State, ys: Sequence[Tensor], post_norms: Sequence[Any], shared: dict[str, Tensor]) -> State:
            return State([*state.stream, _sum_of(ys, post_norms)], shared)

    class Ends(_Pick):
        def expand(self, x: Tensor) -> State:
            return State([x], {})

        def collapse(self, state: State, final_norm: Norm | None) -> Tensor:
            return self.pick(state.stream, final_norm)

        def settle(self, state: State) -> State:
            return state

        def hidden(self, state: State) -> Tensor:
            return self.pick(state.stream, None)


# ---- an attention that reads what the first layer left in ``shared`` ----


@dataclasses.dataclass(frozen=True)
class HeadsConfig(BlockConfig):
    """Heads of one size, as many keys as queries."""

    num_heads: int
    head_dim: int
    rope: RopeConfig | None = None

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    def num_params(self, model: ModelConfig) -> int:
        return 4 * model.hidden_size * self.inner

    def flops(self, model: ModelConfig, seq_len: int) -> float:
        return 8.0 * model.hidden_size * self.inner


class _Heads(nn.Module):
    path = ""

    def __init__(self, config: HeadsConfig, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.config, std = config, model_config.init.std
        self.qkv_proj = FusedLinear(
            model_config.hidden_size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.inner), bias=False, std=std
        )
        self.o_proj = Linear(config.inner, model_config.hidden_size, bias=False, std=std)
        self.rope = None if config.rope is None else Rope(config.rope, config.head_dim)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D) each
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in self.qkv_proj(x))
        return (*(kernels.rope(q, k, *ctx.rope(self.rope)) if self.rope is not None else (q, k)), v)


@register("attention", "value_residual")
class ValueResidual(_Heads):
    """Softmax attention whose values are mixed with those of the first layer (arXiv 2410.17897)."""

    @dataclasses.dataclass(frozen=True)
    class Config(HeadsConfig):
        def num_params(self, model: ModelConfig) -> int:
            return super().num_params(model) + 1

        def flops(self, model: ModelConfig, seq_len: int) -> float:
            return super().flops(model, seq_len) + 2.0 * self.inner * seq_len

    def __init__(self, config: Any, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__(config, model_config, layer_index)
        self.mix = nn.Parameter(torch.empty(1))

    def initial_values(self) -> dict[str, Any]:
        return {"mix": constant(0.5)}

    def cache_spec(self, batch: int, capacity: int, dtype: torch.dtype) -> KVSpec:
        return KVSpec(batch, capacity, self.config.num_heads, self.config.head_dim, dtype)

    def forward(self, x: Tensor, ctx: Context, shared: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.project(x, ctx)
        first = shared.get("first_value", v)
        v = v + self.mix * (first - v)
        mask: dict[str, Any] = {"document_ids": ctx.document_ids}
        if ctx.cache is not None:
            visible = ctx.cache[self.path].append(k, v)
            k, v = visible.keys, visible.values
            mask |= {"key_document_ids": ctx.cache.key_document_ids(visible), "query_start": visible.query_start}
        return self.o_proj(kernels.attention(q, k, v, **mask).flatten(2)), {"first_value": first}


# ---- a second attention, with a cache entry of its own kind ----


@dataclasses.dataclass(frozen=True)
class MemorySpec:
    """A matrix a head instead of keys and values: its size does not grow."""

    batch: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> Memory:
        shape = (self.batch, self.num_heads, self.head_dim, self.head_dim + 1)
        return Memory(torch.zeros(shape, dtype=self.dtype, device=device), torch.zeros(self.batch, 1, dtype=torch.int64, device=device))


@dataclasses.dataclass
class Memory:
    """The sum of k v^T over the document that each row's last token belongs to."""

    matrix: Tensor  # (B, H, D, D + 1)
    document: Tensor  # (B, 1)

    def read_and_add(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        read = (q @ self.matrix) * (documents == self.document)[:, None, :, None]
        last = documents[:, -1:]
        kept = self.matrix * (self.document == last)[:, None, None] + (k * (documents == last)[:, None, :, None]).mT @ v
        self.matrix, self.document = kept, last
        return read


@register("attention", "linear_attention")
class LinearAttention(_Heads):
    """Attention without a softmax (arXiv 2006.16236): weights phi(q) phi(k), phi = elu + 1, normalised by their sum."""

    @dataclasses.dataclass(frozen=True)
    class Config(HeadsConfig):
        def flops(self, model: ModelConfig, seq_len: int) -> float:  # the plain form below makes both triangles
            return super().flops(model, seq_len) + 2.0 * self.num_heads * (2 * self.head_dim + 1) * seq_len

    def cache_spec(self, batch: int, capacity: int, dtype: torch.dtype) -> MemorySpec:
        return MemorySpec(batch, self.config.num_heads, self.config.head_dim, dtype)

    def forward(self, x: Tensor, ctx: Context, shared: dict[str, Tensor]) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.project(x, ctx))  # (B, H, T, D)
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the last column sums the weights
        documents = x.new_zeros(x.shape[:2], dtype=torch.int64) if ctx.document_ids is None else ctx.document_ids
        seen = (documents[:, :, None] == documents[:, None]).tril().unsqueeze(1)  # (B, 1, T, T)
        y = (q @ k.mT * seen) @ v
        if ctx.cache is not None:
            y = y + ctx.cache[self.path].read_and_add(q, k, v, documents)
        return self.o_proj((y[..., :-1] / y[..., -1:]).transpose(1, 2).flatten(2))


# ---- models made of them ----


def compositions() -> dict[str, dict[str, Any]]:
    """A whole model config for each composition."""
    heads = {"num_heads": 3, "head_dim": 8}
    attention = plain()["layers"]["main"]["attention"]
    changes: dict[str, Any] = {
        "delayed read": {"residual": {"type": "delayed_read", "streams": 3}},
        "attention residuals": {"residual": {"type": "attention_residuals"}},
        "parallel": {"layer": {"sublayers": [["attention", "mlp"]]}},
        "value residual": {"layer": {"attention": {"type": "value_residual", "rope": {"theta": 1e4}, **heads}}},
        "linear attention": {"layer": {"attention": {"type": "linear_attention", **heads}}},
        "third branch": {
            "layer": {
                "attention": attention | {"window": 4},
                "memory": {"slot": "attention", "type": "linear_attention", "multiplier": 0.5, **heads},
                "sublayers": [["attention", "memory"], ["mlp"]],
                "post_norm": {"type": "rms_norm", "eps": 1e-5},
            }
        },
    }
    made = {}
    for name, change in changes.items():
        made[name] = plain()
        made[name]["layers"]["main"] |= change.pop("layer", {})
        made[name] |= change
    return made
