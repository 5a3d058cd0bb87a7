"""Norms: the bits of the families' own modules, mixed dtypes, sums that pass through, and the sizes where other kernels take over."""

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.norms import _rms_norm_reference
from ligerformer.kernels.norms_triton import WIDEST_BACKWARD

EPS = 1e-6


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_has_llamas_bits(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    for weight_dtype in (dtype, torch.float32):
        module = llama.LlamaRMSNorm(97, eps=EPS).to(weight_dtype)
        module.weight.data = normal(97, dtype=weight_dtype, seed=1)
        x = normal(33, 97, dtype=dtype)
        expected = module(x)
        got = kernels.rms_norm(x, module.weight, eps=EPS)
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_has_gemmas_bits(dtype: torch.dtype) -> None:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    for weight_dtype in (dtype, torch.float32):
        module = gemma.Gemma3RMSNorm(97, eps=EPS).to(weight_dtype)
        module.weight.data = normal(97, dtype=weight_dtype, seed=1)
        x = normal(33, 97, dtype=dtype)
        expected = module(x)
        got = kernels.rms_norm(x, module.weight, eps=EPS, offset=1.0, casting="fp32")
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("casting", ["input", "fp32"])
def test_offset_is_added_before_any_rounding(casting: str, device: str) -> None:
    """1 + w in bf16 would lose w's low bits."""
    x, weight = normal(5, 64, dtype=torch.bfloat16, device=device), normal(64, dtype=torch.bfloat16, device=device, seed=1) * 0.01
    got = kernels.rms_norm(x, weight, eps=EPS, offset=1.0, casting=casting)
    exact = _rms_norm_reference(x.double(), weight.double(), EPS, 1.0, casting)
    assert got.dtype == torch.bfloat16
    # "input" rounds twice, each time by half an ulp at most; 1 + w rounded besides would add as much again.
    assert ((got - exact).abs() <= (1.02 if casting == "input" else 0.51) * torch.finfo(torch.bfloat16).eps * exact.abs()).all()


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("casting", ["input", "fp32"])
def test_mixed_dtypes(mode: str, casting: str, device: str) -> None:
    """A weight in fp32 promotes the result with "input", not with "fp32"; each gradient has its input's dtype."""
    x = normal(7, 48, dtype=torch.float16, device=device).requires_grad_()
    residual = normal(7, 48, dtype=torch.float32, device=device, seed=2).requires_grad_()
    weight = normal(48, dtype=torch.float32, device=device, seed=1).requires_grad_()
    with kernels.use(mode):
        y = kernels.rms_norm(x, weight, eps=EPS, casting=casting)
        assert y.dtype == (torch.float32 if casting == "input" else torch.float16)
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
        assert dx.dtype == torch.float16 and dweight.dtype == torch.float32
        normed, summed = kernels.add_rms_norm(x, residual, weight, eps=EPS, casting=casting)
        assert normed.dtype == summed.dtype == torch.float32
        assert torch.equal(summed, x + residual)
        dx, dresidual = torch.autograd.grad((normed, summed), (x, residual), (normal(7, 48, device=device), summed.detach()))
    assert dx.dtype == torch.float16 and torch.equal(dx, dresidual.half())


def test_fp64_weight_is_the_references(device: str) -> None:
    x, weight = normal(3, 8, device=device), normal(8, dtype=torch.float64, device=device)
    assert kernels.rms_norm(x, weight, eps=EPS).dtype == torch.float64
    with kernels.use("triton"), pytest.raises(ValueError, match="float64"):
        kernels.rms_norm(x, weight, eps=EPS)


def test_sum_has_eagers_bits(device: str, triton_dtype: torch.dtype) -> None:
    x, residual = (normal(33, 257, dtype=triton_dtype, device=device, seed=s) * 7 for s in (0, 1))
    with kernels.use("triton"):
        _, summed = kernels.add_rms_norm(x, residual, eps=EPS)
    assert torch.equal(summed, x + residual)


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("used", ["normed", "summed", "both"])
def test_gradients_to_either_output(mode: str, used: str, device: str) -> None:
    """Only the sum used: its gradient passes through; both: they add up, in x and in the residual, whose .grad are not one storage."""
    x, residual = (normal(5, 40, device=device, seed=s).requires_grad_() for s in (0, 1))
    weight = normal(40, device=device, seed=2).requires_grad_()
    to_normed, to_summed = normal(5, 40, device=device, seed=3), normal(5, 40, device=device, seed=4)
    exact = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    with kernels.use(mode):
        normed, summed = kernels.add_rms_norm(x, residual, weight, eps=EPS)
    exact_summed = exact[0] + exact[1]
    exact_normed = _rms_norm_reference(exact_summed, exact[2], EPS, 0.0, "input")
    for outputs in ((normed, summed), (exact_normed, exact_summed)):
        chosen = [(o, g.to(o.dtype)) for o, g, n in zip(outputs, (to_normed, to_summed), ("normed", "summed")) if used in (n, "both")]
        torch.autograd.backward(*zip(*chosen))
    for ours, theirs in zip((x, residual, weight), exact):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any()
        else:
            assert distance(ours.grad, theirs.grad) < 4 * torch.finfo(torch.float32).eps
    kept = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, kept)


def test_residual_chain(device: str, triton_dtype: torch.dtype) -> None:
    """The shape of a decoder: each sum feeds the next, and the same tensor is x and residual at once."""

    def chain(h: Tensor, weight: Tensor) -> Tensor:
        normed, summed = kernels.add_rms_norm(h, h, weight, eps=EPS)
        for _ in range(3):
            normed, summed = kernels.add_rms_norm(normed * 0.5, summed, weight, eps=EPS)
        return normed + summed

    h = normal(6, 33, dtype=triton_dtype, device=device).requires_grad_()
    weight = normal(33, dtype=triton_dtype, device=device, seed=1).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (h, weight)]
    with kernels.use("triton"):
        got = torch.autograd.grad(chain(h, weight).sum(), (h, weight))
    expected = torch.autograd.grad(chain(*exact).sum(), exact)
    for a, b in zip(got, expected):
        assert distance(a, b) < 16 * torch.finfo(triton_dtype).eps  # four norms and sums one after the other


@pytest.mark.parametrize("width", [1, 2, 3, 64, 127, 1000, WIDEST_BACKWARD, WIDEST_BACKWARD + 1])
def test_widths_and_many_rows(width: int, device: str) -> None:
    """More rows than programs, whose number on no GPU is small; widths about the edges of the tiles."""
    rows = 3 if width > 1000 else 67
    x = normal(rows, width, device=device).requires_grad_()
    weight = normal(width, device=device, seed=1).requires_grad_()
    dy = normal(rows, width, device=device, seed=2)
    eps = 0.1  # a row of one column has a slope of eps alone
    with kernels.use("triton"):
        y = kernels.rms_norm(x, weight, eps=eps)
        got = (y, *torch.autograd.grad(y, (x, weight), dy))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact_y = _rms_norm_reference(*exact, eps, 0.0, "input")
    for a, b in zip(got, (exact_y, *torch.autograd.grad(exact_y, exact, dy.double()))):
        assert distance(a.detach(), b.detach()) < 8 * torch.finfo(torch.float32).eps


def test_any_leading_shape(device: str) -> None:
    x, weight = normal(2, 3, 4, 20, device=device), normal(20, device=device)
    with kernels.use("triton"):
        full = kernels.rms_norm(x, weight, eps=EPS)
        assert torch.equal(kernels.rms_norm(x[1, 2, 3], weight, eps=EPS), full[1, 2, 3])
        assert torch.equal(kernels.rms_norm(x.transpose(0, 2), weight, eps=EPS), full.transpose(0, 2))
        assert kernels.rms_norm(x[:, :0], weight, eps=EPS).shape == (2, 0, 4, 20)


def test_second_derivative_is_refused(device: str) -> None:
    x = normal(3, 8, device=device).requires_grad_()
    with kernels.use("triton"):
        y = kernels.rms_norm(x, eps=EPS)
        (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
