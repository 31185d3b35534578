"""Settings: text read into plain values, checked and converted by what they may be, written back.

Text is a file of JSON or YAML, JSON, `k=v,k=v` or a bare word, and the same values come from all of
them: numbers (`-1`, `1e-3`, `.5`), true, false and null in any case, quoted or bare text, lists and
mappings. Nothing is ever executed or turned into an object. Repeated keys and numbers that are not
finite are refused.

What a value may be is said by an annotation and bounds, in the `Parameter` of a dataclass's field
or the `Setting` of a flag. Annotations understood: bool, int, float, str, `Literal[...]`,
`tuple[X, ...]`, `tuple[X, X]`, `list[X]`, types that read themselves, and unions of these with each
other or with None. A bool is never an int; an int is accepted for a float; a list is accepted for a
tuple.

Importing this module needs the standard library only.
"""

import dataclasses
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from multimodal_gen.errors import ConfigError, nearest, short
from multimodal_gen.files import MalformedError, read_small_file, read_text

_MAX_DEPTH = 32


class MismatchError(Exception):
    """A value is not of the expected type or out of its range."""


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
        raise MalformedError(f"values must nest at most {_MAX_DEPTH} levels deep") from None
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


def text_as_mapping(text: str) -> dict[object, object]:
    """Return the mapping that a JSON object or `k=v,k=v` spells, {} for nothing.

    Raises:
        MalformedError: it is neither, or has a key twice.
    """
    text = text.strip()
    found = read_json(text) if text[:1] == "{" else read_pairs(text) if text else {}
    assert isinstance(found, dict), "what opens like an object is one"
    return found


def mapping_of(value: object, name: str, form: str) -> Mapping[Any, object]:
    """Return a mapping, or what a text spells as one, with keys and values as they were written.

    Args:
        value: a mapping, or text: a JSON object or `k=v,k=v`, and empty for nothing.
        name: the flag or argument it came from, for messages.
        form: what pairs look like, for messages.

    Raises:
        ConfigError: it is something else, or has a key twice.
    """
    if isinstance(value, Mapping):
        return value
    expected = f"{name} must be {form} pairs, a JSON object or a mapping"
    if not isinstance(value, str):
        raise ConfigError(f"{expected}, got {short(value)}")
    try:
        return text_as_mapping(value)
    except MalformedError as error:
        raise ConfigError(f"{expected}, got {short(value)}: {error}") from None


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
            return self._items("list", "]", lambda start: self._value(",]", depth + 1), depth)
        if self._next("{"):
            pairs = self._items("mapping", "}", lambda start: self._entry(start, depth + 1), depth)
            return as_mapping(pairs)
        if self._next("\"'"):
            return self._quoted()
        text = self._until(ends).strip()
        if not text:
            raise MalformedError(f"there is no value at the end of {short(self.text[: self.at])}")
        return read_scalar(text)

    def _items(self, kind: str, close: str, read: Callable[[int], Any], depth: int) -> list[Any]:
        """Return what `read` finds between commas, given where the list or mapping starts."""
        if depth == _MAX_DEPTH:
            raise MalformedError(f"{kind}s must nest at most {_MAX_DEPTH} levels deep")
        start, items = self.at, list[Any]()
        self.at += 1
        self._blank()
        while not self._next(close):
            items.append(read(start))
            self._blank()
            if self._next(","):
                self.at += 1
                self._blank()
            elif not self._next(close):
                raise MalformedError(f"the {kind} {short(self.text[start:])} has no end")
        self.at += 1
        return items

    def _entry(self, start: int, depth: int) -> tuple[object, object]:
        """Read one of `{0: 0.5, 0.4: 0.9}`; keys are numbers or text."""
        key = self._value(":,}", depth)
        self._blank()
        if not self._next(":"):
            raise MalformedError(
                f"the mapping {short(self.text[start:])} has {short(key)} without a value; "
                f"write {{key: value, key: value}}"
            )
        self.at += 1
        return key, self._value(",}", depth)

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


def by_axis(sizes: Iterable[int]) -> str:
    """Return sizes along axes as messages write them: 5x6x10."""
    return "x".join(map(str, sizes))


def _read_yaml(text: str) -> object:
    """Return the value of a YAML text; raises MalformedError.

    Without tags, anchors and dates, so that `1e-3` is a number and `on` is text, as in JSON.
    """
    import yaml  # which the other forms do without

    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            if isinstance(event, yaml.AliasEvent):  # whose expansion can be endless
                raise MalformedError(f"anchors are not accepted, got *{event.anchor}")
            if isinstance(event, yaml.NodeEvent) and depth > _MAX_DEPTH:
                raise MalformedError(f"values must nest at most {_MAX_DEPTH} levels deep")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        raise MalformedError(
            f"cannot read YAML near {short(line.strip())}: {error.problem}{place}"
        ) from None
    except yaml.YAMLError as error:
        raise MalformedError(f"cannot read YAML: {' '.join(str(error).split())}") from None
    return None if node is None else _yaml_value(node)


_YAML_TAGS = MappingProxyType({"mapping": "map", "sequence": "seq", "scalar": "str"})


def _yaml_value(node: Any) -> object:
    if node.tag != f"tag:yaml.org,2002:{_YAML_TAGS[node.id]}":
        raise MalformedError(f"tags are not accepted, got {node.tag}")
    if node.id == "mapping":
        return as_mapping((_yaml_value(key), _yaml_value(value)) for key, value in node.value)
    if node.id == "sequence":
        return [_yaml_value(item) for item in node.value]
    if node.style is not None:  # quoted or a block: text
        return node.value
    return None if node.value in ("", "~") else read_scalar(node.value)


_FORMS = "a path to a JSON or YAML file, a JSON object, or k=v,k=v"
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
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{where} must nest at most {_MAX_DEPTH} levels deep")
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
        raise MalformedError(f"the file must end in {', '.join(_SUFFIXES)}, got {short(path.name)}")
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


def expect(name: str, value: object, kind: Any, words: str, remedy: str = "") -> None:
    """Refuse an argument of another type.

    Args:
        name: what it is called.
        value: what was given.
        kind: what `isinstance` takes.
        words: what it must be.
        remedy: what to do instead, where that is not plain.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {words}, got {short(value)}{remedy and '; '}{remedy}")


def as_plain(value: object) -> Any:
    """Return a value as JSON has it: mappings, lists, numbers, bools and None, others as text.

    Numbers that are not finite are text too: "inf", "-inf" and "nan".
    Dataclasses are mappings of their fields, but for those that read themselves from text.
    """
    if dataclasses.is_dataclass(value) and not hasattr(value, "parse"):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, NoneType)) else str(value)


def converted(value: object, kind: Any, ge: float | None = None, le: float | None = None) -> object:
    """Return a value as a bool, an int, a float, text or None.

    Args:
        value: what was given.
        kind: one of these types.
        ge: smallest number allowed, or None.
        le: largest number allowed, or None.

    Raises:
        MismatchError: it is of another type or out of range.
    """
    if kind not in (int, float):
        if isinstance(value, kind):
            return value
        raise MismatchError
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise MismatchError
    if (ge is not None and value < ge) or (le is not None and value > le):
        raise MismatchError
    try:
        number = kind(value)
    except OverflowError:
        raise MismatchError from None
    if isinstance(number, float) and not math.isfinite(number):
        raise MismatchError
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One field of a dataclass, with what `option` declared of it.

    Attributes:
        name: field name.
        annotation: resolved type. One of its own has a class method `parse(value, name=label)`
            that raises `MismatchError` or `ConfigError`, `expected`, what it takes in words, and
            `numbers` where bounds hold for some.
        default: default value, or `dataclasses.MISSING`.
        help: one line with meaning and unit.
        aliases: other accepted spellings.
        ge: smallest value allowed, for each element of a list too, or None.
        le: largest value allowed, for each element of a list too, or None.
        gt: what a number must be above, or None.
        lt: what a number must be below, or None.
        length: exact number of elements of a list, or None.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""
    aliases: tuple[str, ...] = ()
    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    lt: float | None = None
    length: int | None = None

    @property
    def required(self) -> bool:
        """Whether the parameter has no default."""
        return self.default is MISSING

    @property
    def expected(self) -> str:
        """What the parameter takes, in words, e.g. "a number in [0, 1]"."""
        return self._words(self.annotation)

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
            return self._converted(value, self.annotation, label)
        except MismatchError:
            hint = nearest(value, _texts(self.annotation)) if isinstance(value, str) else ""
            raise ConfigError(
                f"{label} must be {self.expected}, got {short(value)}{hint}"
            ) from None

    def _converted(self, value: object, annotation: Any, label: str) -> object:
        origin, members = get_origin(annotation), get_args(annotation)
        if origin in (Union, UnionType):
            return self._of_union(value, members, label)
        if origin is Literal:
            return _choice(value, members)
        if origin in (tuple, list):
            count = self._count(annotation)
            if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
                raise MismatchError
            return origin(self._converted(item, members[0], label) for item in value)
        if hasattr(annotation, "parse"):
            found = annotation.parse(value, name=label)
            for number in getattr(found, "numbers", ()):
                self.bounded(number, float)
            return found
        if annotation not in _WORDS_OF:
            raise TypeError(f"{label} has an annotation that is not supported: {annotation!r}")
        return self.bounded(value, annotation)

    def bounded(self, value: object, kind: Any) -> object:
        """Return a value as `converted` does, within the bounds; raises MismatchError."""
        number: Any = converted(value, kind, self.ge, self.le)
        if (self.gt is not None and number <= self.gt) or (
            self.lt is not None and number >= self.lt
        ):
            raise MismatchError
        return number

    def _count(self, annotation: Any) -> int | None:
        """Return how many elements a list must have, or None for any number."""
        members = get_args(annotation)
        fixed = get_origin(annotation) is tuple and Ellipsis not in members
        return len(members) if fixed else self.length

    def _of_union(self, value: object, members: tuple[Any, ...], label: str) -> object:
        if value is None and NoneType in members:
            return None
        for member in members:
            try:
                return self._converted(value, member, label)
            except MismatchError:
                continue
        raise MismatchError

    def _words(self, annotation: Any) -> str:
        origin, members = get_origin(annotation), get_args(annotation)
        if origin in (Union, UnionType):
            return " or ".join(map(self._words, members))
        if origin is Literal:
            return f"one of {', '.join(map(str, members))}"
        if origin in (tuple, list):
            count = self._count(annotation)
            some = "a list of" if count is None else f"a list of {count}"
            return f"{some} {_PLURALS.get(members[0], members[0])}{self._range}"
        name = str(_WORDS_OF.get(annotation) or getattr(annotation, "expected", annotation))
        return f"{name}{self._range}" if annotation in (int, float) else name

    @property
    def _range(self) -> str:
        low = self.ge if self.gt is None else self.gt
        high = self.le if self.lt is None else self.lt
        if low is not None and high is not None:
            opened, closed = "[" if self.gt is None else "(", "]" if self.lt is None else ")"
            return f" in {opened}{low}, {high}{closed}"
        if low is not None:
            return f" >= {low}" if self.gt is None else f" > {low}"
        return "" if high is None else f" <= {high}" if self.lt is None else f" < {high}"


_WORDS_OF: Mapping[Any, str] = MappingProxyType(
    {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        NoneType: "null",
    }
)
_PLURALS = MappingProxyType({int: "integers", float: "numbers", str: "texts"})


def _choice(value: object, choices: tuple[Any, ...]) -> object:
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
    raise MismatchError


def _texts(annotation: Any) -> tuple[str, ...]:
    """Return the texts that are valid, for hints."""
    members = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return tuple(text for member in members for text in _texts(member))
    literal = get_origin(annotation) is Literal
    return tuple(member for member in members if literal and isinstance(member, str))


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    aliases: tuple[str, ...] = (),
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    lt: float | None = None,
    length: int | None = None,
) -> Any:
    """Declare one parameter of a dataclass.

    Args:
        default: value when the user gives none; without one the parameter is required.
        help: one line with meaning and unit.
        aliases: other spellings that are accepted.
        ge: smallest value allowed, for each element of a list too.
        le: largest value allowed, for each element of a list too.
        gt: what a number must be above.
        lt: what a number must be below.
        length: exact number of elements of a list.

    Returns:
        A dataclass field.
    """
    bounds = {"ge": ge, "le": le, "gt": gt, "lt": lt}
    metadata = {"help": help, "aliases": aliases, "length": length, **bounds}
    return dataclasses.field(default=default, metadata=metadata)


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
        if value is None and self.default is None:
            return None
        if self.check is not None:
            return self.check(self, value)
        if self.many:
            listed = value if isinstance(value, (list, tuple)) else (value,)
            return tuple(map(self._normalised, listed))
        return self._normalised(value)

    def _normalised(self, value: object) -> object:
        if self.choices:
            return self._choice(value)
        if self.kind is Path:
            if not isinstance(value, (str, Path)) or not str(value).strip():
                raise self.wrong("a file or folder", value)
            return Path(value)
        bound = "" if self.ge is None else f" >= {self.ge}"
        try:
            converted(value, self.kind, self.ge)
        except MismatchError:
            raise self.wrong(f"{_WORDS_OF[self.kind]}{bound}", value) from None
        if self.le is not None and value > self.le:  # type: ignore[operator]
            raise self.wrong(f"at most {self.le}", value)
        if not self.empty and not str(value).strip():
            raise self.wrong("text that is not empty", value)
        return value

    def _choice(self, value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        if text in self.choices:
            return text
        hint = nearest(text, self.choices) if text else ""
        raise ConfigError(
            f"{self.flag} must be one of {', '.join(self.choices)}, got {short(value)}{hint}"
        )

    def wrong(self, expected: str, value: object) -> ConfigError:
        """Return the error for a value that is not what was expected."""
        return ConfigError(f"{self.flag} must be {expected}, got {short(value)}")


_KINDS = (bool, int, float, Path, str)


def declared(name: str, hint: Any, default: Any) -> Setting:
    """Return the setting of a field, or of a command's parameter.

    Args:
        name: its name.
        hint: its annotation, `Annotated[type, Setting(...)]`.
        default: its default, or `MISSING`.
    """
    annotation, setting = get_args(hint)
    members = [annotation, *get_args(annotation)]
    members += [inner for member in members for inner in get_args(member)]
    kind = next(kind for kind in _KINDS if kind in members)
    return dataclasses.replace(setting, name=name, kind=kind, default=default)


def as_flag(setting: str) -> str:
    """Return the flag of a setting: `--attention-config` for `attention_config`."""
    return "--" + setting.replace("_", "-")


def expanded(path: str | Path, name: str) -> Path:
    """Return a path with `~` expanded.

    Args:
        path: what was given.
        name: the flag, for messages.

    Raises:
        ConfigError: it cannot be looked at: the home of an unknown user, or too long a name.
    """
    try:
        found = Path(path).expanduser()
        found.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{name} must be a path, got {short(str(path))}: {reason}") from error
    return found


def lines_of(file: str | Path, flag: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not empty: their numbers, and their text in them.

    They end where editors and JSON end them: `str.splitlines` also cuts at characters that are
    part of a text, such as U+2028. A byte order mark is no part of the first.

    Args:
        file: the file.
        flag: what names it, for messages.

    Raises:
        ConfigError: as `read_small_file`.
    """
    text = read_text(expanded(file, flag), what=flag, encoding="utf-8-sig")
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        if line.strip():
            yield number, line.strip()


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
        for key, item in mapping_of(part, setting.flag, "name=value").items():
            if not isinstance(key, str) or not key.strip():
                raise setting.wrong("pairs of a name and a value", part)
            if key in found:
                raise ConfigError(f"{setting.flag} must give {short(key)} once, got it twice")
            found[key] = item
    return found


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
