"""Ops: pure functions on tensors, each with a plain-torch reference and Triton kernels. No op knows a model."""

from .attention import attention
from .cross_entropy import cross_entropy
from .dispatch import OPS, explain, use
from .divergences import jsd, kl_div, tvd
from .embedding import embedding
from .glu import geglu, geglu_packed, swiglu, swiglu_packed
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .mhc_coefficients import mhc_coefficients, mhc_pre
from .mhc_stream import mhc_read, mhc_write
from .norms import add_rms_norm, rms_norm
from .qk_norm_rope import qk_norm_rope
from .rope import rope
from .softmax import softmax
from .sparsemax import sparsemax

__all__ = [
    "OPS",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "embedding",
    "explain",
    "geglu",
    "geglu_packed",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_cross_entropy",
    "mhc_coefficients",
    "mhc_pre",
    "mhc_read",
    "mhc_write",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "softmax",
    "sparsemax",
    "swiglu",
    "swiglu_packed",
    "tvd",
    "use",
]
