"""Notices when a pipeline's call ends, to drop what attention layers keep for it.

Calls of diffusers' pipelines end with `maybe_free_model_hooks`. Others, and calls that fail, end
for the layers with the next generation, or when their handle is told so or removed.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_NAME = "maybe_free_model_hooks"


class EndOfCall:
    """Stands in for a pipeline's `maybe_free_model_hooks`.

    A copy of the pipeline gets its class's own.
    """

    def __init__(self, pipeline: Any, ended: Callable[[], None]) -> None:
        self._pipeline = pipeline
        self._ended = ended

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Say that the call ended, and do what the pipeline does then."""
        self._ended()
        return getattr(type(self._pipeline), _NAME)(self._pipeline, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # The copy of the pipeline is under construction and knows its copies by the memo.
        return OwnEnd, (self._pipeline,)


class OwnEnd:
    """What `EndOfCall` copies to: the `maybe_free_model_hooks` of the pipeline's class."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the pipeline does at the end of a call."""
        return getattr(type(self._pipeline), _NAME)(self._pipeline, *args, **kwargs)


def notice_end(pipeline: Any, ended: Callable[[], None], undo: ExitStack) -> None:
    """Call `ended` at the end of every call of a pipeline that lets itself be noticed.

    Args:
        pipeline: the pipeline, or None.
        ended: what to call.
        undo: takes the step that takes it back.
    """
    own = getattr(type(pipeline), _NAME, None)
    # What somebody else put there stays; what a copy of an attached pipeline has is its class's.
    if own is None or not isinstance(vars(pipeline).get(_NAME), OwnEnd | None):
        return
    vars(pipeline)[_NAME] = EndOfCall(pipeline, ended)
    undo.callback(vars(pipeline).pop, _NAME, None)
