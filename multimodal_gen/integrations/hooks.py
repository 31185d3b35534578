"""Hooks on modules that `torch.compile` does not trace, and that copies of a module do not run."""

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hook", "no_hook", "untraced_hook"]


class Hook(functools.partial[Any]):
    """A hook without a Python frame of its own, which `torch.compile` would try to trace.

    In a copy of the model it does nothing: copies are not attached.
    """

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return no_hook, ()


def untraced_hook(function: Callable[..., Any]) -> Hook:
    """Return `function` as a hook; Dynamo must not trace what reads or sets context variables."""
    untraced: Callable[..., Callable[..., Any]] = torch.compiler.disable
    return Hook(untraced(function))


def no_hook() -> Callable[..., None]:
    """Return what a hook is in a copy of its module: nothing."""
    return _do_nothing


def _do_nothing(*args: object, **kwargs: object) -> None:
    del args, kwargs
