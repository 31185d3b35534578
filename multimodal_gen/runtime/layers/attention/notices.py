"""What somebody should know who asked for sparse attention and gets none, or something else."""

import logging
from typing import Final

from multimodal_gen.runtime.layers.attention.config import SparseConfig
from multimodal_gen.runtime.layers.attention.index_selector import IndexSelector, first_of
from multimodal_gen.runtime.platforms import AttentionBackendEnum

__all__ = ["PROCESS", "Notices", "notice_dense_layers", "notice_dense_run"]

logger = logging.getLogger(__name__)


class Notices:
    """Warnings of one pipeline, each logged once."""

    __slots__ = ("_said",)

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def say(self, message: str) -> None:
        """Log a warning that was not logged yet."""
        if message not in self._said:
            self._said[message] = None
            logger.warning("%s", message)

    @property
    def said(self) -> tuple[str, ...]:
        """What was logged so far."""
        return tuple(self._said)


PROCESS: Final = Notices()
"""Process-wide on purpose: of layers that were built outside any pipeline."""


def notice_dense_run(
    config: SparseConfig, backend: AttentionBackendEnum, num_steps: int | None, notices: Notices
) -> None:
    """Warn, once, of a run that has no sparse step.

    Args:
        config: of the method.
        backend: the method.
        num_steps: denoising steps of the run, or None when unknown.
        notices: of the pipeline.
    """
    if not num_steps:
        return
    if not _all_dense(config.dense_schedule()[0], config.dense_first()[0], num_steps):
        return
    given, instead = _given(config, config.first_dense[0], "dense_steps")
    notices.say(
        f"{backend} is sparse in no step: {given} keep all {num_steps} steps of this run dense; "
        f"give fewer, such as {instead}"
    )


def notice_dense_layers(
    config: SparseConfig, backend: AttentionBackendEnum, num_layers: int | None, notices: Notices
) -> None:
    """Warn, once, of a model that has no sparse layer.

    Args:
        config: of the method.
        backend: the method.
        num_layers: self-attention layers of the model, or None when unknown.
        notices: of the pipeline.
    """
    if not num_layers:
        return
    if not _all_dense(config.dense_schedule()[1], config.dense_first()[1], num_layers):
        return
    given, instead = _given(config, config.first_dense[1], "dense_layers")
    notices.say(
        f"{backend} is sparse in no layer: {given} keep all {num_layers} layers of this model "
        f"dense; give fewer, such as {instead}"
    )


def _all_dense(named: IndexSelector | None, first: float, total: int) -> bool:
    """Whether the named steps or layers, and the first ones besides, are all that there are."""
    start = int(first) if first > 1 else first_of(first, total)
    return all(named is not None and i in named for i in range(start, total))


def _given(config: SparseConfig, *names: str) -> tuple[str, str]:
    """Return the parameters among `names` that were given, and what to give instead."""
    given = [name for name in names if name and getattr(config, name)]
    if not given:  # a method with parameters that `first_dense` does not name
        return "its parameters", f"{names[-1]}=0"
    return " and ".join(f"{name}={getattr(config, name)}" for name in given), f"{given[0]}=0"
