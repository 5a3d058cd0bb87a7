"""Types are added and taken away, and none takes a name that is taken."""

import dataclasses

import pytest
from torch import nn

from ligerformer.configs import BlockConfig, ConfigError, ModelConfig, ResidualConfig, register, registry, unregister
from tests.configs.examples import plain


@pytest.fixture
def nothing():
    """A user's attention type, registered while the test runs."""

    @dataclasses.dataclass(frozen=True)
    class NothingConfig(BlockConfig):
        strength: float = 1.0

        def num_params(self, model):
            return 7

    @register("attention", "nothing")
    class Nothing(nn.Module):
        Config = NothingConfig

    yield Nothing
    if "nothing" in registry.types("attention"):
        unregister("attention", "nothing")


def test_a_registered_type_is_understood_counted_and_comes_back(nothing):
    data = plain()
    data["layers"]["main"]["attention"] = {"type": "nothing", "strength": 2}
    config = ModelConfig.from_dict(data)
    assert config.layers["main"].branches["attention"].block == nothing.Config(2.0)
    assert ModelConfig.from_dict(config.to_dict()) == config
    with_softmax = ModelConfig.from_dict(plain())
    per_layer = 24 * (32 + 16 + 16) + 32 * 24
    assert with_softmax.num_params() - config.num_params() == 3 * (per_layer - 7)
    assert registry.block_class("attention", "nothing") is nothing
    with pytest.raises(ConfigError, match=r"layers\.main\.attention\.strenght: unknown key .*did you mean 'strength'"):
        config.replace("layers.main.attention", {"type": "nothing", "strenght": 2})


def test_an_unregistered_type_is_gone(nothing):
    unregister("attention", "nothing")
    assert "nothing" not in registry.types("attention")
    data = plain()
    data["layers"]["main"]["attention"] = {"type": "nothing"}
    with pytest.raises(ConfigError, match="unknown attention type 'nothing'"):
        ModelConfig.from_dict(data)
    with pytest.raises(ValueError, match="nothing"):
        registry.block_class("attention", "nothing")


def test_it_can_be_registered_again_once_it_is_gone(nothing):
    unregister("attention", "nothing")
    register("attention", "nothing")(nothing)
    assert registry.config_class("attention", "nothing") is nothing.Config


@pytest.mark.parametrize("slot, type_", [(s, t) for s in registry.slots() for t in registry.types(s)])
def test_a_name_that_is_taken_is_refused(slot, type_, nothing):
    before = registry.config_class(slot, type_)
    with pytest.raises(ValueError, match=f"{type_!r}.*registered already"):
        register(slot, type_)(nothing)
    assert registry.config_class(slot, type_) is before


@pytest.mark.parametrize("name", registry.slots())
def test_a_type_cannot_take_the_name_of_a_slot(name, nothing):
    with pytest.raises(ValueError, match="name of a slot"):
        register("attention", name)(nothing)
    assert name not in registry.types("attention")


def test_no_built_in_type_has_the_name_of_a_slot():
    assert not {t for s in registry.slots() for t in registry.types(s)} & set(registry.slots())


def test_an_unknown_slot_is_refused_with_the_known_ones(nothing):
    with pytest.raises(ValueError, match=r"unknown slot 'atention'; known: .*attention"):
        register("atention", "other")(nothing)
    assert "atention" not in registry.slots()


def test_a_block_without_a_config_is_refused():
    with pytest.raises(TypeError, match="Bare has no config class"):

        @register("attention", "bare")
        class Bare(nn.Module):
            pass

    assert "bare" not in registry.types("attention")


def test_a_config_without_its_decorator_is_refused():
    with pytest.raises(TypeError, match="Bare has no config class; expected a frozen dataclass"):

        @register("attention", "bare")
        class Bare:
            class Config(BlockConfig):
                width: int


def test_a_config_of_another_base_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Plain:
        width: int

    @dataclasses.dataclass(frozen=True)
    class Branch(BlockConfig):
        width: int

    for slot, own, base in (("mlp", Plain, "BlockConfig"), ("norm", Branch, "NormConfig"), ("residual", Branch, "ResidualConfig")):
        block = type("Own", (nn.Module,), {"Config": own, "Site": nn.Module, "Ends": nn.Module})
        with pytest.raises(TypeError, match=f"config class of Own does not derive from {base}"):
            register(slot, "own")(block)
        assert "own" not in registry.types(slot)


@pytest.mark.parametrize("part", ["Site", "Ends"])
def test_a_residual_without_its_parts_is_refused(part):
    @dataclasses.dataclass(frozen=True)
    class Stream(ResidualConfig):
        pass

    with pytest.raises(TypeError, match=r"Own lacks a part of a residual block; expected .*'Site' and 'Ends'"):
        register("residual", "own")(type("Own", (), {"Config": Stream, part: nn.Module}))


@pytest.mark.parametrize("name", ["type", "slot", "multiplier"])
def test_a_field_that_a_blocks_dict_uses_itself_is_refused(name):
    own = dataclasses.make_dataclass("Own", [(name, float, 1.0)], bases=(BlockConfig,), frozen=True)
    with pytest.raises(ValueError, match=f"has a field {name!r}"):
        register("mlp", "own")(type("Own", (nn.Module,), {"Config": own}))
    assert "own" not in registry.types("mlp")


def test_the_slot_of_rope_scalings_is_closed(nothing):
    with pytest.raises(ValueError, match="slot 'rope_scaling' is closed"):
        register("rope_scaling", "own")(nothing)
