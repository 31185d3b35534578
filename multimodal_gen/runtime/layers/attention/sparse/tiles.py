"""Token sequences in tiles: where video and text lie, and attention over block plans of them.

A denoiser's sequence holds the tokens of a latent grid in raster order, and in joint models text
(and whatever else the model adds) before or behind them. In a tiled sequence the video comes
first, tile by tile, then everything else, which here is called text. Tiles and pieces of text are
the blocks of a plan.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import AUTO, KernelChoice, kernel_name
from multimodal_gen.kernels.tile_order.api import (
    TileOrder,
    gather_tokens,
    scatter_tokens,
    tile_order,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "SequenceLayout",
    "TiledSequence",
    "attend_rows",
    "attend_tiled",
    "hand_over",
    "heads_at_once",
    "layout_of",
    "masked_keys",
    "run_in_turns",
    "sequence_layout",
    "tiled_sequence",
    "tiled_video",
]

_Grid = tuple[int, int, int]

# Copies of q, k, v and the output are made for a share of the heads at a time, and of two such
# shares at once. Launches of less than so many bytes would cost more than they save.
_SHARE_AT_ONCE = 0.05
_BYTES_AT_ONCE = 64 << 20

# Key of a plan's cache.
_USED = "used on the current stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Where the tokens of a latent grid lie in a sequence.

    Attributes:
        grid: (T, H, W) of the video tokens.
        start: position of the first video token, on both sides.
        num_queries: Sq, text included.
        num_keys: Sk, text included; at most Sq, when a model drops padded text from the keys.
    """

    grid: _Grid
    start: int
    num_queries: int
    num_keys: int

    @property
    def num_video(self) -> int:
        """Number of video tokens."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledSequence:
    """One side of the attention in tiles; shared between callers, not to be written to.

    Attributes:
        order: the order of the video tokens.
        index: int32 [S], position in the tiled sequence -> position in the sequence.
        blocks: the tiles, then the pieces of text.
        num_tiles: how many blocks are tiles.
        rest: the tokens of the sequence that are left out.
    """

    order: TileOrder
    index: torch.Tensor
    blocks: Blocks
    num_tiles: int
    rest: tuple[slice, ...] = ()

    @property
    def num_text_blocks(self) -> int:
        """How many blocks are pieces of text."""
        return self.blocks.num - self.num_tiles


def sequence_layout(
    query: torch.Tensor, key: torch.Tensor, context: ForwardContext | None, backend: str
) -> SequenceLayout:
    """Find the video in the sequences of a self-attention layer.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        context: the running denoiser call.
        backend: who asks, for messages.

    Raises:
        UsageError: the latent grid is unknown, or the sequences do not hold it.
    """
    return layout_of(query.shape[1], key.shape[1], context, backend)


def layout_of(
    num_queries: int, num_keys: int, context: ForwardContext | None, backend: str
) -> SequenceLayout:
    """Find the video in sequences of so many tokens; see `sequence_layout`."""
    if context is None or context.latent_grid is None:
        raise UsageError(
            f"{backend} must know the latent grid of the video, got none; run the model through "
            f"multimodal_gen.apply, or the layer inside `with set_forward_context(step, "
            f"latent_grid=(T, H, W)):`"
        )
    grid, span = context.latent_grid, context.text_span
    text_first = span is not None and span.start == 0
    layout = SequenceLayout(
        grid=grid,
        start=span.stop if span is not None and text_first else 0,
        num_queries=num_queries,
        num_keys=num_keys,
    )
    least = layout.start + layout.num_video
    if min(layout.num_queries, layout.num_keys) < least:
        raise UsageError(
            f"{backend} must get sequences that hold the latent grid {grid} behind {layout.start} "
            f"text tokens, {least} tokens at least, got {layout.num_queries} queries and "
            f"{layout.num_keys} keys; run such layers on a dense backend"
        )
    return layout


def tiled_sequence(
    layout: SequenceLayout, num_tokens: int, tile: _Grid, device: torch.device
) -> TiledSequence:
    """Return one side of a layout in tiles; the last 64 are cached.

    Args:
        layout: where the video lies.
        num_tokens: `layout.num_queries` or `layout.num_keys`.
        tile: tokens per tile along (time, height, width).
        device: where the tensors lie.
    """
    return _tiled_sequence(layout.grid, layout.start, num_tokens, tile, device)


def tiled_video(layout: SequenceLayout, tile: _Grid, device: torch.device) -> TiledSequence:
    """Return the queries of the video in tiles, without text; the last 64 are cached.

    Text attends to everything, which `attend_tiled` does apart: in a plan, its long rows would
    keep the GPU waiting.
    """
    return _tiled_video(layout, tile, device)


@lru_cache(maxsize=64)
def _tiled_video(layout: SequenceLayout, tile: _Grid, device: torch.device) -> TiledSequence:
    first, last = layout.start, layout.start + layout.num_video
    alone = _tiled_sequence(layout.grid, 0, layout.num_video, tile, device)
    index = alone.index
    if first:
        # Added on the CPU: a copy is waited for, so that any stream may read what is cached.
        with torch.inference_mode(False):
            index = (tile_order(layout.grid, tile, "cpu").order + first).to(device)
    spans = (slice(0, first), slice(last, layout.num_queries))
    return replace(alone, index=index, rest=tuple(s for s in spans if s.start < s.stop))


@lru_cache(maxsize=64)
def _tiled_sequence(
    grid: _Grid, start: int, num_tokens: int, tile: _Grid, device: torch.device
) -> TiledSequence:
    order = tile_order(grid, tile, device)
    size = order.largest
    video, text = order.num_tokens, num_tokens - order.num_tokens
    on_cpu = tile_order(grid, tile, "cpu")
    # Made on the CPU: a copy is waited for, so that any stream may read what is cached.
    with torch.inference_mode(False), torch.device("cpu"):
        before = torch.arange(start, dtype=torch.int32)
        behind = torch.arange(start + video, num_tokens, dtype=torch.int32)
        starts = torch.arange(video, num_tokens, size, dtype=torch.int32)
        lengths = (num_tokens - starts).clamp_max(size).int()
        index = torch.cat((on_cpu.order + start, before, behind)).to(device)
        if order.uniform:
            blocks = Blocks.regular(num_tokens, size)
        else:
            blocks = Blocks.ragged(
                torch.cat((on_cpu.starts, starts)).to(device),
                torch.cat((on_cpu.lengths, lengths)).to(device),
                total=num_tokens,
                size=size,
            )
    num_tiles = len(order.starts)
    assert blocks.num == num_tiles + -(-text // size)
    return TiledSequence(order=order, index=index, blocks=blocks, num_tiles=num_tiles)


def masked_keys(sequence: TiledSequence, keep: torch.Tensor) -> tuple[torch.Tensor, Blocks]:
    """Move the kept keys of every block to its front; does not wait for the device.

    Args:
        sequence: the keys' side.
        keep: bool [B, Sk], in the order of the sequence.

    Returns:
        The index [B, Sk] of such keys, and the blocks without the others.
    """
    blocks = sequence.blocks
    starts, lengths = (bound[0, 0].long() for bound in blocks.bounds(keep.device))
    kept = keep[:, sequence.index.long()]
    # Number of kept tokens before each position, and before each block.
    before = torch.nn.functional.pad(kept.cumsum(1), (1, 0))
    at_start = before[:, starts]
    counts = before[:, starts + lengths] - at_start
    block = torch.repeat_interleave(lengths, output_size=kept.shape[1])
    block = torch.zeros_like(block).scatter_(0, starts, 1).cumsum(0) - 1
    kept_before = before[:, :-1] - at_start[:, block]
    inside = torch.arange(kept.shape[1], device=keep.device) - starts[block]
    slot = torch.where(kept, kept_before, counts[:, block] + inside - kept_before) + starts[block]
    index = torch.empty_like(slot, dtype=torch.int32)
    index.scatter_(1, slot, sequence.index.expand_as(index))
    ragged = Blocks.ragged(
        starts.int().view(1, 1, -1),
        counts.int().unsqueeze(1),
        total=blocks.total,
        size=blocks.size,
    )
    return index, ragged


def attend_tiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: TiledSequence,
    keys: TiledSequence,
    plan_of: Callable[[slice], BlockPlan],
    *,
    scale: float,
    kernel: KernelChoice = AUTO,
    keep: torch.Tensor | None = None,
    cached_plans: bool = False,
) -> torch.Tensor:
    """Attend by a plan of tiles: into tile order, block-sparse attention, and back.

    Works on a share of the heads at a time, which bounds the memory of the copies.

    Args:
        query: [B, Sq, H, D] in the order of the sequence.
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        queries: the queries in tiles; those left out attend to every key.
        keys: the keys in tiles.
        plan_of: gives the plan of a range of query heads, over `queries.blocks` and
            `keys.blocks`.
        scale: factor of the scores.
        kernel: what the block-sparse engine is to run.
        keep: bool [B, Sk], keys to attend to; None for all.
        cached_plans: whether `plan_of` may return one plan several times.

    Returns:
        [B, Sq, H, D] in the order of the sequence. Queries that see no key are zero.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    index, masked = (keys.index, None) if keep is None else masked_keys(keys, keep)
    out = torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)
    same = queries.index is keys.index and keep is None
    group = heads // kv_heads

    def attend(kv_slice: slice) -> None:
        q_slice = slice(kv_slice.start * group, kv_slice.stop * group)
        parts = query[:, :, q_slice], key[:, :, kv_slice], value[:, :, kv_slice]
        if same:
            q, k, v = gather_tokens(parts, index)
        else:
            (q,) = gather_tokens(parts[:1], queries.index)
            k, v = gather_tokens(parts[1:], index)
        plan = plan_of(q_slice)
        if masked is not None:
            plan = replace(plan, kv=masked)
        tiled = block_sparse_attention(q, k, v, plan, scale=scale, kernel=kernel)
        assert isinstance(tiled, torch.Tensor)
        scatter_tokens(tiled, queries.index, out[:, :, q_slice])

    def attend_to_all(span: slice) -> None:
        out[:, span] = attend_rows(query[:, span], key, value, keep, scale)

    calls = [*(partial(attend_to_all, span) for span in queries.rest)]
    for part in heads_at_once(query, out, kv_heads):
        call = partial(attend, part)
        plan = plan_of(slice(part.start * group, part.stop * group)) if cached_plans else None
        use = (query.shape, kv_heads, query.dtype, kernel_name(kernel))
        if plan is not None and keep is None and _is_new(plan, use):
            call()
        else:
            calls.append(call)
    run_in_turns(calls, query.device)
    return out


def _is_new(plan: BlockPlan, use: Hashable) -> bool:
    """Tell once that a plan has never been used in a way.

    Its first use, which adds what kernels derive from it, must be on the stream that all others
    wait for: they would read lists that are still being written.
    """
    if (_USED, use) in plan.cache:
        return False
    plan.cache[_USED, use] = True
    return True


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return attention of a few queries to all keys that `keep` [B, Sk] leaves."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = None if keep is None else keep[:, None, None, :]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
    if mask is not None:
        out = torch.where(mask.any(-1, keepdim=True), out, 0.0)
    return out.transpose(1, 2)


def heads_at_once(query: torch.Tensor, out: torch.Tensor, kv_heads: int) -> list[slice]:
    """Return the key heads in shares whose copies of q, k, v and the output stay small."""
    copies = 2 * (query.numel() + out.numel()) * query.element_size() // kv_heads
    at_once = max(int(kv_heads * _SHARE_AT_ONCE), -(-_BYTES_AT_ONCE // copies), 1)
    return [slice(h, min(h + at_once, kv_heads)) for h in range(0, kv_heads, at_once)]


def run_in_turns(calls: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run independent calls; on a GPU on two streams, one's copies beside the other's products."""
    if device.type != "cuda" or len(calls) < 2:
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


def hand_over(*tensors: torch.Tensor) -> None:
    """Keep the memory of what calls in turns made until the current stream is done with it."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@lru_cache(maxsize=16)
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return two streams of a device; cached, because memory belongs to the stream it was for."""
    first, second = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, second
