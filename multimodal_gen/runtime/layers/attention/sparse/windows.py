"""Which tiles a window keeps.

A window counts tiles along (time, height, width). Along each axis of n tiles, query tile i attends
to a contiguous range of tiles around it:

    half = w // 2,  centre = clamp(i, half, n - 1 - half),  kept: |tile - centre| <= half

and to the whole axis where w >= n. So an odd window keeps exactly w tiles, and is shifted inside
at the borders rather than cut; an even one keeps w + 1. (Others define even windows as exactly w
tiles; published strategies have odd or full ones only, on which every definition agrees.)

T tiles along time, N tiles in all, K tiles that a window keeps.
"""

from typing import TypeAlias

import torch

Window: TypeAlias = tuple[int, int, int]
"""Three numbers along time, height and width: a window or a grid."""

DEFAULT_TILE: Window = (6, 8, 8)
"""Tokens per tile along each axis, unless told otherwise."""


def tiles_of(grid: Window, tile: Window) -> Window:
    """Return how many tiles, ragged ones included, cover a grid of tokens along each axis."""
    return (-(-grid[0] // tile[0]), -(-grid[1] // tile[1]), -(-grid[2] // tile[2]))


def effective_window(window: Window, tiles: Window) -> Window:
    """Return how many tiles a window really keeps along each axis of a grid of `tiles`."""
    return (
        kept_width(window[0], tiles[0]),
        kept_width(window[1], tiles[1]),
        kept_width(window[2], tiles[2]),
    )


def is_full(window: Window, tiles: Window) -> bool:
    """Whether a window keeps every tile, so that attention is dense."""
    return effective_window(window, tiles) == tiles


def tile_count(window: Window, tiles: Window) -> int:
    """Return the number of tiles that every query tile attends to."""
    time, height, width = effective_window(window, tiles)
    return time * height * width


def tile_density(window: Window, tiles: Window) -> float:
    """Return the share of tiles kept, in (0, 1]; ragged tiles count like full ones."""
    return tile_count(window, tiles) / (tiles[0] * tiles[1] * tiles[2])


def pair_density(window: Window, grid: Window, tile: Window) -> float:
    """Return the share of token pairs kept, in (0, 1].

    Args:
        window: the window in tiles.
        grid: tokens along each axis.
        tile: tokens per tile along each axis; tiles at the far borders may be ragged.
    """
    density = 1.0
    for wanted, size, step in zip(window, grid, tile, strict=True):
        lengths = [min(step, size - start) for start in range(0, size, step)]
        width = kept_width(wanted, len(lengths))
        pairs = sum(
            length * sum(lengths[first : first + width])
            for length, first in zip(lengths, first_kept(width, len(lengths)), strict=True)
        )
        density *= pairs / size**2
    return density


def kept_indices(window: Window, tiles: Window) -> torch.Tensor:
    """Return the tiles that each tile attends to, in raster order of tiles.

    Returns:
        int32 [N, K] on the CPU, strictly increasing along every row.
    """
    sizes = ((kept_width(w, n), n) for w, n in zip(window, tiles, strict=True))
    time, height, width = (
        torch.tensor(first_kept(kept, n), dtype=torch.int32, device="cpu")[:, None]
        + torch.arange(kept, dtype=torch.int32, device="cpu")
        for kept, n in sizes
    )  # each [n, kept]
    rows = time[:, None, None, :, None, None] * tiles[1] + height[:, None, None, :, None]
    listed = rows * tiles[2] + width[:, None, None, :]
    return listed.reshape(tiles[0] * tiles[1] * tiles[2], -1)


def kept_width(window: int, tiles: int) -> int:
    """Return how many of the tiles along an axis a window keeps."""
    # An even window below the axis keeps one more; below the axis, so that still fits.
    return tiles if window >= tiles else window | 1


def first_kept(width: int, tiles: int) -> list[int]:
    """Return the first tile that each one along an axis keeps of so many."""
    return [min(max(i - width // 2, 0), tiles - width) for i in range(tiles)]
