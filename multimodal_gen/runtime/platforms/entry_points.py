"""Reads what installed packages register by entry point."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from multimodal_gen.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def registered(
    group: str, base: type[Any], on_broken: Callable[[str, ConfigError], None]
) -> Iterator[tuple[str, type[Any]]]:
    """Yield name and class of every entry point of a group that loads.

    Args:
        group: entry-point group.
        base: class that what they name must derive from.
        on_broken: called with the name and the error of each entry point that cannot be loaded,
            or names something else.
    """
    # Not with the module, which `--help` imports.
    from importlib.metadata import entry_points

    for entry in entry_points(group=group):
        try:
            yield entry.name, _load(entry, group, base)
        except ConfigError as error:
            on_broken(entry.name, error)


def _load(entry: "EntryPoint", group: str, base: type[Any]) -> type[Any]:
    try:
        cls = entry.load()
    except Exception as error:
        raise _broken(entry.name, group, f"must load, got {error!r}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise _broken(entry.name, group, f"must name a subclass of {base.__name__}, got {cls!r}")
    return cls


def _broken(name: str, group: str, problem: str) -> ConfigError:
    return ConfigError(
        f"entry point {name!r} in group {group!r} {problem}; fix or uninstall the package that "
        f"declares it"
    )
