"""cross_entropy. Least bytes: the logits in; backward in again, and their gradient out."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ligerformer import kernels

from ..harness import Call, Row, Work, peer
from . import draw

liger, quack = peer("liger_kernel.transformers.functional"), peer("quack.cross_entropy")


def _eager(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.double() if logits.dtype.itemsize == 8 else logits.float(), labels)


def _row(rows: int, vocabulary: int) -> Row:
    size = 2.0 * rows * vocabulary
    peers: dict[str, Call] = {}
    if liger:  # it writes the gradient over the logits
        peers["liger"] = lambda logits, labels: liger.liger_cross_entropy(logits, labels)
    if quack:
        peers["quack"] = lambda logits, labels: quack.cross_entropy(logits, labels, reduction="mean")

    def make(rows: int) -> tuple[Any, ...]:
        return draw.normal(rows, vocabulary, std=3.0), draw.all_labels(rows, vocabulary)

    return Row(
        "cross_entropy",
        f"{rows}x{vocabulary}",
        rows,
        make,
        kernels.cross_entropy,
        _eager,
        Work(size),
        Work(3 * size),
        peers,
        checked=256,
    )


ROWS = [_row(8192, 128256), _row(4096, 262144), _row(8192, 32000)]
