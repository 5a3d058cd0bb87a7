"""tests/data/hf_configs.json, the published configs that presets are held to, is itself held to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data/hf_configs.json").read_text())


def test_every_entry_is_whole_and_has_two_sources():
    for name, entry in CONFIGS.items():
        assert set(entry) == {"config", "num_parameters", "derived", "confidence", "field_confidence", "sources"}, name
        assert len(entry["sources"]) >= 2, name
        assert {field.split(".")[0] for field in entry["field_confidence"]} <= set(entry["config"]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_builds_the_same_model(name: str):
    """On the meta device: the parameter total, layer 0's shapes, the tie, and the head dimension are those recorded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entry, derived = CONFIGS[name], CONFIGS[name]["derived"]
    config = AutoConfig.for_model(**entry["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {key: list(p.shape) for key, p in model.named_parameters() if key.startswith("model.layers.0.")}
    assert type(model).__name__ == derived["model_class"]
    assert sum(p.numel() for p in model.parameters()) == entry["num_parameters"]
    assert shapes == derived["parameter_tensor_shapes_layer0"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == derived["tie_word_embeddings_effective"]
