"""Finds the index of the denoising step a model call belongs to.

Calls are never counted: guidance calls a model several times per step, caches skip calls, and two
experts share one schedule. What counts is where the call's timestep sits in the schedule.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from multimodal_gen.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where in a generation a model call is.

    Attributes:
        index: denoising step, from 0.
        num_steps: number of steps, or None when there is no schedule to tell.
        request_id: identifies the generation.
        sigmas: the scheduler's noise level of every step, or None where it has none, or they
            were not asked for.
    """

    index: int
    num_steps: int | None
    request_id: str
    sigmas: tuple[float, ...] | None = None


class StepTracker:
    """Follows one pipeline, or one model outside a pipeline, through its generations.

    Args:
        scheduler: returns the pipeline's scheduler, or None.

    Attributes:
        when_ended: called with the id of a generation that is over, maybe more than once.
        reads_sigmas: whether to read the scheduler's noise levels, which waits for the device once
            per schedule.
    """

    def __init__(self, scheduler: Callable[[], Any] = lambda: None) -> None:
        self._scheduler = scheduler
        self._schedule: torch.Tensor | None = None
        self._timesteps: list[float] = []
        # By the step that a pipeline enters the schedule at: the noise levels from there on.
        self._sigmas: dict[int, tuple[float, ...]] = {}
        self._request_id = ""
        self._index = 0
        self._value: float | None = None
        self._direction = 0
        self._last: Step | None = None
        self.when_ended: list[Callable[[str], None]] = []
        self.reads_sigmas = False

    def end_request(self) -> None:
        """Say that the generation that ran last is over."""
        for ended in self.when_ended if self._request_id else ():
            ended(self._request_id)

    def locate(self, timestep: float, dtype: torch.dtype, scale: float = 1.0) -> Step:
        """Return the step of a call.

        Args:
            timestep: the value the model was called with.
            dtype: what it was rounded to on its way there.
            scale: factor between the scheduler's timesteps and the model's.
        """
        scheduler = self._scheduler()
        self._follow(getattr(scheduler, "timesteps", None))
        first = int(getattr(scheduler, "begin_index", None) or 0)
        index = self._match(timestep, dtype, scale, getattr(scheduler, "step_index", None))
        if index is None:
            index, first = self._count(timestep), 0
        elif index < self._index or not self._request_id:
            self._start_request()
        self._value = timestep
        return self._step(index, first)

    def require_sigmas(self, asked: object) -> None:
        """Refuse steps that are named by noise levels where the scheduler has none.

        Raises:
            UsageError: says what it has.
        """
        scheduler = self._scheduler()
        if isinstance(getattr(scheduler, "sigmas", None), torch.Tensor):
            return
        found = "none: a model outside of a pipeline has no scheduler"
        if scheduler is not None:
            named = vars(scheduler).items()
            tensors = [name for name, value in named if isinstance(value, torch.Tensor)]
            has = ", ".join(name for name in tensors if not name.startswith("_"))
            found = f"{type(scheduler).__name__}, which has {has or 'no noise levels'}"
        raise UsageError(
            f"steps {asked} must be those of a scheduler that has sigmas, got {found}; name steps "
            f"by their indices (`dense_steps`, or `steps` in rules)"
        )

    @property
    def has_index(self) -> bool:
        """Whether the pipeline's scheduler says which step it is at."""
        return hasattr(self._scheduler(), "step_index")

    def locate_by_index(self) -> Step:
        """Return the step the scheduler says it is at, for calls without a timestep.

        Before its first step a scheduler has no index; then it is where its schedule begins.
        """
        scheduler = self._scheduler()
        self._follow(getattr(scheduler, "timesteps", None))
        first = int(getattr(scheduler, "begin_index", None) or 0)
        index = getattr(scheduler, "step_index", None)
        index = first if index is None else int(index)
        if index < self._index or not self._request_id:
            self._start_request()
        return self._step(index, first)

    def locate_again(self) -> tuple[Step, float | None]:
        """Return the step of the call before, and its timestep, for calls that cannot be read.

        Raises:
            UsageError: there was none.
        """
        if self._last is None:
            raise UsageError(
                "a CUDA graph of a denoiser must be captured after a call at the same timestep, "
                "which cannot be read during a capture; got none; run the denoiser once before it"
            )
        return self._last, self._value

    def _step(self, index: int, first: int) -> Step:
        """Return the step at `index` of a schedule that the pipeline enters at `first`."""
        self._index = index
        self._last = Step(
            index=max(index - first, 0),
            num_steps=len(self._timesteps) - first if self._timesteps else None,
            request_id=self._request_id,
            sigmas=self._sigmas_from(first),
        )
        return self._last

    def _follow(self, schedule: object) -> None:
        """Take over a new schedule; a pipeline makes one per generation."""
        if schedule is self._schedule:
            return
        self._schedule = schedule if isinstance(schedule, torch.Tensor) else None
        timesteps = [] if self._schedule is None else self._schedule.tolist()
        self._timesteps = [float(timestep) for timestep in timesteps]
        self._sigmas.clear()
        self._start_request()

    def _sigmas_from(self, first: int) -> tuple[float, ...] | None:
        """Return the noise levels of the schedule from a step on, read once per schedule."""
        if not self.reads_sigmas:
            return None
        count = len(self._timesteps)
        if first not in self._sigmas:
            given: object = getattr(self._scheduler(), "sigmas", None)
            sigmas = given.tolist() if isinstance(given, torch.Tensor) and given.dim() == 1 else []
            self._sigmas[first] = tuple(sigmas[first:count]) if len(sigmas) >= count else ()
        return self._sigmas[first] or None

    def _start_request(self) -> None:
        self.end_request()
        self._request_id = uuid.uuid4().hex[:12]
        self._index, self._value, self._direction = 0, None, 0

    def _match(
        self, value: float, dtype: torch.dtype, scale: float, step_index: int | None
    ) -> int | None:
        expected = [timestep * scale for timestep in self._timesteps]
        slack = 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        at_least = 1e-9 if dtype.is_floating_point else 0.5
        near = {
            index: abs(value - timestep)
            for index, timestep in enumerate(expected)
            if abs(value - timestep) <= max(slack * abs(timestep), at_least)
        }
        if step_index in near:
            # Schedulers of order 2 repeat timesteps, and 16 bits round neighbours together.
            return step_index
        if not near:
            return None
        closest = min(near.values())
        same = [index for index, distance in near.items() if distance == closest]
        return next((index for index in same if index >= self._index), same[0])

    def _count(self, value: float) -> int:
        """Count changes of the timestep; one against their direction starts a generation."""
        if not self._request_id:
            self._start_request()
        if self._value is None or value == self._value:
            return self._index
        direction = 1 if value > self._value else -1
        if self._direction and direction != self._direction:
            self._start_request()
            return 0
        self._direction = direction
        return self._index + 1
