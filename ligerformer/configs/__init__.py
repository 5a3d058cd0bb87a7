"""What a model is, as data: strict config classes, the registry of block types, presets of published models."""

from . import presets
from .block import BlockConfig, NormConfig, ResidualConfig
from .builtin import (
    AddConfig,
    GatedMLPConfig,
    LMHeadConfig,
    MHCConfig,
    RMSNormConfig,
    SoftmaxAttentionConfig,
    TokenEmbeddingConfig,
)
from .extending import register
from .model import BranchConfig, InitConfig, LayerConfig, ModelConfig
from .registry import unregister
from .rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from .schema import Bound, Config, ConfigError, Slot

__all__ = [
    "AddConfig",
    "BlockConfig",
    "Bound",
    "BranchConfig",
    "Config",
    "ConfigError",
    "DynamicScaling",
    "GatedMLPConfig",
    "InitConfig",
    "LMHeadConfig",
    "LayerConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MHCConfig",
    "ModelConfig",
    "NormConfig",
    "RMSNormConfig",
    "ResidualConfig",
    "RopeConfig",
    "Slot",
    "SoftmaxAttentionConfig",
    "TokenEmbeddingConfig",
    "YarnScaling",
    "presets",
    "register",
    "unregister",
]
