"""One call of a pipeline, watched: its steps, timings and failures, and what it gave.

Pipelines have no common way to follow them. Most end a step with `callback_on_step_end`, which
HunyuanVideo-1.5 lacks; most step their own scheduler, but SkyReels-V2's diffusion forcing steps
copies of it only. Both are watched, and a step that both tell of counts once. Every pipeline opens
its progress bar just before the first step.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.chat_templates import limited_templates
from multimodal_gen.runtime.generator.library_errors import told_of_run
from multimodal_gen.runtime.generator.overridden import overridden
from multimodal_gen.runtime.generator.progress import follow
from multimodal_gen.runtime.generator.sampling import Call
from multimodal_gen.runtime.layers.attention.report import Json
from multimodal_gen.runtime.managers.generation import describe_generation
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import as_flag

_REMEDY = "try --dtype bfloat16 or float32, another --attention-backend, or a smaller guidance"


class Timings:
    """Wall-clock seconds of the phases of a run.

    Work on an accelerator is waited for at the end of every denoising step, so that a step's time
    is its own.

    Args:
        device: where the pipeline runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.phases: dict[str, float] = {}
        self.steps: list[float] = []
        self._device = device
        self._started: float | None = None
        self._mark: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the `with` block as phase `name`."""
        start = self.now()
        yield
        self.phases[name] = self.now() - start

    def now(self) -> float:
        """Return the time once the device is idle."""
        synchronize = torch.get_device_module(self._device).synchronize
        # Not every kind of device takes an argument here; the current one is the default.
        synchronize(*([] if self._device.index is None else [self._device]))
        return time.perf_counter()

    def start_steps(self) -> None:
        """Mark the start of denoising steps; pipelines of several chunks have several starts."""
        self._mark = self.now()
        self._started = self._started or self._mark

    def step_done(self) -> None:
        """Mark the end of a denoising step."""
        now = self.now()
        self.steps.append(now - (self._mark or now))
        self._mark = now

    def split(self, start: float) -> None:
        """Take what ran since `start`, outside the steps, as the phases "prepare" and "decode"."""
        end = self.now()
        self.phases.setdefault("prepare", (self._started or start) - start)
        self.phases["decode"] = end - (self._mark or end)

    def as_dict(self) -> dict[str, Json]:
        """Return seconds by phase, and by step under "steps", rounded to microseconds."""
        phases: dict[str, Json] = {name: round(value, 6) for name, value in self.phases.items()}
        return {**phases, "steps": [round(value, 6) for value in self.steps]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """What a call of a pipeline gave.

    Attributes:
        pixels: floats in [0, 1], one [T, H, W, C] array per video or [H, W, C] per image.
        latents: what the last denoising step left, in the pipeline's own layout.
        notes: what the pipeline made besides and is lost.
    """

    pixels: tuple[Any, ...]
    latents: torch.Tensor
    notes: tuple[str, ...] = ()


def denoise(
    pipe: Any,
    call: Call,
    timings: Timings,
    when_stepped: Callable[[int, torch.Tensor], None] = lambda step, latents: None,
) -> Denoised:
    """Run the pipeline, and time its parts.

    The phases are "prepare" (text encoding and noise), the steps, and "decode"; "compile" is what
    torch took to compile within them.

    Args:
        pipe: the pipeline.
        call: its arguments.
        timings: takes the times.
        when_stepped: gets the index of each step and the latents after it; twice for a step where
            the pipeline changes what its scheduler returned, the second time what holds.

    Raises:
        UsageError: the pipeline refuses its arguments.
    """
    start = timings.now()
    watch = _Watch(timings, when_stepped)
    with (
        follow(pipe, timings.start_steps) as compilation,
        overridden(pipe, **call.changed),
        overridden(pipe.scheduler, step=_WatchedStep(pipe.scheduler, watch)),
        told_of_run(),
        describe_generation(call.generation),
        limited_templates(pipe),
    ):
        result = pipe(**call.arguments, **_callback(pipe, watch))
    if compilation.seconds:
        timings.phases["compile"] = compilation.seconds
    if watch.latents is None:
        raise UsageError(f"{type(pipe).__name__} made no denoising step, so there is no result")
    timings.split(start)
    found = getattr(result, "frames", None)
    pixels = result.images if found is None else found
    notes: tuple[str, ...] = ()
    if getattr(result, "audio", None) is not None:
        notes = (f"the sound that {type(pipe).__name__} made is not written, videos are silent",)
    return Denoised(pixels=tuple(pixels), latents=watch.latents, notes=notes)


class _Watch:
    """Hears of steps, from the scheduler and from the callback, and keeps the latest latents."""

    def __init__(self, timings: Timings, when_stepped: Callable[[int, torch.Tensor], None]) -> None:
        self.latents: torch.Tensor | None = None
        self._timings = timings
        self._when_stepped = when_stepped
        self._counted_by_scheduler = False

    def scheduler_stepped(self, result: Any) -> None:
        """The pipeline's own scheduler, not a copy of it, made a step."""
        self.latents = result[0] if isinstance(result, tuple) else result.prev_sample
        self._timings.step_done()
        self._counted_by_scheduler = True
        self._tell(self.latents)

    def step_ended(self, pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        """Serve as a pipeline's `callback_on_step_end`."""
        # Some pipelines step a part of the latents, so that what they hold now is the truth.
        self.latents = tensors["latents"]
        if not self._counted_by_scheduler:
            self._timings.step_done()
        self._counted_by_scheduler = False
        self._tell(tensors["latents"])
        return tensors

    def _tell(self, latents: torch.Tensor) -> None:
        self._when_stepped(len(self._timings.steps) - 1, latents)


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


def check_finite(run: Denoised) -> None:
    """Refuse a result that would be written as black.

    Raises:
        UsageError: latents are nan or infinite, or a whole output is.
    """
    import numpy as np

    bad = run.latents.numel() - int(torch.isfinite(run.latents).sum())
    if bad:
        raise UsageError(
            f"the denoised latents must be finite, got {bad} of {run.latents.numel()} values that "
            f"are nan or infinite; {_REMEDY}"
        )
    for pixels in run.pixels:
        if not np.isfinite(pixels).any():
            raise UsageError(
                "the decoded pixels must be finite, got nothing but nan or infinite values from "
                "finite latents; the autoencoder overflows: try --dtype bfloat16 or float32"
            )


def produced(pixels: Sequence[Any]) -> dict[str, Json]:
    """Return sizes and number of the outputs, and how many values had to be replaced by black.

    Args:
        pixels: one [T, H, W, C] array per video or [H, W, C] per image.
    """
    import numpy as np

    shape = pixels[0].shape
    return {
        "num_outputs": len(pixels),
        "num_frames": shape[0] if len(shape) == 4 else None,
        "height": shape[-3],
        "width": shape[-2],
        "non_finite_values": sum(int(array.size - np.isfinite(array).sum()) for array in pixels),
    }


def differences(made: dict[str, Json], args: ServerArgs) -> tuple[str, ...]:
    """Return a note for each size that was asked for and is not what was made."""
    notes = []
    for name in ("num_outputs", "num_frames", "height", "width"):
        asked = getattr(args, name)
        if asked is not None and made[name] != asked:
            notes.append(f"{as_flag(name)} {asked} was asked for, the pipeline made {made[name]}")
    return tuple(notes)
