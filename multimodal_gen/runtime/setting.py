"""A setting: its flag, what its values may be, and what help says of it, declared once.

`ServerArgs` declares its fields so, and commands those of their flags that are not its.

Importing this module imports neither torch nor diffusers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from multimodal_gen.errors import ConfigError, nearest
from multimodal_gen.runtime.plain_values import MalformedError, read_mapping

__all__ = ["Setting", "as_flag", "as_pairs", "expanded"]

_Check: TypeAlias = Callable[["Setting", Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: what it is called, what it may be, and what help says of it.

    Attributes:
        help: what it means, with unit and default.
        name: that of its field; the flag is `--name` with dashes.
        kind: type of its values as text on the command line spells them: bool, int, float, `Path`
            or str. That of the field.
        default: that of the field; `MISSING` where a value must be given. None is accepted only
            where it is the default, which then means "the pipeline's own" or "automatic".
        metavar: what stands for the value in help; None for switches and choices.
        short: a second, shorter flag, or "".
        choices: the texts that are valid, in lower case; empty where others are.
        ge: smallest number allowed, or None.
        le: largest number allowed, or None.
        empty: whether text may be empty.
        many: the flag may be given repeatedly; the field holds a tuple.
        loading: it concerns how a model is loaded, which is done once for any number of
            generations.
        check: returns the normalised value or raises `ConfigError`; None for what the other
            attributes say.
    """

    help: str
    name: str = ""
    kind: type = str
    default: Any = dataclasses.field(default_factory=lambda: MISSING)
    metavar: str | None = None
    short: str = ""
    choices: tuple[str, ...] = ()
    ge: float | None = None
    le: float | None = None
    empty: bool = True
    many: bool = False
    loading: bool = False
    check: _Check | None = None

    @property
    def flag(self) -> str:
        """The flag."""
        return as_flag(self.name)

    def normalised(self, value: object) -> object:
        """Return `value` as the field holds it.

        Raises:
            ConfigError: it has the wrong type, or is out of range.
        """
        if self.check is not None:
            return self.check(self, value)
        if value is None and self.default is None:
            return None
        if self.many:
            listed = value if isinstance(value, (list, tuple)) else (value,)
            return tuple(_CHECKS[self.kind](self, item) for item in listed)
        return _CHECKS[self.kind](self, value)

    def wrong(self, expected: str, value: object) -> ConfigError:
        """Return the error for a value that is not what was expected."""
        return ConfigError(f"{self.flag} must be {expected}, got {value!r}")


def as_flag(setting: str) -> str:
    """Return the flag of a setting: `--attention-config` for `attention_config`."""
    return "--" + setting.replace("_", "-")


def _switch(setting: Setting, value: object) -> bool:
    if not isinstance(value, bool):
        raise setting.wrong("true or false", value)
    return value


def _integer(setting: Setting, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or _below(setting, value):
        raise setting.wrong(f"an integer >= {setting.ge}", value)
    return _not_above(setting, value)


def _number(setting: Setting, value: object) -> Any:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Whole numbers are finite, and may be too large for a float.
    if (
        not real
        or (isinstance(value, float) and not math.isfinite(value))
        or _below(setting, value)
    ):
        raise setting.wrong(f"a number >= {setting.ge}", value)
    return _not_above(setting, value)


def _below(setting: Setting, value: Any) -> bool:
    return setting.ge is not None and value < setting.ge


def _not_above(setting: Setting, value: Any) -> Any:
    if setting.le is not None and value > setting.le:
        raise setting.wrong(f"at most {setting.le}", value)
    return value


def _path(setting: Setting, value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise setting.wrong("a file or folder", value)
    return Path(value)


def _text(setting: Setting, value: object) -> str:
    if setting.choices:
        return _choice(setting, value)
    if not isinstance(value, str):
        raise setting.wrong("text", value)
    if not setting.empty and not value.strip():
        raise setting.wrong("text that is not empty", value)
    return value


def _choice(setting: Setting, value: object) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in setting.choices:
        return text
    hint = nearest(text, setting.choices) if text else ""
    raise ConfigError(
        f"{setting.flag} must be one of {', '.join(setting.choices)}, got {value!r}{hint}"
    )


_CHECKS: Mapping[type, _Check] = {
    bool: _switch,
    int: _integer,
    float: _number,
    Path: _path,
    str: _text,
}


def expanded(path: str | Path, name: str) -> Path:
    """Return a path with `~` expanded.

    Args:
        path: what was given.
        name: the flag, for messages.

    Raises:
        ConfigError: it cannot be looked at: the home of nobody, or a name that is too long.
    """
    try:
        found = Path(path).expanduser()
        found.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{name} must be a path, got {str(path)[:80]!r}: {reason}") from error
    return found


def as_pairs(setting: Setting, value: object) -> dict[str, object]:
    """Return the pairs of a setting that may be given repeatedly, each key once.

    Args:
        setting: the setting.
        value: a mapping, or one or more texts: a JSON object, or `k=v,k=v`.

    Raises:
        ConfigError: malformed text, a key that is no name, or one that repeats.
    """
    found: dict[str, object] = {}
    for part in value if isinstance(value, (list, tuple)) else (value,):
        for key, item in _pairs_of(setting, part).items():
            if not isinstance(key, str) or not key.strip():
                raise setting.wrong("pairs of a name and a value", part)
            if key in found:
                raise ConfigError(f"{setting.flag} must give {key!r} once, got it twice")
            found[key] = item
    return found


def _pairs_of(setting: Setting, value: object) -> Mapping[Any, object]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise setting.wrong("a mapping, a JSON object or name=value", value)
    try:
        return read_mapping(value)
    except MalformedError as error:
        raise ConfigError(
            f"{setting.flag} must be name=value or a JSON object, got {value!r}: {error}"
        ) from None
