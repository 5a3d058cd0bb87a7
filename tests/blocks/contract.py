"""What every block promises, slot by slot, as checks that any block can be run through, one of your own included::

    check_block("attention", {"type": "differential", "num_heads": 4, "head_dim": 16})

The block stands in its slot of a small model with random parameters, in every layer; the checks look at that model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligerformer import ModelConfig, build
from ligerformer.blocks import Context, Decoder, allocate, initialize
from ligerformer.blocks.state import AUX_LOSS, shifted_labels
from tests.configs.examples import plain

TOKENS = 11


def around(slot: str, block: dict[str, Any], **changes: Any) -> ModelConfig:
    """A small model's config with ``block`` in ``slot``: in every layer, or wherever the slot stands."""
    data = plain() | changes
    layer = data["layers"]["main"]
    if slot == "norm":
        data["final_norm"] = layer["norm"] = layer["post_norm"] = block
    elif slot == "rope_scaling":
        layer["attention"]["rope"]["scaling"] = block
    elif slot in ("embed", "residual", "head"):
        data[slot] = block
    else:
        layer[slot] = block
    return ModelConfig.from_dict(data)


def randomized(model: Decoder, seed: int = 0, std: float = 0.3) -> Decoder:
    """Every parameter random: what a block starts with may hide what it does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
    return model


def made(config: ModelConfig | dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """A model with random parameters."""
    return randomized(build(config, device=device, dtype=dtype, seed=0, **options))


def tokens(batch: int = 2, length: int = TOKENS, *, device: str = "cpu", seed: int = 1) -> Tensor:
    """Random ids (B, T) of the small model's vocabulary."""
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def distance(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max())


def precision(device: str) -> tuple[torch.dtype, float]:
    """The widest dtype that the kernels of a device serve, and what is rounding in it for a whole small model."""
    return (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 2e-3)


def gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    """The loss's gradient by parameter name; every parameter must have one."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def loss_by_hand(model: Decoder, ids: Tensor, *, use_reentrant: bool | None) -> Tensor:
    """The loss of next-token prediction by the blocks' own protocol, each layer checkpointed by hand unless ``use_reentrant`` is None."""
    ctx = Context(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
    state = model.ends.expand(model.embed(ids))
    for layer in model.layers:
        tensors, structure = state.flatten()
        after = []

        def run(*tensors: Tensor, layer: Any = layer, structure: Any = structure, after: list[Any] = after) -> tuple[Tensor, ...]:
            tensors, after_structure = layer(structure.restore(tensors), ctx).flatten()
            after.append(after_structure)
            return tensors

        tensors = run(*tensors) if use_reentrant is None else checkpoint(run, *tensors, use_reentrant=use_reentrant)
        state = after[0].restore(tensors)
    loss = model.head.loss(model.ends.collapse(state, model.final_norm), shifted_labels(ids, None))
    return loss + state.shared.get(AUX_LOSS, 0.0)


# ---- the checks ----


def config_is_data(config: ModelConfig, device: str) -> None:
    """The config survives JSON, and says how many parameters the model has."""
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model = build(config, device="meta")
    assert config.num_params() == sum(p.numel() for p in model.parameters())


def shapes(config: ModelConfig, device: str) -> None:
    """Logits (B, T, V) and hidden states in the model's dtype, a scalar fp32 loss; one row and one token too."""
    for dtype in (torch.float32, torch.bfloat16):
        model = made(config, device, dtype)
        for batch, length in ((2, TOKENS), (1, 1), (3, 2)):
            ids = tokens(batch, length, device=device)
            output = model(ids, labels=ids, return_logits=True, return_hidden_states=True)
            assert output.logits.shape == (batch, length, config.vocab_size)
            assert output.logits.dtype == dtype and bool(output.logits.isfinite().all())
            assert output.loss.shape == () and output.loss.dtype == torch.float32 and bool(output.loss.isfinite())
            assert len(output.hidden_states) == config.num_layers + 1
            for hidden in output.hidden_states:
                assert hidden.shape[:2] == (batch, length) and hidden.shape[-1] == config.hidden_size and hidden.dtype == dtype


def causality(config: ModelConfig, device: str) -> None:
    """Changing token t changes no bit of what stands before it, and does change what stands at it."""
    model, ids = made(config, device), tokens(device=device)
    logits = model(ids).logits
    for t in (1, 5, TOKENS - 1):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] + 1) % config.vocab_size
        after = model(changed).logits
        assert torch.equal(after[:, :t], logits[:, :t])
        assert not torch.equal(after[:, t], logits[:, t])


def isolation(config: ModelConfig, device: str) -> None:
    """Changing one document, or what padding holds, changes no bit of another's output."""
    model, ids = made(config, device), tokens(device=device)
    documents = torch.tensor([[0] * 4 + [1] * 3 + [2] * 4, [7] * 1 + [3] * 8 + [9] * 2], device=device)
    padding = documents != torch.tensor([[0], [9]], device=device)  # the first row is padded on the left, the second on the right
    for changed_places, options in ((documents == documents[:, 4:5], {"document_ids": documents}), (~padding, {"attention_mask": padding})):
        changed = torch.where(changed_places, (ids + 1) % config.vocab_size, ids)
        before, after = model(ids, **options).logits, model(changed, **options).logits
        assert torch.equal(after[~changed_places], before[~changed_places])
        assert not torch.equal(after[changed_places], before[changed_places])


def packing(config: ModelConfig, device: str) -> None:
    """A document in a packed row, or beside padding, gives what it gives alone, to rounding."""
    dtype, rounding = precision(device)
    model, ids = made(config, device, dtype), tokens(1, device=device)
    documents = torch.tensor([[0] * 4 + [1] * 7], device=device)
    alone = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], dim=1)
    assert distance(model(ids, document_ids=documents).logits, alone) < rounding
    for mask in (documents, 1 - documents):
        assert distance(model(ids, attention_mask=mask).logits[mask.bool()], alone[mask.bool()]) < rounding


def caching(config: ModelConfig, device: str) -> None:
    """A prompt in one call and its continuation token by token give the logits of the whole, to rounding; padded prompts too."""
    dtype, rounding = precision(device)
    model, ids = made(config, device, dtype), tokens(device=device)
    left_padded = torch.ones_like(ids)
    left_padded[0, :2] = 0
    for mask in (None, left_padded):
        whole = model(ids, attention_mask=mask).logits
        with torch.no_grad():
            cache = model.new_cache(len(ids), TOKENS)
            parts = [model(ids[:, :5], attention_mask=None if mask is None else mask[:, :5], cache=cache).logits]
            parts += [model(ids[:, t : t + 1], cache=cache).logits for t in range(5, TOKENS)]
        assert distance(torch.cat(parts, dim=1), whole) < rounding


def meta_build(config: ModelConfig, device: str) -> None:
    """Built on the meta device, then allocated and initialised, the model is the one that a plain build gives, buffers included."""
    model = build(config, device="meta", seed=3)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    initialize(allocate(model, device, torch.float32), 3)
    fresh = build(config, device=device, dtype=torch.float32, seed=3)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model, kind)()), dict(getattr(fresh, kind)())
        assert list(ours) == list(theirs)
        for name, x in ours.items():
            assert torch.equal(x, theirs[name]) and x.device == theirs[name].device, name
    ids = tokens(device=device)
    assert torch.equal(model(ids).logits, fresh(ids).logits)


def state_dict_names(config: ModelConfig, device: str) -> None:
    """Tensors have their documented places, all of them parameters or persistent buffers, and load into another model."""
    model = made(config, device)
    branches = "|".join(re.escape(key) for layer in config.layers.values() for key in layer.branches)
    place = re.compile(rf"(embed|ends|final_norm|head|layers\.\d+\.(({branches})|norms\.\d+|sites\.\d+|post_norms\.({branches})))\.\w")
    assert [name for name in model.state_dict() if not place.match(name)] == []
    other = build(config, device=device, seed=9)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens(device=device)).logits, model(tokens(device=device)).logits)


def cpu_path(config: ModelConfig, device: str) -> None:
    """The CPU gives what the device gives, to rounding."""
    model, ids = made(config, device), tokens(device=device)
    logits = model(ids).logits.cpu()
    assert distance(logits, made(config, "cpu", torch.float64)(ids.cpu()).logits) < 2e-3


def finite_gradients(config: ModelConfig, device: str) -> None:
    """Every parameter takes part in the loss, with a finite gradient, in fp32 and bf16, packed and padded too."""
    ids = tokens(device=device)
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 10 + [1]], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        model = made(config, device, dtype)
        for options in ({}, {"document_ids": documents}, {"attention_mask": documents}):
            for name, gradient in gradients(model, model(ids, ids, **options).loss).items():
                assert bool(gradient.isfinite().all()), name


def recomputation(config: ModelConfig, device: str) -> None:
    """Every ``recompute``, and layers recomputed by hand, give the same bits, loss and gradients; a reentrant checkpoint drops no gradient."""
    ids = tokens(device=device)
    model = made(config, device)
    plain_loss = model(ids, ids).loss
    expected = gradients(model, plain_loss)
    recomputed = []
    for model.recompute in ("cheap", "layer"):
        recomputed.append(model(ids, ids).loss)
    for loss in (*recomputed, loss_by_hand(model, ids, use_reentrant=False), loss_by_hand(model, ids, use_reentrant=None)):
        assert torch.equal(loss, plain_loss)
        for name, gradient in gradients(model, loss).items():
            assert torch.equal(gradient, expected[name]), name
    loss_by_hand(model, ids, use_reentrant=True).backward()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, parameter in model.named_parameters():  # to rounding: what several layers add to one tensor is summed in another order
        assert (parameter.grad - expected[name]).abs().max() < 1e-5 * largest, name


CHECKS: tuple[Callable[[ModelConfig, str], None], ...] = (
    config_is_data,
    shapes,
    causality,
    isolation,
    packing,
    caching,
    meta_build,
    state_dict_names,
    cpu_path,
    finite_gradients,
    recomputation,
)


def check_block(slot: str, block: dict[str, Any], *, device: str = "cpu", **changes: Any) -> None:
    """Hold a block, given as the dict that a config would have, to all of its slot's promises. ``changes`` are to the model around it."""
    config = around(slot, block, **changes)
    for check in CHECKS:
        check(config, device)
