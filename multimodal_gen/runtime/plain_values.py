"""Plain values from text: JSON, `k=v,k=v` or bare words, the same values from all of them.

Numbers (`-1`, `1e-3`, `.5`), true, false and null in any case, quoted or bare text, lists. Nothing
is ever executed or turned into an object. Repeated keys and numbers that are not finite are
refused. Read values can be frozen. Importing this module needs the standard library only.
"""

import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = [
    "MAX_DEPTH",
    "FrozenMapping",
    "MalformedError",
    "as_mapping",
    "frozen",
    "read_json",
    "read_lines",
    "read_mapping",
    "read_pairs",
    "read_scalar",
    "read_small_file",
    "read_value",
    "short",
]

MAX_DEPTH = 32


class MalformedError(Exception):
    """The text cannot be read; the message says which part and why."""


_MOST_BYTES = 64 << 20  # more than any search of windows has


def read_small_file(path: Path, *, encoding: str = "utf-8") -> str:
    """Return the text of a regular file; others may never end, or wait for somebody to write.

    Raises:
        MalformedError: it is none, too large or not UTF-8, or cannot be read.
    """
    try:
        # Not waiting for a writer, should it have become a pipe meanwhile.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MalformedError("this is no regular file")
            data = file.read(_MOST_BYTES + 1)
    except IsADirectoryError:
        raise MalformedError("this is a folder") from None
    except (OSError, ValueError) as error:  # or a character that no path has
        reason = getattr(error, "strerror", None) or str(error)
        raise MalformedError(f"the file cannot be read: {reason}") from None
    if len(data) > _MOST_BYTES:
        raise MalformedError(f"the file must have at most {_MOST_BYTES >> 20} MiB")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise MalformedError(f"the file is not UTF-8 text: {error.reason}") from None


def read_lines(path: Path) -> list[str]:
    """Return the lines of a regular text file, without a byte order mark.

    They end where editors and JSON end them: `str.splitlines` also cuts at characters that are
    part of a text, such as U+2028.

    Raises:
        MalformedError: as `read_small_file`.
    """
    return re.split(r"\r\n|\r|\n", read_small_file(path, encoding="utf-8-sig"))


def read_json(text: str) -> object:
    """Return the value of a JSON text; raises MalformedError."""
    try:
        return json.loads(
            text,
            object_pairs_hook=as_mapping,
            parse_constant=_refuse_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except RecursionError:
        raise MalformedError(f"values must nest at most {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        near = short(text[max(error.pos - 10, 0) : error.pos + 20])
        raise MalformedError(
            f"cannot read JSON near {near}: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None


def as_mapping(pairs: Iterable[tuple[object, object]]) -> dict[object, object]:
    """Return the mapping of these pairs.

    Raises:
        MalformedError: a key repeats, or is itself a list or a mapping.
    """
    found: dict[object, object] = {}
    for key, value in pairs:
        if isinstance(key, (list, dict)):
            raise MalformedError(f"keys must be names, got {short(key)}")
        if key in found:
            raise MalformedError(f"{short(key)} must be given once, got it twice")
        found[key] = value
    return found


def _refuse_constant(text: str) -> object:
    raise MalformedError(f"numbers must be finite, got {text}")


# Numbers and words, the same in every form

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_WORDS = MappingProxyType({"true": True, "false": False, "null": None})


def read_scalar(text: str) -> object:
    """Return the number, bool or None that bare `text` spells, or the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NOT_FINITE.fullmatch(text):
        return _refuse_constant(text)
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return _float(text) if _FLOAT.fullmatch(text) else text


def read_value(text: str) -> object:
    """Return what `text` spells: JSON where it opens like JSON, else a scalar or the text itself.

    Raises:
        MalformedError: it opens like JSON and is none, or is a number that cannot be kept.
    """
    bare = text.strip()
    if bare[:1] in ("[", "{", '"'):
        return read_json(bare)
    value = read_scalar(bare)
    return text if isinstance(value, str) else value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python refuses thousands of digits
        raise MalformedError(f"{short(text)} has too many digits") from None


def _float(text: str) -> object:
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text)


def read_pairs(text: str) -> object:
    """Return the mapping `k=v,k=v` spells; raises MalformedError."""
    return _Pairs(text).read()


def read_mapping(text: str) -> dict[object, object]:
    """Return the mapping that a JSON object or `k=v,k=v` spells, {} for nothing.

    Raises:
        MalformedError: it is neither, or has a key twice.
    """
    text = text.strip()
    found = read_json(text) if text[:1] == "{" else read_pairs(text) if text else {}
    assert isinstance(found, dict), "what opens like an object is one"
    return found


class _Pairs:
    """Reads `k=v,k=v`; commas inside quotes, lists and mappings do not split."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> object:
        pairs = [self._pair()]
        while self.at < len(self.text):
            self.at += 1  # the comma
            pairs.append(self._pair())
        return as_mapping(pairs)

    def _pair(self) -> tuple[str, object]:
        start = self.at
        key = self._until(",=").strip()
        if not self._next("="):
            hint = " (put values that hold commas in quotes)" if start else ""
            raise MalformedError(f"{short(key)} is not a pair k=v{hint}")
        if not key:
            raise MalformedError(f"there is no name before {short(self.text[start:][:20])}")
        self.at += 1
        value = self._value(",", 0)
        self._blank()
        if self.at < len(self.text) and not self._next(","):
            raise MalformedError(f"cannot read {short(self._until(','))} after `{key}`'s value")
        return key, value

    def _value(self, ends: str, depth: int) -> object:
        self._blank()
        if self._next("["):
            return self._list(depth + 1)
        if self._next("{"):
            return self._mapping(depth + 1)
        if self._next("\"'"):
            return self._quoted()
        text = self._until(ends).strip()
        if not text:
            raise MalformedError(f"there is no value at the end of {short(self.text[: self.at])}")
        return read_scalar(text)

    def _list(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise MalformedError(f"lists must nest at most {MAX_DEPTH} levels deep")
        start = self.at
        self.at += 1
        items: list[object] = []
        self._blank()
        while not self._next("]"):
            items.append(self._value(",]", depth))
            self._blank()
            if self._next(","):
                self.at += 1
            elif not self._next("]"):
                raise MalformedError(f"the list {short(self.text[start:])} has no end")
        self.at += 1
        return items

    def _mapping(self, depth: int) -> object:
        """Read `{0: 0.5, 0.4: 0.9}`; keys are numbers or text."""
        if depth > MAX_DEPTH:
            raise MalformedError(f"mappings must nest at most {MAX_DEPTH} levels deep")
        start = self.at
        self.at += 1
        pairs: list[tuple[object, object]] = []
        self._blank()
        while not self._next("}"):
            key = self._value(":,}", depth)
            self._blank()
            if not self._next(":"):
                raise MalformedError(
                    f"the mapping {short(self.text[start:])} has {short(key)} without a value; "
                    f"write {{key: value, key: value}}"
                )
            self.at += 1
            pairs.append((key, self._value(",}", depth)))
            self._blank()
            if self._next(","):
                self.at += 1
                self._blank()
            elif not self._next("}"):
                raise MalformedError(f"the mapping {short(self.text[start:])} has no end")
        self.at += 1
        return as_mapping(pairs)

    def _quoted(self) -> str:
        start, quote = self.at, self.text[self.at]
        match = re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL).match(
            self.text, start
        )
        if match is None:
            raise MalformedError(f"the text {short(self.text[start:])} has no closing {quote}")
        self.at = match.end()
        # A backslash protects a quote or itself and is plain otherwise, as in Windows paths.
        return re.sub(r"\\([\\\"'])", r"\1", match[1])

    def _next(self, characters: str) -> bool:
        return self.at < len(self.text) and self.text[self.at] in characters

    def _until(self, ends: str) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ends:
            self.at += 1
        return self.text[start : self.at]

    def _blank(self) -> None:
        while self._next(" \t\r\n"):
            self.at += 1


def short(value: object) -> str:
    """Return `repr(value)`, shortened to what fits in a one-line message."""
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):  # an int too long to print, a list inside itself
        return f"something of type {type(value).__name__}"


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class FrozenMapping(Mapping[str, object]):
    """A read-only copy of a mapping; what it holds is frozen too.

    Args:
        items: mapping to copy.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, object]) -> None:
        self._items = {key: frozen(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> object:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type["FrozenMapping"], tuple[dict[str, object]]]:
        return type(self), (dict(self),)


def frozen(value: object) -> object:
    """Return `value` with its mappings frozen and its lists as tuples, at every depth."""
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    return value
