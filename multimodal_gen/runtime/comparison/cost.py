"""What one generation takes: its steps, its memory, its time in attention, and nothing else.

What is no part of a generation, such as replaying its calls on other backends, is `excluded`: its
time is taken from the step it fell into, and its memory does not count.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.comparison.record import LARGEST, Cost
from multimodal_gen.runtime.distributed.timing import Stopwatch
from multimodal_gen.runtime.generator.attention_check import layer_density
from multimodal_gen.runtime.generator.denoise import Timings
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.settings import option

_MOST_OF_IT = 1.1
"""Of a generation's time, what attention takes at most: both are measured, each by a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one generation took.

    Attributes:
        seconds: from the prompt to the pixels.
        step_seconds: of every denoising step.
        attention_seconds: of the denoisers' attention layers.
        peak_memory: bytes at most on the device; None where it does not tell.
        density: see `Cost`.
    """

    seconds: float = option(ge=0, le=LARGEST)
    step_seconds: tuple[float, ...] = option(ge=0, le=LARGEST)
    attention_seconds: float = option(ge=0, le=LARGEST)
    peak_memory: int | None = option(ge=0)
    density: float = option(ge=0, le=1.001)

    def __post_init__(self) -> None:
        if self.attention_seconds > _MOST_OF_IT * self.seconds:
            raise ConfigError(
                f"attention_seconds must be a part of the {self.seconds:.4g} seconds that the "
                f"generation took, got {self.attention_seconds:.4g}"
            )


class Meter:
    """Measures one generation.

    Args:
        device: where it runs.

    Attributes:
        timings: what `denoise` is to write its times to.
        highest: bytes at most on the device so far, what is excluded too; 0 where it does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self.timings = Timings(device)
        self.highest = 0
        self._device = device
        self._attention = Stopwatch()
        self._excluded: dict[int, float] = {}
        self._memory = _statistics_of(device)
        self._peak = 0
        if self._memory is not None:
            self._memory.reset_peak_memory_stats(device)

    def attend(
        self,
        layer: AttentionLayer,
        call: AttentionCall,
        serve: Callable[[AttentionCall], torch.Tensor],
    ) -> torch.Tensor:
        """Serve a call as a `Watch`, and count its time; nothing waits for the device."""
        if layer.site.role is AttentionRole.ENCODER:
            return serve(call)
        with self._attention.on(call.query.device):
            return serve(call)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave out what the block does."""
        start = self.timings.now()
        self._note_peak()
        try:
            yield
        finally:
            self._note_peak(counts=False)
            step = len(self.timings.steps)
            self._excluded[step] = self._excluded.get(step, 0.0) + self.timings.now() - start

    def spent(self, report: AttentionReport) -> Spent:
        """Return what the generation took, at its end.

        Args:
            report: what its layers ran.
        """
        self._note_peak()
        phases, steps = self.timings.phases, self.timings.steps
        step_seconds = tuple(
            max(0.0, seconds - self._excluded.get(step, 0.0)) for step, seconds in enumerate(steps)
        )
        return Spent(
            seconds=phases["prepare"] + sum(step_seconds) + phases["decode"],
            step_seconds=step_seconds,
            attention_seconds=self._attention.milliseconds() / 1e3,
            peak_memory=None if self._memory is None else self._peak,
            density=self_attention_density(report),
        )

    def _note_peak(self, *, counts: bool = True) -> None:
        """Note the memory that was taken until now, by the generation or by what is excluded."""
        if self._memory is None:
            return
        found = self._memory.max_memory_allocated(self._device)
        self.highest = max(self.highest, found)
        if counts:
            self._peak = max(self._peak, found)
        else:
            self._memory.reset_peak_memory_stats(self._device)


def self_attention_density(report: AttentionReport) -> float:
    """Return the share of pairs that self-attention attends to, mean over calls; 1 where dense."""
    layers = [layer for layer in report.layers if layer.role is AttentionRole.SELF and layer.calls]
    calls = sum(layer.calls for layer in layers)
    return sum(layer.calls * layer_density(layer) for layer in layers) / calls if calls else 1.0


def cost_of(found: Sequence[Spent], warm_up_seconds: float) -> Cost | None:
    """Return what a backend takes, from its generations; None where there are none."""
    if not found:
        return None
    peaks = [each.peak_memory for each in found if each.peak_memory is not None]
    steps = [seconds for each in found for seconds in each.step_seconds]
    return Cost(
        step_seconds=statistics.median(steps),
        generation_seconds=statistics.median(each.seconds for each in found),
        warm_up_seconds=warm_up_seconds,
        peak_memory=max(peaks) if peaks else None,
        density=statistics.fmean(each.density for each in found),
        attention_share=sum(each.attention_seconds for each in found) / max(sum(steps), 1e-9),
    )


def _statistics_of(device: torch.device) -> Any:
    """Return torch's module for a device where that counts memory, or None."""
    module: Any = torch.get_device_module(device)
    return module if hasattr(module, "reset_peak_memory_stats") else None
