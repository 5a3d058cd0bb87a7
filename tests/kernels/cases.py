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
    """

    op: str
    make: Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]
    label: str = ""
    constants: tuple[str, ...] = ()
    ulps: float = 4.0
    rows: tuple[int, ...] = (0, 1, 2, 7, 33)
    wrong: tuple[Wrong, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op


CASES: list[Case] = []

# ---- norms: rms_norm, add_rms_norm ----

# ---- rope: rope, qk_norm_rope ----

# ---- gated products: swiglu, geglu ----

# ---- embedding ----

# ---- cross-entropy ----

# ---- linear cross-entropy ----

# ---- attention ----

# ---- hyper-connections ----
