"""What `apply` puts into models and pipelines: hooks, and stand-ins for methods and objects.

All of it is a `StandIn`: that is the one reason why copies of attached models are stock models.
"""

import functools
import operator
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch


class StandIn:
    """Something of this package in an attached model or pipeline.

    A copy of the model, by `copy.deepcopy` or pickle, has something else in its place.
    """

    __slots__ = ()

    def in_copies(self) -> Any:
        """Return what a copy has here; what that refers to is copied along."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copy or pickle as the value of `in_copies`."""
        del protocol
        # Unpickling a tuple's first entry takes nothing but Python.
        return operator.getitem, ((self.in_copies(),), 0)


class Hook(StandIn, functools.partial[Any]):
    """A hook without a Python frame of its own, which `torch.compile` would try to trace.

    In a copy of the model it does nothing.
    """

    def in_copies(self) -> Callable[..., None]:
        """Return a hook that does nothing."""
        return do_nothing


def untraced_hook(function: Callable[..., Any]) -> Hook:
    """Return `function` as a hook; Dynamo must not trace what reads or sets context variables."""
    untraced: Callable[..., Callable[..., Any]] = torch.compiler.disable
    return Hook(untraced(function))


def do_nothing(*args: object, **kwargs: object) -> None:
    """Do what a hook of an attached model does in its copies."""
    del args, kwargs


class _Method(StandIn):
    """A function in place of a method of one object."""

    def __init__(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._owner = owner
        self._name = name
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def in_copies(self) -> MethodType:
        return own_method(self._owner, self._name)


def own_method(owner: object, name: str) -> MethodType:
    """Return the method of an object's class, bound to it, whatever the object has instead."""
    return MethodType(getattr(type(owner), name), owner)


def replace_method(
    owner: object,
    name: str,
    function: Callable[..., Any],
    undo: ExitStack,
    *,
    over_others: bool = False,
) -> None:
    """Put a function in place of a method of one object, if its class has that method.

    What somebody else puts there since stays, and calls what was there before once `undo` ended;
    what a copy of an attached object has there is its class's.

    Args:
        owner: the object.
        name: the method.
        function: called without the object.
        undo: takes the step that takes it back.
        over_others: replace what somebody else put there before, too, which stays otherwise.
    """
    if not hasattr(type(owner), name):
        return
    attributes, replaced = vars(owner), getattr(owner, name)
    before = attributes.get(name)
    if before == own_method(owner, name):  # as a copy of an attached object has it
        before = None
    if before is not None and not over_others:
        return
    attributes[name] = method = _Method(owner, name, function)

    def put_back() -> None:
        method.function = replaced
        if attributes.get(name) is not method:
            return
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before

    undo.callback(put_back)
