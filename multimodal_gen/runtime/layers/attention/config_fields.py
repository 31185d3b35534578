"""Exact type checks and conversions for the fields of configuration dataclasses.

Annotations understood: bool, int, float, str, `IndexSelector`, `Literal[...]`, `tuple[X, ...]` and
unions of these with each other or with None. A bool is never an int; an int is accepted for a
float; a list is accepted for a tuple.
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from multimodal_gen.errors import ConfigError, nearest
from multimodal_gen.runtime.layers.attention.index_selector import IndexSelector


class _MismatchError(Exception):
    """A value is not of the expected type or out of its range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One field of a configuration dataclass, with what `option` declared of it.

    Attributes:
        name: field name.
        annotation: resolved type.
        default: default value, or `dataclasses.MISSING`.
        help: one line with meaning and unit.
        aliases: other accepted spellings.
        ge: smallest value allowed, for each element of a list too, or None.
        le: largest value allowed, for each element of a list too, or None.
        length: exact number of elements of a list, or None.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""
    aliases: tuple[str, ...] = ()
    ge: float | None = None
    le: float | None = None
    length: int | None = None

    @property
    def required(self) -> bool:
        """Whether the parameter has no default."""
        return self.default is dataclasses.MISSING

    @property
    def expected(self) -> str:
        """What the parameter takes, in words, e.g. "a number in [0, 1]"."""
        return _describe(self.annotation, self)

    def convert(self, value: object, owner: str) -> object:
        """Return `value` in the parameter's type.

        Args:
            value: what the user gave.
            owner: whose parameter it is, for messages.

        Raises:
            ConfigError: `value` has the wrong type or is out of range.
        """
        label = f"`{self.name}` of {owner}"
        try:
            return _convert(value, self.annotation, self, label)
        except _MismatchError:
            hint = nearest(value, _choices(self.annotation)) if isinstance(value, str) else ""
            raise ConfigError(
                f"{label} must be {self.expected}, got {short(value)}{hint}"
            ) from None


def parameters_of(config_cls: type) -> Mapping[str, Parameter]:
    """Return the parameters a configuration dataclass declares, by name, in order."""
    return _parameters_of(config_cls)


@cache
def _parameters_of(config_cls: Any) -> Mapping[str, Parameter]:  # Any: mypy finds it unhashable
    hints = get_type_hints(config_cls)
    found = {
        field.name: Parameter(
            name=field.name,
            annotation=hints[field.name],
            default=field.default,
            **field.metadata,
        )
        for field in dataclasses.fields(config_cls)
        if field.init
    }
    return MappingProxyType(found)


def read_selector(value: object, name: str) -> IndexSelector:
    """Return the selector `value` spells: text, an int, a list of ints, or one already read.

    Raises:
        ConfigError: `value` is none of these.
    """
    if isinstance(value, IndexSelector):
        return value
    # As a value of its own, -5 is the text "-5" read as a number; in a list it is a mistake.
    if type(value) is int and value < 0:
        value = str(value)
    listed = value if isinstance(value, (list, tuple)) else ()
    if not any(isinstance(item, int) and item < 0 for item in listed):
        try:
            return IndexSelector.parse(value, name=name)
        except ConfigError:
            raise
        except ValueError:  # more digits than Python converts
            pass
    raise ConfigError(f"{name} must be {_NAMES[IndexSelector]}, got {short(value)}")


def short(value: object) -> str:
    """Return `repr(value)`, shortened to what fits in a one-line message."""
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):  # an int too long to print, a list inside itself
        return f"something of type {type(value).__name__}"


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def _convert(value: object, annotation: Any, bounds: Parameter, label: str) -> object:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return _convert_union(value, annotation, bounds, label)
    if origin is Literal:
        return _convert_choice(value, get_args(annotation))
    if origin is tuple:
        return _convert_list(value, get_args(annotation)[0], bounds, label)
    if annotation is IndexSelector:
        return read_selector(value, label)
    if annotation is NoneType and value is None:
        return None
    if annotation in (int, float):
        return _convert_number(value, annotation, bounds)
    if annotation in (bool, str) and isinstance(value, annotation):
        return value
    if annotation not in (bool, str, NoneType):
        raise TypeError(f"{label} has an annotation that is not supported: {annotation!r}")
    raise _MismatchError


def _convert_union(value: object, annotation: Any, bounds: Parameter, label: str) -> object:
    members = get_args(annotation)
    if value is None and NoneType in members:
        return None
    for member in members:
        try:
            return _convert(value, member, bounds, label)
        except _MismatchError:
            continue
    raise _MismatchError


def _convert_choice(value: object, choices: tuple[Any, ...]) -> object:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # `version=3` reads as a number
    if isinstance(value, str):
        name = value.strip().casefold()
        matches = [c for c in choices if isinstance(c, str) and c.casefold() == name]
        if len(matches) == 1:
            return matches[0]
    raise _MismatchError


def _convert_list(value: object, element: Any, bounds: Parameter, label: str) -> object:
    if not isinstance(value, (list, tuple)):
        raise _MismatchError
    if bounds.length is not None and len(value) != bounds.length:
        raise _MismatchError
    return tuple(_convert(item, element, bounds, label) for item in value)


def _convert_number(value: object, annotation: type, bounds: Parameter) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, annotation)):
        raise _MismatchError
    try:
        number = annotation(value)
    except OverflowError:
        raise _MismatchError from None
    if isinstance(number, float) and not math.isfinite(number):
        raise _MismatchError
    if bounds.ge is not None and number < bounds.ge:
        raise _MismatchError
    if bounds.le is not None and number > bounds.le:
        raise _MismatchError
    return number


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return tuple(choice for member in get_args(annotation) for choice in _choices(member))
    if get_origin(annotation) is Literal:
        return tuple(choice for choice in get_args(annotation) if isinstance(choice, str))
    return ()


def _describe(annotation: Any, bounds: Parameter) -> str:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_describe(member, bounds) for member in get_args(annotation))
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(annotation))}"
    if origin is tuple:
        (element, *_) = get_args(annotation)
        count = "a list of" if bounds.length is None else f"a list of {bounds.length}"
        return f"{count} {_plural(element)}{_range(bounds)}"
    name = _NAMES.get(annotation, str(annotation))
    return f"{name}{_range(bounds)}" if annotation in (int, float) else name


def _plural(element: Any) -> str:
    return {int: "integers", float: "numbers", str: "texts"}.get(element, str(element))


def _range(bounds: Parameter) -> str:
    if bounds.ge is not None and bounds.le is not None:
        return f" in [{bounds.ge}, {bounds.le}]"
    if bounds.ge is not None:
        return f" >= {bounds.ge}"
    return f" <= {bounds.le}" if bounds.le is not None else ""


_NAMES = MappingProxyType(
    {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        NoneType: "null",
        IndexSelector: "indices from 0 such as '0-3,38'",
    }
)
