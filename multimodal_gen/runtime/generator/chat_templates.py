"""Chat templates of tokenizers, which are programs of others: they get so many seconds a call."""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.overridden import overridden

_SECONDS = 5


@contextmanager
def limited_templates(pipe: Any) -> Iterator[None]:
    """Give every chat template of a pipeline so many seconds a call: it is a program of others."""
    limited = [each for each in pipe.components.values() if getattr(each, "chat_template", None)]
    with ExitStack() as undo:
        for component in limited:
            fill_in = functools.partial(_fill_in, component.apply_chat_template)
            undo.enter_context(overridden(component, apply_chat_template=fill_in))
        yield


def _fill_in(fill_in: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Fill in a chat template, line by line until its time is over."""
    end = time.monotonic() + _SECONDS

    def watch(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > end:
            raise UsageError(
                f"the chat template of the model's tokenizer must be filled in within "
                f"{_SECONDS} s, it took longer; check its folder"
            )
        return watch if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return fill_in(*args, **kwargs)
    finally:
        sys.settrace(before)
