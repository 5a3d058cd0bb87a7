"""Every Python snippet of the README and docs runs as written, one namespace a page; the ones that need a network say so."""

import re
from pathlib import Path

import pytest

from ligerformer import configs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    return [s for s in found if "# needs a network" not in s]


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    before = set(configs.registry.types("attention"))
    try:
        for snippet in snippets(page):
            exec(compile(snippet, str(page), "exec"), namespace)
    finally:
        for added in set(configs.registry.types("attention")) - before:
            configs.unregister("attention", added)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
