"""The console script ``ligerformer``: summary, convert, generate, env."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .configs import ConfigError, ModelConfig, presets
from .configs.schema import nearest
from .convert import config_from_hf, from_hf, load, save, save_hf
from .convert.folder import read_json
from .convert.write import NATIVE_CONFIG, parse_size, target_of
from .kernels import explain
from .summary import summary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
TOKENIZER = "tokenizer.json"
DONE, REFUSED, INTERRUPTED, BROKEN_PIPE = 0, 2, 130, 141  # exit codes; the last two as a shell gives them (128 + the signal)


def main(argv: list[str] | None = None) -> int:
    """Run a command: 0 on success, 2 on a bad request, whose reason goes to stderr, 130 when interrupted."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough, and the interpreter is not to try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError, ImportError) as error:
        return _refuse(args.command, str(error))
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return _refuse(args.command, f"out of memory: {error}".splitlines()[0])
    return DONE


def _refuse(command: str, reason: str) -> int:
    print(f"ligerformer {command}: {reason}", file=sys.stderr)
    return REFUSED


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)  # the CPU's has no class


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ligerformer", description="Build, convert and run decoder language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    count = _number(int, "a whole number, 1 or more", lambda x: 1 <= x < 2**31)

    command = _add(commands, "summary", _summary, "describe a preset, a checkpoint folder or hub id, or a JSON file with a config")
    command.add_argument("model", help=f"a preset ({', '.join(presets.names()[:3])} ...), a folder, a hub id, or a .json file")
    command.add_argument("--batch", type=count, default=1, help="rows of the training step whose memory is told (default: %(default)s)")
    command.add_argument("--seq-len", type=count, help="tokens a row (default: the smaller of max_position_embeddings and 4096)")

    command = _add(commands, "convert", _convert, "read a checkpoint, write it in Hugging Face or native format")
    command.add_argument("source", help="a folder (of either format) or a hub id")
    command.add_argument("target", help="the folder to write; a model that is in it is replaced")
    command.add_argument("--to", choices=["hf", "native"], default="native")
    command.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    command.add_argument("--max-shard-size", default="5GB", help="of each safetensors file (default: %(default)s)")

    command = _add(commands, "generate", _generate, "continue a text")
    command.add_argument("model", help=f"a folder (of either format) or a hub id, with a {TOKENIZER}")
    command.add_argument("prompt", nargs="?", help="the text to continue; read from standard input where left out")
    command.add_argument("--max-new-tokens", type=count, default=100, help="(default: %(default)s)")
    temperature = _number(float, "0 or more", lambda x: 0 <= x < math.inf)
    command.add_argument("--temperature", type=temperature, default=0.0, help="0 takes the most probable token (default)")
    command.add_argument("--top-k", type=count)
    command.add_argument("--top-p", type=_number(float, "more than 0 and at most 1", lambda x: 0 < x <= 1))
    command.add_argument("--seed", type=_number(int, "a whole number from 0 to 2**63 - 1", lambda x: 0 <= x < 2**63))
    command.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    command.add_argument("--explain", action="store_true", help="afterwards, print which implementation each op ran on")

    _add(commands, "env", _env, "print the versions and devices that a report should name")
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], None], help_: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_, description=help_)
    command.set_defaults(run=run)
    return command


def _number(kind: Callable[[str], Any], expected: str, good: Callable[[Any], bool]) -> Callable[[str], Any]:
    """A type of argument: a number that is ``good``."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not good(value):
            raise argparse.ArgumentTypeError(f"is {text!r}; expected {expected}")
        return value

    return read


def _summary(args: argparse.Namespace) -> None:
    print(summary(_config(args.model), batch=args.batch, seq_len=args.seq_len))


def _config(name: str) -> ModelConfig:
    """The config of a folder of either format, a preset, a JSON file, or a hub id: the first that there is."""
    path = Path(name)
    if (path / NATIVE_CONFIG).is_file():
        return _config_from_json(path / NATIVE_CONFIG)
    if path.is_dir():
        return config_from_hf(name)
    if name in presets.names():
        return presets.load(name)
    if path.is_file():
        return _config_from_json(path)
    _check_place(name, "no preset, no file and no folder", presets.names())
    return config_from_hf(name)


def _config_from_json(path: Path) -> ModelConfig:
    """The config that a file holds: ours, or a config.json of transformers."""
    data = read_json(path)
    try:
        return config_from_hf(data) if "model_type" in data else ModelConfig.from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_place(name: str, what_it_is_not: str, known: Sequence[str] = ()) -> None:
    """Raise a ValueError for what is no folder and cannot be a hub id, before a network is asked."""
    if not Path(name).is_dir() and "/" not in name:
        raise ValueError(f"{name!r} is {what_it_is_not}, and an id on the hub is owner/name{nearest(name, known)}")


def _model(name: str, dtype: str, device: str = "cpu") -> Any:
    if name in presets.names() and not Path(name).is_dir():
        raise ValueError(f"{name!r} is a preset, which has no weights; give the folder or the hub id of a checkpoint")
    _check_place(name, "no folder")
    wanted = DTYPES.get(dtype, "auto")
    if (Path(name) / NATIVE_CONFIG).is_file():
        return load(name, device=device, dtype=wanted)
    return from_hf(name, device=device, dtype=wanted)


def _convert(args: argparse.Namespace) -> None:
    size, target = parse_size(args.max_shard_size), target_of(args.target)  # refused now rather than after a long load
    if target.exists() and Path(args.source).exists() and target.samefile(args.source):
        raise ValueError(f"{args.target} is both source and target; give a folder of its own to write")
    model = _model(args.source, args.dtype)
    (save if args.to == "native" else save_hf)(model, target, max_shard_size=size)
    print(model.load_report)
    print(f"written to {args.target}")


def _generate(args: argparse.Namespace) -> None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("text in and out needs the tokenizers package: pip install 'ligerformer[tokenizers]'") from None
    _check_device(args.device)
    if Path(args.model).is_dir() and not (Path(args.model) / TOKENIZER).is_file():
        raise ValueError(_NO_TOKENIZER.format(args.model))
    prompt = args.prompt if args.prompt is not None else _standard_input()
    model = _model(args.model, args.dtype, args.device)
    tokenizer = _tokenizer(Tokenizer, model.load_report.folder / TOKENIZER, args.model)
    ids = _encode(tokenizer, prompt, model.config.vocab_size)
    options = {k: getattr(args, k) for k in ("temperature", "top_k", "top_p", "seed")}
    eos = None if model.source is None else model.source.eos_token_id()
    shown = _Stream(tokenizer, prompt, ids)
    model.generate(torch.tensor([ids], device=args.device), args.max_new_tokens, eos_token_id=eos, on_token=shown, **options)
    shown.finish()
    if args.explain:
        print(explain(), file=sys.stderr)


_NO_TOKENIZER = f"{{}} has no {TOKENIZER}; expected one beside the weights"


def _check_device(name: str) -> None:
    """Raise a ValueError for a device that is not served, or not there."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"--device is {name!r}; expected cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {name!r}, and torch sees {torch.cuda.device_count()} GPUs here")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not text: {error}") from None


def _tokenizer(tokenizers: Any, path: Path, name: str) -> Any:
    if not path.is_file():
        raise ValueError(_NO_TOKENIZER.format(name))
    try:
        return tokenizers.from_file(str(path))
    except Exception as error:  # the package raises no narrower class
        raise ValueError(f"{path} is no tokenizer that the tokenizers package reads: {error}") from error


def _encode(tokenizer: Any, prompt: str, vocab_size: int) -> list[int]:
    """The prompt's token ids; a ValueError where there are none, or the model does not know them."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not text: {error}") from None
    ids: list[int] = tokenizer.encode(prompt).ids
    if not ids:
        raise ValueError("the prompt is empty; expected at least one token to continue")
    if max(ids) >= vocab_size:
        raise ValueError(f"the tokenizer gives token {max(ids)} and the model's vocabulary has {vocab_size}: they do not belong together")
    return ids


class _Stream:
    """Prints the prompt, then what each new token adds to the text, holding back characters that are still incomplete."""

    def __init__(self, tokenizer: Any, prompt: str, ids: list[int]) -> None:
        self.tokenizer, self.prompt, self.ids, self.text = tokenizer, prompt, list(ids), tokenizer.decode(ids)

    def __call__(self, token: torch.Tensor) -> None:
        print(self.prompt, end="", flush=True)  # now that nothing refuses the request any more
        self.prompt = ""
        self.ids.append(int(token[0]))
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            self._show(text)

    def finish(self) -> None:
        """Print what was held back and never completed, and end the line."""
        self._show(self.tokenizer.decode(self.ids))
        print()

    def _show(self, text: str) -> None:
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
