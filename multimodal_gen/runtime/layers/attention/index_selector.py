"""Sets of step or layer indices, written as `0-3,38`, `10-` or `-5`."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from multimodal_gen.errors import ConfigError


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


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """The first share of a run's denoising steps, whose number only the run knows.

    Attributes:
        share: in (0, 1]; of n steps it means the first floor(share * n).
        among: steps that count; None for all.
    """

    share: float
    among: IndexSelector | None = None

    def holds(self, step: int, num_steps: int) -> bool:
        """Return whether a step of a run is among them."""
        return step < first_of(self.share, num_steps) and (self.among is None or step in self.among)

    def __str__(self) -> str:
        first = f"first {self.share:.4g} of all"
        return first if self.among is None else f"{first}, among {self.among}"


Steps: TypeAlias = IndexSelector | FirstSteps


def first_of(share: float, total: int) -> int:
    """Return floor(share * total), the share read in decimals as people write it."""
    return math.floor(Fraction(repr(float(share))) * total)


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
