"""Tiny transformers models, one a model type, every parameter random, head_dim apart from hidden / heads where the type allows it."""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": False},
    "qwen2": {"head_dim": 6, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**GEMMA, "num_hidden_layers": 7},
}
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
}


def hf_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of the type, in fp32."""
    import transformers

    config = getattr(transformers, f"{CLASSES[model_type]}Config")(**(SIZES | MODELS[model_type] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return model
