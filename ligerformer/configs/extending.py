"""Types of one's own: :func:`register`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from . import registry
from .block import BlockConfig, NormConfig, ResidualConfig

T = TypeVar("T", bound=type)

BASES: dict[str, type[BlockConfig]] = {"norm": NormConfig, "residual": ResidualConfig}  # of a slot's configs; BlockConfig elsewhere
RESERVED = ("type", "slot", "multiplier")  # what else stands in a block's dict: a config would never see them


def register(slot: str, type_: str) -> Callable[[T], T]:
    """Class decorator that adds a block of your own: ``@register("attention", "differential")``.

    The class is a ``torch.nn.Module`` built as ``Block(config, model_config, layer_index)``; one of the slot ``residual`` has two such
    module classes, ``Site`` and ``Ends``. Its config dataclass stands in the attribute ``Config``: frozen, deriving from ``BlockConfig``
    (``NormConfig`` for a norm, ``ResidualConfig`` for a residual). From then on ``dict(type="differential", ...)`` is understood in that
    slot. Raises a ValueError for an unknown slot, the closed one (``rope_scaling``), a name that is taken or a field named ``type``,
    ``slot`` or ``multiplier``; a TypeError for a class without such a ``Config``, or a residual without its two parts.
    """

    def add(cls: T) -> T:
        registry.types(slot)
        registry.check_free(slot, type_)
        if slot == "rope_scaling":
            raise ValueError(
                "slot 'rope_scaling' is closed: Rope itself knows its types; write an attention with a rope of its own instead"
            )
        own = _own_config(cls, BASES.get(slot, BlockConfig))
        if slot == "residual" and not (hasattr(cls, "Site") and hasattr(cls, "Ends")):
            raise TypeError(f"{cls.__name__} lacks a part of a residual block; expected the module classes 'Site' and 'Ends'")
        registry.config(slot, type_)(own)
        registry.block(own)(cls)
        return cls

    return add


def _own_config(cls: type, base: type[BlockConfig]) -> Any:
    own = getattr(cls, "Config", None)
    if not isinstance(own, type) or "__dataclass_params__" not in vars(own):  # undecorated, it would inherit its base's fields alone
        raise TypeError(f"{cls.__name__} has no config class; expected a frozen dataclass in the attribute 'Config'")
    if not issubclass(own, base):
        raise TypeError(f"the config class of {cls.__name__} does not derive from {base.__name__}, as those of its slot do")
    fields = {field.name for field in dataclasses.fields(own)}
    for name in RESERVED:
        if name in fields:
            raise ValueError(f"the config class of {cls.__name__} has a field {name!r}, a key that every block's dict may hold; rename it")
    return own
