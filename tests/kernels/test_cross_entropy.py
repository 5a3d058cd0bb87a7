"""cross_entropy: against torch's own where that has the option, the kernels against the reference in fp64, and the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerformer import kernels
from ligerformer.kernels.cross_entropy import _cross_entropy_reference, cross_entropy

OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "capped": {"softcap": 4.0},
    "z_loss": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.2, "softcap": 4.0, "z_loss": 1e-2},
}


def draw(*shape, num_classes=53, dtype=torch.float64, device="cpu", seed=0, std=3.0):
    """Logits representable in bf16, labels with some ignored, class weights."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, num_classes, generator=generator) * std).bfloat16().to(device, dtype)
    labels = torch.randint(0, num_classes, shape, generator=generator)
    labels.view(-1)[2::4] = -100
    weight = (torch.rand(num_classes, generator=generator) + 0.25).to(device, torch.float32)
    return logits.requires_grad_(), labels.to(device), weight


def oracle(logits, labels, class_weight=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"):
    """Loss and gradient in fp64, by the reference."""
    x = logits.detach().double().requires_grad_()
    losses = _cross_entropy_reference(x, labels, class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    return losses, torch.autograd.grad((losses * ramp(losses)).sum(), x)[0]


def ramp(losses):
    """An upstream gradient that differs from token to token."""
    return torch.arange(1, losses.numel() + 1, device=losses.device).to(losses.dtype).reshape(losses.shape)


def close(actual, expected, ulps, floor=0.0):
    """max|a - b| within ``ulps`` of the actual dtype's epsilon in units of max|b|, or of ``floor`` where b itself may cancel to nothing."""
    scale = max(expected.abs().max().item(), floor) if expected.numel() else 1.0
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    bound = ulps * torch.finfo(actual.dtype).eps * scale
    assert error <= bound, f"{error:.2e} is over {bound:.2e}, {ulps} ulps"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_reference_is_torchs_cross_entropy(reduction, weighted, label_smoothing):
    logits, labels, weight = draw(3, 7)
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), weight=weight.double() if weighted else None, **options
    )
    actual = cross_entropy(logits, labels, class_weight=weight if weighted else None, **options)
    torch.testing.assert_close(actual.flatten(), expected.reshape(actual.shape).flatten(), rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad((x.flatten() * ramp(x.flatten())).sum(), logits)[0] for x in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reference_gradient_is_its_derivative(options):
    logits, labels, weight = draw(2, 5, num_classes=7)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, class_weight=weight, **options), logits)


def test_z_loss_and_softcap_by_their_formulas():
    logits, labels, weight = draw(2, 5)
    z = 4.0 * torch.tanh(logits / 4.0)
    lse, kept = torch.logsumexp(z, -1), labels >= 0
    label_weight = torch.where(kept, weight.double()[labels.clamp(min=0)], 0)
    losses = label_weight * (lse - z.gather(-1, labels.clamp(min=0)[..., None])[..., 0] + 0.3 * lse**2)
    actual = cross_entropy(logits, labels, z_loss=0.3, softcap=4.0, class_weight=weight)
    torch.testing.assert_close(actual, losses.sum() / label_weight.sum(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("num_classes", [1, 53, 64, 4999])  # 4999: whole blocks and a partial one
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_kernels_against_fp64(num_classes, options, reduction, triton_dtype, device):
    logits, labels, weight = draw(2, 3, num_classes=num_classes, dtype=triton_dtype, device=device)
    options = {**options, "reduction": reduction, "class_weight": weight if num_classes == 64 else None}
    with kernels.use("triton"):
        losses = cross_entropy(logits, labels, **options)
    gradient = torch.autograd.grad((losses * ramp(losses)).sum(), logits)[0]
    expected, expected_gradient = oracle(logits, labels, **options)
    assert losses.dtype == torch.float32 and gradient.dtype == triton_dtype
    close(losses, expected, 8)
    # In fp32 half an ulp of lse (about 10) is 4 of a probability. The gradient for one class is what 1 - 1 leaves, times up to 6.
    close(gradient, expected_gradient, 16 if triton_dtype == torch.float32 else 1, floor=6.0 if num_classes == 1 else 0.0)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 4), num_classes=st.integers(1, 70), options=st.sampled_from(list(OPTIONS.values())), seed=st.integers(0, 2**20),
    std=st.sampled_from([0.0, 1.0, 30.0]),
)  # fmt: skip
def test_any_size_and_scale(rows, num_classes, options, seed, std):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, labels, _ = draw(rows, num_classes=num_classes, dtype=torch.float32, device=device, seed=seed, std=std)
    with kernels.use("triton"):
        loss = cross_entropy(logits, labels, **options)
    expected, expected_gradient = oracle(logits, labels, **options)
    close(loss, expected, 16, floor=1e-3)
    close(torch.autograd.grad(loss, logits)[0], expected_gradient, 64, floor=0.25)  # lse near 100 at the largest scale


@pytest.mark.parametrize("make", [lambda x: x[:, :-1], lambda x: x[:, 1:], lambda x: x.transpose(0, 1), lambda x: x[..., ::2]])
def test_strided_logits_and_labels(make, device):
    logits, labels, _ = draw(3, 5, dtype=torch.float32, device=device)
    view = make(logits)
    labels = labels.t()[: view.shape[0], : view.shape[1]] if view.shape[:2] == (5, 3) else labels[: view.shape[0], : view.shape[1]]
    labels = torch.where(labels >= view.shape[-1], 0, labels)
    with kernels.use("triton"):
        loss = cross_entropy(view, labels)
    expected, expected_gradient = oracle(view, labels)
    close(loss, expected, 8)
    close(torch.autograd.grad(loss, view)[0], expected_gradient, 16)


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("rows", [0, 4])
def test_mean_over_no_token_is_zero(mode, rows, device):
    logits, labels, weight = draw(rows, dtype=torch.float32, device=device)
    labels[:] = -100
    for class_weight in (None, weight):
        with kernels.use(mode):
            loss = cross_entropy(logits, labels, class_weight=class_weight, z_loss=1.0, label_smoothing=0.1)
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, logits)[0].count_nonzero() == 0


@pytest.mark.parametrize("ignore_index", [-100, 0, 5, 2**40])
def test_ignored_rows_have_no_say(ignore_index, device):
    """Not even by NaN logits; an ignore_index that is a class is ignored too."""
    logits, labels, _ = draw(6, dtype=torch.float32, device=device)
    labels[labels < 0] = ignore_index
    poisoned = logits.detach().clone()
    poisoned[labels == ignore_index] = math.nan
    losses = []
    for x in (logits, poisoned.requires_grad_()):
        with kernels.use("triton"):
            loss = cross_entropy(x, labels, ignore_index=ignore_index)
        gradient = torch.autograd.grad(loss, x)[0]
        assert gradient[labels == ignore_index].count_nonzero() == 0
        losses.append((loss, gradient))
    assert torch.equal(losses[0][0], losses[1][0]) and torch.equal(losses[0][1], losses[1][1])


def test_masked_classes(device):
    """A whole block of -inf logits: probability 0, gradient 0, a finite loss."""
    logits = torch.zeros(2, 9000, device=device)
    logits[:, :8500] = -math.inf
    logits.requires_grad_()
    labels = torch.tensor([8999, 8500], device=device)
    with kernels.use("triton"):
        loss = cross_entropy(logits, labels)
    gradient = torch.autograd.grad(loss, logits)[0]
    assert loss.item() == pytest.approx(math.log(500), rel=1e-6)
    assert gradient[:, :8500].count_nonzero() == 0 and torch.isfinite(gradient).all()


@pytest.mark.parametrize("bad", [53, -1, 2**31, -(2**31)])
@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_labels_out_of_range(bad, mode, device):
    logits, labels, _ = draw(6, dtype=torch.float32, device=device)
    labels[1] = bad
    with kernels.use(mode):
        if device == "cpu":
            with pytest.raises(IndexError, match=str(bad)):
                cross_entropy(logits, labels)
            return
        losses = cross_entropy(logits, labels, reduction="none")
    gradient = torch.autograd.grad(losses.sum(), logits)[0]
    others = torch.arange(6, device=device) != 1
    assert losses[1].isnan() and gradient[1].isnan().all()
    assert torch.isfinite(losses[others]).all() and torch.isfinite(gradient[others]).all()


def test_kernels_mark_bad_labels_nan(device):
    """What a GPU does with a label out of range, below the check that the CPU can afford."""
    from ligerformer.kernels.cross_entropy import _CrossEntropy

    logits, labels, _ = draw(3, dtype=torch.float32, device=device)
    for bad in (53, -1, 2**32 + 1):
        labels[:] = torch.tensor([4, bad, 5])
        losses = _CrossEntropy.apply(logits, labels, None, -100, 0.0, 0.0, None)
        gradient = torch.autograd.grad(losses.sum(), logits)[0]
        assert losses.isnan().tolist() == [False, True, False]
        assert gradient.isnan().all(1).tolist() == [False, True, False] and gradient.isnan().any(1).tolist() == [False, True, False]


def test_confident_loss_keeps_its_digits(device):
    """Logits near 100 and a loss near 1e-6: lse - z would round it to 0 or to 7.6e-6."""
    logits = torch.tensor([[100.0, 86.0, 85.0]], device=device, requires_grad=True)
    with kernels.use("triton"):
        loss = cross_entropy(logits, torch.tensor([0], device=device))
    assert loss.item() == pytest.approx(math.log1p(math.exp(-14) + math.exp(-15)), rel=0.1)


def test_class_weight_that_requires_a_gradient_is_refused():
    logits, labels, weight = draw(4)
    with pytest.raises(ValueError, match="class_weight"):
        cross_entropy(logits, labels, class_weight=weight.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_in_sixteen_bits_computes_in_fp32(dtype):
    logits, labels, _ = draw(2, 5, dtype=dtype)
    loss = cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    close(loss, oracle(logits, labels)[0], 8)
    close(torch.autograd.grad(loss, logits)[0], oracle(logits, labels)[1], 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="9 GB of logits")
def test_offsets_beyond_32_bits():
    logits = torch.zeros(40_000, 2**16 + 1, dtype=torch.bfloat16, device="cuda", requires_grad=True)  # 2.6e9 elements
    labels = torch.full((40_000,), 3, device="cuda")
    with torch.no_grad():
        logits[-1, 3] = 5.0
    losses = cross_entropy(logits, labels, reduction="none")
    assert losses[-1].item() == pytest.approx(math.log(2**16 + math.exp(5)) - 5, rel=1e-5)
    gradient = torch.autograd.grad(losses.sum(), logits)[0]
    assert gradient[-1, 3].item() == pytest.approx(math.exp(5) / (2**16 + math.exp(5)) - 1, rel=1e-2)
    assert gradient[-1, -1].item() == pytest.approx(1 / (2**16 + math.exp(5)), rel=1e-2)


def test_labels_on_another_device_are_refused_by_the_arguments_names():
    with pytest.raises(ValueError, match="labels is on meta and logits on cpu"):
        cross_entropy(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64, device="meta"))
