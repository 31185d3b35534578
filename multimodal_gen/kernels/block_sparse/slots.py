"""Lists of slots of rows that are changed in place, for keys that stay where they are.

A slot holds up to so many rows, and some of the slots are seen. Which ones, and how many rows each
has, is data: `update` writes it into the tensors there are, and into what kernels derived from
them, so that a CUDA graph that was captured replays on the new lists.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.api import refresh_plan
from multimodal_gen.kernels.block_sparse.layouts import QUERY_ROWS
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.tile_order.api import TileOrder

__all__ = ["OrderOf", "SeenTiles", "SlotLists", "TileLists"]

OrderOf: TypeAlias = Callable[[int, "torch.device | str"], TileOrder]
"""Gives the tile order of so many rows on a device."""


class SeenTiles(NamedTuple):
    """What queries in their tile order see of slots that are kept in tiles.

    Attributes:
        plan: the windows; its key blocks are all tiles, those of slots that are not seen empty.
        order: the tile order of the queries.
        num_tiles: tiles of the slots that are seen, outside of windows too.
        num_tokens: their tokens.
    """

    plan: BlockPlan
    order: TileOrder
    num_tiles: int
    num_tokens: int


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
    """A slot holds frames tile by tile, each tile of all its frames; queries see windows of tiles.

    In every slot that is seen, a tile of queries sees the window of tiles in space around its own
    place, moved inwards at the borders: as many tiles wherever it lies.

    Args:
        num_slots: slots, seen or not.
        rows: rows of a slot.
        order_of: gives the tile order of so many rows on a device.
        kept: int32 [tiles, tiles in a window], what each tile sees of a slot, in increasing order.
        device: where the lists lie.

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
    ) -> None:
        self._num, self._rows, self._order_of, self._device = num_slots, rows, order_of, device
        self._kept, self.num_tiles, self.num_tokens = kept, 0, 0
        tiles, window = kept.shape
        self._plans: dict[int, BlockPlan] = {}
        self._indices, self._counts, self._starts, self._lengths = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in (
                (1, 1, tiles, num_slots * window),
                (1, 1, 1),
                (num_slots * tiles,),
                (num_slots * tiles,),
            )
        )

    def update(self, seen: Mapping[int, int]) -> None:
        """Write which slots are seen, as slot -> rows in it; at least one."""
        tiles, window = self._kept.shape
        starts, lengths = (torch.zeros(self._num, tiles, dtype=torch.int32) for _ in range(2))
        slots = sorted(seen)
        for slot in slots:
            order = self._order_of(seen[slot], "cpu")
            starts[slot] = order.starts + slot * self._rows
            lengths[slot] = order.lengths
        first = torch.tensor(slots, dtype=torch.int32) * tiles
        listed = (first[:, None] + self._kept[:, None, :]).flatten(1)
        room = self._indices.shape[3] - listed.shape[1]
        self._indices[0, 0].copy_(F.pad(listed, (0, room)))
        self.num_tiles, self.num_tokens = len(slots) * tiles, sum(seen.values())
        self._counts.fill_(len(slots) * window)
        self._starts.copy_(starts.flatten())
        self._lengths.copy_(lengths.flatten())
        for plan in self._plans.values():
            refresh_plan(plan)

    @property
    def kind(self) -> int:
        """What graphs of calls depend on: how many tiles there are to choose from."""
        return self.num_tiles

    def seen_by(self, queries: int) -> SeenTiles:
        """Return what so many queries see; the query blocks of the plan are their tiles."""
        order = self._order_of(queries, self._device)
        if queries not in self._plans:
            largest = self._order_of(self._rows, "cpu").largest
            self._plans[queries] = BlockPlan(
                indices=self._indices,
                counts=self._counts.expand(1, 1, len(order.starts)),
                q=Blocks.ragged(order.starts, order.lengths, total=queries, size=order.largest),
                kv=Blocks.ragged(
                    self._starts, self._lengths, total=self._num * self._rows, size=largest
                ),
                uniform=True,
            )
        return SeenTiles(self._plans[queries], order, self.num_tiles, self.num_tokens)
