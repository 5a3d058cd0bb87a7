"""A model as a Hugging Face checkpoint: the tables of conversion run backwards."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ..blocks import Decoder
from .config import to_hf
from .dtypes import dtype_name
from .errors import CheckpointError, fail
from .families import family_of
from .folder import CONFIG
from .matching import named_tensors
from .report import Source
from .rules import check_table
from .write import check_tensors, copy_files, parse_size, replacing, write_json, write_tensors


def save_hf(model: Decoder, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Write ``config.json``, safetensors and the tokenizer's files, in a form that transformers opens.

    A model that came from a checkpoint is saved as its own model type, any other as the first type, in a fixed order, whose config can say
    all that ours does. ``max_shard_size`` is a number of bytes, or text such as "5GB". The folder appears whole or not at all: an interrupted
    save leaves an older one as it was, and files in it that are no part of a model stay (see ``replacing``).

    Raises a CannotExpress that names each part of the config that no type, or not the model's own, can say (a block of your own among
    them; ``save`` writes any model), a CheckpointError where parameters are missing or sharded or the folder cannot be replaced.
    """
    size = parse_size(max_shard_size)
    source: Source | None = model.source
    data = to_hf(model.config, None if source is None else source.model_type)
    tensors = _tensors(model, data["model_type"])
    check_tensors(tensors)
    inert = {} if source is None else dict(source.inert)
    data = {**inert, **data, "dtype": dtype_name(model.embed.weight.dtype)}
    with replacing(directory) as folder:
        write_tensors(folder, tensors, size)
        if source is not None:
            copy_files(source.existing_files(), folder)
        write_json(folder / CONFIG, data)


def _tensors(model: Decoder, model_type: str) -> list[tuple[str, Tensor]]:
    """Every tensor of the checkpoint under its name there, a view into its parameter."""
    rules = family_of(model_type).rules(model.config, model_type)
    check_table(rules)
    parameters: dict[str, Any] = named_tensors(model)
    problems = [f"the model has no parameter {r.native}" for r in rules if r.native not in parameters]
    natives = {r.native for r in rules}
    problems += [f"a checkpoint of {model_type!r} has no place for {name}" for name in parameters if name not in natives]
    fail(problems, "the model cannot be saved in Hugging Face's format (adapters? merge them first)")
    named = []
    for rule in rules:
        try:
            views = rule.views(parameters[rule.native].detach())
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        named += list(zip(rule.sources, views, strict=True))
    return named
