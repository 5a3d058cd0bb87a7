"""Generation: greedy with a cache equals without, padded batches equal each row alone, sampling draws from the right distribution."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.blocks import KVSpec
from tests.blocks.contract import made, precision, tokens
from tests.configs.examples import full, plain


def windowed(window: int, **changes: object) -> dict:
    data = plain() | changes
    data["layers"]["main"]["attention"]["window"] = window
    return data


def mixed() -> dict:
    """A window layer beside full ones, as in Gemma."""
    data = windowed(4)
    data["layers"] |= {"global": plain()["layers"]["main"]}
    return data | {"pattern": ["main", "global"]}


def greedy_by_hand(model, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


MODELS = {
    "full": plain(),
    "window, longer prompt": windowed(4),
    "window, shorter prompt": windowed(9),
    "window of one": windowed(1),
    "window and full": mixed(),
    "everything": full(),
}


@pytest.mark.parametrize("data", MODELS.values(), ids=MODELS)
def test_greedy_with_a_cache_equals_without(data, device):
    """To more than two windows of new tokens."""
    dtype, _ = precision(device)
    model, prompt = made(data, device, dtype), tokens(2, 7, device=device)
    expected = greedy_by_hand(model, prompt, 22)
    assert torch.equal(model.generate(prompt, 22), expected)
    assert torch.equal(model.generate(prompt, 22, use_cache=False), expected)
    assert torch.equal(expected[:, :7], prompt)


@pytest.mark.parametrize("data", MODELS.values(), ids=MODELS)
def test_left_padded_prompts_equal_each_alone(data, device):
    dtype, _ = precision(device)
    model = made(data, device, dtype)
    prompts = [tokens(1, n, device=device, seed=n) for n in (3, 7, 5)]
    padded = torch.cat([torch.nn.functional.pad(p, (7 - p.shape[1], 0), value=0) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (7 - p.shape[1], 0), value=0) for p in prompts])
    for cached in (True, False):
        text = model.generate(padded, 11, attention_mask=mask, use_cache=cached)
        for row, prompt in zip(text, prompts, strict=True):
            assert torch.equal(row[7 - prompt.shape[1] :], model.generate(prompt, 11)[0])


# ---- the cache of a window ----


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_keeps_only_its_window(window, device):
    model = made(windowed(window), device)
    capacity = 500
    cache = model.new_cache(2, capacity)
    entries = list(cache.entries.values())
    assert len(entries) == 3
    sizes = {tuple(x.shape) for entry in entries for x in (entry.keys, entry.values)}
    assert sizes == {(2, 2 * window, 2, 8)}
    full_size = next(iter(made(plain(), device).new_cache(2, capacity).entries.values())).keys.numel()
    assert entries[0].keys.numel() * capacity == full_size * 2 * window
    assert next(iter(model.new_cache(2, 5).entries.values())).size == min(5, 2 * window)  # no more than the whole


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("chunks", [[1] * 17, [9] + [1] * 8, [3, 6, 1, 1, 6], [17], [12, 5]], ids=str)
def test_what_a_window_entry_shows_is_what_the_new_tokens_may_see(window, chunks):
    """Keys that hold their own position: those that come back lie side by side, reach far enough back, and are where they say."""
    entry = KVSpec(1, 17, 1, 1, torch.float64, window).allocate(torch.device("cpu"))
    start = 0
    for new in chunks:
        positions = torch.arange(start, start + new, dtype=torch.float64).view(1, new, 1, 1)
        visible = entry.append(positions, -positions)
        shown = visible.keys.flatten().tolist()
        assert shown == list(range(visible.first_slot, start + new))
        assert visible.values.flatten().tolist() == [-x for x in shown]
        assert shown[visible.query_start] == start
        assert visible.first_slot <= max(0, start - (window or 17) + 1)
        start += new


def test_a_full_cache_says_so(device):
    entry = KVSpec(1, 4, 1, 1, torch.float32).allocate(torch.device(device))
    entry.append(torch.zeros(1, 3, 1, 1, device=device), torch.zeros(1, 3, 1, 1, device=device))
    with pytest.raises(ValueError, match="the cache holds 4 tokens, 3 are in use and 2 came"):
        entry.append(torch.zeros(1, 2, 1, 1, device=device), torch.zeros(1, 2, 1, 1, device=device))


def test_a_cache_holds_the_weights_dtype_or_another(device):
    model = made(plain(), device, torch.bfloat16)
    assert next(iter(model.new_cache(1, 8).entries.values())).keys.dtype == torch.bfloat16
    assert next(iter(model.new_cache(1, 8, torch.float32).entries.values())).keys.dtype == torch.float32


# ---- the end of a text ----


def test_a_row_that_has_ended_repeats_its_end(device):
    model, prompt = made(plain(), device), tokens(2, 7, device=device)
    free = model.generate(prompt, 12)
    end = int(free[0, 9])  # the third new token of the first row
    first = [free[row, 7:].tolist().index(end) if end in free[row, 7:] else 11 for row in range(2)]
    for cached in (True, False):
        text = model.generate(prompt, 12, eos_token_id=end, use_cache=cached)
        assert text.shape[1] == 7 + max(first) + 1
        for row in range(2):
            kept = 7 + first[row] + 1
            assert torch.equal(text[row, :kept], free[row, :kept])
            assert set(text[row, kept:].tolist()) <= {end}


def test_generation_ends_when_every_row_has(device):
    model, prompt = made(plain(), device), tokens(2, 7, device=device)
    ends = model.generate(prompt, 1)[:, -1].tolist()
    assert model.generate(prompt, 50, eos_token_id=ends).shape == (2, 8)
    assert model.generate(prompt[:1], 50, eos_token_id=ends[0]).shape == (1, 8)
    assert model.generate(prompt, 5, eos_token_id=[]).shape == (2, 12)


def test_every_new_token_is_reported(device):
    model, prompt = made(plain(), device), tokens(2, 7, device=device)
    seen: list[Tensor] = []
    text = model.generate(prompt, 6, on_token=seen.append)
    assert torch.equal(torch.stack(seen, dim=1), text[:, 7:])


# ---- sampling ----


class Fixed:
    """A model that gives the same logits at every place."""

    def __init__(self, logits: list[float]) -> None:
        self.row = torch.tensor(logits)
        self.config = SimpleNamespace(vocab_size=len(logits))

    def __call__(self, ids: Tensor, **options: object) -> object:
        return type("Output", (), {"logits": self.row.expand(ids.shape[0], 1, -1)})


LOGITS = [2.0, 0.5, -1.0, 1.0, 0.0, -2.0]


def frequencies(**options: object) -> Tensor:
    from ligerformer.generate import generate

    ids = torch.zeros(40000, 1, dtype=torch.int64)
    drawn = generate(Fixed(LOGITS), ids, 1, use_cache=False, seed=0, **options)[:, -1]
    return torch.bincount(drawn, minlength=len(LOGITS)) / len(drawn)


def kept(temperature: float, allowed: list[int]) -> Tensor:
    logits = torch.full((len(LOGITS),), float("-inf"))
    logits[allowed] = torch.tensor(LOGITS)[allowed] / temperature
    return logits.softmax(0)


# Most probable first: 0, 3, 1, 4, 2, 5, with 0.53, 0.19, 0.12, 0.07, 0.03, 0.01 ... at temperature 1.
@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 3.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_k": 3}, [0, 3, 1]),
        ({"temperature": 2.0, "top_k": 99}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_p": 0.7}, [0, 3]),
        ({"temperature": 1.0, "top_p": 0.01}, [0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 3.0, "top_p": 0.7}, [0, 3, 1, 4]),  # of the tempered distribution
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, [0]),  # of what top_k leaves, renormalised: 0.73 and 0.27
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution_that_was_asked_for(options, allowed):
    expected, seen = kept(options["temperature"], allowed), frequencies(**options)
    assert seen[expected == 0].sum() == 0
    assert (seen - expected).abs().max() < 5 * (expected * (1 - expected) / 40000).sqrt().max() + 1e-6


def test_a_seed_makes_sampling_repeatable(device):
    model, prompt = made(plain(), device), tokens(2, 7, device=device)
    first, second, third = (model.generate(prompt, 20, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, third)
    torch.manual_seed(0)
    free = model.generate(prompt, 20, temperature=1.0)
    assert not torch.equal(free, model.generate(prompt, 20, temperature=1.0))
    state = torch.get_rng_state()
    model.generate(prompt, 3, temperature=1.0, seed=3)
    assert torch.equal(torch.get_rng_state(), state)  # a seeded call leaves torch's own generator alone


def test_top_k_of_one_is_greedy(device):
    model, prompt = made(plain(), device), tokens(2, 7, device=device)
    assert torch.equal(model.generate(prompt, 9, temperature=5.0, top_k=1), model.generate(prompt, 9))


# ---- what is refused, and what is left as it was ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1; expected 0"),
        ({"top_k": 0}, "top_k is 0; expected at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0; expected more than 0"),
        ({"top_p": 1.5}, "top_p is 1.5; expected more than 0 and at most 1"),
        ({"attention_mask": torch.ones(2, 6)}, r"attention_mask has shape \(2, 6\); expected that of input_ids, \(2, 7\)"),
        ({"attention_mask": torch.tensor([[1] * 7, [1] * 6 + [0]])}, "padded on the right"),
        ({"attention_mask": torch.tensor([[1] * 7, [0] * 7])}, r"\(or empty\)"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    options = {"max_new_tokens": 3} | options
    with pytest.raises(ValueError, match=message):
        made(plain()).generate(tokens(2, 7), **options)


def test_an_empty_batch_is_refused():
    model = made(plain())
    for ids in (tokens(2, 7)[:0], tokens(2, 7)[:, :0]):
        with pytest.raises(ValueError, match="input_ids: shape is"):
            model.generate(ids, 3)


def test_generation_keeps_no_graph_and_changes_no_input(device):
    model, prompt = made(plain(), device), tokens(2, 7, device=device)
    before = prompt.clone()
    with kernels.use("auto"):
        text = model.generate(prompt, 3)
    assert torch.equal(prompt, before) and not text.requires_grad
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrong", [-1, 97])
def test_a_prompt_with_an_unknown_token_is_refused(wrong, device):
    """Looked at once: on a GPU the call itself would answer with NaN, out of which no token can be chosen."""
    model, prompt = made(plain(), device), tokens(2, 7, device=device)
    prompt[1, 3] = wrong
    with pytest.raises(IndexError, match=f"input_ids holds {wrong}; expected token ids in \\[0, 97\\)"):
        model.generate(prompt, 3)
