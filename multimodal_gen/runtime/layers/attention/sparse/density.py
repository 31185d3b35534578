"""What share of its query-key pairs a sparse call keeps, for reports and warnings.

Shapes: B batch, H heads, N blocks; q/k suffix = query/key side.
"""

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import pairs_of_map
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout

__all__ = ["density_message", "density_of_map", "density_of_plan"]

_FAR = 0.1  # from what was asked for


def density_of_plan(plan: BlockPlan, layout: SequenceLayout) -> torch.Tensor:
    """Return the density of a plan over all keys whose rows are the blocks of the video, []."""
    of_video = plan.pairs(full=True).double().mean() / layout.num_video**2
    return layout.density(of_video - (layout.num_keys - layout.num_video) / layout.num_video)


def density_of_map(
    chosen: torch.Tensor,
    layout: SequenceLayout,
    order: TileOrder | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the density of a map of the video's blocks, [].

    Args:
        chosen: bool [B|1, H|1, Nq, Nk].
        layout: where the video lies.
        order: the blocks, where they are those of both sides; None for blocks of one size.
        kept: the blocks that every row keeps, [B|1, H|1, Nq], where they are counted already.
    """
    if order is None or order.uniform:
        total = (chosen if kept is None else kept).sum(dtype=torch.int64)
        return layout.density(total.double() / chosen.numel())
    return layout.density(pairs_of_map(chosen, order, kept) / layout.num_video**2)


def density_message(
    backend: str,
    component: str | None,
    layout: SequenceLayout,
    *,
    asked: float,
    kept: int,
    num_blocks: int,
) -> str | None:
    """Return what to warn of where a sequence is too short for the density asked for, or None.

    Args:
        backend: the method's name.
        component: of a pipeline; None for a layer outside one.
        layout: where the video lies.
        asked: the share of blocks to keep.
        kept: blocks that are kept.
        num_blocks: blocks of the video.
    """
    density = layout.density(kept / num_blocks)
    if density - asked < _FAR:
        return None
    reasons = []
    if kept / num_blocks - asked >= _FAR / 2:
        blocks = "1 block, which" if num_blocks == 1 else f"{num_blocks} blocks, of which {kept}"
        verb = "is" if kept == 1 else "are"
        reasons.append(f"the latent grid {layout.grid} has {blocks} {verb} kept")
    text = layout.num_keys - layout.num_video
    if text:
        reasons.append(f"{text} of {layout.num_keys} tokens are text, which is never left out")
    return (
        f"{backend} of {component or 'a layer'} attends to {density:.0%} of the pairs, not "
        f"to the {asked:.0%} that were asked for: {'; '.join(reasons)}"
    )
