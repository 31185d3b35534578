"""One call of a pipeline, watched: when each step ends, and the latents it leaves.

Pipelines have no common callback (HunyuanVideo-1.5 has none at all), but each calls
`scheduler.step` once per denoising step and opens its progress bar just before the first.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.loading import first_line
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
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
    start = timings.now()
    with _watched(pipe, timings) as last:
        result = pipe(**call.arguments)
    if not last:
        raise UsageError(f"{type(pipe).__name__} made no denoising step, so there is no result")
    timings.split(start)
    found = getattr(result, "frames", None)
    pixels = result.images if found is None else found
    return Denoised(pixels=tuple(pixels), latents=last[-1])


@contextmanager
def _watched(pipe: Any, timings: Timings) -> Iterator[list[torch.Tensor]]:
    """Note when steps end; yields a list that holds the latest latents."""
    last: list[torch.Tensor] = []
    step = pipe.scheduler.step

    # Pipelines look at the signature of `step`, which `wraps` keeps.
    @functools.wraps(step)
    def watched_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        last[:] = [result[0] if isinstance(result, tuple) else result.prev_sample]
        timings.step_done()
        return result

    bar = pipe.progress_bar

    @functools.wraps(bar)
    def watched_bar(*args: Any, **kwargs: Any) -> Any:
        timings.start_steps()
        return bar(*args, **kwargs)

    pipe.scheduler.step = watched_step
    pipe.progress_bar = watched_bar
    if hasattr(pipe, "check_inputs"):
        pipe.check_inputs = _explained(pipe.check_inputs)
    try:
        yield last
    finally:
        del pipe.scheduler.step
        del pipe.progress_bar
        vars(pipe).pop("check_inputs", None)


def _explained(check: Callable[..., Any]) -> Callable[..., Any]:
    """Turn what a pipeline says of its arguments into an error for the user."""

    @functools.wraps(check)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return check(*args, **kwargs)
        except ValueError as error:
            raise UsageError(f"the pipeline refuses its arguments: {first_line(error)}") from error

    return explained
