"""ligerformer: build, convert and train decoder language models out of fused Triton blocks."""

from . import blocks, configs, kernels
from .blocks import build
from .capture import CapturedStep
from .configs import ModelConfig, presets, register
from .convert import CannotExpress, config_from_hf, from_hf, load, save, save_hf
from .summary import summary

__version__ = "0.1.0"

__all__ = [
    "CannotExpress",
    "CapturedStep",
    "ModelConfig",
    "blocks",
    "build",
    "config_from_hf",
    "configs",
    "from_hf",
    "kernels",
    "load",
    "presets",
    "register",
    "save",
    "save_hf",
    "summary",
]
