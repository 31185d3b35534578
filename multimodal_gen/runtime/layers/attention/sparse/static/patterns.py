"""Which blocks of a video attend to which, from its number of frames and their tokens alone.

T frames, P tokens of a frame, N blocks.
"""

import math
from functools import cache
from typing import Literal

import torch

__all__ = ["key_frame_interval", "lvsa_map", "radial_map"]

_HIGH = 1 / 3  # share of a block's rows that a column must be kept by
_MOST = 0.6  # share of such columns among those that are kept at all, which keeps a block


def radial_map(
    frames: int, tokens: int, *, block: int, decay: float, model: Literal["wan", "hunyuan"]
) -> torch.Tensor:
    """Return what Radial Attention keeps: bool [N, N] on the CPU (arXiv:2506.19852).

    Token r of frame i keeps token c of frame j, with d = |i - j|, b(n) the bits of n, and
    L = 2^b(P) / 2^b(d), where

        j = 0,  or  |r - c| <= max(L * decay, block)  and  (L >= block  or  d % int(block / L) = 0)

    and inside of a frame all; of the next frame Wan keeps |r - c| <= P // 2, HunyuanVideo all. A
    pair of frames keeps a block of tokens if more than 0.6 of the columns it has in there are kept
    by more than a third of the block's rows. Blocks of the diagonal are always kept, so that no row
    is empty where frames are shorter than blocks; tokens behind the last whole block have a block
    of their own; and of a frame that begins inside a block the last one counts, too. The authors'
    code does none of the three.

    Args:
        frames: T.
        tokens: P.
        block: tokens of a block, in the order of the sequence.
        decay: factor of the widths.
        model: whose rule for the next frame.
    """
    num = -(-frames * tokens // block)
    kept = torch.eye(num, dtype=torch.bool)
    for i in range(frames):
        for j in range(frames):
            width = _width(i, j, tokens, block, decay, model)
            if width is None:
                continue
            first, other = i * tokens, j * tokens
            part = _blocks_of_band(first % block, other % block, tokens, width, block)
            rows, columns = (
                slice(start // block, start // block + size)
                for start, size in zip((first, other), part.shape, strict=True)
            )
            kept[rows, columns] |= part
    return kept


def _width(
    i: int, j: int, tokens: int, block: int, decay: float, model: Literal["wan", "hunyuan"]
) -> float | None:
    """Return how far tokens of frame j that frame i keeps may lie from its own; None for none."""
    distance = abs(i - j)
    if j == 0 or distance == 0:
        return tokens
    length = 2 ** tokens.bit_length() / 2 ** distance.bit_length()
    if length < block and distance % int(block / length):
        return None
    if distance == 1:
        return tokens // 2 if model == "wan" else tokens
    return max(length * decay, block)


@cache
def _blocks_of_band(row: int, column: int, tokens: int, width: float, block: int) -> torch.Tensor:
    """Return the blocks that a band of a pair of frames keeps, bool [n, m].

    Args:
        row: tokens of its first block that lie before the frame, on the side of queries.
        column: the same for keys.
        tokens: P.
        width: tokens r and c are kept where |r - c| <= width.
        block: tokens of a block.
    """
    num_rows, num_columns = -(-(row + tokens) // block), -(-(column + tokens) // block)
    starts = torch.arange(num_rows)[:, None] * block - row
    c = torch.arange(tokens)
    reach = math.floor(width)
    top = torch.maximum(starts.clamp_min(0), c - reach)
    bottom = torch.minimum((starts + block).clamp_max(tokens), c + reach + 1)
    kept = (bottom - top).clamp_min(0)  # rows of the block that keep column c, [n, P]
    place = ((c + column) // block).expand(num_rows, -1)
    high, any_row = (
        torch.zeros(num_rows, num_columns).scatter_add_(1, place, x.float())
        for x in (kept > block * _HIGH, kept > 0)
    )
    return high > _MOST * any_row


def key_frame_interval(frames: int, *, window: int, first: int, budget: int) -> int:
    """Return the interval of global frames at which frames attend to about `budget` frames.

    1, which is dense, where the video has no more frames than the budget (arXiv:2605.31057).

    Args:
        frames: T.
        window: half the width of the window.
        first: leading frames that are global.
        budget: frames to attend to, more than `first`.
    """
    if frames <= budget:
        return 1
    wanted = max(first, budget - min(2 * window + 1, frames))
    strict = next(n for n in range(frames, 0, -1) if len(_global(frames, first, n, 0)) >= wanted)
    floor = 2 * window + first
    return max(strict, math.ceil(max(frames - floor, budget - floor) / max(budget - floor, 1)))


def lvsa_map(frames: int, *, window: int, first: int, interval: int, offset: int) -> torch.Tensor:
    """Return which frames each frame attends to: bool [T, T] on the CPU (arXiv:2605.31057).

    Frame f sees the global frames, and a window around it: [f - window, f + window], shifted inside
    at the borders, and widened to either side in turns until 2 window + 1 frames of it are not
    global, or nothing is left.

    Args:
        frames: T.
        window: half the width of the window.
        first: leading frames that are global.
        interval: of the other global frames.
        offset: of the first of these; they go around the end, so that there are always as many.
    """
    shared = _global(frames, first, interval, offset)
    kept = torch.zeros(frames, frames, dtype=torch.bool)
    kept[:, sorted(shared)] = True
    wanted = min(2 * window + 1, frames - len(shared))
    for f in range(frames):
        low = max(0, min(f - window, frames - 1 - 2 * window))
        high = min(frames - 1, max(f + window, 2 * window))
        to_left = True
        while sum(g not in shared for g in range(low, high + 1)) < wanted:
            if low > 0 and (to_left or high == frames - 1):
                low -= 1
            else:
                high += 1
            to_left = not to_left
        kept[f, low : high + 1] = True
    return kept


def _global(frames: int, first: int, interval: int, offset: int) -> set[int]:
    """Return the frames that every frame attends to."""
    periodic = {(offset + i * interval) % frames for i in range(-(-frames // interval))}
    return set(range(min(first, frames))) | periodic
