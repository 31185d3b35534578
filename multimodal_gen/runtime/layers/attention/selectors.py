"""Which steps and layers are meant, and numbers that change over the steps.

They are named by index (`0-3,38`), as the first share of all, or by the noise levels of the run's
scheduler (`>0.9`, `0.4-0.7`). A number by share of the schedule is `{0: 0.5, 0.4: 0.9}`.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.plain_values import short

__all__ = [
    "Axis",
    "FirstShare",
    "IndexSelector",
    "Indices",
    "Ratio",
    "RatioSchedule",
    "SigmaSelector",
    "StepSet",
    "first_of",
    "ratio_now",
]


@dataclass(frozen=True, slots=True)
class IndexSelector:
    """A set of indices from 0, as inclusive ranges; an open end reaches to the last index.

    Attributes:
        ranges: (first, last) pairs; `last` is None for an open range.
    """

    ranges: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, value: object, *, name: str = "selector") -> "IndexSelector":
        """Read a selector from text (`0-3,38`, `10-`, `-5`), an int, or a list of both.

        Raises:
            ConfigError: `value` is none of these, or a range runs backwards.
        """
        if isinstance(value, bool):
            raise _malformed(name, value)
        if isinstance(value, int):
            value = [value]
        if isinstance(value, (list, tuple)):
            # A negative int would read as a range that starts at 0.
            if not all(isinstance(i, str) or (type(i) is int and i >= 0) for i in value):
                raise _malformed(name, value)
            value = ",".join(str(item) for item in value)
        if not isinstance(value, str) or not value.strip():
            raise _malformed(name, value)
        return cls(tuple(_parse_range(part.strip(), name, value) for part in value.split(",")))

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and any(
            first <= index and (last is None or index <= last) for first, last in self.ranges
        )

    def holds(self, index: int, total: int) -> bool:
        """Return whether an index is in the set; how many there are makes no difference."""
        return index in self

    def __and__(self, other: "IndexSelector") -> "IndexSelector | None":
        """Return the indices in both, or None where there are none."""
        shared = []
        for first, last in self.ranges:
            for start, stop in other.ranges:
                low = max(first, start)
                ends = [end for end in (last, stop) if end is not None]
                high = min(ends) if ends else None
                if high is None or low <= high:
                    shared.append((low, high))
        return IndexSelector(tuple(shared)) if shared else None

    def __str__(self) -> str:
        return ",".join(_range_text(first, last) for first, last in self.ranges)


def _parse_range(part: str, name: str, value: object) -> tuple[int, int | None]:
    first, dash, last = part.partition("-")
    first, last = first.strip(), last.strip()
    # Nine digits are plenty for an index, and Python refuses to read thousands.
    given = [text for text in (first, last) if text]
    numbers_ok = all(text.isascii() and text.isdigit() and len(text) <= 9 for text in given)
    if not numbers_ok or not (first or last):
        raise _malformed(name, value)
    if not dash:
        return int(first), int(first)
    low = int(first) if first else 0
    high = int(last) if last else None
    if high is not None and high < low:
        raise ConfigError(f"{name} must have ranges that run upwards, got {part!r} in {value!r}")
    return low, high


def _range_text(first: int, last: int | None) -> str:
    if last is None:
        return f"{first}-"
    return str(first) if first == last else f"{first}-{last}"


def _malformed(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{name} must be indices from 0 such as '0-3,38', '10-' or [0, 1, 38], got {value!r}"
    )


@dataclass(frozen=True, slots=True)
class FirstShare:
    """The first share of indices whose number is known later, such as the steps of a run.

    Attributes:
        share: in (0, 1]; of n indices it means the first floor(share * n).
    """

    share: float

    def holds(self, index: int, total: int) -> bool:
        """Return whether an index is among them where there are `total`."""
        return index < first_of(self.share, total)

    def __str__(self) -> str:
        return f"first {self.share:.4g} of all"


Indices: TypeAlias = IndexSelector | FirstShare
Axis: TypeAlias = Literal["steps", "layers"]


def first_of(share: float, total: int) -> int:
    """Return floor(share * total), the share read in decimals as people write it."""
    return math.floor(Fraction(repr(float(share))) * total)


_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_BOUND = re.compile(rf"(>=|<=|>|<)\s*({_NUMBER})")
_BETWEEN = re.compile(rf"({_NUMBER})\s*-\s*({_NUMBER})")

# Schedulers keep sigmas in float32: what they print as 0.9 may be a little more or less.
_NEAR = 1e-6

_SigmaRange: TypeAlias = tuple[float, bool, float, bool]


@dataclass(frozen=True, slots=True)
class SigmaSelector:
    """Noise levels, as ranges in the units of a scheduler's sigmas.

    Attributes:
        ranges: (low, whether low is one of them, high, whether high is).
    """

    ranges: tuple[_SigmaRange, ...]

    @classmethod
    def parse(cls, value: object, *, name: str = "sigma") -> "SigmaSelector":
        """Read a selector from text (`>0.9`, `<=0.1`, `0.4-0.7`, with commas), or a list of it.

        Ranges with a dash hold both of their ends.

        Raises:
            ConfigError: `value` is neither, or a range runs backwards.
        """
        if isinstance(value, SigmaSelector):
            return value
        if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
            value = ",".join(value)
        if not isinstance(value, str) or not value.strip():
            raise _malformed_sigma(name, value)
        return cls(tuple(_sigma_range(part.strip(), name, value) for part in value.split(",")))

    def __contains__(self, sigma: float) -> bool:
        return any(
            (_is_near(sigma, low) and low_held)
            or (_is_near(sigma, high) and high_held)
            or (low < sigma < high and not _is_near(sigma, low) and not _is_near(sigma, high))
            for low, low_held, high, high_held in self.ranges
        )

    def __and__(self, other: "SigmaSelector") -> "SigmaSelector | None":
        """Return the noise levels in both, or None where there are none."""
        shared = []
        for low, low_held, high, high_held in self.ranges:
            for start, start_held, stop, stop_held in other.ranges:
                lowest, lowest_open = max((low, not low_held), (start, not start_held))
                highest, highest_held = min((high, high_held), (stop, stop_held))
                if lowest < highest or (lowest == highest and highest_held and not lowest_open):
                    shared.append((lowest, not lowest_open, highest, highest_held))
        return SigmaSelector(tuple(shared)) if shared else None

    def __str__(self) -> str:
        return ",".join(map(_sigma_text, self.ranges))


def _is_near(sigma: float, bound: float) -> bool:
    return abs(sigma - bound) <= _NEAR * max(1.0, abs(bound)) and math.isfinite(bound)


def _sigma_range(part: str, name: str, value: object) -> _SigmaRange:
    bound, between = _BOUND.fullmatch(part), _BETWEEN.fullmatch(part)
    if bound is not None:
        limit, held = float(bound[2]), "=" in bound[1]
        if math.isfinite(limit):
            return (limit, held, math.inf, False) if part[0] == ">" else (0.0, True, limit, held)
    if between is not None:
        low, high = float(between[1]), float(between[2])
        if high < low:
            raise ConfigError(
                f"{name} must have ranges that run upwards, got {part!r} in {value!r}"
            )
        if math.isfinite(high):
            return low, True, high, True
    raise _malformed_sigma(name, value)


def _sigma_text(held: _SigmaRange) -> str:
    low, low_held, high, high_held = held
    if math.isinf(high):
        return f"{'>=' if low_held else '>'}{low:.10g}"
    if low == 0 and low_held:
        return f"{'<=' if high_held else '<'}{high:.10g}"
    return f"{low:.10g}-{high:.10g}"


def _malformed_sigma(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{name} must be ranges of sigmas such as '>0.9', '<=0.1' or '0.4-0.7', got {short(value)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSet:
    """Denoising steps; what is given must all hold.

    Attributes:
        indices: their indices, or None for any.
        first: the first share of the run's steps, or None for all of them.
        sigma: their noise levels, or None for any.
    """

    indices: IndexSelector | None = None
    first: FirstShare | None = None
    sigma: SigmaSelector | None = None

    @classmethod
    def of(cls, part: Indices | SigmaSelector) -> "StepSet":
        """Return the steps that one selector names."""
        if isinstance(part, IndexSelector):
            return cls(indices=part)
        return cls(first=part) if isinstance(part, FirstShare) else cls(sigma=part)

    def holds(self, step: int, total: int, sigmas: tuple[float, ...] | None) -> bool:
        """Return whether a step is one of them.

        Args:
            step: its index.
            total: how many the run has; makes no difference without `first`.
            sigmas: the sigma of every step of the run; where they are unknown, no step has any.
        """
        if self.indices is not None and step not in self.indices:
            return False
        if self.first is not None and not self.first.holds(step, total):
            return False
        if self.sigma is None:
            return True
        return sigmas is not None and step < len(sigmas) and sigmas[step] in self.sigma

    def __and__(self, other: "StepSet") -> "StepSet | None":
        """Return the steps in both, or None where it is certain that there are none."""
        indices, sigma = self.indices or other.indices, self.sigma or other.sigma
        if self.indices and other.indices:
            indices = self.indices & other.indices
            if indices is None:
                return None
        if self.sigma and other.sigma:
            sigma = self.sigma & other.sigma
            if sigma is None:
                return None
        shares = [one.first for one in (self, other) if one.first is not None]
        first = min(shares, key=lambda part: part.share) if shares else None
        return StepSet(indices=indices, first=first, sigma=sigma)

    def __str__(self) -> str:
        parts = [] if self.first is None else [str(self.first)]
        if self.sigma is not None:
            parts.append(f"of sigma {self.sigma}")
        if self.indices is not None:
            parts.append(f"among {self.indices}" if parts else str(self.indices))
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RatioSchedule:
    """A ratio that changes over the steps of a run.

    Attributes:
        parts: (share of the schedule at which it begins, the ratio), in order; the first begins
            at 0. Of n steps, a part begins at step floor(share * n).
    """

    parts: tuple[tuple[float, float], ...]

    def at(self, step: int, total: int) -> float:
        """Return the ratio of a step of a run that has `total`."""
        return [ratio for start, ratio in self.parts if first_of(start, total) <= step][-1]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios, in their order."""
        return tuple(ratio for _, ratio in self.parts)

    def as_dict(self) -> dict[str, float]:
        """Return it as JSON has it, which has text as keys."""
        return {f"{start:.10g}": ratio for start, ratio in self.parts}

    def __str__(self) -> str:
        return "{" + ", ".join(f"{start:.10g}: {ratio:.10g}" for start, ratio in self.parts) + "}"


Ratio: TypeAlias = float | RatioSchedule


def ratio_now(ratio: Ratio) -> float:
    """Return a ratio of the parameters of one step, which has no schedule any more."""
    assert not isinstance(ratio, RatioSchedule), "`config_at` makes numbers of schedules"
    return ratio
