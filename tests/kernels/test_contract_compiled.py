"""What every op promises to graphs and compilers: operators that trace, no host syncs, capture, and few compiles.

Here each test walks one case an op without a GPU (a graph through the interpreter is slow), all of them with one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ligerformer import kernels
from ligerformer.kernels import _triton

from ..conftest import GPU, needs_gpu
from .cases import CASES, Case
from .harness import Inputs, Result, arriving, assert_near, assert_same_bits, call, draw, grown, incoming, leaves, oracle, run

DTYPE = torch.bfloat16 if GPU else torch.float32
FIRST = list({case.op: case for case in reversed(CASES)}.values())[::-1]  # one case an op
WALKED = CASES if GPU else FIRST
ROWS = (2, 15, 16, 17, 4095, 4096, 4097) if GPU else (2, 3, 7, 8)
KERNEL_COMPILES = 3  # heuristic buckets over all row counts

each_case = pytest.mark.parametrize("case", WALKED, ids=str)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def some_rows(case: Case) -> int:
    return max(rows for rows in case.rows if rows <= 7)


class _Recorder(TorchDispatchMode):
    """The calls of this package's operators that pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ligerformer":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@each_case
def test_operators_are_sound(case: Case, device: str) -> None:
    """torch's own check of each operator that the case calls: schema (nothing aliased or written), fake tensors, tracing."""
    with _Recorder() as recorder:
        run(case.op, draw(case, some_rows(case), torch.float32, device), "triton")
    assert recorder.calls, f"{case}: no ligerformer operator ran"
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for operator, args, kwargs in recorder.calls:
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        try:
            torch.library.opcheck(operator, args, kwargs, test_utils=checks)
        except torch.testing._internal.optests.generate_tests.OpCheckError as error:
            pytest.fail(f"{case}: {operator}: {error}")


def backend_of(graphs: list[Any], name: str) -> Callable[..., Any]:
    """A torch.compile backend that keeps the graphs it was given."""
    inner = torch._dynamo.lookup_backend(name)

    def backend(graph: Any, example_inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return inner(graph, example_inputs, **options)

    return backend


def compiled(case: Case, graphs: list[Any], backend: str = "aot_eager") -> Callable[[Inputs], Result]:
    """Forward and backward of a case through torch.compile(fullgraph=True)."""
    traced = torch.compile(lambda inputs: call(case.op, inputs), fullgraph=True, backend=backend_of(graphs, backend))

    def step(inputs: Inputs) -> Result:
        leaf = leaves(inputs, inputs.differentiable)
        with kernels.use("triton"):
            outputs = traced(leaf)
            wanted = [leaf.named()[name] for name in inputs.differentiable]
            ends, arriving = grown(outputs, incoming(outputs))
            grads = torch.autograd.grad(ends, wanted, arriving, materialize_grads=True)
        return Result(tuple(o.detach() for o in outputs), dict(zip(inputs.differentiable, grads, strict=True)))

    return step


@each_case
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_gpu)])
def test_compiled_equals_eager(case: Case, backend: str, device: str) -> None:
    """One graph, no break. The traced operators give eager's bits; inductor may fuse what stands around them."""
    if backend == "inductor" and case not in FIRST:
        pytest.skip("inductor compiles one case an op")
    inputs = draw(case, some_rows(case), DTYPE, device)
    graphs: list[Any] = []
    got = compiled(case, graphs, backend)(inputs)
    assert len(graphs) == 1
    if backend == "aot_eager" and case.op != "linear_cross_entropy":  # its products are cuBLAS's, which may choose by addresses
        assert_same_bits(got, run(case.op, inputs, "triton"), f"{case}: compiled and eager")
    assert_near(case, got, oracle(case.op, inputs), DTYPE)


def mark_token_dims(case: Case, inputs: Inputs, device: str) -> None:
    """Tell dynamo which sizes follow the token count: those that differ between two counts."""
    other = draw(case, 11, DTYPE, device).tensors()
    for name, x in inputs.tensors().items():
        for dim, (size, other_size) in enumerate(zip(x.shape, other[name].shape, strict=True)):
            if size != other_size:
                torch._dynamo.mark_dynamic(x, dim)


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.parametrize("marked", [False, True], ids=["automatic", "marked"])
def test_token_counts_do_not_recompile(case: Case, marked: bool, device: str) -> None:
    """The first token count and one general graph; only the general one where the size is marked as dynamic."""
    graphs: list[Any] = []
    traced = torch.compile(lambda inputs: call(case.op, inputs), fullgraph=True, backend=backend_of(graphs, "aot_eager"))
    with kernels.use("triton"):
        for rows in ROWS:
            inputs = draw(case, rows, DTYPE, device)
            leaf = leaves(inputs, inputs.differentiable)
            if marked:
                mark_token_dims(case, leaf, device)
            outputs = [o for o in traced(leaf) if o.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    assert len(graphs) <= (1 if marked else 2), f"{case}: {len(graphs)} graphs over {ROWS} rows"


@needs_gpu
@each_case
def test_kernel_compiles_are_bounded(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all row counts each kernel is compiled once a heuristic bucket, and its buckets are three at most."""
    used: set[Any] = set()
    with _triton.observe_launches(lambda kernel, *_: used.add(kernel)):
        for rows in ROWS:
            run(case.op, draw(case, rows, DTYPE, device), "triton")
    for kernel in used:  # forget what other tests compiled
        monkeypatch.setattr(kernel, "device_caches", collections.defaultdict(kernel.create_binder))
    for rows in ROWS:
        run(case.op, draw(case, rows, DTYPE, device), "triton")
    for kernel in used:
        compiles = len(kernel.device_caches[torch.cuda.current_device()][0])
        assert compiles <= KERNEL_COMPILES, f"{case}: {kernel.__name__} was compiled {compiles} times over {ROWS} rows"


@needs_gpu
@each_case
@pytest.mark.parametrize("mode", ["triton", "reference"])
def test_no_host_sync(case: Case, mode: str, device: str) -> None:
    inputs = draw(case, some_rows(case), DTYPE, device)
    grads = arriving(case.op, inputs, mode)
    run(case.op, inputs, mode)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case.op, inputs, mode, incoming=lambda _: grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@each_case
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "step"])
def test_graph_capture(case: Case, backward: bool, device: str) -> None:
    """Captured once and replayed on other numbers in the same buffers, a call gives eager's bits."""
    inputs, other = (draw(case, some_rows(case), DTYPE, device, seed=seed) for seed in (0, 1))
    wanted = inputs.differentiable if backward else ()
    static = inputs.map(lambda _, x: x.clone())
    grads = arriving(case.op, static, "triton")

    def step(x: Inputs) -> Result:
        return run(case.op, x, "triton", wanted=wanted, incoming=lambda _: grads)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for numbers in (inputs, other):
        for name, x in static.tensors().items():
            x.copy_(numbers.tensors()[name])
        graph.replay()
        assert_same_bits(captured, step(numbers), f"{case}: replayed and eager")
