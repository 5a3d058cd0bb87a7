"""Published models as configs: ``presets.names()``, ``presets.load("llama-3.2-1b")``. One JSON file a model, in this folder."""

from __future__ import annotations

import json
from importlib import resources

from ..model import ModelConfig
from ..schema import nearest


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(f.name.removesuffix(".json") for f in resources.files(__package__).iterdir() if f.name.endswith(".json"))


def load(name: str) -> ModelConfig:
    """The config of a preset; a ValueError that lists the names for an unknown one."""
    if name not in names():
        raise ValueError(f"unknown preset {name!r}{nearest(name, names())}; known: {', '.join(names())}")
    return ModelConfig.from_dict(json.loads((resources.files(__package__) / f"{name}.json").read_text()))
