"""The error of everything that reads or writes checkpoints."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, matched with its model, or written: names each culprit and what to do."""


def fail(problems: Sequence[str], headline: str) -> None:
    """Raise one CheckpointError that lists every problem under ``headline``; do nothing where there is none."""
    if len(problems) == 1:
        raise CheckpointError(f"{headline}: {problems[0]}")
    if problems:
        raise CheckpointError("\n".join([f"{headline}: {len(problems)} problems", *(f"  - {p}" for p in problems)]))
