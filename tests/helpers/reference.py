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
