"""Lists and maps of tiles in a ring, with the pooled tail: every rank has the means of all tiles.

Shapes: B batch, Hkv key heads, H heads, D head size, N tiles of the grid, n tiles of a rank.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.tail import PooledBlocks, plan_of_map
from multimodal_gen.kernels.engine import KernelChoice
from multimodal_gen.runtime.distributed.collectives import all_gather_tokens
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    RingTail,
    Shard,
    attend_ring_tiles,
    plans_of_lists,
    pool_over_ring,
)

__all__ = ["attend_ring_lists", "attend_ring_map", "ring_slope", "ring_tail"]


def ring_tail(
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    kept: torch.Tensor | None,
    *,
    scale: float,
    first_order: bool = False,
) -> RingTail | None:
    """Return the tail of a rank's queries. Every rank calls it: means are exchanged.

    Args:
        inputs: what this rank holds.
        shards: the keys of every rank.
        kept: what the rank's tiles keep, as bool [B|1, H|1, n or 1, N] or as lists of tiles, int32
            [B|1, H|1, n or 1, K]; None where the rank has no queries of the video.
        scale: factor of the scores.
        first_order: whether values follow keys inside of tiles; ranks then exchange one matrix per
            head, too.
    """
    (key, value), counts = pool_over_ring((inputs.key, inputs.value), shards, inputs.call)
    pooled = PooledBlocks(
        keys=key.to(inputs.key.dtype),
        values=value.to(inputs.value.dtype),
        counts=counts.int().unsqueeze(1),
        slope=ring_slope(inputs, shards, key, value, counts) if first_order else None,
    )
    if kept is None:
        return None
    if kept.dtype != torch.bool:
        shape = (*kept.shape[:3], key.shape[2])
        kept = kept.new_zeros(shape, dtype=torch.bool).scatter_(-1, kept.long(), True)
    return RingTail(pooled=pooled, kept=kept, scale=scale)


def attend_ring_lists(
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    lists: torch.Tensor | None,
    *,
    scale: float,
    kernel: KernelChoice,
    pooled: bool,
    first_order: bool = False,
) -> torch.Tensor:
    """Return the attention of a rank's queries by lists of tiles; see `attend_ring_tiles`.

    Args:
        inputs: what this rank holds.
        shards: the keys of every rank.
        lists: tiles of the grid that the rank's tiles keep, see `plans_of_lists`.
        scale: factor of the scores.
        kernel: what computes.
        pooled: whether the other tiles count by their means.
        first_order: see `ring_tail`.
    """
    tail = None
    if pooled:
        tail = ring_tail(inputs, shards, lists, scale=scale, first_order=first_order)
    plan_of = plans_of_lists(shards[inputs.call.group.index], lists)
    return attend_ring_tiles(inputs, shards, plan_of, scale=scale, kernel=kernel, tail=tail)


def attend_ring_map(
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    chosen: torch.Tensor,
    *,
    scale: float,
    kernel: KernelChoice,
    tail: PooledBlocks | None,
) -> torch.Tensor:
    """Return the attention of a rank's queries by a map; see `attend_ring_tiles`.

    Args:
        inputs: what this rank holds.
        shards: the keys of every rank.
        chosen: which blocks each block attends to exactly, bool [B|1, H|1, N, N].
        scale: factor of the scores.
        kernel: what computes.
        tail: means of all blocks, for those that are not chosen; None drops these.
    """
    mine = shards[inputs.call.group.index]
    if mine is None or mine.queries is None:
        return attend_ring_tiles(inputs, shards, lambda _: None, scale=scale, kernel=kernel)
    rows, blocks = chosen[:, :, mine.tiles], mine.queries

    def plan_of(theirs: Shard) -> BlockPlan:
        held = F.pad(rows[..., theirs.tiles], (0, theirs.keys.num_text_blocks), value=True)
        return plan_of_map(held, blocks, theirs.keys.blocks, theirs.keys.num_tiles)

    pooled = None if tail is None else RingTail(pooled=tail, kept=rows, scale=scale)
    return attend_ring_tiles(inputs, shards, plan_of, scale=scale, kernel=kernel, tail=pooled)


def ring_slope(
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return how values follow keys inside of the tiles of all ranks; see `PooledBlocks.slope`.

    Args:
        inputs: what this rank holds.
        shards: the keys of every rank.
        keys: means of all tiles, fp32 or fp64 [B, Hkv, N, D].
        values: the same of the values.
        counts: tokens of every tile, [B, N].
    """
    call, (batch, heads, _, size) = inputs.call, keys.shape
    mine, keep = shards[call.group.index], call.keep_of(call.group.index)
    own = keys.new_zeros((batch, heads, size, size))
    if mine is not None and mine.num_video:
        video = mine.keys.index[: mine.num_video].long()
        key, value = (x[:, video].to(keys.dtype) for x in (inputs.key, inputs.value))
        if keep is not None:
            key, value = (zero_masked_rows(x, keep[:, video]) for x in (key, value))
        own = key.permute(0, 2, 3, 1) @ value.transpose(1, 2)
    sizes = [own.numel()] * call.group.size
    total = all_gather_tokens(own.flatten(), sizes, call.group).view(-1, *own.shape).sum(0)
    weight = counts[:, None, :, None].to(keys.dtype)
    return (total - (keys * weight).mT @ values) / weight.sum(2, keepdim=True).clamp_min(1)
