"""Caches of tensors that many calls read, and that replays of CUDA graphs may read as well."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from itertools import chain
from typing import ParamSpec, TypeVar, cast

import torch

from multimodal_gen.errors import UsageError

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What the graph reads that is being captured, where its owner holds that.
_HELD: ContextVar[list[object] | None] = ContextVar("multimodal_gen_held", default=None)


@contextmanager
def held_by_graph() -> Iterator[list[object]]:
    """Yield what a graph reads that is captured in the block, to be held as long as the graph."""
    held: list[object] = []
    token = _HELD.set(held)
    try:
        yield held
    finally:
        _HELD.reset(token)


def being_captured() -> bool:
    """Whether a CUDA graph captures the current stream, whose kernels run only when replayed."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


def wait_for_devices(*made: object) -> None:
    """Wait for what makes these tensors, so that any stream may read them.

    On the current streams of their devices, and of devices that are among them; not in a capture,
    nor in a graph that is traced, which compute nothing.
    """
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not begun or torch.compiler.is_compiling() or being_captured():
        return
    for device in {*_devices_of(made)}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _devices_of(made: object) -> Iterator[torch.device]:
    """Yield the devices of tensors in tuples, lists and dataclasses."""
    if isinstance(made, torch.Tensor | torch.device):
        yield made.device if isinstance(made, torch.Tensor) else made
    elif isinstance(made, tuple | list):
        yield from chain.from_iterable(map(_devices_of, made))
    elif dataclasses.is_dataclass(made):
        yield from _devices_of([getattr(made, field.name) for field in dataclasses.fields(made)])


def static_cache(maxsize: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Cache what a function makes of its arguments: the last `maxsize`, and what graphs read.

    A replay reads the memory that its capture saw, however many shapes were seen since: what is
    asked for during a capture is held as long as the process lives, or by whom `held_by_graph`
    gives it to. Nothing is made during one: it would hold nothing before a replay, and lie in
    memory of that graph alone. What is made is waited for: any stream may read what is cached. Nor
    are there inference tensors: the first caller must not decide what later ones may do with them.

    Args:
        maxsize: how many results are held that no graph reads.
    """

    def decorate(make: Callable[_P, _R]) -> Callable[_P, _R]:
        @lru_cache(maxsize)
        def cached(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if being_captured():
                raise UsageError(
                    "a CUDA graph must be captured after a call with the same shapes and "
                    f"settings, which makes what the graph reads; got none ({make.__qualname__}); "
                    "run the call once before the capture"
                )
            with torch.inference_mode(False):
                made = make(*args, **kwargs)
            wait_for_devices(made, *args, *kwargs.values())
            return made

        read_by_graphs: dict[object, _R] = {}

        @wraps(make)
        def find(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            hashable = cast("dict[str, Hashable]", kwargs)
            if not being_captured():
                return cached(*args, **hashable)
            held = _HELD.get()
            if held is not None:
                held.append(cached(*args, **hashable))
                return cast("_R", held[-1])
            key = (args, *hashable.items())
            if key not in read_by_graphs:
                read_by_graphs[key] = cached(*args, **hashable)
            return read_by_graphs[key]

        find.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return find

    return decorate
