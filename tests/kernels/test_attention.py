"""Attention: every implementation against a loop over single queries in fp64, mask edges, isolation, gradients, choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
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
    "wide window": (56, 56, 1, 1, {"window": 38}),  # with tiles that are seen whole between two edges
    "window of one": (9, 9, 2, 1, {"window": 1}),
    # windows and slots that end on a tile's edge (of 16), where one key more or less is a whole tile of them
    "window of two": (21, 21, 2, 1, {"window": 2}),
    "window of two tiles less one": (48, 48, 1, 1, {"window": 31}),
    "window short of one": (9, 9, 2, 1, {"window": 8}),
    "cached, a key short of a tile": (20, 34, 2, 1, {"query_start": 14}),
    "cached, a key past a tile": (20, 37, 2, 1, {"query_start": 17}),
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
    inputs, options = make(label, 24, torch.float32, device)
    assert_close(gradients(attention, inputs, options, impl="triton"), oracle(inputs, options), ulps=16)


@pytest.mark.parametrize("head_dim", [1, 16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": 7, "softcap": 2.0}], ids=["causal", "window and softcap"])
def test_triton_head_dims(head_dim: int, options: dict[str, Any], triton_dtype: torch.dtype, device: str) -> None:
    """At the table's own tile sizes; more queries than the path for few of them takes."""
    inputs = list(draw(1, 19, 19, 1, 1, head_dim, triton_dtype, device))
    assert_close(
        gradients(attention, inputs, options, impl="triton"), oracle(inputs, options), ulps=16 if triton_dtype == torch.float32 else 4
    )


def test_triton_at_full_size(triton_dtype: torch.dtype, device: str) -> None:
    """Several of the table's own tiles, with documents whose ranges span blocks of rows."""
    inputs = list(draw(1, 150, 150, 2, 1, 16, triton_dtype, device))
    options = {"window": 70, "document_ids": documents(90, 3, 57, device=device)}
    assert_close(
        gradients(attention, inputs, options, impl="triton"), oracle(inputs, options), ulps=16 if triton_dtype == torch.float32 else 4
    )


def test_tiles_divide_the_document_blocks() -> None:
    for table in attention_tiles._TILES.values():
        assert all(attention_triton.DOCUMENT_BLOCK % n == 0 for size in table.values() for n in size[:2])


def test_packed_projections_are_read_in_place(small_tiles: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v as views of one projection, and as (B, H, T, D) memory: the contiguous tensors' bits, and no copy."""
    q, k, v = draw(2, 20, 20, 2, 1, 16, torch.float32, device)
    expected = attention(q, k, v, impl="triton")
    packed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2)  # (2, 20, 4 * 16)
    views = [x.unflatten(2, (-1, 16)) for x in packed.split([32, 16, 16], dim=2)]
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for given in (views, heads_first):
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(given, attention_triton._by_rows(*given)[:3], strict=True))
        assert torch.equal(attention(*given, impl="triton"), expected)
    cache = torch.cat([k, k.flip(1)], dim=1)[:, :20]  # the head of a longer cache
    assert attention_triton._by_rows(cache)[0].data_ptr() == cache.data_ptr()
    assert torch.equal(attention(q, cache, v, impl="triton"), expected)


@pytest.mark.parametrize("number", [11, torch.tensor(11), torch.tensor(11, dtype=torch.int32)])
@pytest.mark.parametrize("num_queries", [3, 20])
def test_triton_slots_as_tensors(number: int | Tensor, num_queries: int, small_tiles: None, device: str) -> None:
    number = number.to(device) if isinstance(number, Tensor) else number
    inputs = list(draw(1, num_queries, 40, 4, 2, 8, torch.float32, device))
    options = {"query_start": number, "kv_length": number + 15}
    assert_close(gradients(attention, inputs, options, impl="triton"), oracle(inputs, options), ulps=16)


# ---- properties of all implementations ----

IMPLEMENTATIONS = ("reference", "sdpa", "triton")
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


@every_implementation
@pytest.mark.parametrize("window", [1, 4, 16, 17])
def test_window_edge_is_exact(impl: str, window: int, small_tiles: None, device: str) -> None:
    """Query 30 sees the key at 30 - window + 1 and not the one before it: bits change, bits stay."""
    q, k, v = draw(1, 35, 35, 2, 1, 8, torch.float32, device)
    out = attention(q, k, v, window=window, impl=impl)
    for key, changes in ((30 - window + 1, True), (30 - window, False), (31, False)):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, key] += 1.0
        other_v[:, key] += 1.0
        other = attention(q, other_k, other_v, window=window, impl=impl)
        assert (not torch.equal(other[:, 30], out[:, 30])) == changes, f"key {key}"


@every_implementation
@pytest.mark.parametrize("ids", [documents(13, 22), documents(13, 4, 18, ids=(0, 1, 0))], ids=["in order", "in two pieces"])
def test_documents_are_isolated_bit_for_bit(impl: str, ids: Tensor, small_tiles: None, device: str) -> None:
    """Other numbers in document 1 change no bit of document 0's output or gradients."""
    ids = ids.to(device)
    inputs = list(draw(1, 35, 35, 2, 1, 8, torch.float32, device))
    mine = ids[0] == 0
    changed = [torch.where(mine[None, :, None, None], x, 5 * x.flip(1) + 1) for x in inputs]
    runs = [gradients(attention, given, {"document_ids": ids}, impl=impl) for given in (inputs, changed)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), *runs, strict=True):
        assert torch.equal(a[:, mine], b[:, mine]), name
        assert not torch.equal(a[:, ~mine], b[:, ~mine]), name


@every_implementation
@pytest.mark.parametrize("num_queries", [1, 3, 20])
@pytest.mark.parametrize("on_device", [False, True], ids=["ints", "tensors"])
def test_free_cache_slots_may_hold_anything(impl: str, num_queries: int, on_device: bool, small_tiles: None, device: str) -> None:
    inputs = list(draw(1, num_queries, 45, 2, 1, 8, torch.float32, device))
    dirty = [inputs[0], *(x.index_fill(1, torch.arange(5 + num_queries, 45, device=device), float("nan")) for x in inputs[1:])]
    for options in ({"query_start": 5}, {"causal": False, "kv_length": 5 + num_queries}):
        given = {n: torch.tensor(x, device=device) if on_device and n != "causal" else x for n, x in options.items()}
        got = gradients(attention, dirty, given, impl=impl)
        assert_close(got, oracle(inputs, options), ulps=16)
        assert not got[2][:, 5 + num_queries :].any() and not got[3][:, 5 + num_queries :].any()


@every_implementation
def test_one_query_at_a_time_equals_all_at_once(impl: str, small_tiles: None, device: str) -> None:
    q, k, v = draw(1, 18, 18, 2, 1, 8, torch.float32, device)
    whole = attention(q, k, v, window=9, impl=impl)
    steps = [attention(q[:, i : i + 1], k, v, window=9, query_start=i, impl=impl) for i in range(18)]
    assert_close([torch.cat(steps, dim=1)], [whole], ulps=16)


@every_implementation
def test_output_is_contiguous_and_of_the_inputs_dtype(impl: str, device: str) -> None:
    for options in ({}, {"window": 2}):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(2, 5, 5, 4, 2, 16, torch.float16, device))
        out = attention(q, k, v, impl=impl, **options)
        assert out.is_contiguous() and out.dtype == torch.float16 and out.shape == q.shape


# ---- choice ----


def what_ran() -> str:
    return kernels.explain(reset=True)


def test_auto_on_the_cpu_says_what_ran() -> None:
    q, k, v = draw(1, 5, 5, 4, 2, 8, torch.float32, "cpu")
    what_ran()
    attention(q, k, v)
    attention(q, k, v, softcap=3.0)
    lines = [line for line in what_ran().splitlines() if line.startswith("attention")]
    assert len(lines) == 2
    assert "reference" in lines[0] and "tensors are on cpu" in lines[0] and "it has no softcap" in lines[0]
    assert "sdpa" in lines[1] and "tensors are on cpu" in lines[1]


def test_scopes_decide_for_auto_alone(device: str) -> None:
    q, k, v = draw(1, 5, 5, 4, 2, 8, torch.float32, device)
    for scope in ("reference", "triton"):
        with kernels.use(scope):
            what_ran()
            attention(q, k, v)
            assert f" {scope} " in what_ran()
            attention(q, k, v, impl="sdpa")
            assert " sdpa " in what_ran()


def test_backward_is_counted(device: str) -> None:
    inputs = list(draw(1, 5, 5, 4, 2, 8, torch.float32, device))
    what_ran()
    gradients(attention, inputs, {}, impl="triton")
    assert [line.split()[1] for line in what_ran().splitlines()[1:]] == ["backward", "forward"]


@pytest.mark.parametrize("options, reason", [({"softcap": 2.0}, "it has no softcap"), ({"sinks": torch.zeros(4)}, "it has no sinks")])
def test_sdpa_says_what_it_cannot_do(options: dict[str, Any], reason: str) -> None:
    q, k, v = draw(1, 5, 5, 4, 2, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match=f"impl='sdpa' was given.*{reason}"):
        attention(q, k, v, impl="sdpa", **options)


def test_triton_says_what_it_cannot_do(device: str) -> None:
    q, k, v = draw(1, 5, 5, 4, 2, 8, torch.float64, device)
    with pytest.raises(ValueError, match=r"impl='triton' was given.*float64"):
        attention(q, k, v, impl="triton")
    with pytest.raises(ValueError, match=r"a scale of -1\.0"):
        attention(q.float(), k.float(), v.float(), scale=-1.0, impl="triton")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_auto_on_a_gpu() -> None:
    q, k, v = draw(1, 40, 40, 4, 2, 64, torch.bfloat16, "cuda")
    what_ran()
    attention(q, k, v)
    assert " sdpa " in what_ran()
    for options in ({"window": 8}, {"softcap": 2.0}, {"document_ids": documents(20, 20, device="cuda")}):
        attention(q, k, v, **options)
        assert " triton " in what_ran()
    attention(q.float(), k.float(), v.float())
    assert " triton " in what_ran()
    torch.use_deterministic_algorithms(True)
    try:
        attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert " triton " in what_ran()


@every_implementation
def test_autocast_runs_in_its_dtype(impl: str, device: str) -> None:
    q, k, v = draw(1, 5, 5, 4, 2, 8, torch.float32, device)
    with torch.autocast(device, torch.float16):
        out = attention(q, k, v.half(), impl=impl)
    assert out.dtype == torch.float16
    with kernels.use("reference"):
        expected = attention(q.half(), k.half(), v.half())
    assert_close([out], [expected], ulps=2)
