"""The families that checkpoints are read and saved as, one file each; a model without a family of its own takes the first that can say it."""

from __future__ import annotations

from typing import Any

from ...configs import ConfigError
from ...configs.schema import nearest
from . import gemma, llama, qwen
from .base import CannotExpress, Family, Translation

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen.FAMILY, gemma.FAMILY)


def model_types() -> list[str]:
    """Every model type of transformers that is served."""
    return [model_type for family in FAMILIES for model_type in family.model_types]


def family_of(model_type: Any) -> Family:
    """The family of a model type; a ConfigError that lists those that are served for any other."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = model_types()
    guess = nearest(str(model_type), known)
    raise ConfigError(f"model_type: {model_type!r} is not served{guess}; served: {', '.join(known)}")


__all__ = ["FAMILIES", "CannotExpress", "Family", "Translation", "family_of", "model_types"]
