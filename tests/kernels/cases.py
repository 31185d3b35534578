"""Cases of tests, of which some are left to whoever asks for the slow ones."""

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["with_slow"]


def with_slow(every: Sequence[tuple[Any, ...]], quick: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Mark the cases that are not among the quick ones as slow."""
    assert all(case in every for case in quick)
    return [
        case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in every
    ]
