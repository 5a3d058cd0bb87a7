"""Ops: pure functions on tensors, each with a plain-torch reference and Triton kernels. No op knows a model."""

from .attention import attention
from .dispatch import OPS, explain, use

__all__ = ["OPS", "attention", "explain", "use"]
