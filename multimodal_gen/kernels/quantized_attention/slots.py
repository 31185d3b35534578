"""Where quantised rows lie: block by block, each block in a whole number of tiles.

Quantised tensors have *slots*. Block i owns `size` of them from i * size on; its rows come first,
the rest is zero. So every tile a kernel loads begins at a multiple of the tile, whatever the plan.
Regular blocks of whole tiles are in slots already: slot and row are one.
"""

from dataclasses import dataclass, replace

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks

__all__ = ["Slots", "in_slots", "slots_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """The slots of one side.

    Attributes:
        blocks: how the rows are cut.
        size: slots per block, a multiple of `tile`.
        tile: slots of a tile.
        total: slots altogether, a multiple of `tile`.
    """

    blocks: Blocks
    size: int
    tile: int
    total: int

    @property
    def in_place(self) -> bool:
        """Whether slot and row are one."""
        return self.blocks.is_regular and self.size == self.blocks.size


def slots_of(blocks: Blocks, tile: int) -> Slots:
    """Return the slots of `blocks` in tiles of `tile`."""
    size = -(-blocks.size // tile) * tile
    slots = Slots(blocks=blocks, size=size, tile=tile, total=blocks.num * size)
    if slots.in_place:
        return replace(slots, total=-(-blocks.total // tile) * tile)
    return slots


def in_slots(plan: BlockPlan, tile: int) -> BlockPlan:
    """Return the plan with keys counted in slots of tiles of `tile`, once."""
    kv = plan.kv
    size = -(-kv.size // tile) * tile
    if kv.is_regular and size == kv.size:
        return plan
    known = plan.cache.get(("slots", tile))
    if known is None:
        _, lengths = kv.bounds(plan.device)
        known = replace(plan, kv=Blocks.padded(lengths, size))
        plan.cache["slots", tile] = known
    assert isinstance(known, BlockPlan)
    return known
