"""Random inputs on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..harness import DEVICE


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    """A normal tensor, a leaf that requires a gradient unless told otherwise."""
    return (torch.randn(shape, device=DEVICE) * std).to(dtype).requires_grad_(grad)


def labels(rows: int, vocabulary: int) -> Tensor:
    """Labels, an eighth of them ignored (-100)."""
    drawn = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    return torch.where(torch.rand(rows, device=DEVICE) < 0.125, -100, drawn)


def all_labels(rows: int, vocabulary: int) -> Tensor:
    """Labels, none of them ignored."""
    return torch.randint(0, vocabulary, (rows,), device=DEVICE)
