"""Means of tiles that are cut by the chunks of a ring.

Shapes: B batch, S tokens of a chunk, H heads, D head size, N tiles of the grid, n tiles that have
tokens in a chunk.
"""

from collections.abc import Sequence

import torch

from multimodal_gen.kernels.tile_pool.api import pool_tiles
from multimodal_gen.runtime.distributed.collectives import all_gather_tokens
from multimodal_gen.runtime.distributed.ring import RingCall
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import Chunk

__all__ = ["pool_over_ring"]


def pool_over_ring(
    tensors: Sequence[torch.Tensor], chunks: Sequence[Chunk | None], call: RingCall
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the mean of every tile's tokens, the same numbers on every rank.

    Ranks exchange the means of what they hold, in fp32, and weigh them by how many tokens they are
    of. A tile that one rank holds is not changed by that. Does not wait for the device.

    Args:
        tensors: this rank's tokens, [B, S, H, D], alike but for H.
        chunks: the tokens of every rank.
        call: how they are split; masked tokens do not count.

    Returns:
        For every tensor [B, H, N, D], fp32 (fp64 for fp64), zero where no token counts; and how
        many tokens of every tile count, [B, N] in the same dtype.
    """
    (batch, _, _, size), like = tensors[0].shape, tensors[0]
    precise = torch.promote_types(like.dtype, torch.float32)
    held = [
        (chunk, _counts(chunk, call.keep_of(owner), precise))
        for owner, chunk in enumerate(chunks)
        if chunk is not None and chunk.num_video
    ]
    order = next(chunk.keys.order for chunk, _ in held)
    total = like.new_zeros((batch, len(order.starts)), dtype=precise)
    for chunk, counts in held:
        total.index_add_(1, chunk.tiles, counts.expand(batch, -1))

    columns = [x.shape[2] * size for x in tensors]
    sizes = [0 if c is None else batch * len(c.tiles) * sum(columns) for c in chunks]
    received = all_gather_tokens(_own(tensors, chunks, call, precise), sizes, call.group)
    blocks = [block for block in torch.split(received, sizes) if len(block)]
    means = like.new_zeros((len(order.starts), batch, sum(columns)), dtype=precise)
    for (chunk, counts), block in zip(held, blocks, strict=True):
        share = counts / total[:, chunk.tiles].clamp_min(1)
        parts = block.view(len(chunk.tiles), batch, -1) * share.mT.unsqueeze(-1)
        means.index_add_(0, chunk.tiles, parts)
    pooled = tuple(
        torch.unflatten(x, -1, (-1, size)).permute(1, 2, 0, 3).contiguous()
        for x in torch.split(means, columns, dim=-1)
    )
    return pooled, total


def _own(
    tensors: Sequence[torch.Tensor],
    chunks: Sequence[Chunk | None],
    call: RingCall,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the means of what this rank holds, as they travel: [n, B, H * D] of all, flat."""
    mine = chunks[call.group.index]
    if mine is None or not mine.num_video:
        return tensors[0].new_empty(0, dtype=dtype)
    means = pool_tiles(
        tuple(tensors),
        mine.starts,
        mine.lengths,
        size=mine.keys.order.largest,
        index=mine.keys.index,
        keep=call.keep_of(call.group.index),
        dtype=dtype,
    )
    return torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in means], dim=-1).flatten()


def _counts(chunk: Chunk, keep: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return how many tokens of a chunk's tiles count, [1 or B, n]."""
    if keep is None:
        return chunk.lengths.to(dtype).unsqueeze(0)
    (share,) = pool_tiles(
        (keep[..., None, None].to(dtype),),
        chunk.starts,
        chunk.lengths,
        size=chunk.keys.order.largest,
        index=chunk.keys.index,
    )
    return (share[:, 0, :, 0] * chunk.lengths).round()
