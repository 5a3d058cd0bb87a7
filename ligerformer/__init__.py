"""ligerformer: build, convert and train decoder language models out of fused Triton blocks."""

from . import kernels

__version__ = "0.1.0"

__all__ = ["kernels"]
