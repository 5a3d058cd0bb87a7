"""Running a case of the table: its inputs, a call on one implementation with its gradients, the distance from fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels import remake

from .cases import Case, Draw


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call. A tensor's name is its position ("0") or its keyword; ``differentiable`` names those with gradients."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: tuple[str, ...]

    def named(self) -> dict[str, Any]:
        return {**{str(i): a for i, a in enumerate(self.args)}, **self.kwargs}

    def tensors(self) -> dict[str, Tensor]:
        return {name: a for name, a in self.named().items() if isinstance(a, Tensor)}

    def map(self, change: Callable[[str, Tensor], Any]) -> Inputs:
        """``change(name, tensor)`` for each tensor; one that is passed twice is changed once and stays one tensor."""
        seen: dict[int, Any] = {}

        def apply(name: str, a: Any) -> Any:
            if not isinstance(a, Tensor):
                return a
            if id(a) not in seen:
                seen[id(a)] = change(name, a)
            return seen[id(a)]

        args = tuple(apply(str(i), a) for i, a in enumerate(self.args))
        return dataclasses.replace(self, args=args, kwargs={name: apply(name, a) for name, a in self.kwargs.items()})

    def replaced(self, name: str, value: Any) -> Inputs:
        if name.isdigit():
            return dataclasses.replace(self, args=(*self.args[: int(name)], value, *self.args[int(name) + 1 :]))
        return dataclasses.replace(self, kwargs={**self.kwargs, name: value})

    def upcast(self) -> Inputs:
        return self.map(lambda _, x: x.double() if x.is_floating_point() else x)


@dataclasses.dataclass(frozen=True)
class Result:
    """The tensors that a call returned, and the gradients of the wanted inputs by name."""

    outputs: tuple[Tensor, ...]
    grads: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        return {**{f"output {i}": x for i, x in enumerate(self.outputs)}, **{f"gradient of {n}": g for n, g in self.grads.items()}}


def draw(case: Case, rows: int, dtype: torch.dtype, device: str, seed: int = 0, kind: type[Draw] = Draw) -> Inputs:
    args, kwargs = case.make(kind(seed, device, dtype), rows)
    inputs = Inputs(tuple(args), dict(kwargs), ())
    names = (n for n, x in inputs.tensors().items() if x.is_floating_point() and n not in case.constants)
    return dataclasses.replace(inputs, differentiable=tuple(names))


def flatten(out: Any) -> tuple[Tensor, ...]:
    """The tensors of a result: one, a tuple, or a dataclass of them."""
    if isinstance(out, Tensor):
        return (out,)
    if dataclasses.is_dataclass(out):
        out = [getattr(out, field.name) for field in dataclasses.fields(out)]
    return tuple(x for item in out for x in flatten(item)) if isinstance(out, tuple | list) else ()


def call(op: str, inputs: Inputs) -> tuple[Tensor, ...]:
    return flatten(getattr(kernels, op)(*inputs.args, **inputs.kwargs))


def incoming(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A gradient for each output: random sixteenths, which every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(o.shape, generator=generator, dtype=torch.float64) * 16).round().div(16).to(o.dtype).to(o.device) for o in outputs]


def arriving(op: str, inputs: Inputs, mode: str) -> list[Tensor]:
    """The incoming gradients that :func:`run` takes by default, made beforehand (they are drawn on the host)."""
    with kernels.use(mode), torch.no_grad():
        return incoming(call(op, inputs))


def grown(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that hang in a graph, with their gradients: which ones do depends on the inputs that want any."""
    kept = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    return [o for o, _ in kept], [g for _, g in kept]


def leaves(inputs: Inputs, wanted: Sequence[str]) -> Inputs:
    """The same storage under new tensors that want gradients, those in ``wanted`` alone."""
    wanted_ids = {id(inputs.named()[name]) for name in wanted}
    return inputs.map(lambda _, x: x.detach().requires_grad_(id(x) in wanted_ids))


def run(
    op: str, inputs: Inputs, mode: str, wanted: Sequence[str] | None = None, incoming: Callable[..., list[Tensor]] = incoming
) -> Result:
    """Forward, and backward to the ``wanted`` inputs (default: all differentiable ones)."""
    wanted = inputs.differentiable if wanted is None else wanted
    inputs = leaves(inputs, wanted)
    with kernels.use(mode):
        outputs = call(op, inputs)
        if not wanted:
            return Result(outputs, {})
        ends, arriving = grown(outputs, incoming(outputs))
        grads = torch.autograd.grad(ends, [inputs.named()[n] for n in wanted], arriving, materialize_grads=True)
    return Result(tuple(o.detach() for o in outputs), dict(zip(wanted, grads, strict=True)))


def remade(op: str, inputs: Inputs, mode: str) -> list[tuple[Tensor, Tensor]]:
    """Each output with what the backward of a consumer, ones times the output, was given for it within a scope of ``remake``."""
    with kernels.use(mode), remake.scope():
        outputs = [o for o in call(op, leaves(inputs, inputs.differentiable)) if o.requires_grad]
        ones = [torch.ones_like(o, requires_grad=True) for o in outputs]
        products = [one * o for one, o in zip(ones, outputs, strict=True)]
    given = torch.autograd.grad(products, ones, [torch.ones_like(o) for o in outputs])
    return [(o.detach(), g) for o, g in zip(outputs, given, strict=True)]


def oracle(op: str, inputs: Inputs, **options: Any) -> Result:
    """The reference in fp64 on the same numbers."""
    return run(op, inputs.upcast(), "reference", **options)


def distance(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|, infinite where they are not finite in the same places.

    What is zero in exact arithmetic (the gradient of a softmax over one key) is measured against one, the size of the inputs.
    """
    a, b = a.detach().double(), b.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    largest = b.abs().max().item()
    return (a - b).abs().max().item() / (largest if largest > 1e-12 else 1.0)


def assert_near(case: Case, got: Result, exact: Result, dtype: torch.dtype) -> None:
    """Every output and gradient within the case's bound of fp64; the error lists all that are not."""
    assert got.named().keys() == exact.named().keys()
    far = []
    for name, b in exact.named().items():
        a = got.named()[name]
        assert a.shape == b.shape, f"{name} has shape {tuple(a.shape)}; expected {tuple(b.shape)}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                far.append(f"{name}: differs")
            continue
        epsilon = max(torch.finfo(a.dtype).eps, torch.finfo(dtype).eps if case.inside else 0.0)
        ulps = distance(a, b) / epsilon
        if ulps > case.ulps:
            far.append(f"{name}: {ulps:.1f} ulps of {a.dtype} from fp64; at most {case.ulps}")
    assert not far, f"{case}: " + "; ".join(far)


def assert_same_bits(a: Result, b: Result, what: str) -> None:
    assert a.named().keys() == b.named().keys()
    differ = [name for name, x in a.named().items() if not same_bits(x, b.named()[name])]
    assert not differ, f"{what}: {', '.join(differ)} differ"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))
