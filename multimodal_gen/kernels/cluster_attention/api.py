"""Attention of clusters to clusters: into cluster order, block-sparse attention, and back.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size.
"""

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.cluster_attention.plan import Groups, cluster_plan
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens

__all__ = ["Groups", "cluster_attention"]


def cluster_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Groups,
    keys: Groups,
    keep: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    kernel: str = "auto",
) -> None:
    """Write the attention of clustered queries into `out`; does not wait for the device.

    Args:
        q: [B, Sq, H, D], any strides.
        k: [B, Sk, Hkv, D], any strides; query head h uses key head h // (H / Hkv).
        v: [B, Sk, Hkv, D], any strides.
        queries: clusters of queries, of H heads.
        keys: clusters of keys, of Hkv heads.
        keep: bool [B, H, Cq, Ck], which clusters attend to which.
        out: [B, Sq, H, D]; rows of queries in `queries.order` are written.
        scale: factor of the scores.
        kernel: provider of the block-sparse engine.

    Raises:
        UsageError: the clusters do not fit the tensors or the map.
        UnsupportedBackendError: the kernel asked for cannot serve this call; lists the reasons.
    """
    _validate(q, k, queries, keys, keep)
    plan = cluster_plan(queries, keys, keep)
    (sorted_q,) = gather_tokens((q,), queries.order)
    sorted_k, sorted_v = gather_tokens((k, v), keys.order)
    found = block_sparse_attention(sorted_q, sorted_k, sorted_v, plan, scale=scale, kernel=kernel)
    assert isinstance(found, torch.Tensor)
    scatter_tokens(found, queries.order, out)


def _validate(
    q: torch.Tensor, k: torch.Tensor, queries: Groups, keys: Groups, keep: torch.Tensor
) -> None:
    for name, groups, tensor in (("queries", queries, q), ("keys", keys, k)):
        leading = (tensor.shape[0], tensor.shape[2])
        if tuple(groups.counts.shape[:2]) != leading:
            raise UsageError(
                f"`{name}` must be clusters of {leading[0]} entries and {leading[1]} heads, got "
                f"{list(groups.counts.shape[:2])}"
            )
    wanted = (*queries.counts.shape, keys.counts.shape[2])
    if keep.dtype != torch.bool or tuple(keep.shape) != wanted:
        raise UsageError(f"`keep` must be bool {list(wanted)}, got {keep.dtype} {list(keep.shape)}")
