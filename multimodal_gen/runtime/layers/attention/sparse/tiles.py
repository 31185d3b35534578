"""Token sequences in tiles: where video and text lie, and attention over block plans of them.

A denoiser's sequence holds the tokens of a latent grid in raster order, and in joint models text
(and whatever else the model adds) before or behind them. In a tiled sequence the video comes
first, tile by tile, then everything else, which here is called text. Tiles and pieces of text are
the blocks of a plan.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.call import PooledBlocks
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.tail import PooledTail, add_tail_of
from multimodal_gen.kernels.engine import AUTO, BLOCK_SPARSE, SelectedKernel, records_gradient
from multimodal_gen.kernels.select.api import cells_held, pool_tiles
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import (
    TileOrder,
    gather_tokens,
    scatter_tokens,
    tile_order,
)
from multimodal_gen.runtime.layers.attention.backends.engine import DENSE_BLOCK, dense_plan
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import LISTENER, record_plan
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext

_Share = TypeVar("_Share", float, torch.Tensor)

# Copies of q, k, v and the output are made for a share of the heads at a time, and of two such
# shares at once. Launches of less than so many bytes would cost more than they save; where the
# copies of all heads take so many at most, two shares keep the GPU busier than the host.
_SHARE_AT_ONCE = 0.05
_BYTES_AT_ONCE = 64 << 20
_NUMBERS_AT_ONCE = 2**25  # that are held at a time for some of the heads: 128 MiB in fp32
_BYTES_IN_TWO = 512 << 20

_DENSE_BLOCK_OF_OTHERS = 128  # tokens of a block where another engine attends to everything


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Where the tokens of a latent grid lie in a sequence.

    Attributes:
        grid: (T, H, W) of the video tokens.
        start: position of the first video token, on both sides.
        num_queries: Sq, text included.
        num_keys: Sk, text included; at most Sq, when a model drops padded text from the keys.
    """

    grid: Window
    start: int
    num_queries: int
    num_keys: int

    @property
    def num_video(self) -> int:
        """Number of video tokens."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def video(self) -> slice:
        """Where the video lies, on both sides."""
        return slice(self.start, self.start + self.num_video)

    @property
    def text(self) -> tuple[slice, ...]:
        """Where the other queries lie."""
        spans = (slice(0, self.start), slice(self.start + self.num_video, self.num_queries))
        return tuple(span for span in spans if span.start < span.stop)

    def density(self, of_video: _Share) -> _Share:
        """Return the share of all pairs attended to, from that of pairs of the video.

        Text attends to everything and is attended to by everything.
        """
        share = self.num_video**2 / (self.num_queries * self.num_keys)
        return of_video if share == 1 else of_video * share + (1 - share)


ENGINE = frozenset((AUTO, *BLOCK_SPARSE.names))
"""Kernels of the block-sparse engine, of which a call names one where no package computes it."""


# Not frozen, which would double the time of making it, in every call; nothing changes it.
@dataclass(slots=True, kw_only=True, eq=False)
class SparseCall:
    """One call of a sparse method.

    Attributes:
        query: [B, Sq, H, D] in the order of the sequence.
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        layout: where the video lies.
        scale: factor of the scores.
        kernel: what computes it.
        mask: bool [B, Sk], keys that may be attended to; None for all.
        gate: weight of a coarse branch, as `query`; None where there is none.
        first_head: index of the first of `query`'s heads among those of the layer.
        projection: the layer's trained projection, for methods that have one; None for zero.
        tail: whether blocks of video that a query does not keep count by their means.
        first_order: whether values then follow keys inside of blocks.
        pooled: the means of the tiles' keys and values, where they are known already.
        skip: what leaves out products that cannot count for much; None leaves nothing out.
        computed: which of the video's queries are computed; None for all.
        engine: what attends to blocks in place of the block-sparse engine, see `SparseEngine`.
        key_mean: about what the keys of every head have in common, fp32 [B, Hkv, D]; None where
            that is not known.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: SequenceLayout
    scale: float
    kernel: SelectedKernel = field(default_factory=lambda: SelectedKernel(AUTO))
    mask: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    first_head: int = 0
    projection: nn.Linear | None = None
    tail: bool = False
    first_order: bool = False
    pooled: PooledBlocks | None = None
    skip: Skip | None = None
    computed: "ComputedQueries | None" = None
    engine: Callable[..., Any] | None = None
    key_mean: torch.Tensor | None = None

    @property
    def on_package(self) -> bool:
        """Whether a package computes it, and no kernel of the engine."""
        return self.kernel.name not in ENGINE

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of as many tokens: the video lies at the same positions on both."""
        query, num_keys = self.query, self.key.shape[1]
        return query if query.shape[1] == num_keys else query[:, :num_keys], self.key

    def attend(
        self,
        plan: BlockPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tail: PooledTail | None = None,
        mean: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention by a plan, of tensors in its order, as the call wants it.

        `mean` is about what the keys have in common, fp32 [B, Hkv, D], for engines that ask.
        """
        how: dict[str, Any] = {"scale": self.scale, "kernel": self.kernel}
        if self.engine is None:
            out = block_sparse_attention(query, key, value, plan, tail=tail, skip=self.skip, **how)
        elif tail is None:
            out = self.engine(query, key, value, plan, mean=mean)
        else:
            qkv = query, key, value
            out, lse = self.engine(*qkv, plan, mean=mean, return_lse=True)
            out, _ = add_tail_of(tail, out, lse, qkv, plan, **how)
        assert isinstance(out, torch.Tensor), "no log-sum-exp was asked for"
        return out

    def tail_of(self, num_blocks: int, heads: slice) -> PooledTail | None:
        """Return the tail over the first so many blocks of some key heads, where there is one."""
        if not self.tail:
            return None
        pooled = self.pooled
        if pooled is not None and heads != slice(None):
            pooled = pooled.heads(heads)
        return PooledTail(num_blocks=num_blocks, first_order=self.first_order, pooled=pooled)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledSequence:
    """One side of the attention in tiles; shared between callers, not to be written to.

    Attributes:
        order: the order of the video tokens.
        index: int32 [S], position in the tiled sequence -> position in the sequence.
        blocks: the tiles, then the pieces of text.
        num_tiles: how many blocks are tiles.
        in_order: whether tokens lie in the order of the sequence.
        rest: the tokens of the sequence that are left out.
    """

    order: TileOrder
    index: torch.Tensor
    blocks: Blocks
    num_tiles: int
    in_order: bool
    rest: tuple[slice, ...] = ()

    @property
    def moved(self) -> torch.Tensor | None:
        """The index, or None where every token is at its position in the sequence."""
        in_place = self.in_order and (not self.rest or self.rest[0].start > 0)
        return None if in_place else self.index

    @property
    def num_text_blocks(self) -> int:
        """How many blocks are pieces of text."""
        return self.blocks.num - self.num_tiles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedQueries:
    """Which of the video's queries are computed; the others take the output of one that is.

    Attributes:
        index: int32 [B, H, V], position in the tiled video, where those of a tile that are computed
            come first -> position in the sequence.
        source: int32 [B, H, V], position in the tiled video as it is -> that in `index` whose
            output is taken.
        counts: int32 [B|1, N], how many of a tile are computed.
        compared: int32 [B|1, N], how many of these have a say in what the tile keeps: the first
            ones, without those whose keys are masked.
    """

    index: torch.Tensor
    source: torch.Tensor
    counts: torch.Tensor
    compared: torch.Tensor

    def heads(self, heads: slice) -> "ComputedQueries":
        """Return those of some query heads."""
        return replace(self, index=self.index[:, heads], source=self.source[:, heads])

    def blocks(self, order: TileOrder) -> Blocks:
        """Return the computed queries of every tile, in the order of `index`."""
        total, size = order.num_tokens, order.largest
        starts = order.starts.view(1, 1, -1)
        return Blocks.ragged(starts, self.counts.unsqueeze(1), total=total, size=size)

    def means(self, query: torch.Tensor, order: TileOrder) -> torch.Tensor:
        """Return the mean of every tile's computed and compared queries, [B, H, N, D]."""
        (moved,) = gather_tokens((query,), self.index)
        tile, place = order.places()
        inside = (place < self.compared[:, tile]).expand(len(query), -1)
        return pool_tiles((moved,), order.as_tiles(), mask=inside)[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The tokens of one rank in tiles; shared between callers, not to be written to.

    Attributes:
        keys: the video tokens tile by tile, then text; its index counts from the first token.
        queries: blocks of the video tokens alone; None where there are none.
        num_video: how many tokens are of the video; the first ones of `keys`.
        tiles: int64 [n], the tiles that have tokens here, in increasing order.
        starts: int32 [n], where their tokens start in `keys`.
        lengths: int32 [n], how many there are.
        block_of: int32 [N], the block that holds tokens of a tile, -1 for none.
    """

    keys: TiledSequence
    queries: Blocks | None
    num_video: int
    tiles: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    block_of: torch.Tensor

    @property
    def held(self) -> Tiles:
        """The tokens of its tiles, in the order of the shard."""
        return Tiles(self.starts, self.lengths, self.keys.order.largest, self.keys.index)


def layout_of(
    num_queries: int, num_keys: int, context: ForwardContext | None, backend: str
) -> SequenceLayout:
    """Find the video in the sequences of a self-attention layer.

    Args:
        num_queries: Sq.
        num_keys: Sk.
        context: the running denoiser call.
        backend: who asks, for messages.

    Raises:
        UsageError: the latent grid is unknown, the sequences do not hold it, or text lies inside.
    """
    if context is None or context.latent_grid is None:
        raise UsageError(
            f"{backend} must know the latent grid of the video, got none; run the model through "
            f"multimodal_gen.apply, or the layer inside `with set_forward_context(step, "
            f"latent_grid=(T, H, W)):`"
        )
    grid, span = context.latent_grid, context.text_span
    alone = num_queries == num_keys == math.prod(grid)  # as in blocks over the video's tokens
    text_first = span is not None and span.start == 0 and not alone
    layout = SequenceLayout(
        grid=grid,
        start=span.stop if span is not None and text_first else 0,
        num_queries=num_queries,
        num_keys=num_keys,
    )
    if span is not None and span.length and 0 < span.start < layout.num_video:
        raise UsageError(
            f"{backend} must have text in front of the video or behind it, got text_span from "
            f"{span.start} to {span.stop} among the {layout.num_video} tokens of the latent grid "
            f"{grid}; put the text first or last, or run such layers on a dense backend"
        )
    least = layout.start + layout.num_video
    if min(layout.num_queries, layout.num_keys) < least:
        raise UsageError(
            f"{backend} must get sequences that hold the latent grid {grid} behind {layout.start} "
            f"text tokens, {least} tokens at least, got {layout.num_queries} queries and "
            f"{layout.num_keys} keys; run such layers on a dense backend"
        )
    return layout


def fit_tile(tile: Sequence[int], grid: Window) -> Window:
    """Return the same cut with tiles no larger than the grid: kernels make room for whole tiles."""
    return (min(tile[0], grid[0]), min(tile[1], grid[1]), min(tile[2], grid[2]))


def tiled_sequence(
    layout: SequenceLayout,
    num_tokens: int,
    tile: Window,
    device: torch.device,
    *,
    one_rest: bool = False,
) -> TiledSequence:
    """Return one side of a layout in tiles; cached.

    Args:
        layout: where the video lies.
        num_tokens: `layout.num_queries` or `layout.num_keys`.
        tile: tokens per tile along (time, height, width).
        device: where the tensors lie.
        one_rest: whether what is not of the video is one block.
    """
    return shard_of(layout.grid, layout.start, 0, num_tokens, tile, device, 1, one_rest).keys


def in_one_row(layout: SequenceLayout) -> SequenceLayout:
    """Return a layout whose tiles of (1, 1, size) are blocks in the order of the sequence."""
    return replace(layout, grid=(1, 1, layout.num_video))


def in_tiles(
    layout: SequenceLayout, tile_size: Sequence[int], device: torch.device
) -> tuple[TiledSequence, TiledSequence]:
    """Return the queries of the video, and all keys, in tiles; both are cached.

    Args:
        layout: where the video lies.
        tile_size: tokens per tile along (time, height, width), which the grid may be smaller than.
        device: where the tensors lie.
    """
    tile = fit_tile(tile_size, layout.grid)
    keys = tiled_sequence(layout, layout.num_keys, tile, device)
    return tiled_video(layout, tile, device), keys


@static_cache(maxsize=64)
def tiled_video(layout: SequenceLayout, tile: Window, device: torch.device) -> TiledSequence:
    """Return the queries of the video in tiles, without text; the last 64 are cached.

    Text attends to everything, which `attend_tiled` does apart: in a plan, its long rows would
    keep the GPU waiting.
    """
    first = layout.start
    alone = tiled_sequence(replace(layout, start=0), layout.num_video, tile, device)
    index = alone.index + first if first else alone.index
    return replace(alone, index=index, rest=layout.text)


@static_cache(maxsize=256)
def shard_of(
    grid: Window,
    video_start: int,
    first: int,
    stop: int,
    tile: Window,
    device: torch.device,
    cells: int,
    one_rest: bool,
) -> Shard:
    """Return the tokens [first, stop) of a sequence whose video starts at `video_start`; cached.

    Equal arguments give one object, and none has a default: a cache takes what is left out for
    something else.

    Args:
        grid: (T, H, W) of the video.
        video_start: place of its first token in the sequence.
        first: the first token.
        stop: the place behind the last one.
        tile: tokens per tile along (time, height, width).
        device: where the tensors lie.
        cells: pieces of every tile, which then are the tiles; see `pool_cells`.
        one_rest: whether what is not of the video is one block.
    """
    order, total = _in_cells(tile_order(grid, tile, "cpu"), cells), stop - first
    size = order.largest
    with torch.device("cpu"):
        index, counts = _video_first(order, video_start - first, total)
        in_order = bool((index == torch.arange(total)).all())
        tiles = counts.nonzero().flatten()
        block_of = torch.full_like(counts, -1).index_copy_(0, tiles, torch.arange(len(tiles)))
        lengths, num_video = counts[tiles], int(counts.sum())
        if one_rest:
            size = max(size, total - num_video)
        pieces = torch.arange(num_video, total, size)
        rest = (total - pieces).clamp_max(size)
        starts, sizes = torch.cat((lengths.cumsum(0) - lengths, pieces)), torch.cat((lengths, rest))
        is_whole_video = total == num_video == order.num_tokens
        uniform = bool(((lengths[:-1] if is_whole_video else lengths) == size).all())
        tiles = tiles.to(device)
        moved = [x.to(device, torch.int32) for x in (index, starts, sizes, block_of)]
    index, starts, sizes, block_of = moved
    keys = TiledSequence(
        order=_in_cells(tile_order(grid, tile, device), cells),
        index=index,
        blocks=blocks_without_gaps(starts, sizes, total, size, uniform=uniform),
        num_tiles=len(tiles),
        in_order=in_order,
    )
    starts, lengths, queries = starts[: len(tiles)], sizes[: len(tiles)], None
    if num_video:
        queries = blocks_without_gaps(starts, lengths, num_video, order.largest, uniform=uniform)
    return Shard(
        keys=keys,
        queries=queries,
        num_video=num_video,
        tiles=tiles,
        starts=starts,
        lengths=lengths,
        block_of=block_of,
    )


def _video_first(
    order: TileOrder, video_start: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `total` tokens, those of the video tile by tile first, and how many each tile has."""
    here = order.order + video_start
    inside = (here >= 0) & (here < total)
    video = here[inside]
    tile_of = torch.repeat_interleave(torch.arange(len(order.starts)), order.lengths)
    is_text = torch.ones(total, dtype=torch.bool).index_fill_(0, video.long(), False)
    index = torch.cat((video, is_text.nonzero().flatten()))
    return index, torch.bincount(tile_of[inside], minlength=len(order.starts))


def _in_cells(order: TileOrder, cells: int) -> TileOrder:
    """Return the same order in pieces of tiles, of which some may be empty."""
    if cells == 1:
        return order
    starts, lengths, largest, _ = order.as_tiles().cells(cells)
    return replace(order, starts=starts, lengths=lengths, largest=largest, uniform=False)


def blocks_without_gaps(
    starts: torch.Tensor, lengths: torch.Tensor, total: int, size: int, *, uniform: bool
) -> Blocks:
    """Return blocks without gaps, of which all but the last are of one size where `uniform`."""
    if uniform:
        return Blocks.regular(total, size)
    return Blocks.ragged(starts, lengths, total=total, size=size)


def tile_means(
    call: SparseCall, queries: TiledSequence
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the means of every tile's queries and keys; for methods that attend themselves.

    Returns:
        [B, H, N, D], [B, Hkv, N, D], and bool [B, N], the tiles of which not everything is masked;
        None for all.
    """
    query, key = pool_video(call.sides, queries, mask=call.mask)
    return query, key, None if call.mask is None else kept_tokens(queries, call.mask) > 0


def pool_video(
    tensors: tuple[torch.Tensor, ...], video: TiledSequence, *, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the mean of every tile's tokens, [B, H, N, D]; see `pool_tiles`.

    Args:
        tensors: [B, S, H, D] in the order of the sequence, alike but for H.
        video: the tiles.
        mask: bool [B, S], tokens that count; None for all.
    """
    return pool_tiles(tensors, video.order.as_tiles(video.moved), mask=mask)


@static_cache(maxsize=64)
def static_cells_held(order: TileOrder, cells: int) -> torch.Tensor:
    """Return which cells of tiles hold tokens, bool [1, N * cells]; the last 64 are cached."""
    return cells_held(order.as_tiles(), cells)


def kept_tokens(video: TiledSequence, mask: torch.Tensor | None) -> torch.Tensor:
    """Return how many tokens of every tile count, [B|1, N]; see `count_kept`."""
    return count_kept(mask, video.order.as_tiles(video.moved))


def count_kept(
    mask: torch.Tensor | None, tiles: Tiles, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return how many tokens of tiles `mask`, bool [B, S], leaves, as [B|1, N] of `dtype`.

    Without one, the lengths.
    """
    if mask is None:
        return tiles.lengths.unsqueeze(0)
    (share,) = pool_tiles((mask[..., None, None].to(dtype),), tiles)
    return (share[:, 0, :, 0] * tiles.lengths).round()


def pooled_video(call: SparseCall, video: TiledSequence) -> PooledBlocks:
    """Return the means of every tile's keys and values, and how many of its keys are not masked."""
    keys, values = pool_video((call.key, call.value), video, mask=call.mask)
    counts = kept_tokens(video, call.mask).int().unsqueeze(1)
    return PooledBlocks(keys=keys, values=values, counts=counts)


def with_text(tiles: torch.Tensor, keys: TiledSequence) -> torch.Tensor:
    """Return lists of tiles, int32 [B|1, H|1, N, K], with the blocks of text behind them."""
    text = torch.arange(keys.num_tiles, keys.blocks.num, dtype=torch.int32, device=tiles.device)
    return torch.cat((tiles, text.expand(*tiles.shape[:-1], -1)), dim=-1)


def lists_as_map(lists: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return lists of blocks, [B, H, N, K], as bool [B, H, N, num_blocks]."""
    kept = torch.zeros((*lists.shape[:3], num_blocks), dtype=torch.bool, device=lists.device)
    return kept.scatter_(-1, lists.long(), True)


def plan_of_tiles(indices: torch.Tensor, queries: TiledSequence, keys: TiledSequence) -> BlockPlan:
    """Return the plan of lists of equal length.

    Args:
        indices: int32 [B|1, H|1, N, K], the blocks of `keys` that every tile of `queries` keeps,
            increasing along every row.
        queries: the queries in tiles.
        keys: the keys in tiles.
    """
    return uniform_plan(indices, queries.blocks, keys.blocks)


def uniform_plan(indices: torch.Tensor, queries: Blocks, keys: Blocks) -> BlockPlan:
    """Return the plan of lists of equal length, int32 [B|1, H|1, R, K], over these blocks."""
    counts = _alike(indices.shape[3], indices.device).expand(indices.shape[:3])
    return BlockPlan(indices=indices, counts=counts, q=queries, kv=keys, uniform=True)


@static_cache(maxsize=256)
def _alike(count: int, device: torch.device) -> torch.Tensor:
    """Return the counts of lists of equal length, int32 [1, 1, 1]; not to be written to."""
    return torch.full((1, 1, 1), count, dtype=torch.int32, device=device)


def kept_first(
    index: torch.Tensor, blocks: Blocks, mask: torch.Tensor
) -> tuple[torch.Tensor, Blocks]:
    """Move the kept keys of every block to its front; does not wait for the device.

    Args:
        index: int32 [Sk], the order of the keys in which `blocks` cuts them without gaps.
        blocks: the blocks, in this order.
        mask: bool [B, Sk], in the order of the sequence.

    Returns:
        The index [B, Sk] of such keys, and the blocks without the others.
    """
    starts, lengths = (bound[0, 0].long() for bound in blocks.bounds(mask.device))
    kept = mask[:, index.long()]
    # Number of kept tokens before each position, and before each block.
    before = F.pad(kept.cumsum(1), (1, 0))
    at_start = before[:, starts]
    counts = before[:, starts + lengths] - at_start
    block = torch.repeat_interleave(lengths, output_size=kept.shape[1])
    block = torch.zeros_like(block).scatter_(0, starts, 1).cumsum(0) - 1
    kept_before = before[:, :-1] - at_start[:, block]
    inside = torch.arange(kept.shape[1], device=mask.device) - starts[block]
    slot = torch.where(kept, kept_before, counts[:, block] + inside - kept_before) + starts[block]
    moved = torch.empty_like(slot, dtype=torch.int32)
    moved.scatter_(1, slot, index.expand_as(moved))
    ragged = Blocks.ragged(
        starts.int().view(1, 1, -1),
        counts.int().unsqueeze(1),
        total=blocks.total,
        size=blocks.size,
    )
    return moved, ragged


def attend_tiled(
    call: SparseCall,
    queries: TiledSequence,
    keys: TiledSequence,
    plan_of: Callable[[slice], BlockPlan],
) -> torch.Tensor:
    """Attend by a plan of tiles: into tile order, block-sparse attention, and back.

    Works on a share of the heads at a time, which bounds the memory of the copies, unless gradients
    are recorded: they need the copies later.

    Args:
        call: the call.
        queries: the queries in tiles; those left out attend to every key.
        keys: the keys in tiles.
        plan_of: gives the plan of a range of query heads, over `queries.blocks` and
            `keys.blocks`; those it gives several times are `shared`.

    Returns:
        [B, Sq, H, D] in the order of the sequence. Queries that see no key are zero.
    """
    query, key, value, mask = call.query, call.key, call.value, call.mask
    kv_heads, group = key.shape[2], query.shape[2] // key.shape[2]
    index, masked = (
        (keys.index, None) if mask is None else kept_first(keys.index, keys.blocks, mask)
    )
    if queries.in_order and keys.in_order and mask is None and call.computed is None:
        return _attend_in_order(call, queries, plan_of, keys.num_tiles)
    out = torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)
    same = queries.index is keys.index and mask is None and call.computed is None

    def attend(kv_slice: slice) -> None:
        q_slice = slice(kv_slice.start * group, kv_slice.stop * group)
        whole = kv_slice.stop - kv_slice.start == kv_heads  # and views take as long as a launch
        parts = (
            (query, key, value)
            if whole
            else (query[:, :, q_slice], key[:, :, kv_slice], value[:, :, kv_slice])
        )
        plan, rows, sources = _of_computed(call, queries, q_slice, plan_of(q_slice))
        if same:
            q, k, v = gather_tokens(parts, index)
        else:
            (q,) = gather_tokens(parts[:1], rows)
            k, v = gather_tokens(parts[1:], index)
        plan = plan if masked is None else replace(plan, kv=masked, shared=False)
        if LISTENER.get() is not None:
            sizes = call.layout.num_queries, call.layout.num_keys
            record_plan(q_slice, plan, sizes, queries=rows, keys=index, idle=sources is not None)
        mean = None if call.key_mean is None else call.key_mean[:, kv_slice]
        tiled = call.attend(plan, q, k, v, call.tail_of(keys.num_tiles, kv_slice), mean)
        if sources is not None:
            (tiled,) = gather_tokens((tiled,), sources)
        scatter_tokens(tiled, queries.index, out if whole else out[:, :, q_slice])

    def attend_to_all(span: slice) -> None:
        out[:, span] = attend_rows(call, query[:, span])

    calls = [*(partial(attend_to_all, span) for span in queries.rest)]
    recorded = records_gradient(query, key, value)
    shares = [slice(0, kv_heads)] if recorded else head_slices(query, out, kv_heads)
    calls += [partial(attend, part) for part in shares]
    run_on_two_streams(calls, query.device, recorded=recorded)
    return out


def _of_computed(
    call: SparseCall, queries: TiledSequence, heads: slice, plan: BlockPlan
) -> tuple[BlockPlan, torch.Tensor, torch.Tensor | None]:
    """Return a plan of computed queries, their index, and whose output each one takes."""
    if call.computed is None:
        return plan, queries.index, None
    computed = call.computed.heads(heads)
    return replace(plan, q=computed.blocks(queries.order)), computed.index, computed.source


def _attend_in_order(
    call: SparseCall,
    queries: TiledSequence,
    plan_of: Callable[[slice], BlockPlan],
    num_tiles: int,
) -> torch.Tensor:
    """Attend where tiles lie one after the other: nothing has to be moved."""
    query, key, value = call.query, call.key, call.value
    heads = slice(0, query.shape[2])
    plan = plan_of(heads)
    record_plan(heads, plan, (query.shape[1], key.shape[1]))
    video, tail = query[:, : call.layout.num_video], call.tail_of(num_tiles, slice(None))
    found = call.attend(plan, video, key, value, tail, call.key_mean)
    rest = [attend_rows(call, query[:, span]) for span in queries.rest]
    return torch.cat((found, *rest), dim=1) if rest else found


def attend_rows(call: SparseCall, rows: torch.Tensor) -> torch.Tensor:
    """Return attention of a few queries to all keys of a call."""
    q, k, v = (x.transpose(1, 2) for x in (rows, call.key, call.value))
    mask = None if call.mask is None else call.mask[:, None, None, :]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=call.scale, enable_gqa=grouped)
    if mask is not None:
        out = torch.where(mask.any(-1, keepdim=True), out, 0.0)
    return out.transpose(1, 2)


def attend_text(call: SparseCall, out: torch.Tensor) -> None:
    """Write to `out`, [B, Sq, H, D], the attention of the text: every query to every key."""
    for span in call.layout.text:
        out[:, span] = attend_rows(call, call.query[:, span])


def attend_densely(call: SparseCall) -> torch.Tensor:
    """Return dense attention, [B, Sq, H, D]; by the engine over blocks where no key is masked."""
    query, key, value = call.query, call.key, call.value
    if call.mask is not None:
        return attend_rows(call, query)
    size = DENSE_BLOCK if call.engine is None else _DENSE_BLOCK_OF_OTHERS
    plan = dense_plan(query.shape[1], key.shape[1], size, size, False, query.device)
    return call.attend(plan, query, key, value)


def by_heads(num_heads: int, each: int, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Return what is computed for all heads, [B, H, ...], a few at a time.

    Args:
        num_heads: H.
        each: numbers that are held for each.
        compute: gives the result of a range of heads.
    """
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, each))
    starts = range(0, num_heads, at_once)
    parts = [compute(slice(first, min(first + at_once, num_heads))) for first in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def head_slices(
    query: torch.Tensor, out: torch.Tensor, kv_heads: int, share: float = _SHARE_AT_ONCE
) -> list[slice]:
    """Return the key heads in shares whose copies of q, k, v and the output stay small.

    Args:
        query: [B, Sq, H, D].
        out: likewise.
        kv_heads: Hkv.
        share: of the heads, that work needs at least where launches take the host long.
    """
    copies = 2 * (query.numel() + out.numel()) * query.element_size() // kv_heads
    at_once = max(int(kv_heads * share), -(-_BYTES_AT_ONCE // copies), 1)
    if kv_heads * copies <= _BYTES_IN_TWO:
        at_once = max(at_once, -(-kv_heads // 2))
    return [slice(h, min(h + at_once, kv_heads)) for h in range(0, kv_heads, at_once)]


def run_on_two_streams(
    calls: Sequence[Callable[[], None]], device: torch.device, *, recorded: bool = False
) -> None:
    """Run independent calls; on a GPU on two streams, one's copies during the other's products.

    Where gradients are recorded, on the current one: the backward pass would free what the other
    stream still reads.
    """
    if device.type != "cuda" or len(calls) < 2 or recorded:
        for call in calls:
            call()
        return
    current = torch.cuda.current_stream(device)
    streams = _streams(device)
    for stream in streams:
        stream.wait_stream(current)
    try:
        for i, call in enumerate(calls):
            with torch.cuda.stream(streams[i % len(streams)]):
                call()
    finally:  # also where a call fails while another still writes
        for stream in streams:
            current.wait_stream(stream)


def record_on_current_stream(*tensors: torch.Tensor) -> None:
    """Keep what `run_on_two_streams` made until the current stream is done with it."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@lru_cache(maxsize=16)
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return two streams of a device; cached, because memory belongs to the stream it was for."""
    first, second = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, second
