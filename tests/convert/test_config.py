"""config.json to native configs and back: every key accounted for, both dialects, every model type."""

import copy
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ligerformer.configs import ConfigError, ModelConfig
from ligerformer.convert import config_from_hf
from ligerformer.convert.config import to_hf, translate
from ligerformer.convert.families import CannotExpress, family_of, gemma, llama, model_types, qwen
from tests.convert.hf_configs import TINY, error_of, hf_configs, multimodal, new_dialect, tiny
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
        with pytest.raises(ConfigError, match="expected a dict"):
            translate(data)


def test_families_are_found_by_model_type():
    for model_type in model_types():
        assert model_type in family_of(model_type).model_types
        assert set(family_of(model_type).architecture) == set(family_of(model_type).model_types)


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
