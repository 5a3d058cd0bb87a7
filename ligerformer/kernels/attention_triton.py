"""Triton's side of attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def attention_triton(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Not served yet."""
    raise NotImplementedError("attention: the Triton kernels are not in place yet")
