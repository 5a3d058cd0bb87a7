"""Ops: pure functions on tensors, each with a plain-torch reference and Triton kernels. No op knows a model."""

from .cross_entropy import cross_entropy
from .dispatch import OPS, explain, use
from .linear_cross_entropy import linear_cross_entropy

__all__ = ["OPS", "cross_entropy", "explain", "linear_cross_entropy", "use"]
