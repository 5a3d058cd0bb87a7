"""Triton ops as torch.library operators: opaque to torch.compile, cheap on the host.

``define`` registers one operator (no autograd: the ``torch.autograd.Function`` of an op stays outside and calls forward and
backward operators; measured, that is the cheapest combination that torch.compile can trace). A call with plain tensors that nothing
traces or watches goes to the implementation at once, past torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# What is passed on as it is; anything else (a tensor of another class, a list) goes through the dispatcher.
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.dtype, int, float, bool, str, type(None)}
_LIBRARY = torch.library.Library("ligerformer", "DEF")


def define(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``ligerformer::<schema>`` and return the callable operator.

    ``impl`` launches kernels on the GPU (on the CPU under Triton's interpreter); ``fake`` allocates the outputs with the right
    shapes, dtypes and strides and launches nothing. No output may alias an input, and none is ever written unless the schema says so.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, impl, "CUDA")
    _LIBRARY.impl(name, impl, "CPU")
    torch.library.register_fake(f"ligerformer::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.ligerformer, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not _PLAIN.issuperset(map(type, args)):
            return operator(*args)
        return impl(*args)

    return call
