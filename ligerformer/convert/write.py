"""Writing a checkpoint's folder: safetensors shards, an index, and the folder put in place as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..progress import Progress
from .errors import CheckpointError, fail
from .folder import CONFIG, GENERATION_CONFIG, INDEX, TOKENIZER_FILES, WEIGHTS
from .safetensors_file import DTYPES, memory_of

NATIVE_CONFIG = "ligerformer.json"
NATIVE_SOURCE = "ligerformer_source.json"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIZE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
REPLACED = re.compile(
    "|".join(map(re.escape, (CONFIG, GENERATION_CONFIG, NATIVE_CONFIG, NATIVE_SOURCE, INDEX, WEIGHTS)))
    + r"|model-\d{5}-of-\d{5}\.safetensors"
)


def parse_size(size: int | str) -> int:
    """Bytes: an int, or text such as "5GB" (10**9 a GB) or "512MiB" (2**20 a MiB). A ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)", size.strip().upper()) if isinstance(size, str) else None
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"max_shard_size is {size!r}; expected a number of bytes, or text such as '5GB', '500MB', '2GiB'")
    return max(1, int(float(found[1]) * SIZE_UNITS[found[2]]))


def check_tensors(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise a CheckpointError that names every tensor that cannot be written."""
    problems = []
    for name, x in tensors:
        if x.is_meta:
            problems.append(f"{name} is on the meta device and has no values")
        elif hasattr(x, "full_tensor"):
            problems.append(f"{name} is sharded over several processes; gather it first (full_tensor)")
        elif x.dtype not in DTYPE_NAMES:
            problems.append(f"{name} is {x.dtype}, which the format has no room for")
    fail(problems, "the model cannot be saved")


def write_tensors(folder: Path, tensors: Sequence[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write tensors as ``model.safetensors``, or as shards with their index; one tensor at a time is copied to the CPU, if it lies elsewhere."""
    shards: list[list[tuple[str, Tensor]]] = [[]]
    room = max_shard_bytes
    for name, x in tensors:
        if x.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append((name, x))
        room -= x.nbytes
    total = sum(x.nbytes for _, x in tensors)
    names = [WEIGHTS] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with Progress(total, "saving") as progress:
        for file_name, shard in zip(names, shards, strict=True):
            _write_file(folder / file_name, shard, progress)
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name, _ in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(path: Path, tensors: Sequence[tuple[str, Tensor]], progress: Progress) -> None:
    ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())  # widest first: every tensor then starts aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, x in ordered:
        header[name] = {"dtype": DTYPE_NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [position, position + x.nbytes]}
        position += x.nbytes
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, x in ordered:
            if x.numel():
                on_cpu = x.detach().to("cpu").contiguous()
                file.write(memory_of(on_cpu))
            progress.update(x.nbytes)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, data: Any) -> None:
    """Write readable JSON, down to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def copy_files(files: Sequence[Path], folder: Path) -> None:
    """Copy files (followed where they are links) into ``folder``, down to the disk."""
    for path in files:
        copied = folder / path.name
        shutil.copyfile(path, copied)
        with copied.open("rb+") as file:
            os.fsync(file.fileno())


def target_of(folder: str | os.PathLike[str]) -> Path:
    """The real path of a folder to save into; a CheckpointError for a file, or the current directory."""
    target = Path(os.path.realpath(os.path.expanduser(folder)))
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; expected the name of a folder to save into")
    if target == Path.cwd():
        raise CheckpointError(f"{target} is the current directory, which cannot be replaced as a whole; save into a folder inside it")
    return target


@contextlib.contextmanager
def replacing(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A new empty folder to write into, which takes the place of ``folder`` when the block ends, and vanishes if it fails.

    Until then the old folder is untouched. What it held and the new one does not is kept (a README, a .git, a tokenizer where the new one
    brings none), except for the config, weights and index of the model that is replaced. The exchange is two renames: were the machine to
    stop between them, the old folder would stand whole beside its place, as ``.<name>.old-*``; where what is kept cannot be moved out of
    it, it stays there and the error names it. A process that is killed may leave a ``.<name>.new-*`` (half written) or a
    ``.<name>.old-*``: nothing reads or removes these.
    """
    target = target_of(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    tag = secrets.token_hex(4)
    new, old = (target.parent / f".{target.name}.{what}-{tag}" for what in ("new", "old"))
    new.mkdir()
    try:
        yield new
        _sync_folder(new)
        if target.exists():
            _exchange(target, new, old)
        else:
            os.rename(new, target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def _exchange(target: Path, new: Path, old: Path) -> None:
    shutil.copymode(target, new)
    written = {path.name for path in new.iterdir()}
    replaced = written | (set(TOKENIZER_FILES) if written & set(TOKENIZER_FILES) else set())
    kept = [path.name for path in target.iterdir() if path.name not in replaced and not REPLACED.fullmatch(path.name)]
    try:
        os.rename(target, old)
    except OSError as error:  # a mount point, or a parent that may not be written
        raise CheckpointError(f"{target} cannot be replaced ({error}); save into a folder inside it") from error
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    try:
        for name in kept:
            os.rename(old / name, target / name)
        _sync_folder(target)
        shutil.rmtree(old)
    except BaseException as error:
        message = (
            f"{target} holds the new model, and {old} what is left of the folder it replaced: move what you need out of it and delete it"
        )
        if isinstance(error, OSError):
            raise CheckpointError(f"{message} ({error})") from error
        error.add_note(message)
        raise


def _sync_folder(folder: Path) -> None:
    """Make a folder's names durable, where the system can (Windows cannot)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
