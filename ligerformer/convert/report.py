"""What loading did, for people to read, and what saving needs to know of where a model came from."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .dtypes import dtype_name
from .folder import GENERATION_CONFIG, companions, read_json
from .safetensors_file import Entry


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model came from, for the way back: model type, the config keys that change no result, the files beside the weights."""

    model_type: str
    inert: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    files: tuple[Path, ...]  # tokenizer files and generation_config.json, copied along by a save

    @classmethod
    def of(cls, folder: Path, model_type: str, inert: Mapping[str, Any]) -> Source:
        """The source that ``folder`` is; a CheckpointError for a file in it that is unreadable or a link to the outside."""
        files = companions(folder)
        generation = next((read_json(path) for path in files if path.name == GENERATION_CONFIG), {})
        return cls(model_type, dict(inert), generation, files)

    def tokenizer_file(self) -> Path | None:
        """The file that the ``tokenizers`` package opens, where there is one."""
        return next((path for path in self.files if path.name == "tokenizer.json"), None)

    def eos_token_id(self) -> int | list[int] | None:
        """The token or tokens that end a text: of the generation config, else of the model's."""
        return self.generation_config.get("eos_token_id", self.inert.get("eos_token_id"))

    def existing_files(self) -> tuple[Path, ...]:
        """The files that are still there; a warning names those that are not (weights are saved even so)."""
        gone = [str(path) for path in self.files if not path.is_file()]
        if gone:
            warnings.warn(f"saved without files that are no longer there: {', '.join(gone)}", stacklevel=3)
        return tuple(path for path in self.files if path.is_file())


@dataclasses.dataclass
class LoadReport:
    """Where every parameter came from. ``print(model.load_report)`` shows it, equal lines of all layers as one."""

    folder: Path
    dtype: torch.dtype
    model_type: str | None = None
    loaded: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # parameter: its tensors in the checkpoint
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # tensor: file name
    casts: dict[str, str] = dataclasses.field(default_factory=dict)  # tensor: "float32 -> bfloat16"
    ties: dict[str, str] = dataclasses.field(default_factory=dict)  # tensor or parameter: what it shares its values with, and how we know
    ignored: dict[str, str] = dataclasses.field(default_factory=dict)  # tensor or file: why
    initialized: tuple[str, ...] = ()  # parameters that an override added
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # config key that the file left out: the published default taken
    inert: dict[str, Any] = dataclasses.field(default_factory=dict)  # config key without an effect on results: its value
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # dotted path: the value put there

    def add(self, parameter: str, sources: tuple[str, ...], entry: Entry, dtype: torch.dtype) -> None:
        """Note that ``entry``, one of ``sources``, was read into ``parameter``, which is of ``dtype``."""
        self.loaded[parameter] = sources
        self.files[entry.name] = entry.file.name
        if entry.dtype is not None and entry.dtype != dtype:
            self.casts[entry.name] = f"{dtype_name(entry.dtype)} -> {dtype_name(dtype)}"

    def __str__(self) -> str:
        kind = f" ({self.model_type})" if self.model_type else ""
        files = len(set(self.files.values()))
        head = (
            f"{self.folder}{kind}: {len(self.loaded)} parameters in {dtype_name(self.dtype)} "
            f"out of {len(self.files)} tensors in {files} file{'s' if files != 1 else ''}"
        )
        sections = [
            ("parameters", {k: " | ".join(v) for k, v in self.loaded.items()}, "<-"),
            ("casts", self.casts, ":"),
            ("tied", self.ties, ":"),
            ("ignored", self.ignored, ":"),
            ("initialised, as an override added them", dict.fromkeys(self.initialized, ""), ""),
            ("overrides", self.overrides, "="),
            ("config keys left out, the published default taken", self.defaults, "="),
            ("config keys without an effect on results", self.inert, "="),
        ]
        lines = [head]
        for title, rows, sign in sections:
            if rows:
                lines.append(f"{title}:")
                lines += [f"  {line}" for line in _folded(f"{k} {sign} {v}".rstrip() for k, v in rows.items())]
        return "\n".join(lines)


def _folded(lines: Iterable[str]) -> list[str]:
    """Lines that differ only in the index of a layer as one, with their count."""
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for line in lines:
        key = re.sub(r"(?<=layers\.)\d+(?=\.)", "*", line)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, line)
    return [f"{key}  (x{count})" if count > 1 else first[key] for key, count in counts.items()]
