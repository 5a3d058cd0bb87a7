"""ligerformer: build, convert and train decoder language models out of fused Triton blocks."""

from . import blocks, kernels
from .blocks import build
from .configs import ModelConfig, presets, register

__version__ = "0.1.0"

__all__ = ["ModelConfig", "blocks", "build", "kernels", "presets", "register"]
