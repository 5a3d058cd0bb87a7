"""Each preset is the translation of a published config.json, and counts what transformers counts."""

import json
from importlib import resources

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ligerformer.configs import ModelConfig, presets
from ligerformer.convert import config_from_hf
from tests.make_presets import PRESETS, PUBLISHED, published


def test_names_are_the_presets():
    assert presets.names() == sorted(PRESETS)
    assert set(PRESETS.values()) <= set(PUBLISHED)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown preset 'lama-3.2-1b'; did you mean 'llama-3.2-1b'\?; known: .*qwen3-32b"):
        presets.load("lama-3.2-1b")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_translation_of_the_published_config(name):
    config = presets.load(name)
    assert config == config_from_hf(published(PRESETS[name]))
    stored = json.loads((resources.files("ligerformer.configs.presets") / f"{name}.json").read_text())
    assert stored == config.to_dict()  # every value is written out
    assert ModelConfig.from_dict(stored) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert presets.load(name).num_params() == PUBLISHED[PRESETS[name]]["num_parameters"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_transformers_derives(name):
    """Head width, biases, norms of q and k, tying, windows and rope, as transformers 5.24 resolved them from the same file."""
    config, derived = presets.load(name), PUBLISHED[PRESETS[name]]["derived"]
    assert config.tie_embeddings == derived["tie_word_embeddings_effective"]
    kinds = derived.get("layer_types_as_loaded_by_5.24")
    kinds = [kinds.split()[-1]] * config.num_layers if isinstance(kinds, str) else kinds
    for i in range(config.num_layers):
        attention = config.layer(i).branches["attention"].block
        assert attention.head_dim == derived["head_dim"]
        assert (attention.qk_norm is not None, attention.qkv_bias, attention.o_bias) == (
            derived["qk_norm"],
            derived["qkv_bias"],
            derived["o_bias"],
        )
        if kinds:
            assert (attention.window is not None) == (kinds[i] == "sliding_attention")
        rope = derived["rope_parameters_as_loaded_by_5.24"]
        rope = rope.get(kinds[i], rope) if kinds else rope
        assert attention.rope.theta == rope["rope_theta"]
        scaling = attention.rope.scaling.to_dict() if attention.rope.scaling else {"type": "default"}
        given = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type")}
        assert scaling == {"type": rope.get("rope_type", "default"), **given}


FACTORS = {"llama-3.1-8b": 8.0, "llama-3.1-405b": 8.0, "llama-3.2-1b": 32.0, "llama-3.2-3b": 32.0, "llama-3.3-70b": 8.0}


def test_values_that_are_easily_wrong():
    for name, factor in FACTORS.items():
        assert presets.load(name).layer(0).branches["attention"].block.rope.scaling.factor == factor
    gemma = presets.load("gemma-3-27b")
    assert gemma.layer(0).branches["attention"].block.query_pre_attn_scalar == 168
    assert gemma.pattern == ("local",) * 5 + ("global",)
    assert gemma.layer(61).branches["attention"].block.window == 1024  # 62 layers: the last cycle is cut short
    assert gemma.layers["local"].branches["attention"].block.rope.scaling is None
    gemma2 = presets.load("gemma-2-27b")
    assert (gemma2.layer(0).branches["attention"].block.softcap, gemma2.head.softcap) == (50.0, 30.0)
    assert gemma2.layer(0).branches["attention"].block.query_pre_attn_scalar == 144
    assert (presets.load("mistral-7b-v0.1").layer(0).branches["attention"].block.window) == 4096
    assert (presets.load("mistral-7b-v0.3").layer(0).branches["attention"].block.window) is None
    assert presets.load("smollm2-1.7b").layer(0).branches["attention"].block.rope.theta == 130000


def transformers_num_params(name: str) -> int:
    config = AutoConfig.for_model(**published(PRESETS[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_counts_the_same(name):
    assert presets.load(name).num_params() == transformers_num_params(name)
