"""A mapping that cannot change, with a hash, which pickle and `copy` take."""

from collections.abc import Iterator, Mapping

__all__ = ["FrozenMapping", "frozen"]


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
