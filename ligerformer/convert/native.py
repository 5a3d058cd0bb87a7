"""The native format: any model, blocks of your own included.

``ligerformer.json`` is the whole config (``ModelConfig.from_dict`` reads it), ``model.safetensors`` or its shards hold the parameters and
persistent buffers under their own names, and ``ligerformer_source.json`` what a model that came from elsewhere needs for the way back.
"""

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
from .folder import CONFIG, find_tensors, member, read_json
from .matching import check, copy, match, named_tensors
from .report import LoadReport, Source
from .rules import Rename
from .safetensors_file import Entry
from .write import NATIVE_CONFIG, NATIVE_SOURCE, check_tensors, copy_files, parse_size, replacing, write_json, write_tensors


def save(model: Decoder, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Write the config and the safetensors of a model of any blocks; ``load`` reads them back, bit for bit.

    The folder appears whole or not at all (see ``replacing``): an interrupted save leaves an older one as it was. Raises a CheckpointError
    for a model without values or a folder that cannot be replaced, a ValueError for ``max_shard_size``.
    """
    size = parse_size(max_shard_size)
    tensors = sorted(named_tensors(model).items())
    check_tensors(tensors)
    source: Source | None = model.source
    with replacing(directory) as folder:
        write_tensors(folder, tensors, size)
        if source is not None:
            copy_files(source.existing_files(), folder)
            write_json(folder / NATIVE_SOURCE, {"model_type": source.model_type, "inert": dict(source.inert)})
        write_json(folder / NATIVE_CONFIG, model.config.to_dict())


def load(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    recompute: Recompute = "none",
) -> Decoder:
    """The model that ``save`` wrote. ``dtype`` "auto" gives every parameter the dtype it was saved in.

    A type of block that is not registered is a ConfigError that names it: register it first. Everything that the files lack, have too
    much of or in another shape is one CheckpointError, before a byte of weights is read.
    """
    folder = Path(directory).expanduser()
    if not (folder / NATIVE_CONFIG).is_file() and (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds a Hugging Face checkpoint; open it with from_hf")
    try:
        config = ModelConfig.from_dict(read_json(member(folder, NATIVE_CONFIG)))
    except ConfigError as error:
        raise ConfigError(f"{folder / NATIVE_CONFIG}: {error}") from None
    source, entries = _source(folder), find_tensors(folder)
    model = Decoder(config, recompute=recompute)
    result = match(model, [Rename(name, name) for name in named_tensors(model)], entries)
    check(result, f"{folder} does not hold the model that its {NATIVE_CONFIG} describes")
    chosen = common_dtype(entries.values()) if dtype == "auto" else parse_dtype(dtype)
    allocate(model, device, chosen)
    if dtype == "auto":
        _take_dtypes(named_tensors(model), entries)
    report = LoadReport(folder, chosen)
    copy(model, result, report)
    model.load_report, model.source = report, source
    return model.eval()


def _take_dtypes(tensors: dict[str, Tensor], entries: dict[str, Entry]) -> None:
    """Give each parameter the dtype of its tensor, where a model was saved in several."""
    for name, x in tensors.items():
        saved = entries[name].dtype
        if saved is not None and x.dtype != saved and x.is_floating_point():
            x.data = torch.empty_like(x, dtype=saved)


def _source(folder: Path) -> Source | None:
    path = member(folder, NATIVE_SOURCE)
    if not path.is_file():
        return None
    data: dict[str, Any] = read_json(path)
    if not isinstance(data.get("model_type"), str) or not isinstance(data.get("inert"), dict):
        raise CheckpointError(f"{path}: holds {', '.join(data)}; expected model_type and inert, as save writes them")
    return Source.of(folder, data["model_type"], data["inert"])
