"""Which clusters of keys a cluster of queries attends to.

Shapes: B batch, H query heads, Hkv key heads, Cq and Ck clusters, D head size.
"""

import torch

from multimodal_gen.errors import UsageError

__all__ = ["cluster_weights", "kept_clusters", "kept_pairs"]


def cluster_weights(
    queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Return the attention that queries like a centroid would give to every cluster of keys.

    With n_j keys in cluster j, its weight is n_j exp(scale q.c_j), normalised over the clusters.

    Args:
        queries: centroids of queries, fp32 [B, H, Cq, D].
        keys: centroids of keys, fp32 [B, Hkv, Ck, D].
        counts: keys of each cluster, int32 [B, Hkv, Ck].
        scale: factor of the scores.

    Returns:
        fp32 [B, H, Cq, Ck]; 0 for empty clusters.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, counts = (x.repeat_interleave(group, dim=1) for x in (keys, counts))
    scores = queries @ keys.transpose(2, 3) * scale
    return (scores + counts.float().log().unsqueeze(2)).softmax(3)


def kept_clusters(weights: torch.Tensor, *, top_p: float, min_count: int) -> torch.Tensor:
    """Return which clusters are kept: the heaviest ones, until they carry `top_p`.

    The cluster that reaches `top_p` is kept, and so are the heaviest `min_count` ones. Of equally
    heavy clusters the first comes first.

    Args:
        weights: fp32 [B, H, Cq, Ck], as `cluster_weights` returns them.
        top_p: weight to keep, in [0, 1]; 1 keeps everything.
        min_count: clusters to keep at least.

    Returns:
        bool [B, H, Cq, Ck].

    Raises:
        UsageError: `top_p` or `min_count` is out of range.
    """
    if not 0.0 <= top_p <= 1.0:
        raise UsageError(f"`top_p` must be in [0, 1], got {top_p}")
    if min_count < 0:
        raise UsageError(f"`min_count` must be at least 0, got {min_count}")
    if top_p == 1.0:  # the sum of all but the last may round to more than 1
        return torch.ones_like(weights, dtype=torch.bool)
    ranked, index = weights.sort(dim=3, descending=True, stable=True)
    before = ranked.cumsum(3) - ranked
    keep = before <= top_p
    keep[..., :min_count] = True
    return torch.empty_like(keep).scatter_(3, index, keep)


def kept_pairs(keep: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return how many pairs of tokens are kept; does not wait for the device.

    Args:
        keep: bool [B, H, Cq, Ck].
        queries: queries of each cluster, int32 [B, H, Cq].
        keys: keys of each cluster, int32 [B, Hkv, Ck].

    Returns:
        0-d float64, summed over batch and heads.
    """
    keys = keys.repeat_interleave(keep.shape[1] // keys.shape[1], dim=1).float()
    # Sums of whole numbers below 2^24 times few bits: exact up to 16 million keys.
    seen = (keep.float() @ keys.unsqueeze(3)).squeeze(3)
    return (seen.double() * queries).sum()
