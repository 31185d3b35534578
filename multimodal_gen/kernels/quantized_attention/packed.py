"""Quantised tensors as the attention kernels read them, and where their rows lie.

Quantised tensors have *slots*. Block i owns `size` of them from i * size on; its rows come first,
the rest is zero. So every tile a kernel loads begins at a multiple of the tile, whatever the plan.
Regular blocks of whole tiles are in slots already: slot and row are one.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks

SAMPLE = 512
"""Slots of queries, and of keys, of which means are taken."""
LEAST_STRETCH, MOST_STRETCH = 1.25, 8.0
"""Of keys, along what queries have in common; less is none."""
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Out [B, Sq, H, D] and lse [B, H, Sq], contiguous, or None where no lse is wanted."""


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
        known = plan.remember(("slots", tile), replace(plan, kv=Blocks.padded(lengths, size)))
    assert isinstance(known, BlockPlan)
    return known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """8-bit queries, keys and values in slots; R slots, T = R / `keys` tiles, D padded channels.

    Attributes:
        q: int8 [B, H, Rq, D], shrunk along p of the definition and rotated over the channels.
        q_scale: fp32 [B, H, Rq], one per row, times the scale of the scores times log2(e).
        shift: fp32 [B, H, Rq], what the smoothing of K took from the lse of a row; of any size
            where no lse is wanted.
        k: int8 [B, Hkv, Rk, D], stretched as much and rotated likewise.
        k_scale: fp32 [B, Hkv, T], one per tile of keys.
        v: e4m3 [B, Hkv, D, Rk]; or 16-bit [B, Rk, Hkv, D].
        v_scale: fp32 [B, Hkv, T], one per tile of keys; ones for 16-bit values.
        q_slots: slots per query block.
        keys: keys of a tile.
    """

    q: torch.Tensor
    q_scale: torch.Tensor
    shift: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    q_slots: int
    keys: int


class Kind(NamedTuple):
    """What is made of queries, keys and values.

    Attributes:
        own_mean: whether the mean of the keys is to be computed, or will be said.
        shift: whether the lse will be wanted.
        e4m3: whether values become 8 bits.
        permuted: whether the keys of e4m3 values are stored in the order of a thread's scores.
        copied: dtype to which 16-bit values are copied into slots; None leaves them as they are
            where their blocks lie in slots already.
    """

    own_mean: bool
    shift: bool
    e4m3: bool
    permuted: bool
    copied: torch.dtype | None = None


@cache
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return sqrt(n) times the rotation of n channels: a Hadamard matrix, of 1 and -1.

    Kept for the process: 64 KiB at most for every width, dtype and device. It is copied from the
    CPU, which waits, so that it is there on every stream.

    Args:
        width: n, the channels of a head with those that pad it; a power of two.
        dtype: any that has these numbers; all do.
        device: where the result lives.

    Returns:
        The symmetric matrix [width, width].
    """
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, device="cpu")
        while len(matrix) < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix.to(device, dtype)
