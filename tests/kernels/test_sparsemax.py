"""Sparsemax: the projection's own conditions, known values, ties, infinities and NaN, widths about the tiles' edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.sparsemax import WIDEST, _sparsemax_reference

from .harness import distance

INF, NAN = float("inf"), float("nan")
EPSILON = torch.finfo(torch.float32).eps


def normal(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float().to(device)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 100.0])
def test_reference_is_the_projection(scale: float) -> None:
    """The optimality conditions of min |y - x|^2 over the simplex: y >= 0, sum 1, x - y constant on the support and x at most that off it."""
    x = normal(50, 37).double() * scale
    y = _sparsemax_reference(x, -1)
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(50, dtype=torch.float64))
    tau = torch.where(y > 0, x - y, -INF).amax(-1, keepdim=True)
    assert torch.where(y > 0, (x - y - tau).abs(), 0.0).max() < 1e-12 * max(1.0, scale)
    assert torch.where(y > 0, -INF, x - tau).max() < 1e-12 * max(1.0, scale)


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_known_rows(mode: str, device: str) -> None:
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 1.0, 0.0, -1.0], [1.0, 0.5, -2.0, -2.0], [0.0, -1.0, -1.0, -INF]], device=device)
    expected = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.75, 0.25, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], device=device)
    with kernels.use(mode):
        assert torch.equal(kernels.sparsemax(rows), expected)


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("width", [5, WIDEST + 5])
def test_infinities_and_nan(mode: str, width: int, device: str) -> None:
    x = normal(6, width, device=device)
    x[1, :3] = -INF
    x[2] = -INF
    x[3, 1] = INF
    x[4, 2] = NAN
    x[5, :-1] = -INF
    x.requires_grad_()
    with kernels.use(mode):
        y = kernels.sparsemax(x)
        (dx,) = torch.autograd.grad(y, x, normal(6, width, device=device, seed=1))
    assert torch.equal(y.isnan().all(-1).cpu(), torch.tensor([False, False, True, True, True, False]))
    assert torch.equal(y.isnan().any(-1), y.isnan().all(-1))
    assert not y[1, :3].any() and not dx[1, :3].any()
    assert y[5, -1] == 1 and not y[5, :-1].any() and not dx[5].any()
    if mode == "triton":
        assert torch.equal(dx.isnan(), y.isnan())


@pytest.mark.parametrize("width", [1, 2, 3, 64, 127, 1000, WIDEST, WIDEST + 1])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_widths_and_many_rows(width: int, scale: float, device: str) -> None:
    """Supports from one element to all of a row, many rows of unlike supports in one program."""
    rows = 3 if width > 1000 else 67
    x = (normal(rows, width, device=device) * scale).requires_grad_()
    dy = normal(rows, width, device=device, seed=1)
    with kernels.use("triton"):
        y = kernels.sparsemax(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    exact = _sparsemax_reference(wide, -1)
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    assert (y - exact).abs().max() < 4 * EPSILON  # of the threshold, which lies within 1 of the maximum
    assert torch.equal(y > 0, exact > 0)
    assert (dx - exact_dx).abs().max() < 8 * EPSILON * dy.abs().max()


def test_ties_and_order(device: str) -> None:
    """Few distinct values: whole groups leave the support at once; a permutation of a row permutes its result."""
    x = (normal(40, 200, device=device) * 2).round() / 4
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3)).to(device)
    with kernels.use("triton"):
        y = kernels.sparsemax(x)
        permuted = kernels.sparsemax(x[:, order])
    assert distance(y, _sparsemax_reference(x.double(), -1)) < 4 * EPSILON
    assert distance(permuted, y[:, order].double()) < 4 * EPSILON


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_every_dimension(mode: str, device: str) -> None:
    x = normal(3, 5, 4, 7, device=device)
    for dim in range(-4, 4):
        with kernels.use(mode):
            y = kernels.sparsemax(x, dim=dim)
        torch.testing.assert_close(y.double(), _sparsemax_reference(x.double(), dim), rtol=0, atol=4 * EPSILON)
    with kernels.use(mode):
        assert torch.equal(kernels.sparsemax(x[1, 2, 3]), kernels.sparsemax(x)[1, 2, 3])
        assert kernels.sparsemax(x[:, :0], dim=2).shape == (3, 0, 4, 7)


def test_second_derivative_is_refused(device: str) -> None:
    x = normal(3, 8, device=device).requires_grad_()
    with kernels.use("triton"):
        y = kernels.sparsemax(x)
        (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
