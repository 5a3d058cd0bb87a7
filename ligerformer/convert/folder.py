"""A checkpoint's folder: which files are read, and that none of them lies outside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError, fail
from .safetensors_file import Entry, read_header, unique_keys

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "spiece.model",
)


def member(folder: Path, name: str) -> Path:
    """The path of a file that another file names; a CheckpointError where it is not a plain name of a file inside ``folder``.

    A link may lead elsewhere inside the folder, and inside the hub's cache to the ``blobs`` beside its snapshots.
    """
    if not name or name in (".", "..") or any(c in name for c in "/\\:\0"):
        raise CheckpointError(f"{name!r} is no plain file name; files are read from {folder} alone")
    path, root = folder / name, folder.resolve()
    target = path.resolve()
    blobs = root.parent.parent / "blobs"
    if target.parent != root and root not in target.parents and not (root.parent.name == "snapshots" and blobs in target.parents):
        raise CheckpointError(f"{name!r} is a link to {target}, outside {folder}; put the file itself there")
    return path


def companions(folder: Path) -> tuple[Path, ...]:
    """The files that belong to a model beside its config and weights: tokenizer and generation config."""
    return tuple(member(folder, name) for name in (*TOKENIZER_FILES, GENERATION_CONFIG) if (folder / name).is_file())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a dict; a CheckpointError that names the file where it is missing, unreadable or names a key twice."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        found = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise CheckpointError(f"{path} is missing; the folder holds {', '.join(found[:20]) or 'nothing'}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no dict at its top")
    return data


def read_index(folder: Path) -> dict[str, str]:
    """``tensor name -> file name`` of a sharded checkpoint, every file name being a plain one; a file may yet be missing."""
    index = read_json(member(folder, INDEX))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map is {weight_map!r:.200}; expected a dict of tensor names to file names")
    problems = []
    for name in sorted(set(weight_map.values())):
        try:
            member(folder, name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if not name.endswith(".safetensors"):
            problems.append(f"{name!r} is no safetensors file; only safetensors is read")
    fail(problems, str(folder / INDEX))
    return weight_map


def find_tensors(folder: Path) -> dict[str, Entry]:
    """Every tensor of the checkpoint in ``folder``: of ``model.safetensors``, or of the shards that its index names.

    The index and the headers of the files must agree in full; all disagreements are told in one CheckpointError.
    """
    if (folder / WEIGHTS).exists():
        return read_header(member(folder, WEIGHTS))
    if not (folder / INDEX).exists():
        raise CheckpointError(_nothing_to_read(folder))
    weight_map = read_index(folder)
    problems: list[str] = []
    entries: dict[str, Entry] = {}
    for file_name in sorted(set(weight_map.values())):
        path = member(folder, file_name)
        if not path.is_file():
            tensors = sum(v == file_name for v in weight_map.values())
            problems.append(f"{file_name} is missing; the index says that it holds {tensors} tensors")
            continue
        try:
            header = read_header(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name, entry in header.items():
            if name in entries:
                problems.append(f"tensor {name!r} stands in both {entries[name].file.name} and {file_name}")
            elif name not in weight_map:
                problems.append(f"tensor {name!r} of {file_name} is not in the index")
            elif weight_map[name] != file_name:
                problems.append(f"tensor {name!r} is in {file_name}; the index says {weight_map[name]}")
            entries.setdefault(name, entry)
        lacking = [name for name, file in weight_map.items() if file == file_name and name not in header]
        problems += [f"tensor {name!r} is not in {file_name}, where the index says it is" for name in lacking]
    fail(problems, f"{folder / INDEX} and its files disagree")
    return entries


def _nothing_to_read(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    shards = [n for n in names if n.endswith(".safetensors")]
    if shards:
        return f"{folder} has neither {WEIGHTS} nor {INDEX} (it has {', '.join(shards[:5])}); without an index shards cannot be read"
    if pickles:
        return (
            f"{folder} has its weights in {', '.join(pickles[:5])} alone; only safetensors is read (a pickle can run code when opened). "
            "Convert them where you trust them: transformers' from_pretrained, then save_pretrained"
        )
    return f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}; it holds {', '.join(names[:20]) or 'nothing'}"
