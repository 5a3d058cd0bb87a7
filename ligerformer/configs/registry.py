"""Slots and the types that fill them.

A slot is a place in a model ("attention", "mlp", "norm" ...), a type one way to fill it. A type has a config class (data) and a
block class (a module). The built-in config classes are registered when ``ligerformer.configs`` is imported and their blocks attached by
``ligerformer.blocks``; a user's type gives both at once with ``register`` (extending.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
B = TypeVar("B", bound=Callable[..., Any])

_configs: dict[str, dict[str, type]] = {}
_blocks: dict[tuple[str, str], Callable[..., Any]] = {}


def slots() -> list[str]:
    """Names of all slots."""
    return list(_configs)


def types(slot: str) -> list[str]:
    """Names of all types registered for ``slot``; a ValueError for an unknown slot."""
    if slot not in _configs:
        raise ValueError(f"unknown slot {slot!r}; known: {', '.join(_configs)}")
    return list(_configs[slot])


def config_class(slot: str, type_: str) -> Any:
    """The config class of a type."""
    return _configs[slot][type_]


def block_class(slot: str, type_: str) -> Any:
    """The block class of a type."""
    try:
        return _blocks[slot, type_]
    except KeyError:
        raise ValueError(f"type {type_!r} of slot {slot!r} has a config and no block; give it one with @register") from None


def check_free(slot: str, type_: str) -> None:
    """A ValueError for a name that is taken."""
    if type_ in _configs[slot]:
        raise ValueError(f"type {type_!r} of slot {slot!r} is registered already, by {_configs[slot][type_].__qualname__}")
    if type_ in _configs:
        raise ValueError(f"type {type_!r} has the name of a slot; choose another name")


def config(slot: str, type_: str) -> Callable[[T], T]:
    """Class decorator for built-in config classes: adds the type, opening the slot where it is new."""

    def add(cls: T) -> T:
        known = _configs.setdefault(slot, {})
        check_free(slot, type_)
        cls.slot, cls.type = slot, type_  # type: ignore[attr-defined]
        known[type_] = cls
        return cls

    return add


def block(config_cls: Any) -> Callable[[B], B]:
    """Decorator for built-in blocks: attaches the module (or function) to its registered config class."""

    def attach(block_: B) -> B:
        _blocks[config_cls.slot, config_cls.type] = block_
        return block_

    return attach


def unregister(slot: str, type_: str) -> None:
    """Take a type away again (tests and notebooks that define a block twice)."""
    del _configs[slot][type_]
    _blocks.pop((slot, type_), None)
