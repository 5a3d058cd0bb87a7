"""Ops: pure functions on tensors, each with a plain-torch reference and Triton kernels. No op knows a model."""

from .dispatch import OPS, explain, use
from .norms import add_rms_norm, rms_norm
from .qk_norm_rope import qk_norm_rope
from .rope import rope

__all__ = ["OPS", "add_rms_norm", "explain", "qk_norm_rope", "rms_norm", "rope", "use"]
