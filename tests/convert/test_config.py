"""config.json to native configs and back: every key accounted for, both dialects, every model type."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ligerformer.configs import ConfigError, LinearScaling, LongRopeScaling, ModelConfig, YarnScaling
from ligerformer.convert.config import config_from_hf, to_hf, translate
from ligerformer.convert.families import CannotExpress, family_of, gemma, llama, model_types, qwen
from tests.convert.hf_configs import TINY, hf_configs, multimodal, new_dialect, tiny
from tests.make_presets import PUBLISHED

SERVED = {name: entry["config"] for name, entry in PUBLISHED.items() if entry["config"]["model_type"] in model_types()}
DEFAULTS = {
    "llama": llama.LLAMA_DEFAULTS,
    "mistral": llama.MISTRAL_DEFAULTS,
    "qwen2": qwen.QWEN2_DEFAULTS,
    "qwen3": qwen.QWEN3_DEFAULTS,
    "gemma": gemma.GEMMA_DEFAULTS,
    "gemma2": gemma.GEMMA2_DEFAULTS,
    "gemma3_text": gemma.GEMMA3_DEFAULTS,
}


def error_of(data) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_hf(data)
    return str(caught.value)


def attention_of(config: ModelConfig, layer: int = 0):
    return config.layer(layer).branches["attention"].block


# ------------------------------------------------------------------------------------------------------- published files


@pytest.mark.parametrize("name", SERVED)
def test_both_dialects_say_the_same(name):
    config = SERVED[name]
    assert config_from_hf(new_dialect(config)) == config_from_hf(config)
    if config.get("rope_scaling"):
        renamed = {("type" if k == "rope_type" else k): v for k, v in config["rope_scaling"].items()}
        assert config_from_hf(config | {"rope_scaling": renamed}) == config_from_hf(config)


@pytest.mark.parametrize("name", SERVED)
def test_what_transformers_writes_of_a_published_file_says_the_same(name):
    ours = json.loads(AutoConfig.for_model(**copy.deepcopy(SERVED[name])).to_json_string(use_diff=True))
    assert config_from_hf(ours) == config_from_hf(SERVED[name])
    assert "rope_parameters" in ours


@pytest.mark.parametrize("name", SERVED)
def test_what_is_written_of_a_published_file_says_the_same(name):
    translation = translate(SERVED[name])
    written = json.loads(json.dumps(to_hf(translation.config, translation.model_type)))
    assert config_from_hf(written) == translation.config
    assert translate({**translation.inert, **written}).config == translation.config
    assert written["model_type"] == SERVED[name]["model_type"]


MEANING = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_activation",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
]


def resolved(data: dict) -> dict:
    """What transformers makes of the keys that have a part in results."""
    config = AutoConfig.for_model(**copy.deepcopy(data))
    meaning = {name: getattr(config, name, None) for name in MEANING}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return meaning | {"head_dim": head_dim, "activation": meaning["hidden_activation"] or config.hidden_act}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_written_means_the_same_to_transformers(name):
    translation = translate(SERVED[name])
    assert resolved(to_hf(translation.config, translation.model_type)) == resolved(SERVED[name])


# ------------------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("model_type", TINY)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_config_comes_back(model_type, data):
    hf = data.draw(hf_configs(model_type))
    config = config_from_hf(hf)
    assert config_from_hf(new_dialect(hf)) == config
    written = to_hf(config, model_type)
    assert config_from_hf(json.loads(json.dumps(written))) == config
    assert config_from_hf(to_hf(config)) == config  # as the first type that can say it
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("model_type", TINY)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_transformers_opens_what_is_written_and_says_the_same(model_type, data):
    config = config_from_hf(data.draw(hf_configs(model_type)))
    theirs = AutoConfig.for_model(**to_hf(config, model_type))
    assert config_from_hf(json.loads(theirs.to_json_string(use_diff=True))) == config


LEAVES = [
    ("hidden_size", st.sampled_from([24, 48])),
    ("tie_embeddings", st.booleans()),
    ("max_position_embeddings", st.sampled_from([64, 128])),
    ("init.std", st.sampled_from([0.02, 0.5, 1.5])),
    ("embed.scale", st.sampled_from([None, 24**0.5, 2.0])),
    ("head.softcap", st.sampled_from([None, 30.0])),
    ("head.logit_scale", st.sampled_from([1.0, 0.5])),
    ("head.bias", st.booleans()),
    ("final_norm.eps", st.sampled_from([1e-5, 1e-6])),
    ("final_norm.offset", st.sampled_from([0.0, 1.0])),
    ("residual", st.sampled_from([{"type": "add"}, {"type": "mhc", "streams": 2}])),
    ("layers.main.norm.casting", st.sampled_from(["input", "fp32"])),
    ("layers.main.norm", st.sampled_from([None, {"type": "rms_norm", "eps": 1e-5}])),
    ("layers.main.post_norm", st.sampled_from([None, {"type": "rms_norm", "eps": 1e-5, "offset": 1.0, "casting": "fp32"}])),
    ("layers.main.sublayers", st.sampled_from([[["attention"], ["mlp"]], [["attention", "mlp"]]])),
    ("layers.main.attention.window", st.sampled_from([None, 5])),
    ("layers.main.attention.softcap", st.sampled_from([None, 50.0])),
    ("layers.main.attention.scale", st.sampled_from([None, 0.5])),
    ("layers.main.attention.query_pre_attn_scalar", st.sampled_from([None, 24.0, 24.5])),
    ("layers.main.attention.sinks", st.booleans()),
    ("layers.main.attention.qkv_bias", st.booleans()),
    ("layers.main.attention.o_bias", st.booleans()),
    ("layers.main.attention.qk_norm", st.sampled_from([None, {"type": "rms_norm", "eps": 1e-5}])),
    ("layers.main.attention.rope", st.sampled_from([{"theta": 20000.0}, None, {"theta": 5.0, "partial_rotary_factor": 0.5}])),
    (
        "layers.main.attention.rope",
        st.sampled_from([{"theta": 20000.0, "scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}}]),
    ),
    ("layers.main.mlp.bias", st.booleans()),
    ("layers.main.mlp.multiplier", st.sampled_from([1.0, 0.5])),
    ("layers.main.mlp.activation", st.sampled_from(["silu", "gelu_tanh"])),
]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
@settings(deadline=None, max_examples=60)
@given(changes=st.lists(st.sampled_from(LEAVES).flatmap(lambda leaf: st.tuples(st.just(leaf[0]), leaf[1])), max_size=3))
def test_a_changed_config_comes_back_or_is_refused_by_the_name_of_a_change(model_type, changes):
    original = config = config_from_hf(tiny(model_type, sliding_window=None) if model_type == "mistral" else tiny(model_type))
    for path, value in changes:
        try:
            config = config.replace(path, value)
        except ConfigError:
            return  # a path of a block that an earlier change took away, or numbers at odds
    for target in (model_type, None):
        try:
            written = to_hf(config, target)
        except CannotExpress as error:
            named = [difference.split(":")[0].split(".") for difference in error.differences]
            changed = [path.split(".") for path, _ in changes] + [["embed"]]  # whose scale hidden_size leaves behind
            # The field itself, or the one beside it that is at odds with it (one key says both biases).
            near = any(name[:3] == path[:3] or name[: len(path)] == path for name in named for path in changed)
            assert near or target is None  # without a target, another type may come nearest
            assert config != original
        else:
            assert config_from_hf(written) == config


# ----------------------------------------------------------------------------------------------------------- every key


@pytest.mark.parametrize("model_type", TINY)
def test_published_defaults_are_those_of_the_class(model_type):
    cls = CONFIG_MAPPING[model_type]
    fields = {f.name: f.default for f in dataclasses.fields(cls)}
    for name, value in DEFAULTS[model_type].items():
        if name == "rope_theta":
            assert value == (cls.default_theta["global"] if model_type == "gemma3_text" else cls.default_theta)
        elif name == "rope_local_base_freq":
            assert value == cls.default_theta["local"]
        elif name in fields:
            assert fields[name] == value
        else:
            assert (model_type, name, value) == ("qwen2", "head_dim", None)  # read where it is there, no field of the class


@pytest.mark.parametrize("model_type", TINY)
def test_a_missing_key_takes_its_published_default_and_is_reported_or_is_an_error(model_type):
    full = tiny(model_type, hidden_size=96, num_attention_heads=8)
    if model_type == "gemma3_text":
        del full["sliding_window_pattern"]
    if model_type.startswith("qwen"):
        full |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    assert translate(full).defaults == {}
    for name in full:
        data = {k: v for k, v in full.items() if k != name}
        if name in DEFAULTS[model_type]:
            translation = translate(data)
            derived = {"num_key_value_heads": 8, "head_dim": 96 // 8}
            expected = DEFAULTS[model_type][name]
            assert translation.defaults == {name: derived[name] if expected is None and name in derived else expected}
            assert config_from_hf(data | translation.defaults) == translation.config
        elif name == "rope_scaling":
            assert translate(data) == translate(full)  # nothing is scaled
        else:
            assert error_of(data).startswith(f"{name}: is missing")


@pytest.mark.parametrize("model_type", TINY)
def test_an_unknown_key_is_named_with_the_nearest(model_type):
    for name in tiny(model_type):
        if name != "model_type" and not name.startswith("_"):
            data = tiny(model_type) | {f"{name}_": 1}
            message = error_of(data)
            assert message.startswith(f"{name}_: unknown key of {model_type} (value 1); did you mean {name!r}")
    message = error_of(tiny(model_type, zzz=1, yyy={"a": 1}))
    assert "zzz: unknown key" in message
    assert "yyy: unknown key" in message


@pytest.mark.parametrize("model_type", TINY)
def test_a_value_of_another_type_is_named(model_type):
    for name, value in tiny(model_type).items():
        if name == "model_type":
            continue
        for bad in [["x"], {"a": 1}, "zzz", 0.5 if isinstance(value, int) and not isinstance(value, bool) else "y", float("nan")]:
            message = error_of(tiny(model_type) | {name: bad})
            assert message.startswith(name), (name, bad, message)


@pytest.mark.parametrize("model_type", TINY)
def test_null_is_refused_where_transformers_refuses_it(model_type):
    nullable = {"head_dim", "num_key_value_heads", "rope_scaling", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
    for name in tiny(model_type):
        if name not in nullable and name != "model_type":
            assert error_of(tiny(model_type) | {name: None}).startswith(name)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma", "gemma2", "gemma3_text"])
def test_a_head_dim_that_must_be_said_is_not_derived(model_type):
    assert error_of(tiny(model_type, head_dim=None)).startswith("head_dim: is None")


REFUSED = [
    ("llama", "hidden_act", "relu"),
    ("llama", "hidden_act", "gelu"),
    ("gemma2", "hidden_activation", "gelu"),
    ("gemma3_text", "hidden_activation", "gelu"),
    ("gemma", "hidden_activation", "gelu"),
    ("gemma2", "hidden_act", "gelu"),
    ("llama", "pretraining_tp", 2),
    ("llama", "rope_interleaved", True),
    ("llama", "attention_dropout", 0.1),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "quantization_config", {"bits": 4}),
    ("llama", "auto_map", {"AutoModel": "modeling.Own"}),
    ("llama", "architectures", ["LlamaForSequenceClassification"]),
    ("llama", "architectures", ["LlamaModel"]),
    ("llama", "num_key_value_heads", 3),
    ("llama", "head_dim", 7),
    ("llama", "head_dim", 512),
    ("llama", "hidden_size", 26),
    ("llama", "initializer_range", 1.5),
    ("llama", "is_encoder_decoder", True),
    ("llama", "is_causal", False),
    ("llama", "sliding_window", 5),
    ("llama", "layer_types", ["full_attention"] * 4),
    ("mistral", "attention_bias", True),
    ("mistral", "sliding_window", 0),
    ("qwen2", "use_mrope", True),
    ("qwen2", "attention_bias", True),
    ("qwen2", "layer_types", ["sliding_attention"] * 4),
    ("qwen3", "layer_types", ["full_attention"] * 3),
    ("qwen3", "layer_types", ["linear_attention"] * 4),
    ("gemma", "use_bidirectional_attention", True),
    ("gemma2", "use_bidirectional_attention", True),
    ("gemma3_text", "use_bidirectional_attention", True),
    ("gemma2", "query_pre_attn_scalar", 24.5),
    ("gemma2", "attn_logit_softcapping", 0.0),
    ("gemma2", "sliding_window", None),
    ("gemma3_text", "sliding_window_pattern", 0),
    ("gemma3_text", "_sliding_window_pattern", 2),
    ("gemma3_text", "layer_types", ["full_attention"] * 4),
]


@pytest.mark.parametrize("model_type, key, value", REFUSED, ids=[f"{m}-{k}={v}" for m, k, v in REFUSED])
def test_a_value_that_would_change_results_is_refused_by_name(model_type, key, value):
    message = error_of(tiny(model_type) | {key: value})
    assert key in message or (key == "layer_types" and "sliding_window_pattern" in message), message


def test_what_is_inert_is_kept_and_changes_nothing():
    inert = {
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": None,
        "_name_or_path": "x",
        "transformers_version": "4.40.1",
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "temperature": 0.6,
        "quantization_config": None,
    }
    translation = translate(tiny("llama", **inert))
    assert translation.inert == inert
    assert translation.config == config_from_hf(tiny("llama"))


@pytest.mark.parametrize("names", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_the_dtype_is_kept_under_one_name(names):
    assert translate(tiny("qwen3", **dict.fromkeys(names, "bfloat16"))).inert == {"dtype": "bfloat16"}
    assert translate(multimodal(dtype="bfloat16")).inert["dtype"] == "bfloat16"
    assert error_of(tiny("llama", dtype="bfloat16", torch_dtype="float16")).startswith(
        "dtype: is 'bfloat16' while torch_dtype is 'float16'"
    )


# --------------------------------------------------------------------------------------------------------------- model types

UNSERVED = [
    "qwen3_moe",
    "gemma4",
    "gemma4_text",
    "mixtral",
    "gemma3n",
    "qwen2_vl",
    "llama4",
    "gpt_oss",
    "phi3",
    "olmo2",
    "Llama",
    "",
    None,
    5,
]


@pytest.mark.parametrize("model_type", UNSERVED)
def test_an_unserved_model_type_is_refused_by_name_with_those_that_are_served(model_type):
    message = error_of(tiny("llama") | {"model_type": model_type})
    assert message.startswith(f"model_type: {model_type!r} is not served")
    assert message.endswith("served: llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, gemma3")


def test_what_is_no_config_json_is_refused():
    assert "model_type: is missing" in error_of({})
    for data in (None, [], "llama"):
        assert "expected a dict" in error_of(data)


def test_families_are_found_by_model_type():
    for model_type in model_types():
        assert model_type in family_of(model_type).model_types
        assert set(family_of(model_type).architecture) == set(family_of(model_type).model_types)


# ---------------------------------------------------------------------------------------------------------------------- rope


def rope_of(**changes):
    return attention_of(config_from_hf(tiny("llama", **changes))).rope


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_every_sub_key_of_every_rope_type_is_used(key):
    linear = rope_of(**{key: {"rope_type": "linear", "factor": 4}})
    assert linear.scaling == LinearScaling(4.0)
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.5,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.5,
        "mscale_all_dim": 0.25,
        "truncate": False,
    }
    assert rope_of(**{key: yarn}).scaling == YarnScaling(4.0, 16, 1.5, 20.0, 2.0, 0.5, 0.25, False)
    long = {"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [5, 6, 7, 8], "factor": 3, "attention_factor": 2}
    assert rope_of(**{key: long | {"original_max_position_embeddings": 16}}).scaling == LongRopeScaling(
        (1, 2, 3, 4), (5, 6, 7, 8), 16, 3, 2
    )
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    assert rope_of(**{key: llama3}).to_dict()["scaling"] == {"type": "llama3"} | {k: v for k, v in llama3.items() if k != "rope_type"}
    assert rope_of(**{key: {"rope_type": "dynamic", "factor": 2.0}}).scaling.original_max_position_embeddings == 64
    for scaling in (yarn, long, llama3, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}):
        assert f"{key}.zzz: unknown key" in error_of(tiny("llama", **{key: scaling | {"zzz": 1}}))


def test_keys_of_one_rope_type_are_unknown_to_another():
    for extra in ("beta_fast", "mscale", "attention_factor", "low_freq_factor", "original_max_position_embeddings"):
        message = error_of(tiny("llama", rope_scaling={"rope_type": "linear", "factor": 2.0, extra: 1.0}))
        assert f"rope_scaling.{extra}: unknown key" in message


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_the_original_context_falls_back_as_in_transformers(kind):
    scaling = {
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
        "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    }[kind] | {"rope_type": kind}
    original = "original_max_position_embeddings"
    translation = translate(tiny("llama", rope_scaling=scaling))
    assert attention_of(translation.config).rope.scaling.original_max_position_embeddings == 64
    assert translation.defaults == {f"rope_scaling.{original}": 64}
    assert rope_of(rope_scaling=scaling, **{original: 16}).scaling.original_max_position_embeddings == 16
    assert rope_of(rope_scaling=scaling | {original: 16}, **{original: 16}).scaling.original_max_position_embeddings == 16
    assert f"rope_scaling.{original}: is 32 while" in error_of(tiny("llama", rope_scaling=scaling | {original: 32}, **{original: 16}))


def test_an_original_context_that_nothing_reads_is_refused():
    original = "original_max_position_embeddings"
    assert error_of(tiny("llama", **{original: 16})).startswith(f"{original}: is 16 beside no rope scaling")
    assert original in error_of(tiny("llama", rope_scaling={"rope_type": "linear", "factor": 2.0}, **{original: 16}))
    assert original in error_of(tiny("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0, original: 16}))


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_a_factor_that_is_null_is_the_ratio_of_the_contexts(kind):
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = rope_of(rope_scaling={"rope_type": kind, "factor": None, "original_max_position_embeddings": 16, **lists})
    assert rope.scaling.factor == 4.0


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_an_unknown_rope_type_is_refused_by_name(key, name):
    message = error_of(tiny("llama", **{key: {name: "linaer", "factor": 2.0}}))
    assert message.startswith(f"{key}.{name}: unknown rope type 'linaer'; did you mean 'linear'?; known: default, linear, dynamic")
    for kind in ("mrope", "su", "proportional", "ntk"):
        assert f"{key}.{name}: unknown rope type {kind!r}" in error_of(tiny("qwen2", **{key: {name: kind, "factor": 2.0}}))


def test_what_a_rope_type_needs_is_not_made_up():
    for kind, needs in {
        "linear": ["factor"],
        "dynamic": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
        "longrope": ["short_factor", "long_factor"],
    }.items():
        given = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
        for missing in needs:
            data = {"rope_type": kind} | {k: given[k] for k in needs if k != missing}
            assert error_of(tiny("llama", rope_scaling=data)).startswith(f"rope_scaling.{missing}: is missing")
    message = error_of(tiny("llama", rope_scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}))
    assert message.startswith("rope_scaling.high_freq_factor: is 1.0")
    assert "short_factor" in error_of(tiny("llama", rope_scaling={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}))


def test_dialects_that_contradict_each_other_are_refused():
    linear = {"rope_type": "linear", "factor": 2.0}
    assert rope_of(rope_scaling=linear, rope_parameters=linear | {"rope_theta": 20000.0}) == rope_of(rope_scaling=linear)
    assert "rope_parameters: says otherwise" in error_of(tiny("llama", rope_scaling=linear, rope_parameters=linear | {"factor": 3.0}))
    assert "rope_parameters.rope_theta: is 5.0 while rope_theta is 20000.0" in error_of(
        tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    )
    assert "rope_scaling.rope_type: is 'yarn' while type is 'linear'" in error_of(
        tiny("llama", rope_scaling={"rope_type": "yarn", "type": "linear", "factor": 2.0})
    )
    assert "stands beside rope_scaling" in error_of(tiny("gemma3_text", rope_scaling=linear, rope_parameters={"full_attention": linear}))


@pytest.mark.parametrize("where", ["top", "inside"])
def test_rotating_part_of_a_head_is_refused_where_the_models_do_not(where):
    def saying(factor):
        said = {"partial_rotary_factor": factor}
        return said if where == "top" else {"rope_parameters": {"rope_type": "default", **said}}

    for good in (1.0, None):
        assert rope_of(**saying(good)) == rope_of()
    assert "partial_rotary_factor: is 0.5; expected 1.0 or null" in error_of(tiny("llama", **saying(0.5)))


# --------------------------------------------------------------------------------------------------------------------- windows


def windows(data) -> list[int | None]:
    config = config_from_hf(data)
    return [attention_of(config, i).window for i in range(config.num_layers)]


def test_windows_of_qwen():
    on = {"use_sliding_window": True, "sliding_window": 5}
    for model_type in ("qwen2", "qwen3"):
        assert windows(tiny(model_type, sliding_window=5, max_window_layers=2)) == [None] * 4
        assert windows(tiny(model_type, **on, max_window_layers=3)) == [None, None, None, 5]
        assert windows(tiny(model_type, **on, max_window_layers=0)) == [5] * 4
        assert windows(tiny(model_type, **on)) == [None] * 4  # from layer 28 on
        assert windows(tiny(model_type, use_sliding_window=True, sliding_window=None, max_window_layers=0)) == [None] * 4
        kinds = ["full_attention", "sliding_attention"] * 2
        assert windows(tiny(model_type, **on, max_window_layers=0, layer_types=kinds)) == [None, 5, None, 5]
        assert translate(tiny(model_type, **on, layer_types=kinds)).defaults == {}  # max_window_layers is not asked for
        assert translate(tiny(model_type, **on, layer_types=kinds, max_window_layers=1)).inert == {"max_window_layers": 1}


def test_windows_of_mistral_and_gemma():
    assert windows(tiny("mistral")) == [5] * 4
    assert windows(tiny("mistral", sliding_window=None)) == [None] * 4
    assert windows(tiny("gemma")) == [None] * 4
    assert windows(tiny("gemma2")) == [5, None, 5, None]
    assert windows(tiny("gemma2", layer_types=["full_attention"] * 3 + ["sliding_attention"])) == [None, None, None, 5]
    assert windows(tiny("gemma3_text")) == [5, 5, None, 5]
    seven = tiny("gemma3_text", num_hidden_layers=7)
    del seven["sliding_window_pattern"]
    assert windows(seven) == [5, 5, 5, 5, 5, None, 5]


def test_the_pattern_of_gemma_3_that_transformers_writes_and_never_reads():
    kinds = ["full_attention", "sliding_attention"] * 2
    data = {k: v for k, v in tiny("gemma3_text").items() if k != "sliding_window_pattern"}
    assert windows(data | {"layer_types": kinds, "_sliding_window_pattern": 6}) == [None, 5, None, 5]
    assert windows(data | {"_sliding_window_pattern": 6}) == [5] * 4
    assert error_of(data | {"_sliding_window_pattern": 2}).startswith("_sliding_window_pattern: is 2")
    assert error_of(data | {"layer_types": kinds, "sliding_window_pattern": 2}).startswith("sliding_window_pattern: is 2")


def test_gemma_3_scales_the_rope_of_its_full_layers_alone():
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = config_from_hf(tiny("gemma3_text", rope_scaling=scaling))
    local, full = config.layers["local"].branches["attention"].block.rope, config.layers["global"].branches["attention"].block.rope
    assert (local.theta, local.scaling) == (10000.0, None)
    assert (full.theta, full.scaling) == (20000.0, LinearScaling(8.0))
    assert config.pattern == ("local", "local", "global")


def test_gemma_3_with_scaled_local_rope_is_written_in_the_new_dialect():
    parameters = {
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 20000.0},
    }
    data = {k: v for k, v in tiny("gemma3_text").items() if not k.startswith("rope_")} | {"rope_parameters": parameters}
    config = config_from_hf(data)
    written = to_hf(config)
    assert written["model_type"] == "gemma3_text"
    assert "rope_scaling" not in written
    assert config_from_hf(written) == config
    assert config_from_hf(json.loads(AutoConfig.for_model(**written).to_json_string())) == config
    assert "rope_parameters.rope_theta: unknown key" in error_of(data | {"rope_parameters": {"rope_theta": 1.0}})
    parameters["full_attention"]["truncate"] = False
    assert error_of(data).startswith("rope_parameters.full_attention.truncate: is false")


# ------------------------------------------------------------------------------------------------------------------ multimodal


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


# --------------------------------------------------------------------------------------------------------------------- to_hf


def test_what_no_config_json_can_say_is_refused_naming_each_difference():
    config = config_from_hf(tiny("llama")).replace("residual", {"type": "mhc", "streams": 4}).replace("layers.main.attention.rope", None)
    with pytest.raises(CannotExpress) as caught:
        to_hf(config)
    assert caught.value.differences == [
        "layers.main.attention.rope: is null; expected a rope",
        "residual: has type 'mhc'; expected 'add'",
    ]
    config = config_from_hf(tiny("llama")).replace("head.softcap", 30.0).replace("layers.main.attention.sinks", True)
    with pytest.raises(CannotExpress, match=r"config\.json of 'llama' cannot say") as caught:
        to_hf(config, "llama")
    assert caught.value.differences == [
        "head.softcap: is 30.0, where it can say None alone",
        "layers.main.attention.sinks: is True, where it can say False alone",
    ]


def test_how_weights_are_stored_is_no_difference():
    config = config_from_hf(tiny("llama"))
    apart = config.replace("layers.main.attention.packed", False).replace("layers.main.mlp.packed", False)
    assert to_hf(apart, "llama") == to_hf(config, "llama")


def test_names_of_layers_are_no_difference():
    config = config_from_hf(tiny("gemma2"))
    data = config.to_dict()
    data["layers"] = {"near": data["layers"]["local"], "far": data["layers"]["global"]}
    data["pattern"] = ["near", "far"] * 2
    assert to_hf(ModelConfig.from_dict(data), "gemma2") == to_hf(config, "gemma2")


def test_a_multimodal_type_is_not_written():
    with pytest.raises(CannotExpress, match="saved as 'gemma3_text'"):
        to_hf(config_from_hf(multimodal()), "gemma3")


@pytest.mark.parametrize(
    "model_type, first",
    [
        ("llama", "llama"),
        ("mistral", "mistral"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma", "gemma"),
        ("gemma2", "gemma2"),
        ("gemma3_text",) * 2,
    ],
)
def test_a_config_is_written_as_the_first_type_that_can_say_it(model_type, first):
    assert to_hf(config_from_hf(tiny(model_type)))["model_type"] == first


# --------------------------------------------------------------------------------------------------------------------- tensors


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
