"""What somebody should know who asked for sparse attention and gets none."""

import logging
from functools import cache

from multimodal_gen.runtime.layers.attention.config import SparseConfig
from multimodal_gen.runtime.layers.attention.index_selector import first_of
from multimodal_gen.runtime.platforms import AttentionBackendEnum

__all__ = ["notice_dense_run"]

logger = logging.getLogger(__name__)


def notice_dense_run(
    config: SparseConfig, backend: AttentionBackendEnum, num_steps: int | None, first: str
) -> None:
    """Warn, once, of a run that has no sparse step.

    Args:
        config: of the method.
        backend: the method.
        num_steps: denoising steps of the run, or None when unknown.
        first: the method's own parameter for first steps that stay dense.
    """
    if not num_steps:
        return
    named, share = config.dense_schedule()[0], config.dense_first()[0]
    start = int(share) if share > 1 else first_of(share, num_steps)
    if any(named is None or step not in named for step in range(start, num_steps)):
        return
    names = [name for name in (first, "dense_steps") if getattr(config, name)]
    given = " and ".join(f"{name}={getattr(config, name)}" for name in names)
    _warn_once(
        f"{backend} is sparse in no step: {given} keep all {num_steps} steps of this run dense; "
        f"give fewer, such as {names[0]}=0"
    )


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
