"""The console script: what each command prints, and for every bad request a reason on stderr, exit code 2 and no traceback."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import ligerformer
from ligerformer import cli, progress
from ligerformer.convert.hub import errors
from tests.configs.examples import plain
from tests.convert.hf_models import hf_model

TEXT = "Él dijo: “¿cómo está?” — naïve café, über straße, 雨が降る. The cat sat on the mat; the cat ate the rat. " * 4
VOCABULARY = 280  # every byte, and a few merges


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it, with a byte-level BPE tokenizer beside the weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("llama")
    hf_model("llama", vocab_size=VOCABULARY, eos_token_id=1).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tokenizer(llama: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(llama / "tokenizer.json"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise errors.LocalEntryNotFoundError("no internet") from ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert cli.main([str(a) for a in args]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The reason of a refused request, which is all there is: nothing on stdout, one sentence on stderr."""
    try:
        code = cli.main([str(a) for a in args])
    except SystemExit as exit_:  # argparse
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and "Traceback" not in err
    return err


# ---- summary ----


def test_summary_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "summary", "llama-3.2-1b", "--batch", 4, "--seq-len", 4096)
    assert out == ligerformer.summary(ligerformer.presets.load("llama-3.2-1b"), batch=4, seq_len=4096) + "\n"
    assert out.startswith("1,235,814,400 parameters, 16 layers of width 2048") and "4 x 4096 tokens" in out


def test_summary_of_folders_and_files(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ligerformer.summary(ligerformer.config_from_hf(llama)) + "\n"
    ligerformer.save(ligerformer.from_hf(llama), tmp_path / "native")
    (tmp_path / "theirs.json").write_bytes((llama / "config.json").read_bytes())  # beside it lies no config.json
    places = [llama, llama / "config.json", tmp_path / "native", tmp_path / "native/ligerformer.json", tmp_path / "theirs.json"]
    for place in places:
        assert run(capsys, "summary", place) == expected, place


def test_a_folder_with_the_name_of_a_preset_is_the_folder(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(capsys, "summary", llama)
    (tmp_path / "llama-3.2-1b").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "summary", "llama-3.2-1b") == expected


def test_summary_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def of(name: str, text: str | bytes | None = None, *args: object) -> str:
        if text is not None:
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return refusal(capsys, "summary", tmp_path / name, *args)

    typo = plain() | {"hiden_size": 24}
    typo.pop("hidden_size")
    assert "hiden_size: unknown key (value 24); did you mean 'hidden_size'?" in of("typo.json", json.dumps(typo))
    assert "typo.json" in of("typo.json")
    assert "model_type" in of("mamba.json", '{"model_type": "mamba"}')
    assert "not readable JSON" in of("broken.json", "{")
    assert "not readable JSON" in of("model.safetensors", b"\x80\x00\xff\xfe")
    assert "no dict" in of("list.json", "[1, 2]")
    assert "does not exist" in of("missing.json")
    (tmp_path / "empty").mkdir()
    assert "config.json is missing; the folder holds nothing" in of("empty")


def test_an_unknown_name_is_answered_with_the_nearest_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "summary", "lama-3.2-1b") == (
        "ligerformer summary: 'lama-3.2-1b' is no preset, no file and no folder, and an id on the hub is owner/name; "
        "did you mean 'llama-3.2-1b'?\n"
    )


def test_without_a_network_a_hub_id_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for args in (["summary", "owner/name"], ["convert", "owner/name", tmp_path / "out"], ["generate", "owner/name", "x"]):
        err = refusal(capsys, *args)
        assert err.startswith(f"ligerformer {args[0]}: owner/name is not in the cache in full, and the hub could not be reached (Conn")
    assert not (tmp_path / "out").exists()


# ---- convert ----


def test_converts_both_ways_bit_for_bit(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    native, back = tmp_path / "native", tmp_path / "back"
    out = run(capsys, "convert", llama, native)
    assert out.endswith(f"written to {native}\n") and "parameters" in out
    run(capsys, "convert", native, back, "--to", "hf", "--max-shard-size", "20KB")
    written = {k: v for file in back.glob("*.safetensors") for k, v in load_file(file).items()}
    original = load_file(llama / "model.safetensors")
    assert len(list(back.glob("*.safetensors"))) > 1 and written.keys() == original.keys()
    assert all(torch.equal(written[name], x) for name, x in original.items())
    assert (back / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    import transformers

    assert transformers.AutoModelForCausalLM.from_pretrained(back).config.model_type == "llama"


def test_dtype_and_shards_of_the_native_format(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "convert", llama, tmp_path / "half", "--dtype", "bfloat16", "--max-shard-size", "10kB")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    assert {p.dtype for p in ligerformer.load(tmp_path / "half").parameters()} == {torch.bfloat16}


def test_convert_refuses(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert f"{tmp_path}/nowhere does not exist" in refusal(capsys, "convert", tmp_path / "nowhere", out)
    assert "'nowhere' is no folder, and an id on the hub is owner/name" in refusal(capsys, "convert", "nowhere", out)
    assert "'llama-3.2-1b' is a preset, which has no weights" in refusal(capsys, "convert", "llama-3.2-1b", out)
    assert "max_shard_size is '5 parsecs'; expected" in refusal(capsys, "convert", llama, out, "--max-shard-size", "5 parsecs")
    assert "is both source and target" in refusal(capsys, "convert", llama, llama)
    assert "invalid choice: 'gguf'" in refusal(capsys, "convert", llama, out, "--to", "gguf")
    assert "is a file" in refusal(capsys, "convert", llama, llama / "config.json")
    monkeypatch.chdir(tmp_path)
    assert "is the current directory" in refusal(capsys, "convert", llama, ".")
    assert list(tmp_path.iterdir()) == [] and (llama / "config.json").is_file()


def test_what_no_family_can_say_is_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = plain() | {"residual": {"type": "mhc", "streams": 2}}
    ligerformer.save(ligerformer.build(config, seed=0), tmp_path / "mhc")
    assert "residual" in refusal(capsys, "convert", tmp_path / "mhc", tmp_path / "out", "--to", "hf")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert "has no weights" in refusal(capsys, "convert", tmp_path, tmp_path / "out")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "only safetensors is read" in refusal(capsys, "convert", tmp_path, tmp_path / "out")
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors" in refusal(capsys, "convert", tmp_path, tmp_path / "out")


# ---- generate ----


def expected_text(llama: Path, tokenizer: Any, prompt: str, new: int, **options: Any) -> str:
    ids = ligerformer.from_hf(llama).generate(torch.tensor([tokenizer.encode(prompt).ids]), new, **options)
    return tokenizer.decode(ids[0].tolist())


def test_generates_what_the_model_does(llama: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "generate", llama, "The cat", "--max-new-tokens", 20, "--device", "cpu")
    assert out == expected_text(llama, tokenizer, "The cat", 20, eos_token_id=[1]) + "\n"
    options = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "seed": 7}
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    sampled = run(capsys, "generate", llama, "The cat", "--max-new-tokens", 20, "--device", "cpu", *arguments)
    assert sampled == expected_text(llama, tokenizer, "The cat", 20, eos_token_id=[1], **options) + "\n" != out


def test_the_prompt_may_come_from_standard_input(llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(capsys, "generate", llama, "naïve café", "--max-new-tokens", 5, "--device", "cpu")
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve café"))
    assert run(capsys, "generate", llama, "--max-new-tokens", 5, "--device", "cpu") == given


def test_both_formats_generate_and_explain(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "convert", llama, tmp_path / "native")
    args = ["The cat", "--max-new-tokens", 8, "--device", "cpu"]
    assert run(capsys, "generate", tmp_path / "native", *args) == run(capsys, "generate", llama, *args)
    (tmp_path / "native/ligerformer_source.json").unlink()  # as of a model from a dict, beside which someone puts a tokenizer
    assert cli.main(["generate", str(tmp_path / "native"), *map(str, args), "--explain"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The cat") and "attention" in err and "reference" in err


class Script:
    """In place of a model's ``generate``: says these tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.options = tokens, {}

    def __call__(self, model: Any, ids: torch.Tensor, new: int, *, on_token: Any, **options: Any) -> None:
        self.options = options
        for token in self.tokens:
            on_token(torch.tensor([token]))


def scripted(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> tuple[Script, list[str]]:
    """The script, and every piece of text that is written to stdout."""
    script, pieces = Script(tokens), []
    monkeypatch.setattr(ligerformer.blocks.Decoder, "generate", lambda *args, **options: script(*args, **options))
    monkeypatch.setattr("builtins.print", lambda *args, **_: pieces.append("".join(map(str, args))))
    return script, pieces


def test_characters_appear_whole(llama: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alphabet = {character: tokenizer.token_to_id(character) for character in tokenizer.get_vocab()}
    from tokenizers import pre_tokenizers

    one_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [alphabet[c] for c in one_byte.pre_tokenize_str("a雨é😀")[0][0]]
    assert len(tokens) == 1 + 3 + 2 + 4  # a token a byte
    script, pieces = scripted(monkeypatch, tokens)
    assert cli.main(["generate", str(llama), "x", "--device", "cpu"]) == 0
    assert [p for p in pieces if p] == ["x", "a", "雨", "é", "😀"]
    assert script.options["eos_token_id"] == [1]
    _, pieces = scripted(monkeypatch, tokens[:3])  # the text ends inside a character: shown as broken, and not left out
    assert cli.main(["generate", str(llama), "x", "--device", "cpu"]) == 0
    assert "".join(pieces).startswith("xa\ufffd")


def test_the_end_token_ends_the_text(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = run(capsys, "generate", llama, "The cat", "--max-new-tokens", 6, "--device", "cpu")
    model = ligerformer.from_hf(llama)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(llama / "tokenizer.json")).encode("The cat").ids
    third = int(model.generate(torch.tensor([ids]), 3)[0, -1])
    ligerformer.save_hf(model, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, third]}))
    ended = run(capsys, "generate", tmp_path, "The cat", "--max-new-tokens", 6, "--device", "cpu")
    assert full.startswith(ended.rstrip("\n\ufffd")) and len(ended) < len(full)


def test_generate_refuses(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def of(*args: object) -> str:
        return refusal(capsys, "generate", *args)

    assert "argument --temperature: is 'hot'; expected 0 or more" in of(llama, "x", "--temperature", "hot")
    assert "argument --temperature: is '-1'; expected 0 or more" in of(llama, "x", "--temperature=-1")
    assert "argument --top-p: is '0'; expected more than 0 and at most 1" in of(llama, "x", "--top-p", 0)
    assert "argument --top-k: is '0'; expected a whole number, 1 or more" in of(llama, "x", "--top-k", 0)
    assert "argument --max-new-tokens: is '1.5'" in of(llama, "x", "--max-new-tokens", 1.5)
    assert "argument --seed: is '-1'" in of(llama, "x", "--seed=-1")
    assert "--device is 'tpu'; expected cpu, cuda or cuda:N" in of(llama, "x", "--device", "tpu")
    assert "--device is 'cuda:99', and torch sees" in of(llama, "x", "--device", "cuda:99")
    assert "the prompt is empty" in of(llama, "", "--device", "cpu")
    assert "the prompt is not text" in of(llama, "\udcff", "--device", "cpu")
    assert f"{tmp_path}/nowhere does not exist" in of(tmp_path / "nowhere", "x", "--device", "cpu")
    ligerformer.save_hf(ligerformer.from_hf(llama), tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 999, "content": "<far>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert f"gives token {VOCABULARY} and the model's vocabulary has {VOCABULARY}" in of(tmp_path, "<far>", "--device", "cpu")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is no tokenizer" in of(tmp_path, "x", "--device", "cpu")
    (tmp_path / "tokenizer.json").unlink()
    assert of(tmp_path, "x", "--device", "cpu").endswith(f"{tmp_path} has no tokenizer.json; expected one beside the weights\n")


def test_input_that_is_not_text_is_refused(llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert "standard input is not text" in refusal(capsys, "generate", llama, "--device", "cpu")


def test_without_the_tokenizers_package_the_extra_is_named(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'ligerformer[tokenizers]'" in refusal(capsys, "generate", llama, "x")


# ---- env, and what holds for all ----


def test_env_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    rows = dict(line.split(maxsplit=1) for line in run(capsys, "env").splitlines() if not line.startswith("gpu"))
    assert rows["ligerformer"] == ligerformer.__version__ and rows["torch"] == torch.__version__
    assert {"python", "platform", "triton", "safetensors", "huggingface-hub", "tokenizers", "transformers", "cuda", "rocm"} <= set(rows)


@pytest.mark.parametrize("args", [[], ["fly"], ["summary"], ["convert", "x"], ["generate"], ["summary", "x", "--batch", "0"]])
def test_requests_without_meaning_get_the_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *args).startswith("usage: ligerformer")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "\n"),
        (MemoryError("no room"), 2, "ligerformer summary: out of memory: no room\n"),
        (torch.OutOfMemoryError("GPU full\nmore"), 2, "ligerformer summary: out of memory: GPU full\n"),
        (PermissionError(13, "Permission denied", "there"), 2, "ligerformer summary: [Errno 13] Permission denied: 'there'\n"),
    ],
)
def test_what_stops_a_command(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "summary", fail)
    assert cli.main(["summary", "llama-3.2-1b"]) == code
    assert capsys.readouterr().err == says


def test_loading_and_saving_show_bars(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY", 0.0)
    code = cli.main(["convert", str(llama), str(tmp_path / "native")])
    out, err = capsys.readouterr()
    assert code == 0 and f"loading {llama.name} ####" in err and "saving ####" in err and "####" not in out


def test_an_interrupted_conversion_leaves_the_old_folder_whole(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ligerformer.convert.write._write_file", interrupted)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/kept").touch()
    for target in ("old", "new"):
        assert cli.main(["convert", str(llama), str(tmp_path / target)]) == 130
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["old", "old/kept"]
    assert capsys.readouterr().err == "\n\n"


def test_too_many_tokens_for_the_memory_is_a_refusal(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ligerformer.blocks.Decoder, "new_cache", lambda *_: torch.empty(10**15))  # more than there are addresses
    err = refusal(capsys, "generate", llama, "x", "--device", "cpu")
    assert err.startswith("ligerformer generate: out of memory: ") and err.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "summary", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["summary", "llama-3.2-1b"])


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ligerformer.cli", "summary", "smollm2-135m"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1], timeout=300)
    os.close(write)
    assert done.returncode == 141 and done.stderr == b""
