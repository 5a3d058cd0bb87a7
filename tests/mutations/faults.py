"""Planted faults: each is one wrong sign or edge in a kernel, and the tests that must turn red by a wrong number.

``text`` occurs exactly once in ``file``. A row is worth its run only if nothing crashes: the fault must still compile and launch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``text`` becomes ``replacement`` in ``file`` (in ligerformer/kernels); each of ``tests`` (in tests/kernels) must then fail."""

    label: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


def precision(*cases: str) -> tuple[str, ...]:
    """The contract's precision test of these cases on Triton."""
    return tuple(f"test_contract.py::test_precision[{case}-triton-float32]" for case in cases)


FAULTS: list[Fault] = []

# ---- gated products ----

_GLU = ("swiglu", "swiglu_packed", "geglu-tanh", "geglu-erf")

FAULTS += [
    Fault("glu-forward-sign", "glu.py", "activated = gate * _cdf(", "activated = -gate * _cdf(", precision(*_GLU)),
    Fault("glu-forward-edge", "glu.py", "mask = columns < width\n    gate", "mask = columns < width - 1\n    gate", precision(*_GLU)),
    Fault("glu-backward-sign", "glu.py", "grad_gate = grad * up *", "grad_gate = -grad * up *", precision(*_GLU)),
    Fault("glu-backward-edge", "glu.py", "mask = columns < width\n    grad", "mask = columns < width - 1\n    grad", precision(*_GLU)),
    Fault("glu-backward-up", "glu.py", "(gate * c).to(gate_ptr", "(gate + c).to(gate_ptr", precision(*_GLU)),
    Fault("silu-slope-sign", "glu.py", "c + x * c * tl.sigmoid(-x)", "c - x * c * tl.sigmoid(-x)", precision("swiglu", "swiglu_packed")),
    Fault("gelu-tanh-sign", "glu.py", "(x + 0.044715 *", "(x - 0.044715 *", precision("geglu-tanh", "geglu_packed-tanh")),
    Fault("gelu-tanh-slope-sign", "glu.py", "c + x * inner", "c - x * inner", precision("geglu-tanh", "geglu_packed-tanh")),
    Fault("gelu-tanh-slope-factor", "glu.py", "(1.0 + 0.134145 *", "(1.0 + 0.044715 *", precision("geglu-tanh", "geglu_packed-tanh")),
    Fault("gelu-erf-sign", "glu.py", "(1.0 + tl.erf(", "(1.0 - tl.erf(", precision("geglu-erf", "geglu_packed-erf")),
    Fault("gelu-erf-slope-sign", "glu.py", "c + x * 0.398", "c - x * 0.398", precision("geglu-erf", "geglu_packed-erf")),
]

# ---- embedding ----

_ONE = precision("embedding")
_RUNS = tuple(f"test_embedding.py::test_gradient_of_long_runs[{tokens}-triton]" for tokens in (17, 33, 100))
_LAST_COLUMN = ("mask = columns < hidden_size", "mask = columns < hidden_size - 1")

FAULTS += [
    Fault("embedding-forward-edge", "embedding.py", "    " + _LAST_COLUMN[0], "    " + _LAST_COLUMN[1], _ONE),
    Fault("embedding-forward-first-id", "embedding.py", "valid = (index >= 0) &", "valid = (index > 0) &", _ONE),
    Fault("embedding-backward-sign", "embedding.py", "total += tl.sum(", "total -= tl.sum(", _ONE + _RUNS),
    Fault("embedding-backward-last-token", "embedding.py", "position < num_tokens", "position < num_tokens - 1", _ONE + _RUNS),
    Fault("embedding-backward-edge", "embedding.py", "column_" + _LAST_COLUMN[0], "column_" + _LAST_COLUMN[1], _ONE + _RUNS),
    Fault("embedding-backward-first-id", "embedding.py", "before) & (index >= 0)", "before) & (index > 0)", _ONE),
    Fault("embedding-backward-long-run", "embedding.py", "axis=0) == ROWS", "axis=0) > ROWS", _RUNS),
    Fault("embedding-backward-step", "embedding.py", "position += ROWS", "position += ROWS + 1", _RUNS[1:]),
]
