"""Checkpoints by their name on the Hugging Face hub, fetched into its cache; a folder is taken as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

from .errors import CheckpointError
from .folder import CONFIG, GENERATION_CONFIG, INDEX, TOKENIZER_FILES, WEIGHTS, read_index

# Connections, proxies, the hub's own errors, a full disk: the client's base class is no OSError in the versions that build on httpx.
CONNECTION_ERRORS = (OSError, getattr(errors, "HTTPError", OSError))
SMALL_FILES = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)


def fetch(
    id_or_dir: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    weights: bool = True,
) -> Path:
    """The folder of a checkpoint: ``id_or_dir`` itself where it is one, else what the hub has under that id, downloaded as needed.

    Only config, tokenizer and safetensors files are fetched, and without ``weights`` none of the latter. Raises a CheckpointError that says
    what to do: no such folder or repository, no access to it, no network.
    """
    path = Path(id_or_dir).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision is {revision!r} and {path} is a folder; only a repository on the hub has revisions")
        return path
    name = str(id_or_dir)
    if isinstance(id_or_dir, os.PathLike) or path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; expected a folder, or the id of a repository on the hub (owner/name)")
    options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    first = (*SMALL_FILES, WEIGHTS, INDEX) if weights else SMALL_FILES
    folder = _download(name, revision, first, options)
    if weights and (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        shards = sorted(set(read_index(folder).values()))
        folder = _download(name, folder.name if folder.parent.name == "snapshots" else revision, shards, options)  # of the same commit
    elif weights and not (folder / WEIGHTS).exists():
        raise CheckpointError(_without_safetensors(name, revision, options))
    return folder


def _download(name: str, revision: str | None, files: Iterable[str], options: dict[str, Any]) -> Path:
    with _explained(name, revision, options):
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(files), **options))


@contextlib.contextmanager
def _explained(name: str, revision: str | None, options: dict[str, Any]) -> Iterator[None]:
    """Turn what the hub's client raises into a CheckpointError that says what to do."""
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{name} is gated: accept its licence at https://huggingface.co/{name}, then log in with `hf auth login` or pass token="
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{name} has no revision {revision!r} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{name} is no folder here and no repository on the hub that you can see; check the spelling, "
            "and for a private one log in with `hf auth login` or pass token="
        ) from None
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name!r} is no folder here and no valid repository id: {error}") from None
    except errors.LocalTokenNotFoundError:
        raise CheckpointError(
            f"token=True asks for a stored token and there is none; log in with `hf auth login` to fetch {name}"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        reason = "local_files_only is set" if options["local_files_only"] else f"the hub could not be reached ({_root(error)})"
        raise CheckpointError(
            f"{name} is not in the cache in full, and {reason}; connect and try again, or give a folder that holds the checkpoint"
        ) from error
    except CONNECTION_ERRORS as error:
        raise CheckpointError(f"fetching {name} from the hub failed: {type(error).__name__}: {error}") from error


def _root(error: BaseException) -> str:
    cause = error.__cause__
    return f"{type(cause).__name__}: {cause}" if cause is not None else str(error).splitlines()[0]


def _without_safetensors(name: str, revision: str | None, options: dict[str, Any]) -> str:
    """What a repository has in place of safetensors; asked only when there are none."""
    if options["local_files_only"]:
        return f"the cache has no {WEIGHTS} of {name}, and local_files_only is set"
    with _explained(name, revision, options):
        files = huggingface_hub.list_repo_files(name, revision=revision, token=options["token"])
    pickles = [f for f in files if f.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf"))]
    if pickles:
        return (
            f"{name} has its weights in {', '.join(pickles[:3])} alone; only safetensors is read (a pickle can run code when opened). "
            "Look for a revision or a copy of the repository in safetensors"
        )
    return f"{name} has neither {WEIGHTS} nor {INDEX}; it holds {', '.join(files[:20]) or 'nothing'}"
