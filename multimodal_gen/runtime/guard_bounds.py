"""How far attention may be from exact attention before a layer is served exactly.

Importing this module imports neither torch nor diffusers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real

from multimodal_gen.errors import ConfigError, nearest, short
from multimodal_gen.settings import mapping_of

_FORM = (
    "a finite number above 0, for backends that round to 8 bits or less, or quantized=B,sparse=B, "
    "each such a number or none, in Python also a mapping of these"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardBounds:
    """The largest relative L2 error that the worst head of a layer may have; None for any finite.

    Attributes:
        quantized: of backends that round operands to 8 bits or less.
        sparse: of sparse methods, which have none by default: what they drop is meant.

    Raises:
        ConfigError: a bound is not a finite number above 0.
    """

    quantized: float | None = 0.05
    sparse: float | None = None

    def __post_init__(self) -> None:
        for bound in (self.quantized, self.sparse):
            if bound is not None and not _is_bound(bound):
                raise _wrong(f"quantized={self.quantized!r},sparse={self.sparse!r}", "GuardBounds")

    def __str__(self) -> str:
        if self.quantized is not None and self.sparse is None:
            return str(self.quantized)
        return f"quantized={self.quantized},sparse={self.sparse}".replace("None", "none")


_KEYS = tuple(field.name for field in fields(GuardBounds))


def parse_guard_bounds(value: object, *, name: str = "attention_guard") -> GuardBounds | None:
    """Return bounds in any of their forms; None for None and False.

    Args:
        value: a number such as 0.05, a mapping with the keys `quantized` and `sparse`, each of
            which may be None, or either as text, such as "0.05" or "quantized=none,sparse=0.3".
        name: what messages call it.

    Raises:
        ConfigError: it is something else, or a bound is not a finite number above 0.
    """
    if value is None or value is False:
        return None
    if isinstance(value, GuardBounds):
        return value
    if not isinstance(value, (str, Mapping)):
        return GuardBounds(quantized=_bound(value, value, name))
    if isinstance(value, str) and "=" not in value and "{" not in value:
        return GuardBounds(quantized=_bound(value, value, name))
    given = mapping_of(value, name, "quantized=B,sparse=B")
    unknown = [key for key in given if key not in _KEYS]
    if unknown or not given:
        raise _wrong(value, name, *unknown)
    return GuardBounds(
        **{
            key: None if _is_none(bound) else _bound(bound, value, name)
            for key, bound in given.items()
        }
    )


def _is_none(bound: object) -> bool:
    return bound is None or (isinstance(bound, str) and bound.strip().lower() == "none")


def _bound(bound: object, value: object, name: str) -> float:
    try:
        found = float(bound) if isinstance(bound, (str, Real)) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if isinstance(bound, bool) or not _is_bound(found):
        raise _wrong(value, name)
    return found


def _is_bound(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < math.inf


def _wrong(value: object, name: str, *unknown: object) -> ConfigError:
    hint = nearest(str(unknown[0]), _KEYS) if unknown else ""
    remedy = hint or "; give for example 0.05"
    return ConfigError(f"{name} must be {_FORM}, got {short(value)}{remedy}")
