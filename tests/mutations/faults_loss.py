"""Faults in cross-entropy: its kernels, and the driver that takes the head through chunks of tokens."""

from __future__ import annotations

from .fault import Fault, precision, table

_PLAIN, _OPTIONS = precision("cross_entropy"), precision("cross_entropy-options")
_LINEAR, _LINEAR_NONE, _LINEAR_OPTIONS = (precision("linear_cross_entropy" + label) for label in ("", "-none", "-options"))


def _classes(num_classes: int, options: str = "plain", reduction: str = "mean") -> tuple[str, ...]:
    return (f"kernels/test_cross_entropy.py::test_kernels_against_fp64[float32-{reduction}-{options}-{num_classes}]",)


def _chunks(*labels: str) -> tuple[str, ...]:
    """Against the loss of all the logits (the contract's oracle is the same driver in fp64)."""
    return tuple(f"kernels/test_linear_cross_entropy.py::test_kernels_against_fp64[float32-{label}]" for label in labels)


_MANY, _SCALED = _classes(4999), ("kernels/test_linear_cross_entropy.py::test_large_gradients_are_scaled",)

LOSS: list[Fault] = table(
    "kernels/_cross_entropy_kernels.py",
    ("loss-forward-sign", "(log_total + (maximum - target))", "(log_total + (maximum + target))", _PLAIN + _LINEAR),
    ("loss-forward-edge", "z = tl.where(mask, z,", "z = tl.where(columns < num_classes - 1, z,", _PLAIN + _LINEAR),
    (
        "loss-forward-first-block",
        "tl.range(0, whole, BLOCK, num_stages=STAGES):\n        maximum",
        "tl.range(BLOCK, whole, BLOCK, num_stages=STAGES):\n        maximum",
        _MANY,
    ),
    ("loss-forward-partial-block", "if whole < num_classes:\n        maximum", "if whole > num_classes:\n        maximum", _MANY),
    ("loss-z-sign", "+ z_loss * weight * lse * lse", "- z_loss * weight * lse * lse", _OPTIONS),
    ("loss-smoothing-sign", "lse - tl.sum(weighted", "lse + tl.sum(weighted", _OPTIONS),
    ("loss-smoothing-edge", "weighted += z * tl.where(mask, ", "weighted += z * tl.where(columns < num_classes - 1, ", _OPTIONS),
    ("loss-tanh-sign", "tl.where(x < 0, -result, result)", "tl.where(x > 0, -result, result)", _classes(53, "capped")),
    ("loss-tanh-series-sign", "near = magnitude + magnitude * series", "near = magnitude - magnitude * series", _classes(53, "capped")),
    ("loss-first-label", "(label >= 0) &", "(label > 0) &", _classes(1)),
    ("loss-last-label", "(label < num_classes)", "(label < num_classes - 1)", _classes(1)),
    (
        "loss-strided-rows",
        "* outer_rows + row % inner",
        "* inner + row % inner",
        ("kernels/test_cross_entropy.py::test_strided_logits_and_labels[<lambda>0]",),
    ),
    ("loss-gradient-sign", "gradient - label_factor, gradient)", "gradient + label_factor, gradient)", _PLAIN + _LINEAR),
    (
        "loss-gradient-edge",
        "tl.store(out_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=mask if MASKED else None)",
        "tl.store(out_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=columns < num_classes - 1)",
        _PLAIN + _LINEAR,
    ),
    (
        "loss-gradient-first-block",
        "tl.range(0, whole, BLOCK, num_stages=STAGES):\n        _write",
        "tl.range(BLOCK, whole, BLOCK, num_stages=STAGES):\n        _write",
        _MANY,
    ),
    ("loss-gradient-smoothing-sign", "gradient -= class_factor", "gradient += class_factor", _OPTIONS),
    ("loss-gradient-softcap-sign", "gradient *= 1.0 - (z", "gradient *= 1.0 + (z", _classes(53, "capped")),
    ("loss-gradient-z-sign", "label_factor + upstream * 2.0", "label_factor - upstream * 2.0", _OPTIONS),
    ("loss-gradient-ignored-edge", "mask=start + offsets < num_classes)", "mask=start + offsets < num_classes - 1)", _LINEAR),
    ("loss-gradient-logit-scale", "upstream = upstream * logit_scale", "upstream = upstream / logit_scale", _LINEAR_OPTIONS),
    ("loss-upstream-of-a-row", "tl.load(upstream + row * upstream_stride)", "tl.load(upstream)", precision("cross_entropy-none")),
    (
        "loss-upstream-in-place",
        "1.0 if upstream is None else tl.load(upstream + row)",
        "1.0 if upstream is None else -tl.load(upstream + row)",
        _LINEAR_NONE,
    ),
    (
        "loss-scale-sign",
        "tl.load(x + offsets, mask=mask).to(tl.float32) * factor",
        "tl.load(x + offsets, mask=mask).to(tl.float32) * -factor",
        _LINEAR,
    ),
    ("loss-scale-edge", "tl.load(x + offsets, mask=mask)", "tl.load(x + offsets, mask=offsets < count - 1)", _LINEAR),
    ("loss-scale-whole-block", "tl.load(x + offsets).to(tl.float32) * factor", "tl.load(x + offsets).to(tl.float32) * -factor", _SCALED),
)

LOSS += table(
    "kernels/linear_cross_entropy.py",
    ("chunk-last", "range(0, num_rows, rows)", "range(0, num_rows - rows + 1, rows)", _LINEAR_NONE + _LINEAR_OPTIONS),
    ("chunk-end", "slice(start, min(start + rows, num_rows))", "slice(start, min(start + rows, max(num_rows - 1, 1)))", _LINEAR_NONE),
    ("chunk-weight-overwritten", "first=start == 0", "first=True", _LINEAR_NONE + _LINEAR_OPTIONS),
    ("chunk-bias-sign", "dbias += gradient", "dbias -= gradient", _chunks("700-none-all")),
    ("chunk-upstream", "upstream is None else upstream[chunk]", "upstream is None else upstream[: chunk.stop - start]", _LINEAR_NONE),
    ("chunk-beta", "beta = 0 if first else 1", "beta = 0 if first else -1", _LINEAR_NONE + _LINEAR_OPTIONS),
    ("linear-mean", "loss * scale", "loss / scale", _chunks("None-mean-plain", "700-mean-all")),
    (
        "linear-kept-rows",
        "row_labels == ignore_index",
        "row_labels != ignore_index",
        ("kernels/test_linear_cross_entropy.py::test_dropping_ignored_rows[sum-triton]",),
    ),
    (
        "linear-reference-scale",
        "upstream, 0.0).to(dtype) * logit_scale",
        "upstream, 0.0).to(dtype) / logit_scale",
        ("kernels/test_linear_cross_entropy.py::test_reference_against_all_the_logits[None-sum-scaled]",),
    ),
    (
        "linear-reference-softcap",
        "gradient *= 1.0 - (z / softcap)",
        "gradient *= 1.0 + (z / softcap)",
        ("kernels/test_linear_cross_entropy.py::test_reference_against_all_the_logits[None-sum-scaled]",),
    ),
)
