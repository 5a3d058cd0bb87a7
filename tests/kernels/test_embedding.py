"""Embedding: the facts that the contract does not hold for every op."""

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.embedding import _embedding_reference


def gradient(mode: str, ids: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.detach().clone().requires_grad_()
    with kernels.use(mode):
        out = kernels.embedding(ids, weight)
        return out.detach(), torch.autograd.grad(out, weight, grad)[0]


@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 5)])
def test_rows_are_copied(shape: tuple[int, ...], int_dtype: torch.dtype, device: str, triton_dtype: torch.dtype) -> None:
    weight = torch.randn(11, 35, device=device).to(triton_dtype)
    ids = torch.randint(0, 11, shape, dtype=int_dtype, device=device)
    with kernels.use("triton"):
        out = kernels.embedding(ids, weight)
    assert out.shape == (*shape, 35)
    assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("mode", ["triton", "reference"])
@pytest.mark.parametrize("tokens", [15, 16, 17, 33, 100])
def test_gradient_of_long_runs(tokens: int, mode: str, device: str) -> None:
    """Runs of equal ids around the kernel's step of 16 positions, the last one ending at the last token."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.cat([torch.full((tokens,), 4), torch.randint(0, 3, (9,), generator=generator), torch.full((tokens,), 6)])
    ids = ids[torch.randperm(len(ids), generator=generator)].to(device)
    weight, grad = torch.zeros(8, 19, device=device), torch.randn(len(ids), 19, generator=generator).to(device)
    _, got = gradient(mode, ids, weight, grad)
    expected = torch.zeros(8, 19, dtype=torch.float64, device=device).index_add_(0, ids, grad.double())
    assert (got.double() - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert not got[3].any() and not got[5].any() and not got[7].any()


@pytest.mark.parametrize("mode", ["triton", "reference"])
def test_sums_in_fp32(mode: str, device: str) -> None:
    """2048 and sixteen ones in half precision: a sum in fp16 would stay at 2048."""
    ids, weight = torch.zeros(17, dtype=torch.int64, device=device), torch.zeros(2, 16, dtype=torch.float16, device=device)
    grad = torch.ones(17, 16, dtype=torch.float16, device=device)
    grad[0] = 2048
    _, got = gradient(mode, ids, weight, grad)
    assert torch.equal(got[0], torch.full((16,), 2064.0, dtype=torch.float16, device=device))


@pytest.mark.parametrize("bad", [-1, 5, 1 << 40])
def test_id_out_of_range(bad: int, device: str) -> None:
    ids, weight = torch.tensor([0, bad, 2], device=device), torch.randn(5, 8, device=device)
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"embedding: ids holds {bad}; expected values in \[0, 5\)"):
            kernels.embedding(ids, weight)
    else:
        assert kernels.embedding(ids, weight)[1].isnan().all()


@pytest.mark.parametrize("mode", ["triton", "reference"])
@pytest.mark.parametrize("bad", [-1, 5, 1 << 40])
def test_unchecked_id_out_of_range_is_nan_and_has_no_gradient(bad: int, mode: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, where ids cannot be looked at: here the check is taken away."""
    monkeypatch.setattr(kernels.embedding.__globals__["checks"], "in_range", lambda *args: None)
    ids, weight = torch.tensor([0, bad, 2], device=device), torch.randn(5, 8, device=device)
    out, got = gradient(mode, ids, weight, torch.ones(3, 8, device=device))
    assert out[1].isnan().all() and torch.equal(out[[0, 2]], weight[[0, 2]])
    assert torch.equal(got, torch.tensor([1.0, 0, 1, 0, 0], device=device)[:, None].expand(5, 8))


def test_reference_gradcheck() -> None:
    ids, weight = torch.tensor([[0, 3, 3], [2, 0, 3]]), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: _embedding_reference(ids, w), (weight,))
