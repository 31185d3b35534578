"""What somebody should know who asked for windows and gets none."""

import logging
from functools import cache

from multimodal_gen.runtime.layers.attention.index_selector import IndexSelector

__all__ = ["notice_dense_run"]

logger = logging.getLogger(__name__)


def notice_dense_run(
    num_steps: int | None, skip_time_steps: int, dense_steps: IndexSelector | None
) -> None:
    """Warn, once, of a run that has no step for a window.

    Args:
        num_steps: denoising steps of the run, or None when unknown.
        skip_time_steps: how many first steps stay dense.
        dense_steps: other steps that do.
    """
    named = dense_steps or IndexSelector(())
    if num_steps is None or any(s not in named for s in range(skip_time_steps, num_steps)):
        return
    given = [f"skip_time_steps={skip_time_steps}"] if skip_time_steps else []
    given += [] if dense_steps is None else [f"dense_steps={dense_steps}"]
    _warn_once(
        f"sliding_tile_attn uses no window: {' and '.join(given)} keep all {num_steps} steps of "
        f"this run dense; give fewer, such as skip_time_steps=0"
    )


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
