"""What windows reach of other ranks' keys, so that a ring need not pass all of them round.

Windows, the grid and the lengths of chunks tell every rank what each of them needs: ranks agree on
it without a word. What a rank needs of all others comes in one exchange, beside attention to its
own keys, and is attended to in one part.

Shapes: N tiles of the grid, n blocks of a chunk.
"""

from functools import lru_cache

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.layers.attention.backends.ring_tiles import Chunk, Reach
from multimodal_gen.runtime.layers.attention.backends.sliding_tile_call import (
    Held,
    bounded,
    held_by,
    plan_of_heads,
)
from multimodal_gen.runtime.layers.attention.sta.windows import (
    Window,
    effective_window,
    kept_indices,
)

__all__ = ["reach_of"]


@lru_cache(maxsize=64)
def reach_of(
    windows: tuple[Window, ...], chunks: tuple[Chunk | None, ...], me: int
) -> Reach | None:
    """Return what ranks send each other, the same decision on all of them.

    Args:
        windows: one per head.
        chunks: the tokens of every rank.
        me: this rank.

    Returns:
        None where a ring serves as well or better: a rank has no tokens, there is text, which
        everything attends to, or all ranks need everything. The last 64 are cached; making a new
        one waits for the device.
    """
    held = [chunk for chunk in chunks if chunk is not None and not chunk.keys.num_text_blocks]
    if len(held) < len(chunks):
        return None
    with torch.inference_mode(False), torch.device("cpu"):
        distinct = {effective_window(window, held[0].keys.order.tiles): None for window in windows}
        wanted = [_wanted([*distinct], chunk) for chunk in held]
        lengths = [chunk.lengths.cpu() for chunk in held]
        # Blocks of each rank (column) that each rank (row) needs, and the tokens in them.
        needs = [
            [want[chunk.tiles.cpu()] & (i != j) for j, chunk in enumerate(held)]
            for i, want in enumerate(wanted)
        ]
        counts = [
            [int(length[need].sum()) for need, length in zip(row, lengths, strict=True)]
            for row in needs
        ]
        whole = sum(int(length.sum()) for length in lengths)
        if sum(map(sum, counts)) == (len(held) - 1) * whole:
            return None
        own = lengths[me]
        leave = [torch.repeat_interleave(row[me], own).nonzero().flatten() for row in needs]
        rows = torch.cat(leave).to(held[me].tiles.device)
    return Reach(
        rows=rows,
        leaving=tuple(row[me] for row in counts),
        coming=tuple(counts[me]),
        plan=_plan(windows, held, me, needs[me]),
    )


def _wanted(windows: list[Window], chunk: Chunk) -> torch.Tensor:
    """Return whether the queries of a chunk keep each tile: bool [N] on the CPU."""
    tiles = chunk.keys.order.tiles
    wanted = torch.zeros(len(chunk.block_of), dtype=torch.bool)
    for window in windows:
        wanted[kept_indices(window, tiles)[chunk.tiles.cpu()].flatten().long()] = True
    return wanted


def _plan(
    windows: tuple[Window, ...], chunks: list[Chunk], me: int, needs: list[torch.Tensor]
) -> BlockPlan | None:
    """Return what this rank's queries keep of the blocks that come in, rank by rank."""
    mine, device = chunks[me], chunks[me].tiles.device
    lengths = torch.cat(
        [chunk.lengths[need.to(device)] for chunk, need in zip(chunks, needs, strict=True)]
    )
    if not len(lengths):
        return None
    with torch.inference_mode(False):
        keys = _blocks(lengths, mine.keys.order.largest)
        numbers, first = [], 0
        for need in needs:
            numbers.append((need.cumsum(0) - 1 + first).int().to(device))
            first += int(need.sum())
        others = [i for i in range(len(chunks)) if i != me]
        effective = [effective_window(window, mine.keys.order.tiles) for window in windows]
        lists = {
            window: _joined(
                [held_by(window, mine, chunks[i]) for i in others], [numbers[i] for i in others]
            )
            for window in dict.fromkeys(effective)
        }
    return plan_of_heads([lists[window] for window in effective], mine, keys)


def _blocks(lengths: torch.Tensor, size: int) -> Blocks:
    """Return blocks without gaps."""
    total = int(lengths.sum())
    if bool((lengths == size).all()):
        return Blocks.regular(total, size)
    starts = (lengths.cumsum(0) - lengths).int()
    return Blocks.ragged(starts, lengths, total=total, size=size)


def _joined(parts: list[Held], numbers: list[torch.Tensor]) -> Held:
    """Return lists that hold those of all parts, with the numbers that blocks have come in by."""
    indices = torch.cat(
        [number[part.indices.long()] for part, number in zip(parts, numbers, strict=True)], dim=-1
    )
    there = torch.cat(
        [
            torch.arange(part.indices.shape[-1], device=indices.device) < part.counts[..., None]
            for part in parts
        ],
        dim=-1,
    )
    # Those that are there move to the front, in order.
    order = torch.argsort(there.logical_not().int(), dim=-1, stable=True)
    return bounded(indices.gather(-1, order), there.sum(-1).int())
