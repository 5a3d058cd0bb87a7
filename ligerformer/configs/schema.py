"""Strict configs: frozen dataclasses that are read from plain data and say exactly what is wrong with it.

A config class is a frozen dataclass deriving from :class:`Config`. Its annotations are its schema: ``int``, ``float``, ``bool``, ``str``,
``Literal``, ``tuple[T, ...]``, ``dict[str, T]`` (kept as a FrozenDict), a nested config class, ``T | None``, or ``Annotated[Config, Slot("norm")]`` for a block whose class is found by
its ``type`` key in the registry. Nothing is ever dropped: an unknown key is an error, at any depth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from . import registry

JSON = Any  # what json.loads returns


class ConfigError(ValueError):
    """A config that cannot be used: names the dotted path, the value that came, and what is allowed there."""


class FrozenDict(Mapping[str, Any]):
    """An immutable, hashable mapping in insertion order."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))  # as equality does, whatever the order

    def __repr__(self) -> str:
        return repr(self._items)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Marks a field that holds a block of this slot: ``Annotated[Config, Slot("norm")]``."""

    name: str


@dataclasses.dataclass(frozen=True)
class Bound:
    """Marks a number's range: ``Annotated[int, Bound(1)]`` is at least 1; ``above=0.0`` excludes the end itself."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def complaint(self, value: float) -> str | None:
        """What was expected, where ``value`` is out of range (or not finite); else None."""
        if not math.isfinite(value):
            return "a finite number"
        if self.at_least is not None and value < self.at_least:
            return f"at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"more than {self.above:g}"
        if self.at_most is not None and value > self.at_most:
            return f"at most {self.at_most:g}"
        return None


PositiveInt = Annotated[int, Bound(at_least=1)]
PositiveFloat = Annotated[float, Bound(above=0.0)]
NonNegativeInt = Annotated[int, Bound(at_least=0)]
NonNegativeFloat = Annotated[float, Bound(at_least=0.0)]
Finite = Annotated[float, Bound()]


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of every config class. ``slot`` and ``type`` are set by registration, on block configs alone."""

    slot: ClassVar[str] = ""
    type: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every field, however the object is made (from a dict, by the constructor, by ``replace``)."""
        for name, hint in hints(self.__class__).items():
            object.__setattr__(self, name, parse(hint, getattr(self, name), name))
        self.check()

    def check(self) -> None:
        """Raise :class:`ConfigError` where fields contradict each other. The path in the error is relative to this config."""

    def resolve(self, model: Any) -> typing.Self:
        """This config with derived values filled in, given the model's sizes (a ``ModelConfig`` under construction)."""
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, JSON], path: str = "", *, beside: Iterable[str] = ()) -> typing.Self:
        """Read plain data; ``path`` is where it stands in the whole config, ``beside`` what else its dict may hold, both for errors."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path or cls.__name__}: is {data!r}; expected a dict")
        names = hints(cls)
        given = {k: v for k, v in data.items() if not (k == "type" and cls.type)}
        if cls.type and data.get("type", cls.type) != cls.type:
            raise ConfigError(f"{join(path, 'type')}: is {data['type']!r}; expected {cls.type!r}")
        unknown = [k for k in given if k not in names]
        if unknown:
            raise ConfigError(
                "; ".join(f"{join(path, k)}: unknown key (value {given[k]!r}){nearest(str(k), [*names, *beside])}" for k in unknown)
                + f"; allowed: {', '.join(names)}"
            )
        missing = [f.name for f in dataclasses.fields(cls) if f.name in names and f.name not in given and not has_default(f)]
        if missing:
            raise ConfigError("; ".join(f"{join(path, k)}: is missing; expected {describe(names[k])}" for k in missing))
        parsed = {k: parse(names[k], v, join(path, k)) for k, v in given.items()}
        with at(path):
            return cls(**parsed)

    def to_dict(self) -> dict[str, JSON]:
        """Plain JSON data, every field written out; ``from_dict`` of it gives an equal config."""
        data = {"type": self.type} if self.type else {}
        return data | {name: to_plain(getattr(self, name)) for name in hints(self.__class__)}


@contextlib.contextmanager
def at(path: str) -> Iterator[None]:
    """Put ``path`` before the message of a ConfigError raised inside (whose own path is relative)."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(join(path, error)) from None


def hints(cls: Any) -> dict[str, Any]:
    """The fields of a config class and their annotations, in order."""
    return _hints(cls)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether the field may be left out."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def join(path: str, name: Any) -> str:
    """``a.b`` out of ``a`` and ``b``."""
    return f"{path}.{name}" if path else str(name)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """``; did you mean 'x'?`` where one of ``allowed`` is close, else nothing."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse(hint: Any, value: JSON, path: str) -> Any:
    """``value`` as the annotated type, or a :class:`ConfigError` that says where, what came and what was expected."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _parse_annotated(args[0], args[1], value, path)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [a for a in args if a is not type(None)]
        return parse(inner, value, path)
    if origin is Literal:
        if value not in args or (isinstance(value, bool) and True not in args):
            raise ConfigError(f"{path}: is {value!r}; expected {describe(hint)}{nearest(str(value), map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path}: is {value!r}; expected a list of {describe(args[0])}")
        return tuple(parse(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: is {value!r}; expected a dict of {describe(args[1])}")
        for k in value:
            if not isinstance(k, str):
                raise ConfigError(f"{path}: has the key {k!r}; expected strings alone")
        return FrozenDict({k: parse(args[1], v, join(path, k)) for k, v in value.items()})
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(value, path)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    raise ConfigError(f"{path}: is {value!r}; expected {describe(hint)}")


def _parse_annotated(base: Any, mark: Any, value: JSON, path: str) -> Any:
    if isinstance(mark, Slot):
        return parse_block(mark.name, value, path)
    value = parse(base, value, path)
    complaint = mark.complaint(value)
    if complaint:
        raise ConfigError(f"{path}: is {value!r}; expected {complaint}")
    return value


def parse_block(slot: str, value: JSON, path: str, beside: Iterable[str] = ()) -> Config:
    """A block's config of ``slot``, its class found by ``type`` in the registry; ``beside`` as in ``Config.from_dict``."""
    if isinstance(value, Config):
        if value.slot != slot:
            raise ConfigError(f"{path}: is a config of slot {value.slot!r} ({type(value).__name__}); expected one of slot {slot!r}")
        return value
    allowed = registry.types(slot)
    if not isinstance(value, Mapping) or "type" not in value:
        raise ConfigError(f"{path}: is {value!r}; expected a dict with a 'type' out of {', '.join(allowed)}")
    name = value["type"]
    if name not in allowed:
        raise ConfigError(
            f"{join(path, 'type')}: unknown {slot} type {name!r}{nearest(str(name), allowed)}; known: {', '.join(allowed)}; "
            f"add your own with @register({slot!r}, {name!r})"
        )
    return registry.config_class(slot, name).from_dict(value, path, beside=beside)


def describe(hint: Any) -> str:
    """An annotation in words, for errors."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"a {args[1].name} dict" if isinstance(args[1], Slot) else describe(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if a is type(None) else describe(a) for a in args)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        return f"a list of {describe(args[0])}"
    if origin is dict:
        return f"a dict of {describe(args[1])}"
    if isinstance(hint, type) and issubclass(hint, Config):
        return "a dict"
    return {int: "an int", float: "a number", str: "a string", bool: "true or false"}.get(hint, str(hint))


def to_plain(value: Any) -> JSON:
    """Configs, tuples and mappings as dicts and lists."""
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: to_plain(v) for k, v in value.items()}
    return value
