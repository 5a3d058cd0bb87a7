"""The tensors of each family, by name, and the text part of a multimodal checkpoint."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ligerformer.convert import config_from_hf
from ligerformer.convert.config import to_hf, translate
from ligerformer.convert.families import family_of, model_types
from tests.convert.hf_configs import TINY, error_of, multimodal, tiny
from tests.make_presets import PUBLISHED

SERVED = {name: entry["config"] for name, entry in PUBLISHED.items() if entry["config"]["model_type"] in model_types()}


def test_the_text_part_of_gemma_3_is_read_and_saved_as_text():
    translation = translate(multimodal())
    text = SERVED["google/gemma-3-27b-pt"]
    assert translation.config == config_from_hf(text)
    assert translation.model_type == "gemma3_text"
    assert translation.defaults["text_config.vocab_size"] == 262208
    assert translation.defaults["tie_word_embeddings"] is True
    assert translation.inert == {"eos_token_id": [1, 106], "dtype": "bfloat16", "transformers_version": "4.50.0.dev0"}
    written = {**translation.inert, **to_hf(translation.config, translation.model_type)}
    assert config_from_hf(written) == translation.config


@pytest.mark.parametrize(
    "changes, fragment",
    [
        ({"text_config": None}, "text_config: is missing"),
        ({"text_config": 5}, "text_config: is 5"),
        ({"text_config": multimodal()["text_config"] | {"zzz": 1}}, "text_config.zzz: unknown key"),
        (
            {"text_config": multimodal()["text_config"] | {"rope_scaling": {"rope_type": "liner", "factor": 1}}},
            "text_config.rope_scaling.rope_type",
        ),
        ({"text_config": multimodal()["text_config"] | {"model_type": "gemma4_text"}}, "text_config.model_type: is 'gemma4_text'"),
        ({"text_config": multimodal()["text_config"] | {"tie_word_embeddings": False}}, "text_config.tie_word_embeddings: is False while"),
        ({"zzz": 1}, "zzz: unknown key of gemma3"),
    ],
)
def test_faults_of_a_multimodal_file_are_named(changes, fragment):
    assert error_of(multimodal(**changes)).startswith(fragment)


def rename(name: str, pairs) -> str:
    for pattern, replacement in pairs:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name, count=1)
    return name


def ignored(name: str, translation) -> str | None:
    return next((m.lastgroup for p in translation.ignored_tensors if (m := re.fullmatch(p, name))), None)


def test_tensors_of_a_multimodal_checkpoint_find_their_names():
    translation = translate(multimodal())
    assert ignored("vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias", translation) == "vision_tower"
    assert ignored("model.vision_tower.vision_model.embeddings.patch_embedding.weight", translation) == "vision_tower"
    assert ignored("multi_modal_projector.mm_input_projection_weight", translation) == "multi_modal_projector"
    assert ignored("language_model.model.layers.0.mlp.up_proj.weight", translation) is None
    for name in ("language_model.model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"):
        assert rename(name, translation.renamed_tensors) == "model.layers.3.mlp.up_proj.weight"
    assert rename("language_model.lm_head.weight", translation.renamed_tensors) == "lm_head.weight"
    assert rename("lm_head.weight", translation.renamed_tensors) == "lm_head.weight"


def test_rotary_buffers_of_old_files_are_ignored_by_name():
    translation = translate(tiny("llama"))
    assert ignored("model.layers.11.self_attn.rotary_emb.inv_freq", translation) == "rotary_frequencies"
    assert ignored("model.rotary_emb.inv_freq", translation) == "rotary_frequencies"
    assert ignored("model.layers.11.self_attn.q_proj.weight", translation) is None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", TINY)
def test_rules_name_every_tensor_of_transformers_model_once(model_type, tied, packed):
    changes = {"tie_word_embeddings": tied} | {k: True for k in ("attention_bias", "mlp_bias") if k in TINY[model_type]}
    hf = tiny(model_type, **changes)
    config = config_from_hf(hf)
    for name in config.layers:
        for branch in ("attention", "mlp"):
            config = config.replace(f"layers.{name}.{branch}.packed", packed)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    shapes = {name: tuple(x.shape) for name, x in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
    rules = family_of(model_type).rules(config, model_type)
    sources = [source for rule in rules for source in rule.sources]
    assert sorted(sources) == sorted(shapes)
    assert len({rule.native for rule in rules}) == len(rules)
    for rule in rules:
        rows = [shapes[source][0] for source in rule.sources]
        whole = torch.empty(sum(rows), *shapes[rule.sources[0]][1:], device="meta")
        assert [tuple(view.shape) for view in rule.views(whole)] == [shapes[source] for source in rule.sources]
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == config.num_params()


def test_norms_stand_where_transformers_has_them():
    def norms(model_type):
        rules = family_of(model_type).rules(config_from_hf(tiny(model_type)), model_type)
        return {rule.native: rule.sources[0] for rule in rules if "layers.1." in rule.native and "norms" in rule.native}

    assert norms("llama") == {
        "layers.1.norms.0.weight": "model.layers.1.input_layernorm.weight",
        "layers.1.norms.1.weight": "model.layers.1.post_attention_layernorm.weight",
    }
    assert norms("gemma3_text") == {
        "layers.1.norms.0.weight": "model.layers.1.input_layernorm.weight",
        "layers.1.post_norms.attention.weight": "model.layers.1.post_attention_layernorm.weight",
        "layers.1.norms.1.weight": "model.layers.1.pre_feedforward_layernorm.weight",
        "layers.1.post_norms.mlp.weight": "model.layers.1.post_feedforward_layernorm.weight",
    }


def test_blocks_that_a_family_does_not_know_get_no_rules():
    config = config_from_hf(tiny("llama")).replace("residual", {"type": "mhc", "streams": 2})
    config = config.replace("layers.main.attention.sinks", True).replace("layers.main.norm", None)
    natives = {rule.native for rule in family_of("llama").rules(config, "llama")}
    assert not any(part in name for name in natives for part in ("sites", "ends", "sinks", "norms"))
    assert "layers.3.attention.qkv_proj.weight" in natives
