"""Clusters of queries and keys: which attend to which, and the same as blocks of the engine.

Shapes: B batch, N tokens, H query heads, Hkv key heads, C, Cq and Ck clusters, P pieces of
clusters, D head size.
"""

from typing import NamedTuple

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks

# Rows of a query block, and keys of a key block; the engine merges key blocks that adjoin.
ROWS = 128
# Rows of a tile of the kernel for SM90: three consumers of 64.
TILE_ROWS = 192


class Groups(NamedTuple):
    """One side of the attention, cluster by cluster.

    Attributes:
        order: int32 [B, H, N], the tokens of the sequence by cluster.
        starts: int32 [B, H, C], where in `order` a cluster begins.
        counts: int32 [B, H, C], its tokens. What no cluster covers is left out.
    """

    order: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    def heads(self, heads: slice) -> "Groups":
        """Return the same for some of the heads."""
        return Groups(*(x[:, heads] for x in self))


class Pieces(NamedTuple):
    """Clusters cut into pieces of at most so many tokens; those that are not needed are empty.

    Attributes:
        starts: int32 [B, H, P], where in the order a piece begins.
        lengths: int32 [B, H, P].
        cluster: int32 [B, H, P], whose piece it is.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    cluster: torch.Tensor

    def heads(self, heads: slice) -> "Pieces":
        """Return the same for some of the heads."""
        return Pieces(*(x[:, heads] for x in self))


def cut(groups: Groups, size: int, *, multiple: int | None = None) -> Pieces:
    """Cut clusters into as few pieces as there must be; P depends on shapes only.

    Args:
        groups: the clusters.
        size: tokens of a piece at most.
        multiple: make the pieces of a cluster as equal as multiples of so many tokens allow; None
            for whole pieces and one that is left. Divides `size`.
    """
    unit = multiple or size
    starts, counts = groups.starts, groups.counts
    batch, heads, clusters = counts.shape
    num = clusters + groups.order.shape[2] // size
    units = (counts + (unit - 1)) // unit
    pieces = (counts + (size - 1)) // size
    ends = pieces.cumsum(2, dtype=torch.int32)
    at = torch.arange(num, dtype=torch.int32, device=counts.device)
    at = at.expand(batch, heads, -1).contiguous()
    cluster = torch.searchsorted(ends, at, right=True).clamp_max(clusters - 1)
    place = at - (ends - pieces).gather(2, cluster)
    units, pieces, counts = (x.gather(2, cluster) for x in (units, pieces, counts))
    parts = pieces.clamp_min(1)
    # Products fit into int32 up to 46,000 * sqrt(size * unit) tokens of a cluster.
    first, last = (torch.minimum(i * units // parts * unit, counts) for i in (place, place + 1))
    lengths = torch.where(place < pieces, last - first, 0)
    begin = torch.where(lengths > 0, starts.gather(2, cluster) + first, 0)
    return Pieces(starts=begin, lengths=lengths, cluster=cluster.int())


def cluster_plan(
    queries: Groups,
    keys: Groups,
    cluster_mask: torch.Tensor,
    *,
    q_size: int = ROWS,
    kv_size: int = ROWS,
) -> BlockPlan:
    """Return the plan over tokens in the order of their clusters; does not wait for the device.

    Args:
        queries: clusters of queries of H heads.
        keys: clusters of keys of Hkv heads.
        cluster_mask: bool [B, H, Cq, Ck], which clusters attend to which.
        q_size: tokens of a block of queries at most.
        kv_size: tokens of a block of keys at most.
    """
    q, kv = cut(queries, q_size), cut(keys, kv_size)
    group = cluster_mask.shape[1] // keys.counts.shape[1]
    kv_starts, kv_lengths, kv_cluster = (x.repeat_interleave(group, dim=1) for x in kv)
    kept = cluster_mask.gather(
        2, q.cluster.long().unsqueeze(3).expand(-1, -1, -1, cluster_mask.shape[3])
    )
    pieces = kept.gather(3, kv_cluster.long().unsqueeze(2).expand(-1, -1, kept.shape[2], -1))
    pieces &= (q.lengths > 0).unsqueeze(3) & (kv_lengths > 0).unsqueeze(2)
    return BlockPlan.from_map(
        pieces,
        Blocks.ragged(q.starts, q.lengths, total=queries.order.shape[2], size=q_size),
        Blocks.ragged(kv_starts, kv_lengths, total=keys.order.shape[2], size=kv_size),
    )


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
    if group > 1:
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
    cluster_mask = before <= top_p
    cluster_mask[..., :min_count].fill_(True)
    return torch.empty_like(cluster_mask).scatter_(3, index, cluster_mask)


def kept_pairs(
    cluster_mask: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Return how many pairs of tokens are kept; does not wait for the device.

    Args:
        cluster_mask: bool [B, H, Cq, Ck].
        queries: queries of each cluster, int32 [B, H, Cq].
        keys: keys of each cluster, int32 [B, Hkv, Ck].

    Returns:
        0-d float64, summed over batch and heads.
    """
    group = cluster_mask.shape[1] // keys.shape[1]
    keys = (keys.repeat_interleave(group, dim=1) if group > 1 else keys).float()
    # Sums of whole numbers below 2^24 times few bits: exact up to 16 million keys.
    seen = (cluster_mask.float() @ keys.unsqueeze(3)).squeeze(3)
    return (seen.double() * queries).sum()
