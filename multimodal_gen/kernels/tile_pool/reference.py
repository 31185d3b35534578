"""The coarse stage in plain PyTorch: any device, any floating dtype, differentiable.

Shapes: B batch, S tokens, H heads, D head size, N tiles; Nq and Nk tiles of queries and keys.
"""

import math
from collections.abc import Iterator

import torch

__all__ = [
    "add_gated_reference",
    "pool_tiles_reference",
    "select_cells_reference",
    "select_tiles_reference",
]

# Scores that are sorted at once; more heads than fit go one after the other.
_SCORES_AT_ONCE = 2**26
# Values of tokens that are taken at once, of as many tokens of every tile as fit.
_VALUES_AT_ONCE = 2**22


def _positions(
    tensor: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    size: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, for the first, second, ... tokens of all tiles, where they are and which there are.

    Yields:
        int64 [n, N], 0 where a tile has no such token; bool [n, N].
    """
    values = tensor.shape[0] * len(starts) * tensor.shape[2:].numel()
    step = max(1, _VALUES_AT_ONCE // max(1, values))
    for first in range(0, size, step):
        token = torch.arange(first, min(first + step, size), device=starts.device)[:, None]
        real = lengths > token
        position = torch.where(real, starts + token, 0).long()
        yield (position if index is None else index[position].long()), real


def pool_tiles_reference(
    tensor: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    size: int,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the mean over the tokens of every tile, summed in fp32 (fp64 for fp64).

    Args:
        tensor: [B, S, H, D].
        starts: int32 [N].
        lengths: int32 [N].
        index: int32 [S'], or None.
        size: upper bound of `lengths`.
        keep: bool [B, S], tokens that count, or None.
        dtype: of the means; that of `tensor` when None.

    Returns:
        [B, H, N, D]; zero where no token counts.
    """
    compute = torch.promote_types(tensor.dtype, torch.float32)
    batch, _, heads, head_size = tensor.shape
    total = tensor.new_zeros((batch, len(starts), heads, head_size), dtype=compute)
    counts = torch.zeros_like(lengths).unsqueeze(0)
    for position, real in _positions(tensor, starts, lengths, index, size):
        tokens = tensor[:, position].to(compute)
        counted = real.unsqueeze(0) if keep is None else real & keep[:, position]
        total = total + torch.where(counted[..., None, None], tokens, 0.0).sum(1)
        counts = counts + counted.sum(1)
    mean = total / counts.clamp_min(1)[..., None, None]
    return mean.transpose(1, 2).to(dtype or tensor.dtype).contiguous()


def select_tiles_reference(
    query: torch.Tensor, key: torch.Tensor, count: int, always: int, out: torch.Tensor
) -> None:
    """Write the `count` key tiles with the largest scores of every query tile.

    Scores are products in fp32 (fp64 for fp64). Equal scores go to the lowest index; a score that
    is no number counts as infinitely large.

    Args:
        query: means of query tiles, [B, H, Nq, D].
        key: means of key tiles, [B, Hkv, Nk, D].
        count: key tiles to keep, in [1, Nk].
        always: number of blocks after the Nk tiles that every row keeps.
        out: int32 [B, H, Nq, at least count + always]; rows are written to, in increasing order.
    """
    compute = torch.promote_types(query.dtype, torch.float32)
    batch, heads, num_q, _ = query.shape
    num_kv = key.shape[2]
    out[..., count : count + always] = torch.arange(num_kv, num_kv + always, device=query.device)
    group = heads // key.shape[1]
    step = max(1, _SCORES_AT_ONCE // max(1, batch * num_q * num_kv))
    for first in range(0, heads, step):
        last = min(first + step, heads)
        used = torch.arange(first, last, device=query.device) // group
        scores = query[:, first:last].to(compute) @ key[:, used].to(compute).mT
        scores = scores.nan_to_num(math.inf, posinf=math.inf, neginf=-math.inf)
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
        out[:, first:last, :, :count] = best.sort(dim=-1).values


def select_cells_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    q_real: torch.Tensor,
    k_real: torch.Tensor,
    cells: tuple[int, int],
    count: int,
    always: int,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Write the `count` key tiles with the largest scores of every query tile; see `api`.

    The score of two tiles is the logarithm of the sum of exp(scale * q.k) over their cells.

    Args:
        query: means of the cells of query tiles, [B, H, Nq * cells[0], D].
        key: means of the cells of key tiles, [B, Hkv, Nk * cells[1], D].
        q_real: bool [B|1, Nq * cells[0]], cells that hold tokens.
        k_real: bool [B|1, Nk * cells[1]], the same.
        cells: cells of a query tile and of a key tile.
        count: key tiles to keep.
        always: number of blocks after the Nk tiles that every row keeps.
        out: int32 [B, H, Nq, at least count + always], is written to.
        scale: factor of the scores.
    """
    compute = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1]
    num_kv, group = key.shape[2] // cells[1], heads // key.shape[1]
    out[..., count : count + always] = torch.arange(num_kv, num_kv + always, device=query.device)
    both = (q_real[:, None, :, None] & k_real[:, None, None]).logical_not()
    for head in range(heads):  # one at a time: there are many pairs of cells
        scores = query[:, head, None].to(compute) @ key[:, head // group, None].to(compute).mT
        scores = (scores * scale).masked_fill(both, -math.inf)
        scores = scores.view(*scores.shape[:2], -1, cells[0], num_kv, cells[1])
        scores = scores.logsumexp((3, 5)).nan_to_num(math.inf, posinf=math.inf, neginf=-math.inf)
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
        out[:, head, :, :count] = best.sort(dim=-1).values[:, 0]


def add_gated_reference(
    out: torch.Tensor,
    gate: torch.Tensor,
    coarse: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    """Return `out` plus `gate` times the value of every token's tile, rounded once.

    Args:
        out: [B, S, H, D].
        gate: [B, S, H, D].
        coarse: values of the tiles, [B, H, N, D].
        starts: int32 [N].
        lengths: int32 [N].
        index: int32 [S'], or None.
        size: upper bound of `lengths`.

    Returns:
        A new tensor like `out`; tokens in no tile are copied.
    """
    compute = torch.promote_types(out.dtype, torch.float32)
    result = out.clone()
    values = coarse.transpose(1, 2).to(compute)
    for position, real in _positions(out, starts, lengths, index, size):
        where, tile = position[real], real.nonzero()[:, 1]
        added = out[:, where].to(compute) + gate[:, where].to(compute) * values[:, tile]
        result.index_copy_(1, where, added.to(out.dtype))
    return result
