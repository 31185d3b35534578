"""The coarse stage of Video Sparse Attention: means of tiles, and what is decided by them.

Shapes: B batch, S tokens, H heads, D head size, N tiles, n tiles that have tokens in a shard of a
ring; q/k suffix = query/key side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.tile_pool.api import add_gated, select_tiles
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    Shard,
    own_queries,
    pool_over_ring,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SparseCall,
    TiledSequence,
    plan_of_tiles,
    pool_video,
    tile_means,
)

__all__ = ["CoarseStage", "coarse_stage", "ring_coarse_stage"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoarseStage:
    """The coarse stage of one call: the tiles, and the means of their queries and keys.

    In a ring every rank has the means of all tiles.

    Attributes:
        queries: the queries in tiles.
        keys: the keys in tiles.
        query: means of the tiles' queries, [B, H, N, D].
        key: means of the tiles' keys, [B, Hkv, N, D].
        real: bool [B, N], tiles of which not everything is masked; None for all.
        value: means of the tiles' values, [B, Hkv, N, D], where ranks exchanged them.
    """

    queries: TiledSequence
    keys: TiledSequence
    query: torch.Tensor
    key: torch.Tensor
    real: torch.Tensor | None = None
    value: torch.Tensor | None = None

    def plan(self, heads: slice, kept: int) -> BlockPlan:
        """Return what a range of query heads attends to: `kept` tiles and all text."""
        group = self.query.shape[1] // self.key.shape[1]
        key = self.key[:, heads.start // group : heads.stop // group]
        text = self.keys.num_text_blocks
        indices = select_tiles(self.query[:, heads], key, kept, always=text, real=self.real)
        return plan_of_tiles(indices, self.queries, self.keys)

    def lists_of(self, mine: Shard | None, kept: int) -> torch.Tensor | None:
        """Return the `kept` tiles of each tile of a shard's queries; None where there are none."""
        if mine is None or mine.queries is None:
            return None
        return select_tiles(self.query[:, :, mine.tiles], self.key, kept, real=self.real)

    def add(self, out: torch.Tensor, call: SparseCall) -> torch.Tensor:
        """Return `out` plus the call's gate times attention among the tiles."""
        assert call.gate is not None, "callers know"
        order, index = self.queries.order, self.queries.index
        starts, lengths, size = order.starts, order.lengths, order.largest
        (value,) = pool_video((call.value,), self.queries)
        coarse = self._attend(self.query, value, call.scale)
        return add_gated(out, call.gate, coarse, starts, lengths, size=size, index=index)

    def add_to_shard(
        self, mine: Shard | None, out: torch.Tensor, gate: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the `out` of a shard, [B, S, H, D], plus `gate` times attention among tiles."""
        if mine is None or not mine.num_video:
            return out
        assert self.value is not None, "ranks exchanged them"
        coarse = self._attend(self.query[:, :, mine.tiles], self.value, scale)
        starts, lengths, size = mine.starts, mine.lengths, mine.keys.order.largest
        return add_gated(out, gate, coarse, starts, lengths, size=size, index=mine.keys.index)

    def _attend(self, query: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        grouped = query.shape[1] != value.shape[1]
        return F.scaled_dot_product_attention(
            query, self.key, value, scale=scale, enable_gqa=grouped
        )


def coarse_stage(call: SparseCall, queries: TiledSequence, keys: TiledSequence) -> CoarseStage:
    """Return the coarse stage where one process has all tokens."""
    query, key, real = tile_means(call, queries)
    return CoarseStage(queries=queries, keys=keys, query=query, key=key, real=real)


def ring_coarse_stage(
    inputs: RingInputs,
    queries: TiledSequence,
    keys: TiledSequence,
    shards: Sequence[Shard | None],
) -> CoarseStage:
    """Return the coarse stage where ranks hold shards, which may cut tiles.

    Args:
        inputs: what this rank holds; values are pooled where there is a gate, and only then do
            gradients flow through the means.
        queries: the queries of all ranks in tiles.
        keys: the keys of all ranks in tiles.
        shards: the tokens of every rank.
    """
    call = inputs.call
    tensors = [own_queries(inputs), inputs.key]
    if inputs.gate is None:
        tensors = [x.detach() for x in tensors]
    else:
        tensors.append(inputs.value)
    means, counts = pool_over_ring(tensors, shards, call)
    pooled = [mean.to(inputs.query.dtype) for mean in means]
    return CoarseStage(
        queries=queries,
        keys=keys,
        query=pooled[0],
        key=pooled[1],
        real=None if call.keep is None else counts > 0,
        value=None if inputs.gate is None else pooled[2],
    )
