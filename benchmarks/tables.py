"""Write the tables of the docs from the results files, so that no figure is typed: ``python -m benchmarks.tables``.

A table stands between two comment lines, ``<!-- kernels -->`` and ``<!-- /kernels -->``, in docs/kernels.md.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernels.md"
PEERS = ("torch", "compile", "liger", "quack", "cce", "flash", "cudnn", "FA4")


def dated(path: pathlib.Path) -> str:
    """The date in the name of a results file."""
    return re.findall(r"\d{4}-\d\d-\d\d", path.name)[0]


def latest() -> pathlib.Path:
    """The newest results file of the kernels."""
    return max((ROOT / "benchmarks" / "results").glob("*-kernels.json"), key=dated)


def _times(row: dict[str, Any], mode: str) -> str:
    peers = [f"{side} {row[mode][side]['ms']:.3g}" for side in PEERS if side in row[mode]]
    return ", ".join(peers) or "-"


def kernels_table(results: dict[str, Any]) -> str:
    """One line an op, shape and mode."""
    lines = ["| op | shape | | floor, ms | ours, ms | x floor | peak, GiB | peers, ms |", "|---|---|---|---|---|---|---|---|"]
    for row in results["rows"]:
        for mode in ("fwd", "full"):
            if "ours" not in row[mode]:
                continue
            ours = row[mode]["ours"]
            graph = f" ({ours['graph_ms']:.3g} in a CUDA graph)" if "graph_ms" in ours else ""
            cells = (row["op"], row["shape"], mode, f"{row['floor_ms'][mode]:.3g}", f"{ours['ms']:.3g}{graph}", f"{ours['x_floor']:.2f}")
            lines.append(f"| {' | '.join(cells)} | {ours['peak_gib']:.2f} | {_times(row, mode)} |")
    return "\n".join(lines)


def machine(results: dict[str, Any]) -> str:
    """What it was measured on, in one line."""
    facts = results["machine"]
    names = [f"{name} {facts[name]}" for name in facts if name not in ("gpu", "date", "bytes_per_s", "flops_per_s")]
    rates = f"copy {facts['bytes_per_s'] / 1e12:.2f} TB/s, bf16 product {facts['flops_per_s'] / 1e12:.0f} TFLOP/s"
    return f"{facts['gpu']}, {facts['date']}: {', '.join(names)}; {rates}."


def filled(page: str) -> str:
    """The page with its table made anew."""
    results = json.loads(latest().read_text())
    text = f"<!-- kernels -->\n{machine(results)}\n\n{kernels_table(results)}\n<!-- /kernels -->"
    return re.sub(r"<!-- kernels -->.*?<!-- /kernels -->", lambda _: text, page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
