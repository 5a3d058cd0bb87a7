"""Each planted fault turns its tests red, by a wrong number and not by a crash: the tests of the kernels and of the model can fail.

A fault is planted in a copy of the package, and the tests named beside it are run there in a process of their own, forked from one
that has imported torch and Triton (see forks.py). Kernels run in Triton's interpreter, on a machine with a GPU too. It also runs what
is no valid Triton code, so test_planted_kernels_compile.py compiles the faulty kernels besides.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ligerformer.kernels._triton import HAS_TRITON

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("ligerformer", "tests")
WRONG_NUMBER = {"AssertionError"}
SECONDS = 300  # limit for the tests of one fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.label)
def test_planted_text_is_there_once(fault: Fault) -> None:
    source = (ROOT / "ligerformer" / fault.file).read_text()
    assert source.count(fault.text) == 1, f"{fault.file} holds {source.count(fault.text)} times: {fault.text!r}"
    assert fault.replacement != fault.text and fault.tests


def test_labels_are_distinct() -> None:
    labels = [fault.label for fault in FAULTS]
    assert len(set(labels)) == len(labels)


class Forks:
    """forks.py as a running process."""

    def __init__(self) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        interpreter = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "LIGERFORMER_FORBID_REFERENCE": "0"}
        environment = os.environ | threads | interpreter
        command = [sys.executable, str(Path(__file__).parent / "forks.py")]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, **request: Any) -> int:
        """The exit status of a forked pytest; negative where a signal ended it."""
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"forks.py ended with status {self.process.wait()}"
        return int(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    running = Forks()
    yield running
    running.close()


def plant(fault: Fault, folder: Path) -> None:
    """A copy of the package and of its tests in ``folder``, with the fault in it; what is compiled of the other files comes along."""
    for part in COPIED:
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "pyproject.toml", folder)
    planted = folder / "ligerformer" / fault.file
    for stale in (planted.parent / "__pycache__").glob(f"{planted.stem}.*.pyc"):
        stale.unlink()
    planted.write_text(planted.read_text().replace(fault.text, fault.replacement))


def run_planted(fault: Fault, folder: Path, forks: Forks) -> tuple[dict[str, str], str]:
    """(test -> how it ended, what pytest printed)."""
    plant(fault, folder)
    result = folder / "outcomes.json"
    # (The plugin for unraisable exceptions collects garbage five times at the end, longer than most tests take.)
    options = [
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-p",
        "tests.mutations.outcomes",
        f"--outcomes={result}",
    ]
    status = forks.run(
        folder=str(folder),
        arguments=[*options, *(f"tests/{test}" for test in fault.tests)],
        first=[] if all(test.startswith("kernels/") for test in fault.tests) else ["transformers"],
        seconds=SECONDS,
    )
    printed = (folder / "printed.txt").read_text()[-4000:]
    assert result.exists(), f"exit status {status}\n{printed}"
    outcome = json.loads(result.read_text())
    assert Path(outcome["package"]).is_relative_to(folder), "the tests did not import the copy"
    return outcome["ended"], printed


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.label)
def test_fault_turns_tests_red(fault: Fault, forks: Forks, tmp_path: Path) -> None:
    ended, printed = run_planted(fault, tmp_path, forks)
    for test in fault.tests:
        how = ended.get(f"tests/{test}", "did not run")
        assert how in WRONG_NUMBER, f"{fault.label}: {test} ended as {how!r}; expected an AssertionError\n{printed}"
