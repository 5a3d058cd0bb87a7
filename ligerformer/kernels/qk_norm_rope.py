"""The norm of queries and keys a head, and their rotation, in one pass (Qwen3, Gemma 3).

    q' = rope(rms_norm(q, q_weight)),  k' = rope(rms_norm(k, k_weight))       norms over D, one weight for all heads

with the roundings of the two ops run one after the other: see ``norms.py`` and ``rope.py``.
"""

from __future__ import annotations

from torch import Tensor

from . import checks
from .dispatch import Op
from .norms import Casting, _rms_norm_reference, check_norm_options
from .rope import _rope_reference, check_rope_inputs


def _qk_norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    q, k = _rms_norm_reference(q, q_weight, eps, offset, casting), _rms_norm_reference(k, k_weight, eps, offset, casting)
    return _rope_reference(q, k, cos, sin)


_qk_norm_rope = Op("qk_norm_rope", _qk_norm_rope_reference, _qk_norm_rope_reference, lambda *args: "it has no Triton kernel yet")


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    /,
    *,
    eps: float,
    offset: float = 0.0,
    casting: Casting = "input",
) -> tuple[Tensor, Tensor]:
    """``rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)`` in one pass; returns new contiguous tensors ``(q', k')``.

    ``q`` is (B, T, Hq, D) and ``k`` (B, T, Hk, D) of one dtype, the weights (D,) of one dtype, ``cos`` and ``sin`` fp32 tables
    (1 or B, T, R/2) that take no gradient. ``eps``, ``offset`` and ``casting`` are those of :func:`rms_norm`. Roundings are those of
    the two ops in sequence.

    Raises TypeError and ValueError for shapes, dtypes and devices that do not fit together.
    """
    check_rope_inputs("qk_norm_rope", q, k, cos, sin)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        checks.is_tensor("qk_norm_rope", name, weight)
        checks.has_shape("qk_norm_rope", name, weight, (q.shape[-1],))
    if k_weight.dtype != q_weight.dtype:
        raise TypeError(f"qk_norm_rope: k_weight has dtype {k_weight.dtype} and q_weight {q_weight.dtype}; expected one dtype")
    checks.same_device("qk_norm_rope", q=q, q_weight=q_weight, k_weight=k_weight)
    check_norm_options("qk_norm_rope", eps, offset, casting)
    return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset, casting)
