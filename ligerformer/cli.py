"""The console script ``ligerformer``: summary, convert, generate, env."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .configs import ModelConfig, presets
from .convert import config_from_hf, from_hf, load, save, save_hf
from .kernels import explain
from .summary import summary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
NATIVE_CONFIG = "ligerformer.json"


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 on success, 2 on a bad request, whose reason goes to stderr."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"ligerformer {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ligerformer", description="Build, convert and run decoder language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = _add(commands, "summary", _summary, "describe a preset, a checkpoint folder or hub id, or a JSON file with a config")
    command.add_argument("model", help=f"a preset ({', '.join(presets.names()[:3])} ...), a folder, a hub id, or a .json file")
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--seq-len", type=int)

    command = _add(commands, "convert", _convert, "read a checkpoint, write it in Hugging Face or native format")
    command.add_argument("source", help="a folder (of either format) or a hub id")
    command.add_argument("target", help="the folder to write")
    command.add_argument("--to", choices=["hf", "native"], default="native")
    command.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    command.add_argument("--max-shard-size", default="5GB", help="of each safetensors file (default: %(default)s)")

    command = _add(commands, "generate", _generate, "continue a text")
    command.add_argument("model", help="a folder (of either format) or a hub id, with a tokenizer.json")
    command.add_argument("prompt", nargs="?", help="the text to continue; read from standard input where left out")
    command.add_argument("--max-new-tokens", type=int, default=100)
    command.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token (default)")
    command.add_argument("--top-k", type=int)
    command.add_argument("--top-p", type=float)
    command.add_argument("--seed", type=int)
    command.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--explain", action="store_true", help="afterwards, print which implementation each op ran on")

    _add(commands, "env", _env, "print the versions and devices that a report should name")
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], None], help_: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_, description=help_)
    command.set_defaults(run=run)
    return command


def _config(name: str) -> ModelConfig:
    """The config of a preset, a JSON file, a folder of either format, or a hub id."""
    path = Path(name)
    if name in presets.names():
        return presets.load(name)
    if path.is_file():
        return _config_from_json(path)
    if (path / NATIVE_CONFIG).is_file():
        return _config_from_json(path / NATIVE_CONFIG)
    return config_from_hf(name)


def _config_from_json(path: Path) -> ModelConfig:
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if isinstance(data, dict) and "model_type" in data:
        return config_from_hf(path.parent)
    return ModelConfig.from_dict(data)


def _summary(args: argparse.Namespace) -> None:
    print(summary(_config(args.model), batch=args.batch, seq_len=args.seq_len))


def _model(name: str, dtype: str, device: str = "cpu") -> Any:
    wanted = DTYPES.get(dtype, "auto")
    if (Path(name) / NATIVE_CONFIG).is_file():
        return load(name, device=device, dtype=wanted)
    return from_hf(name, device=device, dtype=wanted)


def _convert(args: argparse.Namespace) -> None:
    model = _model(args.source, args.dtype)
    if args.to == "native":
        save(model, args.target)
    else:
        save_hf(model, args.target, max_shard_size=args.max_shard_size)
    print(model.load_report)
    print(f"written to {args.target}")


def _generate(args: argparse.Namespace) -> None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("text in and out needs the tokenizers package: pip install 'ligerformer[tokenizers]'") from None
    model = _model(args.model, args.dtype, args.device)
    tokenizer_file = model.source.tokenizer_file() if model.source is not None else None
    if tokenizer_file is None:
        raise ValueError(f"{args.model} has no tokenizer.json; expected one beside the weights")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=args.device)
    options = {k: getattr(args, k) for k in ("temperature", "top_k", "top_p", "seed")}
    print(prompt, end="", flush=True)
    shown = _Stream(tokenizer, ids[0].tolist())
    model.generate(ids, args.max_new_tokens, eos_token_id=model.source.eos_token_id(), on_token=shown, **options)
    print()
    if args.explain:
        print(explain(), file=sys.stderr)


class _Stream:
    """Prints what each new token adds to the text, holding back characters that are still incomplete."""

    def __init__(self, tokenizer: Any, ids: list[int]) -> None:
        self.tokenizer, self.ids, self.text = tokenizer, ids, tokenizer.decode(ids)

    def __call__(self, token: torch.Tensor) -> None:
        self.ids.append(int(token[0]))
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            print(text[len(self.text) :], end="", flush=True)
            self.text = text


def _env(args: argparse.Namespace) -> None:
    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    rows = {"ligerformer": __version__, "python": platform.python_version(), "platform": platform.platform()}
    rows |= {name: version(name) for name in ("torch", "triton", "safetensors", "huggingface-hub", "tokenizers", "transformers")}
    rows |= {"cuda": str(torch.version.cuda), "rocm": str(torch.version.hip)}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        rows[f"gpu {i}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
        )
    width = max(map(len, rows))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
