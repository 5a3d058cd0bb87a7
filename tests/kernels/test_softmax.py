"""Softmax: rows with infinities and NaN, any dimension, widths about the tiles' edges, sums of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.softmax import WIDEST, _softmax_reference

from .harness import distance

INF, NAN = float("inf"), float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device)


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("width", [5, WIDEST + 5])
def test_infinities_and_nan_as_torch(mode: str, width: int, device: str) -> None:
    """Excluded elements are exact zeros; +inf, NaN and a row of -inf alone give rows of NaN; forward and backward."""
    x = normal(6, width, device=device)
    x[1, :3] = -INF
    x[2] = -INF
    x[3, 1] = INF
    x[4, 2] = NAN
    x[5, :-1] = -INF
    x.requires_grad_()
    dy = normal(6, width, device=device, seed=1)
    with kernels.use(mode):
        y = kernels.softmax(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    exact = torch.softmax(wide, -1)
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    for a, b in ((y, exact), (dx, exact_dx)):
        assert distance(a, b) < 4 * torch.finfo(torch.float32).eps
        assert torch.equal(a == 0, b.float() == 0)
    assert torch.equal(y.isnan().all(-1).cpu(), torch.tensor([False, False, True, True, True, False]))


@pytest.mark.parametrize("width", [1, 2, 3, 64, 127, 1000, WIDEST, WIDEST + 1])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_widths_and_many_rows(width: int, scale: float, device: str) -> None:
    """Large elements too: exp of them alone would overflow, and the running maximum moves."""
    rows = 3 if width > 1000 else 67
    x = (normal(rows, width, device=device) * scale).requires_grad_()
    dy = normal(rows, width, device=device, seed=1)
    with kernels.use("triton"):
        y = kernels.softmax(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    exact = _softmax_reference(wide, -1, torch.float64)
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    epsilon = torch.finfo(torch.float32).eps
    assert distance(y, exact) < max(4, scale) * epsilon  # the exponent, up to a few times the scale, is rounded
    assert (dx - exact_dx).abs().max() < max(4, scale) * epsilon * dy.abs().max()  # (one column: all gradients are 0)
    assert (y.double().sum(-1) - 1).abs().max() < 8 * epsilon


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_every_dimension(mode: str, device: str) -> None:
    x = normal(3, 5, 4, 7, device=device)
    for dim in range(-4, 4):
        with kernels.use(mode):
            y = kernels.softmax(x, dim=dim)
        assert y.is_contiguous()
        torch.testing.assert_close(y, torch.softmax(x.double(), dim).float())
    with kernels.use(mode):
        assert torch.equal(kernels.softmax(x[1, 2, 3]), kernels.softmax(x)[1, 2, 3])
        assert kernels.softmax(x[:, :0], dim=2).shape == (3, 0, 4, 7)


def test_saves_the_result_alone(device: str) -> None:
    x = normal(4, 33, device=device).requires_grad_()
    saved: list[Tensor] = []
    with kernels.use("triton"), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = kernels.softmax(x)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]


def test_autocast_on_a_gpu_is_fp32_as_torchs(device: str) -> None:
    x = normal(4, 33, dtype=torch.bfloat16, device=device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y, eager = kernels.softmax(x), torch.softmax(x, -1)
    assert y.dtype == eager.dtype
    assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.bfloat16


def test_second_derivative_is_refused(device: str) -> None:
    x = normal(3, 8, device=device).requires_grad_()
    with kernels.use("triton"):
        y = kernels.softmax(x)
        (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
