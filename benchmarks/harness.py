"""Time an op beside its peers on one GPU, after checking each of them against the same formula in fp64.

A :class:`Row` is one op at one shape. Its floor is the larger of two times: the fewest bytes over the bandwidth of a large copy, and the
fewest FLOPs over the rate of a large bf16 product, both measured first, in the same process. A time is the median over whole calls, by
CUDA events, with a cold cache.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from typing import Any

import torch
import triton.testing
from torch import Tensor

GIB = 2**30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # nothing is timed on the CPU: there a row can only be checked
PACKAGES = ("ligerformer", "torch", "triton", "transformers", "liger-kernel", "quack-kernels", "cut-cross-entropy", "flash-attn-4")

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """The least that has to be done: bytes read and written in device memory, and bf16 floating-point operations."""

    bytes: float = 0.0
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One op at one shape.

    ``make(size)`` draws the inputs, ``size`` being the number of rows (or tokens); those that require a gradient get one. ``eager`` is the
    formula in plain torch: a peer, compiled another, and on fp64 copies of ``checked`` rows the oracle. ``peers`` are other libraries'
    calls on the same inputs. ``forward`` and ``full`` (forward + backward) are the least work.
    """

    op: str
    shape: str
    size: int
    make: Callable[[int], tuple[Any, ...]]
    ours: Call
    eager: Call
    forward: Work
    full: Work
    peers: dict[str, Call] = dataclasses.field(default_factory=dict)
    checked: int = 1024
    tolerance: float = 2e-2  # max|a - b| / max|b|
    graph: bool = False  # also timed as a replayed CUDA graph
    time_eager: bool = True  # False where the formula as it stands is an oracle alone


def peer(module: str) -> Any:
    """A peer's module, or None where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        return None


# ---- one call ----


def _outputs(result: Any) -> list[Tensor]:
    return [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor) and x.is_floating_point()]


def forward_only(call: Call, inputs: tuple[Any, ...]) -> Callable[[], list[Tensor]]:
    """``call`` without gradients."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return _outputs(call(*inputs))

    return run


def forward_backward(call: Call, inputs: tuple[Any, ...]) -> Callable[[], list[Tensor]]:
    """``call`` and the gradients of its outputs (1 for a scalar, else one random tensor kept for all calls); returns the gradients."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    shapes = _outputs(call(*inputs))
    generator = torch.Generator(DEVICE).manual_seed(1)
    upstream = [
        torch.ones_like(y) if y.dim() == 0 else torch.randn(y.shape, generator=generator, device=DEVICE).to(y.dtype) for y in shapes
    ]

    def run() -> list[Tensor]:
        return list(torch.autograd.grad(_outputs(call(*inputs)), wanted, upstream))

    return run


def _copies(inputs: tuple[Any, ...], dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Fresh leaves, in ``dtype`` where given."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(dtype or x.dtype, copy=True).requires_grad_(x.requires_grad)

    return tuple(copy(x) for x in inputs)


def distance(row: Row, call: Call) -> float:
    """The largest max|a - b| / max|b| over outputs and gradients, b being the oracle's."""
    inputs = row.make(min(row.checked, row.size))
    exact_inputs = _copies(inputs, torch.float64)
    exact = _outputs(row.eager(*exact_inputs))
    wanted = [x for x in exact_inputs if isinstance(x, Tensor) and x.requires_grad]
    found_inputs = _copies(inputs)
    found = _outputs(call(*found_inputs))[: len(exact)]
    generator = torch.Generator(DEVICE).manual_seed(2)
    upstream = [torch.randn(y.shape, generator=generator, device=DEVICE).to(f.dtype) for y, f in zip(exact, found, strict=True)]
    pairs = list(zip(found, exact, strict=True))
    if wanted:
        leaves = [x for x in found_inputs if isinstance(x, Tensor) and x.requires_grad]
        exact_gradients = torch.autograd.grad(exact, wanted, [g.double() for g in upstream])  # first: a peer may write over its upstream
        pairs += zip(torch.autograd.grad(found, leaves, upstream), exact_gradients, strict=True)
    return max(float(((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)).detach()) for a, b in pairs)


# ---- timing ----


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of ``run``, the L2 cache emptied before each call. The host's part is hidden only as far as it fits in the emptying."""
    return float(triton.testing.do_bench(run, warmup=10, rep=80, return_mode="median"))


def host_microseconds(run: Callable[[], Any], calls: int = 20) -> float:
    """Time a call keeps the host, its work queued; the least of five rounds."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return min(rounds)


def graph_milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a replay of ``run``, captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)


def peak_gib(run: Callable[[], Any]) -> float:
    """Device memory a call takes at its peak, over what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def rates() -> tuple[float, float]:
    """Bytes a second of a copy of 1 GiB (read and written), FLOPs a second of an 8192^3 product in bf16."""
    source = torch.randn(GIB // 4, device="cuda")
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = milliseconds(lambda: a @ b)
    return 2 * GIB / copy * 1e3, 2 * 8192**3 / product * 1e3


def versions() -> dict[str, str]:
    """The GPU and the packages in use; what is not installed is left out."""
    found = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


# ---- a row ----


def _sides(row: Row, with_compile: bool) -> Iterator[tuple[str, Call]]:
    yield "ours", row.ours
    if row.time_eager:
        yield "torch", row.eager
    if row.time_eager and with_compile:
        torch._dynamo.reset()
        yield "compile", torch.compile(row.eager)
    yield from row.peers.items()


def _measure(row: Row, side: str, run: Callable[[], Any], floor: float) -> dict[str, float]:
    ms = milliseconds(run)
    found = {"ms": ms, "x_floor": ms / floor, "peak_gib": peak_gib(run)}
    if ms < 2.0:
        found["host_us"] = host_microseconds(run)
    if row.graph and side in ("ours", "torch"):
        found["graph_ms"] = graph_milliseconds(run)
    return found


def measure(row: Row, bandwidth: float, flop_rate: float, *, with_compile: bool = True, only: list[str] | None = None) -> dict[str, Any]:
    """Every side of a row, checked and timed: what the results file holds of it."""
    found: dict[str, Any] = {"op": row.op, "shape": row.shape, "floor_ms": {}, "error": {}, "fwd": {}, "full": {}}
    modes = {"fwd": (forward_only, row.forward), "full": (forward_backward, row.full)}
    for side, call in _sides(row, with_compile):
        if only and side not in only:
            continue
        try:
            error = found["error"][side] = distance(row, call)
            if not error <= row.tolerance:
                raise RuntimeError(f"off by {error:.2e} of the largest value; at most {row.tolerance:.0e}")
            inputs = row.make(row.size)
            for mode, (prepare, work) in modes.items():
                floor = found["floor_ms"][mode] = max(work.bytes / bandwidth, work.flops / flop_rate) * 1e3
                if floor and (mode == "fwd" or any(isinstance(x, Tensor) and x.requires_grad for x in inputs)):
                    found[mode][side] = _measure(row, side, prepare(call, inputs), floor)
        except Exception as e:  # a side that cannot: its row says so, and the others go on
            found.setdefault("failed", {})[side] = f"{type(e).__name__}: {e}"[:300]
        inputs = None
        gc.collect()
        torch.cuda.empty_cache()
    return found
