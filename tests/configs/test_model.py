"""ModelConfig: derived values, the pattern of layers, branches, and replace()."""

import dataclasses

import pytest

from ligerformer.configs import BranchConfig, ConfigError, GatedMLPConfig, ModelConfig, NormConfig, RMSNormConfig, register, unregister
from tests.configs.examples import full, plain


def test_derived_values_are_visible():
    data = plain()
    del data["layers"]["main"]["attention"]["num_kv_heads"]
    config = ModelConfig.from_dict(data)
    assert config.to_dict()["layers"]["main"]["attention"]["num_kv_heads"] == 4
    assert config.to_dict()["layers"]["main"]["sublayers"] == [["attention"], ["mlp"]]


def test_the_pattern_is_cycled_or_spelled_out():
    config = ModelConfig.from_dict(full())
    assert config.layer_types == ("local", "local", "global", "local", "local")
    assert config.layer(2) is config.layers["global"]
    spelled = config.replace("pattern", list(config.layer_types))
    assert spelled.layer_types == config.layer_types


@pytest.mark.parametrize(
    "path, value",
    [
        ("layers.main.attention.window", 512),
        ("layers.main.attention.rope.theta", 5e5),
        ("layers.main.attention.rope.scaling", {"type": "linear", "factor": 2.0}),
        ("layers.main.attention.qk_norm", {"type": "rms_norm", "eps": 1e-6, "offset": 0.0, "casting": "input"}),
        ("layers.main.mlp.multiplier", 0.25),
        ("residual", {"type": "mhc", "streams": 2, "iterations": 20, "eps": 1e-6, "mix_off_diagonal": -4.0}),
        ("hidden_size", 48),
        ("tie_embeddings", True),
        ("init.std", 0.5),
    ],
)
def test_replace_changes_one_value_and_nothing_else(path, value):
    config = ModelConfig.from_dict(plain())
    changed = config.replace(path, value)
    expected = node = config.to_dict()
    *parents, last = path.split(".")
    for key in parents:
        node = node[key]
    assert node.get(last) != value
    node[last] = value
    assert changed.to_dict() == expected
    assert config == ModelConfig.from_dict(plain())


def test_replace_takes_configs_as_well_as_dicts():
    config = ModelConfig.from_dict(plain())
    norm = RMSNormConfig(eps=0.5)
    assert config.replace("final_norm", norm).final_norm == norm
    assert config.replace("layers.main.mlp", GatedMLPConfig(8)).layer(0).branches["mlp"] == BranchConfig(GatedMLPConfig(8))


@pytest.mark.parametrize(
    "path, hint",
    [
        ("layers.main.attention.windw", "did you mean 'window'"),
        ("layers.man.attention.window", "did you mean 'main'"),
        ("layer.main", "did you mean 'layers'"),
        ("layers.main.attention.window.size", "is None, which has no field 'size'"),
        ("vocab_size.rows", "is 97, which has no field 'rows'"),
        ("pattern.0", "has no field '0'"),
        ("", "no field of a model config"),
        ("layers.main.attenton", "did you mean 'attention'"),
    ],
)
def test_replace_refuses_a_path_that_leads_nowhere(path, hint):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(plain()).replace(path, 1)
    assert hint in str(caught.value)
    assert path in str(caught.value)


def test_replace_refuses_a_bad_value_with_its_path():
    with pytest.raises(ConfigError, match=r"layers\.main\.attention\.window: is -1; expected at least 1"):
        ModelConfig.from_dict(plain()).replace("layers.main.attention.window", -1)


def test_a_branch_of_a_free_name_says_its_slot():
    data = plain()
    main = data["layers"]["main"]
    main["second"] = main["attention"] | {"num_kv_heads": 4}
    main["sublayers"] = [["attention", "second"], ["mlp"]]
    with pytest.raises(ConfigError, match=r"layers\.main\.second: .* says its 'slot'"):
        ModelConfig.from_dict(data)
    main["second"]["slot"] = "atention"
    with pytest.raises(ConfigError, match=r"layers\.main\.second\.slot: is 'atention'.*did you mean 'attention'"):
        ModelConfig.from_dict(data)
    for slot in ("norm", "residual", "head", "embed", "rope_scaling"):
        main["second"]["slot"] = slot
        with pytest.raises(ConfigError, match=rf"layers\.main\.second\.slot: is '{slot}'"):
            ModelConfig.from_dict(data)
    main["second"]["slot"] = "attention"
    config = ModelConfig.from_dict(data)
    assert config.to_dict()["layers"]["main"]["second"]["slot"] == "attention"
    assert "slot" not in config.to_dict()["layers"]["main"]["attention"]


@pytest.mark.parametrize("multiplier", ["2", True, float("nan"), None])
def test_a_bad_multiplier_is_named(multiplier):
    data = plain()
    data["layers"]["main"]["mlp"]["multiplier"] = multiplier
    with pytest.raises(ConfigError, match=r"layers\.main\.mlp\.multiplier: is"):
        ModelConfig.from_dict(data)


def test_the_scale_of_attention():
    attention = ModelConfig.from_dict(plain()).layer(0).branches["attention"].block
    assert attention.softmax_scale == 8**-0.5
    config = ModelConfig.from_dict(full())
    assert config.layers["local"].branches["attention"].block.softmax_scale == 0.3
    assert config.layers["global"].branches["attention"].block.softmax_scale == 24.0**-0.5


def test_replace_all_checks_once_all_values_are_in_place():
    config = ModelConfig.from_dict(plain())
    together = {"layers.main.attention.num_heads": 9, "layers.main.attention.num_kv_heads": 3}
    for path, value in together.items():
        with pytest.raises(ConfigError, match="divisor"):
            config.replace(path, value)
    attention = config.replace_all(together).layer(0).branches["attention"].block
    assert (attention.num_heads, attention.num_kv_heads) == (9, 3)
    into_a_new_block = {"layers.main.mlp": {"type": "gated_mlp", "intermediate_size": 8}, "layers.main.mlp.bias": True}
    assert config.replace_all(into_a_new_block).layer(0).branches["mlp"].block == GatedMLPConfig(8, bias=True)
    with pytest.raises(ConfigError, match=r"layers\.main\.mlp\.bais: unknown key .*did you mean 'bias'"):
        config.replace_all({"layers.main.mlp": {"type": "gated_mlp", "intermediate_size": 8}, "layers.main.mlp.bais": True})
    assert config.replace_all({}) == config


@pytest.fixture
def own_norm():
    @register("norm", "own")
    class Own:
        @dataclasses.dataclass(frozen=True)
        class Config(NormConfig):
            width: int | None = None

            def resolve(self, model):
                return dataclasses.replace(self, width=self.width or model.hidden_size)

            def num_params(self, model, size=None):
                return 2 * (size or model.hidden_size)

    yield
    unregister("norm", "own")


def test_norms_are_resolved_and_counted_wherever_they_stand(own_norm):
    plain_config, norm = ModelConfig.from_dict(plain()), {"type": "own"}
    paths = ["final_norm", "layers.main.norm", "layers.main.post_norm", "layers.main.attention.qk_norm"]
    config = plain_config.replace_all(dict.fromkeys(paths, norm))
    layer = config.layer(0)
    norms = [config.final_norm, layer.norm, layer.post_norm, layer.branches["attention"].block.qk_norm]
    assert [norm.width for norm in norms] == [24] * 4
    added = 24 + 3 * (2 * 24 + 2 * 2 * 24 + 2 * 2 * 8)  # 2C instead of C for the final norm and the norms; post norms; q and k
    assert config.num_params() - plain_config.num_params() == added
