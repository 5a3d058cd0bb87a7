"""Without a GPU, Triton kernels run in Triton's interpreter; the switch must be set before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

GPU = torch.cuda.is_available()


@pytest.fixture
def device() -> str:
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    return "cuda" if GPU else "cpu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``triton_dtype``: the dtypes that the kernels are tested in (the interpreter's bf16 is wrong, so bf16 on the GPU alone)."""
    if "triton_dtype" in metafunc.fixturenames:
        dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
        metafunc.parametrize("triton_dtype", dtypes, ids=lambda d: str(d).removeprefix("torch."))
