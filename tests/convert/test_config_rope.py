"""Rope and windows of config.json: every rope type, every sub-key, both dialects, every way to say which layers have a window."""

import json

import pytest
from transformers import AutoConfig

from ligerformer.configs import LinearScaling, LongRopeScaling, YarnScaling
from ligerformer.convert import config_from_hf
from ligerformer.convert.config import to_hf, translate
from tests.convert.hf_configs import attention_of, error_of, tiny


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
