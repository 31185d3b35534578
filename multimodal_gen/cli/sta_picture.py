"""Draws a strategy: which window every head has at every step, and what each window covers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal_gen.errors import ConfigError, MissingDependencyError
from multimodal_gen.files import atomic_write, naming_file
from multimodal_gen.settings import by_axis

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import Strategy
    from multimodal_gen.runtime.layers.attention.sparse.windows import Window

_UNUSED = "#e1e1e1"
_MOST = 40
"""Windows in the legend, the sparsest first: strategies have a few."""


def draw(strategy: "Strategy", tiles: "Window", path: Path) -> None:
    """Write a PNG file: a map of the windows, and a legend of them.

    In the map, steps run downwards and heads to the right, layer by layer. The legend shows for
    each window, up to 40 of them, one frame per tile along time, in which the tiles kept around the
    middle one are filled.

    Args:
        strategy: the strategy.
        tiles: the grid of tiles.
        path: the file; an older one is replaced.

    Raises:
        ConfigError: the file has another suffix or cannot be written.
        MissingDependencyError: matplotlib is not installed.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png must end in .png, got {str(path)!r}")
    try:
        from matplotlib import colormaps
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"drawing windows needs matplotlib ({error}); install with: pip install matplotlib"
        ) from error
    from multimodal_gen.runtime.layers.attention.sparse.windows import tile_count, tile_density

    counts, heads = strategy.counts(), strategy.num_heads
    windows = sorted(counts, key=lambda window: (tile_count(window, tiles), window))
    # From blue for the sparsest window to red for the densest.
    colours = colormaps["turbo"].resampled(len(windows) + 2)(range(1, len(windows) + 1))
    named = windows[:_MOST]
    figure = Figure(figsize=(10, 4 + 0.7 * len(named)), layout="constrained")
    ratios = [4 / 0.7, *[1] * len(named)]
    top, *legend = figure.subplots(1 + len(named), 1, height_ratios=ratios)
    rank = {window: number for number, window in enumerate(windows)}
    pixels = [[rank[w] for layer in step for w in layer] for step in strategy.windows]
    style = {"aspect": "auto", "interpolation": "nearest"}
    top.imshow(pixels, cmap=ListedColormap(colours), vmin=0, vmax=len(windows) - 0.5, **style)
    top.set_xticks([layer * heads - 0.5 for layer in range(strategy.num_layers)], [])
    top.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    top.set_xlabel(f"{strategy.num_layers} layers of {heads} heads")
    top.set_ylabel(f"{strategy.num_steps} steps")
    for window, colour, axes in zip(named, colours, legend, strict=False):
        axes.imshow(_frames(window, tiles), cmap=ListedColormap([_UNUSED, colour]), vmin=0, vmax=1)
        share = f"density {tile_density(window, tiles):.1%}, {counts[window] / counts.total():.1%}"
        axes.set_title(f"{by_axis(window)}: {share} of heads", fontsize="small", loc="left")
        axes.set_axis_off()
    with naming_file(path, "--png"), atomic_write(path) as partial:
        figure.savefig(partial, format="png")


def _frames(window: "Window", tiles: "Window") -> Any:
    """Return which tiles a window keeps around the middle one, frames from left to right."""
    import numpy as np

    from multimodal_gen.runtime.layers.attention.sparse.windows import first_kept, kept_width

    spans = []
    for size, num in zip(window, tiles, strict=True):
        width = kept_width(size, num)
        first = first_kept(width, num)[num // 2]
        spans.append(slice(first, first + width))
    kept = np.zeros(tiles)
    kept[tuple(spans)] = 1
    apart = np.pad(kept, ((0, 0), (0, 0), (0, 1)), constant_values=np.nan)
    return apart.swapaxes(0, 1).reshape(tiles[1], -1)
