"""Rows that choose chunks of keys, and their order for attention: validates, then dispatches.

Every row chooses for itself, by its products with the means of chunks. Rows that lie together
rarely choose alike, so the chunks that any row of a tile chose are several times what each of them
chose. So chunks are cut in groups of a few. For each group, the rows that chose any of its chunks
are sorted by what they chose, so that nearly every tile of rows agrees; attention runs per group,
and the parts of a row are merged by their log-sum-exp. README.md has what was measured.

Shapes: B batch, S rows or keys, H heads, D head size, N chunks, G groups of chunks, which are
described by `Tiles`.
"""

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import (
    CHUNK_CHOICE,
    CHUNK_MEANS,
    ROW_MOVES,
    ROW_ORDER,
    choose_for,
    records_gradient,
)
from multimodal_gen.kernels.select.api import check_tiles
from multimodal_gen.kernels.select.reference import Tiles, pool_tiles_reference
from multimodal_gen.kernels.select.row_reference import (
    MAX_GROUP,
    ChunkGroups,
    ChunkMeans,
    Rule,
    SortedRows,
    lse_in_order,
    merge_parts_reference,
    move_rows_reference,
    pack_bits,
    select_chunks_reference,
    sort_rows_reference,
)
from multimodal_gen.kernels.tensors import check_mask

_MAX_BLOCK = 256

# With so many rows per pattern of a group, few rows that a tensor core takes together, 64, have two
# patterns: H200, 2026-11, 32,760 rows that choose 18 of 72 chunks; groups of 8 there and elsewhere.
_ROWS_PER_PATTERN = 120
_MIN_SIZE = 4


def chunk_means(key: torch.Tensor, tiles: Tiles, *, mask: torch.Tensor | None = None) -> ChunkMeans:
    """Return the mean of every chunk's keys, summed in fp32; does not wait for the GPU.

    Args:
        key: [B, S, Hkv, D], any strides.
        tiles: the chunks, of at least one key each.
        mask: bool [B, S], keys that count, in the order of `key`; None for all.

    Returns:
        The means, and how many keys each chunk has.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    if key.ndim != 4:
        raise UsageError(f"`key` must be [B, S, H, D], got {list(key.shape)}")
    check_tiles(key, tiles)
    check_mask(mask, key)
    starts, lengths, _, index = tiles
    counts = lengths.unsqueeze(0)
    if mask is not None:
        kept = mask if index is None else mask[:, index.long()]
        before = torch.nn.functional.pad(kept.cumsum(1), (1, 0))
        counts = (before[:, (starts + lengths).long()] - before[:, starts.long()]).int()
    some = counts if mask is None else counts.clamp_min(1)
    key = key.detach()
    if choose_for(CHUNK_MEANS, key) == "triton":
        from multimodal_gen.kernels.select import pool_kernel

        means = pool_kernel.sum_chunks(key, tiles, mask) / some[:, None, :, None]
    else:
        compute = torch.promote_types(key.dtype, torch.float32)
        means = pool_tiles_reference(key, tiles, mask, compute)
    return ChunkMeans(means=means, counts=counts, masked=mask is not None)


def select_chunks(
    query: torch.Tensor,
    chunks: ChunkMeans,
    own: torch.Tensor,
    rule: Rule,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunks that every query selects; does not wait for the GPU.

    Equal scores go to the lowest chunk in the scope `query_head` and stay together in the others.
    Chunks without keys are not selected, except as a query's own.

    Args:
        query: [B, S, H, D], any strides; query head h uses key head h // (H / Hkv).
        chunks: what they are scored against.
        own: int32 [S], the chunk that each query lies in.
        rule: how to choose.
        mask: bool [B, S], queries that count; None for all. The others choose their own chunk,
            compete with none, and may hold anything, NaN too.

    Returns:
        The choice, int32 [B, H, S, ceil(N / 32)], with chunk n at bit n % 32 of word n // 32; and
        how many pairs of a query and a key that makes in all, int64 [].

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    _check_query(query, chunks.means, own)
    check_mask(mask, query)
    query = query.detach()  # a choice has no gradient
    together = rule.scope != "query_head"
    if choose_for(CHUNK_CHOICE, query, num_kv=chunks.means.shape[2], together=together) == "triton":
        from multimodal_gen.kernels.select import chunk_kernel

        return chunk_kernel.select_chunks(query, chunks, own, rule, mask)
    chosen = select_chunks_reference(query, chunks, own, rule, mask)
    return pack_bits(chosen), (chosen.sum((1, 2)) * chunks.counts).sum()


def _check_query(query: torch.Tensor, means: torch.Tensor, own: torch.Tensor) -> None:
    if query.ndim != 4:
        raise UsageError(f"`query` must be [B, S, H, D], got {list(query.shape)}")
    batch, tokens, heads, head_size = query.shape
    fits = (means.shape[0], means.shape[3]) == (batch, head_size) and heads % means.shape[1] == 0
    if not fits or means.device != query.device:
        raise UsageError(
            f"`chunks` must hold means [{batch}, a divisor of {heads}, N, {head_size}] on "
            f"{query.device}, got {list(means.shape)} on {means.device}"
        )
    if own.dtype != torch.int32 or tuple(own.shape) != (tokens,) or own.device != query.device:
        raise UsageError(
            f"`own` must be int32 [{tokens}] on {query.device}, got {own.dtype} "
            f"{list(own.shape)} on {own.device}"
        )


def chunk_groups(num_chunks: int, num_rows: int) -> ChunkGroups:
    """Return groups that suit a number of chunks and rows.

    Large groups mean few parts per row, whose merging costs memory traffic; small ones mean few
    patterns, so that tiles of rows agree, which saves products.
    """
    if num_chunks <= MAX_GROUP:
        return ChunkGroups(num_chunks=num_chunks, size=num_chunks)
    patterns = max(num_rows // _ROWS_PER_PATTERN, 1)
    most = min(max(patterns.bit_length() - 1, _MIN_SIZE), MAX_GROUP)
    groups = -(-num_chunks // most)
    return ChunkGroups(num_chunks=num_chunks, size=-(-num_chunks // groups))


def sort_rows(
    bits: torch.Tensor, groups: ChunkGroups, *, block: int = 128, extra: bool = False
) -> SortedRows:
    """Sort the rows of every group by what they chose; does not wait for the GPU.

    Args:
        bits: int32 [B, H, S, ceil(N / 32)], the chunks that each row chose.
        groups: how the chunks are cut.
        block: rows of a query block, at most 256.
        extra: whether there is one more key block that every row attends to; it is bit
            `groups.size` of the first group.

    Raises:
        UsageError: a shape, dtype or size does not fit.
    """
    words = -(-groups.num_chunks // 32)
    if bits.dtype != torch.int32 or bits.ndim != 4 or bits.shape[3] != words:
        raise UsageError(
            f"`bits` must be int32 [B, H, S, {words}], got {bits.dtype} {list(bits.shape)}"
        )
    if not 1 <= block <= _MAX_BLOCK:
        raise UsageError(f"`block` must lie in [1, {_MAX_BLOCK}], got {block}")
    if choose_for(ROW_ORDER, bits) == "triton":
        from multimodal_gen.kernels.select import row_kernel

        return row_kernel.sort_rows(bits, groups, block=block, extra=extra)
    return sort_rows_reference(bits, groups, block=block, extra=extra)


def move_rows(query: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Return the queries in the order of `rows`; does not wait for the GPU.

    Args:
        query: [B, S, H, D], any strides.
        rows: the order.

    Returns:
        [B, S', H * G, D] with memory [B, H * G, S', D]; what it holds behind the rows in use is
        arbitrary.

    Raises:
        UsageError: shapes or devices do not fit each other.
    """
    position = rows.position
    batch, heads, _, tokens = position.shape
    if query.ndim != 4 or query.shape[:3] != (batch, tokens, heads):
        raise UsageError(
            f"`query` must be [{batch}, {tokens}, {heads}, D], got {list(query.shape)}"
        )
    if query.device != position.device:
        raise UsageError(f"`query` must be on {position.device}, got {query.device}")
    if choose_for(ROW_MOVES, query, gradients=(query,)) == "triton":
        from multimodal_gen.kernels.select import row_kernel

        return row_kernel.move_rows(query, rows)
    return move_rows_reference(query, rows)


def lse_of_parts(lse: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Return the log-sum-exp of every row over all of its parts, [B, H, S].

    Args:
        lse: fp32 [B, H * G, S'], natural logarithm, in the order of `rows`.
        rows: the order.
    """
    found = lse_in_order(lse, rows)
    if not records_gradient(lse):
        return found.logsumexp(2)
    # The gradient of a sum of nothing is NaN.
    nothing = (found == -torch.inf).all(2, keepdim=True)
    total = found.masked_fill(nothing, 0.0).logsumexp(2)
    return total.masked_fill(nothing.squeeze(2), -torch.inf)


def merge_parts(
    parts: torch.Tensor, lse: torch.Tensor, rows: SortedRows, out: torch.Tensor
) -> None:
    """Write every row's attention, merged from its parts, to `out`.

    Args:
        parts: [B, S', H * G, D], attention within each group, in the order of `rows`.
        lse: fp32 [B, H * G, S'], natural logarithm; -inf where a row attended to nothing.
        rows: the order.
        out: [B, S, H, D], any strides, is written to. Rows without any key become zero.

    Raises:
        UsageError: shapes do not fit each other.
    """
    batch, heads, _, tokens = rows.position.shape
    parted, room = rows.bits.shape[1:]
    if parts.shape[:3] != (batch, room, parted) or lse.shape != (batch, parted, room):
        raise UsageError(
            f"`parts` must be [{batch}, {room}, {parted}, D] and `lse` [{batch}, {parted}, {room}],"
            f" got {list(parts.shape)} and {list(lse.shape)}"
        )
    if out.shape != (batch, tokens, heads, parts.shape[3]):
        raise UsageError(
            f"`out` must be [{batch}, {tokens}, {heads}, {parts.shape[3]}], got {list(out.shape)}"
        )
    if choose_for(ROW_MOVES, parts, gradients=(parts,)) == "triton":
        from multimodal_gen.kernels.select import row_kernel

        row_kernel.merge_parts(parts, lse, rows, out)
    else:
        out.copy_(merge_parts_reference(parts, lse, rows))
