"""The benchmarks' rows: our op and the formula that it is timed beside agree, so that a table never compares two different things."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import harness
from benchmarks.ops import ROWS


@pytest.mark.skipif(harness.DEVICE == "cuda", reason="the benchmark itself checks every row on a GPU")
@pytest.mark.parametrize("row", [r for r in ROWS if "cross_entropy" not in r.op], ids=lambda r: f"{r.op} {r.shape}")
def test_ours_is_the_formula(row: harness.Row) -> None:
    ours = row.peers.get("auto", row.ours)  # attention's row asks for Triton, which a CPU does not serve in bf16
    assert harness.distance(dataclasses.replace(row, checked=5), ours) <= row.tolerance


def test_floors_are_positive_and_grow() -> None:
    for row in ROWS:
        assert 0 < row.forward.bytes + row.forward.flops < row.full.bytes + row.full.flops, row.shape
