"""A tensor whose numbers another rank computes, and which nothing may read before they are here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from multimodal_gen.errors import UsageError

__all__ = ["Promise", "keep", "promise"]

# What may be done with it meanwhile: it tells its form, and parts of it.
_TOLD = tuple(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim"))
_FORM = frozenset({*_TOLD, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride})
_PARTS = frozenset({torch.Tensor.__getitem__, torch.Tensor.view, torch.Tensor.narrow})


class Promise(torch.Tensor):
    """See `promise`.

    Attributes:
        numbers: the memory, as an ordinary tensor.
        state: shared with its parts.
    """

    numbers: torch.Tensor
    state: "_State"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do with the numbers what is done with an ordinary tensor, once they are here."""
        del types
        states: list[_State] = []
        plain, named = _numbers(args, states), _numbers(dict(kwargs or {}), states)
        waiting = next((state for state in states if not state.kept), None)
        if waiting is not None and func not in _FORM and func not in _PARTS:
            raise UsageError(
                f"{waiting.reader} must not use the prediction of one guidance branch before it "
                f"asks for the other under --cfg-parallel, got {_name(func)}; run without "
                f"--cfg-parallel"
            )
        out = func(*plain, **named)
        return _wrap(out, waiting) if waiting is not None and func in _PARTS else out


class _State:
    def __init__(self, reader: str) -> None:
        self.reader = reader
        self.kept = False


def promise(numbers: torch.Tensor, reader: str) -> Promise:
    """Return a tensor whose numbers are not there until `keep` fills its memory, `numbers`.

    Its parts may be taken; everything else that reads it raises.

    Args:
        numbers: the memory.
        reader: who gets it, for messages.
    """
    return _wrap(numbers, _State(reader))


def keep(promised: Promise, numbers: torch.Tensor) -> None:
    """Fill a promise, and with it the parts that were taken of it."""
    promised.numbers.copy_(numbers)
    promised.state.kept = True


def _wrap(numbers: torch.Tensor, state: _State) -> Promise:
    wrapped = numbers.as_subclass(Promise)
    wrapped.numbers = numbers
    wrapped.state = state
    return wrapped


def _numbers(value: Any, states: list[_State]) -> Any:
    if isinstance(value, Promise):
        states.append(value.state)
        return value.numbers
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_numbers(x, states) for x in value)
    if isinstance(value, dict):
        return {key: _numbers(x, states) for key, x in value.items()}
    return value


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else str(name)
