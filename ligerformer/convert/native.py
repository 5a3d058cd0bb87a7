"""The native format: any model, blocks of your own included, as its config and its parameters under their own names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..blocks import Decoder, allocate
from ..blocks.decoder import Recompute
from ..configs import ConfigError, ModelConfig
from .dtypes import common_dtype, parse_dtype
from .errors import CheckpointError
from .folder import CONFIG, GENERATION_CONFIG, companions, find_tensors, member, read_json
from .matching import check, copy, match, named_tensors
from .report import LoadReport, Source
from .rules import Rename
from .safetensors_file import Entry
from .write import NATIVE_CONFIG, check_tensors, copy_files, parse_size, replacing, write_json, write_tensors

VERSION = 1


def save(model: Decoder, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Write ``ligerformer.json`` (the whole config) and safetensors of a model of any blocks; ``load`` reads them back, bit for bit.

    The folder appears whole or not at all (see ``replacing``): an interrupted save leaves an older one as it was. Raises a CheckpointError
    for a model without values or a folder that cannot be replaced, a ValueError for ``max_shard_size``.
    """
    size = parse_size(max_shard_size)
    tensors = sorted(named_tensors(model).items())
    check_tensors(tensors)
    source: Source | None = model.source
    data: dict[str, Any] = {"format": "ligerformer", "version": VERSION, "config": model.config.to_dict()}
    if source is not None:
        data["source"] = {"model_type": source.model_type, "inert": dict(source.inert)}
    with replacing(directory) as folder:
        write_tensors(folder, tensors, size)
        if source is not None:
            copy_files(source.existing_files(), folder)
        write_json(folder / NATIVE_CONFIG, data)


def load(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    recompute: Recompute = "none",
) -> Decoder:
    """The model that ``save`` wrote. ``dtype`` "auto" gives every parameter the dtype it was saved in.

    A type of block that is not registered is a ConfigError that names it: register it first. Everything that the files lack, have too
    much or in another shape is one CheckpointError, before a byte of weights is read.
    """
    folder = Path(directory).expanduser()
    if not (folder / NATIVE_CONFIG).is_file() and (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds a Hugging Face checkpoint; open it with from_hf")
    data = read_json(member(folder, NATIVE_CONFIG))
    if data.get("version") != VERSION or "config" not in data:
        raise CheckpointError(f"{folder / NATIVE_CONFIG}: version is {data.get('version')!r}; this release reads version {VERSION}")
    try:
        config = ModelConfig.from_dict(data["config"])
    except ConfigError as error:
        raise ConfigError(f"{folder / NATIVE_CONFIG}: {error}") from None
    entries = find_tensors(folder)
    model = Decoder(config, recompute=recompute)
    result = match(model, [Rename(name, name) for name in named_tensors(model)], entries)
    check(result, f"{folder} does not hold the model that its {NATIVE_CONFIG} describes")
    chosen = common_dtype(entries.values()) if dtype == "auto" else parse_dtype(dtype)
    allocate(model, device, chosen)
    if dtype == "auto":
        _take_dtypes(named_tensors(model), entries)
    report = LoadReport(folder, chosen)
    copy(model, result, report)
    model.load_report = report
    model.source = _source(data.get("source"), folder)
    return model.eval()


def _take_dtypes(tensors: dict[str, Tensor], entries: dict[str, Entry]) -> None:
    """Give each parameter the dtype of its tensor, where a model was saved in several."""
    for name, x in tensors.items():
        saved = entries[name].dtype
        if saved is not None and x.dtype != saved and x.is_floating_point():
            x.data = torch.empty_like(x, dtype=saved)


def _source(data: dict[str, Any] | None, folder: Path) -> Source | None:
    if data is None:
        return None
    files = companions(folder)
    generation = read_json(folder / GENERATION_CONFIG) if (folder / GENERATION_CONFIG).is_file() else {}
    return Source(data["model_type"], data["inert"], generation, files)
