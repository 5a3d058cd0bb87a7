"""Compile every kernel for a GPU that is not here: ``python -m tests.kernels.ahead cuda:90 hip:gfx942``; prints JSON.

A process of its own, without Triton's interpreter. The ops run on CPU tensors that stand in for a GPU's, the device facts are those
of the target, and each launch is handed to Triton's own ``run(..., warmup=True)``, which specialises and compiles as a launch
would, under a driver that only knows its target. So what is compiled is what the heuristics pick, each distinct kernel once.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ligerformer.kernels import _triton, dispatch

from .cases import CASES, Case, HollowDraw
from .harness import Inputs, draw, remade, run

TARGETS = {  # device facts: (A100, H100, B200), (MI250X, one die; MI300X)
    "cuda:80": _triton.DeviceInfo("cuda", 80, 108),
    "cuda:90": _triton.DeviceInfo("cuda", 90, 132),
    "cuda:100": _triton.DeviceInfo("cuda", 100, 148),
    "hip:gfx90a": _triton.DeviceInfo("hip", "gfx90a", 104, 64),
    "hip:gfx942": _triton.DeviceInfo("hip", "gfx942", 304, 64),
}
ROWS = (2, 15, 16, 17, 4095, 4096, 4097)
REMADE = {"rms_norm", "add_rms_norm"}  # ops with a kernel of their own for it
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class TargetDriver:
    """As much of a Triton driver as a compilation asks for. ``scope`` stands for the device: kernels are cached per scope."""

    def __init__(self, target: GPUTarget, scope: str) -> None:
        self.target, self.scope = target, scope

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self.scope

    def get_current_stream(self, device: str) -> int:
        return 0


@dataclasses.dataclass
class Compiled:
    """One kernel as compiled for one target."""

    target: str
    kernel: str
    constants: str
    shared: int
    registers: int
    spills: int  # bytes on "cuda", registers on "hip"
    error: str | None = None


def resources(compiled: Any) -> tuple[int, int]:
    """(registers, spills) of a compiled kernel, from the compiler's own report."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        return _number(r"\.vgpr_count:\s*(\d+)", text), _number(r"\.vgpr_spill_count:\s*(\d+)", text)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the compiler's report")
    return int(found.group(1))


def walk(case: Case, dtype: torch.dtype) -> list[Inputs]:
    """The calls whose launches are compiled: the case's own sizes and those of a published model."""
    sizes = [case] + ([dataclasses.replace(case, make=case.large)] if case.large else [])
    return [draw(size, 7 if size is case else 64, dtype, "cpu", kind=HollowDraw) for size in sizes]


def run_all(case: Case, inputs: Inputs) -> None:
    """Everything that the case launches: forward, backward, and making the output again."""
    run(case.op, inputs, "triton")
    if case.op in REMADE:
        remade(case.op, inputs, "triton")


def compile_all(target: str) -> list[Compiled]:
    """Every distinct kernel of every case: bf16, and fp32 for the first case of each op."""
    found: dict[Any, Compiled] = {}

    def warm(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        name = kernel.__name__
        constants = ", ".join(f"{k}={v}" for k, v in meta.items())
        try:
            compiled = kernel.run(*args, grid=grid, warmup=True, **meta)
        except Exception as error:  # reported as data: one broken kernel does not hide the others
            found[name, constants] = Compiled(target, name, constants, 0, 0, 0, f"{type(error).__name__}: {error}"[:2000])
            return
        if compiled not in found:  # one object a distinct kernel: Triton's own cache
            found[compiled] = Compiled(target, name, f"{_dtypes(args)}, {constants}", compiled.metadata.shared, *resources(compiled))

    first_of_op: set[str] = set()
    with _triton.observe_launches(warm):
        for case in CASES:
            for dtype in [torch.bfloat16, *([torch.float32] if case.op not in first_of_op else [])]:
                for inputs in walk(case, dtype):
                    run_all(case, inputs)
            first_of_op.add(case.op)
    return list(found.values())


def _dtypes(args: tuple[Any, ...]) -> str:
    return "/".join(dict.fromkeys(str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)))


def specialisations(target: GPUTarget) -> dict[str, dict[str, int]]:
    """Case -> kernel -> how many variants its launches over ROWS ask for (counted, not compiled)."""
    counts: dict[str, dict[str, int]] = {}
    for case in CASES:
        driver.set_active(TargetDriver(target, f"counting {case}"))
        variants: set[tuple[str, str]] = set()
        with _triton.observe_launches(lambda *launch, variants=variants: variants.add(_variant(*launch))):
            for rows in ROWS:
                run(case.op, draw(case, rows, torch.bfloat16, "cpu", kind=HollowDraw), "triton")
        counts[str(case)] = dict(Counter(kernel for kernel, _ in variants))
    return counts


def _variant(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[str, str]:
    """(the kernel's name, what Triton specialises this launch on)."""
    *_, binder = kernel.device_caches[driver.active.get_current_device()]
    _, specialization, options = binder(*args, debug=False, **meta)
    return kernel.__name__, f"{specialization} {options} {sorted(meta.items())}"


def main(targets: list[str]) -> None:
    assert not _triton.INTERPRETED, "the interpreter's kernels cannot be compiled: unset TRITON_INTERPRET"
    dispatch.INTERPRETED = True  # lets kernels.use("triton") take CPU tensors
    report: dict[str, Any] = {"compiled": [], "specialisations": {}}
    for name in targets:
        info = TARGETS[name]
        _triton._NO_GPU = info  # what device_info says of the CPU
        target = GPUTarget(info.vendor, info.arch, info.warp_size)
        driver.set_active(TargetDriver(target, name))
        report["compiled"] += [dataclasses.asdict(c) for c in compile_all(name)]
        if name == "cuda:90":
            report["specialisations"] = specialisations(target)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
