"""Build a small decoder from a config dict, train it on a book, save it, open it again, and let it write.

    python examples/quickstart.py [--steps 900] [--out quickstart-out]

Bytes are the tokens, so no tokenizer is needed. Runs on a CPU with two cores in a few minutes, and unchanged on a GPU, on the Triton kernels.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import time

import torch
from tqdm import tqdm

import ligerformer

TEXT = pathlib.Path(__file__).parent / "data" / "austen.txt"

CONFIG = dict(
    vocab_size=256,
    hidden_size=128,
    num_layers=4,
    max_position_embeddings=1024,
    tie_embeddings=True,
    embed=dict(type="token_embedding"),
    residual=dict(type="add"),  # dict(type="mhc", streams=4) trains the same model with hyper-connections
    layers={
        "main": dict(
            norm=dict(type="rms_norm", eps=1e-5),
            attention=dict(type="softmax_attention", num_heads=4, num_kv_heads=2, head_dim=32, rope=dict(theta=10000.0)),
            mlp=dict(type="gated_mlp", intermediate_size=384, activation="silu"),
        )
    },
    pattern=["main"],
    final_norm=dict(type="rms_norm", eps=1e-5),
    head=dict(type="lm_head"),
    init=dict(std=0.04),
)
BATCH, TOKENS = 8, 256
PEAK_LR, WARMUP = 6e-3, 50


def batch_of(data: torch.Tensor, generator: torch.Generator, device: str) -> torch.Tensor:
    """BATCH random windows of TOKENS bytes each, as ids (BATCH, TOKENS)."""
    starts = torch.randint(len(data) - TOKENS, (BATCH, 1), generator=generator)
    return data[starts + torch.arange(TOKENS)].long().to(device)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: torch.Tensor, device: str, windows: int = 64) -> float:
    """Mean loss in nats a byte over evenly spaced windows of the held-out text, the same ones every time."""
    starts = torch.linspace(0, len(data) - TOKENS - 1, windows).long().unsqueeze(1)
    ids = data[starts + torch.arange(TOKENS)].long().to(device)
    return model(ids, labels=ids).loss.item()


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK_LR * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: torch.nn.Module, text: torch.Tensor, held_out: torch.Tensor, steps: int, device: str) -> tuple[list, list]:
    """AdamW on random windows; returns training losses a step and (step, held-out loss) pairs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    losses, evaluations, start = [], [(0, held_out_loss(model, held_out, device))], time.perf_counter()
    with tqdm(total=steps, unit="step", desc="training") as bar:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            ids = batch_of(text, generator, device)
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            if (step + 1) % 20 == 0 or step + 1 == steps:
                rate = (step + 1) * BATCH * TOKENS / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {losses[-1].item():.3f}, {rate:,.0f} tokens/s")
                bar.update(step + 1 - bar.n)
            if (step + 1) % 100 == 0 or step + 1 == steps:
                evaluations.append((step + 1, held_out_loss(model, held_out, device)))
    return torch.stack(losses).tolist(), evaluations


def draw(losses: list[float], evaluations: list[tuple[int, float]], path: pathlib.Path) -> None:
    """Both losses over steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.7, alpha=0.6, label="training")
    axes.plot(*zip(*evaluations, strict=True), marker="o", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats/byte)", title=f"held-out loss {evaluations[-1][1]:.3f} nats/byte after {len(losses)} steps")
    axes.set_ylim(0, evaluations[0][1] * 1.05)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def save_and_open_again(model: ligerformer.blocks.Decoder, folder: pathlib.Path, ids: torch.Tensor, device: str) -> None:
    """Save in Hugging Face format where a family can express the model, natively elsewhere; the logits must not change by a bit."""
    try:
        ligerformer.save_hf(model, folder)
        again, form = ligerformer.from_hf(folder, device=device), "Hugging Face format"
    except ligerformer.CannotExpress as reason:
        print(f"no Hugging Face family expresses this model ({reason}); saving it natively")
        ligerformer.save(model, folder)
        again, form = ligerformer.load(folder, device=device), "native format"
    with torch.no_grad():
        same = torch.equal(model(ids).logits, again(ids).logits)
    if not same:
        raise SystemExit(f"the logits changed on the way through {folder}")
    print(f"saved to {folder} in {form}, opened again: logits bit-identical")


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--steps", type=int, default=900)
    args.add_argument("--out", type=pathlib.Path, default=pathlib.Path("quickstart-out"))
    args = args.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    text, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    model = ligerformer.build(CONFIG, device=device, seed=0)
    print(ligerformer.summary(model))

    losses, evaluations = train(model, text, held_out, args.steps, device)
    draw(losses, evaluations, args.out / "loss.png")
    print(f"held-out loss: {evaluations[-1][1]:.3f} nats/byte")
    print(f"losses drawn to {args.out / 'loss.png'}")

    save_and_open_again(model, args.out / "model", batch_of(held_out, torch.Generator().manual_seed(1), device), device)

    prompt = "It is a truth universally acknowledged, that "
    ids = torch.tensor([list(prompt.encode())], device=device)
    new = TOKENS - ids.shape[1]  # as far as the model has seen: RoPE does not carry on past the trained length by itself
    written = model.generate(ids, new, temperature=0.7, top_p=0.95, seed=0)[0].tolist()
    print(f"\n{bytes(written).decode(errors='replace')}\n")

    print("what ran, and why:")
    print(ligerformer.kernels.explain())


if __name__ == "__main__":
    main()
