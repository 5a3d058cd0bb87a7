"""Each planted fault turns its tests red, by a wrong number and not by a crash: the tests of the kernels can fail.

A fault is planted in a copy of the package, and the tests named beside it are run there in a process of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ligerformer.kernels._triton import HAS_TRITON

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("ligerformer", "tests/kernels", "tests/mutations")
WRONG_NUMBER = {"AssertionError"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.label)
def test_planted_text_is_there_once(fault: Fault) -> None:
    source = (ROOT / "ligerformer/kernels" / fault.file).read_text()
    assert source.count(fault.text) == 1, f"{fault.file} holds {source.count(fault.text)} times: {fault.text!r}"
    assert fault.replacement != fault.text and fault.tests


def test_labels_are_distinct() -> None:
    labels = [fault.label for fault in FAULTS]
    assert len(set(labels)) == len(labels)


def plant(fault: Fault, folder: Path) -> None:
    """A copy of the package and of the kernels' tests in ``folder``, with the fault in it."""
    for part in COPIED:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("tests/__init__.py", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, folder / file)
    planted = folder / "ligerformer/kernels" / fault.file
    planted.write_text(planted.read_text().replace(fault.text, fault.replacement))


def run_planted(fault: Fault, folder: Path) -> tuple[dict[str, str], str]:
    """(test -> how it ended, what pytest printed)."""
    plant(fault, folder)
    result = folder / "outcomes.json"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "tests.mutations.outcomes", f"--outcomes={result}"]
    done = subprocess.run(
        [*command, *(f"tests/kernels/{test}" for test in fault.tests)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    printed = (done.stdout + done.stderr)[-4000:]
    assert result.exists(), printed
    outcome = json.loads(result.read_text())
    assert Path(outcome["package"]).is_relative_to(folder), "the tests did not import the copy"
    return outcome["ended"], printed


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.label)
def test_fault_turns_tests_red(fault: Fault, tmp_path: Path) -> None:
    ended, printed = run_planted(fault, tmp_path)
    for test in fault.tests:
        how = ended.get(f"tests/kernels/{test}", "did not run")
        assert how in WRONG_NUMBER, f"{fault.label}: {test} ended as {how!r}; expected an AssertionError\n{printed}"
