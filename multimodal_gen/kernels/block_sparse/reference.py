"""The definition of block-sparse attention in plain PyTorch: any device, any floating dtype.

For query row r of block i, over the keys K(r) of the blocks it keeps,

    lse(r) = log sum_{j in K(r)} exp(scale * q_r . k_j)
    out(r) = sum_{j in K(r)} exp(scale * q_r . k_j - lse(r)) v_j

with out(r) = 0 and lse(r) = -inf where K(r) is empty. Under causality, K(r) ends at the key that is
as far from the last one as r is from the last query. Query blocks are computed one at a time, for
all batches and heads together, so the scores never take more than size * Sk per batch and head;
several at a time where that is little and they list equally many.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from multimodal_gen.kernels.block_sparse.call import Backward
from multimodal_gen.kernels.block_sparse.plan import WORD_BITS, BlockPlan
from multimodal_gen.kernels.block_sparse.skip import Skip

# Up to so many, blocks share operations, which otherwise take less time than it takes to call them.
_SCORES_AT_ONCE = 1 << 18

_Inputs = ParamSpec("_Inputs")
_Result = TypeVar("_Result")


def _outside_autocast(function: Callable[_Inputs, _Result]) -> Callable[_Inputs, _Result]:
    """Let a function of tensors compute in the precision that it names."""

    @wraps(function)
    def run(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> _Result:
        given = args[0]
        assert isinstance(given, torch.Tensor | Backward)
        tensor = given if isinstance(given, torch.Tensor) else given.q
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True, slots=True)
class _Tile:
    """N query blocks of every batch and head: rows, keys, and which pairs of theirs count."""

    rows: torch.Tensor  # int64 [B, H, N, R]
    real_rows: torch.Tensor  # bool [B, H, N, R]
    keys: torch.Tensor  # int64 [B, H, N, L]
    mask: torch.Tensor  # bool [B, H, N, R, L], or with 1 for R where all rows see the same keys
    sample: torch.Tensor  # int64 [B, 1, 1, 1], each one's own place
    head: torch.Tensor  # int64 [1, H, 1, 1]

    def index(self, positions: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, ...]:
        """Index that takes positions [B, H, N, R] of each query head from [B, S, `kv_heads`, D]."""
        return self.sample, positions, self.head // (self.head.shape[1] // kv_heads)

    def take(self, tensor: torch.Tensor, at: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Gather [B, S, H or fewer, D] at positions [B, H, N, R]: [B, H, N, R, D], fp32 or better.

        What is not real becomes 0: it may be padding, and zero times NaN is NaN.
        """
        # Rows of a matrix: three indices take more than twice as long on CPUs.
        _, length, heads, channels = tensor.shape
        sample, at, head = self.index(at, heads)
        places = (sample * length + at) * heads + head
        found = tensor.flatten(0, 2).index_select(0, places.flatten())
        found = found.to(torch.promote_types(tensor.dtype, torch.float32))
        unreal = (~real).expand_as(places).flatten().nonzero().squeeze(1)
        return found.index_fill_(0, unreal, 0.0).view(*places.shape, channels)


def _tiles(plan: BlockPlan, batch: int, heads: int) -> Iterator[_Tile]:
    """Yield tiles that have every query block once."""
    device = plan.device
    places = (torch.arange(n, device=device) for n in (batch, heads, plan.q.size, plan.kv.size))
    sample, head, rows_of_block, keys_of_block = places
    q_starts, q_lengths = (t.expand(batch, heads, -1) for t in plan.q.bounds(device))
    every_real_row = rows_of_block < q_lengths.unsqueeze(-1)
    every_row = torch.where(every_real_row, q_starts.long().unsqueeze(-1) + rows_of_block, 0)
    # [B, H, Nq, L] of the lists.
    valid = torch.arange(plan.indices.shape[-1], device=device) < plan.counts.unsqueeze(-1)
    indices = torch.where(valid, plan.indices, 0).long().expand(batch, heads, -1, -1)
    starts, lengths = (
        t.expand(batch, heads, -1).long().gather(2, indices.flatten(2)).view(indices.shape)
        for t in plan.kv.bounds(device)
    )
    lengths = torch.where(valid, lengths, 0)
    most = plan.counts.amax((0, 1)).clamp_min(1).tolist()
    for some, used in _alike(most, batch * heads * plan.q.size * plan.kv.size):
        rows, real_rows = every_row[:, :, some], every_real_row[:, :, some]
        real_keys = keys_of_block < lengths[:, :, some, :used, None]
        keys = torch.where(real_keys, starts[:, :, some, :used, None] + keys_of_block, 0).flatten(3)
        mask = (real_keys.flatten(3) & real_rows.any(-1, keepdim=True)).unsqueeze(3)
        if plan.row_bits is not None:
            chosen = _chosen(plan.row_bits, rows, indices[:, :, some, :used])
            mask = mask & real_rows.unsqueeze(-1) & chosen.repeat_interleave(plan.kv.size, dim=-1)
        if plan.causal:
            last = rows.unsqueeze(-1) + (plan.kv.total - plan.q.total)
            mask = mask & (keys.unsqueeze(3) <= last)
        yield _Tile(rows, real_rows, keys, mask, sample.view(-1, 1, 1, 1), head.view(1, -1, 1, 1))


def _alike(most: Sequence[int], scores: int) -> Iterator[tuple[list[int], int]]:
    """Yield query blocks that list equally many key blocks, and how many those are.

    Args:
        most: how many each query block lists at most, of all batches and heads.
        scores: how many a pair of blocks has.
    """
    for used in sorted(set(most)):
        alike = [i for i, length in enumerate(most) if length == used]
        num = max(1, _SCORES_AT_ONCE // max(1, scores * used))
        yield from ((alike[i : i + num], used) for i in range(0, len(alike), num))


def _chosen(row_bits: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return whether rows [B, H, N, R] keep each valid block [B, H, N, L]: bool [B, H, N, R, L]."""
    words = row_bits.unsqueeze(2).take_along_dim(rows.unsqueeze(-1), 3)
    places = blocks.unsqueeze(3)
    return (words.take_along_dim(places // WORD_BITS, 4) >> places % WORD_BITS & 1).bool()


def _weights(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of one tile: weights [B, H, N, R, L] and lse [B, H, N, R]."""
    empty = ~mask.any(-1, keepdim=True)
    # Empty rows stay unmasked until the end: a softmax over nothing is NaN.
    scores, kept = q @ k.mT * scale, mask | empty
    if not kept.all():
        scores = torch.where(kept, scores, float("-inf"))
    weights = scores.softmax(-1)
    # exp(highest - lse) is the largest weight; torch.logsumexp takes four times a softmax.
    lse = scores.amax(-1) - weights.amax(-1).log()
    if empty.any():
        weights = weights.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf"))
    return weights, lse


def _near(
    query: torch.Tensor, key: torch.Tensor, tile: _Tile, size: int, scale: float, skip: Skip
) -> torch.Tensor:
    """Return which keys are in blocks that are not left out, bool [B, H, N, 1, L]; counts them."""
    counted = tile.mask & tile.real_rows.unsqueeze(-1)
    scores = (query @ key.mT * scale).masked_fill_(~counted, float("-inf"))
    highest = scores.view(*scores.shape[:-1], -1, size).amax(-1)  # [B, H, N, R, blocks]
    # A block that is left out never raises the maximum.
    before = highest.cummax(-1).values.roll(1, -1)
    before[..., 0] = float("-inf")
    near = ((highest > before - skip.nats) & (highest > float("-inf"))).any(3)
    if skip.counts is not None:
        valid = (highest > float("-inf")).any(3)
        skip.counts.add_(torch.stack(((valid & ~near).sum(), valid.sum())))
    return near.repeat_interleave(size, dim=-1).unsqueeze(3)


def _gather(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: _Tile
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the rows and keys of a tile that count, in fp32 or better."""
    key, value = (tile.take(t, tile.keys, tile.mask.any(3)) for t in (k, v))
    return tile.take(q, tile.rows, tile.real_rows), key, value


@_outside_autocast
def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    skip: Skip | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of `plan`; differentiable.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D], Hkv a divisor of H.
        v: [B, Sk, Hkv, D].
        plan: the pairs.
        scale: factor of the scores.
        skip: leaves out key blocks, in the order of the lists, whose scores lie far below those
            before them for every row of a query block.

    Returns:
        out [B, Sq, H, D] in q's dtype, and lse [B, H, Sq], natural logarithm, fp32 (fp64 for
        fp64 inputs).
    """
    batch, total, heads, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((batch, total, heads, v.shape[3]))
    lse = q.new_full((batch, heads, total), float("-inf"), dtype=compute)
    q, k, v = (t.contiguous() for t in (q, k, v))
    for tile in _tiles(plan, batch, heads):
        query, key, value = _gather(q, k, v, tile)
        mask = tile.mask
        if skip is not None:
            mask = mask & _near(query, key, tile, plan.kv.size, scale, skip)
        weights, tile_lse = _weights(query, key, mask, scale)
        tile_out = weights @ value
        real = tile.real_rows
        at_b, at_r, at_h = (t.expand_as(real)[real] for t in tile.index(tile.rows, heads))
        out = out.index_put_((at_b, at_r, at_h), tile_out[real].to(out.dtype))
        lse = lse.index_put_((at_b, at_h, at_r), tile_lse[real])
    return out, lse


@_outside_autocast
def attention_reference_backward(
    call: Backward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, from the results and one tile at a time.

    With dO and dL the gradients of out and lse, over the kept pairs of row r and key j:

        p = exp(scale * q_r . k_j - lse_r),  delta_r = dO_r . out_r - dL_r
        ds = scale * p * (dO_r . v_j - delta_r)
        dq_r = sum_j ds k_j,  dk_j = sum_r ds q_r,  dv_j = sum_r p dO_r

    and rows without keys have p = 0.

    Args:
        call: with what `attention_reference` gave.

    Returns:
        Three tensors like q, k and v.
    """
    q, k, v, plan, out, lse, grad_out, grad_lse, scale = call
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    of_rows = [grad_out, out, *(t.mT.unsqueeze(-1) for t in (lse, grad_lse))]
    q, k, v, *of_rows = (t.contiguous() for t in (q, k, v, *of_rows))
    batch, _, heads, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.zeros_like(t, dtype=compute) for t in (q, k, v)]
    for tile in _tiles(plan, batch, heads):
        query, key, value = _gather(q, k, v, tile)
        counted = tile.mask.any(-1) & tile.real_rows
        upstream, result, level, given = (tile.take(t, tile.rows, counted) for t in of_rows)
        shift = (upstream * result).sum(-1, keepdim=True) - given
        scores = (query @ key.mT) * scale - level
        weights = scores.masked_fill_(~tile.mask, float("-inf")).exp_()
        grad_scores = weights * (upstream @ value.mT - shift) * scale
        parts = (grad_scores @ key, grad_scores.mT @ query, weights.mT @ upstream)
        for grad, part, where in zip(grads, parts, (tile.rows, tile.keys, tile.keys), strict=True):
            grad.index_put_(tile.index(where, grad.shape[2]), part, accumulate=True)
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
