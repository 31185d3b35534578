"""Reads what a user typed into plain values: a path, a JSON object, or `k=v,k=v`.

JSON and `k=v,k=v` are read by `plain_values.py`. YAML is read without tags, anchors and dates, so
that `1e-3` is a number and `on` is text, as in the other forms.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.plain_values import (
    MAX_DEPTH,
    MalformedError,
    as_mapping,
    read_json,
    read_pairs,
    read_scalar,
    read_small_file,
    short,
)

__all__ = ["read_mapping"]

_FORMS = "a path to a JSON or YAML file, a JSON object, or k=v,k=v"
_SUFFIXES = (".json", ".yaml", ".yml")


class _PlainLoader(yaml.SafeLoader):
    """Mappings, lists and scalars; scalars are read as in the other forms."""

    # Empty: with resolvers, YAML 1.1 makes dates, base 60 and `on`; with SafeLoader's
    # constructors, explicit tags make sets and bytes.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse anchors, whose expansion can be endless, and what nests too deeply."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise MalformedError(f"anchors are not accepted, got *{event.anchor}")
        if self._depth > MAX_DEPTH:
            raise MalformedError(f"values must nest at most {MAX_DEPTH} levels deep")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _yaml_mapping(loader: _PlainLoader, node: yaml.MappingNode) -> object:
    return as_mapping(
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


def _read_yaml(text: str) -> object:
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
        raise ConfigError(f"{name} must be {_FORMS}, got {short(source)}")
    text = str(source).strip()
    where, form = name, _FORMS
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
        wrong = [key for key in value if not _is_key(key, nested=depth > 0)]
        if wrong:
            raise ConfigError(f"{where} must have names as keys, got {short(wrong[0])}")
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = value
    for child in children:
        _check_keys(child, where, depth + 1)


def _is_key(key: object, *, nested: bool) -> bool:
    """Whether a mapping may have this key: a name, or inside of another one a share too."""
    if isinstance(key, str):
        return bool(key.strip())
    return nested and isinstance(key, (int, float)) and not isinstance(key, bool)


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
    text = read_small_file(path, encoding="utf-8-sig")
    if not text.strip():
        raise MalformedError("the file is empty")
    return read_json(text) if suffix == ".json" else _read_yaml(text)


def _read_text(text: str) -> object:
    if not text:
        return {}
    if text[0] in "[{\"'":
        return read_json(text)
    scalar = read_scalar(text)
    return scalar if not isinstance(scalar, str) else read_pairs(text)
