"""Layer norm: torch's own numbers and dtypes, a large mean, fp64 parameters, and the sizes where other kernels take over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.layer_norm import _layer_norm_reference
from ligerformer.kernels.layer_norm_triton import WIDEST_BACKWARD, WIDEST_FORWARD

from .harness import distance

EPS = 1e-5


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device)


def exact_with_grads(tensors: tuple[Tensor, ...], dy: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The reference in fp64, and its gradients."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y = _layer_norm_reference(*wide, eps, torch.float64)
    return (y, *torch.autograd.grad(y, wide, dy.double()))


def test_reference_is_torchs(device: str) -> None:
    x, weight, bias = normal(9, 40, dtype=torch.float64), normal(40, dtype=torch.float64, seed=1), normal(40, dtype=torch.float64, seed=2)
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        assert torch.equal(kernels.layer_norm(x, w, b, eps=EPS), F.layer_norm(x, (40,), w, b, EPS))


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("given", ["weight", "bias"])
def test_one_parameter_alone(mode: str, given: str, device: str) -> None:
    x = normal(7, 48, device=device).requires_grad_()
    parameter, dy = normal(48, device=device, seed=1).requires_grad_(), normal(7, 48, device=device, seed=2)
    with kernels.use(mode):
        y = kernels.layer_norm(x, eps=EPS, **{given: parameter})
        got = torch.autograd.grad(y, (x, parameter), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, parameter)]
    exact = F.layer_norm(wide[0], (48,), **{given: wide[1]}, eps=EPS)
    for a, b in zip((y, *got), (exact, *torch.autograd.grad(exact, wide, dy.double())), strict=True):
        assert distance(a, b) < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_mixed_dtypes(mode: str, device: str) -> None:
    """The result has x's dtype, each gradient its input's: what torch gives for a 16-bit x and fp32 parameters."""
    x = normal(7, 48, dtype=torch.float16, device=device).requires_grad_()
    weight, bias = (normal(48, device=device, seed=s).requires_grad_() for s in (1, 2))
    with kernels.use(mode):
        y = kernels.layer_norm(x, weight, bias, eps=EPS)
        grads = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert y.dtype == torch.float16
    assert [g.dtype for g in grads] == [torch.float16, torch.float32, torch.float32]


def test_fp64_parameters_are_the_references(device: str) -> None:
    x, weight = normal(3, 8, device=device), normal(8, dtype=torch.float64, device=device)
    assert kernels.layer_norm(x, weight, eps=EPS).dtype == torch.float32
    with kernels.use("triton"), pytest.raises(ValueError, match="float64"):
        kernels.layer_norm(x, weight, eps=EPS)


@pytest.mark.parametrize("width", [97, WIDEST_FORWARD + 27])
def test_large_mean(width: int, device: str) -> None:
    """A mean of 1000 deviations: mean(x^2) - mean^2 would keep one digit of the variance. The mean is rounded to 1000 ulps of fp32."""
    x = normal(3, width, device=device) + 1000.0
    with kernels.use("triton"):
        y = kernels.layer_norm(x, eps=EPS)
    assert distance(y, _layer_norm_reference(x.double(), None, None, EPS, torch.float64)) < 1000 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("width", [1, 2, 3, 64, 127, 1000, WIDEST_BACKWARD, WIDEST_BACKWARD + 1])
def test_widths_and_many_rows(width: int, device: str) -> None:
    """More rows than programs; widths about the edges of the tiles. A row of one column is its bias, and its slope 0."""
    rows = 3 if width > 1000 else 67
    x, dy = (normal(rows, width, device=device, seed=s) for s in (0, 3))
    tensors = tuple(t.requires_grad_() for t in (x, *(normal(width, device=device, seed=s) for s in (1, 2))))
    eps = 0.1  # rows of two columns have variances near 0, where a slope is 1 / sqrt(eps)
    with kernels.use("triton"):
        y = kernels.layer_norm(*tensors, eps=eps)
        got = (y, *torch.autograd.grad(y, tensors, dy))
    for a, b in zip(got, exact_with_grads(tensors, dy, eps), strict=True):
        assert distance(a, b) < 8 * torch.finfo(torch.float32).eps


def test_any_leading_shape(device: str) -> None:
    x, weight = normal(2, 3, 4, 20, device=device), normal(20, device=device)
    with kernels.use("triton"):
        full = kernels.layer_norm(x, weight, eps=EPS)
        assert torch.equal(kernels.layer_norm(x[1, 2, 3], weight, eps=EPS), full[1, 2, 3])
        assert torch.equal(kernels.layer_norm(x.transpose(0, 2), weight, eps=EPS), full.transpose(0, 2))
        assert kernels.layer_norm(x[:, :0], weight, eps=EPS).shape == (2, 0, 4, 20)


def test_gradients_share_no_storage(device: str) -> None:
    x, weight, bias = normal(5, 16, device=device), *(normal(16, device=device, seed=s).requires_grad_() for s in (1, 2))
    with kernels.use("triton"):
        kernels.layer_norm(x, weight, bias, eps=EPS).sum().backward()
    assert weight.grad.untyped_storage().data_ptr() != bias.grad.untyped_storage().data_ptr()


def test_second_derivative_is_refused(device: str) -> None:
    x = normal(3, 8, device=device).requires_grad_()
    with kernels.use("triton"):
        y = kernels.layer_norm(x, eps=EPS)
        (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
