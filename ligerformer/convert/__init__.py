"""Checkpoints in and out: safetensors, the hub, config translation, tensor rules with inverses."""

from .errors import CheckpointError
from .families import CannotExpress
from .loading import config_from_hf, from_hf
from .native import load, save
from .report import LoadReport, Source
from .saving import save_hf

__all__ = ["CannotExpress", "CheckpointError", "LoadReport", "Source", "config_from_hf", "from_hf", "load", "save", "save_hf"]
