"""Sliding Tile Attention in a ring: what the queries of a rank keep of the keys of others.

Windows, the grid and the lengths of shards tell every rank what each of them needs: ranks agree on
it without a word. What a rank needs of all others, its halo, comes in one exchange, beside
attention to its own keys, and is attended to in one part.

Shapes: N tiles of the grid, n blocks of a shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.windows import (
    Window,
    effective_window,
    kept_indices,
    kept_map,
)
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import Halo, Shard, shard_lists

__all__ = ["halo_of", "ring_map", "ring_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BlockLists:
    """Which blocks of keys every block of queries keeps, for one window.

    Attributes:
        indices: int32 [1, 1, Nq, K], the blocks that each query block keeps.
        counts: int32 [1, 1, Nq], how many.
        least: the least of the counts.
        most: the largest of them.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    least: int
    most: int


# A plan is made of lists that few windows share, so that heads may be combined in any way.
@static_cache(maxsize=128)
def ring_plan(windows: tuple[Window, ...], mine: Shard, theirs: Shard) -> BlockPlan | None:
    """Return what the queries of one shard keep of the keys of another.

    Args:
        windows: one per head.
        mine: the queries; there is a video token among them.
        theirs: the keys.

    Returns:
        The plan, or None where no query keeps a key. The last 128 are cached; only making the
        lists of a window that is new to the shards waits for the device.
    """
    tiles = mine.keys.order.tiles
    effective = [effective_window(window, tiles) for window in windows]
    distinct = {window: _lists_of(window, mine, theirs) for window in effective}
    return _plan_of([distinct[window] for window in effective], mine, theirs.keys.blocks)


def _plan_of(heads: Sequence[_BlockLists], mine: Shard, keys: Blocks) -> BlockPlan | None:
    """Return the plan of lists for every head, or None where no query keeps a key.

    Args:
        heads: the lists of each head, of which some may be the same.
        mine: the queries; there is a video token among them.
        keys: the blocks that the lists count.
    """
    heads = heads if len(set(heads)) > 1 else heads[:1]
    room = max(held.indices.shape[3] for held in heads)
    most = max(held.most for held in heads)
    if not most:
        return None
    assert mine.queries is not None, "callers know"
    with torch.inference_mode(False):
        padded = [F.pad(held.indices, (0, room - held.indices.shape[3])) for held in heads]
        plan = BlockPlan(
            indices=torch.cat(padded, dim=1),
            counts=torch.cat([held.counts for held in heads], dim=1),
            q=mine.queries,
            kv=keys,
            uniform=all(held.least == most for held in heads),
        )
        return plan.longest_first()


@lru_cache(maxsize=128)
def ring_map(windows: tuple[Window, ...], mine: Shard) -> torch.Tensor:
    """Return which tiles of the grid the queries of a shard keep: bool [1, H|1, n, N]."""
    with torch.inference_mode(False):
        tiles, device = mine.keys.order.tiles, mine.tiles.device
        effective = [effective_window(window, tiles) for window in windows]
        maps = {window: kept_map(window, tiles, device)[mine.tiles] for window in effective}
        heads = effective if len(maps) > 1 else effective[:1]
        return torch.stack([maps[window] for window in heads]).unsqueeze(0)


@lru_cache(maxsize=1024)
def _lists_of(window: Window, mine: Shard, theirs: Shard) -> _BlockLists:
    """Return which blocks of one shard's keys the queries of another keep, over a whole window."""
    with torch.inference_mode(False):
        device = mine.tiles.device
        rows = kept_indices(window, mine.keys.order.tiles, device)[mine.tiles]
        return _bounded(*shard_lists(rows[None, None], theirs))


def _bounded(indices: torch.Tensor, counts: torch.Tensor) -> _BlockLists:
    """Return lists without the room that none of them needs; waits for the device."""
    least, most = (int(bound) for bound in counts.aminmax())
    return _BlockLists(indices=indices[..., : max(most, 1)], counts=counts, least=least, most=most)


@static_cache(maxsize=64)
def halo_of(windows: tuple[Window, ...], shards: tuple[Shard | None, ...], me: int) -> Halo | None:
    """Return what ranks send each other, the same decision on all of them.

    Args:
        windows: one per head.
        shards: the tokens of every rank.
        me: this rank.

    Returns:
        None where a ring serves as well or better: a rank has no tokens, there is text, which
        everything attends to, or all ranks need everything. The last 64 are cached; making a new
        one waits for the device.
    """
    held = [shard for shard in shards if shard is not None and not shard.keys.num_text_blocks]
    if len(held) < len(shards):
        return None
    with torch.inference_mode(False), torch.device("cpu"):
        distinct = {effective_window(window, held[0].keys.order.tiles): None for window in windows}
        wanted = [_wanted([*distinct], shard) for shard in held]
        lengths = [shard.lengths.cpu() for shard in held]
        # Blocks of each rank (column) that each rank (row) needs, and the tokens in them.
        needs = [
            [want[shard.tiles.cpu()] & (i != j) for j, shard in enumerate(held)]
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
    return Halo(
        rows=rows,
        send_counts=tuple(row[me] for row in counts),
        recv_counts=tuple(counts[me]),
        plan=_halo_plan(windows, held, me, needs[me]),
    )


def _wanted(windows: list[Window], shard: Shard) -> torch.Tensor:
    """Return whether the queries of a shard keep each tile: bool [N] on the CPU."""
    tiles = shard.keys.order.tiles
    wanted = torch.zeros(len(shard.block_of), dtype=torch.bool)
    for window in windows:
        wanted[kept_indices(window, tiles)[shard.tiles.cpu()].flatten().long()] = True
    return wanted


def _halo_plan(
    windows: tuple[Window, ...], shards: list[Shard], me: int, needs: list[torch.Tensor]
) -> BlockPlan | None:
    """Return what this rank's queries keep of the blocks that come in, rank by rank."""
    mine, device = shards[me], shards[me].tiles.device
    lengths = torch.cat(
        [shard.lengths[need.to(device)] for shard, need in zip(shards, needs, strict=True)]
    )
    if not len(lengths):
        return None
    with torch.inference_mode(False):
        keys = _blocks(lengths, mine.keys.order.largest)
        numbers, first = [], 0
        for need in needs:
            numbers.append((need.cumsum(0) - 1 + first).int().to(device))
            first += int(need.sum())
        others = [i for i in range(len(shards)) if i != me]
        effective = [effective_window(window, mine.keys.order.tiles) for window in windows]
        lists = {
            window: _joined(
                [_lists_of(window, mine, shards[i]) for i in others], [numbers[i] for i in others]
            )
            for window in dict.fromkeys(effective)
        }
    return _plan_of([lists[window] for window in effective], mine, keys)


def _blocks(lengths: torch.Tensor, size: int) -> Blocks:
    """Return blocks without gaps."""
    total = int(lengths.sum())
    if bool((lengths == size).all()):
        return Blocks.regular(total, size)
    starts = (lengths.cumsum(0) - lengths).int()
    return Blocks.ragged(starts, lengths, total=total, size=size)


def _joined(parts: list[_BlockLists], numbers: list[torch.Tensor]) -> _BlockLists:
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
    return _bounded(indices.gather(-1, order), there.sum(-1).int())
