"""What every op promises, tested once for all of them: each test walks the table of cases.

Purity, wanted gradients, precision, determinism, any size and layout, errors. What concerns graphs and compilers is in
test_contract_compiled.py. Triton kernels run on the GPU, or in Triton's interpreter (fp32 and fp16, small sizes).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels import _triton

from ..conftest import GPU
from .cases import CASES, Case, Wrong
from .harness import assert_near, assert_same_bits, call, draw, flatten, grown, incoming, leaves, oracle, remade, run, same_bits

HALVES = [torch.float16, torch.bfloat16]
TRITON = [("triton", dtype) for dtype in [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]]
RUNS = [("reference", torch.float32), *TRITON]
PRECISIONS = [*(("reference", dtype) for dtype in [torch.float32, *HALVES]), *TRITON]


def each_run(runs: list[tuple[str, torch.dtype]]) -> Callable[..., Any]:
    """Parametrize over cases, implementations and dtypes; ids such as swiglu-triton-float32."""
    rows = [
        pytest.param(case, mode, dtype, id=f"{case}-{mode}-{str(dtype).removeprefix('torch.')}") for case in CASES for mode, dtype in runs
    ]
    return pytest.mark.parametrize("case, mode, dtype", rows)


each_case = pytest.mark.parametrize("case", CASES, ids=str)


def some_rows(case: Case) -> int:
    """A row count that is no power of two, of those the case allows."""
    return max(rows for rows in case.rows if rows <= 7)


def test_every_op_has_a_case() -> None:
    assert {case.op for case in CASES} == set(kernels.OPS)
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)


@each_case
def test_reference_gradcheck(case: Case) -> None:
    """The oracle itself, against finite differences in fp64."""
    inputs = draw(case, min(rows for rows in case.rows if rows >= 2), torch.float64, "cpu")

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        changed = inputs
        for name, value in zip(inputs.differentiable, values, strict=True):
            changed = changed.replaced(name, value)
        with kernels.use("reference"):
            return tuple(o for o in call(case.op, changed) if o.requires_grad)

    values = [inputs.named()[name].detach().clone().requires_grad_() for name in inputs.differentiable]
    try:
        torch.autograd.gradcheck(function, values, fast_mode=True)
    except torch.autograd.gradcheck.GradcheckError as error:
        pytest.fail(f"{case}: {error}")


@each_run(PRECISIONS)
def test_precision(case: Case, mode: str, dtype: torch.dtype, device: str) -> None:
    """Outputs and gradients against fp64 at every row count; dtypes and shapes equal to the reference's."""
    for rows in case.rows:
        inputs = draw(case, rows, dtype, device)
        got = run(case.op, inputs, mode)
        assert_near(case, got, oracle(case.op, inputs), dtype)
        plain = run(case.op, inputs, "reference")
        assert [(o.dtype, o.shape) for o in got.outputs] == [(o.dtype, o.shape) for o in plain.outputs]
        assert {n: g.dtype for n, g in got.grads.items()} == {n: inputs.named()[n].dtype for n in inputs.differentiable}


@each_run(RUNS)
def test_pure_and_deterministic(case: Case, mode: str, dtype: torch.dtype, device: str) -> None:
    """Inputs and incoming gradients keep their bits; a second backward and a second call give the first one's bits."""
    inputs = draw(case, some_rows(case), dtype, device)
    kept = {name: x.clone() for name, x in inputs.tensors().items()}
    leaf = leaves(inputs, inputs.differentiable)
    wanted = [leaf.named()[name] for name in inputs.differentiable]
    with kernels.use(mode):
        outputs = [o for o in call(case.op, leaf) if o.requires_grad]
        before = [o.detach().clone() for o in outputs]
        arriving = incoming(outputs)
        arriving_kept = [g.clone() for g in arriving]
        first = torch.autograd.grad(outputs, wanted, arriving, retain_graph=True, materialize_grads=True)
        first_kept = [g.clone() for g in first]
        second = torch.autograd.grad(outputs, wanted, arriving, materialize_grads=True)
    for name, x in inputs.tensors().items():
        assert same_bits(x, kept[name]) and x._version == 0, f"{case}: input {name} was written"
    for g, g_kept in zip(arriving, arriving_kept, strict=True):
        assert same_bits(g, g_kept) and g._version == 0, f"{case}: an incoming gradient was written"
    for o, o_kept in zip(outputs, before, strict=True):
        assert same_bits(o, o_kept), f"{case}: the backward wrote an output"
    for name, a, a_kept, b in zip(inputs.differentiable, first, first_kept, second, strict=True):
        assert same_bits(a, a_kept), f"{case}: a second backward wrote the first one's gradient of {name}"
        assert same_bits(a, b), f"{case}: a second backward changed the gradient of {name}"
    again = run(case.op, inputs, mode)
    assert_same_bits(again, run(case.op, inputs, mode), f"{case}: repeated calls")


REMADE = {"rms_norm", "add_rms_norm", "swiglu", "geglu", "swiglu_packed", "geglu_packed"}


@each_run(RUNS)
def test_outputs_made_again_have_the_same_bits(case: Case, mode: str, dtype: torch.dtype, device: str) -> None:
    """Where an op declares an output, the backward of what follows gets it anew, bit for bit; other outputs are kept."""
    for rows in case.rows:
        kernels.explain(reset=True)
        for output, given in remade(case.op, draw(case, rows, dtype, device), mode):
            assert same_bits(output, given), f"{case}: made again, the output differs"
        count = [line.split()[:4] for line in kernels.explain(reset=True).splitlines() if "recompute='cheap'" in line]
        assert count == ([[case.op, "remade", mode, "1"]] if case.op in REMADE else [])


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every choice of wanted gradients but all and none, singles and all-but-one first; 32 at most (the interpreter: 8)."""
    sizes = sorted(range(1, len(names)), key=lambda size: min(size, len(names) - size))
    choices = itertools.chain.from_iterable(itertools.combinations(names, size) for size in sizes)
    return list(itertools.islice(choices, 32 if GPU else 8))


@each_run(RUNS)
def test_wanted_gradients_alone(case: Case, mode: str, dtype: torch.dtype, device: str) -> None:
    """Each subset of requires_grad gives the full run's gradients (fp64's, within the bound), and none to others; no_grad its outputs."""
    inputs = draw(case, some_rows(case), dtype, device)
    full, exact = run(case.op, inputs, mode), oracle(case.op, inputs)
    for wanted in subsets(inputs.differentiable):
        got = run(case.op, inputs, mode, wanted=wanted)
        grads = {name: exact.grads[name] for name in wanted}
        assert_near(case, got, type(exact)(exact.outputs, grads), dtype)
    with torch.no_grad():
        plain = run(case.op, leaves(inputs, inputs.differentiable), mode, wanted=())
    assert not any(o.requires_grad for o in plain.outputs)
    assert_near(case, plain, type(exact)(exact.outputs, {}), dtype)
    with kernels.use(mode):
        frozen = call(case.op, leaves(inputs, ()))
    assert not any(o.requires_grad for o in frozen)
    assert [o.dtype for o in plain.outputs] == [o.dtype for o in full.outputs]


@each_run(RUNS)
def test_accumulated_gradients(case: Case, mode: str, dtype: torch.dtype, device: str) -> None:
    """Through .backward() and .grad: a leaf that wants no gradient has none, and two backwards add up."""
    inputs = draw(case, some_rows(case), dtype, device)
    for wanted in dict.fromkeys((inputs.differentiable[:1], inputs.differentiable[-1:])):
        leaf = leaves(inputs, wanted)
        with kernels.use(mode):
            for _ in range(2):
                outputs = call(case.op, leaf)
                torch.autograd.backward(*grown(outputs, incoming(outputs)))
        once = run(case.op, inputs, mode, wanted=wanted)
        for name, x in leaf.tensors().items():
            if name not in wanted:
                assert x.grad is None, f"{case}: {name} wants no gradient and got one"
            else:
                zero = torch.zeros_like(x)
                assert same_bits(zero if x.grad is None else x.grad, once.grads[name] + once.grads[name])


@each_run(RUNS)
def test_aliased_inputs(case: Case, mode: str, dtype: torch.dtype, device: str) -> None:
    """One tensor passed twice, for each pair of inputs that allows it."""
    inputs = draw(case, some_rows(case), dtype, device)
    named = inputs.named()
    pairs = [
        (a, b)
        for a, b in itertools.combinations(inputs.differentiable, 2)
        if named[a].shape == named[b].shape and named[a].dtype == named[b].dtype
    ]
    for a, b in pairs[:4]:
        aliased = inputs.replaced(b, named[a])
        wanted = tuple(name for name in inputs.differentiable if name != b)
        assert_near(case, run(case.op, aliased, mode, wanted=wanted), oracle(case.op, aliased, wanted=wanted), dtype)


@each_run(RUNS)
def test_expanded_incoming_gradients(case: Case, mode: str, dtype: torch.dtype, device: str) -> None:
    """Gradients of stride 0, as .sum() makes them, are right, and have the bits of the same gradients laid out in memory."""
    inputs = draw(case, some_rows(case), dtype, device)

    def ones(outputs: Any) -> list[Tensor]:
        return [torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs]

    expanded = run(case.op, inputs, mode, incoming=ones)
    assert_near(case, expanded, oracle(case.op, inputs, incoming=ones), dtype)
    if mode == "triton":  # torch's own products may take another path for another layout
        dense = run(case.op, inputs, mode, incoming=lambda outputs: [g.contiguous() for g in ones(outputs)])
        assert_same_bits(expanded, dense, f"{case}: stride-0 gradients")


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() >= 2 else x


def _permuted(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() >= 3 else x


def _sliced(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]] if x.dim() else x


def _strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2] if x.dim() else x


@pytest.mark.parametrize("layout", [_transposed, _permuted, _sliced, _strided], ids=lambda f: f.__name__.strip("_"))
@each_run(RUNS)
def test_layouts(case: Case, mode: str, dtype: torch.dtype, device: str, layout: Callable[[Tensor], Tensor]) -> None:
    """Inputs and incoming gradients that are not contiguous."""
    inputs = draw(case, some_rows(case), dtype, device)
    laid_out = inputs.map(lambda _, x: layout(x))
    got = run(case.op, laid_out, mode, incoming=lambda outputs: [layout(g) for g in incoming(outputs)])
    assert_near(case, got, oracle(case.op, inputs), dtype)


@contextlib.contextmanager
def no_launch() -> Any:
    def refuse(kernel: Any, *_: Any) -> None:
        raise AssertionError(f"{kernel} was launched before its arguments were checked")

    with _triton.observe_launches(refuse):
        yield


@pytest.mark.parametrize("case, wrong", [pytest.param(c, w, id=f"{c}-{w.label}") for c in CASES for w in c.wrong])
@pytest.mark.parametrize("mode", ["auto", "triton"])
def test_bad_calls_are_refused(case: Case, wrong: Wrong, mode: str, device: str) -> None:
    inputs = draw(case, some_rows(case), torch.float32, device)
    args, kwargs = list(inputs.args), dict(inputs.kwargs)
    wrong.change(args, kwargs)
    with kernels.use(mode), no_launch(), pytest.raises(wrong.error, match=wrong.match) as raised:
        getattr(kernels, case.op)(*args, **kwargs)
    assert str(raised.value).startswith(f"{case.op}: "), "an error starts with the op's name"


@each_case
def test_mixed_devices_are_refused(case: Case, device: str) -> None:
    """Any tensor on another device than the first: an error that names the argument's device, before any launch."""
    inputs = draw(case, some_rows(case), torch.float32, device)
    for name in list(inputs.tensors())[1:]:
        elsewhere = inputs.replaced(name, inputs.named()[name].to("meta"))
        with no_launch(), pytest.raises(ValueError, match=rf"{case.op}: .*meta"):
            getattr(kernels, case.op)(*elsewhere.args, **elsewhere.kwargs)


@each_case
def test_what_is_no_tensor_is_refused(case: Case, device: str) -> None:
    inputs = draw(case, some_rows(case), torch.float32, device)
    wrong_dtype = torch.int32 if inputs.args[0].is_floating_point() else torch.float32
    for bad in ([1.0, 2.0], None, inputs.args[0].to(wrong_dtype), inputs.args[0].bool()):
        with no_launch(), pytest.raises(TypeError, match=rf"^{case.op}: "):
            getattr(kernels, case.op)(bad, *inputs.args[1:], **inputs.kwargs)


@pytest.mark.parametrize("case", [c for c in CASES if c.eager], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_autocast_follows_eager(case: Case, weights: torch.dtype, device: str) -> None:
    """Under autocast, and with its inputs in two dtypes, an op gives the eager formula's dtypes and numbers."""
    inputs = draw(case, some_rows(case), torch.float32, device)
    last = inputs.differentiable[-1]
    inputs = inputs.replaced(last, inputs.named()[last].to(weights))
    with torch.autocast(device, torch.bfloat16), kernels.use("triton" if GPU else "reference"):
        ours, eager = call(case.op, inputs), flatten(case.eager(*inputs.args, **inputs.kwargs))
    for a, b in zip(ours, eager, strict=True):
        assert a.dtype == b.dtype, f"{case}: {a.dtype} where eager code gives {b.dtype}"
        bound = case.ulps * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * b.abs().max().item())
