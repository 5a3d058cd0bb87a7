r"""Reading and writing n residual streams with given coefficients (manifold-constrained hyper-connections, arXiv 2512.24880).

    read:   u      = sum_i pre_i x_i
    write:  x'_o   = post_o y + sum_i mix[o, i] x_i

in fp32 (fp64 for fp64 inputs), rounded once. In elements of C a token, read moves n + 1 and write 2n + 1 forward; backward, read
moves 2n + 1 and write 3n + 2. Saved for the backward: the inputs, nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import has_shape, is_tensor, same_device
from .dispatch import Op
from .mhc_coefficients import MAX_STREAMS, _wide

__all__ = ["mhc_read", "mhc_write"]


def _mhc_read_reference(x: Tensor, pre: Tensor) -> Tensor:
    wide = _wide(x, pre)
    return (pre.to(wide).unsqueeze(-1) * x.to(wide)).sum(-2).to(x.dtype)


def _mhc_write_reference(x: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    wide = _wide(x, y, post, mix)
    with torch.autocast(x.device.type, enabled=False):
        mixed = mix.to(wide) @ x.to(wide)  # (..., n, C)
    return (post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(-2) + mixed).to(torch.promote_types(x.dtype, y.dtype))


_NO_KERNEL = "no Triton kernel serves it"
_read = Op("mhc_read", _mhc_read_reference, _mhc_read_reference, lambda *_: _NO_KERNEL)
_write = Op("mhc_write", _mhc_write_reference, _mhc_write_reference, lambda *_: _NO_KERNEL)


def _check_streams(op: str, x: Tensor) -> None:
    is_tensor(op, "x", x)
    if x.dim() < 2 or not 1 <= x.shape[-2] <= MAX_STREAMS or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., n, C) with 1 <= n <= {MAX_STREAMS} streams and C >= 1")


def mhc_read(
    x: Tensor,  # (..., n, C)
    pre: Tensor,  # (..., n)
    /,
) -> Tensor:
    """What a sublayer reads of the streams ``x``: sum_i pre_i x_i, (..., C), in ``x``'s dtype.

    Summed in fp32 (fp64 where an input is fp64) and rounded once. ``pre`` may have another dtype; its gradient has that. n is 1 to 8.
    Raises TypeError or ValueError that names the argument. Cost and source: this module's docstring.
    """
    _check_streams("mhc_read", x)
    is_tensor("mhc_read", "pre", pre)
    has_shape("mhc_read", "pre", pre, x.shape[:-1])
    same_device("mhc_read", x=x, pre=pre)
    return _read(x, pre)


def mhc_write(
    x: Tensor,  # (..., n, C)
    y: Tensor,  # (..., C)
    post: Tensor,  # (..., n)
    mix: Tensor,  # (..., n, n) [out, in]
    /,
) -> Tensor:
    """The new streams, (..., n, C): stream o is post_o y + sum_i mix[o, i] x_i, with the sublayer's output ``y``.

    Summed in fp32 (fp64 where an input is fp64) and rounded once, to the type that ``x + y`` has. The coefficients may have
    any floating dtype; their gradients have theirs. n is 1 to 8. Raises TypeError or ValueError that names the argument. Cost and source:
    this module's docstring.
    """
    op = "mhc_write"
    _check_streams(op, x)
    for name, tensor in (("y", y), ("post", post), ("mix", mix)):
        is_tensor(op, name, tensor)
    *lead, n, hidden_size = x.shape
    has_shape(op, "y", y, (*lead, hidden_size))
    has_shape(op, "post", post, (*lead, n))
    has_shape(op, "mix", mix, (*lead, n, n))
    same_device(op, x=x, y=y, post=post, mix=mix)
    return _write(x, y, post, mix)
