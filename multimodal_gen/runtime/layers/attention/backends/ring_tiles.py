"""Tiles in a ring: every rank holds a chunk of the sequence, which may cut tiles.

Where a chunk cuts a tile, it holds a shorter block of it, and what its tokens attend to is the sum
of what they attend to in every chunk.

Shapes: B batch, S tokens of a chunk, H heads, D head size, N tiles of the grid, n tiles that have
tokens in a chunk.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.runtime.distributed.ring import RingCall
from multimodal_gen.runtime.layers.attention.backends.tiled import (
    SequenceLayout,
    TiledSequence,
    layout_of,
)
from multimodal_gen.runtime.layers.attention.ring_method import RingInputs
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "Chunk",
    "Reach",
    "chunks_of",
    "ring_layout",
    "text_chunk",
    "tiles_held",
    "whole_chunks",
    "whole_tiles_only",
]

_Grid = tuple[int, int, int]

# Rows and keys of a block where everything is attended to: what the engine is fastest with.
_DENSE_BLOCK = 384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The tokens of one rank in tiles; shared between callers, not to be written to.

    Attributes:
        keys: the video tokens tile by tile, then text; its index counts from the first token.
        queries: blocks of the video tokens alone; None where there are none.
        num_video: how many tokens are of the video; the first ones of `keys`.
        tiles: int64 [n], the tiles that have tokens here, in increasing order.
        starts: int32 [n], where their tokens start in `keys`.
        lengths: int32 [n], how many there are.
        block_of: int32 [N], the block that holds tokens of a tile, -1 for none.
        in_order: whether tokens lie in the order of the sequence.
    """

    keys: TiledSequence
    queries: Blocks | None
    num_video: int
    tiles: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    block_of: torch.Tensor
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """Which keys of other ranks the queries of each rank keep, where the grid alone tells.

    Attributes:
        rows: int64, rows of this rank's tiles that others need, those for the first rank first.
        leaving: how many of them are for each rank.
        coming: how many rows of each rank this one needs.
        plan: what this rank's queries keep of them; None for nothing.
    """

    rows: torch.Tensor
    leaving: tuple[int, ...]
    coming: tuple[int, ...]
    plan: BlockPlan | None


def ring_layout(inputs: RingInputs, context: ForwardContext | None, backend: str) -> SequenceLayout:
    """Find the video in a sequence that is split over a ring.

    Args:
        inputs: what this rank holds.
        context: the running denoiser call.
        backend: who asks, for messages.

    Raises:
        UsageError: the latent grid is unknown or does not fit, video tokens are on all ranks, or
            there are other keys than queries.
    """
    call = inputs.call
    total, shared = sum(call.lengths), call.prefix + call.suffix
    keys = 0 if inputs.shared_key is None else inputs.shared_key.shape[1]
    if call.num_queries not in (None, call.lengths[call.group.index]) or keys != shared:
        raise UsageError(
            f"{backend} must have a query for every key in a ring, got other numbers of them; use "
            f"--ring-degree 1, or run such layers on a dense backend"
        )
    layout = layout_of(total + shared, total + shared, context, backend)
    if layout.start < call.prefix or layout.start + layout.num_video > call.prefix + total:
        raise UsageError(
            f"{backend} must have the video among the {total} tokens that ranks share, behind "
            f"{call.prefix} that all hold, got a video that starts at {layout.start} and has "
            f"{layout.num_video} tokens; set text_span to where text is"
        )
    return layout


def chunks_of(
    layout: SequenceLayout, call: RingCall, tile: _Grid, device: torch.device
) -> tuple[Chunk | None, ...]:
    """Return what every rank of a ring holds; None for those without tokens.

    Args:
        layout: where the video lies in the sequence.
        call: how its tokens are split.
        tile: tokens per tile along (time, height, width).
        device: where the tensors lie.
    """
    stops = [call.prefix + sum(call.lengths[: i + 1]) for i in range(len(call.lengths))]
    return tuple(
        _chunk(layout.grid, layout.start, stop - length, stop, tile, device) if length else None
        for length, stop in zip(call.lengths, stops, strict=True)
    )


def whole_chunks(call: RingCall, device: torch.device) -> tuple[Chunk | None, ...]:
    """Return what every rank of a ring holds for methods that attend to everything just now."""
    return tuple(text_chunk(length, device) if length else None for length in call.lengths)


def text_chunk(length: int, device: torch.device, size: int = _DENSE_BLOCK) -> Chunk:
    """Return tokens without video, which everything attends to, in blocks of `size`."""
    return _chunk((1, 1, 1), length, 0, length, (1, 1, size), device)


@lru_cache(maxsize=256)
def _chunk(
    grid: _Grid, video_start: int, first: int, stop: int, tile: _Grid, device: torch.device
) -> Chunk:
    """Return the tokens [first, stop) of a sequence whose video starts at `video_start`."""
    order = tile_order(grid, tile, "cpu")
    # Made on the CPU: a copy is waited for, so that any stream may read what is cached.
    with torch.inference_mode(False), torch.device("cpu"):
        here = order.order + (video_start - first)  # counted from the chunk's first token
        inside = (here >= 0) & (here < stop - first)
        video = here[inside]
        tile_of = torch.repeat_interleave(torch.arange(len(order.starts)), order.lengths)
        counts = torch.bincount(tile_of[inside], minlength=len(order.starts))
        tiles = counts.nonzero().flatten()
        block_of = torch.full_like(counts, -1).index_copy_(0, tiles, torch.arange(len(tiles)))
        is_text = torch.ones(stop - first, dtype=torch.bool).index_fill_(0, video.long(), False)
        index = torch.cat((video, is_text.nonzero().flatten()))
        lengths = counts[tiles]
        starts = lengths.cumsum(0) - lengths
        pieces = torch.arange(len(video), stop - first, order.largest)
        rest = (stop - first - pieces).clamp_max(order.largest)
        bounds = [torch.cat(pair) for pair in ((starts, pieces), (lengths, rest))]
        moved = [x.to(device, torch.int32) for x in (index, *bounds, block_of)]
        in_order = bool((index == torch.arange(len(index))).all())
        present = tiles.to(device)
    uniform = bool((lengths == order.largest).all())
    keys = TiledSequence(
        order=tile_order(grid, tile, device),
        index=moved[0],
        blocks=_blocks(moved[1], moved[2], stop - first, order.largest, uniform=uniform),
        num_tiles=len(tiles),
    )
    starts, lengths = (bound[: len(tiles)] for bound in moved[1:3])
    queries = None
    if len(video):
        queries = _blocks(starts, lengths, len(video), order.largest, uniform=uniform)
    return Chunk(
        keys=keys,
        queries=queries,
        num_video=len(video),
        tiles=present,
        starts=starts,
        lengths=lengths,
        block_of=moved[3],
        in_order=in_order,
    )


def _blocks(
    starts: torch.Tensor, lengths: torch.Tensor, total: int, size: int, *, uniform: bool
) -> Blocks:
    """Return blocks without gaps, of which all but the last are of one size where `uniform`."""
    if uniform:
        return Blocks.regular(total, size)
    return Blocks.ragged(starts, lengths, total=total, size=size)


def tiles_held(indices: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what lists of tiles become where only a chunk's keys are at hand.

    Does not wait for the device.

    Args:
        indices: int32 [B|1, H|1, Nq, K], tiles of the grid, increasing along every row.
        chunk: the keys.

    Returns:
        indices int32 [B|1, H|1, Nq, K'] into the chunk's blocks, its text included, and counts
        int32 [B|1, H|1, Nq], which may be 0.
    """
    block = chunk.block_of[indices.long()]
    held = block >= 0
    num_tiles, text = chunk.keys.num_tiles, chunk.keys.num_text_blocks
    room = min(indices.shape[-1], num_tiles) + text
    # What is not here goes to one slot that is cut off again.
    slot = torch.where(held, held.cumsum(-1) - 1, room)
    lists = block.new_zeros((*block.shape[:-1], room + 1)).scatter_(-1, slot, block)
    counts = held.sum(-1, keepdim=True)
    if text:
        every = torch.arange(text, device=block.device)
        behind = counts + every
        lists.scatter_(-1, behind, (every + num_tiles).int().expand_as(behind))
    return lists[..., :room], (counts.squeeze(-1) + text).int()


def whole_tiles_only(kernel: str) -> str | None:
    """Return why a kernel that somebody asked for cannot serve chunks, or None."""
    return "kernel fa4 takes whole tiles only, and chunks cut them" if kernel == "fa4" else None
