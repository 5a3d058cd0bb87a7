"""kl_div, jsd and tvd. Least bytes, forward and backward apart: both inputs in; then the gradient out and one input in once more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerformer import kernels

from ..harness import Call, Row, Work, peer
from . import draw

liger_kl, liger_jsd, liger_tvd = (peer(f"liger_kernel.ops.{name}") for name in ("kl_div", "jsd", "tvd"))


def _jsd(x: Tensor, y: Tensor) -> Tensor:
    mixture = torch.log((x.exp() + y.exp()) / 2)
    return (y.exp() * (y - mixture) + x.exp() * (x - mixture)).sum() / (2 * x.shape[0])


EAGER: dict[str, Call] = {
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    "jsd": _jsd,
    "tvd": lambda x, y: (x - y).abs().sum() / (2 * x.shape[0]),
}
OURS: dict[str, Call] = {"kl_div": kernels.kl_div, "jsd": kernels.jsd, "tvd": kernels.tvd}
LIGER: dict[str, Call] = {}
if liger_kl and liger_jsd and liger_tvd:
    LIGER = {
        "kl_div": lambda x, y: liger_kl.LigerKLDivLossFunction.apply(x, y, "batchmean", False, 1e-10),
        "jsd": lambda x, y: liger_jsd.LigerJSDFunction.apply(x, y, None, 0.5, -100),
        "tvd": lambda x, y: liger_tvd.LigerTVDLossFunction.apply(x, y, None, "batchmean", -100),
    }


def _row(op: str, rows: int, vocabulary: int, dtype: torch.dtype) -> Row:
    size = float(dtype.itemsize) * rows * vocabulary

    def distribution(rows: int, logarithm: bool) -> Tensor:
        logits = torch.randn(rows, vocabulary, device=draw.DEVICE) * 3
        return (logits.log_softmax(-1) if logarithm else logits.softmax(-1)).to(dtype)

    def make(rows: int) -> tuple[Any, ...]:
        student, teacher = distribution(rows, op != "tvd"), distribution(rows, op == "jsd")
        return student.requires_grad_(), teacher

    peers = {"liger": LIGER[op]} if LIGER else {}
    shape = f"{rows}x{vocabulary} {str(dtype).removeprefix('torch.')}"
    return Row(op, shape, rows, make, OURS[op], EAGER[op], Work(2 * size), Work(4 * size), peers, checked=128)


ROWS = [
    _row("kl_div", 4096, 128256, torch.float32),
    _row("jsd", 4096, 128256, torch.float32),
    _row("jsd", 4096, 128256, torch.bfloat16),
    _row("tvd", 4096, 128256, torch.float32),
]
