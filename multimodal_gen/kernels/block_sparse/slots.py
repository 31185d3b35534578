"""Lists of slots of rows that are changed in place, for keys that stay where they are.

A slot holds up to so many rows, and some of the slots are seen. Which ones, and how many rows each
has, is data: `update` writes it into the tensors there are, and into what kernels derived from
them, so that a CUDA graph that was captured replays on the new lists.

Sparse methods choose among blocks of the slots that are seen. Those that are not seen have no
tokens, whatever the rows hold that lie in their place.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.api import refresh_plan
from multimodal_gen.kernels.block_sparse.layouts import QUERY_ROWS
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail import PooledBlocks
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.kernels.tile_pool.api import (
    pool_cells,
    pool_tiles,
    select_cells,
    select_tiles,
)

__all__ = [
    "EVERYWHERE",
    "CacheCut",
    "KeptChunks",
    "OrderOf",
    "SeenMeans",
    "SeenTiles",
    "SlotLists",
    "TileLists",
    "best_cells",
    "best_means",
    "means_of_seen",
    "near",
    "pooled_seen",
]

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


class SeenTiles(NamedTuple):
    """What queries in their tile order see of slots that are cut into tiles.

    Attributes:
        plan: the windows; its key blocks are all tiles, those of slots that are not seen empty.
        order: the tile order of the queries.
        num_tiles: tiles of the slots that are seen, outside of windows too.
        num_tokens: their tokens.
        itself: int32 [Nq], the key block in which the tokens of every tile of queries lie.
        places: int32 [Nk], the number of every key block that is seen in the order of time.
        in_order: whether queries lie as they came.
    """

    plan: BlockPlan
    order: TileOrder
    num_tiles: int
    num_tokens: int
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
        if self.order.uniform and self.num_tokens == self.num_tiles * self.order.largest:
            return plan, kept / self.num_tiles
        # Which of the blocks that are cut short are kept is up to the data.
        return plan, self.density(plan, full=True)


class SlotLists:
    """Every query sees every row of the slots that are seen.

    Args:
        num_slots: slots, seen or not.
        rows: rows of a slot.
        device: where the lists lie.

    Attributes:
        stretch: first row and number of rows, where what is seen lies in one piece; else None.
    """

    def __init__(self, num_slots: int, rows: int, device: torch.device) -> None:
        self.stretch: tuple[int, int] | None = None
        self._num, self._rows = num_slots, rows
        self._plans: dict[int, BlockPlan] = {}
        self._indices = torch.zeros(1, 1, 1, num_slots, dtype=torch.int32, device=device)
        self._counts = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._starts = torch.arange(num_slots, dtype=torch.int32, device=device) * rows

    def update(self, seen: Mapping[int, int]) -> None:
        """Write which slots are seen, as slot -> rows in it; at least one."""
        slots = sorted(seen)
        lengths = [seen.get(slot, 0) for slot in range(self._num)]
        rest = [0] * (self._num - len(slots))
        self._indices.view(-1).copy_(torch.tensor([*slots, *rest], dtype=torch.int32))
        self._counts.fill_(len(slots))
        self._lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        full = all(seen[slot] == self._rows for slot in slots[:-1])
        in_one_piece = full and slots == list(range(slots[0], slots[-1] + 1))
        self.stretch = (slots[0] * self._rows, sum(lengths)) if in_one_piece else None
        for plan in self._plans.values():
            refresh_plan(plan)

    @property
    def kind(self) -> tuple[int, int] | None:
        """What graphs of calls depend on: the stretch."""
        return self.stretch

    def plan(self, queries: int) -> BlockPlan:
        """Return the plan of so many queries."""
        if queries not in self._plans:
            q, total = Blocks.regular(queries, QUERY_ROWS), self._num * self._rows
            self._plans[queries] = BlockPlan(
                indices=self._indices.expand(1, 1, q.num, -1),
                counts=self._counts.expand(1, 1, q.num),
                q=q,
                kv=Blocks.ragged(self._starts, self._lengths, total=total, size=self._rows),
                uniform=True,
            )
        return self._plans[queries]


class TileLists:
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
        self._num, self._rows, self._order_of, self._device = num_slots, rows, order_of, device
        self._kept, self.num_tiles, self.num_tokens, self._in_order = kept, 0, 0, in_order
        tiles, window = kept.shape
        self._plans: dict[int, BlockPlan] = {}
        self._itself = torch.arange(tiles, dtype=torch.int32, device=device)
        self._first_itself = self._itself.clone()
        self._indices, self._counts, self._starts, self._lengths, self._places = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in (
                (1, 1, tiles, num_slots * window),
                (1, 1, 1),
                (num_slots * tiles,),
                (num_slots * tiles,),
                (num_slots * tiles,),
            )
        )

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
        of_slots = torch.cat(listed, dim=1).sort(dim=1).values
        room = self._indices.shape[3] - of_slots.shape[1]
        self._indices[0, 0].copy_(F.pad(of_slots, (0, room)))
        self._counts.fill_(of_slots.shape[1])
        self._starts.copy_(starts.flatten())
        self._lengths.copy_(lengths.flatten())
        self._places.copy_(places.flatten())
        torch.add(self._first_itself, slot * tiles, out=self._itself)
        for plan in self._plans.values():
            refresh_plan(plan)

    @property
    def kind(self) -> int:
        """What graphs of calls depend on: how many tiles there are to choose from."""
        return self.num_tiles

    def seen_by(self, queries: int) -> SeenTiles:
        """Return what so many queries see; the query blocks of the plan are their tiles."""
        order = self._order_of(queries, self._device)
        num = len(order.starts)
        if queries not in self._plans:
            largest = self._order_of(self._rows, "cpu").largest
            self._plans[queries] = BlockPlan(
                indices=self._indices[:, :, :num],
                counts=self._counts.expand(1, 1, num),
                q=Blocks.ragged(order.starts, order.lengths, total=queries, size=order.largest),
                kv=Blocks.ragged(
                    self._starts, self._lengths, total=self._num * self._rows, size=largest
                ),
                uniform=True,
            )
        return SeenTiles(
            self._plans[queries],
            order,
            self.num_tiles,
            self.num_tokens,
            self._itself[:num],
            self._places,
            self._in_order,
        )


class SeenMeans(NamedTuple):
    """The means of the blocks of both sides.

    Attributes:
        query: [B, H, Nq, D].
        key: [B, Hkv, Nk, D].
        real: bool [B, Nk], blocks that are seen.
    """

    query: torch.Tensor
    key: torch.Tensor
    real: torch.Tensor


def means_of_seen(query: torch.Tensor, key: torch.Tensor, tiles: SeenTiles) -> SeenMeans:
    """Return the means of all blocks.

    Args:
        query: [B, Sq, H, D], in the order of its tiles.
        key: [B, Sk, Hkv, D], all rows of the cache.
        tiles: what is seen of them.
    """
    order = tiles.order
    (means,) = pool_tiles((query,), order.starts, order.lengths, size=order.largest)
    (key_means,), lengths = _pooled((key,), tiles)
    return SeenMeans(means, key_means, (lengths > 0).expand(len(query), -1))


def best_means(means: SeenMeans, count: int) -> torch.Tensor:
    """Return the seen blocks whose means match best: int32 [B, H, Nq, count].

    Args:
        means: of the blocks.
        count: blocks to keep, at most those that are seen.
    """
    return select_tiles(means.query, means.key, count, real=means.real)


def best_cells(
    query: torch.Tensor,
    key: torch.Tensor,
    tiles: SeenTiles,
    count: int,
    *,
    cells: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """Return the seen blocks whose cells match best: int32 [B, H, Nq, count]; see `select_cells`.

    Args:
        query: [B, Sq, H, D], in the order of its tiles.
        key: [B, Sk, Hkv, D], all rows of the cache.
        tiles: what is seen of them.
        count: blocks to keep, at most those that are seen.
        cells: how many cells a block of queries and one of keys has.
        scale: factor of the scores.
    """
    order, kv = tiles.order, tiles.plan.kv
    starts, lengths = (bound.view(-1) for bound in kv.tensors())
    rows, q_real = pool_cells(query, order.starts, order.lengths, cells[0], size=tiles.plan.q.size)
    keys, k_real = pool_cells(key, starts, lengths, cells[1], size=kv.size)
    return select_cells(rows, keys, q_real, k_real, count, cells=cells, scale=scale)


def near(tiles: SeenTiles, reach: int) -> torch.Tensor:
    """Return which blocks are at most `reach` from a query's own in time: bool [1, 1, Nq, Nk]."""
    own = tiles.places[tiles.itself.long()]
    return ((own[:, None] - tiles.places).abs() <= reach)[None, None]


def pooled_seen(key: torch.Tensor, value: torch.Tensor, tiles: SeenTiles) -> PooledBlocks:
    """Return by what blocks count that are not chosen; those that are not seen have no tokens."""
    (keys, values), lengths = _pooled((key, value), tiles)
    return PooledBlocks(keys=keys, values=values, counts=lengths.view(1, 1, -1))


def _pooled(
    tensors: tuple[torch.Tensor, ...], tiles: SeenTiles
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return means of blocks of keys, and how many tokens each has."""
    kv = tiles.plan.kv
    starts, lengths = (bound.view(-1) for bound in kv.tensors())
    # Those without tokens count one here, and are left out by whoever has the lengths.
    return pool_tiles(tensors, starts, lengths.clamp_min(1), size=kv.size), lengths
