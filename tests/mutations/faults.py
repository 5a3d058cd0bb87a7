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

# ---- hyper-connections ----


def _mhc(*forms: str) -> tuple[str, ...]:
    return tuple(f"test_mhc.py::test_kernels_against_fp64[float32-{form}]" for form in forms)


_MHC, _PUBLISHED = _mhc("paper-3", "published-3"), _mhc("published-3")
_FEW_ITERATIONS = ("test_mhc.py::test_ragged_sizes[13-5-129]",)  # once Sinkhorn has converged, a column's logits can all shift unseen
_C, _S = "mhc_coefficients_triton.py", "mhc_stream.py"
_EDGE = "column_mask = columns < hidden_size"

FAULTS += [
    Fault("mhc-squares-sign", _C, "squares += wide * wide", "squares -= wide * wide", _MHC),
    Fault("mhc-project-edge", _C, f"{_EDGE}\n        x = ", f"{_EDGE} - 1\n        x = ", _MHC),
    Fault("mhc-post-factor", _C, "post = 2.0 * tl", "post = 1.0 * tl", _MHC),
    Fault("mhc-orientation", _C, "into * N + out if IN_OUT else out * N + into", "out * N + into if IN_OUT else into * N + out", _MHC),
    Fault("mhc-rows-first", _C, "return mix / rows[:, :, None], columns", "return mix / rows[:, None, :], columns", _MHC),
    Fault("mhc-sinkhorn-eps", _C, "columns + sinkhorn_eps, 0.0", "columns - sinkhorn_eps, 0.0", _PUBLISHED),
    Fault("mhc-walk-back", _C, "mix = mix * columns[:, None, :]", "mix = mix / columns[:, None, :]", _MHC),
    Fault("mhc-log-start-sign", _C, "grad = grad - softmax * tl.sum(", "grad = grad + softmax * tl.sum(", _FEW_ITERATIONS),
    Fault("mhc-eps-start-sign", _C, "grad = softmax * (grad - tl", "grad = softmax * (grad + tl", _PUBLISHED),
    Fault("mhc-radial-sign", _C, "-rstd * rstd * inner", "rstd * rstd * inner", _MHC),
    Fault("mhc-project-backward-edge", _C, "row_mask = rows < last", "row_mask = rows < last - 1", _MHC),
    Fault("mhc-read-sign", _S, "tl.sum(pre * x, axis=0)", "tl.sum(-pre * x, axis=0)", _MHC),
    Fault("mhc-read-backward-sign", _S, "products += grad *", "products -= grad *", _MHC),
    Fault("mhc-write-sign", _S, "post * y + tl.sum(row", "post * y - tl.sum(row", _MHC),
    Fault("mhc-write-edge", _S, f"{_EDGE}\n    streams", f"{_EDGE} - 1\n    streams", _MHC),
    Fault("mhc-write-backward-edge", _S, f"{_EDGE}\n        mask", f"{_EDGE} - 1\n        mask", _MHC),
    Fault(
        "mhc-write-backward-transposed", _S, "(token * N + streams) * N + into, streams", "(token * N + into) * N + streams, streams", _MHC
    ),
    Fault("mhc-mix-gradient-transposed", _S, "grad[:, None, :] * x[None, :, :]", "x[:, None, :] * grad[None, :, :]", _MHC),
]

# ---- norms ----

_NORM = precision("rms_norm", "add_rms_norm-gemma")
_ADD = precision("add_rms_norm")
_WIDE = precision("rms_norm-wide")
_NORMS = "norms_triton.py"
_WIDE_DX = "products = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)\n    for start in range(0, WIDTH, BLOCK_COLUMNS):\n"
_WIDE_DX += "        columns = start + tl.arange(0, BLOCK_COLUMNS)\n        mask = columns < WIDTH"

FAULTS += [
    Fault("norm-offset-sign", _NORMS, ".to(tl.float32) + offset", ".to(tl.float32) - offset", precision("rms_norm-gemma")),
    Fault("norm-add-sign", _NORMS, "x += tl.load(residual_ptr", "x -= tl.load(residual_ptr", _ADD),
    Fault("norm-forward-sign", _NORMS, "y = _apply_weight(x * rstd[", "y = _apply_weight(-x * rstd[", _NORM),
    Fault("norm-forward-edge", _NORMS, "(columns < WIDTH)\n    at", "(columns < WIDTH - 1)\n    at", _NORM),
    Fault("norm-wide-forward-sign", _NORMS, "_apply_weight(x * rstd,", "_apply_weight(-x * rstd,", _WIDE),
    Fault("norm-wide-forward-edge", _NORMS, "squares += x * x", "squares += tl.where(columns < WIDTH - 1, x * x, 0.0)", _WIDE),
    Fault("norm-backward-sign", _NORMS, "rstd * (dy - normed *", "rstd * (dy + normed *", _NORM),
    Fault("norm-backward-weight-sign", _NORMS, "dweight += dy * normed", "dweight -= dy * normed", _NORM),
    Fault("norm-backward-edge", _NORMS, "tl.range(program, tl.cdiv(rows,", "tl.range(program, tl.cdiv(rows - 1,", _NORM),
    Fault("norm-backward-sum-sign", _NORMS, "dx += tl.load(dsum_ptr + row[", "dx -= tl.load(dsum_ptr + row[", _ADD),
    Fault("norm-wide-dx-sign", _NORMS, "products += dy *", "products -= dy *", _WIDE),
    Fault("norm-wide-dx-edge", _NORMS, _WIDE_DX, _WIDE_DX + " - 1", _WIDE),
    Fault("norm-wide-dweight-sign", _NORMS, "dweight += dy * (x *", "dweight -= dy * (x *", _WIDE),
    Fault("norm-wide-dweight-edge", _NORMS, "range(split, tl.cdiv(rows,", "range(split, tl.cdiv(rows - 1,", _WIDE),
]

# ---- rope ----

_ROPE = precision("rope", "rope-partial")
_ROPE_PARTIAL = precision("rope-partial")
_QK = precision("qk_norm_rope", "qk_norm_rope-gemma-partial")
_QK_PARTIAL = precision("qk_norm_rope-gemma-partial")
_QK_NORM_ROPE = "qk_norm_rope_triton.py"

FAULTS += [
    Fault("rope-sign", "rope.py", "return first_cos - second_sin,", "return first_cos + second_sin,", _ROPE + _QK),
    Fault("rope-backward-sign", "rope.py", "sin = -sin", "sin = sin * 1.0", _ROPE),
    Fault("rope-table-edge", "rope.py", "mask=columns < HALF,", "mask=columns < HALF - 1,", _ROPE + _QK),
    Fault("rope-column-edge", "rope.py", "mask = exists & (columns < HALF)", "mask = exists & (columns < HALF - 1)", _ROPE),
    Fault("rope-head-edge", "rope.py", "exists = (heads < HEADS)", "exists = (heads < HEADS - 1)", _ROPE),
    Fault("rope-rest-edge", "rope.py", "(rest < HEAD_DIM)", "(rest < HEAD_DIM - 1)", _ROPE_PARTIAL),
    Fault("qk-weigh", _QK_NORM_ROPE, "(normed * scale)", "(normed - scale)", _QK),
    Fault("qk-forward-edge", _QK_NORM_ROPE, "(columns < HALF)\n        first", "(columns < HALF - 1)\n        first", _QK),
    Fault("qk-forward-rest-sign", _QK_NORM_ROPE, "squares += tl.sum(passed", "squares -= tl.sum(passed", _QK_PARTIAL),
    Fault("qk-backward-angle-sign", _QK_NORM_ROPE, "cos, -sin, tl.float32", "cos, sin, tl.float32", _QK),
    Fault("qk-backward-sign", _QK_NORM_ROPE, "(grad_first - first * mean)", "(grad_first + first * mean)", _QK),
    Fault("qk-backward-weight-sign", _QK_NORM_ROPE, "dsecond += grad_second", "dsecond -= grad_second", _QK),
    Fault("qk-backward-edge", _QK_NORM_ROPE, "(columns < HALF)\n        rest_mask", "(columns < HALF - 1)\n        rest_mask", _QK),
    Fault("qk-backward-rest-sign", _QK_NORM_ROPE, "products += tl.sum(grad_passed", "products -= tl.sum(grad_passed", _QK_PARTIAL),
    Fault("qk-backward-last-token", _QK_NORM_ROPE, "tl.program_id(0), num_tokens,", "tl.program_id(0), num_tokens - 1,", _QK),
]
