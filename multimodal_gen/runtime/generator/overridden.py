"""Attributes that an object has for a while, and those that it has again afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def overridden(owner: object, **attributes: object) -> Iterator[None]:
    """Give an object other attributes of its own in the `with` block."""
    before = {name: it for name, it in vars(owner).items() if name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)
