"""transformers as an exact oracle: tiny random models of every family, and what they compute in true float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ligerformer
from ligerformer.convert.saving import _tensors

transformers = pytest.importorskip("transformers")

TINY = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
# head_dim is not hidden_size / heads, kv heads are not heads: both have been taken for each other
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
GEMMA = TINY | dict(head_dim=20, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=256)

# name: (config class, arguments). Sequences are longer than twice any window and, where RoPE is scaled, than the original context.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TINY | dict(head_dim=16, max_position_embeddings=256)),
    "llama3": ("LlamaConfig", TINY | dict(head_dim=16, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True, max_position_embeddings=256)),
    "llama-biases": ("LlamaConfig", TINY | dict(head_dim=16, attention_bias=True, mlp_bias=True, max_position_embeddings=256)),
    "mistral": ("MistralConfig", TINY | dict(head_dim=16, sliding_window=9, max_position_embeddings=256)),
    "qwen2": ("Qwen2Config", TINY | dict(max_position_embeddings=256)),
    "qwen2-window": (
        "Qwen2Config",
        TINY | dict(use_sliding_window=True, sliding_window=9, max_window_layers=1, max_position_embeddings=256),
    ),
    "qwen3": ("Qwen3Config", TINY | dict(head_dim=20, tie_word_embeddings=True, max_position_embeddings=256)),
    "gemma": ("GemmaConfig", GEMMA),
    "gemma2": (
        "Gemma2Config",
        GEMMA | dict(sliding_window=9, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA | dict(num_hidden_layers=7, sliding_window=9, query_pre_attn_scalar=28)),
    "gemma3-scaled": (
        "Gemma3TextConfig",
        GEMMA
        | dict(
            num_hidden_layers=7,
            sliding_window=9,
            query_pre_attn_scalar=28,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    ),
}


def write_checkpoint(name: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float64) -> Path:
    """A random checkpoint of a family: every parameter drawn (norms around where they start, biases too), standard deviation 0.3."""
    class_name, options = MODELS[name]
    config = getattr(transformers, class_name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            start = parameter if parameter.dim() == 1 else torch.zeros_like(parameter)
            std = 0.3 if parameter.dim() == 1 or "embed" in key else 0.3 / parameter.shape[1] ** 0.5 * 3
            parameter.copy_(start + std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.to(dtype).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def true_float64() -> Iterator[None]:
    """Within, a float64 tensor stays float64 through the fp32 islands of transformers' models (tables in fp32 stay fp32)."""
    to, to_float, softmax = Tensor.to, Tensor.float, torch.nn.functional.softmax
    narrow = (torch.float32, torch.bfloat16, torch.float16)

    def patched_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if a in narrow and isinstance(a, torch.dtype) else a for a in args)
            kwargs = {k: torch.float64 if k == "dtype" and v in narrow else v for k, v in kwargs.items()}
        return to(self, *args, **kwargs)

    def patched_float(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype == torch.float64 else to_float(self, *args, **kwargs)

    def patched_softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    Tensor.to, Tensor.float, torch.nn.functional.softmax = patched_to, patched_float, patched_softmax  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.to, Tensor.float, torch.nn.functional.softmax = to, to_float, softmax  # type: ignore[method-assign]


def oracle(folder: Path, dtype: torch.dtype = torch.float64, attention: str = "eager") -> Any:
    """transformers' model of the folder, opened in ``dtype`` (not converted afterwards, which would keep fp32 roundings)."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def run_oracle(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Everything that is compared: hidden states, logits, loss and gradients, by name."""
    model.zero_grad()
    out = model(ids, labels=ids, output_hidden_states=True)
    out.loss.backward()
    named = {f"hidden.{i}": h for i, h in enumerate(out.hidden_states)} | {"logits": out.logits, "loss": out.loss}
    return {k: v.detach() for k, v in named.items()} | {f"grad.{k}": p.grad for k, p in model.named_parameters()}


def run_ours(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The same of our model, gradients split into the checkpoint's tensors by the rules of its family."""
    model.zero_grad()
    out = model(ids, labels=ids, return_logits=True, return_hidden_states=True)
    out.loss.backward()
    named = {f"hidden.{i}": h for i, h in enumerate(out.hidden_states)} | {"logits": out.logits, "loss": out.loss}
    gradients = copy.deepcopy(model)
    for ours, theirs in zip(gradients.parameters(), model.parameters(), strict=True):
        ours.data = theirs.grad
    return {k: v.detach() for k, v in named.items()} | {f"grad.{k}": v for k, v in _tensors(gradients, model.source.model_type)}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """The largest max|a - b| / max|b| over all tensors, and whose it is. Both must hold the same names."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    distances = {}
    for name, b in theirs.items():
        a = ours[name]
        assert a.shape == b.shape, f"{name}: {tuple(a.shape)} and {tuple(b.shape)}"
        distances[name] = float((a.double() - b.double()).abs().max() / b.double().abs().max())
    name = max(distances, key=lambda k: distances[k])
    return distances[name], name


def rms(x: Tensor) -> float:
    """Root mean square over all elements."""
    return float(x.double().square().mean().sqrt())


def load_ours(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Our model of the folder."""
    return ligerformer.from_hf(folder, dtype=dtype, device=device)
