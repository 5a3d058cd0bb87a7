"""Time every op beside its peers: ``python -m benchmarks.run [--ops rms_norm ...] [--out FILE.json]``; ``make bench`` runs all of it.

Prints one line an op, shape and mode, and writes the results file that the tables of the docs are made from.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import torch

from . import harness
from .ops import ROWS


def line(row: dict[str, Any], mode: str) -> str:
    """A row in one mode: the floor, then each side's time and, for ours, the ratio to the floor."""
    sides = row[mode]
    ours = sides["ours"]
    cells = [f"{row['op']} {row['shape']}".ljust(40), mode.ljust(4), f"floor {row['floor_ms'][mode]:8.4f}", f"ours {ours['ms']:8.4f}"]
    cells += [f"x{ours['x_floor']:5.2f}", f"{ours['peak_gib']:5.2f}G"]
    if "host_us" in ours:
        cells.append(f"host {ours['host_us']:4.0f}us")
    if "graph_ms" in ours:
        cells.append(f"graph {ours['graph_ms']:7.4f} x{ours['graph_ms'] / row['floor_ms'][mode]:4.2f}")
    cells += [f"{side} {found['ms']:.4f}" for side, found in sides.items() if side != "ours"]
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", help="measure these ops alone")
    parser.add_argument("--sides", nargs="+", help="measure these sides alone")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=pathlib.Path, help="results file")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, flop_rate = harness.rates()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {flop_rate / 1e12:.0f} TFLOP/s")
    failed = 0
    results: dict[str, Any] = {"machine": harness.versions() | {"bytes_per_s": bandwidth, "flops_per_s": flop_rate}, "rows": []}
    for row in ROWS:
        if args.ops and row.op not in args.ops:
            continue
        found = harness.measure(row, bandwidth, flop_rate, with_compile=not args.no_compile, only=args.sides)
        results["rows"].append(found)
        for mode in ("fwd", "full"):
            if "ours" in found[mode]:
                print(line(found, mode), flush=True)
        for side, why in found.get("failed", {}).items():
            print(f"    {side}: {why}")
            failed += side == "ours"
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        raise SystemExit(f"{failed} rows of ours failed")


if __name__ == "__main__":
    main()
