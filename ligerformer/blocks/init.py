"""Storage and initial values of parameters, in one place.

| parameter | initial value |
|---|---|
| matrices (linear, embedding, head) | normal, standard deviation ``init.std`` of the config |
| biases | 0 |
| norm weights | 1 - offset, so that the norm starts as the plain one |
| attention sinks | 0 |
| what a residual or a block of your own adds | what its ``initial_values()`` says |

Each parameter is drawn, in fp32, from a generator of its device seeded by (seed, its name): adding a block moves no other's start, and every
dtype starts from the same numbers (a GPU and the CPU from different ones).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from .fixed import FixedBuffers

Fill = Callable[[Tensor, torch.Generator], None]  # fills an fp32 tensor in place


def normal(std: float) -> Fill:
    """Normal with mean 0."""
    return lambda x, generator: x.normal_(0.0, std, generator=generator)


def constant(value: float) -> Fill:
    """One value everywhere."""
    return lambda x, generator: x.fill_(value)


def values(make: Callable[[], Tensor]) -> Fill:
    """The tensor that ``make`` returns, of the parameter's shape."""
    return lambda x, generator: x.copy_(make())


def allocate(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """Give parameters and persistent buffers of ``model`` (on any device, the meta device as a rule) uninitialised storage; constant
    buffers (:class:`FixedBuffers`) get their values.

    Raises a ValueError for any other buffer, whose values nobody could make again.
    """
    for module_name, module in model.named_modules():
        lost = module._non_persistent_buffers_set - set(module.fixed() if isinstance(module, FixedBuffers) else ())
        if lost:
            raise ValueError(
                f"buffer {sorted(lost)[0]!r} of {module_name or 'the model'} ({type(module).__name__}) would lose its values: "
                f"models are built on the meta device; return it from fixed() of a FixedBuffers, or make it persistent with an initial value"
            )

    def empty(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device=device)

    return model._apply(empty)


@torch.no_grad()
def initialize(model: nn.Module, seed: int, names: Collection[str] | None = None) -> None:
    """Fill parameters and persistent buffers (all, or those named) with their declared initial values.

    Raises a ValueError for one that nobody declares a value of.
    """
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        own |= {name: x for name, x in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set}
        if not own:
            continue
        fills = _declared(model, module)
        for name, parameter in own.items():
            full = f"{module_name}.{name}" if module_name else name
            if names is not None and full not in names:
                continue
            if name not in fills:
                raise ValueError(
                    f"{full} of {type(module).__name__} has no initial value; "
                    f"expected one in its initial_values(), a dict from parameter name to a fill (normal, constant, values)"
                )
            _fill(parameter, fills[name], _seed_of(seed, full))


def _declared(model: nn.Module, module: nn.Module) -> dict[str, Fill]:
    declare = getattr(module, "initial_values", None)
    if declare is not None:
        return declare()
    if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)):  # a block of your own may be made of torch's modules
        return {"weight": normal(model.config.init.std), "bias": constant(0.0)}
    if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
        return {"weight": constant(1.0), "bias": constant(0.0)}
    return {}


def _fill(parameter: Tensor, fill: Fill, seed: int) -> None:
    """Fill a parameter or a buffer in place."""
    if parameter.is_meta:
        return
    generator = torch.Generator(parameter.device).manual_seed(seed)
    if parameter.dtype == torch.float32:
        fill(parameter.data, generator)
    else:  # drawn in fp32 and rounded once, so that every dtype starts from the same numbers
        wide = torch.empty_like(parameter, dtype=torch.float32)
        fill(wide, generator)
        parameter.data.copy_(wide)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") & (2**63 - 1)
