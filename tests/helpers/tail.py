"""Block-sparse attention with a pooled tail, token by token in float64, and what kernels may err.

Shapes: B batch, Sq and Sk tokens, H heads, D head size.
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from tests.helpers.block_plans import block_ranges, dense_mask


def _token_means(x: torch.Tensor, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the mean of each token's block, [S, D]; zero for tokens in none."""
    means = torch.zeros_like(x)
    for tokens in blocks:
        if len(tokens):
            means[list(tokens)] = x[list(tokens)].mean(0)
    return means


def pooled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    blocks_of: Callable[[int, int], Sequence[Sequence[int]]] | Sequence[Sequence[int]],
    *,
    scale: float,
    rows: Sequence[int] | None = None,
    token_mask: torch.Tensor | None = None,
    first_order: bool = False,
) -> torch.Tensor:
    """Return attention to what a mask keeps and to means of the blocks that it does not, float64.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        mask: bool [B, H, Sq, Sk], what is attended to exactly.
        blocks_of: positions of the tokens of each block that is pooled, for all or of a batch
            entry and a head.
        scale: factor of the scores.
        rows: queries that see means; all when None.
        token_mask: bool [B, Sk], keys that count; None for all.
        first_order: whether values follow keys inside of blocks.
    """
    out, group = torch.zeros_like(q, dtype=torch.float64), q.shape[2] // k.shape[2]
    seeing = torch.zeros(q.shape[1], 1, dtype=torch.bool)
    seeing[slice(None) if rows is None else list(rows)] = True
    for b, h in product(range(q.shape[0]), range(q.shape[2])):
        blocks = blocks_of(b, h) if callable(blocks_of) else blocks_of
        blocks = [[t for t in x if token_mask is None or token_mask[b, t]] for x in blocks]
        head = (q[b, :, h], k[b, :, h // group], v[b, :, h // group], mask[b, h], seeing)
        out[b, :, h] = _one_head(*head, blocks, scale=scale, first_order=first_order)[0]
    return out


def _one_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    exact: torch.Tensor,
    seeing: torch.Tensor,
    blocks: Sequence[Sequence[int]],
    *,
    scale: float,
    first_order: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out [Sq, D], lse [Sq] and the sum of weights times largest magnitudes, [Sq].

    Args:
        query: [Sq, D].
        key: [Sk, D].
        value: [Sk, D].
        exact: bool [Sq, Sk], what is attended to exactly.
        seeing: bool [Sq, 1], rows that see means.
        blocks: positions of the tokens of each block that is pooled.
        scale: factor of the scores.
        first_order: whether values follow keys inside of blocks.
    """
    query, key, value = query.double(), key.double(), value.double()
    mean_k, mean_v = (_token_means(x, blocks) for x in (key, value))
    pooled = torch.zeros(len(key), dtype=torch.bool, device=key.device)
    pooled[[t for tokens in blocks for t in tokens]] = True
    tail = ~exact & pooled & seeing
    scores = torch.where(exact, query @ key.T, query @ mean_k.T) * scale
    scores = scores.masked_fill(~exact & ~tail, -torch.inf)
    seen, lse = (exact | tail).any(-1), scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(~seen, 0.0)[:, None]).exp()
    out, magnitude = (weights * exact) @ value + (weights * tail) @ mean_v, value.abs().amax(-1)
    if first_order:
        slope = ((key - mean_k)[pooled].T @ value[pooled]) / pooled.sum().clamp_min(1)
        out = out + (weights * tail).sum(-1, keepdim=True) * scale * (query @ slope)
        magnitude = magnitude + (scale * (query.abs() @ slope.abs())).max()
    return torch.where(seen[:, None], out, 0.0), lse, weights @ magnitude


def naive_tail(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    num: int | None = None,
    first_order: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, lse and how far an output may be from zero, by the definition, in float64.

    Every token of a block that a row does not keep has the mean key and the mean value of its
    block. The last one is the sum of weights times largest magnitudes, [B, Sq, H, 1].
    """
    batch, _, heads, _ = q.shape
    num = plan.kv.num if num is None else num
    mask, group = dense_mask(plan, batch, heads), heads // k.shape[2]
    out, lse = torch.zeros_like(q, dtype=torch.float64), mask.new_zeros(mask.shape[:3]).double()
    size = out.new_zeros((*out.shape[:3], 1))
    for b, h in product(range(batch), range(heads)):
        blocks = [range(*ends) for ends in block_ranges(plan.kv, b, h)[:num]]
        owned = torch.zeros(q.shape[1], 1, dtype=torch.bool, device=q.device)
        for first, last in block_ranges(plan.q, b, h):
            owned[first:last] = True
        head = (q[b, :, h], k[b, :, h // group], v[b, :, h // group], mask[b, h], owned)
        found = _one_head(*head, blocks, scale=scale, first_order=first_order)
        out[b, :, h], lse[b, h], size[b, :, h, 0] = found
    return out, lse, size


def assert_tail_within_error_budget(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    num: int | None = None,
    first_order: bool = False,
) -> None:
    """Raise AssertionError where attention with a tail errs more than roundings explain.

    Weights, the exact part's output, the result, pooled keys and pooled values are rounded to the
    dtype: an eps of the output for four of them; a pooled key that is off by half an eps moves a
    score by that share of |q| |k|, and a score in fp32 is off by sqrt(D) + 3 of its roundings.
    """
    exact, exact_lse, size = naive_tail(
        q, k, v, plan, scale=scale, num=num, first_order=first_order
    )
    assert out.dtype == q.dtype
    assert out.isfinite().all()
    blind = exact_lse == -torch.inf
    assert (lse[blind] == -torch.inf).all()
    assert not out.transpose(1, 2)[blind].any()
    eps, fp32 = torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps
    largest = scale * q.double().norm(dim=-1, keepdim=True) * k.double().norm(dim=-1).max()
    # A row in no block may hold anything.
    largest = largest.nan_to_num(0.0)
    step = eps * 0.5 + fp32 * (q.shape[3] ** 0.5 + 3)
    budget = (5 * eps + 2 * step * largest) * size
    error = (out.double() - exact).abs().amax(-1, keepdim=True)
    worst = (error - budget).max()
    assert worst <= 0, f"an output errs by {float(worst):.3e} more than its budget"
    lse_budget = 2 * eps + 2 * step * largest[..., 0].transpose(1, 2)
    excess = ((lse.double() - exact_lse).abs() - lse_budget)[~blind]
    assert not len(excess) or excess.max() <= 0, "a log-sum-exp errs more than its budget"
