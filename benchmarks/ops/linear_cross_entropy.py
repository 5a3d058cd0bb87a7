"""linear_cross_entropy. Least work: one product forward; three in all."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ligerformer import kernels

from ..harness import Call, Row, Work, peer
from . import draw

liger, cce = peer("liger_kernel.transformers.functional"), peer("cut_cross_entropy")


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return F.cross_entropy(logits.double() if logits.dtype.itemsize == 8 else logits.float(), labels)


def _row(rows: int, width: int, vocabulary: int) -> Row:
    product = 2.0 * rows * width * vocabulary
    peers: dict[str, Call] = {}
    if liger:
        peers["liger"] = liger.liger_fused_linear_cross_entropy
    if cce:
        peers["cce"] = lambda hidden, weight, labels: cce.linear_cross_entropy(hidden, weight, labels)

    def make(rows: int) -> tuple[Any, ...]:
        return draw.normal(rows, width), draw.normal(vocabulary, width, std=width**-0.5), draw.all_labels(rows, vocabulary)

    return Row(
        "linear_cross_entropy",
        f"{rows}x{width}x{vocabulary}",
        rows,
        make,
        kernels.linear_cross_entropy,
        _eager,
        Work(flops=product),
        Work(flops=3 * product),
        peers,
        checked=512,
    )


SHAPES = ((2048, 4096, 128256), (8192, 4096, 128256), (16384, 2048, 128256), (8192, 1152, 262144), (32768, 4096, 128256))
ROWS = [_row(*shape) for shape in SHAPES]
