"""Plans of Sliding Tile Attention, on one process and in a ring.

Windows, the grid and the lengths of parts tell every rank what each of them needs: ranks agree on
it without a word. What a rank needs of all others comes in one exchange, beside attention to its
own keys, and is attended to in one part.

Shapes: B batch, S tokens, H heads, D head size, N tiles of the grid, n blocks of a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import Chunk, Reach, tiles_held
from multimodal_gen.runtime.layers.attention.sparse.sta.upstream import (
    UPSTREAM,
    UpstreamCall,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.windows import (
    Window,
    effective_window,
    kept_indices,
    tile_lists,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import TiledSequence, attend_tiled

__all__ = ["Held", "WindowedCall", "bounded", "held_by", "plan_of_heads", "reach_of", "ring_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowedCall:
    """One call, ready to attend over any windows; see `attend_tiled`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    queries: TiledSequence
    keys: TiledSequence
    keep: torch.Tensor | None
    scale: float
    kernel: SelectedKernel

    @property
    def tiles(self) -> Window:
        """The grid of tiles."""
        return self.queries.order.tiles

    def over(self, windows: tuple[Window, ...]) -> torch.Tensor:
        """Return attention over a window per head, [B, Sq, H, D]."""
        if self.kernel.name in UPSTREAM:
            return self._upstream(windows)
        return attend_tiled(
            self.query,
            self.key,
            self.value,
            self.queries,
            self.keys,
            lambda heads: _plan(self.queries, self.keys, windows[heads]),
            scale=self.scale,
            kernel=self.kernel,
            keep=self.keep,
            cached_plans=True,
        )

    def _upstream(self, windows: tuple[Window, ...]) -> torch.Tensor:
        order = self.queries.order
        call = UpstreamCall(
            grid=order.grid,
            tile=order.tile,
            windows=windows,
            query_text=self.query.shape[1] - order.num_tokens,
            key_text=self.key.shape[1] - order.num_tokens,
            masked=self.keep is not None,
            scale=self.scale,
            head_size=self.query.shape[3],
            kv_heads=self.key.shape[2],
        )
        index = self.keys.index  # that of the queries too, where the kernels serve the call
        return attend_upstream(self.kernel.name, self.query, self.key, self.value, index, call)


# Few heads share a pass, so there are few combinations of windows.
@lru_cache(maxsize=128)
def _plan(queries: TiledSequence, keys: TiledSequence, windows: tuple[Window, ...]) -> BlockPlan:
    # Not as inference tensors: the first caller must not decide what later ones may do with them.
    with torch.inference_mode(False):
        indices, counts, uniform = tile_lists(
            windows,
            queries.order.tiles,
            query_text=queries.num_text_blocks,
            key_text=keys.num_text_blocks,
            device=queries.index.device,
        )
        plan = BlockPlan(
            indices=indices, counts=counts, q=queries.blocks, kv=keys.blocks, uniform=uniform
        )
        return plan.longest_first()


# A plan is made of lists that few windows share, so that heads may be combined in any way.
@lru_cache(maxsize=128)
def ring_plan(windows: tuple[Window, ...], mine: Chunk, theirs: Chunk) -> BlockPlan | None:
    """Return what the queries of one chunk keep of the keys of another.

    Args:
        windows: one per head.
        mine: the queries; there is a video token among them.
        theirs: the keys.

    Returns:
        The plan, or None where no query keeps a key. The last 128 are cached; only making the
        lists of a window that is new to the chunks waits for the device.
    """
    tiles = mine.keys.order.tiles
    effective = [effective_window(window, tiles) for window in windows]
    distinct = {window: held_by(window, mine, theirs) for window in effective}
    return plan_of_heads([distinct[window] for window in effective], mine, theirs.keys.blocks)


def plan_of_heads(heads: Sequence["Held"], mine: Chunk, keys: Blocks) -> BlockPlan | None:
    """Return the plan of lists for every head, or None where no query keeps a key.

    Args:
        heads: the lists of each head, of which some may be the same.
        mine: the queries; there is a video token among them.
        keys: the blocks that the lists count.
    """
    heads = heads if len({id(held) for held in heads}) > 1 else heads[:1]
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """The lists of a window.

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


@lru_cache(maxsize=1024)
def held_by(window: Window, mine: Chunk, theirs: Chunk) -> Held:
    """Return which blocks of one chunk's keys the queries of another keep, over a whole window."""
    with torch.inference_mode(False):
        device = mine.tiles.device
        rows = kept_indices(window, mine.keys.order.tiles, device)[mine.tiles]
        return bounded(*tiles_held(rows[None, None], theirs))


def bounded(indices: torch.Tensor, counts: torch.Tensor) -> Held:
    """Return lists without the room that none of them needs; waits for the device."""
    least, most = (int(bound) for bound in counts.aminmax())
    return Held(indices=indices[..., : max(most, 1)], counts=counts, least=least, most=most)


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
        plan=_halo_plan(windows, held, me, needs[me]),
    )


def _wanted(windows: list[Window], chunk: Chunk) -> torch.Tensor:
    """Return whether the queries of a chunk keep each tile: bool [N] on the CPU."""
    tiles = chunk.keys.order.tiles
    wanted = torch.zeros(len(chunk.block_of), dtype=torch.bool)
    for window in windows:
        wanted[kept_indices(window, tiles)[chunk.tiles.cpu()].flatten().long()] = True
    return wanted


def _halo_plan(
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
