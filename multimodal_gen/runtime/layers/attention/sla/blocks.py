"""Token sequences in blocks of raster order: the video's, and behind them those of text.

Every other key that a joint model adds to the video is called text here. Text blocks are numbered
after the video's, so that a selection can always keep them.

Shapes: B batch, S tokens, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.runtime.layers.attention.backends.tiled import SequenceLayout

__all__ = ["RasterBlocks", "pack_keys", "raster_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RasterBlocks:
    """The blocks of one layout; shared between callers, not to be written to.

    Attributes:
        queries: blocks of video queries; text queries lie in none.
        keys: blocks of video keys, then of text keys.
        num_video: how many blocks of keys are the video's.
        starts: int32 [Nq], as `queries` has them, whatever its form.
        lengths: int32 [Nq].
        video: the queries of the video.
        rest: the queries of text.
        key_block: int64 [Sk], the block of every key.
    """

    queries: Blocks
    keys: Blocks
    num_video: int
    starts: torch.Tensor
    lengths: torch.Tensor
    video: slice
    rest: tuple[slice, ...]
    key_block: torch.Tensor

    @property
    def num_text(self) -> int:
        """How many blocks of keys are text."""
        return self.keys.num - self.num_video


@lru_cache(maxsize=64)
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
    first, last = layout.start, layout.start + layout.num_video
    video = [(first, last)]
    text = [(0, first), (last, layout.num_keys)]
    with torch.inference_mode(False), torch.device("cpu"):
        q_starts, q_lengths = _cut(video, q_size)
        kv_starts, kv_lengths = _cut([*video, *text], kv_size)
        order = kv_starts.argsort()
        key_block = torch.repeat_interleave(order, kv_lengths[order])
        # Ready on the CPU: a copy is waited for, so that any stream may read what is cached.
        starts, lengths, kv_starts, kv_lengths = (
            x.int().to(device) for x in (q_starts, q_lengths, kv_starts, kv_lengths)
        )
        key_block = key_block.to(device)
    queries = Blocks.regular(layout.num_queries, q_size)
    if layout.num_queries > layout.num_video:
        queries = Blocks.ragged(starts, lengths, total=layout.num_queries, size=q_size)
    keys = Blocks.regular(layout.num_keys, kv_size)
    if first or (last < layout.num_keys and layout.num_video % kv_size):
        keys = Blocks.ragged(kv_starts, kv_lengths, total=layout.num_keys, size=kv_size)
    spans = (slice(0, first), slice(last, layout.num_queries))
    return RasterBlocks(
        queries=queries,
        keys=keys,
        num_video=-(-layout.num_video // kv_size),
        starts=starts,
        lengths=lengths,
        video=slice(first, last),
        rest=tuple(span for span in spans if span.start < span.stop),
        key_block=key_block,
    )


def _cut(spans: list[tuple[int, int]], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut each span into blocks of `size`; the last of each may be short."""
    starts = [start for first, last in spans for start in range(first, last, size)]
    ends = [min(start + size, last) for first, last in spans for start in range(first, last, size)]
    begin = torch.tensor(starts)
    return begin, torch.tensor(ends) - begin


def pack_keys(blocks: RasterBlocks, keep: torch.Tensor) -> tuple[torch.Tensor, Blocks]:
    """Sort keys by block, those that are masked out behind the others of their block.

    Does not wait for the device.

    Args:
        blocks: the blocks.
        keep: bool [B, Sk], keys that may be attended to.

    Returns:
        int32 [B, Sk], the key at every position; and the blocks, without what is masked out.
    """
    index = (2 * blocks.key_block + ~keep).argsort(dim=-1, stable=True).int()
    kept = torch.zeros(keep.shape[0], blocks.keys.num, dtype=torch.int64, device=keep.device)
    kept.scatter_add_(1, blocks.key_block.expand_as(keep), keep.long())
    _, lengths = blocks.keys.bounds(keep.device)
    ends = lengths[0, 0].cumsum(0)
    packed = Blocks.ragged(
        (ends - lengths[0, 0]).int().view(1, 1, -1),
        kept.int().unsqueeze(1),
        total=blocks.keys.total,
        size=blocks.keys.size,
    )
    return index, packed
