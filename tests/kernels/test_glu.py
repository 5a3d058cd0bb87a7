"""Gated linear units: the facts that the contract does not hold for every op."""

import math

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.glu import _glu_packed_reference, _glu_reference

FORMS = {
    "swiglu": (lambda gate, up: kernels.swiglu(gate, up), "silu"),
    "geglu": (lambda gate, up: kernels.geglu(gate, up), "gelu_tanh"),
    "geglu-erf": (lambda gate, up: kernels.geglu(gate, up, approximate="none"), "gelu"),
}


def by_hand(x: float, activation: str) -> float:
    if activation == "silu":
        return x / (1 + math.exp(-x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("form", FORMS)
def test_reference_is_the_formula(form: str) -> None:
    points = [-6.0, -1.5, -0.1, 0.0, 0.3, 2.0, 7.0]
    gate = torch.tensor(points, dtype=torch.float64)
    got = _glu_reference(gate, torch.full_like(gate, 3.0), FORMS[form][1])
    expected = torch.tensor([3.0 * by_hand(x, FORMS[form][1]) for x in points], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_kernel_over_the_whole_range(form: str, device: str, triton_dtype: torch.dtype) -> None:
    """Values and slopes at large |x|, where the naive forms overflow or cancel."""
    gate = torch.linspace(-40.0, 40.0, 4001, dtype=torch.float64).to(triton_dtype).to(device).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    with kernels.use("triton"):
        out = FORMS[form][0](gate, up)
        out.sum().backward()
    exact = gate.detach().double().requires_grad_()
    expected = _glu_reference(exact, torch.ones_like(exact), FORMS[form][1])
    expected.sum().backward()
    # A result of up to 40 (a slope of up to 1.13) is rounded once, after a few fp32 steps.
    rounding, inside = torch.finfo(triton_dtype).eps, 4 * torch.finfo(torch.float32).eps
    assert (out.double() - expected).abs().max() <= 40 * (rounding + inside)
    assert (gate.grad.double() - exact.grad).abs().max() <= rounding + inside


def test_swiglu_forward_has_eagers_bits(device: str, triton_dtype: torch.dtype) -> None:
    """In bf16 each bit; fp16 keeps three bits more, so that exponentials that differ in fp32 show now and then."""
    if triton_dtype == torch.float32:
        pytest.skip("nothing rounds away how an exponential is computed in fp32")
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(64, 257, generator=generator).to(triton_dtype).to(device) * 4 for _ in range(2))
    with kernels.use("triton"):
        differ = (kernels.swiglu(gate, up) != torch.nn.functional.silu(gate) * up).sum().item()
    assert differ <= (0 if triton_dtype == torch.bfloat16 else gate.numel() // 1000)


@pytest.mark.parametrize("gate_dtype, up_dtype", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes_follow_promotion(device: str, gate_dtype: torch.dtype, up_dtype: torch.dtype) -> None:
    gate, up = (
        torch.randn(3, 33, device=device).to(gate_dtype).requires_grad_(),
        torch.randn(3, 33, device=device).to(up_dtype).requires_grad_(),
    )
    with kernels.use("triton"):
        out = kernels.swiglu(gate, up)
        out.sum().backward()
    eager = torch.nn.functional.silu(gate) * up
    assert out.dtype == eager.dtype == torch.float32
    torch.testing.assert_close(out, eager, rtol=1e-6, atol=1e-6)
    assert (gate.grad.dtype, up.grad.dtype) == (gate_dtype, up_dtype)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_packed_equals_separate_halves(name: str, device: str) -> None:
    """The same bits, from halves read in place (views of one tensor) and from copies of them."""
    gate_up = torch.randn(2, 5, 2 * 37, device=device, requires_grad=True)
    grad = torch.randn(2, 5, 37, device=device)

    def run(halves: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        out = getattr(kernels, name)(*halves) if halves else getattr(kernels, name + "_packed")(gate_up)
        return out, torch.autograd.grad(out, gate_up, grad)[0]

    with kernels.use("triton"):
        packed = run(None)
        views = run(gate_up.chunk(2, dim=-1))
        copies = run(tuple(half.contiguous() for half in gate_up.chunk(2, dim=-1)))
    for other in (views, copies):
        assert torch.equal(packed[0], other[0]) and torch.equal(packed[1], other[1])


def test_several_column_blocks(device: str) -> None:
    """A width above one program's block, and no multiple of it."""
    gate_up = torch.randn(2, 2 * 4099, device=device, requires_grad=True)
    with kernels.use("triton"):
        out = kernels.swiglu_packed(gate_up)
        (got,) = torch.autograd.grad(out.sum(), gate_up)
    exact = gate_up.detach().double().requires_grad_()
    expected = _glu_packed_reference(exact, "silu")
    (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.double(), expected_grad, rtol=0, atol=1e-5)
