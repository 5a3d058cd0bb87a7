"""config.json as data: its translation to a native config and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..configs import ConfigError, ModelConfig
from .families import FAMILIES, CannotExpress, Translation, family_of

JSON = Any  # what json.loads returns


def translate(data: Mapping[str, JSON]) -> Translation:
    """What a config.json (as a dict) says, with what was defaulted and what is inert.

    Raises a ConfigError that names the dotted path of the first fault, or every key that nothing reads.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"config.json: is {data!r}; expected a dict")
    if "model_type" not in data:
        raise ConfigError("model_type: is missing; expected the name of a model type of transformers")
    return family_of(data["model_type"]).from_hf(data)


def to_hf(config: ModelConfig, model_type: str | None = None) -> dict[str, JSON]:
    """config.json of a model, as ``model_type``, or as the first type, in a fixed order, that can say it.

    Raises a :class:`CannotExpress` that names each difference; without a ``model_type``, those of the type that comes nearest.
    """
    if model_type is not None:
        return family_of(model_type).to_hf(config, model_type)
    refused: list[CannotExpress] = []
    for family in FAMILIES:
        for candidate in family.model_types:
            if candidate not in family.read_only:
                try:
                    return family.to_hf(config, candidate)
                except CannotExpress as error:
                    refused.append(error)
    raise min(refused, key=lambda error: len(error.differences))
