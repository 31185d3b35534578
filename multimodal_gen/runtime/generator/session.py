"""What the generator asks of whoever attaches attention to its pipeline."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from multimodal_gen.runtime.layers.attention.report import Json

__all__ = ["Attach", "AttentionSession", "Report"]


class Report(Protocol):
    """What ran in the attention layers of a pipeline."""

    def as_dict(self) -> dict[str, Json]:
        """Return the report as JSON data."""

    def summary(self) -> str:
        """Return the report as text, one line per group of layers."""


class AttentionSession(Protocol):
    """Attention backends attached to a pipeline, until it is removed."""

    def report(self) -> Report:
        """Return what ran so far."""

    def remove(self) -> None:
        """Restore the pipeline."""


Attach: TypeAlias = Callable[[Any], AttentionSession]
"""Attaches attention backends to a loaded pipeline; layers above the generator pass it in."""
