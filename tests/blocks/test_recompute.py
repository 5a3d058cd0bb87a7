"""``recompute="cheap"``: norms' outputs and gated products are made again in the backward, to the same bits, without a matrix product."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ligerformer import ModelConfig, build, kernels
from ligerformer.blocks import Decoder
from ligerformer.kernels import remake
from ligerformer.kernels._triton import HAS_TRITON
from tests.blocks.contract import gradients, made, randomized, tokens
from tests.configs.examples import full, plain

NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
MODES = ["reference", pytest.param("triton", marks=NEEDS_TRITON)]
GEMMA = {"type": "rms_norm", "eps": 1e-6, "offset": 1.0, "casting": "fp32"}

each_mode = pytest.mark.parametrize("mode", MODES)
slow = pytest.mark.slow  # whole models in Triton's interpreter


def _layer(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    data["layers"]["main"] |= changes
    return data


def _attention(**changes: Any) -> dict[str, Any]:
    return plain()["layers"]["main"]["attention"] | changes


def _configs() -> dict[str, dict[str, Any]]:
    tanh = {"type": "gated_mlp", "intermediate_size": 40, "activation": "gelu_tanh"}
    gemma = {"norm": GEMMA, "post_norm": GEMMA, "mlp": tanh}
    apart = {"attention": _attention(packed=False), "mlp": plain()["layers"]["main"]["mlp"] | {"packed": False}}
    return {
        "llama": plain(),
        "qwen3": _layer(plain(), attention=_attention(qk_norm={"type": "rms_norm", "eps": 1e-6})),
        "gemma2": _layer(plain(), attention=_attention(softcap=50.0, window=5), **gemma) | {"final_norm": GEMMA, "tie_embeddings": True},
        "gemma3": _layer(plain(), attention=_attention(qk_norm=GEMMA, window=5), **gemma) | {"final_norm": GEMMA},
        "norm without rope": _layer(plain(), attention=_attention(qk_norm=GEMMA, rope=None)),
        "parallel": _layer(plain(), sublayers=[["attention", "mlp"]]),
        "parts apart": _layer(plain(), **apart),
        "no norm": _layer(plain(), norm=None, post_norm=GEMMA),
        "hyper-connections": plain() | {"residual": {"type": "mhc", "streams": 3}},
        "full": full(),
    }


CONFIGS = _configs()


def of(name: str, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    data = CONFIGS[name] | {"num_layers": 3 if name == "full" else 2}
    return randomized(build(data, device=device, dtype=dtype, seed=0, **options), std=0.1)


def same_gradients(model: Decoder, ids: Tensor, mode: str = "auto") -> None:
    """Loss and every gradient of "none" and "cheap" are the same bits."""
    found = []
    for recompute in ("none", "cheap"):
        model.recompute = recompute
        with kernels.use(mode):
            loss = model(ids, ids).loss
        found.append((loss.detach(), gradients(model, loss)))
    (stored, expected), (loss, got) = found
    assert bool(loss.isfinite()) and torch.equal(loss, stored)
    for name, gradient in got.items():
        assert torch.equal(gradient, expected[name]), name


def _on(name: str, mode: str) -> Any:
    marks = [NEEDS_TRITON] if mode == "triton" else []
    return pytest.param(name, mode, marks=[*marks, slow] if mode == "triton" and name not in ("llama", "gemma3") else marks)


@pytest.mark.parametrize("name, mode", [_on(name, mode) for name in CONFIGS for mode in ("reference", "triton")])
def test_gives_the_same_bits(name, mode, device):
    kernels.explain(reset=True)
    same_gradients(of(name, device), tokens(device=device), mode)
    counted = remade()
    assert counted and all(implementation == mode for _, implementation in counted)


@pytest.mark.parametrize("name", [pytest.param("llama"), pytest.param("gemma3", marks=slow), pytest.param("hyper-connections", marks=slow)])
def test_gives_the_same_bits_in_every_dtype(name, triton_dtype, device):
    if HAS_TRITON:
        same_gradients(of(name, device, triton_dtype), tokens(device=device), "triton")
    same_gradients(of(name, device, torch.bfloat16), tokens(device=device), "reference")


def test_gives_the_same_bits_under_autocast(device):
    model, ids = of("gemma2", device), tokens(device=device)
    with torch.autocast(device, torch.bfloat16):
        same_gradients(model, ids)  # the backward within the scope
    found = []
    for recompute in ("none", "cheap"):
        model.recompute = recompute
        with torch.autocast(device, torch.bfloat16):
            loss = model(ids, ids).loss
        found.append(gradients(model, loss))  # and after it
    assert all(torch.equal(g, found[0][name]) for name, g in found[1].items())


def remade() -> dict[tuple[str, str], int]:
    """(op, implementation) -> how many outputs were made again since the last call."""
    rows = [line.split() for line in kernels.explain(reset=True).splitlines()]
    return {(row[0], row[2]): int(row[3]) for row in rows if row[1] == "remade"}


@each_mode
def test_explain_counts_what_is_made_again(mode, device):
    model, ids = of("llama", device, recompute="cheap"), tokens(device=device)
    kernels.explain(reset=True)
    with kernels.use(mode):
        loss = model(ids, ids).loss
    assert remade() == {}
    loss.backward()  # on what the forward ran on
    assert remade() == {("rms_norm", mode): 1, ("add_rms_norm", mode): 3, ("swiglu_packed", mode): 2}


# ---- what is kept, and what runs ----


class Storages(TorchDispatchMode):
    """Every storage that comes to be, beside ``known`` ones; ``alive`` are the bytes of those that still are."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage._cdata not in self.known | self.seen.keys():
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> int:
        gc.collect()  # Triton's interpreter leaves cycles; one through autograd's graph would stay
        return sum(nbytes for reference, nbytes in self.seen.values() if not reference.expired())


def kept_bytes(model: Decoder, ids: Tensor, mode: str) -> tuple[int, int]:
    """Bytes alive between forward and backward; and once the loss is dropped without one."""
    with Storages([*model.parameters(), *model.buffers(), ids]) as storages, kernels.use(mode):
        loss = model(ids, ids).loss
    between = storages.alive()
    del loss
    return between, storages.alive()


@each_mode
@pytest.mark.parametrize("name", ["llama", "gemma2", "parallel", "parts apart", "hyper-connections"])
def test_keeps_less_by_exactly_these_outputs(name, mode, device):
    model, ids = of(name, device), tokens(3, 8, device=device)
    stored, after = kept_bytes(model, ids, mode)
    model.recompute = "cheap"
    kept, after_cheap = kept_bytes(model, ids, mode)
    normed, inner = 24 * len(model.layers[0].sublayers), 40
    assert stored - kept == ids.numel() * 4 * 2 * (normed + inner)  # fp32, two layers
    assert after_cheap == after == 0  # no reference cycle
    counted = [model.config.training_memory(3, 8, dtype_bytes=4, recompute=r).activations for r in ("none", "cheap")]
    assert counted[0] - counted[1] == stored - kept - ids.numel() * 4 * (24 + 40)  # less one of each, while it is used


@each_mode
def test_keeps_nothing_more_where_norms_and_inputs_are_frozen(mode, device):
    """No norm of the first layer hangs in the graph: their inputs would be kept for the recipe alone."""
    model, ids = of("llama", device), tokens(3, 8, device=device)
    model.requires_grad_(False)
    model.layers[0].mlp.down_proj.requires_grad_(True)
    stored, _ = kept_bytes(model, ids, mode)
    model.recompute = "cheap"
    kept, _ = kept_bytes(model, ids, mode)
    assert kept <= stored


class Calls(TorchDispatchMode):
    """How often each product, and each op with products inside, is called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(word in name for word in ("mm", "linear", "matmul", "dot", "attention")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@each_mode
@pytest.mark.parametrize("name", ["llama", pytest.param("full", marks=slow)])
def test_runs_no_product_twice(name, mode, device):
    model, ids, counts = of(name, device), tokens(device=device), {}
    for recompute in ("none", "cheap", "layer"):
        model.recompute = recompute
        with Calls() as calls, kernels.use(mode):
            model(ids, ids).loss.backward()
        counts[recompute] = calls.counts
    assert counts["none"]["mm"] + counts["none"]["addmm"] >= 3 * 4 * 2
    assert counts["cheap"] == counts["none"] != counts["layer"]


# ---- graphs ----


@each_mode
def test_a_retained_graph_gives_the_same_gradients_again(mode, device):
    model, ids = of("gemma2", device, recompute="cheap"), tokens(device=device)
    with kernels.use(mode):
        loss = model(ids, ids).loss
    parameters = list(model.parameters())
    first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_second_derivatives_pass_through_the_reference():
    """Of logits: the fused loss has first derivatives alone."""
    model, ids, found = of("llama", "cpu", torch.float64), tokens(), []
    for recompute in ("none", "cheap"):
        model.recompute = recompute
        parameters = dict(model.named_parameters())
        with kernels.use("reference"):
            loss = model(ids).logits.square().mean()
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        found.append(torch.autograd.grad(penalty, list(parameters.values())))
    for name, a, b in zip(parameters, *found, strict=True):
        assert torch.equal(a, b), name
    assert any(bool(g.abs().max() > 0) for g in found[0])


class Adapted(nn.Module):
    """A linear module with a low-rank adapter beside it: a second consumer of the normed input."""

    def __init__(self, base: nn.Module, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.weight.shape[1], rank, bias=False, device=base.weight.device)
        self.up = nn.Linear(rank, base.weight.shape[0], bias=False, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.flatten(0, 1))).unflatten(0, x.shape[:2])


@each_mode
def test_serves_adapted_modules(mode, device):
    torch.manual_seed(0)
    model, ids = of("parts apart", device), tokens(device=device)
    model.requires_grad_(False)
    for layer in model.layers:
        for module, name in ((layer.attention.qkv_proj, "q_proj"), (layer.mlp.gate_up_proj, "up_proj"), (layer.mlp, "down_proj")):
            setattr(module, name, Adapted(getattr(module, name)))
    parameters, found = [p for p in model.parameters() if p.requires_grad], []
    for recompute in ("none", "cheap"):
        model.recompute = recompute
        with kernels.use(mode):
            found.append(torch.autograd.grad(model(ids, ids).loss, parameters))
    assert len(parameters) == 2 * 3 * 2 and all(map(torch.equal, *found))


def test_stands_aside_without_gradients_and_with_a_cache(device):
    model, ids = of("llama", device, recompute="cheap"), tokens(device=device)
    expected = model(ids).logits
    kernels.explain(reset=True)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
        assert model.generate(ids, 2).shape == (2, 13)
    logits = model(ids, cache=model.new_cache(2, 11)).logits
    logits.sum().backward()
    assert remade() == {}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiler_decides_for_itself(device, fresh_compiler):
    model, ids = of("llama", device, recompute="cheap"), tokens(device=device)
    kernels.explain(reset=True)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, ids).loss
    got = gradients(model, loss)
    assert "torch.compile decides what its backward makes again" in kernels.explain()
    assert not {op for op, _ in remade()} & set(kernels.OPS)
    model.recompute = "none"
    expected = gradients(model, model(ids, ids).loss)
    largest = max(g.abs().max() for g in expected.values())
    assert all((g - expected[name]).abs().max() < 1e-5 * largest for name, g in got.items())


def test_layers_compiled_one_by_one_run_within_the_scope(device, fresh_compiler):
    model, ids = of("llama", device), tokens(device=device)
    expected = gradients(model, model(ids, ids).loss)
    model.recompute = "cheap"
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    got = gradients(model, model(ids, ids).loss)
    largest = max(g.abs().max() for g in expected.values())
    assert all((g - expected[name]).abs().max() < 1e-5 * largest for name, g in got.items())


def test_hooks_around_the_call_decide(device):
    """Autograd asks the innermost hooks alone: ours would undo an offload or a checkpoint around the model."""
    model, ids = of("llama", device), tokens(device=device)
    counts = {}
    for recompute in ("none", "cheap"):
        model.recompute = recompute
        asked = []
        kernels.explain(reset=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, asked=asked: asked.append(x.shape) or x, lambda x: x):
            model(ids, ids).loss.backward()
        counts[recompute] = asked
    assert counts["cheap"] == counts["none"]
    assert "the saved_tensors_hooks around the call decide what is kept" in kernels.explain()


# ---- in place ----


def _norm_and_product(mode: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, matrix = (torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in ((2, 3, 8), (8,), (5, 8)))
    middle = x * 1.0
    with kernels.use(mode), remake.scope():
        y = kernels.rms_norm(middle, weight, eps=1e-6)
        return x, weight, matrix, middle, nn.functional.linear(y, matrix)


@each_mode
@pytest.mark.parametrize("modified", ["input", "weight"])
def test_an_input_modified_in_place_is_an_error(modified, mode, device):
    _, weight, matrix, middle, z = _norm_and_product(mode, device)
    with torch.no_grad():
        (middle if modified == "input" else weight).mul_(2.0)
    with pytest.raises(RuntimeError, match="rms_norm: an input was modified in place between forward and backward"):
        torch.autograd.grad(z.sum(), matrix)


@each_mode
def test_another_kept_tensor_modified_in_place_is_an_error(mode, device):
    """Under hooks autograd does not look itself."""
    x, _, matrix, _, z = _norm_and_product(mode, device)
    with torch.no_grad():
        matrix.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"torch.float32 of shape \((5, 8|8, 5)\), was modified in place after the forward"):
        torch.autograd.grad(z.sum(), x)


@each_mode
def test_an_optimizer_step_between_forward_and_backward_is_an_error(mode, device):
    model, ids = of("llama", device, recompute="cheap"), tokens(device=device)
    with kernels.use(mode):
        loss = model(ids, ids).loss
        loss.backward(retain_graph=True)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
        loss.backward()


@each_mode
def test_an_output_modified_in_place_is_kept_as_it_is(mode, device):
    """Modified before it is used, the output is no longer what the op gives; after it, the recipe still gives what was used."""
    x, weight, matrix = (torch.randn(shape, device=device, requires_grad=True) for shape in ((4, 8), (8,), (5, 8)))
    with kernels.use(mode):
        y = kernels.rms_norm(x, weight, eps=1e-6).detach()
        with remake.scope():
            before = kernels.rms_norm(x, weight, eps=1e-6).mul_(3.0)
            z = nn.functional.linear(before, matrix)
            after = kernels.rms_norm(x, weight, eps=1e-6)
            w = nn.functional.linear(after, matrix)
            after.mul_(5.0)
    ones = torch.ones(4, 5, device=device)
    assert torch.equal(torch.autograd.grad(z, matrix, ones)[0], ones.T @ (y * 3.0))
    assert torch.equal(torch.autograd.grad(w, matrix, ones)[0], ones.T @ y)


# ---- addresses ----


def test_a_recycled_address_matches_nothing(device):
    """A tensor that lies where a declared output lay is another tensor."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    with remake.scope():
        scope = remake._open.scope
        y = kernels.rms_norm(x, eps=1e-6)
        address = y.untyped_storage()._cdata
        assert isinstance(scope.pack(y), remake._View)
        entry = scope.declared.pop(address)
        other = torch.randn(4, 8, device=device)
        scope.declared[other.untyped_storage()._cdata] = entry  # as if y's storage had been there
        assert isinstance(scope.pack(other), remake._Kept)  # y lives, elsewhere
        del y
        assert entry[0]() is None
        assert isinstance(scope.pack(other), remake._Kept)  # y is gone
    assert scope.declared == {} and remake._open.scope is None


def test_any_view_of_an_output_is_made_again(device):
    x, given = torch.randn(2, 3, 8, device=device, requires_grad=True), []
    views = [lambda y: y[:, 1:, ::2], lambda y: y.transpose(0, 2), lambda y: y.flatten()[3:], lambda y: y[0].expand(4, 3, 8)]
    with remake.scope():
        y = kernels.rms_norm(x, eps=1e-6)
        for view in views:
            one = torch.ones_like(view(y), requires_grad=True)
            assert isinstance(remake._open.scope.pack(view(y)), remake._View)
            given.append(((one * view(y)), one, view(y)))
        assert isinstance(remake._open.scope.pack(y.view(torch.int32)), remake._Kept)  # other values
    for product, one, expected in given:
        assert torch.equal(torch.autograd.grad(product.sum(), one)[0], expected)


def test_scopes_close_when_a_layer_fails(device):
    model, ids = made(plain(), device, recompute="cheap"), tokens(device=device)
    model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, ids)
    assert remake._open.scope is None and remake.available()


def test_is_a_value_of_recompute():
    config = ModelConfig.from_dict(plain())
    assert build(config, device="meta", recompute="cheap").recompute == "cheap"
