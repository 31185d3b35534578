"""Means of differences and their intervals, by tables of Student's t and by hand."""

import math
from typing import Any

import pytest

from multimodal_gen.runtime.comparison.paired import (
    difference,
    estimate,
    holds,
    is_faster,
    own_noise,
    ratio_of_times,
    speed_text,
    student,
)
from multimodal_gen.runtime.comparison.record import Estimate, Generation, Run


def timed(*seconds: float, repeats: tuple[float | None, ...] = ()) -> Run:
    repeated = (*repeats, *[None] * len(seconds))
    clips = tuple(
        Generation(prompt=0, seed=seed, seconds=each, repeat_seconds=again)
        for seed, (each, again) in enumerate(zip(seconds, repeated, strict=False))
    )
    return Run(name="r", configuration="r", backend="fa", parameters={}, generations=clips)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_student_is_that_of_tables(freedom: int, t: float) -> None:
    assert student(freedom) == pytest.approx(t, abs=5e-4)


def test_an_interval_is_that_of_the_mean() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found is not None
    half = 3.182446 * math.sqrt(5 / 3 / 4)
    assert (found.count, found.mean) == (4, 2.5)
    assert (found.low, found.high) == pytest.approx((2.5 - half, 2.5 + half))
    assert holds(found, 0.5)
    assert not holds(found, 0.4)
    assert estimate([3.0]) == Estimate(count=1, mean=3.0)
    assert estimate([]) is None


def test_pairs_tell_apart_what_means_cannot() -> None:
    """The clips differ by tens, the two methods on each clip by one."""
    figures = {(0, 0): 20.0, (1, 0): 30.0, (2, 0): 40.0, (3, 0): 50.0}
    lower = {clip: figure - 1 - 0.1 * (clip[0] % 2) for clip, figure in figures.items()}
    found = difference(lower, {**figures, (9, 0): 0.0})
    assert found is not None
    assert (found.count, found.mean) == (4, pytest.approx(-1.05))
    assert not holds(found, 0)
    assert difference({(0, 0): 1.0}, {(0, 1): 1.0}) is None


def test_clips_of_a_prompt_count_as_one_where_there_are_several_prompts() -> None:
    figures = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): 4.0}
    several = difference(figures, dict.fromkeys(figures, 0.0))
    assert several == estimate([2.0, 4.0])
    one = difference(figures, {(0, 0): 0.0, (0, 1): 0.0})
    assert one == estimate([1.0, 3.0])


def test_equal_clips_count_as_a_hundred_decibels_and_nan_does_not() -> None:
    figures = {(0, 0): 40.0, (1, 0): math.inf, (2, 0): math.nan}
    found = difference(figures, dict.fromkeys(figures, math.inf))
    assert found is not None
    assert (found.count, found.mean) == (2, -30.0)


def test_a_speed_is_the_geometric_mean_of_ratios_on_the_same_clips() -> None:
    found = ratio_of_times(timed(1.0, 10.0), timed(4.0, 90.0, 5.0))
    assert found is not None
    assert (found.count, found.mean) == (2, pytest.approx(6.0))
    assert ratio_of_times(timed(0.0), timed(1.0)) is None
    (one,) = [ratio_of_times(timed(0.5), timed(1.0))]
    assert one == Estimate(count=1, mean=2.0)
    assert speed_text(one) == "2.00"


def test_only_what_is_beyond_chance_and_the_references_own_noise_is_faster() -> None:
    noise = own_noise(timed(1.0, 1.0, 1.0, repeats=(1.06, 1.04)))
    assert noise is not None
    assert (noise.count, noise.mean) == (2, pytest.approx(1 / 1.05, abs=1e-3))

    def speed(mean: float, half: float) -> Any:
        return Estimate(count=4, mean=mean, low=mean - half, high=mean + half)

    drift = speed(0.95, 0.02)  # slower the second time: it may favour what runs first
    assert is_faster(speed(1.3, 0.1), drift)
    assert not is_faster(speed(1.3, 0.3), drift)
    assert is_faster(speed(1.05, 0.01), None)
    assert not is_faster(speed(1.05, 0.01), drift)
    assert is_faster(Estimate(count=1, mean=1.2), Estimate(count=1, mean=1.1))
    assert not is_faster(Estimate(count=1, mean=1.2), Estimate(count=1, mean=0.8))
    assert not is_faster(None, None)
