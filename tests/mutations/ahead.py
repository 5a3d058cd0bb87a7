"""Compile the kernels that a planted fault changes: ``python -m tests.mutations.ahead kernels/glu.py ...``; prints JSON.

A process of its own, without Triton's interpreter. The launches of all cases are recorded once (see tests/kernels/ahead.py); for each
fault in the files named, the source of the function that holds it is replaced, and every launch of a kernel whose code thereby
differs is compiled anew. A fault in plain Python changes no kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from ligerformer.kernels import _triton, dispatch
from tests.kernels.ahead import TARGETS, TargetDriver, _variant, run_all
from tests.kernels.cases import CASES, HollowDraw
from tests.kernels.harness import draw

from .faults import FAULTS, Fault

TARGET = "cuda:90"
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


def functions() -> list[JITFunction]:
    """Every function of the package that Triton compiles."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("ligerformer.kernels.")]
    found = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return list(found.values())


def launches() -> list[Launch]:
    """Every distinct launch of every case at its own sizes, in bf16."""
    found: dict[tuple[str, str], Launch] = {}
    with _triton.observe_launches(lambda *launch: found.setdefault(_variant(*launch), launch)):
        for case in CASES:
            run_all(case, draw(case, 7, torch.bfloat16, "cpu", kind=HollowDraw))
    return list(found.values())


def forget_hashes() -> None:
    """A function's hash covers what it calls: all are formed anew."""
    for function in functions():
        function.hash = None


@contextmanager
def planted(fault: Fault) -> Iterator[bool]:
    """The fault in the source that Triton compiles; False where no kernel holds it."""
    module = "ligerformer." + fault.file.removesuffix(".py").replace("/", ".")
    holders = [f for f in functions() if f.fn.__module__ == module and fault.text in f.src]
    before = [f.src for f in holders]
    for f in holders:
        f._unsafe_update_src(f.src.replace(fault.text, fault.replacement))
    forget_hashes()
    yield bool(holders)
    for f, source in zip(holders, before, strict=True):
        f._unsafe_update_src(source)
    forget_hashes()


def compile_fault(fault: Fault, recorded: list[Launch], keys: list[str]) -> dict[str, Any]:
    """How many launches the fault changes, and what went wrong in compiling them; ``keys`` are the sound kernels' hashes."""
    errors = []
    with planted(fault) as inside:
        changed = [launch for launch, key in zip(recorded, keys, strict=True) if inside and launch[0].cache_key != key]
        for kernel, grid, args, meta in changed:
            try:
                kernel.run(*args, grid=grid, warmup=True, **meta)
            except Exception as error:  # reported as data
                errors.append(f"{kernel.__name__}: {type(error).__name__}: {error}"[:2000])
    return {"in_kernel": inside, "compiled": len(changed), "errors": errors}


def main(files: list[str]) -> None:
    assert not _triton.INTERPRETED, "the interpreter's kernels cannot be compiled: unset TRITON_INTERPRET"
    dispatch.INTERPRETED = True  # lets kernels.use("triton") take CPU tensors
    info = _triton._NO_GPU = TARGETS[TARGET]
    target = GPUTarget(info.vendor, info.arch, info.warp_size)
    driver.set_active(TargetDriver(target, "recording"))
    recorded = launches()
    keys = [kernel.cache_key for kernel, *_ in recorded]
    report = {}
    for fault in FAULTS:
        if fault.file in files:
            driver.set_active(TargetDriver(target, fault.label))  # a scope of its own: nothing compiled before is found
            report[fault.label] = compile_fault(fault, recorded, keys)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
