"""What somebody should know who asked for sparse attention and gets none, or something else."""

import logging
from typing import Final

from multimodal_gen.runtime.layers.attention.config import IndexSelector, SparseConfig, first_of
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
    config: SparseConfig, backend: AttentionBackendEnum, num_steps: int | None, warnings: WarnOnce
) -> None:
    """Warn, once, of a run that has no sparse step.

    Args:
        config: of the method.
        backend: the method.
        num_steps: denoising steps of the run, or None when unknown.
        warnings: of the pipeline.
    """
    _warn_if_dense(config, backend, num_steps, warnings, 0, "step", "run")


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
    _warn_if_dense(config, backend, num_layers, warnings, 1, "layer", "model")


def _warn_if_dense(
    config: SparseConfig,
    backend: AttentionBackendEnum,
    total: int | None,
    warnings: WarnOnce,
    axis: int,
    unit: str,
    whole: str,
) -> None:
    """Warn where every `unit` of the `whole` is dense; axis 0 is that of steps, 1 of layers."""
    if not total or not _all_dense(
        config.dense_schedule()[axis], config.dense_first()[axis], total
    ):
        return
    given, instead = _given(config, config.first_dense[axis], f"dense_{unit}s")
    warnings.warn(
        f"{backend} is sparse in no {unit}: {given} keep all {total} {unit}s of this {whole} "
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
