"""Runs a router whose rows choose chunks of keys, each for itself.

A row of the video attends to the chunks that it chose and to all keys that are not of the video, or
that have no chunk; other queries attend to everything. Rows are sorted by what they chose, one
group of chunks at a time; each group attends for itself, and the parts of a row are merged. Why is
in kernels/select/README.md.

Shapes: B batch, S tokens, V rows (video tokens), Sk keys, H heads, D head size, N chunks, G groups
of chunks; q/k suffix = query/key side.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, rows_for_choice
from multimodal_gen.kernels.block_sparse.call import PooledBlocks
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.slots import VisibleTiles, pooled_visible
from multimodal_gen.kernels.block_sparse.tail import add_tail
from multimodal_gen.kernels.block_sparse.tuning import CHOICE_ROWS
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.select.row_reference import (
    ChunkGroups,
    ChunkMeans,
    SortedRows,
    bits_of,
    pack_bits,
)
from multimodal_gen.kernels.select.rows import (
    chunk_groups,
    chunk_means,
    lse_of_parts,
    merge_parts,
    move_rows,
    sort_rows,
)
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import gather_tokens, tile_order
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import record_pairs
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import ShardKeys
from multimodal_gen.runtime.layers.attention.sparse.router import (
    KnownCall,
    Router,
    RowStats,
    SparseLayer,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    Shard,
    SparseCall,
    TiledSequence,
    attend_densely,
    attend_text,
    kept_first,
    pooled_video,
    tiled_sequence,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext

# What copies of a few heads may take, as a share of queries, keys, values and results of all heads;
# lists take up to a tenth more. One head at a time takes least, but a share takes the host 0.3 ms
# and the GPU 0.03 (H200, 2026-11).
_MOST_COPIES = 0.5
# Pairs of queries and keys of a few heads that keep a GPU busy; for these, twice as many bytes.
_PAIRS_AT_ONCE = 2e9


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RowChunks(NamedTuple):
    """The chunks of a video; shared between callers, not to be written to.

    Attributes:
        keys: the keys, chunk by chunk, then everything else; a block for each chunk, and one for
            the rest if there is any.
        own: int32 [V], the chunk of every row.
    """

    keys: TiledSequence
    own: torch.Tensor


@static_cache(maxsize=64)
def static_key_blocks(keys: TiledSequence, groups: ChunkGroups, heads: int) -> Blocks:
    """Return `key_blocks` of the keys of `row_chunks`; the last 64 are cached."""
    return key_blocks(keys.blocks, groups, heads, keys.index.device)


def key_blocks(blocks: Blocks, groups: ChunkGroups, heads: int, device: torch.device) -> Blocks:
    """Return the key blocks of all groups of all heads.

    For head h * G + g the chunks of group g, those it lacks being empty, then the keys that are not
    of the video, if any.

    Args:
        blocks: the chunks, and what is not of the video; see `RowChunks`.
        groups: how the chunks are grouped.
        heads: query heads.
        device: where the tensors lie.
    """
    starts, lengths = (_grouped(x, groups) for x in blocks.bounds(device))
    return Blocks.ragged(
        starts.repeat(1, heads, 1),
        lengths.repeat(1, heads, 1),
        total=blocks.total,
        size=blocks.size,
    )


def _grouped(bound: torch.Tensor, groups: ChunkGroups) -> torch.Tensor:
    """Arrange starts or lengths [B|1, 1, N (+ 1)] by group: [B|1, G, size (+ 1)]."""
    num = groups.num_chunks
    by_group = F.pad(bound[:, 0, :num], (0, groups.num * groups.size - num))
    by_group = by_group.view(-1, groups.num, groups.size)
    if bound.shape[2] == num:
        return by_group
    rest = bound[:, 0, num:].unsqueeze(1).expand(-1, groups.num, -1)
    return torch.cat((by_group, rest), dim=2)


@static_cache(maxsize=64)
def row_chunks(layout: SequenceLayout, chunk: Window, device: torch.device) -> RowChunks:
    """Return the chunks of a video; the last 64 are cached.

    Args:
        layout: where the video lies.
        chunk: tokens of a chunk along (time, height, width); those at the edges may be smaller.
        device: where the tensors lie.
    """
    keys = tiled_sequence(layout, layout.num_keys, chunk, device, one_rest=True)
    order = tile_order(layout.grid, chunk, "cpu")
    with torch.device("cpu"):
        own = torch.repeat_interleave(order.lengths.long())[order.inverse.long()].int()
        return RowChunks(keys=keys, own=own.to(device))


def attend_by_rows(
    router: Router[Any], settings: Any, known: KnownCall, call: SparseCall, context: ForwardContext
) -> torch.Tensor:
    """Return the method's attention of a call, [B, Sq, H, D]; waits for nothing."""
    layer, layout = router.layer, known.layout
    call = call if layout == call.layout else replace(call, layout=layout)
    chunks = row_chunks(layout, known.tile, call.query.device)
    share: float | torch.Tensor = 1.0
    out = router.attend_upstream(settings, call, chunks.keys, None) if call.on_package else None
    if known.share == 1:
        out = attend_densely(call) if out is None else out
    else:
        bits, pairs = choose_rows(router, settings, row_stats(call, chunks))
        batch, heads = bits.shape[:2]  # masked keys that are not of the video count as others
        share = kept = layout.density(pairs.double() / (batch * heads * layout.num_video**2))
        if out is None:
            out = attend_choice(call, chunks, bits)
            layer.dense_above.learn(kept, math.prod(known.tile), context)
    layer.note(context, share, call.query.shape[2])
    return out


def row_stats(call: SparseCall, chunks: RowChunks) -> RowStats:
    """Return what the rows of a call choose by."""
    keys, video = chunks.keys, call.layout.video
    means = chunk_means(call.key, keys.order.as_tiles(keys.index), mask=call.mask)
    # The video lies at the same positions on both sides, so its masked keys are queries, too.
    mask = None if call.mask is None else call.mask[:, video]
    return RowStats(query=call.query[:, video], chunks=means, own=chunks.own, mask=mask)


def choose_rows(
    router: Router[Any], settings: Any, stats: RowStats
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what rows choose, which has no gradient; see `Router.choose_rows`."""
    with torch.no_grad():
        return router.choose_rows(settings, stats)


def attend_choice(
    call: SparseCall,
    chunks: RowChunks,
    bits: torch.Tensor,
    *,
    groups: ChunkGroups | None = None,
) -> torch.Tensor:
    """Return the attention of a call whose rows have chosen; waits for nothing.

    Rows attend to the chunks they chose and to all keys that are not of the video, and to the means
    of the others where the call has a tail; other queries to everything. Works on a few heads at a
    time, which bounds the memory.

    Args:
        call: the call.
        chunks: the chunks of its video.
        bits: int32 [B, H, V, words], what its rows chose.
        groups: how the chunks are grouped; None for what suits the sizes.

    Returns:
        [B, Sq, H, D] in the order of the sequence, zero where a query sees no key.
    """
    layout = call.layout

    def of_rows(rows: torch.Tensor, heads: slice) -> torch.Tensor:
        place = rows.to(bits.device) - layout.start
        of_video = (place >= 0) & (place < layout.num_video)
        words = bits[:, heads, place.clamp(0, layout.num_video - 1)]
        chosen = bits_of(words, chunks.keys.num_tiles)[..., chunks.own.long()]
        kept = chosen.new_ones((*chosen.shape[:3], layout.num_keys))
        kept[..., layout.video] = chosen
        return kept | ~of_video[:, None]

    record_pairs(slice(0, call.query.shape[2]), of_rows)
    pooled = pooled_video(call, chunks.keys) if call.tail else None
    return _attend_bits(call, chunks.keys, bits, groups=groups, pooled=pooled, static=True)


def attend_cache_by_rows(
    router: Router[Any],
    settings: Any,
    qkv: QKV,
    tiles: VisibleTiles,
    context: ForwardContext | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and lse of queries in their tile order over the chunks of a cache.

    Every block of the cache is a chunk; or those of one place are one, in all slots together.
    """
    query, key, value = qkv
    layer, order, blocks = router.layer, tiles.order, tiles.plan.kv
    places = len(order.starts) if router.spans_time(settings) else None
    own = torch.repeat_interleave(tiles.itself, order.lengths, output_size=order.num_tokens)
    starts, lengths = (bound.view(-1) for bound in blocks.tensors())
    found = chunk_means(key, Tiles(starts, lengths.clamp_min(1), blocks.size))
    seen = replace(found, counts=lengths.expand(len(query), -1).contiguous(), masked=True)
    stats = RowStats(query=query, chunks=seen, own=own)
    if places is not None:
        stats = RowStats(query=query, chunks=_by_place(seen, places), own=own % places)
    bits, pairs = choose_rows(router, settings, stats)
    if places is not None:
        num_slots = blocks.num // places
        bits = pack_bits(bits_of(bits, places).repeat(1, 1, 1, num_slots) & (lengths > 0))
    call = _call_of_rows(query, key, value, layer)
    # What is seen of a cache lies as it is read: where keys come from is never asked.
    keys = TiledSequence(order=order, index=own, blocks=blocks, num_tiles=blocks.num, in_order=True)
    lse = query.new_empty(bits.shape[:3], dtype=torch.float32)
    pooled = pooled_visible(key, value, tiles) if layer.pools_tail else None
    out = _attend_bits(call, keys, bits, pooled=pooled, lse=lse)
    if context is not None:
        every = query.shape[0] * query.shape[2] * order.num_tokens * tiles.num_tokens
        layer.note(context, pairs.double() / every, query.shape[2])
    return out, lse


def _by_place(seen: ChunkMeans, places: int) -> ChunkMeans:
    """Return the means of the tiles of every place, over all slots."""
    batch, heads, _, size = seen.means.shape
    counts = seen.counts.view(batch, -1, places)
    total = counts.sum(1, dtype=torch.int32)
    weight = (counts / total.clamp_min(1).unsqueeze(1)).to(seen.means.dtype)
    means = seen.means.view(batch, heads, -1, places, size) * weight[:, None, :, :, None]
    return ChunkMeans(means=means.sum(2), counts=total, masked=True)


def attend_shard_by_rows(
    layer: SparseLayer,
    bits: torch.Tensor,
    pooled: PooledBlocks | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    theirs: ShardKeys,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of a rank's rows to a shard's part of their chunks; see `AttendShard`.

    Args:
        layer: what computes.
        bits: int32 [B, H, V, words], what the rows chose of the chunks of all ranks.
        pooled: means of all chunks, where those that a row did not choose count by them.
        query: the rows, in the order of the sequence.
        key: the shard's keys.
        value: its values.
        theirs: the shard.
    """
    call, blocks = _call_of_rows(query, key, value, layer), theirs.blocks
    place, held = _held_chunks(theirs.shard)
    starts, lengths = (F.pad(x, (0, 1))[..., place] for x in blocks.bounds(key.device))
    keys = TiledSequence(
        order=theirs.shard.keys.order,
        index=theirs.shard.keys.index,
        blocks=Blocks.ragged(starts, lengths, total=blocks.total, size=blocks.size),
        num_tiles=len(theirs.shard.block_of),
        in_order=True,
    )
    lse = query.new_empty(bits.shape[:3], dtype=torch.float32)
    out = _attend_bits(call, keys, bits & held, lse=lse)
    if pooled is None or not theirs.is_own:
        return out, lse
    return add_tail(out, lse, query, pooled, bits, None, scale=layer.scale, kernel=layer.kernel)


@static_cache(maxsize=256)
def _held_chunks(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a shard has its part of every chunk among its blocks, and which it has any of.

    The former is int64 [N (+ 1)], the rest behind the chunks, and the number of blocks for chunks
    that are not there; the latter bits of an int32 [words].
    """
    with torch.device("cpu"):
        block = shard.block_of.cpu().long()
        held, blocks = block >= 0, shard.keys.blocks.num
        rest = torch.arange(shard.keys.num_tiles, blocks)
        place = torch.cat((torch.where(held, block, blocks), rest))
        return place.to(shard.block_of.device), pack_bits(held).to(shard.block_of.device)


def _call_of_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: SparseLayer
) -> SparseCall:
    """Return a call whose queries are all rows."""
    rows, keys = query.shape[1], key.shape[1]
    layout = SequenceLayout(grid=(1, 1, rows), start=0, num_queries=rows, num_keys=keys)
    return SparseCall(
        query=query, key=key, value=value, layout=layout, scale=layer.scale, kernel=layer.kernel
    )


def _attend_bits(
    call: SparseCall,
    chunks: TiledSequence,
    bits: torch.Tensor,
    *,
    groups: ChunkGroups | None = None,
    pooled: PooledBlocks | None = None,
    lse: torch.Tensor | None = None,
    static: bool = False,
) -> torch.Tensor:
    """Return attention over the chunks that rows chose, a few heads at a time.

    Args:
        call: the call.
        chunks: the keys, by chunk; see `RowChunks`.
        bits: int32 [B, H, V, words], which chunks every query of the video chose.
        groups: see `attend_choice`.
        pooled: means of all chunks, where those that a row did not choose count by them.
        lse: [B, H, V], where the log-sum-exp of the video's queries goes.
        static: whether `chunks` are those of `row_chunks`.
    """
    query, key, layout = call.query, call.key, call.layout
    group = query.shape[2] // key.shape[2]
    groups = groups or chunk_groups(chunks.num_tiles, layout.num_video)
    out = torch.empty((*query.shape[:3], call.value.shape[3]), dtype=query.dtype, device=key.device)
    # Rows of a query block that suit the kernel that will run.
    copied = not chunks.in_order or call.mask is not None
    block = rows_for_choice(query, call.kernel, () if copied else (key, call.value))
    rows = sort_rows(bits, groups, block=block, extra=chunks.num_text_blocks > 0)
    # Kernels with such blocks write the parts over the copies of the queries.
    passes = _passes(call, groups, overwritten=block == CHOICE_ROWS, copied=copied)
    some = (passes[0].stop - passes[0].start) * group
    index, blocks = chunks.index, chunks.blocks
    if call.mask is not None:
        index, blocks = kept_first(index, blocks, call.mask)
    if static and call.mask is None:
        blocks = static_key_blocks(chunks, groups, some)
    else:
        blocks = key_blocks(blocks, groups, some, key.device)
    order = _in_order(rows.counts.numel() // len(passes), key.device)
    attend_text(call, out)

    def attend(part: slice) -> None:
        heads = slice(part.start * group, part.stop * group)
        k, v = key[:, :, part], call.value[:, :, part]
        if copied:
            k, v = gather_tokens((k, v), index)
        chosen = rows.of_heads(heads)
        own, target = query[:, layout.video, heads], out[:, layout.video, heads]
        parts, of_parts = block_sparse_attention(
            move_rows(own, chosen),
            k,
            v,
            _plan_of_rows(chosen, blocks, order),
            scale=call.scale,
            return_lse=True,
            kernel=call.kernel,
            overwrite_q=True,  # with the parts, if the kernel can
        )
        # Gradients of a tail need what was merged, which must not be written over.
        apart = pooled is not None and torch.is_grad_enabled()
        merged = torch.empty_like(target) if apart else target
        merge_parts(parts, of_parts, chosen, merged)
        total = None if pooled is None and lse is None else lse_of_parts(of_parts, chosen)
        if pooled is not None and total is not None:
            means, kept = pooled.heads(part), bits[:, heads]
            merged, total = add_tail(
                merged, total, own, means, kept, None, scale=call.scale, kernel=call.kernel
            )
            if merged is not target:
                target.copy_(merged)
        if lse is not None and total is not None:
            lse[:, heads] = total

    for part in passes:
        attend(part)  # whose copies are gone before the next ones are made
    return out


def _plan_of_rows(rows: SortedRows, keys: Blocks, order: torch.Tensor) -> BlockPlan:
    return BlockPlan(
        indices=rows.indices,
        counts=rows.counts,
        q=Blocks.padded(rows.lengths, rows.room // rows.counts.shape[2]),
        kv=keys,
        row_bits=rows.bits.unsqueeze(-1),
        order=order,
    )


@static_cache(maxsize=64)
def _in_order(num: int, device: torch.device) -> torch.Tensor:
    """Return the order that starts query blocks as they lie; the last 64 are cached.

    Neighbours read the same keys. To start those with most keys first takes longer: sorting, and
    by what the L2 cache then lacks.
    """
    return torch.arange(num, dtype=torch.int32, device=device)


def _passes(
    call: SparseCall, groups: ChunkGroups, *, overwritten: bool, copied: bool
) -> list[slice]:
    """Return the key heads in equal shares with small copies, but enough to keep the GPU busy.

    Args:
        call: the call.
        groups: how the chunks are grouped, each of which may have a copy of every query.
        overwritten: whether parts take the place of these copies.
        copied: whether keys and values are copied, too.
    """
    query, kv_heads = call.query, call.key.shape[2]
    num_copies = (1 if overwritten else 2) * groups.num
    copies = num_copies * query.numel() + (2 * call.key.numel() if copied else 0)
    every = 2 * (query.numel() + call.key.numel())
    pairs = query.shape[0] * query.shape[1] * call.key.shape[1] * query.shape[2] // kv_heads
    most = _MOST_COPIES * every * kv_heads / max(copies, 1)
    shares = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    small, large = (max(n for n in shares if n <= max(m, 1)) for m in (most, 2 * most))
    busy = next((n for n in shares if n * pairs >= _PAIRS_AT_ONCE), kv_heads)
    at_once = max(small, min(busy, large))
    return [slice(h, h + at_once) for h in range(0, kv_heads, at_once)]
