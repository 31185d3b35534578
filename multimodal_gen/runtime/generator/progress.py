"""What a terminal shows of a run: a bar per stage with the time left, and when kernels compile.

    Loading pipeline components...   diffusers' own, and one per model of transformers
    denoise                          the pipeline's own: steps
    decode                           the autoencoder, which tells nothing until it is done
    save                             frames

Nothing is shown where the output is no terminal, and on ranks other than the first.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from multimodal_gen.runtime.distributed.groups import is_main_rank
from multimodal_gen.runtime.generator.overridden import overridden

_Item = TypeVar("_Item")


def is_shown() -> bool:
    """Tell whether anybody looks at bars."""
    return is_main_rank() and sys.stderr.isatty()


def each_frame(frames: Iterable[_Item], total: int) -> Iterator[_Item]:
    """Yield frames, and show how many are saved."""
    if not is_shown():
        yield from frames
        return
    from tqdm.auto import tqdm

    yield from tqdm(frames, total=total, desc="save", unit="frame", leave=False)


class Compilation:
    """How long torch compiled in the `with` block; says so on a bar while it does.

    Attributes:
        seconds: the sum.
        bar: shows that kernels compile, or None.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bar: Any = None
        self._depth = 0
        self._started = 0.0

    def __enter__(self) -> "Compilation":
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *error: object) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    def _start(self, what: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self._started = time.perf_counter()
            self._say("compiling kernels")

    def _end(self, what: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._started
            self._say("")

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(text)


@contextmanager
def follow(pipe: Any, starts: Callable[[], object] = lambda: None) -> Iterator[Compilation]:
    """Show the stages of a call of the pipeline that runs in the `with` block.

    Args:
        pipe: the pipeline.
        starts: called before the first step.

    Yields:
        How long torch compiles meanwhile.
    """
    shown = is_shown()
    config = {"disable": not shown, "desc": "denoise", "unit": "step"}
    own = pipe.progress_bar
    decoding: list[Any] = []

    @functools.wraps(own)
    def progress_bar(*args: Any, **kwargs: Any) -> Any:
        starts()
        bar = own(*args, **kwargs)
        if shown:
            compilation.bar = bar
            bar.close = functools.partial(_close, bar.close, decoding)
        return bar

    changed = overridden(pipe, progress_bar=progress_bar, _progress_bar_config=config)
    with Compilation() as compilation, changed:
        try:
            yield compilation
        finally:
            for bar in decoding:
                bar.update()
                bar.close()


def _close(close: Callable[[], object], decoding: list[Any]) -> None:
    """Close the bar of steps, and show that the autoencoder is at work.

    Pipelines that denoise in several stages have a bar for each; then that is shown once.
    """
    close()
    if not decoding:
        from tqdm.auto import tqdm

        decoding.append(tqdm(total=1, desc="decode", leave=False))
