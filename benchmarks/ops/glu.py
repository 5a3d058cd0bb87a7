"""swiglu, geglu, on two tensors and on one packed tensor. Least bytes: two in, one out; backward three in, two out."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from ligerformer import kernels

from ..harness import Call, Row, Work, peer
from . import draw

silu, gelu = peer("liger_kernel.ops.swiglu"), peer("liger_kernel.ops.geglu")
OURS: dict[str, Call] = {"swiglu": kernels.swiglu, "geglu": kernels.geglu}
EAGER: dict[str, Call] = {"swiglu": lambda a, b: F.silu(a) * b, "geglu": lambda a, b: F.gelu(a, approximate="tanh") * b}
LIGER: dict[str, Call] = {}
if silu and gelu:
    LIGER = {"swiglu": silu.LigerSiLUMulFunction.apply, "geglu": gelu.LigerGELUMulFunction.apply}
PACKED: dict[str, Call] = {"swiglu": kernels.swiglu_packed, "geglu": kernels.geglu_packed}


def _row(op: str, rows: int, width: int) -> Row:
    size = 2.0 * rows * width

    def make(rows: int) -> tuple[Any, ...]:
        return draw.normal(rows, width), draw.normal(rows, width)

    # Liger writes the gradients over its inputs: it is given copies to keep the check's inputs whole, and none where it is timed.
    peers = {"liger": LIGER[op]} if LIGER else {}
    return Row(op, f"{rows}x{width}", rows, make, OURS[op], EAGER[op], Work(3 * size), Work(8 * size), peers)


def _packed_row(op: str, rows: int, width: int) -> Row:
    size = 2.0 * rows * width

    def make(rows: int) -> tuple[Any, ...]:
        return (draw.normal(rows, 2 * width),)

    eager = EAGER[op]
    packed: Call = lambda x: eager(*x.chunk(2, -1))  # noqa: E731
    return Row(op + "_packed", f"{rows}x{width}", rows, make, PACKED[op], packed, Work(3 * size), Work(8 * size))


ROWS = [_row("swiglu", 8192, 14336), _row("geglu", 8192, 14336), _packed_row("swiglu", 8192, 14336), _packed_row("geglu", 16384, 6912)]
