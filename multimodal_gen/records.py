"""Dataclasses as JSON data in files: written whole, checked and read back by their fields.

A number that is not finite is the text "inf", "-inf" or "nan". A field of a type with a class
method `parse(text, name=...)` is what that makes of text; what its `str()` gives is written.
"""

import json
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from multimodal_gen.errors import ConfigError, nearest, short
from multimodal_gen.files import MalformedError, read_small_file, write_text
from multimodal_gen.settings import (
    MismatchError,
    Parameter,
    as_plain,
    parameters_of,
    read_json,
)

_RecordT = TypeVar("_RecordT")


def write_record(record: Any, path: Path) -> None:
    """Write a record, all of it or nothing; an older file is replaced."""
    write_text(path, json.dumps(as_plain(record), allow_nan=False) + "\n")


def read_file(path: Path, where: str) -> object:
    """Return the JSON data of a file.

    Args:
        path: the file.
        where: what it is, for messages.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        return read_json(read_small_file(path))
    except MalformedError as error:
        raise ConfigError(f"{where} must be a readable JSON file: {error}") from None


def from_plain(kind: type[_RecordT], data: object, where: str) -> _RecordT:
    """Return JSON data as a dataclass, by the types and bounds of its fields; see `option`.

    Args:
        kind: the dataclass.
        data: what was read.
        where: where it stands, for messages.

    Raises:
        ConfigError: a field is missing, not known, of another type, or out of its bounds.
    """
    known = parameters_of(kind)
    if not isinstance(data, dict):
        raise wrong(where, f"an object with the fields {', '.join(known)}", data)
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ConfigError(
            f"{where} must have no fields but {', '.join(known)}, got {short(unknown)}"
            f"{nearest(unknown[0], known)}"
        )
    missing = sorted(name for name, field in known.items() if field.required and name not in data)
    if missing:
        raise ConfigError(f"{where} must have {', '.join(missing)}, which it lacks")
    fields = {
        name: _value(known[name], known[name].annotation, value, f"{where}.{name}")
        for name, value in data.items()
    }
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(field: Parameter, kind: Any, data: Any, where: str) -> Any:
    """Return JSON data as a field, or an item in one, holds it; `field` has the bounds."""
    origin, members = get_origin(kind), get_args(kind)
    if hasattr(kind, "parse"):
        return kind.parse(_one(field, str, data, where), name=where)
    if isinstance(kind, type) and is_dataclass(kind):
        return from_plain(kind, data, where)
    if origin in (Union, UnionType):
        (inner,) = (each for each in members if each is not NoneType)
        return None if data is None else _value(field, inner, data, where)
    if origin is tuple:
        return _items(field, members, data, where)
    if origin is Literal and data not in members:
        raise wrong(where, f"one of {', '.join(map(repr, members))}", data)
    if origin is Literal:
        return data
    if origin is not None:
        return _mapping(field, members[1], data, where)
    return _one(field, kind, data, where)


def _one(field: Parameter, kind: Any, data: Any, where: str) -> object:
    if kind is float and data in ("inf", "-inf", "nan"):
        return float(data)
    try:
        return field.bounded(data, kind)
    except MismatchError:
        raise wrong(where, replace(field, annotation=kind).expected, data) from None


def _items(field: Parameter, kinds: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    any_length = kinds[1] is Ellipsis
    if not isinstance(data, list) or not (any_length or len(data) == len(kinds)):
        raise wrong(where, "a list" if any_length else f"a list of {len(kinds)}", data)
    return tuple(_value(field, kinds[0], item, f"{where}[{i}]") for i, item in enumerate(data))


def _mapping(field: Parameter, kind: Any, data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise wrong(where, "an object", data)
    if kind is Any:  # what its values are is up to who reads them
        return data
    return {name: _value(field, kind, item, f"{where}.{name}") for name, item in data.items()}


def wrong(where: str, expected: str, got: object) -> ConfigError:
    """Return the error for a value that is not what was expected."""
    return ConfigError(f"{where} must be {expected}, got {short(got)}")
