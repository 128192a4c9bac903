"""Results as JSON: dataclasses are written by their fields, and read back with checks.

A field with a default is left out of the JSON if it is `None`; every other one is always there.
"""

import math
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints


T = TypeVar("T")


def to_json(value: Any) -> Any:
    """A result as `json` writes it; NaN and infinities, which JSON doesn't have, become `None`."""
    if is_dataclass(value):
        return {
            of.name: to_json(entry)
            for of in fields(value)
            if (entry := getattr(value, of.name)) is not None or of.default is MISSING
        }
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: type[T], value: Any, source: object) -> T:
    """Read what [`to_json`] wrote. Fields that `kind` doesn't have are ignored.

    Args:
        kind: The type to read.
        value: What `json` read.
        source: File that it is from, for messages.

    Raises:
        ValueError: if something is missing or of another type; the message names it and the source.
    """
    try:
        return _read(kind, value, "")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source}: {error.args[0]}.") from error


def _read(kind: Any, value: Any, place: str) -> Any:
    """`place` is the value's path in the file."""
    if get_origin(kind) in (Union, UnionType):
        (inner,) = set(get_args(kind)) - {NoneType}
        return None if value is None else _read(inner, value, place)
    if is_dataclass(kind):
        return _read_fields(kind, _expect(dict, value, place), place)
    if get_origin(kind) is dict:
        entries = _expect(dict, value, place)
        return {key: _read(get_args(kind)[1], entry, f"{place}{key}.") for key, entry in entries.items()}
    if get_origin(kind) in (list, tuple):
        entries = enumerate(_expect(list, value, place))
        return get_origin(kind)(_read(get_args(kind)[0], entry, f"{place}{number}.") for number, entry in entries)
    if kind is Any:
        return value
    if kind is float:
        return math.nan if value is None else float(_expect((int, float), value, place))
    return _expect(kind, value, place)


def _read_fields(kind: Any, entries: dict[str, object], place: str) -> Any:
    hints = get_type_hints(kind)
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in entries]
    if missing:
        raise KeyError(f"no {', '.join(place + key for key in missing)}")
    given = {field.name: field.name for field in fields(kind) if field.name in entries}
    return kind(**{name: _read(hints[name], entries[key], f"{place}{key}.") for name, key in given.items()})


def _expect(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{place.removesuffix('.') or 'its content'} is {value!r:.40}")
    return value
