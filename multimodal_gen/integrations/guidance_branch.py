"""The names pipelines give to the calls of their denoiser, by `cache_context`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

__all__ = ["NamedCalls", "OwnCalls", "branch_name"]

# The name of the running call; per thread, like the context of attention layers.
_BRANCH: ContextVar[str | None] = ContextVar("multimodal_gen_branch", default=None)


def branch_name() -> str | None:
    """Return what the pipeline calls the running call, e.g. "cond"; None where it does not tell."""
    name = _BRANCH.get()
    return None if name is None else name.removeprefix("pred_")


class NamedCalls:
    """Stands in for a model's `cache_context` and notes the name of the call.

    A copy of the model gets its class's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def __call__(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Enter the model's own `cache_context` with the name noted."""
        token = _BRANCH.set(name)
        try:
            with type(self._model).cache_context(self._model, name, **kwargs):  # type: ignore[attr-defined]
                yield
        finally:
            _BRANCH.reset(token)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # The copy of the model is under construction and knows its copies by the model's memo.
        return OwnCalls, (self._model,)


class OwnCalls:
    """What `NamedCalls` copies to: the `cache_context` of the model's class."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, name: str, **kwargs: Any) -> Any:
        """Enter the model's own `cache_context`."""
        return type(self._model).cache_context(self._model, name, **kwargs)  # type: ignore[attr-defined]
