"""Which key blocks every query block attends to: those whose means match its own best.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from fractions import Fraction

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.tile_pool.api import pool_tiles, select_tiles
from multimodal_gen.runtime.layers.attention.backends.tiled import SequenceLayout
from multimodal_gen.runtime.layers.attention.sla.blocks import RasterBlocks

__all__ = ["block_map", "centred", "density", "kept_blocks"]


def kept_blocks(topk_ratio: float, num_blocks: int) -> int:
    """Return how many of `num_blocks` key blocks a query block keeps: rounded down, at least 1."""
    # In decimals, as people write them: 0.29 * 100 is less than 29 in binary.
    return min(max(int(Fraction(repr(topk_ratio)) * num_blocks), 1), num_blocks)


def centred(means: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return block means less the mean of all tokens in them, rounded to `dtype`.

    That moves all scores of a query block alike, so it leaves their order as it is; but what the
    keys have in common would otherwise take up the precision that tells them apart.

    Args:
        means: fp32 or fp64 [B, H, N, D].
        lengths: tokens of every block, [B|1, N].
        dtype: dtype of the result.
    """
    tokens = lengths.to(means.dtype)[:, None, :, None]
    share = tokens / tokens.sum(2, keepdim=True).clamp_min(1)
    return (means - (means * share).sum(2, keepdim=True)).to(dtype)


def block_map(
    query: torch.Tensor, means: torch.Tensor, keys: Blocks, blocks: RasterBlocks, kept: int
) -> BlockPlan:
    """Return the plan in which query blocks keep their `kept` best video blocks, and all text.

    Args:
        query: [B, Sq, H, D].
        means: means of the key blocks, fp32 or fp64 [B, Hkv, Nk, D].
        keys: the key blocks, which may have become shorter than those of `blocks`.
        blocks: the blocks.
        kept: video blocks that a row keeps.
    """
    if kept == blocks.num_video:
        return BlockPlan.dense(blocks.queries, keys, query.device)
    size = blocks.queries.size
    (pooled,) = pool_tiles((query.detach(),), blocks.starts, blocks.lengths, size=size)
    _, lengths = keys.bounds(query.device)
    video = slice(0, blocks.num_video)
    pooled_keys = centred(means[:, :, video], lengths[:, 0, video], query.dtype)
    # A block whose keys are all masked has no mean, and attending to it would be for nothing.
    real = None if keys is blocks.keys else lengths[:, 0, video] > 0
    indices = select_tiles(pooled, pooled_keys, kept, always=blocks.num_text, real=real)
    counts = indices.new_full((1, 1, 1), indices.shape[3]).expand(indices.shape[:3])
    return BlockPlan(indices=indices, counts=counts, q=blocks.queries, kv=keys, uniform=True)


def density(kept: int, blocks: RasterBlocks, layout: SequenceLayout) -> float:
    """Return the share of pairs attended to exactly, taking every block for one of mean size."""
    video, queries, keys = layout.num_video, layout.num_queries, layout.num_keys
    pairs = video * (kept / blocks.num_video * video + keys - video) + (queries - video) * keys
    return pairs / (queries * keys)
