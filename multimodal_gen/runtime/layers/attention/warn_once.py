"""What somebody should know who asked for sparse attention and gets none, or something else."""

import logging
from typing import Final

from multimodal_gen.runtime.layers.attention.config import Axis, SparseConfig
from multimodal_gen.runtime.layers.attention.selectors import StepSet
from multimodal_gen.runtime.platforms import AttentionBackendEnum

__all__ = ["PROCESS", "WarnOnce", "warn_if_dense_layers", "warn_if_dense_run"]

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


def warn_if_dense_run(
    config: SparseConfig,
    backend: AttentionBackendEnum,
    num_steps: int | None,
    warnings: WarnOnce,
    sigmas: tuple[float, ...] | None = None,
) -> None:
    """Warn, once, of a run that has no sparse step.

    Args:
        config: of the method.
        backend: the method.
        num_steps: denoising steps of the run, or None when unknown.
        warnings: of the pipeline.
        sigmas: of every step, or None when unknown.
    """
    _warn_if_dense(config, backend, num_steps, warnings, "steps", "run", sigmas)


def warn_if_dense_layers(
    config: SparseConfig, backend: AttentionBackendEnum, num_layers: int | None, warnings: WarnOnce
) -> None:
    """Warn, once, of a model that has no sparse layer.

    Args:
        config: of the method.
        backend: the method.
        num_layers: self-attention layers of the model, or None when unknown.
        warnings: of the pipeline.
    """
    _warn_if_dense(config, backend, num_layers, warnings, "layers", "model")


def _warn_if_dense(
    config: SparseConfig,
    backend: AttentionBackendEnum,
    total: int | None,
    warnings: WarnOnce,
    axis: Axis,
    whole: str,
    sigmas: tuple[float, ...] | None = None,
) -> None:
    """Warn where all steps of the run, or all layers of the model, are dense."""
    parts = config.dense_parts(axis)
    dense = [StepSet.of(part.indices) for part in parts]
    if not total or not all(any(d.holds(i, total, sigmas) for d in dense) for i in range(total)):
        return
    given = " and ".join(part.given for part in parts)
    warnings.warn(
        f"{backend} is sparse in no {axis[:-1]}: {given} keep all {total} {axis} of this {whole} "
        f"dense; give fewer, such as {parts[0].given.partition('=')[0]}=0"
    )
