"""Every field of every config class, at every depth: what is wrong with plain data is said with its dotted path."""

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

from ligerformer.configs import ConfigError, ModelConfig, registry
from ligerformer.configs.schema import FrozenDict, hints
from tests.configs.examples import LLAMA3, SCALINGS, YARN, full, plain

EXAMPLES = {scaling["type"]: full(scaling) for scaling in SCALINGS} | {"plain": ModelConfig.from_dict(plain()).to_dict()}


def walk(node: Any, path: tuple = ()) -> list[tuple[tuple, Any]]:
    """Every key of plain data, as (path, value)."""
    if not isinstance(node, dict):
        return []
    return [item for key, value in node.items() for item in [((*path, key), value), *walk(value, (*path, key))]]


def edited(data: dict[str, Any], path: tuple, value: Any, *, rename: str | None = None) -> dict[str, Any]:
    """A deep copy with the value at ``path`` replaced, or its key renamed."""
    result = copy.deepcopy(data)
    node = result
    for key in path[:-1]:
        node = node[key]
    if rename is not None:
        node[rename] = node.pop(path[-1])
    else:
        node[path[-1]] = value
    return result


def places(name: str) -> list[tuple[tuple, Any]]:
    """Every key of an example; of those that differ in their rope scaling alone, only that but for one."""
    every = walk(EXAMPLES[name])
    return every if name in ("plain", "yarn") else [(path, value) for path, value in every if "scaling" in path]


def error_of(data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    return str(caught.value)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_good_and_come_back(name):
    config = ModelConfig.from_dict(EXAMPLES[name])
    data = config.to_dict()
    assert ModelConfig.from_dict(data) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(data, allow_nan=False))) == config
    assert hash(ModelConfig.from_dict(data)) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_examples_hold_every_class_and_every_field():
    met: dict[str, set[str]] = {}
    for data in EXAMPLES.values():
        for path, value in [((), data), *walk(data)]:
            if isinstance(value, dict) and "type" in value:
                met.setdefault(value["type"], set()).update(value)
            elif path[-1:] == ("rope",) and value:
                met.setdefault("rope", set()).update(value)
    for slot in registry.slots():
        for type_ in registry.types(slot):
            config = registry.config_class(slot, type_)
            if not config.__module__.startswith("ligerformer."):
                continue  # of another test's blocks
            missing = {f.name for f in dataclasses.fields(config)} - met[type_]
            assert not missing, (slot, type_, missing)
    assert met["rope"] == {"theta", "partial_rotary_factor", "scaling"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_unknown_key_is_named_at_every_depth(name):
    for parent in {path[:-1] for path, _ in places(name)}:
        message = error_of(edited(EXAMPLES[name], (*parent, "zzz"), 1))
        assert message.startswith(".".join((*parent, "zzz"))), (parent, message)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_misspelt_key_is_named_with_the_right_one(name):
    for path, _ in places(name):
        *parent, key = path
        if parent == ["layers"] or key in ("type", "second", "slot"):
            continue  # a name of the user's, or what says how the rest is read
        misspelt = key[:-1] + "q" if len(key) > 3 else key + "q"
        message = error_of(edited(EXAMPLES[name], path, None, rename=misspelt))
        assert ".".join((*parent, misspelt)) in message, (path, message)
        assert repr(key) in message, (path, message)


WRONG: dict[type, list[Any]] = {
    bool: [1, 0, "true", None],
    int: ["3", 2.5, True, [3]],
    float: ["0.5", True, [0.5], {}],
    str: [5, None, "no such thing", ["x"]],
    list: [5, "x", {"a": 1}, ["x"]],
    dict: [5, "x", [], True],
    type(None): ["x", True, ["x"]],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_value_of_another_type_is_named(name):
    for path, value in places(name):
        for bad in WRONG[type(value)]:
            message = error_of(edited(EXAMPLES[name], path, bad))
            assert ".".join(path) in message, (path, bad, message)


@pytest.mark.parametrize("name", EXAMPLES)
def test_numbers_that_are_not_finite_are_named(name):
    for path, value in places(name):
        if type(value) is float:
            for bad in (math.nan, math.inf, -math.inf):
                assert error_of(edited(EXAMPLES[name], path, bad)).startswith(".".join(path))


ATTENTION = "layers.local.attention"
OUT_OF_RANGE = [
    ("vocab_size", 0),
    ("hidden_size", -1),
    ("num_layers", 0),
    ("max_position_embeddings", 0),
    ("embed.scale", 0.0),
    ("residual.streams", 0),
    ("residual.streams", 9),
    ("residual.iterations", 0),
    ("residual.eps", 0.0),
    ("head.softcap", 0.0),
    ("head.logit_scale", -1.0),
    ("init.std", -0.1),
    ("final_norm.eps", -1e-9),
    ("final_norm.casting", "bf16"),
    ("layers.local.norm.eps", -1.0),
    (f"{ATTENTION}.num_heads", 0),
    (f"{ATTENTION}.head_dim", 0),
    (f"{ATTENTION}.head_dim", 257),
    (f"{ATTENTION}.num_kv_heads", 3),
    (f"{ATTENTION}.num_kv_heads", 0),
    (f"{ATTENTION}.window", 0),
    (f"{ATTENTION}.softcap", -50.0),
    (f"{ATTENTION}.scale", 0.0),
    (f"{ATTENTION}.query_pre_attn_scalar", 24.0),  # beside scale
    (f"{ATTENTION}.rope.theta", 0.0),
    (f"{ATTENTION}.rope.partial_rotary_factor", 0.0),
    (f"{ATTENTION}.rope.partial_rotary_factor", 1.01),
    (f"{ATTENTION}.rope.partial_rotary_factor", 0.35),  # 5 of 16 dimensions
    ("layers.local.mlp.intermediate_size", 0),
    ("layers.local.mlp.activation", "relu"),
    ("pattern", []),
    ("pattern", ["local"]),  # global stands nowhere
    ("pattern", ["local", "global", "globl"]),
    ("pattern", ["local", "global"] * 3),  # longer than the model
    ("layers.local.sublayers", []),
    ("layers.local.sublayers", [["attention"], []]),
    ("layers.local.sublayers", [["attention"]]),  # mlp stands nowhere
    ("layers.local.sublayers", [["attention"], ["mlp"], ["mlp"]]),
]


@pytest.mark.parametrize("path, value", OUT_OF_RANGE, ids=[f"{p}={v}" for p, v in OUT_OF_RANGE])
def test_a_value_out_of_range_or_at_odds_with_another_is_named(path, value):
    message = error_of(edited(full(), tuple(path.split(".")), value))
    where = {"layers.local.sublayers": "layers.local", "pattern": ""}.get(path, path)
    field = path.rsplit(".", 1)[-1]
    assert where.removesuffix(f".{field}") in message
    assert field in message or "pattern" in message or "sublayers" in message
    assert not isinstance(value, float) or f"{value:g}" in message or repr(value) in message


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["type"])
def test_rope_scaling_is_held_to_its_range(scaling):
    for key, value in scaling.items():
        if type(value) in (int, float):
            message = error_of(full(scaling | {key: -1 if isinstance(value, int) else -1.0}))
            assert message.startswith(f"{ATTENTION}.rope.scaling.{key}: is -1")


def test_rope_scaling_is_held_to_sense():
    assert "rope.scaling.high_freq_factor" in error_of(full(LLAMA3 | {"high_freq_factor": 1.0}))
    assert "rope.scaling.beta_fast" in error_of(full(YARN | {"beta_fast": 1.0}))
    longrope = full(dict(SCALINGS[-1]))
    assert "rope.scaling.long_factor" in error_of(full(SCALINGS[-1] | {"long_factor": [1.0]}))
    assert "rope.scaling.long_factor[1]" in error_of(full(SCALINGS[-1] | {"long_factor": [1.0, -2.0, 3.0, 4.0]}))
    message = error_of(edited(longrope, ("layers", "local", "attention", "rope", "partial_rotary_factor"), 1.0))
    assert "rope.scaling.short_factor: has 4 entries; expected one a frequency (8)" in message


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_missing_key_is_named_or_has_a_default(name):
    for path, _ in places(name):
        if path[-1] == "partial_rotary_factor":
            continue  # its default contradicts the lists of longrope
        data = copy.deepcopy(EXAMPLES[name])
        node = data
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
        try:
            ModelConfig.from_dict(data)
        except ConfigError as error:
            # A missing branch is told by sublayers, a missing layer by pattern, a missing slot by the branch that lacks it.
            parent = path[:-1] if path[-1] in ("type", "slot") else path
            assert ".".join(parent) in str(error) or "pattern" in str(error) or "sublayers" in str(error), (path, str(error))


def test_an_unknown_type_is_named_with_the_nearest_and_the_way_to_add_one():
    data = plain()
    data["layers"]["main"]["attention"]["type"] = "softmax_atention"
    message = error_of(data)
    assert message.startswith("layers.main.attention.type: unknown attention type 'softmax_atention'; did you mean 'softmax_attention'?")
    assert "@register('attention', 'softmax_atention')" in message


def test_a_block_of_another_slot_does_not_fill_a_slot():
    data = plain()
    data["final_norm"] = {"type": "gated_mlp", "intermediate_size": 4}
    assert error_of(data).startswith("final_norm.type: unknown norm type 'gated_mlp'")
    mlp = registry.config_class("mlp", "gated_mlp")(intermediate_size=4)
    with pytest.raises(ConfigError, match="norm: is a config of slot 'mlp'"):
        dataclasses.replace(ModelConfig.from_dict(plain()), final_norm=mlp)


@pytest.mark.parametrize("bad", [None, 5, "llama", [], [plain()]])
def test_what_is_no_dict_is_refused(bad):
    assert "expected a dict" in error_of(bad)


@pytest.mark.parametrize("name", EXAMPLES)
def test_configs_are_frozen(name):
    config = ModelConfig.from_dict(EXAMPLES[name])
    stack: list[Any] = [config]
    while stack:
        node = stack.pop()
        if dataclasses.is_dataclass(node):
            for field in hints(type(node)):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(node, field, None)
                stack.append(getattr(node, field))
        elif isinstance(node, FrozenDict):
            with pytest.raises(TypeError):
                node["x"] = 1  # type: ignore[index]
            stack += node.values()
        else:
            assert not isinstance(node, (list, dict, set)), node


def test_the_input_is_neither_changed_nor_kept():
    data = full(dict(YARN))
    before = copy.deepcopy(data)
    config = ModelConfig.from_dict(data)
    assert data == before
    data["layers"]["local"]["attention"]["window"] = 9
    data["pattern"].append("local")
    config.to_dict()["layers"]["local"]["attention"]["window"] = 9
    assert config == ModelConfig.from_dict(before)


def test_objects_are_checked_like_plain_data():
    attention = ModelConfig.from_dict(plain()).layers["main"].branches["attention"].block
    with pytest.raises(ConfigError, match="window: is 0"):
        dataclasses.replace(attention, window=0)
    with pytest.raises(ConfigError, match="num_heads: is '4'"):
        type(attention)(num_heads="4", head_dim=8)


def test_mappings_that_are_equal_have_equal_hashes():
    assert FrozenDict({"a": 1, "b": 2}) == FrozenDict({"b": 2, "a": 1}) == {"a": 1, "b": 2}
    assert hash(FrozenDict({"a": 1, "b": 2})) == hash(FrozenDict({"b": 2, "a": 1}))


def test_an_int_stands_for_a_number_and_is_kept_as_one():
    data = plain()
    data["layers"]["main"]["attention"]["rope"]["theta"] = 10000
    config = ModelConfig.from_dict(data)
    assert config == ModelConfig.from_dict(plain())
    assert type(config.layers["main"].branches["attention"].block.rope.theta) is float


def test_keys_that_are_no_strings_are_refused():
    data = plain()
    assert error_of(data | {"layers": {1: data["layers"]["main"]}}) == "layers: has the key 1; expected strings alone"
    for branch in ({"slot": "mlp", "type": "gated_mlp", "intermediate_size": 8}, {}):
        layer = data["layers"]["main"] | {1: branch}
        assert error_of(data | {"layers": {"main": layer}}) == "layers.main.1: the key 1 is no string"
