"""Ops: pure functions on tensors, each with a plain-torch reference and Triton kernels. No op knows a model."""

from .dispatch import OPS, explain, use
from .embedding import embedding
from .glu import geglu, geglu_packed, swiglu, swiglu_packed

__all__ = ["OPS", "embedding", "explain", "geglu", "geglu_packed", "swiglu", "swiglu_packed", "use"]
