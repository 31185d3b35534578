"""The coarse stage of Video Sparse Attention: means of tiles, and what is decided by them.

Shapes: B batch, S tokens, H heads, D head size, N tiles, n tiles that have tokens in a chunk of a
ring; q/k suffix = query/key side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.tile_pool.api import add_gated, pool_tiles, select_tiles
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.sparse.ring_pool import pool_over_ring
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import Chunk, PlanOf, tiles_held
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    TiledSequence,
    tiled_sequence,
    tiled_video,
)

__all__ = ["Coarse", "coarse_alone", "coarse_in_ring"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coarse:
    """The coarse stage of one call: the tiles, and the means of their queries and keys.

    In a ring every rank has the means of all tiles.

    Attributes:
        queries: the queries in tiles.
        keys: the keys in tiles.
        pooled_query: means of the tiles' queries, [B, H, N, D].
        pooled_key: means of the tiles' keys, [B, Hkv, N, D].
        real: bool [B, N], tiles of which not everything is masked; None for all.
        pooled_value: means of the tiles' values, [B, Hkv, N, D], where ranks exchanged them.
    """

    queries: TiledSequence
    keys: TiledSequence
    pooled_query: torch.Tensor
    pooled_key: torch.Tensor
    real: torch.Tensor | None = None
    pooled_value: torch.Tensor | None = None

    def plan(self, heads: slice, kept: int) -> BlockPlan:
        """Return what a range of query heads attends to: `kept` tiles and all text."""
        group = self.pooled_query.shape[1] // self.pooled_key.shape[1]
        query = self.pooled_query[:, heads]
        key = self.pooled_key[:, heads.start // group : heads.stop // group]
        q_blocks, kv_blocks = self.queries.blocks, self.keys.blocks
        text = self.keys.num_text_blocks
        indices = select_tiles(query, key, kept, always=text, real=self.real)
        counts = indices.new_full((1, 1, 1), indices.shape[3]).expand(indices.shape[:3])
        return BlockPlan(indices=indices, counts=counts, q=q_blocks, kv=kv_blocks, uniform=True)

    def plans_of(self, mine: Chunk | None, kept: int) -> PlanOf:
        """Return what gives the plans of a chunk's queries: `kept` tiles and all text.

        They are selected once, among all tiles; a plan has those of them that its keys hold.
        """
        if mine is None or mine.queries is None:
            return lambda _: None
        blocks, query = mine.queries, self.pooled_query[:, :, mine.tiles]
        selected = select_tiles(query, self.pooled_key, kept, real=self.real)

        def plan_of(theirs: Chunk) -> BlockPlan:
            indices, counts = tiles_held(selected, theirs)
            return BlockPlan(indices=indices, counts=counts, q=blocks, kv=theirs.keys.blocks)

        return plan_of

    def add(
        self, out: torch.Tensor, value: torch.Tensor, gate: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return `out` plus `gate` times attention among the tiles."""
        order, index = self.queries.order, self.queries.index
        starts, lengths, size = order.starts, order.lengths, order.largest
        (pooled,) = pool_tiles((value,), starts, lengths, size=size, index=index)
        coarse = self._attend(self.pooled_query, pooled, scale)
        return add_gated(out, gate, coarse, starts, lengths, size=size, index=index)

    def add_to(
        self, mine: Chunk | None, out: torch.Tensor, gate: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the `out` of a chunk, [B, S, H, D], plus `gate` times attention among tiles."""
        if mine is None or not mine.num_video:
            return out
        assert self.pooled_value is not None, "ranks exchanged them"
        coarse = self._attend(self.pooled_query[:, :, mine.tiles], self.pooled_value, scale)
        return add_gated(
            out,
            gate,
            coarse,
            mine.starts,
            mine.lengths,
            size=mine.keys.order.largest,
            index=mine.keys.index,
        )

    def _attend(self, query: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        grouped = query.shape[1] != value.shape[1]
        return F.scaled_dot_product_attention(
            query, self.pooled_key, value, scale=scale, enable_gqa=grouped
        )


def coarse_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    layout: SequenceLayout,
    tile: tuple[int, int, int],
    keep: torch.Tensor | None,
) -> Coarse:
    """Return the coarse stage where one process has all tokens.

    Args:
        query: [B, Sq, H, D] in the order of the sequence.
        key: [B, Sk, Hkv, D].
        layout: where the video lies.
        tile: tokens per tile along each axis.
        keep: bool [B, Sk], keys that may be attended to; None for all.
    """
    queries = tiled_video(layout, tile, query.device)
    keys = tiled_sequence(layout, layout.num_keys, tile, query.device)
    order = queries.order
    # The video lies at the same positions on both sides.
    pool = partial(
        pool_tiles,
        starts=order.starts,
        lengths=order.lengths,
        size=order.largest,
        index=queries.index,
    )
    real = None
    if keep is None:
        pooled = pool((query, key))
    else:
        pooled = pool((query[:, : key.shape[1]], key), keep=keep)
        (share,) = pool((keep[..., None, None].to(key.dtype),))
        real = share[:, 0, :, 0] > 0
    return Coarse(
        queries=queries, keys=keys, pooled_query=pooled[0], pooled_key=pooled[1], real=real
    )


def coarse_in_ring(
    inputs: RingInputs,
    layout: SequenceLayout,
    tile: tuple[int, int, int],
    chunks: Sequence[Chunk | None],
) -> Coarse:
    """Return the coarse stage where ranks hold chunks, which may cut tiles.

    Args:
        inputs: what this rank holds; values are pooled where there is a gate.
        layout: where the video lies.
        tile: tokens per tile along each axis.
        chunks: the tokens of every rank.
    """
    call, device = inputs.call, inputs.query.device
    own = slice(call.prefix, call.prefix + call.lengths[call.group.index])
    tensors = [inputs.query[:, own], inputs.key]
    if inputs.gate is not None:
        tensors.append(inputs.value)
    means, counts = pool_over_ring(tensors, chunks, call)
    pooled = [mean.to(inputs.query.dtype) for mean in means]
    return Coarse(
        queries=tiled_video(layout, tile, device),
        keys=tiled_sequence(layout, layout.num_keys, tile, device),
        pooled_query=pooled[0],
        pooled_key=pooled[1],
        real=None if call.keep is None else counts > 0,
        pooled_value=None if inputs.gate is None else pooled[2],
    )
