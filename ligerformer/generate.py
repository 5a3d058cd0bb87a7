"""Text out of a model: greedy or sampled, with a key-value cache, batched."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,  # (B, T) int64
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Collection[int] | None = None,
    seed: int | None = None,
    attention_mask: Tensor | None = None,  # (B, T); 0 is padding, on the left
    use_cache: bool = True,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue each prompt by up to ``max_new_tokens`` tokens; returns prompts and continuations (B, T + new).

    ``temperature`` 0 takes the most probable token; else logits are divided by it, cut to the ``top_k`` most probable tokens and to the
    smallest set whose probabilities sum to ``top_p``, and drawn from with a generator seeded by ``seed``. A row that has produced an
    ``eos_token_id`` (one or several) repeats it; generation ends when every row has. Prompts of different lengths are padded on the left and
    say so in ``attention_mask``. ``on_token`` is called with each new column (B,). ``use_cache=False`` runs the whole sequence for every token.

    Raises a ValueError for options out of range, padding on the right, or a prompt that is all padding.
    """
    _check(max_new_tokens, temperature, top_k, top_p)
    _check_prompt(input_ids, model.config.vocab_size)
    _check_mask(input_ids, attention_mask)
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    ends = _as_tensor(eos_token_id, input_ids.device)
    batch, prompt = input_ids.shape
    cache = model.new_cache(batch, prompt + max_new_tokens) if use_cache else None
    done = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    ids, new, mask = input_ids, input_ids, attention_mask
    for _ in range(max_new_tokens):
        logits = model(new if use_cache else ids, attention_mask=mask, cache=cache, logits_to_keep=1).logits[:, -1]
        token = _choose(logits, temperature, top_k, top_p, generator)
        if ends is not None:
            token = torch.where(done, ids[:, -1], token)
            done = done | torch.isin(token, ends)
        new = token.unsqueeze(1)
        ids = torch.cat([ids, new], dim=1)
        if use_cache:
            mask = None  # the cache knows what is padding
        elif mask is not None:
            mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        if on_token is not None:
            on_token(token)
        if ends is not None and bool(done.all()):
            break
    return ids


def _choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None) -> Tensor:
    """One token id a row out of logits (B, V)."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # mass of the more probable tokens: the one that crosses top_p stays
        logits = logits.masked_fill((before >= top_p).scatter(-1, order, before >= top_p), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def _as_tensor(eos_token_id: int | Collection[int] | None, device: torch.device) -> Tensor | None:
    if eos_token_id is None:
        return None
    return torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id), device=device)


def _check(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    for name, value, good, expected in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0.0, "0 (greedy) or more"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or None"),
        ("top_p", top_p, top_p is None or 0.0 < top_p <= 1.0, "more than 0 and at most 1, or None"),
    ):
        if not good:
            raise ValueError(f"generate: {name} is {value!r}; expected {expected}")


def _check_prompt(input_ids: Tensor, vocab_size: int) -> None:
    """One look at the prompt's values: on a GPU a call would answer an id out of range with NaN, out of which no token can be chosen."""
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"generate: input_ids: shape is {tuple(input_ids.shape)}; expected (batch, tokens), both at least 1")
    least, most = (int(x) for x in input_ids.aminmax())
    if least < 0 or most >= vocab_size:
        raise IndexError(f"generate: input_ids holds {least if least < 0 else most}; expected token ids in [0, {vocab_size})")


def _check_mask(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: attention_mask has shape {tuple(attention_mask.shape)}; expected that of input_ids, {tuple(input_ids.shape)}"
        )
    if not bool(attention_mask[:, -1].bool().all()):
        raise ValueError("generate: attention_mask ends in 0, so a prompt is padded on the right (or empty); pad prompts on the left")
