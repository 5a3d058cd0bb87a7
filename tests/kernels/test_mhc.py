"""Manifold-constrained hyper-connections: what the formulas promise, on the reference and on the kernels, and a published form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ligerformer import kernels

MODES = ["reference", "triton"]
FORMS: dict[str, dict[str, Any]] = {
    "paper": {"eps": 1e-6},
    "published": {"eps": 1e-6, "pre_eps": 1e-6, "sinkhorn_eps": 1e-6, "res_layout": "in_out"},
}


def parameters(n: int, hidden_size: int, device: str, dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """phi, bias, alpha with logits that spread by about ``spread``."""
    generator = torch.Generator().manual_seed(n)
    columns = n * n + 2 * n
    phi = torch.randn(n * hidden_size, columns, generator=generator, dtype=torch.float64) * (n * hidden_size) ** -0.5
    bias, alpha = torch.randn(columns, generator=generator, dtype=torch.float64), torch.tensor([1.0, -0.7, 1.0], dtype=torch.float64)
    return tuple((t * spread).to(dtype).to(device) for t in (phi, bias, alpha))


def streams(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device)


def sublayer(x: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, y_scale: Tensor, **options: Any) -> Tensor:
    """Coefficients, read, a branch, write."""
    pre, post, mix = kernels.mhc_coefficients(x, phi, bias, alpha, **options)
    return kernels.mhc_write(x, torch.tanh(kernels.mhc_read(x, pre) * y_scale), post, mix)


def near(a: Tensor, b: Tensor, ulps: float) -> None:
    """max|a - b| / max|b| in units of the epsilon of ``a``'s dtype."""
    error = (a.double() - b.double()).abs().max().item()
    assert error <= ulps * torch.finfo(a.dtype).eps * b.double().abs().max().item(), f"off by {error}"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_of_a_sublayer(n: int, form: str) -> None:
    x, y_scale = streams(2, n, 3, device="cpu", dtype=torch.float64), streams(3, device="cpu", dtype=torch.float64, seed=1)
    inputs = [t.requires_grad_() for t in (x, *parameters(n, 3, "cpu", torch.float64), y_scale)]
    torch.autograd.gradcheck(lambda *args: sublayer(*args, iterations=5, **FORMS[form]), inputs)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_kernels_against_fp64(n: int, form: str, device: str, triton_dtype: torch.dtype) -> None:
    """A whole sublayer, forward and backward. Gradients add three terms that were each rounded to x's dtype: hence 8 ulps."""
    inputs = (streams(5, n, 45, device=device, dtype=triton_dtype), *parameters(n, 45, device, torch.float32))
    inputs = (*inputs, streams(45, device=device, dtype=triton_dtype, seed=1))
    grown = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    with kernels.use("triton"):
        out = sublayer(*grown, **FORMS[form])
        grad = streams(*out.shape, device=device, dtype=out.dtype, seed=2)
        grads = torch.autograd.grad(out, grown, grad)
    with kernels.use("reference"):
        expected = sublayer(*exact, **FORMS[form])
        expected_grads = torch.autograd.grad(expected, exact, grad.double())
    near(out, expected, 8)
    for name, a, b in zip(("x", "phi", "bias", "alpha", "y_scale"), grads, expected_grads, strict=True):
        assert a.dtype == dict(zip(("x", "phi", "bias", "alpha", "y_scale"), inputs, strict=True))[name].dtype
        # what comes back through Sinkhorn has passed 4 divisions an iteration, each good to 2 ulps on a GPU: 16, as in the contract's table
        near(a.to(triton_dtype), b, 8 if name in ("x", "y_scale") else 16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_rows_sum_to_one(mode: str, n: int, device: str) -> None:
    """Rows, not columns: after one iteration only the lines that were normalised last sum to 1."""
    x = streams(7, n, 33, device=device, dtype=torch.float32)
    for iterations in (1, 20):
        with kernels.use(mode):
            _, _, mix = kernels.mhc_coefficients(x, *parameters(n, 33, device, torch.float32, 2.0), eps=1e-6, iterations=iterations)
        assert mix.min() >= 0
        torch.testing.assert_close(mix.sum(-1), torch.ones_like(mix[..., 0]), rtol=0, atol=1e-6)
        if iterations == 1:
            assert (mix.sum(-2) - 1).abs().max() > 0.05


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_orientation(mode: str, layout: str, device: str) -> None:
    """A large logit for (out 0, in 2) sends old stream 2 to new stream 0, and not the other way."""
    n, hidden_size = 3, 5
    x = streams(2, n, hidden_size, device=device, dtype=torch.float32)
    bias = torch.zeros(n * n + 2 * n, device=device)
    bias[2 * n + (0 * n + 2 if layout == "out_in" else 2 * n + 0)] = 9.0
    phi, alpha = torch.zeros(n * hidden_size, n * n + 2 * n, device=device), torch.ones(3, device=device)
    with kernels.use(mode):
        _, post, mix = kernels.mhc_coefficients(x, phi, bias, alpha, eps=1e-6, res_layout=layout)
        out = kernels.mhc_write(x, torch.zeros_like(x[:, 0]), post, mix)
    assert (mix[:, 0, 2] > 0.9).all() and (mix[:, 2, 0] < 0.6).all()
    torch.testing.assert_close(out, torch.einsum("toi,tic->toc", mix, x))
    assert (out[:, 0] - x[:, 2]).abs().max() < 0.1 * x.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_a_deep_product_stays_bounded(mode: str, device: str) -> None:
    """120 random mixes keep a gain of 1; without the manifold (identity plus tanh of the same logits) the product runs away."""
    n, hidden_size, depth = 4, 16, 120
    x = streams(depth, n, hidden_size, device=device, dtype=torch.float32)
    phi, bias, alpha = parameters(n, hidden_size, device, torch.float32, 2.0)
    with kernels.use(mode):
        _, _, mix = kernels.mhc_coefficients(x, phi, bias, alpha, eps=1e-6)
    logits = (
        bias[2 * n :].view(n, n)
        + alpha[2] * (x.flatten(1) @ phi[:, 2 * n :]).view(depth, n, n) / x.square().mean((1, 2)).sqrt()[:, None, None]
    )
    product, control = torch.eye(n, device=device), torch.eye(n, device=device)
    for layer in range(depth):
        product = mix[layer] @ product
        control = (torch.eye(n, device=device) + 0.5 * torch.tanh(logits[layer])) @ control
    assert abs(product.sum(-1) - 1).max() < 1e-4 and product.min() >= 0
    assert control.abs().max() > 1e3


@pytest.mark.parametrize("mode", MODES)
def test_permuting_the_streams_permutes_the_output(mode: str, device: str) -> None:
    n, hidden_size = 4, 9
    order = torch.tensor([2, 0, 3, 1], device=device)
    x, y_scale = streams(6, n, hidden_size, device=device, dtype=torch.float32), torch.ones(hidden_size, device=device)
    phi, bias, alpha = parameters(n, hidden_size, device, torch.float32)
    columns = torch.cat([order, n + order, (2 * n + order[:, None] * n + order[None, :]).flatten()])
    permuted = phi.view(n, hidden_size, -1)[order].flatten(0, 1)[:, columns], bias[columns], alpha
    with kernels.use(mode):
        expected = sublayer(x, phi, bias, alpha, y_scale, eps=1e-6)[:, order]
        torch.testing.assert_close(sublayer(x[:, order], *permuted, y_scale, eps=1e-6), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_scaling_the_streams_leaves_the_coefficients(mode: str, device: str) -> None:
    x = streams(6, 4, 21, device=device, dtype=torch.float32)
    with kernels.use(mode):
        plain = kernels.mhc_coefficients(x, *parameters(4, 21, device, torch.float32), eps=0.0)
        scaled = kernels.mhc_coefficients(x * 1024, *parameters(4, 21, device, torch.float32), eps=0.0)
    for a, b in zip(plain, scaled, strict=True):
        near(a, b, 4)


@pytest.mark.parametrize("tokens, n, hidden_size", [(1, 4, 1), (1, 8, 5), (13, 2, 127), (13, 5, 129), (83, 1, 140), (66, 2, 257)])
def test_ragged_sizes(tokens: int, n: int, hidden_size: int, device: str) -> None:
    """Odd and prime sizes, one token, several splits of columns (forward) and of tokens (backward)."""
    inputs = (streams(tokens, n, hidden_size, device=device, dtype=torch.float32), *parameters(n, hidden_size, device, torch.float32))
    inputs = (*inputs, torch.ones(hidden_size, device=device))
    results = []
    for mode, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        grown = [t.to(dtype).requires_grad_() for t in inputs]
        with kernels.use(mode):
            out = sublayer(*grown, eps=1e-6, iterations=3)
            results.append((out, *torch.autograd.grad(out, grown, torch.ones_like(out))))
    for a, b in zip(*results, strict=True):
        near(a, b, 32)  # sums over tokens of terms that cancel


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_logits_far_apart(mode: str, form: str, device: str) -> None:
    """Logits hundreds apart, whose exponentials underflow in any sum: finite coefficients and gradients, in the paper's form rows of 1."""
    n = 4
    x = streams(50, n, 8, device=device, dtype=torch.float32)
    phi, bias, alpha = (t.requires_grad_() for t in parameters(n, 8, device, torch.float32, 20.0))
    with kernels.use(mode):
        outputs = kernels.mhc_coefficients(x, phi, bias, alpha, **FORMS[form])
        grads = torch.autograd.grad(outputs, (phi, bias, alpha), [torch.ones_like(o) for o in outputs])
    assert all(t.isfinite().all() for t in (*outputs, *grads))
    if form == "paper":
        torch.testing.assert_close(outputs[2].sum(-1), torch.ones_like(outputs[2][..., 0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_expanded_streams_and_leading_dims(mode: str, device: str) -> None:
    """An embedding repeated n times without a copy (stride 0), under any leading dims, is what the copy is."""
    x = streams(2, 3, 1, 19, device=device, dtype=torch.float32).expand(2, 3, 4, 19)
    args = (*parameters(4, 19, device, torch.float32), torch.ones(19, device=device))
    with kernels.use(mode):
        out = sublayer(x, *args, eps=1e-6)
        torch.testing.assert_close(out, sublayer(x.contiguous(), *args, eps=1e-6), rtol=0, atol=0)
        torch.testing.assert_close(out[1, 2], sublayer(x[1, 2], *args, eps=1e-6), rtol=1e-5, atol=1e-6)  # no leading dims at all
    assert out.shape == x.shape


@pytest.mark.parametrize("mode", MODES)
def test_mixed_dtypes(mode: str, device: str) -> None:
    """Half streams with fp32 parameters and the reverse; the written streams have the type of x + y; coefficients stay fp32."""
    half, wide = torch.float16, torch.float32
    for x_dtype, phi_dtype, y_dtype, out_dtype in ((half, wide, half, half), (wide, half, half, wide), (half, half, wide, wide)):
        x, y = streams(5, 4, 24, device=device, dtype=x_dtype), streams(5, 24, device=device, dtype=y_dtype, seed=1)
        phi, bias, alpha = parameters(4, 24, device, wide)
        with kernels.use(mode):
            pre, post, mix = kernels.mhc_coefficients(x, phi.to(phi_dtype), bias, alpha, eps=1e-6)
            assert {pre.dtype, post.dtype, mix.dtype} == {wide}
            assert kernels.mhc_read(x, pre).dtype == x_dtype
            out = kernels.mhc_write(x, y, post, mix)
        assert out.dtype == out_dtype
        expected = torch.einsum("toi,tic->toc", mix.double(), x.double()) + post.double()[..., None] * y.double()[:, None]
        near(out, expected, 2)


def test_autocast_leaves_the_coefficients_in_fp32(device: str) -> None:
    x = streams(3, 4, 64, device=device, dtype=torch.float32)
    args = (x, *parameters(4, 64, device, torch.float32))
    with kernels.use("reference"):
        plain = kernels.mhc_coefficients(*args, eps=1e-6)
        with torch.autocast(device, torch.bfloat16):
            cast = kernels.mhc_coefficients(*args, eps=1e-6)
    for a, b in zip(cast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_the_reading_coefficients_alone(mode: str, device: str) -> None:
    x = streams(5, 4, 17, device=device, dtype=torch.float32)
    phi, bias, alpha = parameters(4, 17, device, torch.float32)
    with kernels.use(mode):
        pre, _, _ = kernels.mhc_coefficients(x, phi, bias, alpha, eps=1e-6, pre_eps=1e-3)
        alone = kernels.mhc_pre(x, phi[:, :4].contiguous(), bias[:4], alpha[:1], eps=1e-6, pre_eps=1e-3)
    near(alone, pre, 4)


# ---- transformers' DeepSeek-V4 ----


@pytest.fixture
def deepseek(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' modules with their fp32 islands kept in fp64 where the input is."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    plain_float = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else plain_float(self))
    return modeling


def test_parity_with_a_published_sublayer(deepseek: Any) -> None:
    """Coefficients, read and write with their gradients, in fp64. transformers holds phi transposed, and the mix as [in, out]."""
    config = deepseek.DeepseekV4Config(hc_mult=4, hidden_size=37, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5)
    module = deepseek.DeepseekV4HyperConnection(config).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = streams(2, 5, 4, 37, device="cpu", dtype=torch.float64).requires_grad_()
    y = streams(2, 5, 37, device="cpu", dtype=torch.float64, seed=1).requires_grad_()
    inputs = (x, y, module.fn, module.base, module.scale)

    post, comb, collapsed = module(x)
    expected = (collapsed, post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ x)
    with kernels.use("reference"):
        options = FORMS["published"] | {"eps": 1e-5}
        pre, post, mix = kernels.mhc_coefficients(x, module.fn.T, module.base, module.scale, **options)
        got = (kernels.mhc_read(x, pre), kernels.mhc_write(x, y, post, mix))
    arriving = [streams(*o.shape, device="cpu", dtype=torch.float64, seed=2) for o in expected]
    grads = torch.autograd.grad(got, inputs, arriving)
    for a, b in zip((*got, *grads), (*expected, *torch.autograd.grad(expected, inputs, arriving)), strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_parity_with_a_published_collapse(deepseek: Any) -> None:
    config = deepseek.DeepseekV4Config(hc_mult=4, hidden_size=37, hc_eps=1e-6, rms_norm_eps=1e-5)
    module = deepseek.DeepseekV4HyperHead(config).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = streams(2, 5, 4, 37, device="cpu", dtype=torch.float64)
    with kernels.use("reference"):
        pre = kernels.mhc_pre(x, module.hc_fn.T, module.hc_base, module.hc_scale, eps=1e-5, pre_eps=1e-6)
        got = kernels.mhc_read(x, pre)
    assert (got - module(x)).abs().max() <= 1e-12 * got.abs().max()
