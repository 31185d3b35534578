"""Sorting rows by their choices, and merging their parts, in plain PyTorch; differentiable.

Shapes: B batch, S rows, H heads, D head size, G groups, W words of bits, N chunks. A group's
pattern is the bits of its chunks, the first at bit 0.
"""

import torch

__all__ = [
    "block_lists_reference",
    "group_patterns",
    "merge_parts_reference",
    "move_rows_reference",
    "row_positions_reference",
    "sort_keys",
    "sorted_bits_reference",
]


def group_patterns(bits: torch.Tensor, num_chunks: int, size: int, num: int) -> torch.Tensor:
    """Return the pattern of every row in every group: int32 [B, H, G, S].

    Args:
        bits: int32 [B, H, S, W].
        num_chunks: N.
        size: chunks of a group; the last may have fewer.
        num: G.
    """
    chunk = torch.arange(num * size, device=bits.device)
    words = bits[..., (chunk // 32).clamp_max(bits.shape[-1] - 1)]
    chosen = (words >> (chunk % 32)) & 1
    chosen = torch.where(chunk < num_chunks, chosen, 0).view(*bits.shape[:-1], num, size)
    places = torch.arange(size, device=bits.device)
    patterns: torch.Tensor = (chosen << places).sum(-1)
    return patterns.transpose(2, 3).int()


def sort_keys(patterns: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rank of each pattern in an order where neighbours differ in one bit.

    That is its rank in Gray's code, turned by one so that the empty pattern comes last.

    Args:
        patterns: int32.
        size: bits of a pattern, at most 8.
    """
    rank = patterns
    for shift in (1, 2, 4):
        rank = rank ^ (rank >> shift)
    turned: torch.Tensor = (rank - 1) % 2**size
    return turned


def row_positions_reference(
    patterns: torch.Tensor, size: int, always: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the rows of every group by their patterns, equal ones by their place.

    Args:
        patterns: int32 [B, H, G, S].
        size: bits of a pattern.
        always: whether the first group's rows are all in use.

    Returns:
        Where every row goes, int32 [B, H, G, S], and how many rows of each group are in use,
        int32 [B, H, G]; they come first.
    """
    order = sort_keys(patterns, size).argsort(stable=True, dim=-1)
    places = torch.arange(patterns.shape[-1], device=patterns.device).expand(order.shape)
    position = torch.zeros_like(order).scatter_(-1, order, places).int()
    used = (patterns != 0).sum(-1, dtype=torch.int32)
    if always:
        used[:, :, 0] = patterns.shape[-1]
    return position, used


def sorted_bits_reference(
    patterns: torch.Tensor, position: torch.Tensor, room: int, extra: int
) -> torch.Tensor:
    """Put patterns in the order of every group, with zeros behind them.

    Args:
        patterns: int32 [B, H, G, S].
        position: int32 [B, H, G, S].
        room: S', at least S.
        extra: bits added to every pattern of the first group.

    Returns:
        int32 [B, H * G, S'].
    """
    moved = patterns.gather(-1, _rows_at(position))
    moved[:, :, 0] |= extra
    return torch.nn.functional.pad(moved, (0, room - position.shape[-1])).flatten(1, 2)


def move_rows_reference(query: torch.Tensor, position: torch.Tensor, room: int) -> torch.Tensor:
    """Put queries in the order of every group, with zeros behind them.

    Args:
        query: [B, S, H, D].
        position: int32 [B, H, G, S].
        room: S', at least S.

    Returns:
        [B, S', H * G, D].
    """
    head_size, padding = query.shape[3], room - query.shape[1]
    rows = query.transpose(1, 2).unsqueeze(2).expand(-1, -1, position.shape[2], -1, -1)
    moved = rows.gather(3, _rows_at(position).unsqueeze(-1).expand(-1, -1, -1, -1, head_size))
    moved = torch.nn.functional.pad(moved, (0, 0, 0, padding))
    return moved.flatten(1, 2).transpose(1, 2)


def _rows_at(position: torch.Tensor) -> torch.Tensor:
    """Return the row at every position, int64 [B, H, G, S]."""
    row = torch.zeros_like(position, dtype=torch.int64)
    places = torch.arange(position.shape[-1], device=position.device).expand(position.shape)
    return row.scatter_(-1, position.long(), places)


def block_lists_reference(
    bits: torch.Tensor, used: torch.Tensor, block: int, num_bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bits that any row of each block has, as lists.

    Args:
        bits: int32 [B, H, S], S a multiple of `block`.
        used: int32 [B, H], rows in use.
        block: rows of a block.
        num_bits: how many bits there are.

    Returns:
        int32 [B, H, S / block, num_bits], increasing as far as counted; the counts; and how many
        rows of each block are in use.
    """
    blocks = bits.view(*bits.shape[:-1], -1, block)
    places = torch.arange(num_bits, device=bits.device)
    chosen = ((blocks.unsqueeze(-1) >> places) & 1).bool().any(-2)
    listed = torch.where(chosen, places, num_bits).sort(-1).values
    counts = chosen.sum(-1, dtype=torch.int32)
    starts = torch.arange(0, bits.shape[-1], block, device=bits.device)
    lengths = (used.unsqueeze(-1) - starts).clamp(0, block).int()
    return torch.where(listed < num_bits, listed, 0).int(), counts, lengths


def merge_parts_reference(
    parts: torch.Tensor, lse: torch.Tensor, position: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """Return every row's attention from that of its parts, summed in fp32 and rounded once.

    Args:
        parts: [B, S', H * G, D].
        lse: fp32 [B, H * G, S'], natural logarithm.
        position: int32 [B, H, G, S].
        used: int32 [B, H, G].

    Returns:
        [B, S, H, D] in the dtype of `parts`; zero where a row has no key at all.
    """
    batch, heads, groups, _ = position.shape
    at = position.long()
    compute = torch.promote_types(parts.dtype, torch.float32)
    parts = parts.transpose(1, 2).reshape(batch, heads, groups, *parts.shape[1::2])
    lse = lse.view(batch, heads, groups, -1)
    moved = parts.gather(3, at.unsqueeze(-1).expand(-1, -1, -1, -1, parts.shape[-1])).to(compute)
    unused = position >= used.unsqueeze(-1)
    weights = lse.gather(3, at).masked_fill(unused, float("-inf"))
    nothing = (weights == float("-inf")).all(2, keepdim=True)
    weights = weights.masked_fill(nothing, 0.0).softmax(2).masked_fill(nothing, 0.0)
    moved = moved.masked_fill((weights == 0).unsqueeze(-1), 0.0)
    out: torch.Tensor = (moved * weights.unsqueeze(-1)).sum(2)
    return out.transpose(1, 2).to(parts.dtype)
