"""Folds dotted flags into one JSON value each, before the command line is parsed.

    -ac.backend fa --attention-config.rules.0.steps 0-3
        --attention-config '{"backend": "fa", "rules": [{"steps": "0-3"}]}'
    --component-attention-backends.text-encoder torch_sdpa
        --component-attention-backends '{"text-encoder": "torch_sdpa"}'

Values are JSON where they read as JSON (numbers, true, lists), otherwise text.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from multimodal_gen.errors import ConfigError, short
from multimodal_gen.files import MalformedError
from multimodal_gen.runtime.backend_names import COMPONENT_PAIRS
from multimodal_gen.settings import as_mapping, mapping_of, read_value

_CONFIG = "--attention-config"
_COMPONENTS = "--component-attention-backends"
_FLAGS = MappingProxyType({_CONFIG: _CONFIG, "-ac": _CONFIG, _COMPONENTS: _COMPONENTS})


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a flag that may be dotted.

    Attributes:
        flag: full name of the flag.
        typed: what was typed, without the value.
        path: what follows the flag's dot, or None for a plain use.
        value: the value.
    """

    flag: str
    typed: str
    path: str | None
    value: str


def fold_dotted(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the dotted uses of a flag folded into one plain use of it.

    Plain values of `--component-attention-backends` are merged in, repeated ones too; the reader
    of the merged value refuses repeated components. Arguments after `--` are left alone.

    Args:
        argv: arguments after the program's name.

    Raises:
        ConfigError: a dotted flag has no value, repeats, contradicts another or is given with a
            plain `--attention-config`.
    """
    folded: list[str | _Use] = list(_split(list(argv)))
    uses = [item for item in folded if isinstance(item, _Use)]
    values = {
        _CONFIG: _fold_config([use for use in uses if use.flag == _CONFIG]),
        _COMPONENTS: _fold_components([use for use in uses if use.flag == _COMPONENTS]),
    }
    result: list[str] = []
    for item in folded:
        if isinstance(item, str):
            result.append(item)
        elif item.flag in values:  # the first use stands for all
            result += [item.flag, values.pop(item.flag)]
    return result


def _split(argv: list[str]) -> Iterator[str | _Use]:
    at = 0
    while at < len(argv):
        typed, equals, value = argv[at].partition("=")
        if typed == "--":
            yield from argv[at:]
            return
        name, dot, path = typed.partition(".")
        if name not in _FLAGS:
            yield argv[at]
        elif not equals and (at + 1 == len(argv) or argv[at + 1].startswith("--")):
            if dot:
                raise ConfigError(f"{typed} must have a value, got none")
            yield argv[at]  # the parser says what is wrong
        else:
            at += 0 if equals else 1
            yield _Use(_FLAGS[name], typed, path if dot else None, value if equals else argv[at])
        at += 1


def _fold_config(uses: list[_Use]) -> str:
    plain = [use for use in uses if use.path is None]
    if plain and len(uses) > 1:
        other = next(use for use in uses if use is not plain[0])
        raise ConfigError(
            f"{plain[0].typed} must be given once and without dotted flags, got "
            f"{other.typed} too; remove one"
        )
    if plain:
        return plain[0].value
    root: dict[str, Any] = {}
    for use in uses:
        _put(root, use)
    return json.dumps(_listed(root, _CONFIG))


def _put(root: dict[str, Any], use: _Use) -> None:
    *parents, last = _steps(use)
    node = root
    for step in parents:
        node = node.setdefault(step, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"{use.typed} must not go below {short(step)}, which has a value already"
            )
    if last in node:
        what = "has dotted flags below it" if isinstance(node[last], dict) else "is given twice"
        raise ConfigError(f"{use.typed} must be given once, but it {what}; remove one")
    node[last] = _Leaf(_value(use))


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A value, so that a mapping given as JSON is told from one that dotted flags build."""

    value: Any


def _steps(use: _Use) -> list[str]:
    steps = (use.path or "").split(".")
    if not all(steps):
        raise ConfigError(f"{use.typed} must have a name after every dot")
    return [step.replace("-", "_") for step in steps]


def _listed(node: Any, where: str) -> Any:
    """Turn nodes whose keys are all numbers into lists, and leaves into their values."""
    if isinstance(node, _Leaf):
        return node.value
    children = {key: _listed(value, f"{where}.{key}") for key, value in node.items()}
    if not children or not all(key.isascii() and key.isdigit() for key in children):
        return children
    wanted = [str(index) for index in range(len(children))]
    if sorted(children) != sorted(wanted):
        raise ConfigError(
            f"{where} must be numbered 0 to {len(children) - 1} without gaps, got "
            f"{', '.join(children)}"
        )
    return [children[key] for key in wanted]


def _value(use: _Use) -> object:
    try:
        return read_value(use.value)
    except MalformedError as error:
        raise ConfigError(
            f"{use.typed} must be text or JSON, got {short(use.value)}: {error}"
        ) from None


def _fold_components(uses: list[_Use]) -> str:
    if len(uses) == 1 and uses[0].path is None:
        return uses[0].value
    pairs: list[tuple[object, object]] = []
    for use in uses:
        if use.path is None:
            pairs += mapping_of(use.value, use.typed, COMPONENT_PAIRS).items()
        elif use.path:
            pairs.append((use.path, use.value))
        else:
            raise ConfigError(f"{use.typed} must have a component's name after the dot")
    try:
        return json.dumps(as_mapping(pairs))
    except MalformedError as error:
        raise ConfigError(f"{_COMPONENTS} must name every component once; {error}") from None
