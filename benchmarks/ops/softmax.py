"""softmax, sparsemax. Least bytes: x in, the result out; backward the result and its gradient in, one out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.sparsemax import _sparsemax_reference

from ..harness import Call, Row, Work, peer
from . import draw

liger_soft, liger_sparse, quack = (peer(name) for name in ("liger_kernel.ops.softmax", "liger_kernel.ops.sparsemax", "quack.softmax"))


def _softmax_peers() -> dict[str, Call]:
    peers: dict[str, Call] = {}
    if liger_soft:
        peers["liger"] = liger_soft.LigerSoftmaxFunction.apply
    if quack:
        peers["quack"] = quack.softmax
    return peers


def _sorted(x: Tensor) -> Tensor:
    return _sparsemax_reference(x, -1)


def _row(op: str, rows: int, width: int, dtype: torch.dtype, ours: Call, eager: Call, peers: dict[str, Call]) -> Row:
    size = float(dtype.itemsize) * rows * width

    def make(rows: int) -> tuple[Any, ...]:
        return (draw.normal(rows, width, dtype=dtype),)

    shape = f"{rows}x{width} {str(dtype).removeprefix('torch.')}"
    return Row(op, shape, rows, make, ours, eager, Work(2 * size), Work(5 * size), peers, checked=256)


SPARSE: dict[str, Call] = {"liger": lambda x: liger_sparse.LigerSparsemaxFunction.apply(x, -1)} if liger_sparse else {}
ROWS = [
    _row("softmax", 8192, 8192, torch.bfloat16, kernels.softmax, lambda x: torch.softmax(x, -1), _softmax_peers()),
    _row("sparsemax", 8192, 4096, torch.float32, kernels.sparsemax, _sorted, SPARSE),
]
