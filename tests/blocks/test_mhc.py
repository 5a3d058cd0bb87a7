"""Hyper-connections as a block: they start as exactly the plain model, their streams separate, and nothing blows up in depth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerformer import ModelConfig, build
from ligerformer.blocks import Context, Decoder, initialize
from ligerformer.blocks.state import State
from tests.blocks.contract import distance, gradients, made, precision, tokens
from tests.blocks.test_contract import only_post_norms
from tests.configs.examples import full, plain

STREAMS = [1, 2, 3, 4]


def with_streams(n: int, data: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    return ModelConfig.from_dict(data or plain()).replace("residual", {"type": "mhc", "streams": n, **options})


def separation(model: Decoder, ids: Tensor) -> float:
    """How far apart the streams are before the last layer, to the size of what they hold."""
    with torch.no_grad():
        x = model(ids, return_hidden_states=True).hidden_states[-2]  # (B, T, n, C)
    return float((x - x.mean(2, keepdim=True)).abs().max() / x.abs().max())


def train(model: Decoder, ids: Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(ids, ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize(
    "data", [plain(), full() | {"residual": {"type": "add"}}, plain() | only_post_norms()], ids=["plain", "full", "post"]
)
def test_the_start_is_the_plain_model(data, n):
    """The same seed gives the same logits, loss and gradients, in fp64."""
    base, wide = (build(c, seed=5, dtype=torch.float64) for c in (ModelConfig.from_dict(data), with_streams(n, data)))
    ids = tokens()
    logits = base(ids).logits
    assert distance(wide(ids).logits, logits) < 1e-14 * (1 if n < 3 else 2)
    expected = gradients(base, base(ids, ids).loss)
    ours = gradients(wide, wide(ids, ids).loss)
    assert all(distance(ours[name], gradient) < 1e-12 for name, gradient in expected.items())


@pytest.mark.parametrize("n", STREAMS)
def test_a_trained_model_is_widened_with_its_logits_unchanged(n):
    base, ids = made(plain(), dtype=torch.float64), tokens()
    config = base.config.replace("residual", {"type": "mhc", "streams": n})
    wide = build(config, dtype=torch.float64, seed=0)
    missing, unexpected = wide.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all(".sites." in name for name in missing) and len(missing) == 3 * 6
    assert distance(wide(ids).logits, base(ids).logits) < 1e-14
    assert train(wide, ids, 6)[-1] < base(ids, ids).loss.item()


@pytest.mark.parametrize("n", STREAMS)
def test_the_start_is_plain_in_half_precision_too(n, device):
    """Constants stay wide in a bf16 model: no coefficient is rounded to it, so the start is as near to fp64 as the plain model's."""
    ids = tokens(device=device)
    for dtype in (torch.bfloat16, torch.float32):
        base, wide = (build(c, seed=5, dtype=dtype, device=device) for c in (plain(), with_streams(n)))
        exact = build(plain(), seed=5, dtype=dtype, device=device).cpu().double()(ids.cpu()).logits
        error = distance(base(ids).logits.cpu().double(), exact)
        assert distance(wide(ids).logits.cpu().double(), exact) < 2 * error


@pytest.mark.parametrize("n", [2, 3, 4])
def test_streams_separate_within_five_steps(n, device):
    model, ids = build(with_streams(n), seed=0, device=device), tokens(4, 16, device=device)
    assert separation(model, ids) < 1e-6
    train(model, ids, 5)
    assert separation(model, ids) > 1e-4


@pytest.mark.parametrize("n", [2, 4])
def test_of_a_symmetric_start_they_never_would(n):
    """The control: with all reading weights equal the streams stay copies of each other, whatever is trained."""
    model, ids = build(with_streams(n), seed=0, dtype=torch.float64), tokens(4, 16)
    for name, start in model.named_buffers():
        if name.endswith(".start"):
            start[:n] = -math.log(n - 1)  # sigmoid: 1 / n
    base = build(plain(), seed=0, dtype=torch.float64)
    assert distance(model(ids).logits, base(ids).logits) < 1e-14
    losses = train(model, ids, 10)
    assert losses[-1] < losses[0]
    assert separation(model, ids) < 1e-12


def test_every_parameter_of_a_site_is_trained(device):
    """After one step, that is: the scales multiply a projection that starts at 0."""
    model, ids = build(with_streams(3), seed=0, device=device), tokens(4, 16, device=device)
    train(model, ids, 3)
    for name, gradient in gradients(model, model(ids, ids).loss).items():
        if ".sites." in name:
            assert bool(gradient.abs().max() > 0), name


@pytest.mark.parametrize("n", STREAMS)
def test_recomputation_gives_the_same_bits(n, device):
    model, ids = made(with_streams(n), device), tokens(device=device)
    stored = model(ids, ids).loss
    expected = gradients(model, stored)
    for model.recompute in ("cheap", "layer"):
        loss = model(ids, ids).loss
        assert torch.equal(loss, stored)
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model, loss).items())


def test_permuting_the_streams_permutes_the_output(device):
    """A layer on permuted streams, with its sites' parameters permuted alike, gives the permuted result."""
    n, order = 4, [2, 0, 3, 1]
    dtype, rounding = precision(device)
    model, ids = made(with_streams(n), device, dtype), tokens(device=device)
    layer, ctx = model.layers[0], Context(torch.arange(ids.shape[1], device=device)[None])
    x = torch.randn(*ids.shape, n, 24, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = layer(State((x, None), {}), ctx).stream[0]
    columns = [*order, *(n + i for i in order), *(2 * n + n * o + i for o in order for i in order)]  # pre, post, mix as [out, in]
    with torch.no_grad():
        for site in layer.sites:
            site.phi.copy_(site.phi.unflatten(0, (n, 24))[order].flatten(0, 1)[:, columns])
            site.bias.copy_(site.bias[columns])
            site.start.copy_(site.start[columns])
    permuted = layer(State((x[:, :, order], None), {}), ctx).stream[0]
    assert distance(permuted, expected[:, :, order]) < rounding
    assert distance(expected[:, :, order], expected) > 1e-2


def test_more_than_a_hundred_layers_stay_bounded():
    """Random mixing over 128 sites, no branch: every stream stays a convex combination. Off the manifold it blows up."""
    n, depth = 4, 64
    config = with_streams(n, plain() | {"num_layers": depth})
    model = build(config, seed=0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, n, 24, generator=generator)
    y = torch.zeros(1, 3, 24)
    state, free = State((x, None), {}), x
    for layer in model.layers:
        for site in layer.sites:
            for parameter in (site.phi, site.bias, site.alpha):
                parameter.data.normal_(0.0, 1.0, generator=generator)
            _, read = site.read(state, None)
            _, (_, mix) = read.stream
            state = site.write(read, [y], [None], {})
            free = (mix + 0.5 * torch.randn(mix.shape, generator=generator)) @ free
            assert float((mix.detach().sum(-1) - 1).abs().max()) < 1e-5
    stream = state.stream[0]
    assert float(free.abs().max()) > 1e3
    assert float(stream.amax()) <= float(x.amax()) + 1e-4 and float(stream.amin()) >= float(x.amin()) - 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_deep_model_has_a_finite_forward_and_backward(dtype, device):
    data = plain() | {"num_layers": 104}
    model, ids = build(with_streams(4, data, iterations=3), seed=0, device=device, dtype=dtype), tokens(1, 4, device=device)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".sites." in name:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)
    output = model(ids, ids, return_hidden_states=True)
    embedded = output.hidden_states[0].float().abs().max()
    assert all(bool(g.isfinite().all()) for g in gradients(model, output.loss).values())
    assert float(output.hidden_states[-2].float().abs().max()) < 100 * max(float(embedded), 1.0)


def test_one_stream_is_the_plain_model_however_it_is_trained_elsewhere():
    """n = 1: nothing to mix (its doubly stochastic matrix is 1), reading weight within rounding of 1."""
    model = build(with_streams(1), seed=0)
    site = model.layers[0].sites[0]
    assert site.start.shape == (3,) and torch.sigmoid(site.start[0]).item() == pytest.approx(1.0, abs=1e-15)


def test_sites_are_initialised_alone_where_a_checkpoint_is_widened():
    base = made(plain())
    wide = build(base.config.replace("residual", {"type": "mhc", "streams": 2}), seed=3)
    wide.load_state_dict(base.state_dict(), strict=False)
    weights = {name: x.clone() for name, x in wide.named_parameters()}
    for name, parameter in wide.named_parameters():
        if ".sites." in name:
            parameter.data.fill_(7.0)
    initialize(wide, 3, names={name for name in weights if ".sites." in name})
    assert all(torch.equal(x, weights[name]) for name, x in wide.named_parameters())
