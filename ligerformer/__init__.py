"""ligerformer: build, convert and train decoder language models out of fused Triton blocks."""

from . import kernels
from .configs import ModelConfig, presets, register

__version__ = "0.1.0"

__all__ = ["ModelConfig", "kernels", "presets", "register"]
