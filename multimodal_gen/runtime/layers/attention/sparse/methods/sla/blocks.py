"""Blocks of raster order, which of them attend exactly, and the linear branch over the others.

Every key that a joint model adds to the video is called text here. Text blocks are numbered after
the video's, so that a selection can always keep them. A query block attends to the key blocks whose
means match its own best.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass

import torch
from torch import nn

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.api import (
    KeyState,
    Projection,
    add_linear,
    add_unselected,
    key_means,
    key_state,
)
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_pool.api import pool_tiles, select_tiles
from multimodal_gen.runtime.layers.attention.config import first_of
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce

__all__ = [
    "LinearBranch",
    "RasterBlocks",
    "block_map",
    "centred",
    "kept_blocks",
    "notice_no_projection",
    "projection_of",
    "raster_blocks",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RasterBlocks:
    """The blocks of one layout; shared between callers, not to be written to.

    Attributes:
        queries: blocks of video queries; text queries lie in none.
        keys: blocks of video keys, then of text keys.
        num_video: how many blocks of keys are the video's.
        starts: int32 [Nq], as `queries` has them, whatever its form.
        lengths: int32 [Nq].
        order: int32 [Sk], the keys block by block.
        ordered: the blocks of keys in this order.
    """

    queries: Blocks
    keys: Blocks
    num_video: int
    starts: torch.Tensor
    lengths: torch.Tensor
    order: torch.Tensor
    ordered: Blocks

    @property
    def num_text(self) -> int:
        """How many blocks of keys are text."""
        return self.keys.num - self.num_video


@static_cache(maxsize=64)
def raster_blocks(
    layout: SequenceLayout, q_size: int, kv_size: int, device: torch.device
) -> RasterBlocks:
    """Return the blocks of a layout; the last 64 are cached.

    Args:
        layout: where the video lies.
        q_size: queries per block.
        kv_size: keys per block.
        device: where the tensors lie.
    """
    video, length = layout.video, layout.num_video
    text = [slice(0, video.start), slice(video.stop, layout.num_keys)]
    with torch.inference_mode(False), torch.device("cpu"):
        q_bounds = _cut([video], q_size)
        kv_bounds = _cut([video, *text], kv_size)
        ends = kv_bounds[1].cumsum(0)
        spans = [torch.arange(span.start, span.stop) for span in (video, *text)]
        # Ready on the CPU: a copy is waited for, so that any stream may read what is cached.
        starts, lengths, kv_starts, kv_lengths, ordered_starts, order = (
            x.int().to(device)
            for x in (*q_bounds, *kv_bounds, ends - kv_bounds[1], torch.cat(spans))
        )
    queries = Blocks.regular(layout.num_queries, q_size)
    if layout.num_queries > length:
        queries = Blocks.ragged(starts, lengths, total=layout.num_queries, size=q_size)
    keys = Blocks.regular(layout.num_keys, kv_size)
    if video.start or (video.stop < layout.num_keys and length % kv_size):
        keys = Blocks.ragged(kv_starts, kv_lengths, total=layout.num_keys, size=kv_size)
    return RasterBlocks(
        queries=queries,
        keys=keys,
        num_video=-(-length // kv_size),
        starts=starts,
        lengths=lengths,
        order=order,
        ordered=Blocks.ragged(ordered_starts, kv_lengths, total=layout.num_keys, size=kv_size),
    )


def _cut(spans: list[slice], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and lengths of blocks of `size`; the last of each span may be short."""
    starts = [start for span in spans for start in range(span.start, span.stop, size)]
    ends = [
        min(start + size, span.stop)
        for span in spans
        for start in range(span.start, span.stop, size)
    ]
    begin = torch.tensor(starts)
    return begin, torch.tensor(ends) - begin


def kept_blocks(topk_ratio: float, num_blocks: int) -> int:
    """Return how many of `num_blocks` key blocks a query block keeps: rounded down, at least 1."""
    return min(max(first_of(topk_ratio, num_blocks), 1), num_blocks)


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


def notice_no_projection(
    warnings: WarnOnce,
    backend: str,
    component: str | None,
    topk_ratio: float,
    kept: int,
    *,
    can_pool: bool,
) -> None:
    """Say once per component of a pipeline what the missing projection means.

    Args:
        warnings: of the pipeline.
        backend: the method.
        component: the component; None outside a pipeline.
        topk_ratio: share of the key blocks to keep.
        kept: how many they are.
        can_pool: whether the method has a parameter `tail`.
    """
    remedy = "; `tail: pooled` counts the other blocks by their means" if can_pool else ""
    blocks = "key block" if kept == 1 else f"{100 * topk_ratio:g} % of the key blocks"
    warnings.warn(
        f"{backend} of {component or 'a layer'} was given no trained proj_l: its linear branch is "
        f"zero, so every query attends to the best {blocks} alone and the rest is lost; without a "
        f"checkpoint that was fine-tuned for Sparse-Linear Attention expect visibly worse results"
        f"{remedy}"
    )


def projection_of(linear: nn.Linear, device: torch.device) -> Projection:
    """Return the weights of a projection, on `device`."""
    bias = None if linear.bias is None else linear.bias.to(device)
    return Projection(weight=linear.weight.to(device), bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearBranch:
    """The keys of one call as the linear branch sees them.

    Attributes:
        means: means of the key blocks, fp32 or fp64 [B, Hkv, Nk, D].
        feature_map: softmax, elu or relu.
        state: the state over all tokens; None where that is not what the branch needs.
        projection: what its result goes through; None where the branch is zero.
    """

    means: torch.Tensor
    feature_map: str
    state: KeyState | None
    projection: Projection | None

    @classmethod
    def of(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: Blocks,
        projection: Projection | None,
        *,
        feature_map: str,
        unselected: bool,
    ) -> "LinearBranch":
        """Look at keys and values, once: the means are needed in any case.

        Args:
            key: [B, Sk, Hkv, D].
            value: as `key`.
            keys: how they are cut.
            projection: what the result goes through; None for zero.
            feature_map: softmax, elu or relu.
            unselected: whether only tokens of blocks that are not selected count.
        """
        state = None
        if projection is None or unselected:
            means = key_means(key, keys)
        else:
            means, state = key_state(key, value, keys, feature_map=feature_map)
        return cls(
            means=means,
            feature_map=feature_map,
            state=state,
            projection=projection,
        )

    def add(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        rows: slice,
    ) -> torch.Tensor:
        """Return `out` plus the branch, for the queries in `rows`; may change `out`.

        Args:
            out: [B, Sq, H, D], the sparse branch.
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: as `key`.
            plan: the selected blocks.
            rows: the queries of the plan.
        """
        if self.projection is None:
            return out
        if self.state is not None:
            return add_linear(
                out, query, self.state, self.projection, rows=rows, feature_map=self.feature_map
            )
        return add_unselected(
            out, query, key, value, plan, self.projection, feature_map=self.feature_map
        )
