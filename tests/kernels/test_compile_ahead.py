"""Every kernel compiles for five GPUs that are not here, fits their shared memory and spills no registers; see ahead.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ligerformer.kernels._triton import HAS_TRITON

from .cases import CASES
from .test_contract_compiled import KERNEL_COMPILES

ROOT = Path(__file__).parents[2]
SHARDS = (("cuda:80", "cuda:100", "hip:gfx90a"), ("cuda:90", "hip:gfx942"))  # one process each, at once
TARGETS = [target for shard in SHARDS for target in shard]
SHARED_LIMIT = {"cuda:80": 163 << 10, "cuda:90": 227 << 10, "cuda:100": 227 << 10, "hip:gfx90a": 64 << 10, "hip:gfx942": 64 << 10}

# (kernel, target) -> (most that may spill, why it may). Bytes of stack on "cuda", registers on "hip".
_TILES = "tile sizes chosen for the matrix units; bounded here until they are chosen by time"
_PHI = "a few values of the wide projection's hi and lo terms"
SPILLS_ALLOWED: dict[tuple[str, str], tuple[int, str]] = {
    ("attention_forward_kernel", "cuda:80"): (120, _TILES),
    ("attention_forward_kernel", "cuda:100"): (24, _TILES),
    ("attention_dkdv_kernel", "cuda:80"): (48, _TILES),
    ("attention_dkdv_kernel", "cuda:90"): (456, "head_dim 256: the larger tile was the faster one on an H200, spills and all"),
    ("attention_dq_kernel", "cuda:100"): (8, _TILES),
    ("attention_delta_kernel", "cuda:100"): (8, _TILES),
    ("_mhc_project_forward_kernel", "cuda:80"): (16, _PHI),
    ("_mhc_project_forward_kernel", "cuda:90"): (8, _PHI),
    ("_mhc_project_backward_kernel", "cuda:100"): (8, _PHI),
    ("_mhc_project_backward_kernel", "hip:gfx90a"): (53, _PHI),
    ("_mhc_project_backward_kernel", "hip:gfx942"): (36, _PHI),
    ("_mhc_write_backward_kernel", "cuda:100"): (8, "a row of gradients for every pair of streams"),
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What ahead.py prints for all targets, its shards run side by side."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.ahead"]
    running = [
        subprocess.Popen([*command, *shard], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for shard in SHARDS
    ]
    joined: dict[str, Any] = {"compiled": [], "specialisations": {}}
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err[-4000:]
        part = json.loads(out.splitlines()[-1])
        joined["compiled"] += part["compiled"]
        joined["specialisations"].update(part["specialisations"])
    return joined


def _row(c: dict[str, Any]) -> str:
    return (
        f"{c['target']:10}  {c['kernel']:44} shared {c['shared']:7}  registers {c['registers']:4}  spills {c['spills']:5}  {c['constants']}"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit(report: dict[str, Any], target: str) -> None:
    compiled = [c for c in report["compiled"] if c["target"] == target]
    assert compiled, f"nothing was compiled for {target}"
    faults = [f"{_row(c)}\n    {c['error']}" for c in compiled if c["error"]]
    print(*(_row(c) for c in sorted(compiled, key=lambda c: c["kernel"])), sep="\n")  # shown by pytest -s, and with a failure
    for c in compiled:
        if c["shared"] > SHARED_LIMIT[target]:
            faults.append(f"{_row(c)}\n    {c['shared']} bytes of shared memory; at most {SHARED_LIMIT[target]}")
        if c["spills"] > SPILLS_ALLOWED.get((c["kernel"], target), (0, ""))[0]:
            faults.append(f"{_row(c)}\n    spills {c['spills']}")
    assert not faults, "\n" + "\n".join(faults)


def test_every_case_launches(report: dict[str, Any]) -> None:
    assert set(report["specialisations"]) == {str(case) for case in CASES}
    assert all(report["specialisations"].values()), "a case launched no kernel"


def test_few_variants_over_row_counts(report: dict[str, Any]) -> None:
    """Row counts of 2 to 4097, odd and divisible by 16, ask for three variants of a kernel at most."""
    many = {
        f"{case}: {kernel}": n for case, counts in report["specialisations"].items() for kernel, n in counts.items() if n > KERNEL_COMPILES
    }
    assert not many, f"variants over the row counts: {many}"
