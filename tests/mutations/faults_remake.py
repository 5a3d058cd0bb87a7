"""Faults in what the backward makes again: the kernels' numbers, and which tensors are taken for a declared output."""

from __future__ import annotations

from .fault import Fault, table


def _same_bits(*cases: str) -> tuple[str, ...]:
    return tuple(f"kernels/test_contract.py::test_outputs_made_again_have_the_same_bits[{case}-triton-float32]" for case in cases)


def _recompute(*tests: str) -> tuple[str, ...]:
    return tuple(f"blocks/test_recompute.py::{test}" for test in tests)


REMAKE: list[Fault] = table(
    "kernels/norms_remake.py",
    ("norm-remake-sign", "normed = x * tl.load", "normed = -x * tl.load", _same_bits("rms_norm", "rms_norm-plain", "add_rms_norm")),
    ("norm-remake-edge", "mask = columns < width", "mask = columns < width - 1", _same_bits("rms_norm", "add_rms_norm-wide")),
)
REMAKE += table(
    "kernels/glu.py",
    (
        "glu-remake-halves",
        "(*gate_up.chunk(2, dim=-1), activation)",
        "(*gate_up.chunk(2, dim=-1)[::-1], activation)",
        _same_bits("swiglu_packed"),
    ),
)
REMAKE += table(
    "kernels/remake.py",
    (
        "remake-recycled-address",
        "_storage(output) == _storage(x)  #",
        "x is not None  #",
        _recompute("test_a_recycled_address_matches_nothing"),
    ),
    (
        "remake-modified-output",
        "x._version == version and",
        "x._version >= version and",
        _recompute("test_an_output_modified_in_place_is_kept_as_it_is[triton]"),
    ),
    (
        "remake-reference-cycle",
        "self.tensor = x.detach()",
        "self.tensor = x",
        _recompute("test_keeps_less_by_exactly_these_outputs[llama-triton]"),
    ),
    ("remake-view-offset", "view.storage_offset())", "0)", _recompute("test_any_view_of_an_output_is_made_again")),
)
REMAKE += table(
    "blocks/decoder.py",
    (
        "model-recompute-cheap-dropped",
        'self.recompute == "cheap" and',
        'self.recompute == "none" and',
        _recompute("test_keeps_less_by_exactly_these_outputs[llama-triton]"),
    ),
)
