"""How V-MoBA cuts the tokens of a video into chunks, and attention over those a query selects.

Shapes: B batch, S tokens, V video tokens, Sk keys, H heads, D head size, N chunks, G groups of
chunks; q/k suffix = query/key side.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, rows_for_choice
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.slots import SeenTiles, pooled_seen
from multimodal_gen.kernels.block_sparse.tail import PooledBlocks, add_tail
from multimodal_gen.kernels.block_sparse.tuning import CHOICE_ROWS
from multimodal_gen.kernels.chunk_select.api import (
    ChunkMeans,
    Rule,
    chunk_means,
    pack_bits,
    select_chunks,
)
from multimodal_gen.kernels.row_choice.api import (
    ChunkGroups,
    SortedRows,
    chunk_groups,
    lse_of_parts,
    merge_parts,
    move_rows,
    sort_rows,
)
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import bits_of, tell_pairs
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    TiledSequence,
    attend_rows,
    kept_first,
    pooled_video,
    tiled_sequence,
)

__all__ = [
    "ChunkKind",
    "Partition",
    "attend_chunks",
    "attend_seen_chunks",
    "chunk_kind",
    "chunk_shape",
    "density",
    "partition",
    "select",
]

ChunkKind = Literal["temporal", "spatial", "st"]
_Grid = tuple[int, int, int]


def chunk_kind(layer: int, first: int, cycle: tuple[int, int, int]) -> ChunkKind:
    """Return the kind of chunk that a layer has.

    Args:
        layer: index of the layer.
        first: the layer that the cycles begin at.
        cycle: temporal, spatial and spatio-temporal layers of a cycle, in this order.
    """
    place = (layer - first) % sum(cycle)
    if place < cycle[0]:
        return "temporal"
    return "spatial" if place < cycle[0] + cycle[1] else "st"


def chunk_shape(kind: ChunkKind, size: tuple[int, ...], grid: _Grid) -> _Grid:
    """Return a chunk's tokens along time, height and width, at most those of the grid.

    Args:
        kind: what `size` means.
        size: frames; height and width; or time, height and width.
        grid: (T, H, W) of the video.
    """
    full = {
        "temporal": (size[0], grid[1], grid[2]),
        "spatial": (grid[0], *size[-2:]),
        "st": size,
    }[kind]
    t, h, w = (min(pair) for pair in zip(full, grid, strict=True))
    return t, h, w


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """The chunks of a video; shared between callers, not to be written to.

    Attributes:
        keys: the keys, chunk by chunk, then everything else; a block for each chunk, and one for
            the rest if there is any.
        own: int32 [V], the chunk of every token of the video, in the order of the sequence.
        in_order: whether the sequence already lies chunk by chunk.
    """

    keys: TiledSequence
    own: torch.Tensor
    in_order: bool

    @property
    def num_chunks(self) -> int:
        """N."""
        return self.keys.num_tiles

    @property
    def has_rest(self) -> bool:
        """Whether there are keys that are not of the video."""
        return self.keys.blocks.num > self.num_chunks

    def key_blocks(
        self, groups: ChunkGroups, heads: int, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, Blocks]:
        """Return where every key comes from, and the key blocks of all groups of all heads.

        Args:
            groups: how the chunks are grouped.
            heads: query heads.
            keep: bool [B, Sk], keys that may be attended to; None for all.

        Returns:
            The index, int32 [Sk] or [B, Sk]; and for head h * G + g the chunks of group g, those
            it lacks being empty, then the keys that are not of the video, if any.
        """
        index, blocks = self.keys.index, self.keys.blocks
        if keep is not None:
            index, blocks = kept_first(index, blocks, keep)
        starts, lengths = (_grouped(x, self, groups) for x in blocks.bounds(index.device))
        return index, Blocks.ragged(
            starts.repeat(1, heads, 1),
            lengths.repeat(1, heads, 1),
            total=blocks.total,
            size=blocks.size,
        )


def _grouped(bound: torch.Tensor, chunks: Partition, groups: ChunkGroups) -> torch.Tensor:
    """Arrange starts or lengths [B|1, 1, N (+ 1)] by group: [B|1, G, size (+ 1)]."""
    num = chunks.num_chunks
    missing = groups.num * groups.size - num
    by_group = torch.nn.functional.pad(bound[:, 0, :num], (0, missing))
    by_group = by_group.view(-1, groups.num, groups.size)
    if not chunks.has_rest:
        return by_group
    rest = bound[:, 0, num:].unsqueeze(1).expand(-1, groups.num, -1)
    return torch.cat((by_group, rest), dim=2)


@static_cache(maxsize=64)
def partition(layout: SequenceLayout, chunk: _Grid, device: torch.device) -> Partition:
    """Return the chunks of a video; the last 64 are cached.

    Args:
        layout: where the video lies.
        chunk: tokens of a chunk along (time, height, width); those at the edges may be smaller.
        device: where the tensors lie.
    """
    keys = tiled_sequence(layout, layout.num_keys, chunk, device)
    order = keys.order
    video, rest = layout.num_video, layout.num_keys - layout.num_video
    with torch.inference_mode(False), torch.device("cpu"):
        starts, lengths = order.starts.cpu(), order.lengths.cpu()
        own = torch.empty(video, dtype=torch.int32)
        chunks = torch.arange(len(starts), dtype=torch.int32)
        own[order.order.cpu().long()] = chunks.repeat_interleave(lengths)
        if rest:
            starts = torch.cat((starts, torch.tensor([video], dtype=torch.int32)))
            lengths = torch.cat((lengths, torch.tensor([rest], dtype=torch.int32)))
        blocks = Blocks.ragged(
            starts.to(device),
            lengths.to(device),
            total=layout.num_keys,
            size=max(order.largest, rest),
        )
        positions = torch.arange(layout.num_keys, dtype=torch.int32)
        in_order = bool((keys.index.cpu() == positions).all())
        return Partition(keys=replace(keys, blocks=blocks), own=own.to(device), in_order=in_order)


# What copies of a few heads may take, as a share of queries, keys, values and results of all heads;
# lists take up to a tenth more. One head at a time takes least, but a share takes the host 0.3 ms
# and the GPU 0.03 (H200, 2026-11).
_MOST_COPIES = 0.5
# Pairs of queries and keys of a few heads that keep a GPU busy; for these, twice as many bytes.
_PAIRS_AT_ONCE = 2e9


def select(call: SparseCall, chunks: Partition, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the video's queries select, and how many pairs that is; see `select_chunks`."""
    order, video = chunks.keys.order, call.layout.video
    means = chunk_means(
        call.key,
        order.starts,
        order.lengths,
        size=order.largest,
        index=chunks.keys.index,
        keep=call.keep,
    )
    # The video lies at the same positions on both sides, so its masked keys are queries, too.
    keep = None if call.keep is None else call.keep[:, video]
    return select_chunks(call.query[:, video], means, chunks.own, rule, keep=keep)


def density(call: SparseCall, pairs: torch.Tensor) -> torch.Tensor:
    """Return the share of pairs attended to, [], given the `pairs` of video queries and keys.

    Masked keys that are not of the video are taken for others.
    """
    batch, _, heads, _ = call.query.shape
    return call.layout.density(pairs.double() / (batch * heads * call.layout.num_video**2))


def attend_chunks(
    call: SparseCall,
    chunks: Partition,
    rule: Rule,
    *,
    groups: ChunkGroups | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of a call, and the share of pairs attended to; waits for nothing.

    Queries of the video attend to the chunks they select and to all keys that are not of the
    video, and to the means of the others where the call has a tail; other queries to everything.
    Works on a few heads at a time, which bounds the memory.

    Args:
        call: the call.
        chunks: the chunks of its video.
        rule: how queries choose among them.
        groups: how the chunks are grouped; None for what suits the sizes.

    Returns:
        [B, Sq, H, D] in the order of the sequence, zero where a query sees no key; and float64 [].
    """
    bits, pairs = select(call, chunks, rule)
    heads, rows = slice(0, call.query.shape[2]), partial(_rows_of_bits, bits, chunks, call.layout)
    tell_pairs(heads, rows)
    pooled = pooled_video(call, chunks.keys) if call.tail else None
    out = _attend_bits(call, chunks, bits, groups=groups, pooled=pooled)
    return out, density(call, pairs)


def attend_seen_chunks(
    call: SparseCall, tiles: SeenTiles, rule: Rule, *, spatial: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return attention over the chunks of a cache that queries select; waits for nothing.

    Args:
        call: the call; its queries in the order of their tiles, its keys all rows of the cache.
        tiles: what is seen of them; every block is a chunk.
        rule: how queries choose among them.
        spatial: whether the tiles of one place are one chunk, in all slots together.

    Returns:
        [B, Sq, H, D]; its log-sum-exp, [B, H, Sq]; and the share of pairs attended to, float64 [].
    """
    query, order, blocks = call.query, tiles.order, tiles.plan.kv
    starts, lengths = (bound.view(-1) for bound in blocks.tensors())
    own = torch.repeat_interleave(tiles.itself, order.lengths, output_size=order.num_tokens)
    found = chunk_means(call.key, starts, lengths.clamp_min(1), size=blocks.size)
    seen = replace(found, counts=lengths.expand(len(query), -1).contiguous(), masked=True)
    if spatial:
        places = len(order.starts)
        chosen, pairs = select_chunks(query, _by_place(seen, places), own % places, rule)
        num_slots = blocks.num // places
        chosen_places = bits_of(chosen, places)
        bits = pack_bits(chosen_places.repeat(1, 1, 1, num_slots) & (lengths > 0))
    else:
        bits, pairs = select_chunks(query, seen, own, rule)
    # What is seen of a cache lies as it is read: where keys come from is never asked.
    keys = TiledSequence(order=order, index=own, blocks=blocks, num_tiles=blocks.num, in_order=True)
    lse = torch.empty(
        (query.shape[0], query.shape[2], query.shape[1]), dtype=torch.float32, device=query.device
    )
    pooled = pooled_seen(call.key, call.value, tiles) if call.tail else None
    chunks = Partition(keys=keys, own=own, in_order=True)
    out = _attend_bits(call, chunks, bits, pooled=pooled, lse=lse)
    every = query.shape[0] * query.shape[2] * order.num_tokens * tiles.num_tokens
    return out, lse, pairs.double() / every


def _by_place(seen: ChunkMeans, places: int) -> ChunkMeans:
    """Return the means of the tiles of every place, over all slots."""
    batch, heads, _, size = seen.means.shape
    counts = seen.counts.view(batch, -1, places)
    total = counts.sum(1, dtype=torch.int32)
    weight = (counts / total.clamp_min(1).unsqueeze(1)).to(seen.means.dtype)
    means = seen.means.view(batch, heads, -1, places, size) * weight[:, None, :, :, None]
    return ChunkMeans(means=means.sum(2), counts=total, masked=True)


def _attend_bits(
    call: SparseCall,
    chunks: Partition,
    bits: torch.Tensor,
    *,
    groups: ChunkGroups | None = None,
    pooled: PooledBlocks | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention over the chunks that rows chose, a few heads at a time.

    Args:
        call: the call.
        chunks: the chunks.
        bits: int32 [B, H, V, words], which chunks every query of the video chose.
        groups: see `attend_chunks`.
        pooled: means of all chunks, where those that a row did not choose count by them.
        lse: [B, H, V], where the log-sum-exp of the video's queries goes.
    """
    query, key, layout = call.query, call.key, call.layout
    group = query.shape[2] // key.shape[2]
    groups = groups or chunk_groups(chunks.num_chunks, layout.num_video)
    out = torch.empty((*query.shape[:3], call.value.shape[3]), dtype=query.dtype, device=key.device)
    # Rows of a query block that suit the kernel that will run.
    copied = not chunks.in_order or call.keep is not None
    block = rows_for_choice(query, call.kernel, () if copied else (key, call.value))
    rows = sort_rows(bits, groups, block=block, extra=chunks.has_rest)
    # Kernels with such blocks write the parts over the copies of the queries.
    passes = _passes(call, groups, overwritten=block == CHOICE_ROWS, copied=copied)
    at_once = (passes[0].stop - passes[0].start) * group
    keys = chunks.key_blocks(groups, at_once, call.keep)
    order = _in_order(rows.counts.numel() // len(passes), key.device)
    for span in layout.text:
        out[:, span] = attend_rows(query[:, span], key, call.value, call.keep, call.scale)

    def attend(part: slice) -> None:
        heads = slice(part.start * group, part.stop * group)
        k, v = key[:, :, part], call.value[:, :, part]
        if copied:
            k, v = gather_tokens((k, v), keys[0])
        chosen = rows.of_heads(heads)
        plan = BlockPlan(
            indices=chosen.indices,
            counts=chosen.counts,
            q=Blocks.padded(chosen.lengths, chosen.room // chosen.counts.shape[2]),
            kv=keys[1],
            row_bits=chosen.bits.unsqueeze(-1),
            order=order,
        )
        own, target = query[:, layout.video, heads], out[:, layout.video, heads]
        parts, of_parts = _attend_parts(call, move_rows(own, chosen), k, v, plan)
        if pooled is None:
            merge_parts(parts, of_parts, chosen, target)
            total = None if lse is None else lse_of_parts(of_parts, chosen)
        else:
            means = pooled.heads(part)
            total = _merge_with_tail(
                call, own, parts, of_parts, chosen, means, bits[:, heads], target
            )
        if lse is not None and total is not None:
            lse[:, heads] = total

    for part in passes:
        attend(part)  # whose copies are gone before the next ones are made
    return out


def _attend_parts(
    call: SparseCall, moved: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention within each group and its log-sum-exp, the former over `moved` if it can."""
    parts, lse = block_sparse_attention(
        moved,
        k,
        v,
        plan,
        scale=call.scale,
        return_lse=True,
        kernel=call.kernel,
        overwrite_q=True,
    )
    return parts, lse


def _rows_of_bits(
    bits: torch.Tensor,
    chunks: Partition,
    layout: SequenceLayout,
    rows: torch.Tensor,
    heads: slice,
) -> torch.Tensor:
    """Return what rows of the sequence keep; see `kept_pairs.OfRows`.

    Args:
        bits: int32 [B, H, V, words], which chunks every query of the video selects.
        chunks: the chunks.
        layout: where the video lies.
        rows: int64 [R].
        heads: which of the heads.
    """
    place = rows.to(bits.device) - layout.start
    of_video = (place >= 0) & (place < layout.num_video)
    words = bits[:, heads, place.clamp(0, layout.num_video - 1)]
    chosen = bits_of(words, chunks.num_chunks)[..., chunks.own.long()]
    kept = chosen.new_ones((*chosen.shape[:3], layout.num_keys))
    kept[..., layout.video] = chosen
    return kept | ~of_video[:, None]


def _merge_with_tail(
    call: SparseCall,
    query: torch.Tensor,
    parts: torch.Tensor,
    lse: torch.Tensor,
    rows: SortedRows,
    pooled: PooledBlocks,
    bits: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write attention that also sees the means of the chunks that rows did not choose.

    Returns the log-sum-exp over both, [B, H, V].

    Args:
        call: the call.
        query: the video's queries of some heads, [B, V, H, D].
        parts: see `merge_parts`.
        lse: see `merge_parts`.
        rows: see `merge_parts`.
        pooled: means of all chunks.
        bits: int32 [B, H, V, words], the chunks that each row chose.
        out: [B, V, H, D], is written to.
    """
    # Gradients need what was merged, which must not be written over.
    merged = torch.empty_like(out) if torch.is_grad_enabled() else out
    merge_parts(parts, lse, rows, merged)
    total = lse_of_parts(lse, rows)
    found, total = add_tail(
        merged, total, query, pooled, bits, None, scale=call.scale, kernel=call.kernel
    )
    if found is not out:
        out.copy_(found)
    return total


@static_cache(maxsize=64)
def _in_order(num: int, device: torch.device) -> torch.Tensor:
    """Return the order that starts query blocks as they lie; the last 64 are cached.

    Neighbours read the same keys. To start those with most keys first takes longer: sorting, and
    by what the L2 cache then lacks.
    """
    with torch.inference_mode(False):
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
