"""linear_cross_entropy: against cross_entropy of all the logits in fp64, and what chunking, counts and frozen inputs may not change."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from ligerformer import kernels
from ligerformer.kernels.cross_entropy import _cross_entropy_reference
from ligerformer.kernels.linear_cross_entropy import _chunk_rows, _chunked, _even_chunk, linear_cross_entropy

from .test_cross_entropy import close, ramp

MODES = ["reference", "triton"]
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"logit_scale": 0.5, "bias": True, "softcap": 4.0},
    "all": {"logit_scale": 0.5, "bias": True, "softcap": 4.0, "label_smoothing": 0.1, "z_loss": 1e-2, "class_weight": True},
}


def draw(*shape, hidden_size=17, num_classes=53, dtype=torch.float32, device="cpu", seed=0):
    """(hidden, weight, bias, labels, class_weight): all representable in bf16 but the class weights, some labels ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, std=1.0):
        return (torch.randn(*size, generator=generator) * std).bfloat16().to(device, dtype).requires_grad_()

    hidden, weight, bias = normal(*shape, hidden_size), normal(num_classes, hidden_size, std=0.5), normal(num_classes)
    labels = torch.randint(0, num_classes, shape, generator=generator)
    labels.view(-1)[2::4] = -100
    return hidden, weight, bias, labels.to(device), (torch.rand(num_classes, generator=generator) + 0.25).to(device)


def with_tensors(options, bias, class_weight):
    """The options, with tensors for True."""
    tensors = {"bias": bias, "class_weight": class_weight}
    return {name: tensors.get(name, value) if value is True else value for name, value in options.items()}


def oracle(hidden, weight, labels, bias=None, logit_scale=1.0, class_weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None,
           reduction="mean", num_items=None):  # fmt: skip
    """Loss and gradients of (hidden, weight, bias) in fp64, through all the logits at once."""
    inputs = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = logit_scale * linear(*inputs)
    kind = "sum" if num_items else reduction
    loss = _cross_entropy_reference(logits, labels, class_weight, -100, label_smoothing, z_loss, softcap, kind) / (num_items or 1)
    return loss, *torch.autograd.grad((loss * ramp(loss)).sum(), [x for x in inputs if x is not None])


def run(mode, hidden, weight, labels, **options):
    """Loss and gradients of what requires them."""
    with kernels.use(mode):
        loss = linear_cross_entropy(hidden, weight, labels, **options)
    inputs = [x for x in (hidden, weight, options.get("bias")) if x is not None and x.requires_grad]
    return loss, *torch.autograd.grad((loss * ramp(loss)).sum(), inputs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_bytes", [None, 8 * 53 * 3])  # one chunk; chunks of 3 rows
def test_reference_against_all_the_logits(options, reduction, chunk_bytes):
    hidden, weight, bias, labels, class_weight = draw(2, 5, dtype=torch.float64)
    options = {**with_tensors(options, bias, class_weight), "reduction": reduction}
    actual = run("reference", hidden, weight, labels, chunk_bytes=chunk_bytes, **options)
    for a, b in zip(actual, oracle(hidden, weight, labels, **options), strict=True):
        close(a, b, 16)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reference_gradient_is_its_derivative(options, reduction):
    hidden, weight, bias, labels, class_weight = draw(5, hidden_size=3, num_classes=7, dtype=torch.float64)
    options = {**with_tensors({**options, "bias": True}, bias, class_weight), "reduction": reduction, "chunk_bytes": 8 * 7 * 2}
    del options["bias"]
    with kernels.use("reference"):
        assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, labels, bias=b, **options), (hidden, weight, bias))


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunk_bytes", [None, 700])
def test_kernels_against_fp64(options, reduction, chunk_bytes, triton_dtype, device):
    hidden, weight, bias, labels, class_weight = draw(7, dtype=triton_dtype, device=device)
    options = {**with_tensors(options, bias, class_weight), "reduction": reduction}
    actual = run("triton", hidden, weight, labels, chunk_bytes=chunk_bytes, **options)
    assert actual[0].dtype == torch.float32 and all(gradient.dtype == triton_dtype for gradient in actual[1:])
    # In 16 bits the logits (up to 10) are rounded, as an eager head rounds them: half an ulp of each is up to 5 of a probability.
    expected = oracle(hidden, weight, labels, **options)
    close(actual[0].to(triton_dtype), expected[0], 16 if triton_dtype == torch.float32 else 4)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        close(a, b, 16 if triton_dtype == torch.float32 else 6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
def test_each_combination_of_frozen_inputs(mode, reduction, wanted, device):
    hidden, weight, bias, labels, _ = draw(5, device=device)
    full = run(mode, hidden, weight, labels, bias=bias, reduction=reduction)
    for x, want in zip((hidden, weight, bias), wanted, strict=True):
        x.requires_grad_(want)
    if not any(wanted):
        with kernels.use(mode):
            loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
        assert not loss.requires_grad and torch.equal(loss, full[0])
        return
    actual = run(mode, hidden, weight, labels, bias=bias, reduction=reduction)
    expected = [full[0], *(g for g, want in zip(full[1:], wanted, strict=True) if want)]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return function(*args, **(kwargs or {}))


def test_products():
    """1 without gradients, 3 with them, 2 where one input is frozen, 4 for "none"; counted inside the operator."""
    hidden, weight, _, labels, _ = draw(6)
    constants = (-100, 0.0, 0.0, None, 1.0, torch.float32, torch.float32, 6, False)

    def count(wanted, upstream=None):
        with CountProducts() as counter, torch.no_grad():
            _chunked(hidden, weight, None, labels, None, upstream, wanted, *constants)
        return counter.products

    assert [count([False] * 3), count([True, False, False]), count([False, True, False]), count([True, True, False])] == [1, 2, 2, 3]
    assert count([True, True, False], torch.ones(6)) == 3  # and 1 in the forward


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward_and_purity(mode, reduction, device):
    hidden, weight, bias, labels, _ = draw(6, device=device)
    before = [x.detach().clone() for x in (hidden, weight, bias, labels)]
    with kernels.use(mode):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
    upstream = torch.full_like(loss, 3.0)
    first, second = (torch.autograd.grad(loss, (hidden, weight, bias), upstream, retain_graph=True) for _ in range(2))
    third = torch.autograd.grad(loss, (hidden, weight, bias), upstream * 2)
    assert all(torch.equal(a, b) and torch.equal(2 * a, c) for a, b, c in zip(first, second, third, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight, bias, labels), strict=True))
    assert (upstream == 3.0).all()


@pytest.mark.parametrize("mode", MODES)
def test_chunk_size_changes_nothing_but_the_order_of_sums(mode, device):
    hidden, weight, bias, labels, _ = draw(20, device=device)
    one = run(mode, hidden, weight, labels, bias=bias)
    for rows in (1, 3, 19):
        many = run(mode, hidden, weight, labels, bias=bias, chunk_bytes=rows * 53 * 4)
        for a, b in zip(many, one, strict=True):
            close(a, b.double(), 4)


def test_sixteen_bit_weights_are_summed_in_fp32_over_chunks(device):
    """64 chunks of one row: summed in 16 bits, the error would grow with their number."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    mode = "triton"
    hidden, weight, _, labels, _ = draw(64, num_classes=8, dtype=dtype, device=device)
    labels[:] = 3
    one = oracle(hidden, weight, labels)[2]
    narrow = run(mode, hidden, weight, labels, chunk_bytes=1, accum_dtype=dtype)[2]
    wide = run(mode, hidden, weight, labels, chunk_bytes=1)[2]
    assert (wide - one).square().mean() * 2 < (narrow - one).square().mean()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_items", [int, torch.tensor])
def test_accumulation_over_micro_batches_of_unequal_counts(mode, num_items, device):
    """1 x 8 rows and 4 x 2 rows: the same loss and gradients, though the micro-batches keep 2, 1, 0 and 2 labels."""
    hidden, weight, bias, labels, _ = draw(8, device=device)
    labels[:] = torch.tensor([1, 2, 3, -100, -100, -100, 4, 5])
    whole = run(mode, hidden, weight, labels, bias=bias)
    parts = [
        run(mode, hidden[i : i + 2].detach().requires_grad_(), weight, labels[i : i + 2], bias=bias, num_items=num_items(5))
        for i in (0, 2, 4, 6)
    ]
    loss, dhidden, dweight, dbias = zip(*parts, strict=True)
    for a, b in zip((sum(loss), torch.cat(dhidden), sum(dweight), sum(dbias)), whole, strict=True):
        close(a, b.double(), 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_dropping_ignored_rows(mode, reduction, device):
    hidden, weight, bias, labels, _ = draw(3, 5, device=device)
    num_valid = int((labels >= 0).sum())
    full = run(mode, hidden, weight, labels, bias=bias, reduction=reduction)
    dropped = run(mode, hidden, weight, labels, bias=bias, reduction=reduction, num_valid=num_valid)
    for a, b in zip(dropped, full, strict=True):
        close(a, b.double(), 4)
    assert dropped[1][labels < 0].count_nonzero() == 0
    for wrong in (0, num_valid - 1, num_valid + 1, labels.numel()):
        loss, *gradients = run(mode, hidden, weight, labels, bias=bias, reduction=reduction, num_valid=wrong)
        assert loss.isnan().all() and all(gradient.isnan().any() for gradient in gradients[1:] if wrong)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("options", [{}, {"num_items": 0}, {"num_items": 7}, {"num_valid": 0}, {"class_weight": True}])
def test_mean_over_no_token_is_zero(mode, rows, options, device):
    hidden, weight, bias, labels, class_weight = draw(rows, device=device)
    labels[:] = -100
    loss, *gradients = run(mode, hidden, weight, labels, bias=bias, **with_tensors(options, bias, class_weight))
    assert loss.item() == 0.0 and all(gradient.count_nonzero() == 0 for gradient in gradients)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_classes", [1, 2, 31])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1, 3)])
def test_any_shape(mode, num_classes, shape, device):
    hidden, weight, _, labels, _ = draw(*shape, num_classes=num_classes, hidden_size=5, device=device)
    labels = labels.abs() % num_classes
    actual = run(mode, hidden, weight, labels.to(torch.int32), reduction="none")
    assert actual[0].shape == labels.shape and actual[1].shape == hidden.shape
    for a, b in zip(actual, oracle(hidden, weight, labels, reduction="none"), strict=True):
        close(a, b, 16, floor=6.0 if num_classes == 1 else 0.1)


@pytest.mark.parametrize("mode", MODES)
def test_strided_inputs(mode, device):
    hidden, weight, _, labels, _ = draw(3, 5, device=device)
    head = weight.detach().t().contiguous().t().requires_grad_()
    actual = run(mode, hidden[:, :-1], head, labels[:, 1:])
    for a, b in zip(actual, oracle(hidden[:, :-1], weight, labels[:, 1:]), strict=True):
        close(a, b, 16)


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode, device):
    """Products in the autocast dtype; loss and gradients in fp32, the weight's without a detour through 16 bits."""
    dtype = torch.bfloat16 if device == "cuda" or mode == "reference" else torch.float16
    hidden, weight, bias, labels, _ = draw(6, device=device)
    with torch.autocast(device, dtype):
        actual = run(mode, hidden, weight, labels, bias=bias)
    narrow = run(
        mode, *(x.detach().to(dtype).requires_grad_() for x in (hidden, weight)), labels, bias=bias.detach().to(dtype).requires_grad_()
    )
    assert all(x.dtype == torch.float32 for x in actual)
    assert torch.equal(actual[0], narrow[0])
    for a, b in zip(actual[1:], narrow[1:], strict=True):
        close(a.to(dtype), b.double(), 1)
    assert not torch.equal(actual[2], actual[2].to(dtype).float())


def test_fp16_gradients_neither_vanish_nor_overflow(device):
    """A mean over 60,000 tokens and a loss scale of 60,000: gradients of the order of 1, though 1/N is a subnormal in fp16."""
    hidden, weight, _, labels, _ = draw(4, dtype=torch.float16, device=device)
    with kernels.use("triton"):
        loss = linear_cross_entropy(hidden, weight, labels, num_items=60_000)
    gradients = torch.autograd.grad(loss * 60_000.0, (hidden, weight))
    for a, b in zip(gradients, oracle(hidden, weight, labels, reduction="sum")[1:], strict=True):
        close(a, b, 6)


def test_large_gradients_are_scaled(device):
    """The weight's gradient is more than one block of the kernel that multiplies it by the gradient of the loss."""
    hidden, weight, _, labels, _ = draw(3, hidden_size=80, device=device)
    expected = oracle(hidden, weight, labels)
    for a, b in zip(run("triton", hidden, weight, labels), expected, strict=True):
        close(a, b, 16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_without_a_break(mode, reduction, device):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def loss_of(hidden, weight, labels, num_items):
        return linear_cross_entropy(hidden * 2, weight, labels, num_items=num_items if reduction == "mean" else None, reduction=reduction)

    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    with kernels.use(mode):
        for rows in (6, 9, 4, 13):
            hidden, weight, _, labels, _ = draw(rows, device=device)
            losses = [function(hidden, weight, labels, torch.tensor(rows, device=device)) for function in (loss_of, compiled)]
            eager, graph = ([loss, *torch.autograd.grad(loss.sum(), (hidden, weight))] for loss in losses)
            for a, b in zip(graph, eager, strict=True):
                close(a, b.double(), 4)
    assert counter.frame_count <= 2


def test_labels_out_of_range(device):
    hidden, weight, _, labels, _ = draw(6, device=device)
    labels[1] = 53
    if device == "cpu":
        with pytest.raises(IndexError, match="53"):
            linear_cross_entropy(hidden, weight, labels)
        return
    losses, dhidden, _ = run("triton", hidden, weight, labels, reduction="none")
    assert losses.isnan().tolist() == [False, True] + [False] * 4
    assert dhidden.isnan().any(1).tolist() == [False, True] + [False] * 4


def test_chunks_are_even_and_fit():
    weight = torch.empty(128_256, 4096, device="meta")
    cpu, row = torch.device("cpu"), 128_256 * 2
    assert _chunk_rows(cpu, weight, torch.bfloat16, None) == 128 * 2**20 // row
    assert _chunk_rows(cpu, weight, torch.bfloat16, 1) == 1
    assert _chunk_rows(cpu, weight, torch.bfloat16, 10 * row) == 10
    assert _even_chunk(8192, 4186) == 4096
    assert _even_chunk(0, 100) == 1 and _even_chunk(5, 100) == 5 and _even_chunk(101, 100) == 100
    for rows, largest in itertools.product((1, 7, 129, 4096, 5000), (1, 50, 128, 300, 9999)):
        assert 1 <= _even_chunk(rows, largest) <= largest


def test_no_logits_beyond_the_budget():
    """The largest tensor made inside is the buffer or the weight's gradient, never tokens x vocabulary."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    hidden, weight, _, labels, _ = draw(256, num_classes=1009)
    with Largest() as largest, torch.no_grad():
        _chunked(
            hidden,
            weight,
            None,
            labels,
            None,
            None,
            [True, True, False],
            -100,
            0.0,
            0.0,
            None,
            1.0,
            torch.float32,
            torch.float32,
            16,
            False,
        )
    assert largest.elements == max(weight.numel(), 16 * 1009)


@pytest.mark.parametrize("mode", MODES)
def test_explain_counts_both_directions(mode, device):
    hidden, weight, _, labels, _ = draw(3, device=device)
    kernels.explain(reset=True)
    run(mode, hidden, weight, labels)
    table = [line.split()[:4] for line in kernels.explain(reset=True).splitlines()[1:]]
    if mode == "triton":
        assert sorted(table) == [["linear_cross_entropy", direction, "triton", "1"] for direction in ("backward", "forward")]
    else:
        assert [row[0] for row in table] == ["linear_cross_entropy"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="5 GB of logits in one chunk")
def test_offsets_beyond_32_bits():
    hidden, weight, _, labels, _ = draw(40_000, hidden_size=16, num_classes=2**16 + 1, dtype=torch.bfloat16, device="cuda")
    whole = run("triton", hidden, weight, labels, chunk_bytes=6 * 2**30)
    parts = run("triton", hidden, weight, labels, chunk_bytes=2**28)
    for a, b in zip(whole, parts, strict=True):
        close(a, b.double(), 4)


def test_labels_on_another_device_are_refused_by_the_arguments_names():
    with pytest.raises(ValueError, match="labels is on meta and hidden on cpu"):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64, device="meta"))
