"""Lists of slots of rows that are changed in place, for keys that stay where they are.

A slot holds up to so many rows, and some of the slots are seen. Which ones, and how many rows each
has, is data: `update` writes it into the tensors there are, and into what kernels derived from
them, so that a CUDA graph that was captured replays on the new lists.

Sparse methods choose among blocks of the slots that are seen. Those that are not seen have no
tokens, whatever the rows hold that lie in their place.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.api import refresh_plan
from multimodal_gen.kernels.block_sparse.call import PooledBlocks
from multimodal_gen.kernels.block_sparse.layouts import QUERY_ROWS
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.select.api import (
    pool_tiles,
)
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.tile_order.api import TileOrder

OrderOf: TypeAlias = Callable[[int, "torch.device | str"], TileOrder]
"""Gives the tile order of so many rows on a device."""

EVERYWHERE = (1 << 20, 1 << 20)
"""A window larger than any grid."""

_UNSEEN = -(1 << 30)  # a place that is no neighbour of any other


class CacheCut(NamedTuple):
    """The blocks that a method sees of chunks that are kept: windows of tiles, or pieces of rows.

    Attributes:
        window: height and width of the window in space that a tile sees, in tiles.
        rows: rows of a block instead; every block sees all of them.
    """

    window: tuple[int, int] | None = None
    rows: int | None = None


class KeptChunks(NamedTuple):
    """How chunks are kept.

    Attributes:
        tokens: of the longest chunk.
        frames: latent frames of it; 0 where nothing is known of its grid.
        tile: height and width of the tiles in which they are kept, each of all frames; None where
            tokens lie as they came.
    """

    tokens: int
    frames: int
    tile: tuple[int, int] | None

    def in_tiles(self, size: Sequence[int]) -> CacheCut | str:
        """Return the tiles, where they are those of a method; else why not.

        Args:
            size: tokens of the method's tiles along (time, height, width).
        """
        if self.tile is not None and tuple(size[1:]) == self.tile and self.frames <= size[0]:
            return CacheCut(window=EVERYWHERE)
        tile = self.tile
        held = "tokens as they came" if tile is None else f"tiles of {[self.frames, *tile]}"
        return f"its tiles have {list(size)} tokens, and the cache keeps {held}"

    def in_rows(self, rows: int) -> CacheCut | str:
        """Return pieces of the chunks, where tokens lie as they came; else why not.

        Args:
            rows: tokens of a piece; those at the ends of chunks may be shorter.
        """
        if self.tile is None:
            return CacheCut(rows=rows)
        return f"its blocks are {rows} tokens as they came, and the cache keeps tiles"


class VisibleTiles(NamedTuple):
    """What queries in their tile order see of slots that are cut into tiles.

    Attributes:
        plan: the windows; its key blocks are all tiles, those of slots that are not seen empty.
        order: the tile order of the queries.
        num_tiles: tiles of the slots that are seen, outside of windows too.
        num_tokens: their tokens.
        even: whether they are of one size.
        itself: int32 [Nq], the key block in which the tokens of every tile of queries lie.
        places: int32 [Nk], the number of every key block that is seen in the order of time.
        in_order: whether queries lie as they came.
    """

    plan: BlockPlan
    order: TileOrder
    num_tiles: int
    num_tokens: int
    even: bool
    itself: torch.Tensor
    places: torch.Tensor
    in_order: bool = False

    def density(self, plan: BlockPlan, *, full: bool = False) -> torch.Tensor:
        """Return the share of the pairs that are seen which a plan keeps, [].

        Args:
            plan: over the same blocks.
            full: whether every list of it is as long as there is room for.
        """
        return plan.pairs(full=full).double().mean() / (self.order.num_tokens * self.num_tokens)

    def plan_of(self, lists: torch.Tensor) -> tuple[BlockPlan, float | torch.Tensor]:
        """Return the plan of lists of one length, and the share of pairs that it keeps.

        Args:
            lists: int32 [B, H, Nq, K], blocks that are seen, increasing.
        """
        kept = lists.shape[3]
        counts = lists.new_full((1, 1, 1), kept).expand(lists.shape[:3])
        plan = BlockPlan(indices=lists, counts=counts, q=self.plan.q, kv=self.plan.kv, uniform=True)
        if self.order.uniform and self.even:
            return plan, kept / self.num_tiles
        # Which of the blocks that are cut short are kept is up to the data.
        return plan, self.density(plan, full=True)


class _Lists:
    """Lists of blocks of slots, and the plans over them; what is written reaches all of these.

    Args:
        num_slots: slots, seen or not.
        rows: rows of a slot.
        cut: query blocks with lists of their own, blocks of a slot, and those a list has of it.
        device: where the lists lie.
    """

    def __init__(
        self, num_slots: int, rows: int, cut: tuple[int, int, int], device: torch.device
    ) -> None:
        lists, blocks, listed = cut
        self._num, self._rows = num_slots, rows
        self._plans: dict[int, BlockPlan] = {}
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self._indices, self._counts = zeros(1, 1, lists, num_slots * listed), zeros(1, 1, 1)
        self._starts, self._lengths = zeros(num_slots * blocks), zeros(num_slots * blocks)

    def _write(self, lists: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Write lists of blocks that are seen, and where all blocks begin and how long they are."""
        self._indices[0, 0].copy_(F.pad(lists, (0, self._indices.shape[3] - lists.shape[1])))
        self._counts.fill_(lists.shape[1])
        self._starts.copy_(starts.flatten())
        self._lengths.copy_(lengths.flatten())
        for plan in self._plans.values():
            refresh_plan(plan)

    def _plan(self, queries: int, q: Blocks, indices: torch.Tensor, size: int) -> BlockPlan:
        """Make the plan of so many queries, with blocks of at most `size` keys."""
        total = self._num * self._rows
        plan = BlockPlan(
            indices=indices,
            counts=self._counts.expand(1, 1, q.num),
            q=q,
            kv=Blocks.ragged(self._starts, self._lengths, total=total, size=size),
            uniform=True,
        )
        self._plans[queries] = plan
        return plan


class SlotLists(_Lists):
    """Every query sees every row of the slots that are seen.

    Args:
        num_slots: slots, seen or not.
        rows: rows of a slot.
        device: where the lists lie.

    Attributes:
        stretch: first row and number of rows, where what is seen lies in one piece; else None.
    """

    def __init__(self, num_slots: int, rows: int, device: torch.device) -> None:
        super().__init__(num_slots, rows, (1, 1, 1), device)
        self.stretch: tuple[int, int] | None = None

    def update(self, seen: Mapping[int, int]) -> None:
        """Write which slots are seen, as slot -> rows in it; at least one."""
        slots = sorted(seen)
        lengths = [seen.get(slot, 0) for slot in range(self._num)]
        full = all(seen[slot] == self._rows for slot in slots[:-1])
        in_one_piece = full and slots == list(range(slots[0], slots[-1] + 1))
        self.stretch = (slots[0] * self._rows, sum(lengths)) if in_one_piece else None
        starts = torch.arange(self._num, dtype=torch.int32) * self._rows
        lists = torch.tensor([slots], dtype=torch.int32)
        self._write(lists, starts, torch.tensor(lengths, dtype=torch.int32))

    @property
    def kind(self) -> tuple[int, int] | None:
        """What graphs of calls depend on: the stretch."""
        return self.stretch

    def plan(self, queries: int) -> BlockPlan:
        """Return the plan of so many queries."""
        if queries in self._plans:
            return self._plans[queries]
        q = Blocks.regular(queries, QUERY_ROWS)
        return self._plan(queries, q, self._indices.expand(1, 1, q.num, -1), self._rows)


class TileLists(_Lists):
    """A slot holds its rows tile by tile; queries see windows of tiles.

    In every slot that is seen, a tile of queries sees the tiles of `kept`, as many everywhere.
    A chunk that is shorter than a slot has shorter tiles, or fewer of them.

    Args:
        num_slots: slots, seen or not.
        rows: rows of a slot.
        order_of: gives the tile order of so many rows on a device.
        kept: int32 [tiles, tiles in a window], what each tile sees of a slot, in increasing order.
        device: where the lists lie.
        in_order: whether the tile order is that in which rows come.

    Attributes:
        num_tiles: tiles of the slots that are seen.
        num_tokens: their tokens.
        even: whether they are of one size.
    """

    def __init__(
        self,
        num_slots: int,
        rows: int,
        order_of: OrderOf,
        kept: torch.Tensor,
        device: torch.device,
        *,
        in_order: bool = False,
    ) -> None:
        tiles, window = kept.shape
        super().__init__(num_slots, rows, (tiles, tiles, window), device)
        self._order_of, self._kept, self._in_order = order_of, kept, in_order
        self.num_tiles, self.num_tokens, self.even = 0, 0, True
        self._itself = torch.arange(tiles, dtype=torch.int32, device=device)
        self._first_itself = self._itself.clone()
        self._places = torch.zeros_like(self._starts)

    def update(self, seen: Mapping[int, int]) -> None:
        """Write which slots are seen, as slot -> rows in it, in the order of time; at least one."""
        tiles, window = self._kept.shape
        starts, lengths = (torch.zeros(self._num, tiles, dtype=torch.int32) for _ in range(2))
        places = torch.full_like(starts, _UNSEEN)
        self.num_tiles, self.num_tokens = 0, sum(seen.values())
        listed = []
        for slot, rows in seen.items():
            order = self._order_of(rows, "cpu")
            num = len(order.starts)
            starts[slot, :num] = order.starts + slot * self._rows
            lengths[slot, :num] = order.lengths
            places[slot, :num] = torch.arange(self.num_tiles, self.num_tiles + num)
            listed.append(slot * tiles + self._kept[:, : min(num, window)])
            self.num_tiles += num
        self.even = len(set(lengths[lengths > 0].tolist())) == 1
        self._places.copy_(places.flatten())
        torch.add(self._first_itself, slot * tiles, out=self._itself)
        self._write(torch.cat(listed, dim=1).sort(dim=1).values, starts, lengths)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What graphs of calls depend on: of how many tiles, and tokens, how many are kept.

        Whether tiles are of one size decides where the share that is kept comes from.
        """
        return self.num_tiles, self.num_tokens, self.even

    def seen_by(self, queries: int) -> VisibleTiles:
        """Return what so many queries see; the query blocks of the plan are their tiles."""
        order = self._order_of(queries, self._places.device)
        num = len(order.starts)
        plan = self._plans.get(queries)
        if plan is None:
            q = Blocks.ragged(order.starts, order.lengths, total=queries, size=order.largest)
            largest = self._order_of(self._rows, "cpu").largest
            plan = self._plan(queries, q, self._indices[:, :, :num], largest)
        own = (self._itself[:num], self._places, self._in_order)
        return VisibleTiles(plan, order, self.num_tiles, self.num_tokens, self.even, *own)


def pooled_visible(key: torch.Tensor, value: torch.Tensor, tiles: VisibleTiles) -> PooledBlocks:
    """Return by what blocks count that are not chosen; those that are not seen have no tokens."""
    kv = tiles.plan.kv
    starts, lengths = (bound.view(-1) for bound in kv.tensors())
    keys, values = pool_tiles((key, value), Tiles(starts, lengths, kv.size))
    return PooledBlocks(keys=keys, values=values, counts=lengths.view(1, 1, -1))
