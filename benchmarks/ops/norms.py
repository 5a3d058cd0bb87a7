"""rms_norm, add_rms_norm, layer_norm. Least bytes: x in, y out; backward dy and x in, dx out. The add: one more in and out, and a gradient in."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ligerformer import kernels

from ..harness import Call, Row, Work, peer
from . import draw

EPS = 1e-6
liger, liger_add = peer("liger_kernel.ops.rms_norm"), peer("liger_kernel.ops.fused_add_rms_norm")
liger_layer, quack = peer("liger_kernel.ops.layer_norm"), peer("quack.rmsnorm")


def _eager(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _eager_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return _eager(summed, weight), summed


def _peers() -> dict[str, Call]:
    peers: dict[str, Call] = {}
    if liger:
        peers["liger"] = lambda x, w: liger.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    if quack:
        peers["quack"] = lambda x, w: quack.rmsnorm(x, w, eps=EPS)
    return peers


def _add_peers() -> dict[str, Call]:
    if not liger_add:
        return {}
    return {"liger": lambda x, r, w: liger_add.LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)}


def _row(rows: int, width: int) -> Row:
    size = 2.0 * rows * width

    def make(rows: int) -> tuple[Any, ...]:
        return draw.normal(rows, width), draw.normal(width)

    return Row(
        "rms_norm",
        f"{rows}x{width}",
        rows,
        make,
        lambda x, w: kernels.rms_norm(x, w, eps=EPS),
        _eager,
        Work(2 * size),
        Work(5 * size),
        _peers(),
        graph=True,
    )


def _add_row(rows: int, width: int) -> Row:
    size = 2.0 * rows * width

    def make(rows: int) -> tuple[Any, ...]:
        return draw.normal(rows, width), draw.normal(rows, width), draw.normal(width)

    return Row(
        "add_rms_norm",
        f"{rows}x{width}",
        rows,
        make,
        lambda x, r, w: kernels.add_rms_norm(x, r, w, eps=EPS),
        _eager_add,
        Work(4 * size),
        Work(8 * size),
        _add_peers(),
        graph=True,
    )


def _layer_row(rows: int, width: int) -> Row:
    size = 2.0 * rows * width

    def make(rows: int) -> tuple[Any, ...]:
        return draw.normal(rows, width), draw.normal(width), draw.normal(width)

    return Row(
        "layer_norm",
        f"{rows}x{width}",
        rows,
        make,
        lambda x, w, b: kernels.layer_norm(x, w, b, eps=EPS),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
        Work(2 * size),
        Work(5 * size),
        {"liger": lambda x, w, b: liger_layer.LigerLayerNormFunction.apply(x, w, b, EPS)} if liger_layer else {},
        graph=True,
    )


ROWS = [_row(*shape) for shape in ((8192, 4096), (32768, 4096), (8192, 1152), (64, 1024), (4096, 16384))]
ROWS += [_add_row(*shape) for shape in ((8192, 4096), (16384, 2048))]
ROWS += [_layer_row(8192, 4096)]
