"""What a family is: the translation of config.json in both directions, and the table of tensor rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...configs import ConfigError, ModelConfig
from ..rules import Rule

JSON = Any  # what json.loads returns


class CannotExpress(ConfigError):
    """A model that a family's config.json cannot say; ``differences`` names each dotted path that stands in the way."""

    def __init__(self, model_type: str, differences: Sequence[str]) -> None:
        self.model_type, self.differences = model_type, list(differences)
        super().__init__(f"a config.json of {model_type!r} cannot say: " + "; ".join(differences))


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a config.json says.

    ``model_type``: the type to save as (the text part's, where the file wraps one). ``defaults``: the keys that were missing and took the
    published class default. ``inert``: the keys that change nothing in the model, to be written back as they are *under* those of
    ``to_hf``; the dtype of the weights is among them as "dtype", also where the file says "torch_dtype". ``ignored_tensors``: patterns
    of tensors that the model has no use for, whole names, each with one named group that says what it is. ``renamed_tensors``: pairs
    (pattern, replacement) that bring the names of a wrapped checkpoint to those of the rules; the first that matches a name is applied.
    """

    config: ModelConfig
    model_type: str
    defaults: dict[str, JSON]
    inert: dict[str, JSON]
    ignored_tensors: tuple[str, ...] = ()
    renamed_tensors: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """A group of model types of transformers that share a translation.

    ``from_hf`` raises a ConfigError for whatever it cannot represent, ``to_hf`` a :class:`CannotExpress`. What ``to_hf`` returns has
    neither the inert keys nor a dtype. ``read_only``: model types that are read, and saved as another (``Translation.model_type``).
    """

    model_types: tuple[str, ...]
    architecture: Mapping[str, str]
    from_hf: Callable[[Mapping[str, JSON]], Translation]
    to_hf: Callable[[ModelConfig, str], dict[str, JSON]]
    rules: Callable[[ModelConfig, str], list[Rule]]
    read_only: tuple[str, ...] = ()
