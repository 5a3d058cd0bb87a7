"""Attention: every implementation against a loop over single queries in fp64, mask edges, isolation, gradients, choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ligerformer.kernels import attention, attention_tiles, attention_triton
from ligerformer.kernels.attention import _attention_reference as reference_alone  # the oracle's own handle
from ligerformer.kernels.attention import _check_documents, _check_slots

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def loop_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_document_ids: Tensor | None = None,
    query_start: int = 0,
    kv_length: int | None = None,
) -> Tensor:
    """One query and head at a time, over a Python list of the keys that it sees."""
    batch, num_queries, num_heads, head_dim = q.shape
    key_ids = document_ids if key_document_ids is None else key_document_ids
    out = torch.zeros_like(q)
    for b in range(batch):
        for i in range(num_queries):
            slot = query_start + i
            keys = [
                j
                for j in range(k.shape[1] if kv_length is None else kv_length)
                if (not causal or j <= slot)
                and (window is None or j > slot - window)
                and (document_ids is None or document_ids[b, i] == key_ids[b, j])
            ]
            for h in range(num_heads):
                kv_head = h // (num_heads // k.shape[2])
                scores = (k[b, keys, kv_head] @ q[b, i, h]) * (head_dim**-0.5 if scale is None else scale)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1]])
                weights = torch.softmax(scores, 0)[: len(keys)]
                out[b, i, h] = (weights[:, None] * v[b, keys, kv_head]).sum(0)
    return out


def draw(
    batch: int,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_queries, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads)]
    return tuple(torch.randn(batch, t, h, head_dim, generator=generator).to(dtype).to(device) for t, h in shapes)


def documents(*lengths: int, ids: tuple[int, ...] | None = None, device: str = "cpu") -> Tensor:
    """(1, T): ids repeated over lengths."""
    ids = ids or tuple(range(len(lengths)))
    return torch.cat([torch.full((n,), i) for n, i in zip(lengths, ids, strict=True)])[None].to(device)


# label -> (Tq, Tk, heads, kv heads, options); one row of each kind of mask, and their mixtures
GRID: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "causal": (21, 21, 2, 2, {}),
    "full": (21, 21, 2, 2, {"causal": False}),
    "grouped": (21, 21, 6, 2, {}),
    "one kv head": (9, 9, 3, 1, {}),
    "window": (37, 37, 2, 1, {"window": 5}),
    "window of one": (9, 9, 2, 1, {"window": 1}),
    "softcap": (21, 21, 2, 1, {"softcap": 1.5}),
    "scale": (9, 9, 2, 1, {"scale": 0.7}),
    "sinks": (21, 21, 4, 2, {"sinks": True}),
    "cross": (5, 23, 2, 1, {"causal": False}),
    "cross, partly filled": (5, 23, 2, 1, {"causal": False, "kv_length": 17}),
    "cached": (7, 29, 4, 2, {"query_start": 19}),
    "cached window": (7, 29, 4, 2, {"query_start": 19, "window": 9}),
    "one query": (1, 29, 4, 2, {"query_start": 28}),
    "one query, window": (1, 29, 4, 2, {"query_start": 20, "window": 6}),
    "one query, sinks": (1, 29, 6, 2, {"query_start": 20, "sinks": True, "window": 6}),
    "kv_length": (21, 21, 2, 1, {"kv_length": 13}),
    "nothing valid": (5, 5, 2, 1, {"kv_length": 0}),
    "documents": (30, 30, 4, 2, {"document_ids": documents(11, 1, 18)}),
    "documents, not in order": (
        16,
        16,
        2,
        1,
        {"document_ids": torch.tensor([[7, -3, 7, 7, -3, 2**40, 5, 5, 2**40, 7, 1, 1, 1, -3, 5, 5]])},
    ),
    "documents, not causal": (16, 16, 2, 1, {"document_ids": documents(5, 11), "causal": False}),
    "padding on the left of a cache": (
        3,
        12,
        2,
        1,
        {"query_start": 8, "document_ids": documents(3, ids=(1,)), "key_document_ids": documents(4, 8)},
    ),
    "queries that see nothing": (
        6,
        6,
        4,
        2,
        {"document_ids": documents(3, 3), "key_document_ids": documents(3, 3, ids=(5, 1))},
    ),
    "queries that see nothing but a sink": (
        6,
        6,
        4,
        2,
        {"document_ids": documents(3, 3), "key_document_ids": documents(3, 3, ids=(5, 1)), "sinks": True},
    ),
    "all": (33, 33, 6, 2, {"document_ids": documents(20, 13), "window": 7, "softcap": 2.0, "sinks": True, "scale": 0.3}),
}


def make(label: str, head_dim: int, dtype: torch.dtype, device: str, batch: int = 1) -> tuple[list[Tensor], dict[str, Any]]:
    """(q, k, v) and options of a row of the grid; sinks, where asked for, are in the options."""
    num_queries, num_keys, num_heads, num_kv_heads, options = GRID[label]
    options = {n: x.to(device).expand(batch, -1) if isinstance(x, Tensor) else x for n, x in options.items()}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 1.5, num_heads, dtype=torch.float32).to(dtype).to(device)
    return list(draw(batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim, dtype, device)), options


def gradients(function: Any, inputs: list[Tensor], options: dict[str, Any], dtype: torch.dtype | None = None, **more: Any) -> list[Tensor]:
    """The output and the gradients of q, k, v (and sinks) for a fixed random gradient of the output."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    options = dict(options)
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].detach().to(dtype or options["sinks"].dtype).requires_grad_()
        leaves.append(options["sinks"])
    out = function(*leaves[:3], **options, **more)
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(out.shape, generator=generator).to(inputs[0].dtype).to(out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def assert_close(got: list[Tensor], expected: list[Tensor], ulps: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), got, expected, strict=False):
        assert a.isfinite().all(), name
        bound = max(b.abs().max().item(), 1.0)  # inputs are of unit size; a gradient may be zero exactly (a query with one key)
        distance = (a.double() - b.double()).abs().max().item()
        assert distance <= ulps * EPS[a.dtype] * bound, f"{name}: {distance / bound / EPS[a.dtype]:.1f} ulp"


# ---- reference and SDPA ----


@pytest.mark.parametrize("label", GRID)
def test_reference_is_the_formula(label: str) -> None:
    inputs, options = make(label, 8, torch.float64, "cpu", batch=2)
    expected = gradients(loop_formula, inputs, options)
    assert_close(gradients(attention, inputs, options, impl="reference"), expected, ulps=64)


@pytest.mark.parametrize("label", [n for n, row in GRID.items() if not {"softcap", "sinks"} & row[4].keys()])
def test_sdpa_is_the_formula(label: str) -> None:
    inputs, options = make(label, 8, torch.float64, "cpu", batch=2)
    expected = gradients(loop_formula, inputs, options)
    assert_close(gradients(attention, inputs, options, impl="sdpa"), expected, ulps=64)


def test_reference_passes_gradcheck() -> None:
    inputs, options = make("all", 3, torch.float64, "cpu")
    inputs = [x[:, :9].contiguous() for x in inputs]
    options["document_ids"] = documents(5, 4)
    sinks = options.pop("sinks").requires_grad_()
    run = lambda q, k, v, s: attention(q, k, v, sinks=s, impl="reference", **options)  # noqa: E731
    assert torch.autograd.gradcheck(run, [*(x.requires_grad_() for x in inputs), sinks])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label", ["causal", "all", "cached window"])
def test_reference_in_lower_precision(label: str, dtype: torch.dtype) -> None:
    inputs, options = make(label, 24, dtype, "cpu")
    expected = gradients(loop_formula, inputs, options, torch.float64)
    assert_close(gradients(attention, inputs, options, impl="reference"), expected, ulps=8 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("number", [11, torch.tensor(11), torch.tensor(11, dtype=torch.int32)])
def test_slots_as_tensors(impl: str, number: int | Tensor) -> None:
    q, k, v = draw(2, 3, 20, 4, 2, 8, torch.float64, "cpu")
    expected = loop_formula(q, k, v, query_start=11, kv_length=13)
    got = attention(q, k, v, query_start=number, kv_length=number + 2, impl=impl)
    assert_close([got], [expected], ulps=64)


# ---- the kernels ----

SMALL = attention_tiles.Tiles(16, 16, 4, 1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 x 16, so that a few dozen tokens pass through every loop of every kernel, and splits of 16 keys."""
    monkeypatch.setattr(attention_triton, "tiles", lambda *_: SMALL)
    monkeypatch.setattr(attention_triton, "_KEYS_PER_SPLIT", 8)


def oracle(inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The reference in fp64 for these very inputs: output and gradients."""

    def run(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        document_ids, key_document_ids = _check_documents(q, k, given.get("document_ids"), given.get("key_document_ids"))
        query_start, kv_length = _check_slots(q, k, given.get("causal", True), given.get("query_start"), given.get("kv_length"))
        resolved = {"causal": True, "window": None, "softcap": None, "scale": q.shape[-1] ** -0.5, "sinks": None, **given}
        resolved |= {"document_ids": document_ids, "key_document_ids": key_document_ids, "query_start": query_start, "kv_length": kv_length}
        return reference_alone(q, k, v, **resolved)

    return gradients(run, inputs, options, torch.float64)


@pytest.mark.parametrize("label", GRID)
def test_triton_is_the_reference(label: str, small_tiles: None, device: str) -> None:
    inputs, options = make(label, 24, torch.float32, device, batch=2)
    assert_close(gradients(attention, inputs, options, impl="triton"), oracle(inputs, options), ulps=16)
