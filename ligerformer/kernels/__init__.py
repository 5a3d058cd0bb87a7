"""Ops: pure functions on tensors, each with a plain-torch reference and Triton kernels. No op knows a model."""

from .dispatch import OPS, explain, use

__all__ = ["OPS", "explain", "use"]
