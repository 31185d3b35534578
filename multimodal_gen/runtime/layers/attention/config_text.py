"""Reads what a user typed into plain values: a path, a JSON object, or `k=v,k=v`.

JSON, YAML and `k=v,k=v` give the same values: numbers (`-1`, `1e-3`, `.5`), true, false and null in
any case, quoted or bare text, lists. Nothing is ever executed or turned into an object. YAML is
read without tags, anchors and dates, so that `1e-3` is a number and `on` is text, as in the other
forms. Repeated keys and numbers that are not finite are refused.
"""

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.config import short

MAX_DEPTH = 32


class MalformedError(Exception):
    """The text cannot be read; the message says which part and why."""


def read_json(text: str) -> object:
    """Return the value of a JSON text; raises MalformedError."""
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_number,
            parse_int=_number,
        )
    except json.JSONDecodeError as error:
        near = short(text[max(error.pos - 10, 0) : error.pos + 20])
        raise MalformedError(
            f"cannot read JSON near {near}: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None


def _unique(pairs: Sequence[tuple[object, object]]) -> dict[object, object]:
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
    return _number(text) if _FLOAT.fullmatch(text) else text


def _number(text: str) -> object:
    if _INTEGER.fullmatch(text):
        try:
            return int(text)
        except ValueError:  # Python refuses thousands of digits
            raise MalformedError(f"{short(text)} has too many digits") from None
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text)


class _PlainLoader(yaml.SafeLoader):
    """Mappings, lists and scalars; scalars are read as in the other forms."""

    # Empty: with resolvers, YAML 1.1 makes dates, base 60 and `on`; with SafeLoader's
    # constructors, explicit tags make sets and bytes.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse anchors, whose expansion can be endless."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise MalformedError(f"anchors are not accepted, got *{event.anchor}")
        return super().compose_node(parent, index)


def _yaml_mapping(loader: _PlainLoader, node: yaml.MappingNode) -> object:
    return _unique(
        [
            (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    )


def _yaml_list(loader: _PlainLoader, node: yaml.SequenceNode) -> object:
    return [loader.construct_object(item, deep=True) for item in node.value]


def _yaml_scalar(loader: _PlainLoader, node: yaml.ScalarNode) -> object:
    text = str(loader.construct_scalar(node))
    if node.style is not None:  # quoted or a block: text
        return text
    return None if text in ("", "~") else read_scalar(text)


def _yaml_tag(loader: _PlainLoader, node: yaml.Node) -> object:
    raise MalformedError(f"tags are not accepted, got {node.tag}")


_PlainLoader.add_constructor("tag:yaml.org,2002:map", _yaml_mapping)
_PlainLoader.add_constructor("tag:yaml.org,2002:seq", _yaml_list)
_PlainLoader.add_constructor("tag:yaml.org,2002:str", _yaml_scalar)
_PlainLoader.add_constructor(None, _yaml_tag)


def read_yaml(text: str) -> object:
    """Return the value of a YAML text; raises MalformedError."""
    try:
        return _PlainLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        raise MalformedError(
            f"cannot read YAML near {short(line.strip())}: {error.problem}{place}"
        ) from None
    except yaml.YAMLError as error:
        raise MalformedError(f"cannot read YAML: {' '.join(str(error).split())}") from None


def read_pairs(text: str) -> object:
    """Return the mapping `k=v,k=v` spells; raises MalformedError."""
    return _Pairs(text).read()


class _Pairs:
    """Reads `k=v,k=v`; commas inside quotes and lists do not split."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> object:
        pairs = [self._pair()]
        while self.at < len(self.text):
            self.at += 1  # the comma
            pairs.append(self._pair())
        return _unique(pairs)

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
        if self._next("\"'"):
            return self._quoted()
        if self._next("{"):
            raise MalformedError(
                f"mappings inside k=v are not accepted, got {short(self.text[self.at :])}; "
                f"write the whole as JSON"
            )
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


FORMS = "a path to a JSON or YAML file, a JSON object, or k=v,k=v"

_SUFFIXES = (".json", ".yaml", ".yml")


def read_mapping(
    source: str | os.PathLike[str] | Mapping[str, object],
    *,
    name: str = "--attention-backend-config",
) -> dict[str, object]:
    """Return the mapping a user wrote.

    Args:
        source: a path to a `.json`, `.yaml` or `.yml` file, a JSON object, `k=v,k=v` pairs, or a
            mapping, which is copied. Empty text gives an empty mapping.
        name: the flag or argument it came from, for messages.

    Raises:
        ConfigError: the file is missing, unreadable, empty or of another kind; the text is none of
            the three forms; it is not a mapping; a key repeats or is not text; a number is not
            finite; it nests too deeply.
    """
    if isinstance(source, Mapping):
        return _checked(source, name)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"{name} must be {FORMS}, got {short(source)}")
    text = str(source).strip()
    where, form = name, FORMS
    try:
        path = _existing(text)
        if path is not None:
            where, form = f"{name} {short(text)}", "a readable JSON or YAML file"
            value = _read_file(path)
        elif isinstance(source, os.PathLike) or _looks_like_path(text):
            raise ConfigError(f"{name} must name a file that exists; file not found: {short(text)}")
        else:
            value = _read_text(text)
    except MalformedError as error:
        raise ConfigError(f"{where} must be {form}; {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} must nest at most {MAX_DEPTH} levels deep") from None
    return _checked(value, where)


def _checked(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping of names to values, got {_type_name(value)}")
    _check_keys(value, where, 0)
    return dict(value)


def _check_keys(value: object, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where} must nest at most {MAX_DEPTH} levels deep")
    children: Sequence[object] = ()
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or not key.strip()]
        if wrong:
            raise ConfigError(f"{where} must have names as keys, got {short(wrong[0])}")
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = value
    for child in children:
        _check_keys(child, where, depth + 1)


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    kinds = ((str, "the text"), (int, "the number"), (float, "the number"), (list, "the list"))
    kind = next((word for cls, word in kinds if isinstance(value, cls)), "the value")
    return f"{kind} {short(value)}"


def _existing(text: str) -> Path | None:
    try:
        mode = Path(text).stat().st_mode if text else None
    except PermissionError as error:
        raise MalformedError(f"{short(text)} cannot be read: {error.strerror}") from None
    except (OSError, ValueError):  # absent, too long for a path, or with a character none has
        return None
    if mode is None or ("=" in text and not stat.S_ISREG(mode)):
        return None
    return Path(text)


def _looks_like_path(text: str) -> bool:
    if not text or "=" in text or text[0] in "[{\"'":
        return False
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return text.lower().endswith(_SUFFIXES) or any(s in text for s in separators)


def _read_file(path: Path) -> object:
    if path.is_dir():
        raise MalformedError("this is a folder")
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise MalformedError(f"the file must end in {', '.join(_SUFFIXES)}, got {path.name!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedError(f"the file is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise MalformedError(f"the file cannot be read: {error.strerror}") from None
    if not text.strip():
        raise MalformedError("the file is empty")
    return read_json(text) if suffix == ".json" else read_yaml(text)


def _read_text(text: str) -> object:
    if not text:
        return {}
    if text[0] in "[{\"'":
        return read_json(text)
    scalar = read_scalar(text)
    return scalar if not isinstance(scalar, str) else read_pairs(text)
