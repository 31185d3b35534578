"""Attention where rows choose among key blocks: validates, then runs Triton or the reference.

Shapes: B batch, S rows, H heads, D head size, G groups of chunks.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import ROW_MOVES, ROW_ORDER, choose_for
from multimodal_gen.kernels.row_choice.reference import (
    block_lists_reference,
    group_patterns,
    merge_parts_reference,
    move_rows_reference,
    row_positions_reference,
    sorted_bits_reference,
)
from multimodal_gen.kernels.tensors import records_gradient

__all__ = [
    "ChunkGroups",
    "SortedRows",
    "chunk_groups",
    "lse_of_parts",
    "merge_parts",
    "move_rows",
    "sort_rows",
]

_MAX_SIZE = 8
_MAX_BLOCK = 256

# With so many rows per pattern of a group, few rows that a tensor core takes together, 64, have two
# patterns: H200, 2026-11, 32,760 rows that choose 18 of 72 chunks; groups of 8 there and elsewhere.
_ROWS_PER_PATTERN = 120
_MIN_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroups:
    """Chunks cut in groups of neighbours.

    Attributes:
        num_chunks: N.
        size: chunks of a group, at most 8; the last group may have fewer.
    """

    num_chunks: int
    size: int

    def __post_init__(self) -> None:
        if self.num_chunks < 1 or not 1 <= self.size <= _MAX_SIZE:
            raise UsageError(
                f"`size` must lie in [1, {_MAX_SIZE}] and `num_chunks` be positive, got "
                f"{self.size} and {self.num_chunks}"
            )

    @property
    def num(self) -> int:
        """Number of groups."""
        return -(-self.num_chunks // self.size)


def chunk_groups(num_chunks: int, num_rows: int) -> ChunkGroups:
    """Return groups that suit a number of chunks and rows.

    Large groups mean few parts per row, whose merging costs memory traffic; small ones mean few
    patterns, so that tiles of rows agree, which saves products.
    """
    if num_chunks <= _MAX_SIZE:
        return ChunkGroups(num_chunks=num_chunks, size=num_chunks)
    patterns = max(num_rows // _ROWS_PER_PATTERN, 1)
    most = min(max(patterns.bit_length() - 1, _MIN_SIZE), _MAX_SIZE)
    groups = -(-num_chunks // most)
    return ChunkGroups(num_chunks=num_chunks, size=-(-num_chunks // groups))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedRows:
    """The rows of every group in an order where neighbours choose alike.

    The G groups of a head are heads of their own here: head h and group g become h * G + g. A
    group's rows that are in use come first. S' is S rounded up to whole blocks of rows.

    Attributes:
        bits: int32 [B, H * G, S'], the chunks of its group that each row chose, the first at bit 0,
            and `extra` in the first group; arbitrary behind the rows in use.
        indices: int32 [B, H * G, S' / block, bits], the bits that any row of a block has.
        counts: int32 [B, H * G, S' / block].
        lengths: int32 [B, H * G, S' / block], rows in use of each block.
        position: int32 [B, H, G, S], where each row is.
        used: int32 [B, H, G], how many rows are in use.
    """

    bits: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    position: torch.Tensor
    used: torch.Tensor

    @property
    def room(self) -> int:
        """S'."""
        return self.bits.shape[2]

    def of_heads(self, heads: slice) -> "SortedRows":
        """Return the same of some heads."""
        groups = self.position.shape[2]
        parts = slice(heads.start * groups, heads.stop * groups)
        return SortedRows(
            bits=self.bits[:, parts],
            indices=self.indices[:, parts],
            counts=self.counts[:, parts],
            lengths=self.lengths[:, parts],
            position=self.position[:, heads],
            used=self.used[:, heads],
        )


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
        from multimodal_gen.kernels.row_choice import row_choice_kernel

        fields = row_choice_kernel.sort_rows(bits, groups.num_chunks, groups.size, extra, block)
        return SortedRows(**fields)
    patterns = group_patterns(bits, groups.num_chunks, groups.size, groups.num)
    position, used = row_positions_reference(patterns, groups.size, extra)
    added = 1 << groups.size if extra else 0
    room = -(-bits.shape[2] // block) * block
    moved_bits = sorted_bits_reference(patterns, position, room, added)
    lists = block_lists_reference(moved_bits, used.flatten(1), block, groups.size + extra)
    indices, counts, lengths = lists
    return SortedRows(
        bits=moved_bits,
        indices=indices,
        counts=counts,
        lengths=lengths,
        position=position,
        used=used,
    )


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
        from multimodal_gen.kernels.row_choice import row_choice_kernel

        return row_choice_kernel.move_rows(query, position, rows.used, rows.room)
    return move_rows_reference(query, position, rows.room)


def lse_of_parts(lse: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Return the log-sum-exp of every row over all of its parts, [B, H, S].

    Args:
        lse: fp32 [B, H * G, S'], natural logarithm, in the order of `rows`.
        rows: the order.
    """
    batch, heads, groups, _ = rows.position.shape
    found = lse.view(batch, heads, groups, -1).gather(3, rows.position.long())
    unused = rows.position >= rows.used.unsqueeze(-1)
    found = found.masked_fill(unused, -torch.inf)
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
        from multimodal_gen.kernels.row_choice import row_choice_kernel

        row_choice_kernel.merge_parts(parts, lse, rows.position, rows.used, out)
    else:
        out.copy_(merge_parts_reference(parts, lse, rows.position, rows.used))
