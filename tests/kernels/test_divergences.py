"""kl_div, jsd and tvd: against torch and the definitions, the kernels against the reference in fp64, and the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerformer import kernels
from ligerformer.kernels.divergences import _jsd_reference, _kl_div_reference, _tvd_reference, jsd, kl_div, tvd

INF = math.inf
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def draw(*shape, dtype=torch.float64, device="cpu", seed=0, logs=(True, True), std=2.0):
    """Two distributions over the last dimension, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(*shape, generator=generator, dtype=torch.float64) * std for _ in logs]
    values = [z.log_softmax(-1) if log else z.softmax(-1) for z, log in zip(logits, logs, strict=True)]
    return [v.to(device, dtype).requires_grad_() for v in values]


def ramp(losses):
    """From 0 to 2: an upstream gradient that differs from loss to loss."""
    count = losses.numel()
    return (torch.arange(1, count + 1, device=losses.device) * 2 / (count + 1)).to(losses.dtype).reshape(losses.shape)


def results(function, x, y):
    """(loss, dx, dy)"""
    loss = function(x, y)
    return [loss.detach(), *torch.autograd.grad((loss * ramp(loss)).sum(), (x, y))]


def assert_close(actual, expected, ulps):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        info = torch.finfo(a.dtype)
        error = (a.double() - b.double()).abs().max().item()
        # What is 0 is 1e-17 to the oracle; half of the smallest step is lost where a dtype has no smaller one.
        bound = ulps * info.eps * b.abs().max().item() + max(1e-15, info.smallest_normal * info.eps / 2)
        assert error <= bound, f"{i}: {error:.2e} is over {bound:.2e}, {ulps} ulps"


def oracle(function, x, y):
    return results(function, *(t.detach().double().requires_grad_() for t in (x, y)))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_reference_is_torchs(reduction, log_target):
    x, y = draw(3, 4, 7, logs=(True, log_target))
    options = {"reduction": reduction, "log_target": log_target}
    expected = results(lambda x, y: torch.nn.functional.kl_div(x, y, **options), x, y)
    for a, b in zip(results(lambda x, y: kl_div(x, y, **options), x, y), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_reference_is_its_definition(beta):
    x, y = draw(5, 7)
    q, p = x.exp(), y.exp()
    m = beta * p + (1 - beta) * q
    rows = {0.0: (p * (p / q).log()).sum(-1), 1.0: (q * (q / p).log()).sum(-1)}.get(
        beta, (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)
    )
    labels = torch.tensor([1, -100, 2, 3, -100])
    kept = labels >= 0
    expected = {"none": rows * kept, "sum": rows[kept].sum(), "batchmean": rows[kept].mean(), "mean": rows[kept].mean() / 7}
    for reduction, value in expected.items():
        actual = jsd(x, y, beta=beta, labels=labels, reduction=reduction)
        torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-14)


def test_jsd_of_disjoint_distributions_is_the_log_of_two(device):
    x = torch.tensor([[0.0, -INF, -INF]], device=device)
    y = torch.tensor([[-INF, 0.0, -INF]], device=device)
    with kernels.use("triton"):
        assert jsd(x, y).item() == pytest.approx(math.log(2), rel=1e-6)
        assert tvd(x.exp(), y.exp()).item() == 1.0


def test_tvd_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).requires_grad_(), torch.tensor([[0.25, 0.5, 0.25]]).requires_grad_()
    loss, dp, dq = results(tvd, p, q)
    assert loss.item() == 0.25 and dp.tolist() == [[0.5, -0.5, 0.0]] and dq.tolist() == [[-0.5, 0.5, 0.0]]


def test_tvd_of_equals_has_no_gradient(device):
    x = torch.full((2, 40), 0.025, device=device, requires_grad=True)
    with kernels.use("triton"):
        loss, dx, dy = results(tvd, x, x.detach().clone().requires_grad_())
    assert loss.item() == 0.0 and dx.count_nonzero() == 0 and dy.count_nonzero() == 0


FUNCTIONS = {
    "kl": ((True, False), lambda x, y, reduction: kl_div(x, y, reduction=reduction)),
    "kl_log": ((True, True), lambda x, y, reduction: kl_div(x, y, reduction=reduction, log_target=True)),
    **{
        f"jsd{beta}": ((True, True), lambda x, y, reduction, beta=beta: jsd(x, y, beta=beta, reduction=reduction))
        for beta in (0.0, 0.1, 0.5, 1.0)
    },
    "tvd": ((False, False), lambda x, y, reduction: tvd(x, y, reduction=reduction)),
}


@pytest.mark.parametrize("num_classes", [1, 64, 9001])  # 9001: a row in several programs of several blocks, the last one partial
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "none"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_against_fp64(name, reduction, num_classes, triton_dtype, device):
    logs, function = FUNCTIONS[name]
    x, y = draw(2, 2, num_classes, logs=logs, dtype=triton_dtype, device=device)
    with kernels.use("triton"):
        actual = results(lambda x, y: function(x, y, reduction), x, y)
    with kernels.use("reference"):
        expected = oracle(lambda x, y: function(x, y, reduction), x, y)
    assert actual[0].dtype == torch.float32 and actual[1].dtype == actual[2].dtype == triton_dtype
    assert_close(actual[:1], expected[:1], 16)  # a sum of terms of both signs
    assert_close(actual[1:], expected[1:], 8)


def test_mixed_dtypes(device):
    x, y = draw(3, 65, device=device)
    x, y = x.detach().half().requires_grad_(), y.detach().float().requires_grad_()
    with kernels.use("triton"):
        actual = results(jsd, x, y)
    assert [t.dtype for t in actual] == [torch.float32, torch.float16, torch.float32]
    with kernels.use("reference"):
        assert_close(actual, oracle(jsd, x, y), 8)


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_probability_zero_contributes_nothing(mode, device):
    """On either side, in both forms, against any log-probability; gradients are 0 there and finite elsewhere."""
    x = torch.tensor([[math.log(0.5), math.log(0.5), -INF, -INF]], device=device).requires_grad_()
    y = torch.tensor([[0.0, -INF, -INF, -INF]], device=device).requires_grad_()
    t = y.detach().exp().requires_grad_()
    calls = {
        "kl": (lambda: kl_div(x, t), t, math.log(2)),
        "kl_log": (lambda: kl_div(x, y, log_target=True), y, math.log(2)),
        "forward": (lambda: jsd(x, y, beta=0.0), y, math.log(2)),
        "jsd": (lambda: jsd(x, y), y, 0.5 * math.log(1 / 0.75) + 0.25 * math.log(0.5 / 0.75) + 0.25 * math.log(2)),
        "reverse": (lambda: jsd(y, x, beta=1.0), y, math.log(2)),
    }
    for name, (call, target, expected) in calls.items():
        with kernels.use(mode):
            loss = call()
        gradients = torch.autograd.grad(loss, (x, target))
        assert loss.item() == pytest.approx(expected, rel=1e-6), name
        assert all(torch.isfinite(g).all() for g in gradients), name
        assert all(g[0, 2:].count_nonzero() == 0 for g in gradients) and gradients[1][0, 1] == 0, name


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_positive_probability_against_zero_is_infinite(mode, device):
    x, y = torch.tensor([[-INF, 0.0]], device=device), torch.tensor([[math.log(0.5), math.log(0.5)]], device=device)
    with kernels.use(mode):
        assert kl_div(x, y.exp()).item() == INF and kl_div(x, y, log_target=True).item() == INF
        assert jsd(x, y, beta=0.0).item() == INF and jsd(y, x, beta=1.0).item() == INF


@pytest.mark.parametrize("beta", [*BETAS, 1e-9])
def test_peaked_distributions_are_finite(beta, device):
    """Log-probabilities down to -1e4, and a mixture that would underflow: what exp(m) alone would turn into log 0."""
    x, y = draw(3, 97, dtype=torch.float32, device=device, std=3e3)
    with kernels.use("triton"):
        actual = results(lambda x, y: jsd(x, y, beta=beta), x, y)
    assert all(torch.isfinite(t).all() for t in actual)
    with kernels.use("reference"):
        assert_close(actual, oracle(lambda x, y: jsd(x, y, beta=beta), x, y), 8)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("side", [0, 1])
def test_nan_is_not_hidden(name, side, device):
    logs, function = FUNCTIONS[name]
    inputs = [t.detach() for t in draw(3, 33, logs=logs, dtype=torch.float32, device=device)]
    inputs[side][1, 32] = math.nan
    with kernels.use("triton"):
        losses = function(*inputs, "none").reshape(3, -1).sum(1)
    assert losses.isnan().tolist() == [False, True, False]


def test_close_distributions_keep_their_digits(device):
    """A student 1e-3 from its teacher: the divergence is 1e-7, which one rounding of the mixture's logarithm would drown."""
    x, y = draw(4, 53, dtype=torch.float32, device=device)
    y = (x.detach() + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(device)).requires_grad_()
    with kernels.use("triton"):
        actual = results(jsd, x, y)
    with kernels.use("reference"):
        expected = oracle(jsd, x, y)
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=2e-3)
    assert_close(actual[1:], expected[1:], 16)


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("op", [jsd, tvd])
def test_ignored_rows_have_no_say(op, mode, device):
    """Not even by NaN; and all ignored, or no rows at all, is a loss of 0 with zero gradients."""
    x, y = draw(5, 33, dtype=torch.float32, device=device)
    labels = torch.tensor([7, 3, 7, 10**9, 7], device=device)
    poisoned = [t.detach().clone().index_fill_(0, torch.tensor([0, 2, 4], device=device), math.nan).requires_grad_() for t in (x, y)]
    with kernels.use(mode):
        kept = results(lambda x, y: op(x, y), *(t.detach()[[1, 3]].requires_grad_() for t in (x, y)))
        actual = results(lambda x, y: op(x, y, labels=labels, ignore_index=7), *poisoned)
        nothing = results(lambda x, y: op(x, y, labels=torch.full_like(labels, 7), ignore_index=7), *poisoned)
        empty = results(lambda x, y: op(x, y), x.detach()[:0].requires_grad_(), y.detach()[:0].requires_grad_())
    torch.testing.assert_close(actual[0], kept[0], rtol=1e-6, atol=0)
    for a, b in zip(actual[1:], kept[1:], strict=True):
        assert a[[0, 2, 4]].count_nonzero() == 0
        torch.testing.assert_close(a[[1, 3]], b, rtol=1e-6, atol=1e-9)
    assert all(t.count_nonzero() == 0 for t in (*nothing, *empty))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 4), num_classes=st.integers(1, 70), name=st.sampled_from(list(FUNCTIONS)), seed=st.integers(0, 2**20),
    std=st.sampled_from([0.0, 1.0, 30.0]),
)  # fmt: skip
def test_any_size_and_scale(rows, num_classes, name, seed, std):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logs, function = FUNCTIONS[name]
    x, y = draw(rows, num_classes, logs=logs, dtype=torch.float32, device=device, seed=seed, std=std)
    with kernels.use("triton"):
        actual = results(lambda x, y: function(x, y, "sum"), x, y)
    with kernels.use("reference"):
        expected = oracle(lambda x, y: function(x, y, "sum"), x, y)
    # A logarithm near another's cancels: what is left of their difference is off by an ulp of either, however small it is itself.
    largest = max((t.detach().abs().max().item() for t in (x, y) if t.numel()), default=0.0)
    atol = max(1e-6, 2 * torch.finfo(torch.float32).eps * largest)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("op", [jsd, tvd])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_kept_gradients_survive_a_retained_graph(op, factor, device):
    """Backwards through a retained graph leave the kept gradients alone; the last one may write over them."""
    x, y = draw(3, 9001, dtype=torch.float32, device=device)
    with kernels.use("triton"):
        loss = op(x, y)
    upstream = torch.tensor(factor, device=device)
    once = torch.autograd.grad(loss, (x, y), retain_graph=True)
    scaled = torch.autograd.grad(loss, (x, y), upstream, retain_graph=True)
    copies = [g.clone() for g in (*once, *scaled)]
    last = torch.autograd.grad(loss, (x, y), upstream)
    for now, before in zip((*once, *scaled), copies, strict=True):
        assert torch.equal(now, before)
    for a, b, c in zip(once, scaled, last, strict=True):
        assert torch.equal(a * factor, b) and torch.equal(b, c)


def test_an_upstream_of_one_returns_the_kept_gradient_itself(device):
    """No pass over it: the buffer that the forward filled is the gradient."""
    x, y = draw(3, 65, dtype=torch.float32, device=device)
    y.requires_grad_(False)
    with kernels.use("triton"):
        loss = jsd(x, y)
    kept = loss.grad_fn.saved_tensors[0].data_ptr()
    assert torch.autograd.grad(loss, x)[0].data_ptr() == kept


def test_fp16_gradients_meet_the_loss_scale_before_they_are_rounded(device):
    """A gradient of 1e-8 is 0 in fp16, and 6e-4 once multiplied by a loss scale of 2**16."""
    x, y = draw(4, 4096, dtype=torch.float16, device=device, std=0.1)
    with kernels.use("triton"):
        loss = jsd(x, y, reduction="mean")
    gradient = torch.autograd.grad(loss * 2.0**16, x)[0]
    with kernels.use("reference"):
        exact = oracle(lambda x, y: jsd(x, y, reduction="mean") * 2.0**16, x, y)[1]
    assert_close([gradient], [exact], 8)


@pytest.mark.parametrize("make", [lambda x: x[:, :-1], lambda x: x.transpose(0, 1), lambda x: x[..., ::2]])
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_strided_inputs(make, reduction, device):
    x, y = draw(3, 5, 54, dtype=torch.float32, device=device)
    with kernels.use("triton"):
        actual = results(lambda x, y: jsd(make(x), make(y), reduction=reduction), x, y)
    with kernels.use("reference"):
        assert_close(actual, oracle(lambda x, y: jsd(make(x), make(y), reduction=reduction), x, y), 16)


def test_references_in_sixteen_bits_compute_in_fp32():
    x, y = draw(3, 7, dtype=torch.bfloat16)
    losses = [_kl_div_reference(x, y, "sum", True), _jsd_reference(x, y, None, -100, "sum", 0.5), _tvd_reference(x, y, None, -100, "sum")]
    exact = [_kl_div_reference(x.double(), y.double(), "sum", True), _jsd_reference(x.double(), y.double(), None, -100, "sum", 0.5)]
    assert all(loss.dtype == torch.float32 for loss in losses)
    for a, b in zip(losses, exact, strict=False):
        assert a.item() == pytest.approx(b.item(), rel=1e-5)


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan, "0.5"])
def test_beta_out_of_range(beta):
    x, y = draw(2, 3)
    with pytest.raises(ValueError, match="jsd: beta is"):
        jsd(x, y, beta=beta)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="21 GB of log-probabilities")
def test_offsets_beyond_32_bits():
    x = torch.full((40_000, 2**16 + 1), -10.0, dtype=torch.bfloat16, device="cuda")  # 2.6e9 elements
    y = x.clone()
    y[-1, -1] = -1.0
    x.requires_grad_()
    losses = jsd(x, y, beta=0.0, reduction="none")
    assert losses[-1].item() == pytest.approx(9 * math.exp(-1.0), rel=1e-5) and losses[:-1].count_nonzero() == 0
    loss = jsd(x, y, beta=0.0, reduction="sum")
    gradient = torch.autograd.grad(loss * 2.0, x)[0]
    assert gradient[-1, -1].item() == pytest.approx(-2 * math.exp(-1.0), rel=1e-2)
    assert gradient[-1, -2].item() == pytest.approx(-2 * math.exp(-10.0), rel=1e-2)
    kept = torch.autograd.grad(jsd(x, y, reduction="sum") * 3.0, x)[0]  # made in the forward, scaled where it lies
    assert kept[-1, -1].item() == pytest.approx(1.5 * math.exp(-10.0) * -math.log((1 + math.exp(9.0)) / 2), rel=2e-2)
