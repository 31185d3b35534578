"""Draws a strategy: which window every head has at every step, and what each window covers."""

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal_gen.errors import ConfigError, MissingDependencyError
from multimodal_gen.files import atomic_write
from multimodal_gen.settings import by_axis

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import Strategy
    from multimodal_gen.runtime.layers.attention.sparse.windows import Window

_MARGIN = 12
_TEXT = 14  # height of a line
_ROW_HEIGHT = 8  # of a step
_LEAST_WIDTH = 480
_PAPER, _INK, _UNUSED = (255, 255, 255), (30, 30, 30), (225, 225, 225)


def draw(strategy: "Strategy", tiles: "Window", path: Path) -> None:
    """Write a PNG file: a map of the windows, and a legend of them.

    In the map, steps run downwards and heads to the right, layer by layer. The legend shows for
    each window one frame per tile along time, in which the tiles kept around the middle one are
    filled.

    Args:
        strategy: the strategy.
        tiles: the grid of tiles.
        path: the file; an older one is replaced.

    Raises:
        ConfigError: the file has another suffix or cannot be written.
        MissingDependencyError: pillow is not installed.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png must end in .png, got {str(path)!r}")
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise MissingDependencyError(
            f"drawing windows needs pillow ({error}); install with: pip install pillow"
        ) from error
    from multimodal_gen.runtime.layers.attention.sparse.windows import tile_count

    windows = sorted(strategy.counts(), key=lambda window: (tile_count(window, tiles), window))
    colours = {window: _colour(rank, len(windows)) for rank, window in enumerate(windows)}
    columns = strategy.num_layers * strategy.num_heads
    scale = max(1, -(-_LEAST_WIDTH // columns))
    map_width, map_height = columns * scale, strategy.num_steps * _ROW_HEIGHT
    cell = max(2, min(8, 900 // (tiles[0] * (tiles[2] + 1))))  # a tile in the legend, with its gap
    entry = max(tiles[1] * cell, 2 * _TEXT) + _MARGIN
    top = _MARGIN + 2 * _TEXT
    width = max(map_width, 260 + tiles[0] * (tiles[2] * cell + 4)) + 2 * _MARGIN
    height = top + map_height + len(windows) * entry + 2 * _MARGIN
    image = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(image)
    title = (
        f"{strategy.num_steps} steps down, {strategy.num_layers} layers of {strategy.num_heads} "
        f"heads to the right"
    )
    pen.text((_MARGIN, _MARGIN), title, fill=_INK)
    pixels = Image.new("RGB", (columns, strategy.num_steps))
    pixels.putdata([colours[w] for step in strategy.windows for layer in step for w in layer])
    image.paste(pixels.resize((map_width, map_height), Image.Resampling.NEAREST), (_MARGIN, top))
    for layer in range(1, strategy.num_layers if scale > 2 else 0):
        x = _MARGIN + layer * strategy.num_heads * scale
        pen.line((x, top, x, top + map_height - 1), fill=_PAPER)
    top += map_height + _MARGIN
    for rank, window in enumerate(windows):
        _draw_entry(pen, strategy, window, tiles, colours[window], cell, top + rank * entry)
    try:
        with atomic_write(path) as partial:
            image.save(partial, format="PNG")
    except OSError as error:
        raise ConfigError(
            f"--png must name a file that can be written, got {str(path)!r}: {error.strerror}"
        ) from None


def _draw_entry(
    pen: Any,
    strategy: "Strategy",
    window: "Window",
    tiles: "Window",
    colour: tuple[int, int, int],
    cell: int,
    top: int,
) -> None:
    """Draw one line of the legend, in which a tile has so many pixels."""
    from multimodal_gen.runtime.layers.attention.sparse.windows import (
        kept_map,
        tile_density,
    )

    counts = strategy.counts()
    share = counts[window] / sum(counts.values())
    pen.rectangle((_MARGIN, top, _MARGIN + _TEXT, top + _TEXT), fill=colour)
    pen.text(
        (_MARGIN + 2 * _TEXT, top),
        f"{by_axis(window)}: density {tile_density(window, tiles):.1%}",
        _INK,
    )
    pen.text((_MARGIN + 2 * _TEXT, top + _TEXT), f"{share:.1%} of heads", fill=_INK)
    frames, rows, columns = tiles
    middle = (frames // 2 * rows + rows // 2) * columns + columns // 2
    kept = kept_map(window, tiles)[middle].view(frames, rows, columns).tolist()
    for f, plane in enumerate(kept):
        left = 240 + f * (columns * cell + 4)
        for r, row in enumerate(plane):
            for c, keeps in enumerate(row):
                x, y = left + c * cell, top + r * cell
                fill = colour if keeps else _UNUSED
                pen.rectangle((x, y, x + cell - 2, y + cell - 2), fill=fill)


def _colour(rank: int, count: int) -> tuple[int, int, int]:
    """Return a colour: from blue for the sparsest window to red for the densest."""
    hue = 0.62 * (1 - rank / max(count - 1, 1))
    # Alternating brightness keeps neighbours apart.
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, 0.95 if rank % 2 else 0.75)
    return round(red * 255), round(green * 255), round(blue * 255)
