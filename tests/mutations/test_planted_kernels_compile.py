"""A planted fault is a program that could ship: every kernel that it changes compiles for a GPU (see ahead.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ligerformer.kernels._triton import HAS_TRITON

from .faults import FAULTS

ROOT = Path(__file__).parents[2]
KERNEL_FILES = sorted({fault.file for fault in FAULTS if "@triton.jit" in (ROOT / "ligerformer" / fault.file).read_text()})


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("file", KERNEL_FILES)
def test_planted_kernels_compile(file: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.mutations.ahead", file]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == [fault.label for fault in FAULTS if fault.file == file]
    errors = [f"{label}: {error}" for label, row in report.items() for error in row["errors"]]
    assert not errors, "\n".join(errors)
    unused = [label for label, row in report.items() if row["in_kernel"] and not row["compiled"]]
    assert not unused, f"faults in code that no case launches: {unused}"
    assert any(row["in_kernel"] for row in report.values()), "no fault stands in a kernel"
