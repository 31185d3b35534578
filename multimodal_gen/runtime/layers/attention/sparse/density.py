"""What share of its query-key pairs a sparse call keeps, for reports.

Shapes: B batch, H heads, N blocks; q/k suffix = query/key side.
"""

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    TiledSequence,
    by_heads,
)


def density_of_lists(
    indices: torch.Tensor, queries: TiledSequence, keys: TiledSequence, layout: SequenceLayout
) -> torch.Tensor:
    """Return what `density_of_plan` does of `plan_of_tiles`, in fewer steps of the host."""
    batch, heads = indices.shape[:2]
    lengths, weights = _shares(queries.blocks, keys.blocks, layout, batch * heads, indices.device)
    pairs = torch.dot(lengths[indices].sum((0, 1, 3), dtype=torch.float64), weights)
    others = (layout.num_queries - layout.num_video) / layout.num_queries
    return pairs + others if others else pairs


@static_cache(maxsize=64)
def _shares(
    queries: Blocks, keys: Blocks, layout: SequenceLayout, times: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys of every block, fp32, and rows over all pairs of `times` heads; cached."""
    rows, lengths = (x.bounds(device)[1][0, 0] for x in (queries, keys))
    pairs = times * layout.num_queries * layout.num_keys
    return lengths.float(), rows.double() / pairs


def density_of_plan(
    plan: BlockPlan, layout: SequenceLayout, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the density of a plan whose lists are of one length, over the blocks of the video."""
    return density_of_pairs(plan.pairs(full=True).double().mean(), layout, mask)


def density_of_pairs(
    pairs: torch.Tensor, layout: SequenceLayout, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the density of a call whose text attends to everything, [].

    Args:
        pairs: how many pairs of queries of the video and keys are kept, fp64, the mean over batch
            and heads.
        layout: where the video lies.
        mask: bool [B, Sk], keys that may be attended to, to which the share is; None for all.
    """
    others = layout.num_queries - layout.num_video
    if mask is None:
        pairs = pairs + others * layout.num_keys if others else pairs
        return pairs / (layout.num_queries * layout.num_keys)
    keys = mask.sum(1).double().mean()
    return (pairs + others * keys) / (layout.num_queries * keys).clamp_min(1.0)


def density_of_map(
    chosen: torch.Tensor,
    layout: SequenceLayout,
    order: TileOrder | None = None,
    kept: torch.Tensor | None = None,
    *,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the density of a map of the video's blocks, [].

    Args:
        chosen: bool [B|1, H|1, Nq, Nk].
        layout: where the video lies.
        order: the blocks, where they are those of both sides; None for blocks of one size.
        kept: the blocks that every row keeps, [B|1, H|1, Nq], where they are counted already.
        rows: queries of every block that are computed, [B|1, Nq]; None for all.
    """
    if rows is not None:
        assert order is not None, "blocks of tiles"
        text = rows.sum(-1).double().mean() * (layout.num_keys - layout.num_video)
        return density_of_pairs(_pairs_of_map(chosen, order, kept, rows) + text, layout, None)
    if order is None or order.uniform:
        # Whole numbers below 2^53, which are exact.
        total = (chosen if kept is None else kept).sum(dtype=torch.float64)
        return layout.density(total / chosen.numel())
    return layout.density(_pairs_of_map(chosen, order, kept) / layout.num_video**2)


def _pairs_of_map(
    block_mask: torch.Tensor,
    order: TileOrder,
    counts: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return how many pairs of tokens a map of tiles keeps, the mean over batch and heads, [].

    Args:
        block_mask: bool [B|1, H|1, N, N].
        order: the tiles, of both sides.
        counts: how many tiles every row keeps, [B|1, H|1, N], where that is known.
        rows: queries of every tile that count, [B|1, N]; None for all.
    """
    lengths = order.lengths.to(block_mask.device, torch.float32)
    if order.tiles[:2] == (1, 1):  # in one row only the last one is cut
        missing = (order.largest - lengths[-1]) * block_mask[..., -1]
        kept = order.largest * (block_mask.sum(-1) if counts is None else counts) - missing
    else:
        # Sums of lengths are whole numbers below 2^24, which are exact in fp32.
        each, heads = block_mask[:, :1].numel(), block_mask.shape[1]
        kept = by_heads(heads, each, lambda some: block_mask[:, some].float() @ lengths)
    weights = (lengths.unsqueeze(0) if rows is None else rows).double().unsqueeze(1)
    return (kept.double() * weights).sum(-1).mean()
