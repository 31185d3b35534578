"""Blocks of raster order that start wherever the video does: no token has to be moved for them.

Every key that a joint model adds to the video is called text here. Text blocks are numbered after
the video's, so that a selection can always keep them.

Shapes: S tokens, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import TileOrder, tile_order
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RasterBlocks:
    """The blocks of one layout; shared between callers, not to be written to.

    Attributes:
        queries: blocks of video queries; text queries lie in none.
        keys: blocks of video keys, then of text keys.
        num_video: how many blocks of keys are the video's.
        order: int32 [Sk], the keys block by block.
        ordered: the blocks of keys in this order.
        tiles: the blocks of queries, as tiles of a video that is one row.
        of_queries: the same, where they lie in the sequence.
        lengths: int32 [1, num_video], keys of the video's blocks.
    """

    queries: Blocks
    keys: Blocks
    num_video: int
    order: torch.Tensor
    ordered: Blocks
    tiles: TileOrder
    of_queries: Tiles
    lengths: torch.Tensor

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
    with torch.device("cpu"):
        q_bounds = _cut([video], q_size)
        kv_bounds = _cut([video, *text], kv_size)
        ends = kv_bounds[1].cumsum(0)
        spans = [torch.arange(span.start, span.stop) for span in (video, *text)]
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
    num_video = -(-length // kv_size)
    return RasterBlocks(
        queries=queries,
        keys=keys,
        num_video=num_video,
        order=order,
        ordered=Blocks.ragged(ordered_starts, kv_lengths, total=layout.num_keys, size=kv_size),
        tiles=tile_order((1, 1, length), (1, 1, min(q_size, length)), device),
        of_queries=Tiles(starts, lengths, q_size),
        lengths=kv_lengths[None, :num_video],
    )


@static_cache(maxsize=64)
def static_shares(blocks: RasterBlocks, dtype: torch.dtype) -> torch.Tensor:
    """Return `shares_of` the video's blocks of keys; the last 64 are cached."""
    return shares_of(blocks.lengths, dtype)


def shares_of(lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the share of all tokens that lies in each block, [B|1, 1, N, 1], of [B|1, N]."""
    tokens = lengths.to(dtype)[:, None, :, None]
    return tokens / tokens.sum(2, keepdim=True).clamp_min(1)


def _cut(spans: list[slice], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and lengths of blocks of `size`; the last of each span may be short."""
    bounds = [
        (start, min(start + size, span.stop))
        for span in spans
        for start in range(span.start, span.stop, size)
    ]
    starts, ends = torch.tensor(bounds).unbind(1)
    return starts, ends - starts
