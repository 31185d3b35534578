"""Warnings that are logged once: who asked for sparse attention may get something else."""

import logging
from typing import Final

logger = logging.getLogger(__name__)


class WarnOnce:
    """Warnings of one pipeline, each logged once."""

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: dict[str, None] = {}

    def warn(self, message: str) -> None:
        """Log a warning that was not logged yet."""
        if message not in self._given:
            self._given[message] = None
            logger.warning("%s", message)

    @property
    def given(self) -> tuple[str, ...]:
        """What was logged so far."""
        return tuple(self._given)


PROCESS: Final = WarnOnce()
"""Process-wide on purpose: the warnings of layers that were built outside any pipeline."""
