"""Composable, proven: blocks that the package does not have are built, trained, generated from, counted, loaded and recomputed, and no
file of its core names a block type."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ligerformer
from ligerformer import ModelConfig, build, kernels
from ligerformer.blocks import allocate, initialize
from ligerformer.configs import registry
from tests.blocks.contract import distance, gradients, loss_by_hand, made, precision, tokens
from tests.blocks.custom import compositions
from tests.configs.examples import plain

COMPOSITIONS = compositions() | {
    "hyper-connections": plain() | {"residual": {"type": "mhc", "streams": 3}},
    "plain": plain(),
}

composition = pytest.mark.parametrize("data", COMPOSITIONS.values(), ids=COMPOSITIONS)


@composition
def test_builds_from_plain_data(data, device):
    config = ModelConfig.from_dict(data)
    assert ModelConfig.from_dict(config.to_dict()) == config
    output = build(data, device=device, seed=0)(tokens(device=device))
    assert output.logits.shape == (2, 11, 97)
    assert ligerformer.blocks.Decoder(config).config == config


@composition
def test_trains(data, device):
    model, ids = build(data, device=device, seed=0), tokens(4, 16, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, ids).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)


@composition
def test_generates_with_a_cache_what_it_generates_without(data, device):
    dtype, _ = precision(device)
    model, prompt = made(data, device, dtype), tokens(2, 6, device=device)
    padded = torch.ones_like(prompt)
    padded[0, :3] = 0
    for mask in (None, padded):
        texts = [model.generate(prompt, 12, attention_mask=mask, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*texts) and texts[0].shape == (2, 18)


@composition
def test_is_counted_exactly(data, monkeypatch):
    config = ModelConfig.from_dict(data)
    model = made(config)
    assert config.num_params() == sum(p.numel() for p in model.parameters())
    batch, length = 2, 24
    assert counted_flops(model, tokens(batch, length), monkeypatch) / (batch * length) == config.flops_per_token(length)


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products as they run, forward and backward."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "addbmm", "baddbmm"):
            result, left = out, args[0] if name in ("mm", "bmm") else args[1]
            self.flops += 2 * result.numel() * left.shape[-1]
        return out


def counted_flops(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> float:
    """FLOPs of a training step's products: those that run, and half a square of scores (less what a window hides) for each attention."""
    attention_flops = 0.0

    def attention(q: Tensor, k: Tensor, v: Tensor, /, *, window: int | None = None, **options: Any) -> Tensor:
        nonlocal attention_flops
        batch, length, heads, head_dim = q.shape
        hidden = max(length - (window or length), 0)
        attention_flops += 3 * 4 * batch * heads * head_dim * (length**2 - hidden**2) / 2
        group = heads // k.shape[2]
        return q + (k + v).repeat_interleave(group, dim=2)  # without products, and with a gradient for each

    def mhc_write(x: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:  # no product in the kernel either: n is tiny
        return post.unsqueeze(-1) * y.unsqueeze(-2) + (mix.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2)

    def linear_cross_entropy(
        h: Tensor, weight: Tensor, labels: Tensor, /, **options: Any
    ) -> Tensor:  # one operator, with its products inside
        return torch.nn.functional.cross_entropy((h @ weight.T).flatten(0, 1), labels.flatten())

    monkeypatch.setattr(kernels, "attention", attention)
    monkeypatch.setattr(kernels, "linear_cross_entropy", linear_cross_entropy)
    monkeypatch.setattr(kernels, "mhc_write", mhc_write)
    with Products() as products:
        model(ids, ids).loss.backward()
    return products.flops + attention_flops


@composition
def test_loads_from_the_meta_device(data, device, tmp_path):
    trained = made(data, device)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    model = build(data, device="meta")
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    initialize(allocate(model, device, torch.float32), seed=0)
    buffers, fresh = dict(model.named_buffers()), dict(build(data, device=device).named_buffers())
    assert buffers.keys() == fresh.keys() and all(torch.equal(x, fresh[name]) for name, x in buffers.items())
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    ids = tokens(device=device)
    assert torch.equal(model(ids).logits, trained(ids).logits)


@composition
def test_recomputes_with_bit_equal_gradients(data, device):
    model, ids = made(data, device), tokens(device=device)
    stored = model(ids, ids).loss
    expected = gradients(model, stored)
    recomputed = []
    for model.recompute in ("cheap", "layer"):
        recomputed.append(model(ids, ids).loss)
    for loss in (*recomputed, loss_by_hand(model, ids, use_reentrant=False)):
        assert torch.equal(loss, stored)
        for name, gradient in gradients(model, loss).items():
            assert torch.equal(gradient, expected[name]), name


# ---- that the blocks are what they claim to be ----


def test_a_delayed_read_takes_the_weights_of_the_site_before():
    """Against the formula, in fp64: the first site reads stream 0, the last site's weights collapse."""
    model, ids = made(COMPOSITIONS["delayed read"] | {"num_layers": 2}, dtype=torch.float64), tokens()
    n = 3
    x = model.embed(ids).unsqueeze(2).expand(-1, -1, n, -1)
    pre = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(*ids.shape, n)
    ctx = ligerformer.blocks.Context(torch.arange(ids.shape[1])[None])
    for layer in model.layers:
        for site, norm, branch in zip(layer.sites, layer.norms, (layer.attention, layer.mlp), strict=True):
            m = x.flatten(-2) @ site.phi / (x.flatten(-2).square().mean(-1, keepdim=True) + 1e-6).sqrt()
            m = m * torch.cat([a.expand(k) for a, k in zip(site.alpha, (n, n, n * n), strict=True)]) + site.bias
            mix = m[..., 2 * n :].unflatten(-1, (n, n)).exp()
            for _ in range(20):
                mix = mix / mix.sum(-2, keepdim=True)
                mix = mix / mix.sum(-1, keepdim=True)
            y = branch(norm((pre.unsqueeze(-1) * x).sum(-2)), ctx, {})
            pre, post = m[..., :n].sigmoid(), 2 * m[..., n : 2 * n].sigmoid()
            x = post.unsqueeze(-1) * y.unsqueeze(-2) + mix @ x
    h = model.final_norm((pre.unsqueeze(-1) * x).sum(-2))
    assert distance(model(ids).logits, h @ model.head.weight.T) < 1e-13


def test_attention_residuals_read_all_that_came_before():
    model, ids = made(COMPOSITIONS["attention residuals"]), tokens()
    state = model.ends.expand(model.embed(ids))
    for layer in model.layers:
        state = layer(state, ligerformer.blocks.Context(torch.arange(ids.shape[1])[None]))
    assert len(state.stream) == 1 + 2 * len(model.layers)
    gradients_of_sources = torch.autograd.grad(model.ends.collapse(state, model.final_norm).square().sum(), state.stream)
    assert all(bool(gradient.abs().max() > 0) for gradient in gradients_of_sources)


def test_a_value_residual_carries_the_first_values_to_every_layer():
    model, ids = made(COMPOSITIONS["value residual"]), tokens()
    before = model(ids).logits
    first = model.layers[0].attention
    first.o_proj.weight.data.zero_()
    silent = model(ids).logits  # the first layer's attention adds nothing to the stream now
    assert not torch.equal(silent, before)
    first.qkv_proj.part("v_proj").data.mul_(2)
    assert not torch.equal(model(ids).logits, silent)
    for layer in model.layers:
        layer.attention.mix.data.zero_()
    unmixed = model(ids).logits
    first.qkv_proj.part("v_proj").data.mul_(2)
    assert torch.equal(model(ids).logits, unmixed)


def test_parallel_branches_read_the_same_input():
    model, ids = made(COMPOSITIONS["parallel"] | {"num_layers": 1}), tokens()
    layer, ctx = model.layers[0], ligerformer.blocks.Context(torch.arange(ids.shape[1])[None])
    x = model.embed(ids)
    normed = layer.norms[0](x)
    expected = x + layer.attention(normed, ctx, {}) + layer.mlp(normed, ctx, {})
    assert distance(model(ids).logits, model.final_norm(expected) @ model.head.weight.T) < 1e-5


def test_a_multiplier_scales_what_its_branch_adds():
    data = COMPOSITIONS["third branch"]
    config = ModelConfig.from_dict(data)
    assert config.to_dict()["layers"]["main"]["memory"]["multiplier"] == 0.5
    model, ids = made(config), tokens()
    silent = made(config.replace("layers.main.memory.multiplier", 0.0))
    for layer in silent.layers:  # a post norm would blow a small output up again: of nothing it makes nothing
        assert bool(torch.equal(layer.post_norms["memory"](torch.zeros(1, 24)), torch.zeros(1, 24)))
    assert not torch.equal(model(ids).logits, silent(ids).logits)


# ---- the core names no block ----

PACKAGE = Path(ligerformer.__file__).parent
CORE = [
    *(PACKAGE / "blocks" / f"{name}.py" for name in ("decoder", "layer", "state", "cache", "build", "fixed")),
    *(PACKAGE / "configs" / f"{name}.py" for name in ("counting", "model", "schema", "registry", "block")),
    PACKAGE / "generate.py",
    PACKAGE / "summary.py",
    *sorted(path for path in (PACKAGE / "convert").rglob("*.py") if "families" not in path.relative_to(PACKAGE).parts),
]


def builtin_names() -> tuple[set[str], set[str]]:
    """Type names, and the names of the classes and functions that are a type's config or block."""
    types, classes = set(), set()
    for slot in registry.slots():
        for type_ in registry.types(slot):
            config, block = registry.config_class(slot, type_), registry.block_class(slot, type_)
            if not config.__module__.startswith("ligerformer."):
                continue
            types.add(type_)
            for thing in (config, block, getattr(block, "Site", None), getattr(block, "Ends", None)):
                if thing is not None:
                    classes.add(thing.__name__)
    return types, classes


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that are docstrings (a string alone in a statement)."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def complaints(source: str) -> list[str]:
    """Where a file names a block type, in a string or as a class."""
    types, classes = builtin_names()
    tree = ast.parse(source)
    skipped = docstrings(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in types and id(node) not in skipped:
            found.append(f"line {node.lineno}: the string {node.value!r}")
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        names += [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
        found += [f"line {node.lineno}: {name}" for name in names if name.split(".")[-1] in classes]
    return found


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_names_no_block_type(path):
    assert complaints(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        'if config.type == "softmax_attention": pass',
        'kinds = {"mhc": 1}',
        "from .attention import SoftmaxAttention",
        "from ..configs import RMSNormConfig as N",
        "blocks.mlp.GatedMLP(1)",
        'match x:\n    case "add": pass',
    ],
)
def test_a_name_in_the_core_would_be_seen(line):
    assert complaints(line)


def test_no_type_shares_a_name_with_a_slot():
    assert not {type_ for slot in registry.slots() for type_ in registry.types(slot)} & set(registry.slots())
