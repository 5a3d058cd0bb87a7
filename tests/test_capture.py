"""A captured training step: the same steps, bit for bit, as the plain loop; and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ligerformer
from ligerformer.capture import WARM_UP
from tests.configs.examples import plain
from tests.conftest import needs_gpu

STEPS = WARM_UP + 4


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def model_on(device: str) -> torch.nn.Module:
    return ligerformer.build(plain(), device=device, seed=0)


def optimizer_of(model: torch.nn.Module, device: str, lr: float | Tensor = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, capturable=device == "cuda")


def batches(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, plain()["vocab_size"], (2, 9), generator=generator).to(device) for _ in range(STEPS)]


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_steps_are_those_of_the_loop(device: str, deterministic: None) -> None:
    looped, captured = model_on(device), model_on(device)
    optimizer = optimizer_of(looped, device)
    step = ligerformer.CapturedStep(captured, optimizer_of(captured, device), before_update=lambda: clip(captured))
    for ids in batches(device):
        optimizer.zero_grad()
        loss = looped(ids, labels=ids).loss
        loss.backward()
        clip(looped)
        optimizer.step()
        assert torch.equal(step(ids, labels=ids), loss.detach())
    assert step.captured == (device == "cuda")
    for (name, a), b in zip(captured.named_parameters(), looped.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_other_shapes_are_refused(device: str) -> None:
    model = model_on(device)
    step = ligerformer.CapturedStep(model, optimizer_of(model, device))
    ids = batches(device)[0]
    step(ids, labels=ids)
    with pytest.raises(ValueError, match=r"inputs: .*\(2, 8\).* came and the first call had .*\(2, 9\)"):
        step(ids[:, 1:], labels=ids[:, 1:])
    with pytest.raises(ValueError, match="num_items_in_batch: is a int; expected a tensor"):
        step(ids, labels=ids, num_items_in_batch=3)


@needs_gpu
def test_a_changed_learning_rate_is_refused_unless_a_tensor() -> None:
    ids = batches("cuda")[0]
    for lr in (1e-2, torch.tensor(1e-2, device="cuda")):
        model = model_on("cuda")
        optimizer = optimizer_of(model, "cuda", lr)
        step = ligerformer.CapturedStep(model, optimizer)
        for _ in range(WARM_UP + 1):
            step(ids, labels=ids)
        before = [p.detach().clone() for p in model.parameters()]
        if isinstance(lr, Tensor):
            lr.fill_(0.0)
            step(ids, labels=ids)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        else:
            optimizer.param_groups[0]["lr"] = 0.0
            with pytest.raises(ValueError, match=r"lr was 0.01 when the step was captured and is 0.0 now"):
                step(ids, labels=ids)


@needs_gpu
def test_an_optimizer_that_is_not_capturable_is_refused() -> None:
    model = model_on("cuda")
    with pytest.raises(ValueError, match="AdamW was made with capturable=False"):
        ligerformer.CapturedStep(model, torch.optim.AdamW(model.parameters()))
