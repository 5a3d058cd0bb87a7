"""One training step of a preset on one GPU: ours, transformers, transformers with Liger-Kernel; tokens/s, peak memory, losses.

    python benchmarks/train_step.py --model llama-3.2-1b --batch 4 --seq-len 4096 [--only ours cheap captured hf liger] [--out FILE.json]

"cheap" is ours with ``recompute="cheap"``, "captured" ours as one CUDA graph (``CapturedStep``). bf16 weights and AdamW states (fused), else no
recompute, attention through torch's SDPA on every side, real text (bytes of the shipped book as
ids), all sides from the same weights. Every side runs in a process of its own; a row that cannot be run says why.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import torch

import ligerformer
from ligerformer.capture import WARM_UP
from ligerformer.configs.counting import GIB
from ligerformer.convert.config import to_hf
from ligerformer.convert.saving import _tensors

TEXT = pathlib.Path(__file__).parents[1] / "examples" / "data" / "austen.txt"
OURS = ("ours", "cheap", "captured")
SIDES = (*OURS, "hf", "liger")


def build_ours(config: ligerformer.ModelConfig) -> torch.nn.Module:
    return ligerformer.build(config, device="cuda", dtype=torch.bfloat16, seed=0)


def build_hf(config: ligerformer.ModelConfig) -> torch.nn.Module:
    """transformers' model of the same config with the same weights."""
    import transformers

    data = to_hf(config)
    hf_config = transformers.AutoConfig.for_model(**data)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, attn_implementation="sdpa")
    start = build_ours(config)
    missing, unexpected = model.load_state_dict(dict(_tensors(start, data["model_type"])), strict=False)
    if unexpected or any(name != "lm_head.weight" for name in missing):
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    return model.train()


def build_liger(config: ligerformer.ModelConfig) -> torch.nn.Module:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    MODEL_TYPE_TO_APPLY_LIGER_FN[to_hf(config)["model_type"]]()
    return build_hf(config)


def measure(side: str, config: ligerformer.ModelConfig, batch: int, seq_len: int, steps: int) -> dict[str, Any]:
    """Median seconds a step after a warm-up, peak memory of a step, and the loss of every step."""
    model = {"hf": build_hf, "liger": build_liger}.get(side, build_ours)(config)
    if side == "cheap":
        model.recompute = "cheap"
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=side == "captured")
    captured = ligerformer.CapturedStep(model, optimizer) if side == "captured" else None
    warm_up = WARM_UP + 1 if captured else WARM_UP  # the capture
    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    losses, times = [], []
    for step in range(steps + warm_up):
        start = step * batch * seq_len % (len(data) - batch * seq_len)
        ids = data[start : start + batch * seq_len].view(batch, seq_len).cuda()
        if step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        if captured:
            loss = captured(ids, labels=ids)
        else:
            optimizer.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
    seconds = statistics.median(times[warm_up:])
    peak = torch.cuda.max_memory_allocated()
    row = {"tokens_per_s": batch * seq_len / seconds, "ms": seconds * 1e3, "peak_gib": peak / GIB, "losses": losses}
    if side in OURS:
        recompute = "cheap" if side == "cheap" else "none"
        row["estimated_gib"] = config.training_memory(batch, seq_len, recompute=recompute).peak / GIB
        row["ran"] = ligerformer.kernels.explain().splitlines()
    return row


def versions() -> dict[str, str]:
    """Machine and packages."""
    found = {"gpu": torch.cuda.get_device_name()}
    for package in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=SIDES, default=["ours", "hf", "liger"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--here", choices=SIDES, help=argparse.SUPPRESS)  # measure one side in this process
    args = parser.parse_args()
    config = ligerformer.presets.load(args.model)
    if args.here:
        print(json.dumps(measure(args.here, config, args.batch, args.seq_len, args.steps)))
        return
    setting = {"model": args.model, "batch": args.batch, "seq_len": args.seq_len, "steps": args.steps, "date": time.strftime("%Y-%m-%d")}
    rows = {}
    for side in args.only:
        command = [sys.executable, __file__, "--here", side, "--model", args.model]
        command += ["--batch", str(args.batch), "--seq-len", str(args.seq_len), "--steps", str(args.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows[side] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.stderr[-2000:]}
        row = rows[side]
        if "failed" in row:
            print(f"{side:6} failed: {row['failed'].strip().splitlines()[-1]}")
        else:
            loss = f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
            print(
                f"{side:6} {row['tokens_per_s']:9,.0f} tokens/s  {row['ms']:8.1f} ms  peak {row['peak_gib']:6.2f} GiB  {loss}", flush=True
            )
            if "estimated_gib" in row:
                print(f"       estimated {row['estimated_gib']:.2f} GiB")
    if args.out:
        args.out.write_text(json.dumps({**setting, "versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
