"""What the signatures of diffusers say of values that JSON spells."""

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from inspect import Parameter
from typing import Any, Literal, Union, get_args, get_origin

_JSON = (bool, int, float, str, list, tuple, Mapping, type(None))


def arguments_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, with types where modules spell them as text."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, SyntaxError):  # types that are imported for type checkers only
        return inspect.signature(function).parameters


def fits(value: object, kind: Any) -> bool:
    """Tell whether a value as JSON spells it may be of a type; of other values, types say little.

    A whole number is a float too, and a list is a tuple: JSON tells neither from the other.
    """
    if kind is Any or isinstance(kind, str) or not isinstance(value, _JSON):
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    kind = origin or kind
    if not isinstance(kind, type) or kind is Parameter.empty:
        return True
    if isinstance(value, (list, tuple)):
        return kind in (list, tuple, Iterable) and _items_fit(value, kind, inner)
    if isinstance(value, Mapping):
        return issubclass(kind, Mapping)
    if issubclass(kind, Enum):
        return value in [member.value for member in kind]
    if isinstance(value, int) and not isinstance(value, bool):
        return kind in (int, float)
    return kind is type(value)


def _items_fit(value: list[object] | tuple[object, ...], kind: type, inner: Any) -> bool:
    fixed = kind is tuple and len(inner) > 1 and Ellipsis not in inner
    if fixed and len(inner) != len(value):
        return False
    kinds = [each for each in inner if each is not Ellipsis]
    return not kinds or all(any(fits(item, each) for each in kinds) for item in value)


def spelled(kind: Any) -> str:
    """Return a type in words: `int or list[int]`."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(spelled(each) for each in get_args(kind))
    if kind is type(None):
        return "null"
    name = getattr(kind, "__name__", str(kind))
    inner = ", ".join(spelled(each) for each in get_args(kind) if each is not Ellipsis)
    return f"{name}[{inner}]" if inner else name
