"""The table of cases that the contract tests walk: one row an op and option set.

A row says how to draw inputs and which bad calls are refused; the contract (purity, wanted gradients, precision, determinism,
no host syncs, compilation, any size, errors) is tested by test_contract.py for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Draw:
    """Random inputs on one device in one dtype. The same seed gives the same numbers on every device and in every dtype."""

    def __init__(self, seed: int, device: str | torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """A floating tensor, rounded once to ``dtype`` (default: this draw's)."""
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * std + mean
        if self.dtype != torch.float64:  # every dtype sees the same numbers: representable in bf16 where the op is tested in it
            x = x.to(torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float16 if self.dtype == torch.float16 else torch.float32)
        return x.to(dtype or self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(self.device)


class HollowDraw(Draw):
    """Tensors of the right shapes without numbers (memory that is never touched), for launches that are recorded and not run."""

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, low, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Wrong:
    """A bad call: ``change`` edits (args, kwargs) of a good one; ``error`` must be raised with a message matching ``match``."""

    label: str
    change: Callable[[list[Any], dict[str, Any]], Any]
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class Case:
    """One op with one set of options.

    ``make(draw, rows)`` returns (args, kwargs) for that many tokens; each floating tensor among them is a differentiable input unless
    its keyword (or the position as a string, "2") is in ``constants``. ``ulps`` bounds each output's and gradient's distance from
    fp64 (max|a - b| / max|b|) in units of its dtype's epsilon. Rows in ``rows`` are walked, with one row and none among them
    where the op has such a call.

    Options: ``inside`` is set where results wider than the inputs still carry a rounding to the inputs' dtype (a product in bf16): they
    are then bounded by its epsilon. ``eager`` is the same call in plain eager code, compared under autocast. ``large`` is ``make`` at the
    sizes of a published model: what is compiled ahead of time, on hollow tensors that hold no numbers.
    """

    op: str
    make: Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]
    label: str = ""
    constants: tuple[str, ...] = ()
    ulps: float = 4.0
    rows: tuple[int, ...] = (0, 1, 2, 7, 33)
    wrong: tuple[Wrong, ...] = ()
    inside: bool = False
    eager: Callable[..., Any] | None = None
    large: Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op


CASES: list[Case] = []

# ---- norms: rms_norm, add_rms_norm ----

# ---- rope: rope, qk_norm_rope ----

# ---- gated products: swiglu, geglu ----


def _glu_pair(width: int, **options: Any) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.normal(rows, width, std=2.0), draw.normal(rows, width)), options)


def _glu_packed(width: int, **options: Any) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.normal(rows, 2 * width, std=2.0),), options)


def _glu_cases(op: str, label: str, activation: Callable[[Tensor], Tensor], **options: Any) -> list[Case]:
    wrong = [
        Wrong("up-shape", lambda args, kwargs: args.__setitem__(1, args[1][..., :-1]), ValueError, "up has shape"),
        Wrong("up-dtype", lambda args, kwargs: args.__setitem__(1, args[1].long()), TypeError, "up has dtype int64"),
    ]
    wrong_packed = [Wrong("odd", lambda args, kwargs: args.__setitem__(0, args[0][..., 1:]), ValueError, "gate_up has shape")]
    if options:
        unknown = Wrong("form", lambda args, kwargs: kwargs.update(approximate="sigmoid"), ValueError, "approximate is 'sigmoid'")
        wrong, wrong_packed = [*wrong, unknown], [*wrong_packed, unknown]

    def eager_packed(gate_up: Tensor, **options: Any) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return [
        Case(
            op,
            _glu_pair(67, **options),
            label,
            wrong=tuple(wrong),
            eager=lambda gate, up, **options: activation(gate) * up,
            large=_glu_pair(14336, **options),
        ),
        Case(
            op + "_packed",
            _glu_packed(67, **options),
            label,
            wrong=tuple(wrong_packed),
            eager=eager_packed,
            large=_glu_packed(14336, **options),
        ),
    ]


CASES += _glu_cases("swiglu", "", torch.nn.functional.silu)
CASES += _glu_cases("geglu", "tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh"), approximate="tanh")
CASES += _glu_cases("geglu", "erf", torch.nn.functional.gelu, approximate="none")

# ---- embedding ----


def _embedding(vocab_size: int, hidden_size: int) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.integers(0, vocab_size, rows), draw.normal(vocab_size, hidden_size)), {})


CASES.append(
    Case(
        "embedding",
        _embedding(5, 67),  # few ids: each stands several times
        wrong=(
            Wrong("ids-float", lambda args, kwargs: args.__setitem__(0, args[0].float()), TypeError, "ids has dtype float32"),
            Wrong("weight-shape", lambda args, kwargs: args.__setitem__(1, args[1][0]), ValueError, "weight has shape"),
        ),
        eager=torch.nn.functional.embedding,
        large=_embedding(32768, 4096),
    )
)

# ---- cross-entropy ----

# ---- linear cross-entropy ----

# ---- attention ----

# ---- hyper-connections ----


def _fp32(draw: Draw) -> torch.dtype:
    """The coefficients' dtype: fp32 beside half streams, as models hold them."""
    return torch.float64 if draw.dtype == torch.float64 else torch.float32


def _mhc_coefficients(
    n: int, hidden_size: int, groups: int = 3, phi_wide: bool = False, **options: Any
) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        columns = n * n + 2 * n if groups == 3 else n
        phi = draw.normal(n * hidden_size, columns, std=(n * hidden_size) ** -0.5, dtype=_fp32(draw) if phi_wide else None)
        parameters = (draw.normal(columns, dtype=_fp32(draw)), draw.normal(groups, mean=1.0, std=0.5, dtype=_fp32(draw)))
        return (draw.normal(rows, n, hidden_size), phi, *parameters), {"eps": 1e-6, **options}

    return make


def _mhc_read(n: int, hidden_size: int) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.normal(rows, n, hidden_size), draw.normal(rows, n, dtype=_fp32(draw))), {})


def _mhc_write(n: int, hidden_size: int) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        coefficients = (draw.normal(rows, n, dtype=_fp32(draw)), draw.normal(rows, n, n, dtype=_fp32(draw)))
        return (draw.normal(rows, n, hidden_size), draw.normal(rows, hidden_size), *coefficients), {}

    return make


def _cut(position: int) -> Callable[[list[Any], dict[str, Any]], None]:
    return lambda args, kwargs: args.__setitem__(position, args[position][..., :-1])


_MHC_WRONG = (
    Wrong("phi-shape", _cut(1), ValueError, "phi has shape"),
    Wrong("bias-shape", _cut(2), ValueError, "bias has shape"),
    Wrong("alpha-shape", _cut(3), ValueError, "alpha has shape"),
    Wrong("streams", lambda args, kwargs: args.__setitem__(0, args[0].repeat(1, 9, 1)), ValueError, "1 <= n <= 8"),
    Wrong("eps", lambda args, kwargs: kwargs.update(eps=-1.0), ValueError, "eps is -1.0"),
)
# 16 ulps: a mixing entry passes through 2 divisions an iteration and its gradient through 4, each good to 2 ulps on a GPU.
CASES += [
    Case(
        "mhc_coefficients",
        _mhc_coefficients(4, 37, iterations=6),
        ulps=16.0,
        wrong=(
            *_MHC_WRONG,
            Wrong("iterations", lambda args, kwargs: kwargs.update(iterations=0), ValueError, "iterations is 0"),
            Wrong("layout", lambda args, kwargs: kwargs.update(res_layout="rows"), ValueError, "res_layout is 'rows'"),
        ),
        large=_mhc_coefficients(4, 4096),
    ),
    Case(
        "mhc_coefficients",
        _mhc_coefficients(3, 133, phi_wide=True, iterations=4, pre_eps=1e-6, sinkhorn_eps=1e-6, res_layout="in_out"),
        "in_out",
        ulps=16.0,
        inside=True,  # a phi wider than x is multiplied in two terms of bf16, or in tf32
        large=_mhc_coefficients(4, 4096, phi_wide=True, pre_eps=1e-6, sinkhorn_eps=1e-6, res_layout="in_out"),
    ),
    Case(
        "mhc_pre",
        _mhc_coefficients(4, 133, groups=1, phi_wide=True),  # a width at which alpha's gradient, one signed sum, does not cancel
        ulps=16.0,
        inside=True,
        wrong=_MHC_WRONG,
        large=_mhc_coefficients(4, 4096, groups=1, phi_wide=True),
    ),
]
CASES += [
    Case("mhc_read", _mhc_read(n, 67), f"{n}", wrong=(Wrong("pre-shape", _cut(1), ValueError, "pre has shape"),), large=_mhc_read(n, 4096))
    for n in (3, 4)
]
CASES += [
    Case(
        "mhc_write",
        _mhc_write(n, 67),
        f"{n}",
        wrong=(
            Wrong("y-shape", _cut(1), ValueError, "y has shape"),
            Wrong("post-shape", _cut(2), ValueError, "post has shape"),
            Wrong("mix-shape", _cut(3), ValueError, "mix has shape"),
        ),
        large=_mhc_write(n, 4096),
    )
    for n in (3, 4)
]
