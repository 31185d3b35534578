"""The windows a search tries."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sta.windows import (
    Window,
    effective_window,
    tile_count,
)

__all__ = ["default_candidates", "distinct_candidates"]

# Sliding Tile Attention, arXiv 2502.04507: what its authors searched, by grid of tiles.
_PUBLISHED: Mapping[Window, tuple[Window, ...]] = MappingProxyType(
    {
        (5, 6, 10): ((5, 3, 3), (3, 3, 5), (1, 6, 10), (5, 6, 1), (5, 1, 10)),
        (3, 6, 10): ((3, 1, 10), (1, 5, 7), (3, 3, 3), (1, 6, 5), (1, 3, 10), (3, 6, 1)),
    }
)


def default_candidates(tiles: Window) -> tuple[Window, ...]:
    """Return the windows to try on a grid of `tiles`, sparsest first.

    Heads look along few patterns: a small neighbourhood at all times, a larger one for a while,
    one moment in full, and one row or column at all times. Each is scaled to the grid; the
    windows published for a grid are added on it.

    Raises:
        UsageError: the grid is too small for a window that leaves something out.
    """
    time, height, width = tiles
    patterns = (
        (time, _odd(height / 2), _odd(width / 3)),
        (_odd(time * 0.6), _odd(height / 2), _odd(width / 2)),
        (1, height, width),
        (time, height, 1),
        (time, 1, width),
    )
    return distinct_candidates((*_PUBLISHED.get(tiles, ()), *patterns), tiles)


def distinct_candidates(windows: Iterable[Window], tiles: Window) -> tuple[Window, ...]:
    """Return what windows keep on a grid of `tiles`, each once, sparsest first.

    Raises:
        UsageError: none is left; full windows are none to try.
    """
    kept = {effective_window(window, tiles) for window in windows} - {tiles}
    if not kept:
        raise UsageError(
            f"a search must have a window smaller than the grid, which has "
            f"{'x'.join(map(str, tiles))} tiles; use a smaller tile_size or a larger output"
        )
    return tuple(sorted(kept, key=lambda window: (tile_count(window, tiles), window)))


def _odd(size: float) -> int:
    """Return the largest odd number of at most `size`, at least 1."""
    return max(1, 2 * int((size - 1) // 2) + 1)
