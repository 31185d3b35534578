"""The definition of the pooled tail in plain PyTorch: any device, any floating dtype.

Key block j has n_j tokens, whose keys and values have the means kc_j and vc_j. Besides the keys
that row r of a query block keeps, whose log-sum-exp is lse(r) and whose output out(r), the row sees
the blocks P(r) that it does not keep, each as n_j equal keys:

    g(r)   = sum_{j in P(r)} n_j exp(scale * q_r . kc_j)
    den(r) = exp(lse(r)) + g(r)
    num(r) = exp(lse(r)) out(r) + sum_{j in P(r)} n_j exp(scale * q_r . kc_j) vc_j

which is Sol-Attn's softmax over both kinds (arXiv:2607.24027). To first order, as in PISA
(arXiv:2602.01077), keys of a block differ from their mean, for all blocks of a head together:

    num(r) += g(r) * scale * q_r H,   H = sum_j sum_{t in j} (k_t - kc_j)^T v_t / sum_j n_j

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size, Nq and N blocks.
"""

import torch

from multimodal_gen.kernels.block_sparse.call import TailCall
from multimodal_gen.kernels.block_sparse.plan import Blocks, broadcast_leading
from multimodal_gen.kernels.select.row_reference import bits_of

# Scores that are held at a time: 16 Mi, 64 MiB in fp32.
_SCORES_AT_ONCE = 2**24


def block_of_rows(blocks: Blocks, device: torch.device) -> torch.Tensor:
    """Return the block of every row, int64 [B|1, H|1, total]; N for rows in none."""
    rows = torch.arange(blocks.total, device=device)
    if blocks.is_regular:
        return (rows // blocks.size).view(1, 1, -1)
    starts, lengths = (x.long() for x in blocks.bounds(device))
    leading = broadcast_leading(starts, lengths)
    starts, lengths = starts.expand(*leading, -1), lengths.expand(*leading, -1)
    # Empty blocks hold no row, wherever they start.
    begins, order = torch.where(lengths > 0, starts, blocks.total).sort(dim=-1)
    rows = rows.expand(*begins.shape[:2], -1).contiguous()
    place = (torch.searchsorted(begins.contiguous(), rows, right=True) - 1).clamp_min(0)
    block = order.gather(-1, place)
    inside = (rows >= starts.gather(-1, block)) & (rows < (starts + lengths).gather(-1, block))
    return torch.where(inside, block, blocks.num)


def pool_blocks_reference(tensor: torch.Tensor, blocks: Blocks, num: int) -> torch.Tensor:
    """Return the mean of the first `num` blocks of [B, S, H, D]: fp32 (fp64) [B, H, num, D].

    Zero where a block is empty. Differentiable.
    """
    compute = torch.promote_types(tensor.dtype, torch.float32)
    x = tensor.transpose(1, 2).to(compute)
    batch, heads, _, size = x.shape
    block = block_of_rows(blocks, x.device).clamp_max(num).expand(batch, heads, -1)
    # Rows that belong to no block may hold anything, NaN too.
    x = x.masked_fill((block == num).unsqueeze(-1), 0.0)
    total = x.new_zeros((batch, heads, num + 1, size))
    total = total.scatter_add(2, block.unsqueeze(-1).expand(-1, -1, -1, size), x)
    lengths = blocks.bounds(x.device)[1][..., :num]
    return total[:, :, :num] / lengths.clamp_min(1).unsqueeze(-1)


def slope_of(
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Blocks,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Return H of the module's docstring, fp32 (fp64) [B, Hkv, D, D].

    Args:
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        blocks: how they are cut.
        keys: means of the first N blocks, [B, Hkv, N, D].
        values: the same of the values.
    """
    compute = torch.promote_types(k.dtype, torch.float32)
    num = keys.shape[2]
    counts = blocks.bounds(k.device)[1][..., :num].to(compute)
    used = block_of_rows(blocks, k.device) < num
    k, v = (x.transpose(1, 2).masked_fill(~used.unsqueeze(-1), 0.0).to(compute) for x in (k, v))
    of_blocks = (keys.to(compute) * counts.unsqueeze(-1)).mT @ values.to(compute)
    total = counts.sum(-1).clamp_min(1)[..., None, None]
    return (k.mT @ v - of_blocks) / total


def add_tail_reference(call: TailCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `out` and `lse` with the tail; see `tail.add_tail`. Differentiable.

    A stretch of rows is computed at a time, for all batches and heads together.
    """
    out, lse, q, pooled, kept, queries, scale = call
    keys, slope = pooled.keys, pooled.slope
    batch, total, heads, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    group = heads // keys.shape[1]
    k, v = (x.to(compute).repeat_interleave(group, dim=1) for x in (keys, pooled.values))
    sizes = pooled.counts.expand(batch, keys.shape[1], -1).repeat_interleave(group, dim=1)
    bias = sizes.to(compute).log()  # -inf for empty blocks
    if slope is not None:
        slope = slope.to(compute).repeat_interleave(group, dim=1)
    rows_at_once = max(1, _SCORES_AT_ONCE // max(1, batch * heads * keys.shape[2]))
    outs, stats = [], []
    for first in range(0, total, rows_at_once):
        rows = slice(first, min(first + rows_at_once, total))
        query = q[:, rows].transpose(1, 2).to(compute)
        exact, seen = out[:, rows].transpose(1, 2).to(compute), lse[:, :, rows].to(compute)
        left = ~_kept_rows(kept, queries, rows, keys.shape[2], q.device)
        # Rows of no block may hold anything, NaN too.
        query = query.masked_fill(~left.any(-1, keepdim=True), 0.0)
        scores = (query @ k.mT * scale + bias.unsqueeze(2)).masked_fill(~left, -torch.inf)
        blind = (scores == -torch.inf).all(-1)
        mass = scores.masked_fill(blind.unsqueeze(-1), 0.0).logsumexp(-1)
        mass = mass.masked_fill(blind, -torch.inf)
        both = torch.logaddexp(seen, mass)
        shift = both.masked_fill(both == -torch.inf, 0.0).unsqueeze(-1)
        weights = (scores - shift).exp()
        num = exact * (seen.unsqueeze(-1) - shift).exp() + weights @ v
        if slope is not None:
            num = num + weights.sum(-1, keepdim=True) * scale * (query @ slope)
        outs.append(num.transpose(1, 2).to(out.dtype))
        stats.append(both.to(lse.dtype))
    return torch.cat(outs, dim=1), torch.cat(stats, dim=2)


def _kept_rows(
    kept: torch.Tensor, queries: Blocks | None, rows: slice, num: int, device: torch.device
) -> torch.Tensor:
    """Return what rows see exactly, bool [B|1, H|1, rows, N]; everything where they see no tail."""
    if queries is None:
        return bits_of(kept[:, :, rows], num)
    block = block_of_rows(queries, device)[:, :, rows]
    padded = torch.nn.functional.pad(kept, (0, 0, 0, 1), value=True)
    leading = broadcast_leading(block, kept)
    index = block.expand(*leading, -1).unsqueeze(-1).expand(-1, -1, -1, num)
    return padded.expand(*leading, -1, -1).gather(2, index)
