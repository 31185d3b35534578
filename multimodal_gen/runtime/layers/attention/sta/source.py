"""Where a layer's windows come from: a strategy file, one window for all, or a tuning."""

import logging
from functools import lru_cache
from pathlib import Path

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sta.losses import NEGATIVE, POSITIVE
from multimodal_gen.runtime.layers.attention.sta.search import find_searches
from multimodal_gen.runtime.layers.attention.sta.strategy import Strategy, load_strategy
from multimodal_gen.runtime.layers.attention.sta.tuning import tune_files
from multimodal_gen.runtime.layers.attention.sta.windows import Window

__all__ = ["WindowSource", "tuned_strategy"]

logger = logging.getLogger(__name__)


class WindowSource:
    """The windows of one layer.

    Args:
        strategy: a strategy, or None for `window` everywhere.
        window: the window everywhere; used without a strategy.
        retarget: rescale a strategy that does not fit the run, instead of refusing it.
        layer: index of the layer; None where it is unknown, which a strategy cannot serve.
        num_layers: self-attention layers of the model, or None when unknown.
        num_heads: heads of the layer, those of other processes included.
        tile_size: tokens per tile, which a strategy may be for; None where nobody knows.

    Raises:
        ConfigError: the strategy is for another number of layers or heads.
        UsageError: the strategy needs to know the layer, and it is not known.
    """

    def __init__(
        self,
        *,
        strategy: Strategy | None,
        window: Window | None = None,
        retarget: bool = False,
        layer: int | None = None,
        num_layers: int | None = None,
        num_heads: int,
        tile_size: Window | None = None,
    ) -> None:
        assert strategy is not None or window is not None, "the configuration checks that"
        if strategy is not None and layer is None:
            raise UsageError(
                "a mask strategy must know the layer's index, got a layer without one; construct "
                "it with a `prefix` such as 'blocks.3.attn', or use `window`"
            )
        self._strategy = strategy
        self._window = window
        self._retarget = retarget
        self._layer = layer or 0
        self._tile_size = tile_size
        if strategy is not None:
            strategy.check_sizes(num_heads=num_heads, num_layers=num_layers, layer=self._layer)

    def check(self, tiles: Window, num_steps: int | None) -> None:
        """Refuse a strategy for another grid of tiles or, where it is known, other steps.

        Raises:
            ConfigError: it is, and nobody asked to rescale it.
        """
        if self._strategy is not None:
            self._fitted(self._strategy, tiles, num_steps)

    def windows(
        self,
        tiles: Window,
        *,
        step: int,
        num_steps: int | None,
        first_head: int,
        num_heads: int,
    ) -> tuple[Window, ...]:
        """Return a window per head.

        Args:
            tiles: the grid of tiles.
            step: denoising step.
            num_steps: denoising steps of the run, or None when unknown.
            first_head: the first head of this process.
            num_heads: heads of this process.

        Raises:
            ConfigError: the strategy is for other steps or another grid.
            UsageError: the strategy has no such step.
        """
        if self._strategy is None:
            assert self._window is not None
            return (self._window,) * num_heads
        fitted = self._fitted(self._strategy, tiles, num_steps)
        if step >= fitted.num_steps:
            raise UsageError(
                f"{fitted.name} must have every step of the run, it has {fitted.num_steps} and "
                f"this is step {step}"
            )
        return fitted.head_windows(step, self._layer, first_head=first_head, num_heads=num_heads)

    def _fitted(self, strategy: Strategy, tiles: Window, num_steps: int | None) -> Strategy:
        return _fitted(strategy, tiles, self._tile_size, num_steps, self._retarget)


@lru_cache(maxsize=8)
def _fitted(
    strategy: Strategy,
    tiles: Window,
    tile_size: Window | None,
    num_steps: int | None,
    retarget: bool,
) -> Strategy:
    fitted, notes = strategy.fitted(
        tiles=tiles, tile_size=tile_size, num_steps=num_steps, retarget=retarget
    )
    for note in notes:
        logger.warning("%s", note)
    return fitted


def tuned_strategy(
    searches: str, path: str, *, both: bool, skip_time_steps: int, target_density: float | None
) -> Strategy:
    """Tune on the searches in a folder, write the strategy and return it as read back.

    However many layers ask, it is done once, until a search changes.

    Args:
        searches: folder of the searches.
        path: the strategy file to write.
        both: whether to tune on both branches of guidance.
        skip_time_steps: first denoising steps that stay dense.
        target_density: see `tune`.

    Raises:
        ConfigError: see `tune_files`, or the file cannot be written.
    """
    folder = Path(searches).expanduser()
    branches = (POSITIVE, NEGATIVE) if both else (POSITIVE,)
    files = tuple(file for branch in branches for file in find_searches(folder, branch))
    versions = tuple(file.stat().st_mtime_ns for file in files)
    _tuned(files, versions, Path(path).expanduser(), skip_time_steps, target_density)
    return load_strategy(path)


@lru_cache(maxsize=4)
def _tuned(
    files: tuple[Path, ...],
    versions: tuple[int, ...],
    path: Path,
    skip_time_steps: int,
    target_density: float | None,
) -> None:
    del versions
    tuned = tune_files(files, skip_time_steps=skip_time_steps, target_density=target_density)
    tuned.strategy.write(path)
    logger.info("tuned %s to a density of %.3f of %d searches", path, tuned.density, len(files))
