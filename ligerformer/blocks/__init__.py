"""What a model is, as modules: embed, norm, rope, attention, mlp, residual, head, layer, decoder."""

from .attention import SoftmaxAttention
from .build import build
from .cache import Cache, KVEntry, KVSpec
from .decoder import Decoder, Output
from .embed import TokenEmbedding
from .head import Head, LMHead
from .init import allocate, constant, initialize, normal, values
from .layer import Layer
from .linear import FusedLinear, Linear
from .mhc import MHC
from .mlp import GatedMLP
from .norm import Norm, RMSNorm
from .residual import Add
from .rope import Rope
from .state import Context, State

__all__ = [
    "MHC",
    "Add",
    "Cache",
    "Context",
    "Decoder",
    "FusedLinear",
    "GatedMLP",
    "Head",
    "KVEntry",
    "KVSpec",
    "LMHead",
    "Layer",
    "Linear",
    "Norm",
    "Output",
    "RMSNorm",
    "Rope",
    "SoftmaxAttention",
    "State",
    "TokenEmbedding",
    "allocate",
    "build",
    "constant",
    "initialize",
    "normal",
    "values",
]
