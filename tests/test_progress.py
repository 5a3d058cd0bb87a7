"""The progress bar: quiet where it should be, right in what it says."""

import io

import pytest

from ligerformer import progress
from ligerformer.progress import Progress, clock, scaled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_over_quickly_shows_nothing(stream: io.StringIO, now: list[float]) -> None:
    with Progress(10, "loading", stream=stream) as bar:
        for _ in range(10):
            now[0] += 0.04
            bar.update()
    assert stream.getvalue() == ""


def test_a_terminal_has_one_line_redrawn(now: list[float]) -> None:
    stream = Terminal()
    with Progress(4e6, "loading", stream=stream) as bar:
        now[0] += 1.0
        bar.update(1e6)
        now[0] += 0.05  # too soon to draw again
        bar.update(1e6)
    drawn = stream.getvalue().split("\r\x1b[2K")
    assert len(drawn) == 3 and drawn[1] == "loading ######..................  25%  1 MB/s  0:03 left"
    assert drawn[2].endswith("\n") and " 50% " in drawn[2]


def test_a_log_has_a_line_now_and_then_with_the_fields(now: list[float]) -> None:
    stream = io.StringIO()
    with Progress(40, "training", unit="tokens", stream=stream) as bar:
        for step in range(40):
            now[0] += 1.0
            bar.update(1, loss=f"{step}.5")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5 and lines[0] == "training ######..................  25%  1 tokens/s  0:30 left  loss 9.5"
    assert lines[-1] == "training ######################## 100%  1 tokens/s  0:40 in all  loss 39.5"


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (12_340, "B", "12.3 kB"),
        (4.56e9, "B", "4.56 GB"),
        (12_340, "tokens", "12.3 k tokens"),
        (3e16, "B", "3e+04 TB"),
    ],
)
def test_amounts(amount: float, unit: str, text: str) -> None:
    assert scaled(amount, unit) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text
