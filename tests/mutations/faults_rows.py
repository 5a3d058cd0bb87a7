"""Faults in the kernels that walk rows: gated products, embedding, norms, rope, QK-norm with rope."""

from __future__ import annotations

from .fault import Fault, precision, table

ROWS: list[Fault] = []

# ---- gated products ----

_SWIGLU, _TANH, _ERF = precision("swiglu"), precision("geglu-tanh"), precision("geglu-erf")

ROWS += table(
    "kernels/glu.py",
    ("glu-forward-sign", "activated = gate * _cdf(", "activated = -gate * _cdf(", _SWIGLU + _TANH + _ERF),
    ("glu-forward-edge", "mask = columns < width\n    gate", "mask = columns < width - 1\n    gate", precision("swiglu", "swiglu_packed")),
    ("glu-backward-sign", "grad_gate = grad * up *", "grad_gate = -grad * up *", _SWIGLU + _TANH),
    ("glu-backward-edge", "mask = columns < width\n    grad", "mask = columns < width - 1\n    grad", precision("swiglu", "swiglu_packed")),
    ("glu-backward-up", "(gate * c).to(gate_ptr", "(gate + c).to(gate_ptr", _SWIGLU + _ERF),
    ("silu-slope-sign", "c + x * c * tl.sigmoid(-x)", "c - x * c * tl.sigmoid(-x)", precision("swiglu", "swiglu_packed")),
    ("gelu-tanh-sign", "(x + 0.044715 *", "(x - 0.044715 *", _TANH),
    ("gelu-tanh-slope-sign", "c + x * inner", "c - x * inner", _TANH),
    ("gelu-tanh-slope-factor", "(1.0 + 0.134145 *", "(1.0 + 0.044715 *", _TANH),
    ("gelu-erf-sign", "(1.0 + tl.erf(", "(1.0 - tl.erf(", _ERF),
    ("gelu-erf-slope-sign", "c + x * 0.398", "c - x * 0.398", precision("geglu-erf", "geglu_packed-erf")),
)

# ---- embedding ----

_ONE = precision("embedding")
_RUNS = tuple(f"kernels/test_embedding.py::test_gradient_of_long_runs[{tokens}-triton]" for tokens in (17, 33, 100))
_LAST_COLUMN = ("mask = columns < hidden_size", "mask = columns < hidden_size - 1")

ROWS += table(
    "kernels/embedding.py",
    ("embedding-forward-edge", "    " + _LAST_COLUMN[0], "    " + _LAST_COLUMN[1], _ONE),
    ("embedding-forward-first-id", "valid = (index >= 0) &", "valid = (index > 0) &", _ONE),
    ("embedding-backward-sign", "total += tl.sum(", "total -= tl.sum(", _ONE + _RUNS),
    ("embedding-backward-last-token", "position < num_tokens", "position < num_tokens - 1", _ONE + _RUNS),
    ("embedding-backward-edge", "column_" + _LAST_COLUMN[0], "column_" + _LAST_COLUMN[1], _ONE + _RUNS),
    ("embedding-backward-first-id", "before) & (index >= 0)", "before) & (index > 0)", _ONE),
    ("embedding-backward-long-run", "axis=0) == ROWS", "axis=0) > ROWS", _RUNS),
    ("embedding-backward-step", "position += ROWS", "position += ROWS + 1", _RUNS[1:]),
)

# ---- norms ----

_RMS, _GEMMA, _ADD, _WIDE = precision("rms_norm"), precision("rms_norm-gemma"), precision("add_rms_norm"), precision("rms_norm-wide")

ROWS += table(
    "kernels/norms_triton.py",
    ("norm-residual-sign", "x += tl.load(residual_ptr", "x -= tl.load(residual_ptr", _ADD),
    ("norm-offset-sign", ".to(tl.float32) + offset", ".to(tl.float32) - offset", _GEMMA),
    ("norm-forward-sign", "_apply_weight(x * rstd[:, None]", "_apply_weight(-x * rstd[:, None]", _RMS + _ADD),
    ("norm-forward-eps", "axis=1) / WIDTH + eps", "axis=1) / WIDTH - eps", ("kernels/test_norms.py::test_widths_and_many_rows[3]",)),
    ("norm-forward-edge", "(columns < WIDTH)\n    at = ", "(columns < WIDTH - 1)\n    at = ", _RMS + precision("rms_norm-plain")),
    ("norm-backward-sign", "(dy - normed * (", "(dy + normed * (", _RMS + precision("rms_norm-plain")),
    ("norm-backward-scale-edge", "columns, columns < WIDTH, offset)\n    for", "columns, columns < WIDTH - 1, offset)\n    for", _GEMMA),
    (
        "norm-backward-last-row",
        "mask=row < rows, other=0.0)[:, None]\n        normed",
        "mask=row < rows - 1, other=0.0)[:, None]\n        normed",
        _RMS,
    ),
    ("norm-backward-last-tile", "tl.range(program, tl.cdiv(rows, BLOCK_ROWS)", "tl.range(program, rows // BLOCK_ROWS", _RMS),
    ("norm-backward-sum-sign", "dx += tl.load(dsum_ptr + row[:, None] *", "dx -= tl.load(dsum_ptr + row[:, None] *", _ADD),
    ("norm-backward-weight-sign", "dweight += dy * normed", "dweight -= dy * normed", _RMS),
    ("norm-wide-forward-sign", "_apply_weight(x * rstd, ", "_apply_weight(-x * rstd, ", _WIDE),
    ("norm-wide-forward-edge", "squares += x * x", "squares += tl.where(columns < WIDTH - 1, x * x, 0.0)", _WIDE),
    ("norm-wide-dx-sign", "dx = rstd * (dy - tl.load", "dx = rstd * (dy + tl.load", _WIDE),
    (
        "norm-wide-dx-edge",
        "products += dy * (tl.load(x_ptr + row * x_stride + columns, mask=mask",
        "products += dy * (tl.load(x_ptr + row * x_stride + columns, mask=columns < WIDTH - 1",
        _WIDE,
    ),
    ("norm-wide-dx-mean-sign", "products += dy *", "products -= dy *", _WIDE),
    ("norm-wide-dx-sum-sign", "dx += tl.load(dsum_ptr + row * dsum", "dx -= tl.load(dsum_ptr + row * dsum", precision("add_rms_norm-wide")),
    ("norm-wide-weight-sign", "dweight += dy * (x *", "dweight -= dy * (x *", _WIDE),
    ("norm-wide-weight-last-tile", "range(split, tl.cdiv(rows,", "range(split, tl.cdiv(rows - 1,", _WIDE),
    ("norm-wide-weight-last-row", "mask=row < rows, other=0.0)[:, None])", "mask=row < rows - 1, other=0.0)[:, None])", _WIDE),
)

# ---- rope ----

_ROPE, _PARTIAL = precision("rope"), precision("rope-partial")
_QK_NORM, _QK_PARTIAL = precision("qk_norm_rope"), precision("qk_norm_rope-gemma-partial")
_BACKWARD_ALONE = ("kernels/test_rope.py::test_only_what_arrives_is_rotated_back",)

ROWS += table(
    "kernels/rope.py",
    ("rope-forward-sign", "return first_cos - second_sin,", "return first_cos + second_sin,", _ROPE + _QK_NORM),
    ("rope-backward-sign", "        sin = -sin", "        sin = sin * 1.0", _ROPE + _BACKWARD_ALONE),
    (
        "rope-table-edge",
        "mask=columns < HALF, other=0.0).to(table_type)",
        "mask=columns < HALF - 1, other=0.0).to(table_type)",
        _PARTIAL + _BACKWARD_ALONE,
    ),
    ("rope-half-edge", "mask = exists & (columns < HALF)", "mask = exists & (columns < HALF - 1)", _ROPE),
    ("rope-rest-edge", "mask = exists & (rest < HEAD_DIM)", "mask = exists & (rest < HEAD_DIM - 1)", _PARTIAL),
    ("rope-last-head", "exists = (heads < HEADS)[:, None]", "exists = (heads < HEADS - 1)[:, None]", _ROPE),
)

ROWS += table(
    "kernels/qk_norm_rope_triton.py",
    ("qk-norm-forward-sign", "return (normed * scale)", "return (-normed * scale)", _QK_NORM + _QK_PARTIAL),
    ("qk-norm-offset-sign", ".to(tl.float32) + offset", ".to(tl.float32) - offset", _QK_PARTIAL),
    ("qk-norm-forward-edge", "(columns < HALF)\n        first", "(columns < HALF - 1)\n        first", _QK_NORM),
    ("qk-norm-forward-squares", "first * first + second * second", "first * first - second * second", _QK_NORM),
    ("qk-norm-forward-rest", "squares += tl.sum(passed", "squares -= tl.sum(passed", _QK_PARTIAL),
    (
        "qk-norm-forward-scale-edge",
        "second_scale = _load_scale(weight_ptr + HALF, columns, columns < HALF, offset)",
        "second_scale = _load_scale(weight_ptr + HALF, columns, columns < HALF - 1, offset)",
        _QK_PARTIAL,
    ),
    (
        "qk-norm-forward-rest-edge",
        "rest_mask = exists & (rest < HEAD_DIM)\n            passed",
        "rest_mask = exists & (rest < HEAD_DIM - 1)\n            passed",
        _QK_PARTIAL,
    ),
    ("qk-norm-backward-sign", "grad_second, cos, -sin", "grad_second, cos, sin", _QK_NORM),
    ("qk-norm-backward-mean-sign", "(grad_first - first * mean)", "(grad_first + first * mean)", _QK_NORM),
    ("qk-norm-backward-edge", "(columns < HALF)\n        rest_mask", "(columns < HALF - 1)\n        rest_mask", _QK_NORM),
    ("qk-norm-backward-products-sign", "products += tl.sum(grad_passed", "products -= tl.sum(grad_passed", _QK_PARTIAL),
    ("qk-norm-backward-rest-sign", "drest += grad_passed", "drest -= grad_passed", _QK_PARTIAL),
    (
        "qk-norm-backward-rest-edge",
        "rest_mask = exists & (rest < HEAD_DIM)\n        rstd",
        "rest_mask = exists & (rest < HEAD_DIM - 1)\n        rstd",
        _QK_PARTIAL,
    ),
    (
        "qk-norm-backward-last-head",
        "rstd_ptr + heads, mask=heads < HEADS, other",
        "rstd_ptr + heads, mask=heads < HEADS - 1, other",
        _QK_NORM,
    ),
    (
        "qk-norm-backward-last-token",
        "range(tl.program_id(0), num_tokens, tl.num_programs(0))",
        "range(tl.program_id(0), num_tokens - 1, tl.num_programs(0))",
        _QK_NORM,
    ),
    ("qk-norm-backward-weight-sign", "dsecond += grad_second", "dsecond -= grad_second", _QK_NORM),
)
