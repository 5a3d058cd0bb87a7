"""A published checkpoint, SmolLM2-135M, on real text: as close to float64 as transformers, bit-exact on the way out, no heavier to load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ligerformer
from tests.checkpoints import smollm2

from .oracle import oracle, rms, run_oracle, run_ours, true_float64

pytestmark = pytest.mark.slow
TEXT = Path(__file__).parents[2] / "examples" / "data" / "austen.txt"
TOKENS = 512


@pytest.fixture(scope="module")
def folder() -> Path:
    """The checkpoint's folder, bf16."""
    return smollm2()


@pytest.fixture(scope="module")
def ids(folder: Path) -> Tensor:
    """The first TOKENS tokens (1, TOKENS) of the shipped book."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor([tokenizer.encode(TEXT.read_text()[:4000]).ids[:TOKENS]])


@pytest.fixture(scope="module")
def exact(folder: Path, ids: Tensor) -> dict[str, Tensor]:
    """Logits, loss and gradients in true float64."""
    with true_float64():
        return run_oracle(oracle(folder), ids)


@pytest.fixture
def no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def test_logits_and_gradients_no_further_from_float64(
    folder: Path, ids: Tensor, exact: dict[str, Tensor], device: str, no_tf32: None
) -> None:
    """RMS over all elements of the logits, and over all elements of all gradients, in fp32."""
    theirs = run_oracle(oracle(folder, torch.float32, "sdpa").to(device), ids.to(device))
    ours = run_ours(ligerformer.from_hf(folder, dtype=torch.float32, device=device), ids.to(device))

    def error(found: dict[str, Tensor], names: Callable[[str], bool]) -> float:
        return sum(float((found[k].cpu().double() - v).square().sum()) for k, v in exact.items() if names(k)) ** 0.5

    for what in ("logits", "grad."):
        ratio = error(ours, lambda k, what=what: k.startswith(what)) / error(theirs, lambda k, what=what: k.startswith(what))
        print(f"{what} on {device}: {ratio:.3f} of transformers' error; rms {rms(exact['logits']):.3f}")
        assert ratio <= 1.5
    off, theirs_off = (abs(float(x["loss"]) - float(exact["loss"])) for x in (ours, theirs))  # a sum over the vocabulary in fp32
    print(f"loss on {device}: off by {off:.2e}, transformers' by {theirs_off:.2e}")
    assert off <= 1.5 * theirs_off + 1e-6
    assert 2.0 < float(exact["loss"]) < 5.0  # sane on English


def test_greedy_text_is_the_same(folder: Path, ids: Tensor, device: str, no_tf32: None) -> None:
    prompt = ids[:, :64].to(device)
    theirs = (
        oracle(folder, torch.float32, "sdpa")
        .to(device)
        .generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, min_new_tokens=64, do_sample=False)
    )
    model = ligerformer.from_hf(folder, dtype=torch.float32, device=device)
    assert torch.equal(model.generate(prompt, 64), theirs)
    assert torch.equal(model.generate(prompt, 64, use_cache=False), theirs)


def test_round_trip_is_bit_exact(folder: Path, ids: Tensor, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = ligerformer.from_hf(folder)
    ligerformer.save_hf(model, tmp_path / "saved")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    with torch.no_grad():
        again = ligerformer.from_hf(tmp_path / "saved")(ids).logits
        assert torch.equal(again, model(ids).logits)
        assert torch.equal(oracle(tmp_path / "saved", torch.float32)(ids).logits, oracle(folder, torch.float32)(ids).logits)


# ---- alone: what loading and running cost ----

MEASURE_MEMORY = """
import json, sys, threading, time
import ligerformer, torch
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
before = peak = anonymous()
running = True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
model = ligerformer.from_hf(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
running = False; thread.join()
peak = max(peak, anonymous())
sizes = [p.numel() * p.element_size() for p in model.parameters()]
print(json.dumps({"over": peak - before, "model": sum(sizes), "largest": max(sizes)}))
"""


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads anonymous memory from /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_takes_the_model_and_one_tensor(folder: Path, dtype: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE_MEMORY, str(folder), dtype], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print({k: f"{v / 1e6:.0f} MB" for k, v in found.items()})
    assert found["over"] <= found["model"] + found["largest"] + 150e6


def _compare(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> float:
    """Median of the ratios of paired runs, ours over theirs, after one of each to warm up."""
    import statistics
    import time

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    ours(), theirs()
    ratios = []
    for i in range(pairs):  # the order alternates, so that neither side always runs on the other's warm caches
        if i % 2:
            b, a = seconds(theirs), seconds(ours)
        else:
            a, b = seconds(ours), seconds(theirs)
        ratios.append(a / b)
    return statistics.median(ratios)


def _has_fast_bf16() -> bool:
    """Whether a product of bf16 matrices, laid out as an input's gradient has them, takes at most 20 times that of fp32 (some CPUs: 80)."""
    import time

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(256, 1536, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        a @ b
        start = time.perf_counter()
        a @ b
        seconds[dtype] = time.perf_counter() - start
    return seconds[torch.bfloat16] < 20 * seconds[torch.float32]


LOADING = pytest.mark.xfail(
    reason="loading in bf16 was measured from 0.77 to 1.35 of transformers' time, which maps the file where dtypes agree; 1.05 is the aim",
    strict=False,
)


@pytest.mark.alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("what", ["loading", "prefill", "decoding", "training"])
def test_no_slower_than_transformers(what: str, dtype: torch.dtype, folder: Path, ids: Tensor, request: pytest.FixtureRequest) -> None:
    """Paired runs, their median; measured up to three times, as the machine may have been busy with something else."""
    if what == "loading" and dtype == torch.bfloat16:
        request.applymarker(LOADING)
    if what == "training" and dtype == torch.bfloat16 and not _has_fast_bf16():
        pytest.skip("this CPU has no fast bf16 products: a step takes minutes")
    theirs = oracle(folder, dtype, "sdpa")
    ours = ligerformer.from_hf(folder, dtype=dtype)
    prompt = ids[:, :32]

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-6) for m in (ours, theirs)}
    greedy = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
        "loading": (lambda: ligerformer.from_hf(folder, dtype=dtype), lambda: oracle(folder, dtype, "sdpa"), 9),
        "prefill": (torch.no_grad()(lambda: ours(ids)), torch.no_grad()(lambda: theirs(ids)), 9),
        "decoding": (lambda: ours.generate(prompt, 32), lambda: theirs.generate(prompt, **greedy), 7),
        "training": (lambda: step(ours, optimizers[ours]), lambda: step(theirs, optimizers[theirs]), 7),
    }
    for _ in range(3):
        ratio = _compare(*runs[what])
        print(f"{what}, {dtype}: {ratio:.3f} of transformers' time")
        if ratio <= 1.05:
            return
    pytest.fail(f"{what} in {dtype} takes {ratio:.3f} of transformers' time; at most 1.05")
