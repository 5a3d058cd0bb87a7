"""Tile sizes of attention's kernels: a table by kernel, device, dtype and head_dim. Nothing is measured at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._triton import DeviceInfo


class Tiles(NamedTuple):
    """Rows of queries and of keys in a tile, warps, and stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Tile sizes by kernel, then by (class of the device and dtype, head_dim up to). "half": fp16 and bf16; large: at least 160 KB of shared
# memory a block (A100); small: other NVIDIA GPUs (99 KB); hip: AMD, 64 KB. fp32 runs without tensor cores.
# On Hopper eight warps are two groups of 64 rows: 64 rows of scores over eight warps are computed twice. Its tiles were timed on an H200;
# datacentre Blackwell takes them too, but where it has its own.
_TILES: dict[str, dict[tuple[str, int], Tiles]] = {
    "forward": {
        ("large half", 64): Tiles(128, 128, 8, 3),
        ("large half", 128): Tiles(128, 64, 8, 3),
        ("large half", 256): Tiles(128, 32, 8, 2),
        ("hopper half", 64): Tiles(128, 64, 4, 3),
        ("hopper half", 128): Tiles(128, 128, 8, 3),
        ("hopper half", 256): Tiles(128, 64, 8, 2),
        ("small half", 64): Tiles(128, 64, 4, 2),
        ("small half", 128): Tiles(64, 64, 4, 2),
        ("small half", 256): Tiles(64, 32, 4, 1),
        ("hip half", 64): Tiles(128, 64, 4, 1),
        ("hip half", 128): Tiles(128, 64, 4, 1),
        ("hip half", 256): Tiles(64, 32, 4, 1),
        ("fp32", 64): Tiles(64, 32, 4, 2),
        ("fp32", 128): Tiles(32, 32, 8, 1),
        ("fp32", 256): Tiles(32, 16, 8, 1),
    },
    "few": {  # few queries: block_m is the most rows (queries x heads) of a tile
        ("half", 128): Tiles(64, 64, 4, 2),
        ("half", 256): Tiles(16, 64, 4, 1),
        ("fp32", 128): Tiles(16, 32, 4, 1),
        ("fp32", 256): Tiles(16, 16, 4, 1),
    },
    "dkdv": {
        ("large half", 64): Tiles(64, 128, 8, 2),
        ("large half", 128): Tiles(32, 128, 8, 2),
        ("large half", 256): Tiles(32, 64, 8, 1),
        ("hopper half", 64): Tiles(64, 64, 4, 2),
        ("hopper half", 128): Tiles(32, 64, 4, 3),
        ("hopper half", 256): Tiles(64, 64, 8, 2),
        ("blackwell half", 256): Tiles(32, 64, 8, 2),
        ("small half", 64): Tiles(64, 64, 4, 2),
        ("small half", 128): Tiles(32, 64, 4, 2),
        ("small half", 256): Tiles(16, 32, 4, 1),
        ("hip half", 64): Tiles(32, 64, 4, 1),
        ("hip half", 128): Tiles(32, 64, 4, 1),
        ("hip half", 256): Tiles(16, 32, 4, 1),
        ("fp32", 64): Tiles(32, 32, 4, 1),
        ("fp32", 128): Tiles(16, 32, 4, 1),
        ("fp32", 256): Tiles(16, 16, 4, 1),
    },
    "dq": {
        ("large half", 64): Tiles(128, 64, 8, 2),
        ("large half", 128): Tiles(128, 32, 8, 2),
        ("large half", 256): Tiles(64, 32, 8, 1),
        ("hopper half", 64): Tiles(64, 64, 4, 3),
        ("hopper half", 128): Tiles(64, 64, 4, 2),
        ("hopper half", 256): Tiles(128, 32, 8, 2),
        ("small half", 64): Tiles(64, 64, 4, 2),
        ("small half", 128): Tiles(64, 32, 4, 2),
        ("small half", 256): Tiles(32, 16, 4, 1),
        ("hip half", 64): Tiles(64, 32, 4, 1),
        ("hip half", 128): Tiles(64, 32, 4, 1),
        ("hip half", 256): Tiles(32, 16, 4, 1),
        ("fp32", 64): Tiles(32, 32, 4, 1),
        ("fp32", 128): Tiles(32, 16, 8, 1),
        ("fp32", 256): Tiles(16, 16, 4, 1),
    },
}


def tiles(kernel: str, head_dim: int, dtype: torch.dtype, info: DeviceInfo) -> Tiles:
    """The tile sizes of one kernel ("forward", "few", "dkdv", "dq") for a head_dim, a dtype and a device: a table, no measuring."""
    if dtype == torch.float32:
        kinds = ("fp32",)
    elif kernel == "few":
        kinds = ("half",)
    elif info.vendor == "hip":
        kinds = ("hip half",)
    elif info.arch in (100, 103):
        kinds = ("blackwell half", "hopper half")
    elif info.arch == 90:
        kinds = ("hopper half",)
    else:
        kinds = ("large half",) if info.arch == 80 else ("small half",)
    found = ((kind, limit) for limit in (64, 128, 256) if head_dim <= limit for kind in kinds)
    return next(_TILES[kernel][key] for key in found if key in _TILES[kernel])
