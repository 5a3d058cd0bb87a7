"""Without a GPU, Triton kernels run in Triton's interpreter; the switch must be set before triton is imported.

LIGERFORMER_FORBID_REFERENCE=1 replaces the reference of every op by a function that raises, except within
``kernels.use("reference")``: whatever runs by itself must run on Triton, and the tests keep that scope as their oracle.
"""

import functools
import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from ligerformer.kernels import OPS, dispatch

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
FORBID_REFERENCE = os.environ.get("LIGERFORMER_FORBID_REFERENCE", "0") == "1"


def _forbidden(op: dispatch.Op) -> Any:
    reference = op.reference

    @functools.wraps(reference)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if dispatch._mode != "reference":
            raise RuntimeError(f"{op.name} fell back to its reference, which LIGERFORMER_FORBID_REFERENCE=1 forbids")
        return reference(*args, **kwargs)

    return refuse


if FORBID_REFERENCE:
    for _op in OPS.values():
        _op.reference = _forbidden(_op)


@pytest.fixture
def device() -> str:
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    return "cuda" if GPU else "cpu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``triton_dtype``: the dtypes that the kernels are tested in (the interpreter's bf16 is wrong, so bf16 on the GPU alone)."""
    if "triton_dtype" in metafunc.fixturenames:
        dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
        metafunc.parametrize("triton_dtype", dtypes, ids=lambda d: str(d).removeprefix("torch."))
