"""The one door to Triton: import, device facts, launch.

Every kernel of the package is launched by :func:`launch`, so that a test can record what would run (which kernel, which
constants, which signature) without a GPU, and compile exactly that ahead of time.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the reference serves every call, and a forced Triton call says so

    class _Absent:
        """Stands in for ``triton`` and ``tl`` while kernel files are imported; a kernel made with it cannot be launched."""

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

        def __getitem__(self, index: Any) -> _Absent:
            return self

    triton = tl = _Absent()  # type: ignore[assignment]

HAS_TRITON = isinstance(getattr(triton, "__version__", None), str)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "DeviceInfo",
    "cdiv",
    "device_info",
    "launch",
    "next_power_of_2",
    "observe_launches",
    "on_device",
    "tl",
    "triton",
]


# On the host: Triton's own are made to be called in kernels too, and take microseconds.


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


@dataclass(frozen=True)
class DeviceInfo:
    """What heuristics may know of a device.

    ``vendor`` is "cuda" or "hip"; ``arch`` the compute capability as an int (90) on "cuda", a name ("gfx942") on "hip";
    ``num_sms`` the number of multiprocessors (compute units).
    """

    vendor: str
    arch: int | str
    num_sms: int
    warp_size: int = 32


@functools.cache
def _query(index: int) -> DeviceInfo:
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return DeviceInfo("hip", props.gcnArchName.split(":")[0], props.multi_processor_count, 64)
    return DeviceInfo("cuda", props.major * 10 + props.minor, props.multi_processor_count)


# Under the interpreter, and wherever launches are only recorded: few programs, so that a grid-sized loop is exercised.
_NO_GPU = DeviceInfo("cuda", 90, 4)


def device_info(device: torch.device) -> DeviceInfo:
    """Facts on the device that a tensor lives on; a fixed stand-in for the CPU (the interpreter)."""
    if device.type != "cuda":
        return _NO_GPU
    return _query(device.index if device.index is not None else torch.cuda.current_device())


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make ``x``'s GPU the current one for the launches inside (Triton launches on the current device, whichever that is)."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


# Called with (kernel, grid, args, meta) instead of the launch itself, while a scope of observe_launches is open.
_observer: Callable[..., None] | None = None


@contextlib.contextmanager
def observe_launches(observer: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Within the scope nothing is launched: ``observer(kernel, grid, args, meta)`` is called in its place."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


# What was launched before: (kernel, device, constants, specialisation of each argument) -> (compiled kernel, its constant arguments).
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch ``kernel`` on a 1-D (or wider) ``grid`` of programs; nothing is launched for an empty grid.

    ``meta`` holds the kernel's constexpr arguments by name, and num_warps / num_stages. A launch like one before goes straight to the
    compiled kernel, past Triton's own look at every argument.
    """
    if 0 in grid:
        return
    if _observer is not None:
        _observer(kernel, grid, args, meta)
        return
    if INTERPRETED or torch.version.hip:  # (AMD kernels are specialised by the size of tensors too)
        kernel[grid](*args, **meta)
        return
    key = (kernel, torch.cuda.current_device(), tuple(meta), *meta.values(), *map(_specialisation, args))
    known = _compiled.get(key)
    if known is None:
        constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = kernel[grid](*args, **meta), constants
    else:
        known[0][(*grid, 1, 1)[:3]](*args, *known[1])


def _specialisation(x: Any) -> Any:
    """What a compiled kernel may assume of an argument: at least as fine as Triton's own distinctions."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if x.__class__ is int:
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    return x.__class__
