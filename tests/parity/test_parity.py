"""Every family computes what transformers computes: in true float64 to 1e-9, in bf16 as close to float64 as transformers itself."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from ligerformer import kernels

from ..conftest import needs_gpu
from .oracle import MODELS, load_ours, oracle, rms, run_oracle, run_ours, true_float64, worst, write_checkpoint

TOKENS = (2, 37)  # more than twice the windows of 9, and past the original context of 16


def ids_of(seed: int) -> torch.Tensor:
    # not 0, the padding id of Gemma's classes: torch's embedding keeps that row's gradient to itself
    return torch.randint(1, 97, TOKENS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_in_true_float64(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    ids = ids_of(0)
    with true_float64():
        theirs = run_oracle(oracle(folder), ids)
    assert all(v.dtype == torch.float64 for v in theirs.values())
    ours = run_ours(load_ours(folder, torch.float64), ids)
    distance, where = worst(ours, theirs)
    assert distance < 1e-9, f"{where}: {distance:.3g}"


@pytest.mark.parametrize("attention", ["auto", pytest.param("triton", marks=needs_gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_no_further_from_float64_in_bf16(name: str, attention: Literal["auto", "triton"], tmp_path: Path, device: str) -> None:
    """RMS over three seeds, the same attention form (torch's own, but for soft-caps) on both sides; on a GPU on the Triton kernels, and once
    with attention on Triton too."""
    errors = {"ours": 0.0, "theirs": 0.0}
    for seed in range(3):
        folder = write_checkpoint(name, tmp_path / str(seed), seed, torch.bfloat16)
        ids = ids_of(seed)
        with true_float64(), torch.no_grad():
            exact = oracle(folder)(ids).logits
        with torch.no_grad(), kernels.use(attention):
            softcapped = name == "gemma2"  # torch's attention has no soft-cap: both take the plain form
            theirs = oracle(folder, torch.bfloat16, "eager" if softcapped else "sdpa").to(device)(ids.to(device)).logits.cpu()
            ours = load_ours(folder, torch.bfloat16, device)(ids.to(device)).logits.cpu()
        errors["theirs"] += rms(theirs.double() - exact) ** 2
        errors["ours"] += rms(ours.double() - exact) ** 2
    assert errors["ours"] <= 1.5**2 * errors["theirs"], errors


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    """The helper is no rubber stamp: one norm weight off by one part in a million shows."""
    folder = write_checkpoint(name, tmp_path)
    with true_float64():
        theirs = run_oracle(oracle(folder), ids_of(0))
    model = load_ours(folder, torch.float64)
    with torch.no_grad():
        model.layers[1].attention.q_norm.weight[3] *= 1 + 1e-6
    assert worst(run_ours(model, ids_of(0)), theirs)[0] > 1e-9
