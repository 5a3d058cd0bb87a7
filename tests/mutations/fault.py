"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``text`` becomes ``replacement`` in ``file`` (in ligerformer/); each of ``tests`` (in tests/) must then fail by a wrong number.

    ``text`` occurs exactly once in ``file``. A row is worth its run only if nothing crashes: the fault must still compile and launch.
    """

    label: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


def precision(*cases: str) -> tuple[str, ...]:
    """The contract's precision test of these cases on Triton."""
    return tuple(f"kernels/test_contract.py::test_precision[{case}-triton-float32]" for case in cases)


def table(file: str, *rows: tuple[str, str, str, tuple[str, ...]]) -> list[Fault]:
    """Faults in one file: rows of (label, text, replacement, tests)."""
    return [Fault(label, file, text, replacement, tests) for label, text, replacement, tests in rows]
