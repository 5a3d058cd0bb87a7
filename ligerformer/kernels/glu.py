"""Gated linear units: ``activation(gate) * up``, with SiLU (SwiGLU) or GELU (GEGLU); Shazeer 2020, arXiv:2002.05202.

    silu(x)      = x * sigmoid(x)
    gelu_tanh(x) = x/2 * (1 + tanh(z)) = x * sigmoid(2z),   z = sqrt(2/pi) * (x + 0.044715 x^3)
    gelu(x)      = x/2 * (1 + erf(x / sqrt(2)))

The activation is rounded to the gate's dtype before it multiplies, as in eager code, so that SwiGLU's forward in bf16 is
bit-identical to ``silu(gate) * up``. (GELU is as exact, but eager's ``1 + tanh`` cancels for negative x, so that bits differ.)

Cost: the forward reads gate and up and writes the product, 3 passes over (rows, width). The backward reads the incoming gradient,
gate and up and writes two gradients, 5 passes. Saved for the backward: the inputs alone; the activation is computed again,
and the product where it would otherwise be kept for what follows (``remake.py``).
The packed forms read both halves of one tensor in place and write both gradients into one tensor.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, dispatch, library, remake
from ._rows import as_rows
from ._triton import cdiv, launch, next_power_of_2, on_device, tl, triton

Activation = Literal["silu", "gelu", "gelu_tanh"]
Approximate = Literal["tanh", "none"]

_WHY = "tensors on a device that Triton serves"
_GELU = {"tanh": "gelu_tanh", "none": "gelu"}  # torch's names for the two forms -> ours
_OP = {"silu": "swiglu", "gelu_tanh": "geglu", "gelu": "geglu"}


# ---- reference ----


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _glu_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return _activate(gate, activation) * up


def _glu_packed_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _activate(gate, activation) * up


# ---- Triton: one program a row and block of columns ----


@triton.jit
def _gelu_tanh_argument(x):
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2z: 2 sqrt(2/pi) outside


@triton.jit
def _cdf(x, ACTIVATION: tl.constexpr):
    """The factor c of activation(x) = x * c(x)."""
    if ACTIVATION == "silu":
        c = tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        c = tl.sigmoid(_gelu_tanh_argument(x))
    else:
        c = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
    return c


@triton.jit
def _slope(x, c, ACTIVATION: tl.constexpr):
    """The derivative of activation(x) = x * c(x), given c. 1 - sigmoid(y) is taken as sigmoid(-y): x multiplies what cancels."""
    if ACTIVATION == "silu":
        slope = c + x * c * tl.sigmoid(-x)
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = c + x * inner * c * tl.sigmoid(-_gelu_tanh_argument(x))
    else:
        slope = c + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1/sqrt(2 pi)
    return slope


@triton.jit
def _glu_forward_kernel(
    gate_ptr,  # (rows, width), row stride gate_stride
    up_ptr,  # (rows, width), row stride up_stride
    out_ptr,  # (rows, width), contiguous
    width,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    activated = gate * _cdf(gate, ACTIVATION)
    activated = activated.to(gate_ptr.dtype.element_ty).to(tl.float32)  # eager rounds here
    tl.store(out_ptr + row * width + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _glu_backward_kernel(
    grad_ptr,  # (rows, width), row stride grad_stride
    gate_ptr,  # (rows, width), row stride gate_stride
    up_ptr,  # (rows, width), row stride up_stride
    grad_gate_ptr,  # (rows, width), row stride grad_gate_stride; not touched unless WANT_GATE
    grad_up_ptr,  # (rows, width), row stride grad_up_stride; not touched unless WANT_UP
    width,
    grad_stride,
    gate_stride,
    up_stride,
    grad_gate_stride,
    grad_up_stride,
    ACTIVATION: tl.constexpr,
    WANT_GATE: tl.constexpr,
    WANT_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    c = _cdf(gate, ACTIVATION)
    if WANT_GATE:
        up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_gate = grad * up * _slope(gate, c, ACTIVATION)
        tl.store(grad_gate_ptr + row * grad_gate_stride + columns, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    if WANT_UP:
        activated = (gate * c).to(gate_ptr.dtype.element_ty).to(tl.float32)
        tl.store(grad_up_ptr + row * grad_up_stride + columns, (grad * activated).to(grad_up_ptr.dtype.element_ty), mask=mask)


# Columns a program takes: 16 elements a thread and tensor, two 16-byte accesses in bf16.
_BLOCK, _NUM_WARPS = 2048, 4


def _meta(width: int) -> dict[str, int]:
    block = min(_BLOCK, max(64, next_power_of_2(width)))
    return {"BLOCK": block, "num_warps": max(1, _NUM_WARPS * block // _BLOCK)}


def _grid(rows: Tensor, meta: dict[str, int]) -> tuple[int]:
    return (rows.shape[0] * cdiv(rows.shape[1], meta["BLOCK"]),)


def _launch_forward(gate: Tensor, up: Tensor, out: Tensor, activation: Activation) -> Tensor:
    """Gate and up are (rows, width) with a last stride of 1."""
    width = gate.shape[1]
    meta = _meta(width)
    with on_device(gate):
        launch(_glu_forward_kernel, _grid(gate, meta), gate, up, out, width, gate.stride(0), up.stride(0), ACTIVATION=activation, **meta)
    return out


def _forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    dispatch.ran(_OP[activation], "forward", "triton", _WHY)
    return _launch_forward(as_rows(gate), as_rows(up), _forward_fake(gate, up, activation), activation)


def _forward_fake(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)


def _packed_forward(gate_up: Tensor, activation: Activation) -> Tensor:
    dispatch.ran(_OP[activation] + "_packed", "forward", "triton", _WHY)
    return _launch_forward(*as_rows(gate_up).chunk(2, dim=1), _packed_forward_fake(gate_up, activation), activation)


def _packed_forward_fake(gate_up: Tensor, activation: Activation) -> Tensor:
    return torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)


def _launch_backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, activation: Activation, want_gate: bool, want_up: bool
) -> None:
    """All (rows, width) with a last stride of 1; an unwanted gradient's tensor is not touched."""
    meta = _meta(gate.shape[1])
    tensors = (grad, gate, up, grad_gate, grad_up)
    with on_device(gate):
        launch(
            _glu_backward_kernel,
            _grid(gate, meta),
            *tensors,
            gate.shape[1],
            *(x.stride(0) for x in tensors),
            ACTIVATION=activation,
            WANT_GATE=want_gate,
            WANT_UP=want_up,
            **meta,
        )


def _backward(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation, want_gate: bool, want_up: bool) -> tuple[Tensor, Tensor]:
    dispatch.ran(_OP[activation], "backward", "triton", _WHY)
    grad_gate, grad_up = _backward_fake(grad, gate, up, activation, want_gate, want_up)
    grad, gate, up = as_rows(grad), as_rows(gate), as_rows(up)
    into_gate = grad_gate.view(gate.shape) if want_gate else gate  # a stand-in: the kernel does not touch it
    into_up = grad_up.view(up.shape) if want_up else up
    _launch_backward(grad, gate, up, into_gate, into_up, activation, want_gate, want_up)
    return grad_gate, grad_up


def _backward_fake(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation, want_gate: bool, want_up: bool) -> tuple[Tensor, Tensor]:
    grad_gate = torch.empty(gate.shape if want_gate else (0,), dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape if want_up else (0,), dtype=up.dtype, device=up.device)
    return grad_gate, grad_up


def _packed_backward(grad: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
    dispatch.ran(_OP[activation] + "_packed", "backward", "triton", _WHY)
    grad_gate_up = _packed_backward_fake(grad, gate_up, activation)
    grad, halves = as_rows(grad), as_rows(gate_up).chunk(2, dim=1)
    _launch_backward(grad, *halves, *as_rows(grad_gate_up).chunk(2, dim=1), activation, True, True)
    return grad_gate_up


def _packed_backward_fake(grad: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


_glu_forward = library.define("glu_forward(Tensor gate, Tensor up, str activation) -> Tensor", _forward, _forward_fake)
_glu_backward = library.define(
    "glu_backward(Tensor grad, Tensor gate, Tensor up, str activation, bool want_gate, bool want_up) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_glu_remake = library.define(
    "glu_remake(Tensor gate, Tensor up, str activation) -> Tensor",
    lambda gate, up, activation: _launch_forward(as_rows(gate), as_rows(up), _forward_fake(gate, up, activation), activation),
    _forward_fake,
)
_glu_packed_forward = library.define("glu_packed_forward(Tensor gate_up, str activation) -> Tensor", _packed_forward, _packed_forward_fake)
_glu_packed_backward = library.define(
    "glu_packed_backward(Tensor grad, Tensor gate_up, str activation) -> Tensor", _packed_backward, _packed_backward_fake
)


def _packed_remake(gate_up: Tensor, activation: Activation) -> Tensor:
    return _glu_remake(*gate_up.chunk(2, dim=-1), activation)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out = _glu_forward(gate, up, activation)
        if any(ctx.needs_input_grad):
            remake.declare(out, _OP[activation], "triton", _glu_remake, (gate, up), activation)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        want_gate, want_up, _ = ctx.needs_input_grad
        grad_gate, grad_up = _glu_backward(grad, gate, up, ctx.activation, want_gate, want_up)
        return grad_gate if want_gate else None, grad_up if want_up else None, None


class _GluPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        out = _glu_packed_forward(gate_up, activation)
        if ctx.needs_input_grad[0]:
            remake.declare(out, _OP[activation] + "_packed", "triton", _packed_remake, (gate_up,), activation)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return _glu_packed_backward(grad, gate_up, ctx.activation), None


# ---- public ----


def _unsupported(gate: Tensor, up: Tensor, activation: Activation) -> str | None:
    return None if up.dtype in dispatch.TRITON_DTYPES else f"up is {up.dtype}, which is served by the reference alone"


def _plain(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    out = _glu_reference(gate, up, activation)
    if out.requires_grad:
        remake.declare(out, _OP[activation], "reference", _glu_reference, (gate, up), activation)
    return out


def _packed_plain(gate_up: Tensor, activation: Activation) -> Tensor:
    out = _glu_packed_reference(gate_up, activation)
    if out.requires_grad:
        remake.declare(out, _OP[activation] + "_packed", "reference", _glu_packed_reference, (gate_up,), activation)
    return out


def _op(name: str) -> dispatch.Op:
    return dispatch.Op(name, _plain, _Glu.apply, _unsupported)


def _packed_op(name: str) -> dispatch.Op:
    return dispatch.Op(name, _packed_plain, _GluPacked.apply)


_SWIGLU, _GEGLU, _SWIGLU_PACKED, _GEGLU_PACKED = _op("swiglu"), _op("geglu"), _packed_op("swiglu_packed"), _packed_op("geglu_packed")


def _check_pair(op: str, gate: Tensor, up: Tensor) -> None:
    checks.is_tensor(op, "gate", gate)
    checks.is_tensor(op, "up", up)
    if gate.dim() == 0:
        raise ValueError(f"{op}: gate has no dimensions; expected (..., width)")
    checks.has_shape(op, "up", up, tuple(gate.shape))
    checks.same_device(op, gate=gate, up=up)


def _check_packed(op: str, gate_up: Tensor) -> None:
    checks.is_tensor(op, "gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"{op}: gate_up has shape {tuple(gate_up.shape)}; expected (..., 2 * width), the gate half before the up half")


def swiglu(gate: Tensor, up: Tensor, /) -> Tensor:
    """``silu(gate) * up``; the forward in bf16 is bit-identical to eager code.

    Args:
        gate: (..., width), floating.
        up: (..., width), gate's shape. Halves of one packed tensor are read in place.

    Returns:
        (..., width) in torch's type promotion of both dtypes.

    Raises:
        TypeError: an argument is not a floating tensor.
        ValueError: shapes or devices differ.
    """
    _check_pair("swiglu", gate, up)
    return _SWIGLU(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, /, *, approximate: Approximate = "tanh") -> Tensor:
    """``gelu(gate) * up``; as :func:`swiglu`, with torch's name for GELU's form.

    ``approximate="tanh"`` is what Hugging Face configs call "gelu_pytorch_tanh" (Gemma); "none" is the exact form, through erf.
    """
    _check_pair("geglu", gate, up)
    checks.one_of("geglu", "approximate", approximate, tuple(_GELU))
    return _GEGLU(gate, up, _GELU[approximate])


def swiglu_packed(gate_up: Tensor, /) -> Tensor:
    """``silu(gate) * up`` of one tensor that holds both; see :func:`swiglu`.

    Args:
        gate_up: (..., 2 * width), floating: gate in the first half of the last dimension, up in the second.

    Returns:
        (..., width) in gate_up's dtype. The gradient is one tensor of gate_up's shape, written once.

    Raises:
        TypeError: gate_up is not a floating tensor.
        ValueError: its last dimension is odd.
    """
    _check_packed("swiglu_packed", gate_up)
    return _SWIGLU_PACKED(gate_up, "silu")


def geglu_packed(gate_up: Tensor, /, *, approximate: Approximate = "tanh") -> Tensor:
    """``gelu(gate) * up`` of one tensor that holds both; see :func:`swiglu_packed` and :func:`geglu`."""
    _check_packed("geglu_packed", gate_up)
    checks.one_of("geglu_packed", "approximate", approximate, tuple(_GELU))
    return _GEGLU_PACKED(gate_up, _GELU[approximate])
