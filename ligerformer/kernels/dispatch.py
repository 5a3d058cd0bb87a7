"""Which implementation of an op runs, chosen per call from its tensors.

Every op has two: ``reference`` (plain torch, any device, any floating dtype) and ``triton``. The public function of an op
checks its arguments and then calls its :class:`Op`, which chooses, keeps count of what ran and why (:func:`explain`), and
logs the first time that a call on a GPU is not served by Triton.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ._triton import HAS_TRITON, INTERPRETED

logger = logging.getLogger("ligerformer")

Mode = Literal["auto", "triton", "reference"]
TRITON_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

OPS: dict[str, Op] = {}  # every op by its public name; contract tests walk it

_mode: Mode = "auto"
_ran: Counter[tuple[str, str, str, str]] = Counter()  # (op, direction, implementation, why) -> calls
_logged: set[tuple[str, str]] = set()


class Op:
    """A public op: its name, its two implementations and what Triton cannot serve.

    ``reference`` and ``triton`` take the same arguments. ``unsupported(*args, **kwargs)`` returns the reason why Triton does not
    serve this call, or None; device and dtype of the first argument are looked at here already.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        triton: Callable[..., Any],
        unsupported: Callable[..., str | None] | None = None,
    ) -> None:
        if name in OPS:
            raise ValueError(f"op {name!r} is registered already")
        self.name, self.reference, self.triton, self.unsupported = name, reference, triton, unsupported
        OPS[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = self.why_not_triton(args, kwargs)
        if reason is None:
            return self.triton(*args, **kwargs)
        ran(self.name, "forward", "reference", reason, args[0].is_cuda)
        return self.reference(*args, **kwargs)

    def why_not_triton(self, args: tuple[Any, ...], kwargs: dict[str, Any], demanded: bool | None = None) -> str | None:
        """None where Triton serves the call, else the reason; an error where Triton was demanded and cannot.

        ``demanded`` overrides the scope: True for a call that asked for Triton itself, False for one that only wants to know.
        """
        x: Tensor = args[0]
        if _mode == "reference" and demanded is None:
            return "asked for by kernels.use('reference')"
        by = "impl='triton' was given" if demanded else "kernels.use('triton') is in force"
        demanded = _mode == "triton" if demanded is None else demanded
        device = x.device.type
        if device in ("xpu", "npu", "hpu"):
            raise ValueError(f"{self.name}: tensors are on {x.device}, which is not supported; use a CUDA or ROCm GPU, or the CPU")
        if not HAS_TRITON:
            reason: str | None = "triton is not installed"
        elif device != "cuda" and not (device == "cpu" and INTERPRETED and demanded):
            reason = f"tensors are on {device}"
        elif x.is_floating_point() and x.dtype not in TRITON_DTYPES:
            reason = f"{str(x.dtype).removeprefix('torch.')} is served by the reference alone"
        else:
            reason = self.unsupported(*args, **kwargs) if self.unsupported is not None else None
        if reason is not None and demanded:
            raise ValueError(f"{self.name}: {by}, but Triton cannot serve this call: {reason}")
        return reason


def mode() -> Mode:
    """What the innermost :func:`use` scope asks for."""
    return _mode


def ran(op: str, direction: str, implementation: str, why: str, on_gpu: bool = False) -> None:
    """Count one call of an implementation. Triton ops call it where they launch, so that compiled graphs are counted too."""
    if torch.compiler.is_compiling():
        _ran_while_tracing(op, direction, implementation, why)
        return
    _ran[op, direction, implementation, why] += 1
    if on_gpu and implementation == "reference" and _mode != "reference" and (op, why) not in _logged:
        _logged.add((op, why))
        logger.warning("%s runs on the reference (slow) on this GPU: %s", op, why)


@torch.compiler.assume_constant_result
def _ran_while_tracing(op: str, direction: str, implementation: str, why: str) -> bool:
    _ran[op, direction, implementation, why + " (counted once, when traced)"] += 1
    return True


@contextlib.contextmanager
def use(mode: Mode) -> Iterator[None]:
    """Within the scope, run every op on this implementation. Process-wide; the backward follows what its forward ran on.

    "auto" chooses per call; "triton" raises a ValueError where Triton cannot serve a call; "reference" takes plain torch.
    """
    global _mode
    if mode not in ("auto", "triton", "reference"):
        raise ValueError(f"kernels.use: mode is {mode!r}; expected 'auto', 'triton' or 'reference'")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def explain(*, reset: bool = False) -> str:
    """A table of what ran since the start (or the last reset): op, direction, implementation, number of calls, why.

    "remade" counts outputs that a backward made again rather than kept. The backward of a reference (of a library's attention too), where
    there was one, ran in plain torch; it is listed with its forward and not counted.
    """
    rows = [("op", "direction", "implementation", "calls", "why")]
    for (op, direction, implementation, why), calls in sorted(_ran.items()):
        if implementation != "triton" and direction == "forward":
            direction = "forward (backward in plain torch)"
        rows.append((op, direction, implementation, str(calls), why))
    if reset:
        _ran.clear()
    if len(rows) == 1:
        return "no op has run"
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(r[:4], widths, strict=True)), r[4]]).rstrip() for r in rows)
