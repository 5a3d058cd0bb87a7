"""What the checkout promises around the code: pinned versions, the shipped text, the commands of CI."""

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_dependency_is_pinned_within_its_bounds():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = _pins()
    wanted = [Requirement(line) for line in [*project["dependencies"], *(line for extra in extras.values() for line in extra)]]
    outside = {str(r): pins.get(_normal(r.name)) for r in wanted if r.name != project["name"]}
    outside = {text: pin for text, pin in outside.items() if pin is None or pin not in Requirement(text).specifier}
    assert not outside
    assert {extra for r in wanted if r.name == project["name"] for extra in r.extras} <= set(extras)


def test_core_dependencies_stay_four():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[>;]", line)[0] for line in dependencies} == {"torch", "triton", "safetensors", "huggingface-hub"}


def test_shipped_text_is_the_one_its_readme_describes():
    text = (ROOT / "examples/data/austen.txt").read_bytes()
    readme = (ROOT / "examples/data/README.md").read_text()
    assert f"{len(text):,} bytes" in readme
    assert hashlib.sha256(text).hexdigest() in readme
    assert 600_000 <= len(text) <= 1_300_000
    assert text.isascii() and b"\r" not in text and text.endswith(b"\n")
    assert not re.search(rb"gutenberg|ebook|etext|copyright|https?:", text, re.IGNORECASE)


def test_ci_runs_the_two_commands_and_hides_no_failure():
    script = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in script if line.startswith("make")] == ["make test", "make test-all"]
    assert "set -euo pipefail" in script and (ROOT / ".ci/run").stat().st_mode & 0o111
