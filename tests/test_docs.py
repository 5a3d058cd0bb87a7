"""README and docs say what is so: snippets run as written, every config field stands with its default, and names, files, commands and
quoted errors are those of the code. Snippets that need a network say so and are not run."""

import argparse
import dataclasses
import importlib
import json
import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import ligerformer
from benchmarks.tables import dated, filled
from ligerformer import cli, configs, kernels
from ligerformer.configs import registry
from ligerformer.configs.model import OWN_KEYS
from ligerformer.configs.schema import to_plain
from ligerformer.convert.families import model_types
from ligerformer.convert.hub import errors
from ligerformer.kernels import dispatch
from tests.configs.examples import plain
from tests.convert.hf_models import hf_model

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path, language: str = "python") -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)
    return [s for s in found if "# needs a network" not in s]


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    before = set(registry.types("attention"))
    try:
        for snippet in snippets(page):
            exec(compile(snippet, str(page), "exec"), namespace)
    finally:
        for added in set(registry.types("attention")) - before:
            configs.unregister("attention", added)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


# ---- configs ----


def tables(page: Path) -> dict[str, dict[str, str]]:
    """Every table of fields: its heading (or the last code word before it, under a heading it shares), and default by field."""
    found: dict[str, dict[str, str]] = {}
    place = ""
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            place = line.lstrip("# ")
        elif line and not line.startswith("|") and place in found:
            place = f"{place.split(': ')[0]}: {line}"
        elif row := re.match(r"\| `(\w+)` \| (.+?) \| .+ \|$", line):
            found.setdefault(place, {})[row[1]] = row[2]
    return found


def expected(config: Any) -> dict[str, str]:
    """Every field of a config class, and its default as docs/configs.md writes it."""
    rows = {}
    for field in dataclasses.fields(config):
        default = "required" if field.default is dataclasses.MISSING else json.dumps(to_plain(field.default))
        rows[field.name] = f"`{default}`" if default.startswith("[") else default
    return rows


def documented() -> dict[str, Any]:
    blocks = {f"{slot} `{type_}`": registry.config_class(slot, type_) for slot in registry.slots() for type_ in registry.types(slot)}
    blocks = {heading: config for heading, config in blocks.items() if config.__module__.startswith("ligerformer.")}
    others = {"The model": configs.ModelConfig, "A layer": configs.LayerConfig, "Rotary embedding": configs.RopeConfig}
    return blocks | others | {"The model: `init` has one field:": configs.InitConfig}


@pytest.mark.parametrize("heading", documented())
def test_every_field_of_every_config_stands_in_the_docs_with_its_default(heading: str) -> None:
    wanted = expected(documented()[heading])
    wanted.pop("branches", None)  # in plain data they stand beside the layer's own fields
    assert tables(ROOT / "docs/configs.md").get(heading, {}) == wanted


def test_the_docs_have_no_table_for_what_does_not_exist() -> None:
    branch = "A layer: Any other key of a layer is a branch: a block, with two fields more."
    found = tables(ROOT / "docs/configs.md")
    assert set(found) == {heading for heading, config in documented().items() if expected(config)} | {branch}
    assert set(found[branch]) == set(OWN_KEYS) and found[branch]["multiplier"] == expected(configs.BranchConfig)["multiplier"]
    every_class = {c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, configs.Config)}
    bases = {configs.Config, configs.BlockConfig, configs.NormConfig, configs.ResidualConfig, configs.BranchConfig}
    assert every_class - bases == set(documented().values())


# ---- names, files, commands ----


def words(page: Path) -> list[str]:
    """What stands in backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))


def resolve(dotted: str) -> Any:
    parts = dotted.split(".")
    found: Any = ligerformer
    for i, part in enumerate(parts[1:], 2):
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:i]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_and_files_exist(page: Path) -> None:
    names = {m for word in words(page) for m in re.findall(r"^ligerformer(?:\.\w+)+", word) if not m.endswith((".json", ".py"))}
    files = {word for word in words(page) if re.fullmatch(r"(?:ligerformer|docs|examples|tests|benchmarks)/[\w/.-]*", word)}
    for name in names:
        resolve(name)
    assert [f for f in files if not (ROOT / f).exists()] == []


def commands() -> list[str]:
    lines = [line for page in PAGES for block in snippets(page, "bash") for line in block.splitlines()]
    lines += [word for page in PAGES for word in words(page)]
    return sorted({line for line in lines if re.match(r"ligerformer \w", line)})


def test_commands_parse() -> None:
    assert len(commands()) >= 6
    for line in commands():
        arguments = shlex.split(line, comments=True)[1:]
        if arguments != ["generate"]:
            assert isinstance(cli._parser().parse_args(arguments), argparse.Namespace), line


def row(start: str) -> list[str]:
    line = next(line for line in README.read_text().splitlines() if line.startswith(f"| {start} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_readme_names_what_is_supported() -> None:
    types = re.sub(r"\([^)]*\)", "", row("model types")[1])
    assert {word.strip() for word in types.split(",")} == set(model_types())
    ropes = row("RoPE")[1].split(";")[0]
    assert {word.strip() for word in ropes.split(",")} == {"default", *registry.types("rope_scaling")}


def test_the_override_that_widens_a_published_model_keeps_its_logits(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    overrides = next(word for word in words(ROOT / "docs/converting.md") if "streams" in word)
    wide = eval(f"ligerformer.from_hf(folder, {overrides})", {"ligerformer": ligerformer, "folder": tmp_path})
    ids = torch.arange(18).view(2, 9)
    torch.testing.assert_close(wide(ids).logits, ligerformer.from_hf(tmp_path)(ids).logits, rtol=1e-5, atol=1e-5)
    assert wide.load_report.initialized and wide.config.residual.streams == 4


# ---- errors ----


def quoted_errors() -> list[str]:
    return re.findall(r"^- \*\*`(.+?)`\*\*", (ROOT / "docs/errors.md").read_text(), flags=re.M)


def pattern(quoted: str) -> str:
    """A quoted message as a regular expression: ``...`` is anything, N a number, 'x' any name."""
    pattern = re.escape(quoted).replace(r"\.\.\.", ".*").replace("'x'", r"'\w+'")
    return re.sub(r"\bN\b", r"\\d+", pattern)


def _too_small_a_cache() -> None:
    model = ligerformer.build(plain(), seed=0)
    model(torch.zeros(1, 4, dtype=torch.int64), cache=model.new_cache(1, 3))


def _gated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        error = errors.GatedRepoError.__new__(errors.GatedRepoError)
        Exception.__init__(error, "gated")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    ligerformer.from_hf("owner/gated")


def _pickles_alone(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | LLAMA))
    (folder / "pytorch_model.bin").touch()
    ligerformer.from_hf(folder)


def _triton_on_the_cpu_in_fp64() -> None:
    x = torch.ones(2, 8, dtype=torch.float64)
    with kernels.use("triton"):
        kernels.rms_norm(x, eps=1e-6)


LLAMA = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def test_quoted_errors_are_those_that_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    layer = plain()["layers"]["main"]
    unknown_type = plain() | {"layers": {"main": layer | {"attention": {"type": "differential"}}}}
    triggers: list[Callable[[], Any]] = [
        lambda: ligerformer.build(plain() | {"hidden_sise": 3}),
        lambda: ligerformer.build(unknown_type),
        _triton_on_the_cpu_in_fp64,
        _too_small_a_cache,
        lambda: _gated(monkeypatch),
        lambda: _pickles_alone(tmp_path),
        lambda: registry.config("attention", "softmax_attention")(type("Again", (), {})),
    ]
    messages = []
    for trigger in triggers:
        with pytest.raises(ValueError) as caught:
            trigger()
        messages.append(str(caught.value))
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.WARNING, logger="ligerformer"):
        dispatch.ran("rope", "forward", "reference", "a reason", on_gpu=True)
    messages += caplog.messages
    for quoted in quoted_errors():
        assert any(re.search(pattern(quoted), message) for message in messages), (quoted, messages)
    assert len(messages) == len(quoted_errors())


def test_every_error_class_of_the_page_is_what_it_says() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    for name in re.findall(r"`(ligerformer\.[\w.]+)` \|", page):
        assert issubclass(resolve(name), ValueError)
    assert issubclass(ligerformer.CannotExpress, configs.ConfigError)
    codes = re.search(r"is (\d+) where .*, (\d+) for .*, (\d+) where", page).groups()
    assert [int(code) for code in codes] == [cli.DONE, cli.REFUSED, cli.INTERRUPTED]


def test_measured_figures_are_those_of_the_results() -> None:
    """Every row of the README's table of training steps stands in a results file, to the digits shown."""
    sides = {  # (end of the file's name, side)
        "ours": ("", "ours"),
        "transformers": ("", "hf"),
        "transformers + Liger-Kernel": ("", "liger"),
        'ours, `recompute="cheap"`': ("-recompute", "cheap"),
        "ours, one CUDA graph": ("-captured", "captured"),
    }
    rows = re.findall(r"^\| (\d+x\d+) \| (.+?) \| ([\d,]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), flags=re.M)
    assert len(rows) == 7
    for size, side, tokens_per_s, peak in rows:
        end, side = sides[side]
        path = max((ROOT / "benchmarks" / "results").glob(f"*-llama-3.2-1b-{size}{end}.json"), key=dated)
        measured = json.loads(path.read_text())["rows"][side]
        assert tokens_per_s == f"{measured['tokens_per_s']:,.0f}" and peak == f"{measured['peak_gib']:.2f}"


def test_the_table_of_kernels_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert filled(page) == page, "run python -m benchmarks.tables"
