"""What shells offer to complete: backends, their parameters, and ways to quantise.

`sglang --install-completion` lets a shell ask. The flags themselves and their fixed choices are
completed by the library that parses them.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import typer

from multimodal_gen.errors import MultimodalGenError
from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum
from multimodal_gen.runtime.server_args import QUANTIZATIONS


def backend_names(incomplete: str = "") -> list[str]:
    """Return the names of the built-in backends that begin with what was typed."""
    return _beginning(incomplete.replace("-", "_"), map(str, AttentionBackendEnum))


def _parameters(context: typer.Context, incomplete: str = "") -> list[str]:
    """Return `name=` for the parameters of the backend that stands in the command line."""
    from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
    from multimodal_gen.runtime.layers.attention.config import parameters_of
    from multimodal_gen.runtime.platforms import current_platform

    name = context.params.get("attention_backend")
    done, comma, last = incomplete.rpartition(",")
    if not name or "=" in last or done.count("[") > done.count("]"):
        return []
    try:
        cls = find_backend(AttentionBackendEnum.parse(name), current_platform().name)
    except MultimodalGenError:
        return []
    given = {pair.partition("=")[0].strip() for pair in done.split(",")}
    names = (f"{each}=" for each in parameters_of(cls.config_cls) if each not in given)
    return [f"{done}{comma}{each}" for each in _beginning(last, names)]


def _after_equals(incomplete: str, values: Iterable[str]) -> list[str]:
    """Return values for the last component of `component=value,...`."""
    start, equals, typed = incomplete.rpartition("=")
    if not equals or "," in typed:
        return []
    return [f"{start}={value}" for value in _beginning(typed, values)]


def _beginning(typed: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(typed.strip().lower())]


COMPLETIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "attention_backend": backend_names,
        "attention_backend_config": _parameters,
        "component_attention_backends": lambda incomplete: _after_equals(
            incomplete, map(str, AttentionBackendEnum)
        ),
        "quantize": lambda incomplete: _after_equals(incomplete, QUANTIZATIONS),
    }
)
"""What completes the values of a setting, by its name."""
