"""A small progress bar for what takes long: loading, saving, training.

On a terminal it is one line, redrawn; elsewhere (a log file, a pipe) it is a plain line now and then. What is over quickly shows nothing.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

FIRST_AFTER = 0.5  # seconds before a terminal shows anything
TERMINAL_EVERY = 0.1
LOG_EVERY = 10.0
BAR_WIDTH = 24


class Progress:
    """Counts up to ``total`` units and shows share, rate, time left and any further fields.

        with Progress(total, "training", unit="tokens") as progress:
            progress.update(4096, loss="1.83")

    ``unit`` is what is counted ("B" for bytes). A context manager: leaving it ends the line.
    """

    def __init__(self, total: float, label: str, *, unit: str = "B", stream: TextIO | None = None) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.done = 0.0
        self.fields: dict[str, object] = {}
        self._start = time.monotonic()
        self._next = self._start + (FIRST_AFTER if self.terminal else LOG_EVERY)
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._show()
            if self.terminal:
                self.stream.write("\n")
                self.stream.flush()

    def update(self, amount: float = 1.0, **fields: object) -> None:
        """Count ``amount`` more units; ``fields`` (name=value) are shown from now on."""
        self.done += amount
        self.fields |= fields
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (TERMINAL_EVERY if self.terminal else LOG_EVERY)
            self._show()

    def _show(self) -> None:
        self._shown = True
        line = self.line(time.monotonic() - self._start)
        self.stream.write(f"\r\x1b[2K{line}" if self.terminal else line + "\n")
        self.stream.flush()

    def line(self, seconds: float) -> str:
        """The text after ``seconds`` of work."""
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        filled = round(share * BAR_WIDTH)
        rate = self.done / seconds if seconds > 0 else 0.0
        left = (self.total - self.done) / rate if rate and share < 1.0 else 0.0
        time_text = f"{clock(left)} left" if share < 1.0 else f"{clock(seconds)} in all"
        bar = f"{'#' * filled}{'.' * (BAR_WIDTH - filled)}"
        parts = [f"{self.label} {bar} {share:4.0%}", f"{scaled(rate, self.unit)}/s", time_text]
        return "  ".join(parts + [f"{name} {value}" for name, value in self.fields.items()])


def scaled(amount: float, unit: str) -> str:
    """``12.3 kB``, ``4.56 M tokens``: three digits and a decimal prefix."""
    prefixes = ["", "k", "M", "G", "T"]
    while amount >= 999.5 and len(prefixes) > 1:
        amount /= 1000
        del prefixes[0]
    gap = "" if unit == "B" or not prefixes[0] else " "
    return f"{amount:.3g} {prefixes[0]}{gap}{unit}"


def clock(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
