"""Figures of two runs, paired by clip: the mean of what lies between them, and its 95 % interval.

Clips differ from each other ten times as much as methods do, so that two means say little, while
the differences on the same clips say much. Intervals are Student's: with an infinite number of such
clips, the mean would lie within in 19 of 20 comparisons. One clip has none.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from multimodal_gen.runtime.comparison.record import LARGEST, Estimate, Run

MOST_DB = 100.0
"""What infinite decibels count as in an average with finite ones."""

_SHARE = 0.95
_PromptT = TypeVar("_PromptT")


def difference(
    figures: Mapping[tuple[_PromptT, Any], float], others: Mapping[tuple[_PromptT, Any], float]
) -> Estimate | None:
    """Return how much higher figures are than others on the same clips; None without such clips.

    Clips of one prompt are like each other, so where there are several prompts, they count as one,
    their mean. Infinite figures count as `MOST_DB`; what is NaN is left out.

    Args:
        figures: by prompt and seed.
        others: the same.
    """
    apart: dict[_PromptT, list[float]] = {}
    for clip in figures:
        each = min(figures[clip], MOST_DB) - min(others.get(clip, math.nan), MOST_DB)
        if abs(each) <= LARGEST:
            apart.setdefault(clip[0], []).append(each)
    if len(apart) == 1:
        return estimate(*apart.values())
    return estimate([statistics.fmean(each) for each in apart.values()])


def ratio_of_times(run: Run, other: Run) -> Estimate | None:
    """Return how many clips a run makes while another makes one; None where no clip has both times.

    It is the one figure of speed, wherever one is shown: the geometric mean over the clips.
    """
    times, others = (
        {(each.prompt, each.seed): each.seconds for each in of.generations if each.seconds}
        for of in (run, other)
    )
    return _geometric([others[clip] / times[clip] for clip in times if clip in others])


def own_noise(reference: Run) -> Estimate | None:
    """Return the same of a run's second pass, by the clips that it made twice."""
    twice = [(each.seconds, each.repeat_seconds) for each in reference.generations]
    return _geometric([first / again for first, again in twice if first and again])


def is_faster(speed: Estimate | None, noise: Estimate | None) -> bool:
    """Whether a speed is more than chance: all of its interval above 1 and above the noise."""
    if speed is None:
        return False
    beyond = 1.0
    if noise is not None:  # to either side, as a drift may favour what runs later
        low, high = noise.low or noise.mean, noise.high or noise.mean
        beyond = max(low, 1 / low, high, 1 / high)
    return (speed.mean if speed.low is None else speed.low) > beyond


def as_fast(run: Run, others: Iterable[Run]) -> list[str]:
    """Return the names of those whose speed is not told from a run's by the clips that both have.

    One clip tells none apart, and is no reason to name all.
    """
    paired = [(each.name, ratio_of_times(run, each)) for each in others if each.name != run.name]
    return [name for name, ratio in paired if ratio and ratio.count > 1 and holds(ratio, 1)]


def speed_text(speed: Estimate) -> str:
    """Return a speed with its interval, e.g. "2.26 [2.21, 2.31]"."""
    interval = "" if speed.low is None else f" [{speed.low:.2f}, {speed.high:.2f}]"
    return f"{speed.mean:.2f}{interval}"


def holds(found: Estimate, figure: float) -> bool:
    """Whether a figure is in the interval: what is estimated may be it."""
    return found.low is None or found.high is None or found.low <= figure <= found.high


def estimate(figures: Sequence[float]) -> Estimate | None:
    """Return the mean of figures with its interval; None without any."""
    if not figures:
        return None
    count, (mean, deviation) = len(figures), mean_and_deviation(figures)
    if count == 1:
        return Estimate(count=1, mean=mean)
    half = student(count - 1) * deviation / math.sqrt(count)
    return Estimate(count=count, mean=mean, low=mean - half, high=mean + half)


def mean_and_deviation(figures: Sequence[float]) -> tuple[float, float]:
    """Return the mean of figures and their standard deviation (n - 1; 0 of one)."""
    mean = statistics.fmean(figures)
    squares = math.fsum((each - mean) ** 2 for each in figures)
    return mean, math.sqrt(squares / max(len(figures) - 1, 1))


@cache
def student(freedom: int) -> float:
    """Return by how many standard errors a mean may be off, by the degrees of freedom."""
    low, high = 0.0, 16.0  # with one degree it is 12.7
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < _SHARE else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability that |T| <= t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * n / (n + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def _geometric(ratios: Sequence[float]) -> Estimate | None:
    found = estimate([math.log(each) for each in ratios])
    if found is None:
        return None
    low, high = (
        None if bound is None else math.exp(min(bound, 200.0)) for bound in (found.low, found.high)
    )
    return Estimate(count=found.count, mean=math.exp(found.mean), low=low, high=high)
