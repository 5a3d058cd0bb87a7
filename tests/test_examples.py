"""The examples run as they stand; the quickstart trains with hyper-connections by one edited entry, from the same start."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ligerformer

EXAMPLES = Path(__file__).parents[1] / "examples"
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, given two steps to train."""
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--steps", "2", "--out", str(tmp_path / "out")])
    return module


def test_quickstart_runs(quickstart: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quickstart.main()
    printed = capsys.readouterr().out
    for part in (
        "held-out loss: ",
        " nats/byte",
        "Hugging Face format, opened again: logits bit-identical",
        "what ran, and why",
        "attention",
    ):
        assert part in printed
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_quickstart_with_hyper_connections(quickstart: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ligerformer.build(quickstart.CONFIG, seed=0, dtype=torch.float64)
    quickstart.CONFIG["residual"] = dict(type="mhc", streams=4)
    widened = ligerformer.build(quickstart.CONFIG, seed=0, dtype=torch.float64)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(widened(ids).logits, plain(ids).logits, rtol=0, atol=1e-13)
    quickstart.main()
    printed = capsys.readouterr().out
    assert "saving it natively" in printed and "mhc" in printed
    assert "native format, opened again: logits bit-identical" in printed
