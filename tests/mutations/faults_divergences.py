"""Faults in the divergences: their one kernel, forward and backward, and the kernel that scales a kept gradient."""

from __future__ import annotations

from .fault import Fault, precision, table

_KL, _KL_LOG = precision("kl_div"), precision("kl_div-log-none")
_JSD, _JSD_NONE, _TVD, _TVD_NONE = precision("jsd"), precision("jsd-none"), precision("tvd"), precision("tvd-none")
_REVERSE, _FORWARD = precision("jsd-reverse"), precision("jsd-forward")


def _test(name: str) -> tuple[str, ...]:
    return (f"kernels/test_divergences.py::{name}",)


def _wide(name: str, reduction: str) -> tuple[str, ...]:
    return _test(f"test_kernels_against_fp64[float32-{name}-{reduction}-9001]")


_SCALED = _test("test_kept_gradients_survive_a_retained_graph[3.0-jsd]")

DIVERGENCES: list[Fault] = table(
    "kernels/divergences_triton.py",
    ("kl-sign", "tl.log(tl.where(zero, 1.0, y)) - tl.where(zero, 0.0, x)", "tl.log(tl.where(zero, 1.0, y)) + tl.where(zero, 0.0, x)", _KL),
    ("kl-gradient-sign", "dx = -y\n", "dx = y\n", _KL),
    ("kl-target-gradient-sign", "surprise + 1.0)", "surprise - 1.0)", _KL),
    ("kl-zero-target", "zero = y == 0.0", "zero = y == -1.0", _test("test_probability_zero_contributes_nothing[triton]")),
    ("kl-log-sign", "p * (y - x))", "p * (y + x))", _KL_LOG + _FORWARD + _REVERSE),
    ("kl-log-gradient-sign", "dx = -p", "dx = p", _KL_LOG + _FORWARD),
    ("kl-log-target-gradient-sign", "dy = loss + p", "dy = loss - p", _KL_LOG + _REVERSE),
    ("jsd-greater-sign", "of_greater = -greater_share", "of_greater = greater_share", _JSD + _JSD_NONE),
    ("jsd-lesser-sign", "(distance + log_quotient)", "(distance - log_quotient)", _JSD + _JSD_NONE),
    ("jsd-shares-swapped", "tl.where(x_leads, beta, 1.0 - beta)", "tl.where(x_leads, 1.0 - beta, beta)", _JSD_NONE),
    ("jsd-close", "((1.0 - quotient) - u)", "((1.0 - quotient) + u)", _JSD),
    (
        "jsd-close-series-sign",
        "distance * (0.5 - distance",
        "distance * (0.5 + distance",
        _test("test_close_distributions_keep_their_digits"),
    ),
    ("tvd-gradient-sign", "tl.where(x > y, 0.5, tl.where(x < y, -0.5, 0.0))", "tl.where(x > y, -0.5, tl.where(x < y, 0.5, 0.0))", _TVD),
    ("tvd-equality", "tl.where(x < y, -0.5, 0.0)", "tl.where(x <= y, -0.5, 0.0)", _test("test_tvd_of_equals_has_no_gradient")),
    ("tvd-target-gradient-sign", "dy = -dx", "dy = dx", _TVD + _TVD_NONE),
    ("divergence-edge", "mask = columns < num_columns", "mask = columns < num_columns - 1", _KL + _JSD + _TVD + _KL_LOG + _REVERSE),
    (
        "divergence-x-edge",
        "row * x_stride + columns, mask=mask & kept",
        "row * x_stride + columns, mask=mask & kept & (columns > 0)",
        _KL + _JSD + _TVD + _REVERSE,
    ),
    ("divergence-dx-edge", "dx_ptr.dtype.element_ty), mask=mask)", "dx_ptr.dtype.element_ty), mask=mask & (columns > 0))", _KL + _JSD),
    ("divergence-dy-edge", "dy_ptr.dtype.element_ty), mask=mask)", "dy_ptr.dtype.element_ty), mask=mask & (columns > 0))", _JSD + _TVD),
    ("divergence-element-sign", "tl.store(losses_ptr + at, loss, mask=mask)", "tl.store(losses_ptr + at, -loss, mask=mask)", _KL_LOG),
    (
        "divergence-element-upstream",
        "weight = tl.load(upstream_ptr + at, mask=mask",
        "weight = -tl.load(upstream_ptr + at, mask=mask",
        _KL_LOG,
    ),
    ("divergence-row-upstream", "tl.load(upstream_ptr + row * upstream_stride)", "tl.load(upstream_ptr)", _JSD_NONE + _TVD_NONE),
    (
        "divergence-ignored",
        "tl.load(labels_ptr + row) != ignore_index",
        "tl.load(labels_ptr + row) == ignore_index",
        _JSD + _test("test_ignored_rows_have_no_say[jsd-triton]"),
    ),
    ("divergence-neutral", 'float("-inf") if KIND', "0.0 if KIND", _REVERSE),
    ("divergence-scale", "factor = factor * tl.load(scale_ptr)", "factor = factor / tl.load(scale_ptr)", _JSD),
    (
        "divergence-first-block",
        "for start in range(first, end, BLOCK):",
        "for start in range(first + BLOCK, end, BLOCK):",
        _wide("jsd0.5", "mean"),
    ),
    (
        "divergence-split-end",
        "tl.minimum(first + blocks_per_split * BLOCK, num_columns)",
        "tl.minimum(first + (blocks_per_split - 1) * BLOCK, num_columns)",
        _wide("kl", "batchmean") + _wide("tvd", "none"),
    ),
    (
        "kept-scale-sign",
        "(tl.load(x_ptr + offsets).to(tl.float32) * factor)",
        "(tl.load(x_ptr + offsets).to(tl.float32) * -factor)",
        _SCALED,
    ),
    ("kept-scale-edge", "mask = offsets < count", "mask = offsets < count - 1", _SCALED + _JSD),
    ("kept-scale-partial-sign", "(x * factor)", "(x * -factor)", _SCALED + _TVD),
)

DIVERGENCES += table(
    "kernels/divergences.py",
    (
        "kept-scaled-in-a-retained-graph",
        "or torch._C._autograd._get_current_graph_task_keep_graph()",
        "or not torch._C._autograd._get_current_graph_task_keep_graph()",
        _SCALED,
    ),
    ("divergence-mean-over-labels", "1 if labelled else", "2 if labelled else", _test("test_jsd_reference_is_its_definition[0.5]")),
)
