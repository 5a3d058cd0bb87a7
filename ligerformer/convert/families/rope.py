"""Rotary embeddings of config.json, in both dialects: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``."""

from __future__ import annotations

from collections.abc import Mapping

from ...configs import (
    Config,
    ConfigError,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from ...configs.schema import PositiveFloat, PositiveInt, at, nearest, to_plain
from .keys import JSON, WHOLE_HEADS, Keys

ORIGINAL = "original_max_position_embeddings"
TYPES = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
WITH_ORIGINAL = ("llama3", "yarn", "longrope")  # types that read the original context from the file


def from_hf(keys: Keys, max_position_embeddings: int) -> RopeConfig:
    """The rope that all layers share."""
    theta = keys.get("rope_theta", PositiveFloat)
    original = keys.get(ORIGINAL, PositiveInt | None)
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        parameters = keys.inner(name, {}, WHOLE_HEADS)
        if parameters is not None:
            found[name] = _read(keys, parameters, theta, max_position_embeddings, original)
    if len(set(found.values())) > 1:
        raise ConfigError("rope_parameters: says otherwise than rope_scaling; expected one of the two, or both alike")
    if found:
        return next(iter(found.values()))
    if original is not None:
        raise ConfigError(f"{ORIGINAL}: is {original} beside no rope scaling that reads it; leave it out, or say how positions are scaled")
    return RopeConfig(theta=_theta(keys, theta))


def from_hf_by_layer_type(
    keys: Keys,
    max_position_embeddings: int,
    theta_keys: Mapping[str, str],
) -> dict[str, RopeConfig]:
    """The rope of each layer type (Gemma 3): ``theta_keys`` gives the old dialect's key of each type's base; its ``rope_scaling`` is of
    ``full_attention`` alone."""
    thetas = {kind: keys.get(name, PositiveFloat) for kind, name in theta_keys.items()}
    scaling = keys.inner("rope_scaling", {}, WHOLE_HEADS)
    nested = keys.inner("rope_parameters", {}, {})
    if scaling is not None and nested is not None:
        raise ConfigError("rope_parameters: stands beside rope_scaling; expected one of the two")
    ropes = {}
    for kind, name in theta_keys.items():
        parameters = nested.inner(kind, {}, WHOLE_HEADS) if nested else scaling if kind == "full_attention" else None
        if parameters is None:
            ropes[kind] = RopeConfig(theta=_theta(keys, thetas[kind], name))
        else:
            ropes[kind] = _read(keys, parameters, thetas[kind], max_position_embeddings, None, name)
            if nested and getattr(ropes[kind].scaling, "truncate", True) is False:
                raise ConfigError(f"{parameters.at('truncate')}: is false; expected true: transformers reads it in flat parameters alone")
    if nested:
        nested.finish()
    return ropes


def to_hf(rope: RopeConfig) -> dict[str, JSON]:
    """The old dialect, which every version of transformers reads."""
    return {"rope_theta": rope.theta, "rope_scaling": _scaling_to_hf(rope.scaling)}


def to_hf_by_layer_type(ropes: Mapping[str, RopeConfig], theta_keys: Mapping[str, str]) -> dict[str, JSON]:
    """The old dialect where it can say it; scaling of another type than ``full_attention`` exists in the new one alone."""
    if all(rope.scaling is None for kind, rope in ropes.items() if kind != "full_attention"):
        data: dict[str, JSON] = {theta_keys[kind]: rope.theta for kind, rope in ropes.items()}
        full = ropes.get("full_attention")
        return data | {"rope_scaling": _scaling_to_hf(full.scaling) if full else None}
    return {
        "rope_parameters": {
            kind: {"rope_theta": rope.theta} | (_scaling_to_hf(rope.scaling) or {"rope_type": "default"}) for kind, rope in ropes.items()
        }
    }


def _theta(keys: Keys, given: float | None, name: str = "rope_theta") -> float:
    return given if given is not None else float(keys.default(name, keys.defaults[name]))


def _read(
    keys: Keys, parameters: Keys, theta: float | None, max_position_embeddings: int, original: int | None, theta_key: str = "rope_theta"
) -> RopeConfig:
    """One dict of rope parameters. ``theta`` and ``original`` are what stands beside it, outside."""
    own = parameters.get("rope_theta", PositiveFloat | None)
    if own is not None and theta is not None and own != theta:
        raise ConfigError(f"{parameters.at('rope_theta')}: is {own} while {theta_key} is {theta}; expected one of the two, or both alike")
    if own is None:
        own = _theta(keys, theta, theta_key)
    scaling = _scaling(parameters, max_position_embeddings, original)
    parameters.finish()
    keys.defaulted.update(parameters.defaulted)
    return RopeConfig(theta=own, scaling=scaling)


def _scaling(parameters: Keys, max_position_embeddings: int, outer_original: int | None) -> Config | None:
    kind = _type(parameters)
    if outer_original is not None and kind not in WITH_ORIGINAL:
        raise ConfigError(f"{ORIGINAL}: is {outer_original} beside rope type {kind!r}, which does not read it; leave it out")
    if kind == "default":
        return None
    values = _values(kind, parameters, max_position_embeddings, outer_original)
    with at(parameters.path):
        return TYPES[kind](**values)


def _values(kind: str, parameters: Keys, max_position_embeddings: int, outer_original: int | None) -> dict[str, JSON]:
    """What the native config of this scaling is built from; the names of its fields are those of the keys."""
    if kind == "linear":
        return {"factor": parameters.take("factor", PositiveFloat)}
    if kind == "dynamic":
        given = parameters.get(ORIGINAL, PositiveInt | None)
        if given not in (None, max_position_embeddings):
            where = f"max_position_embeddings ({max_position_embeddings})"
            raise ConfigError(f"{parameters.at(ORIGINAL)}: is {given}; dynamic scaling starts at {where}")
        return {"factor": parameters.take("factor", PositiveFloat), ORIGINAL: max_position_embeddings}
    values = {ORIGINAL: _original(parameters, max_position_embeddings, outer_original)}
    if kind == "llama3":
        return values | {name: parameters.take(name, PositiveFloat) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    values["factor"] = parameters.get("factor", PositiveFloat | None)
    if values["factor"] is None:
        values["factor"] = parameters.default("factor", max_position_embeddings / values[ORIGINAL])
    if kind == "longrope":
        values |= {name: parameters.take(name, tuple[PositiveFloat, ...]) for name in ("short_factor", "long_factor")}
        return values | {"attention_factor": parameters.get("attention_factor", PositiveFloat | None)}
    names = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    values |= {name: parameters.get(name, float | None) for name in names} | {"truncate": parameters.get("truncate", bool)}
    return {name: value for name, value in values.items() if value is not None}  # the rest takes YaRN's defaults, which are YarnScaling's


def _type(parameters: Keys) -> str:
    new, old = parameters.get("rope_type", str | None), parameters.get("type", str | None)
    if new and old and new != old:
        raise ConfigError(f"{parameters.at('rope_type')}: is {new!r} while type is {old!r}; expected one of the two, or both alike")
    kind = new or old or "default"
    known = ["default", *TYPES]
    if kind not in known:
        name = parameters.at("rope_type" if new else "type")
        raise ConfigError(f"{name}: unknown rope type {kind!r}{nearest(kind, known)}; known: {', '.join(known)}")
    return kind


def _original(parameters: Keys, max_position_embeddings: int, outer: int | None) -> int:
    own = parameters.get(ORIGINAL, PositiveInt | None)
    if own is not None and outer is not None and own != outer:
        raise ConfigError(f"{parameters.at(ORIGINAL)}: is {own} while {ORIGINAL} is {outer}; expected one of the two, or both alike")
    given = outer if own is None else own
    return int(parameters.default(ORIGINAL, max_position_embeddings) if given is None else given)


def _scaling_to_hf(scaling: Config | None) -> dict[str, JSON] | None:
    if scaling is None:
        return None
    data = {name: value for name, value in scaling.to_dict().items() if value is not None and name != "type"}
    if isinstance(scaling, DynamicScaling):
        del data[ORIGINAL]  # always max_position_embeddings
    return {"rope_type": scaling.type} | to_plain(data)
