"""Clusters as blocks of the block-sparse engine.

Shapes: B batch, H heads, N tokens, C clusters, P pieces of clusters.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks

__all__ = ["ROWS", "TILE_ROWS", "Groups", "Pieces", "cluster_plan", "cut"]

# Rows of a query block, and keys of a key block; the engine merges key blocks that adjoin.
ROWS = 128
# Rows of a tile of the kernel for SM90: three consumers of 64.
TILE_ROWS = 192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
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
        order, starts, counts = (x[:, heads] for x in (self.order, self.starts, self.counts))
        return Groups(order=order, starts=starts, counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
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
        starts, lengths, cluster = (x[:, heads] for x in (self.starts, self.lengths, self.cluster))
        return Pieces(starts=starts, lengths=lengths, cluster=cluster)


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
    ends = pieces.cumsum(2)
    at = torch.arange(num, device=counts.device).expand(batch, heads, -1).contiguous()
    cluster = torch.searchsorted(ends, at, right=True).clamp_max(clusters - 1)
    place = at - (ends - pieces).gather(2, cluster)
    units, pieces = units.gather(2, cluster), pieces.gather(2, cluster)
    first, last = (
        torch.minimum(i * units // pieces.clamp_min(1) * unit, counts.gather(2, cluster))
        for i in (place, place + 1)
    )
    lengths = torch.where(place < pieces, last - first, 0)
    begin = torch.where(lengths > 0, starts.gather(2, cluster) + first, 0)
    return Pieces(starts=begin.int(), lengths=lengths.int(), cluster=cluster.int())


def cluster_plan(queries: Groups, keys: Groups, keep: torch.Tensor) -> BlockPlan:
    """Return the plan over tokens in the order of their clusters; does not wait for the device.

    Args:
        queries: clusters of queries of H heads.
        keys: clusters of keys of Hkv heads.
        keep: bool [B, H, Cq, Ck], which clusters attend to which.
    """
    q, kv = cut(queries, ROWS), cut(keys, ROWS)
    group = keep.shape[1] // keys.counts.shape[1]
    kv_starts, kv_lengths, kv_cluster = (
        x.repeat_interleave(group, dim=1) for x in (kv.starts, kv.lengths, kv.cluster)
    )
    rows = keep.gather(2, q.cluster.long().unsqueeze(3).expand(-1, -1, -1, keep.shape[3]))
    pieces = rows.gather(3, kv_cluster.long().unsqueeze(2).expand(-1, -1, rows.shape[2], -1))
    pieces &= (q.lengths > 0).unsqueeze(3) & (kv_lengths > 0).unsqueeze(2)
    return BlockPlan.from_map(
        pieces,
        Blocks.ragged(q.starts, q.lengths, total=queries.order.shape[2], size=ROWS),
        Blocks.ragged(kv_starts, kv_lengths, total=keys.order.shape[2], size=ROWS),
    )
