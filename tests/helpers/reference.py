"""Attention by its definition, in float64: what every kernel is compared with."""

import math

import torch


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale * q k^T + mask) v and the log-sum-exp of its rows.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D]; H is a multiple of Hkv, query head h uses key head h // (H / Hkv).
        value: [B, Sk, Hkv, Dv].
        scale: factor on q k^T.
        causal: row i sees the keys j <= i + Sk - Sq.
        mask: bool (True attends) or additive, broadcastable to [B, H, Sq, Sk], or None.

    Returns:
        The output [B, Sq, H, Dv] and the natural log-sum-exp [B, H, Sq], both float64. A row that
        sees no key gives zeros and -inf.
    """
    q = query.double().transpose(1, 2)
    group = query.shape[2] // key.shape[2]
    k, v = (x.double().transpose(1, 2).repeat_interleave(group, dim=1) for x in (key, value))
    scores = scale * (q @ k.mT)
    if causal:
        num_queries, num_keys = scores.shape[-2:]
        rows = torch.arange(num_queries, device=scores.device)[:, None]
        columns = torch.arange(num_keys, device=scores.device)[None, :]
        scores = scores.masked_fill(columns > rows + num_keys - num_queries, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None].masked_fill(lse[..., None] == -math.inf, 0.0)).exp()
    return (weights @ v).transpose(1, 2), lse


def e4m3_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    by_head: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `reference_attention` on what e4m3 leaves of tensors and of weights.

    Its error against the reference is what e4m3 costs an honest implementation. Tensors are scaled
    for each sample and key head, or as a whole where `by_head` is False; weights, whose largest in
    a row is 1, by 256, as FlashAttention 3 does.
    """
    dims, groups = ((1, 2, 3), key.shape[2]) if by_head else ((0, 1, 2, 3), 1)
    q, k, v = (_rounded_to_e4m3(x, dims, groups) for x in (query, key, value))
    lse = reference_attention(q, k, v, scale=scale, causal=causal)[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = scale * (q @ k.mT)
    if causal:
        allowed = torch.ones_like(scores[0, 0]).tril(scores.shape[3] - scores.shape[2]).bool()
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    rounded = (weights * 256).to(torch.float8_e4m3fn).double() / 256
    out = (rounded @ v) / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return out.transpose(1, 2), lse


def _rounded_to_e4m3(x: torch.Tensor, dims: tuple[int, ...], groups: int) -> torch.Tensor:
    """Return [B, S, H, D] in float64, rounded with a scale for `dims` of each group of heads."""
    parts = []
    for part in x.double().chunk(groups, dim=2):
        factor = 448 / part.abs().amax(dims, keepdim=True).clamp_min(1e-300)
        parts.append((part * factor).float().to(torch.float8_e4m3fn).double() / factor)
    return torch.cat(parts, dim=2)


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `reference_attention` with every step in the inputs' own dtype.

    Its error against float64 is what the dtype costs an honest implementation, and so the measure
    of what a kernel may err.
    """
    q = query.transpose(1, 2)
    group = query.shape[2] // key.shape[2]
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (key, value))
    scores = (q @ k.mT) * scale
    if causal:
        num_queries, num_keys = scores.shape[-2:]
        allowed = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(num_keys - num_queries)
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), scores.logsumexp(dim=-1)
