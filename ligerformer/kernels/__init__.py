"""Ops: pure functions on tensors, each with a plain-torch reference and Triton kernels. No op knows a model."""

from .dispatch import OPS, explain, use
from .mhc_coefficients import mhc_coefficients, mhc_pre
from .mhc_stream import mhc_read, mhc_write

__all__ = ["OPS", "explain", "mhc_coefficients", "mhc_pre", "mhc_read", "mhc_write", "use"]
