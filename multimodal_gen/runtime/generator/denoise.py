"""One call of a pipeline, watched: when each step ends, and the latents it leaves.

Pipelines have no common way to follow them. Most end a step with `callback_on_step_end`, which
HunyuanVideo-1.5 lacks; most step their own scheduler, but SkyReels-V2's diffusion forcing steps
copies of it only. Both are watched, and a step that both tell of counts once. Every pipeline opens
its progress bar just before the first step.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.joining import leads
from multimodal_gen.runtime.generator.failures import refusal_explained
from multimodal_gen.runtime.generator.record import Timings
from multimodal_gen.runtime.generator.sampling import Call

__all__ = ["Denoised", "denoise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """What a call of a pipeline gave.

    Attributes:
        pixels: floats in [0, 1], one [T, H, W, C] array per video or [H, W, C] per image.
        latents: what the last denoising step left, in the pipeline's own layout.
    """

    pixels: tuple[Any, ...]
    latents: torch.Tensor


def denoise(pipe: Any, call: Call, timings: Timings) -> Denoised:
    """Run the pipeline, and time its parts.

    The phases are "prepare" (text encoding and noise), the steps, and "decode".

    Raises:
        UsageError: the pipeline refuses its arguments.
    """
    pipe.set_progress_bar_config(disable=not (leads() and sys.stderr.isatty()))
    start = timings.now()
    watch = _Watch(timings)
    with _watched(pipe, watch), refusal_explained():
        result = pipe(**call.arguments, **_callback(pipe, watch))
    if watch.latents is None:
        raise UsageError(f"{type(pipe).__name__} made no denoising step, so there is no result")
    timings.split(start)
    found = getattr(result, "frames", None)
    pixels = result.images if found is None else found
    return Denoised(pixels=tuple(pixels), latents=watch.latents)


class _Watch:
    """Hears of steps, from the scheduler and from the callback, and keeps the latest latents."""

    def __init__(self, timings: Timings) -> None:
        self.latents: torch.Tensor | None = None
        self._timings = timings
        self._told_by_scheduler = False

    def starts(self) -> None:
        """The first step is about to start."""
        self._timings.start_steps()

    def scheduler_stepped(self, result: Any) -> None:
        """The pipeline's own scheduler, not a copy of it, made a step."""
        self.latents = result[0] if isinstance(result, tuple) else result.prev_sample
        self._timings.step_done()
        self._told_by_scheduler = True

    def step_ended(self, pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        """Serve as a pipeline's `callback_on_step_end`."""
        # Some pipelines step a part of the latents, so that what they hold now is the truth.
        self.latents = tensors["latents"]
        if not self._told_by_scheduler:
            self._timings.step_done()
        self._told_by_scheduler = False
        return tensors


class _WatchedStep:
    """Stands for `scheduler.step`; in a copy of the scheduler it is the copy's own method again."""

    def __init__(self, scheduler: Any, watch: _Watch) -> None:
        self._scheduler = scheduler
        self._watch = watch
        self._step = scheduler.step
        # Pipelines look at the signature of `step`, which this keeps.
        functools.update_wrapper(self, self._step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._step(*args, **kwargs)
        self._watch.scheduler_stepped(result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._scheduler))
        # Without one, only the scheduler's attributes are copied, to be given back to it later.
        return self if copied is None else MethodType(type(copied).step, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        # The unpickled scheduler has no attributes yet, so that this finds its class's method.
        return getattr, (self._scheduler, "step")


def _callback(pipe: Any, watch: _Watch) -> dict[str, Any]:
    """Return the argument by which the pipeline tells of its steps, if it has one."""
    name = "callback_on_step_end"
    takes_it = name in inspect.signature(type(pipe).__call__).parameters
    gives_latents = "latents" in getattr(pipe, "_callback_tensor_inputs", ())
    return {name: watch.step_ended} if takes_it and gives_latents else {}


@contextmanager
def _watched(pipe: Any, watch: _Watch) -> Iterator[None]:
    """Tell `watch` of the start of the steps, and of those of the pipeline's scheduler."""
    bar = pipe.progress_bar

    @functools.wraps(bar)
    def watched_bar(*args: Any, **kwargs: Any) -> Any:
        watch.starts()
        return bar(*args, **kwargs)

    pipe.scheduler.step = _WatchedStep(pipe.scheduler, watch)
    pipe.progress_bar = watched_bar
    try:
        yield
    finally:
        del pipe.scheduler.step
        del pipe.progress_bar
