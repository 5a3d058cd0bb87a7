"""A published checkpoint as a model: translate, match, allocate, copy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..blocks import Decoder, allocate, initialize
from ..blocks.decoder import Recompute
from ..configs import ConfigError, ModelConfig
from .config import translate
from .dtypes import common_dtype, parse_dtype
from .errors import CheckpointError
from .families import Translation, family_of
from .folder import CONFIG, find_tensors, member, read_json
from .hub import fetch
from .matching import check, copy, match, renamed
from .report import LoadReport, Source
from .rules import Rule
from .write import NATIVE_CONFIG


def config_from_hf(
    id_or_dir: str | os.PathLike[str] | Mapping[str, Any],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> ModelConfig:
    """The native config of a checkpoint on the hub or in a folder, or of the dict that its ``config.json`` holds; no weights are fetched.

    Raises a ConfigError for a key that nobody reads, a value that is not served or a model type without a family; a CheckpointError where
    there is no such folder or repository, or no access to it.
    """
    if isinstance(id_or_dir, Mapping):
        return translate(id_or_dir).config
    folder = fetch(id_or_dir, weights=False, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only)
    return _translate(folder).config


def from_hf(
    id_or_dir: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    overrides: Mapping[str, Any] | None = None,
    recompute: Recompute = "none",
    seed: int = 0,
) -> Decoder:
    """The model of a Hugging Face checkpoint: the id of a repository on the hub, or a folder. In evaluation mode, as transformers gives it.

    ``dtype`` "auto" is the one that the checkpoint's config names, else that of its tensors. ``overrides`` are dotted paths and values
    for ``config.replace_all``: parameters that they add are initialised (from ``seed``) and listed in ``load_report``, tensors whose place they
    take are ignored and listed. ``load_report`` says where everything came from, ``source`` keeps what ``save_hf`` needs.

    Raises a ConfigError for a config that cannot be translated, and one CheckpointError for every tensor that is missing, unexpected,
    mis-shaped or duplicated, before a byte of weights is read. Anonymous memory peaks at the model and buffers of 16 MiB in all.
    """
    wanted = None if dtype == "auto" else parse_dtype(dtype)
    folder = fetch(id_or_dir, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only)
    translation = _translate(folder)
    config = translation.config.replace_all(overrides or {})
    source = Source.of(folder, translation.model_type, translation.inert)
    entries = renamed(find_tensors(folder), translation.renamed_tensors)
    model = Decoder(config, recompute=recompute)
    result = match(
        model,
        table(config, translation.model_type),
        entries,
        published=table(translation.config, translation.model_type) if overrides else None,
        ignored=translation.ignored_tensors,
    )
    check(result, f"{folder} does not hold the model that its {CONFIG} describes")
    chosen = wanted or _published_dtype(translation) or common_dtype(entry for _, _, entry in result.copies)
    allocate(model, device, chosen)
    report = LoadReport(
        folder,
        chosen,
        translation.model_type,
        defaults=dict(translation.defaults),
        inert=dict(translation.inert),
        overrides=dict(overrides or {}),
    )
    copy(model, result, report)
    if result.initialize:
        initialize(model, seed, names=result.initialize)
    model.load_report, model.source = report, source
    return model.eval()


def table(config: ModelConfig, model_type: str) -> list[Rule]:
    """The rules of a model, with that of the head's weight also where it is tied: a checkpoint may hold it even so."""
    if config.tie_embeddings:
        config = config.replace("tie_embeddings", False)
    return family_of(model_type).rules(config, model_type)


def _translate(folder: Path) -> Translation:
    path = member(folder, CONFIG)
    if not path.is_file() and (folder / NATIVE_CONFIG).is_file():
        raise CheckpointError(f"{folder} holds a checkpoint in the native format; open it with load")
    data = read_json(path)
    try:
        return translate(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _published_dtype(translation: Translation) -> torch.dtype | None:
    name = translation.inert.get("dtype")
    return None if name is None else parse_dtype(name, f"the dtype in {CONFIG}")
