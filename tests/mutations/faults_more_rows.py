"""Faults in the kernels that walk rows, continued: layer norm, softmax, sparsemax."""

from __future__ import annotations

from .fault import Fault, precision, table

MORE_ROWS: list[Fault] = []

# ---- layer norm ----

_LAYER, _PLAIN, _LAYER_WIDE = precision("layer_norm"), precision("layer_norm-plain"), precision("layer_norm-wide")

MORE_ROWS += table(
    "kernels/layer_norm_triton.py",
    ("layer-norm-weight-edge", "weight_ptr + columns, mask=mask", "weight_ptr + columns, mask=mask & (columns > 0)", _LAYER + _LAYER_WIDE),
    ("layer-norm-bias-sign", "normed += tl.load(bias_ptr", "normed -= tl.load(bias_ptr", _LAYER + _LAYER_WIDE),
    ("layer-norm-mean-sign", "x - mean[:, None], 0.0)", "x + mean[:, None], 0.0)", _LAYER + _PLAIN),
    ("layer-norm-forward-edge", "(columns < WIDTH)\n    x = ", "(columns < WIDTH - 1)\n    x = ", _LAYER + _PLAIN),
    ("layer-norm-variance-edge", "tl.where(columns < WIDTH, x - mean", "tl.where(columns <= WIDTH, x - mean", _LAYER + _PLAIN),
    ("layer-norm-last-row", "mean, mask=row < rows)\n", "mean, mask=row < rows - 1)\n", _LAYER + _PLAIN),
    (
        "layer-norm-eps-sign",
        "centered, axis=1) / WIDTH + eps",
        "centered, axis=1) / WIDTH - eps",
        ("kernels/test_layer_norm.py::test_widths_and_many_rows[3]",),
    ),
    ("layer-norm-backward-mean-sign", "(dy - (tl.sum(dy, axis=1)", "(dy + (tl.sum(dy, axis=1)", _LAYER + _PLAIN),
    ("layer-norm-backward-slope-sign", "[:, None] - normed * along_x)", "[:, None] + normed * along_x)", _LAYER + _PLAIN),
    ("layer-norm-backward-edge", "mask=columns < WIDTH, other=0.0).to", "mask=columns < WIDTH - 1, other=0.0).to", _LAYER),
    (
        "layer-norm-backward-last-tile",
        "tl.range(program, tl.cdiv(rows, BLOCK_ROWS)",
        "tl.range(program, rows // BLOCK_ROWS",
        _LAYER + _PLAIN,
    ),
    ("layer-norm-backward-weight-sign", "dweight += dy * normed", "dweight -= dy * normed", _LAYER),
    ("layer-norm-backward-bias-sign", "            dbias += dy", "            dbias -= dy", _LAYER),
    ("layer-norm-wide-mean-sign", "squares += delta * (x - means)", "squares += delta * (x + means)", _LAYER_WIDE),
    ("layer-norm-wide-count", "counts += mask.to(tl.float32)", "counts += (columns < WIDTH - 1).to(tl.float32)", _LAYER_WIDE),
    ("layer-norm-wide-edge", "delta = tl.where(mask, x - means", "delta = tl.where(columns >= 0, x - means", _LAYER_WIDE),
    ("layer-norm-wide-forward-sign", "_affine((x - mean) * rstd", "_affine((x + mean) * rstd", _LAYER_WIDE),
    ("layer-norm-wide-dx-mean-sign", "(dy - along_one -", "(dy + along_one -", _LAYER_WIDE),
    ("layer-norm-wide-dx-slope-sign", "along_one - normed * along_x)", "along_one + normed * along_x)", _LAYER_WIDE),
    ("layer-norm-wide-dx-edge", "sums += dy\n", "sums += tl.where(columns < WIDTH - 1, dy, 0.0)\n", _LAYER_WIDE),
    ("layer-norm-wide-weight-sign", "dweight += dy * ((x", "dweight -= dy * ((x", _LAYER_WIDE),
    (
        "layer-norm-wide-bias-sign",
        "other=0.0).to(tl.float32)\n        dbias += dy",
        "other=0.0).to(tl.float32)\n        dbias -= dy",
        _LAYER_WIDE,
    ),
    ("layer-norm-wide-last-tile", "range(split, tl.cdiv(rows, BLOCK_ROWS)", "range(split, tl.cdiv(rows - 1, BLOCK_ROWS)", _LAYER_WIDE),
)

# ---- softmax ----

_SOFTMAX, _MIDDLE, _SOFTMAX_WIDE = precision("softmax"), precision("softmax-middle"), precision("softmax-wide")

MORE_ROWS += table(
    "kernels/softmax.py",
    ("softmax-forward-sign", "_exp(x - tl.max(x, axis=1)[:, None])", "_exp(tl.max(x, axis=1)[:, None] - x)", _SOFTMAX + _MIDDLE),
    ("softmax-forward-edge", "tl.where(columns < WIDTH, powers", "tl.where(columns < WIDTH - 1, powers", _SOFTMAX + _MIDDLE),
    ("softmax-wide-running-sign", "_exp(largest - shift) +", "_exp(shift - largest) +", _SOFTMAX_WIDE),
    ("softmax-wide-meeting-sign", "total * _exp(largest - row_max)", "total * _exp(row_max - largest)", _SOFTMAX_WIDE),
    (
        "softmax-wide-forward-edge",
        "x_stride + columns, mask=columns < WIDTH",
        "x_stride + columns, mask=columns < WIDTH - 1",
        _SOFTMAX_WIDE,
    ),
    ("softmax-wide-forward-sign", "(_exp(x - row_max) * scale)", "(_exp(row_max - x) * scale)", _SOFTMAX_WIDE),
    ("softmax-backward-sign", "(dy - tl.sum(dy * y", "(dy + tl.sum(dy * y", _SOFTMAX + _MIDDLE),
    ("softmax-backward-edge", "(columns < WIDTH)\n    dy = ", "(columns < WIDTH - 1)\n    dy = ", _SOFTMAX + _MIDDLE),
    ("softmax-backward-last-row", "(row < rows) & (columns < WIDTH)\n    dy", "(row < rows - 1) & (columns < WIDTH)\n    dy", _SOFTMAX),
    ("softmax-wide-backward-sign", "* (dy - total)", "* (dy + total)", _SOFTMAX_WIDE),
    ("softmax-wide-backward-edge", "products += dy *", "products += tl.where(columns < WIDTH - 1, dy, 0.0) *", _SOFTMAX_WIDE),
)

# ---- sparsemax ----

_SPARSEMAX, _MIDDLE, _WIDE = precision("sparsemax"), precision("sparsemax-middle"), precision("sparsemax-wide")

MORE_ROWS += table(
    "kernels/sparsemax.py",
    ("sparsemax-forward-sign", "x, 0.0), axis=1) - 1.0) / size", "x, 0.0), axis=1) + 1.0) / size", _SPARSEMAX + _MIDDLE),
    ("sparsemax-forward-edge", "mask = columns < WIDTH\n    x = ", "mask = columns < WIDTH - 1\n    x = ", _SPARSEMAX + _MIDDLE),
    ("sparsemax-last-row", "tl.minimum(row, rows - 1)", "tl.minimum(row, rows - 2)", _SPARSEMAX + _MIDDLE),
    ("sparsemax-start", "tl.full([BLOCK_ROWS], -1.0, dtype", "tl.full([BLOCK_ROWS], -0.25, dtype", _SPARSEMAX),
    ("sparsemax-one-step", "shrinking = tl.max((size < before)", "shrinking = tl.max((size > before)", _SPARSEMAX + _MIDDLE),
    ("sparsemax-threshold-sign", "y = tl.where(x <= tau, 0.0, x - tau)", "y = tl.where(x <= tau, 0.0, x + tau)", _SPARSEMAX),
    ("sparsemax-wide-forward-sign", "(tl.sum(sums, axis=0) - 1.0) / size", "(tl.sum(sums, axis=0) + 1.0) / size", _WIDE),
    ("sparsemax-wide-forward-edge", "sizes += above.to(tl.float32)", "sizes += (columns < WIDTH).to(tl.float32)", _WIDE),
    ("sparsemax-wide-one-step", "shrinking = (size < before)", "shrinking = (size > before)", _WIDE),
    ("sparsemax-wide-threshold-sign", "tl.where(x <= tau, 0.0, x - tau).to", "tl.where(x <= tau, 0.0, x + tau).to", _WIDE),
    ("sparsemax-backward-sign", "dy - support * mean[:, None]", "dy + support * mean[:, None]", _SPARSEMAX + _MIDDLE),
    ("sparsemax-backward-support", "dy = tl.where(y > 0.0, dy", "dy = tl.where(y >= 0.0, dy", _SPARSEMAX + _MIDDLE),
    ("sparsemax-backward-edge", "(columns < WIDTH)\n    dy = ", "(columns < WIDTH - 1)\n    dy = ", _MIDDLE),
    ("sparsemax-wide-backward-sign", "tl.where(y > 0.0, dy - mean, y * 0.0)\n", "tl.where(y > 0.0, dy + mean, y * 0.0)\n", _WIDE),
    ("sparsemax-wide-backward-edge", "tl.float32) > 0.0\n", "tl.float32) >= 0.0\n", _WIDE),
)
