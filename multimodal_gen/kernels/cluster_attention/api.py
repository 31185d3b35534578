"""Attention of clusters to clusters: into cluster order, block-sparse attention, and back.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size.
"""

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail import add_tail, pool_blocks
from multimodal_gen.kernels.cluster_attention.plan import (
    ROWS,
    TILE_ROWS,
    Groups,
    Pieces,
    cluster_plan,
    cut,
)
from multimodal_gen.kernels.engine import (
    AUTO,
    BLOCK_SPARSE,
    CLUSTERS,
    KernelChoice,
    Request,
    choose,
    records_gradient,
    serves,
)
from multimodal_gen.kernels.tensors import loadable, place_of
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens


def cluster_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Groups,
    keys: Groups,
    cluster_mask: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    kernel: KernelChoice = AUTO,
    pieces: Pieces | None = None,
    num_pooled: int = 0,
) -> None:
    """Write the attention of clustered queries into `out`; does not wait for the device.

    Args:
        q: [B, Sq, H, D], any strides.
        k: [B, Sk, Hkv, D], any strides; query head h uses key head h // (H / Hkv).
        v: [B, Sk, Hkv, D], any strides.
        queries: clusters of queries, of H heads.
        keys: clusters of keys, of Hkv heads.
        cluster_mask: bool [B, H, Cq, Ck], which clusters attend to which.
        out: [B, Sq, H, D]; rows of queries in `queries.order` are written.
        scale: factor of the scores.
        kernel: what must run of the block-sparse kernels, "auto" for the fastest that can, or what
            was selected for a layer. In place of gluon, a kernel for clusters runs where it can and
            no gradient is recorded.
        pieces: `query_pieces(queries)`, where it is known already.
        num_pooled: of so many of the first clusters of keys, those that a cluster of queries does
            not attend to count by the means of their keys and values.

    Raises:
        UsageError: the clusters do not fit the tensors or the map.
        UnsupportedBackendError: the kernel asked for cannot serve this call; lists the reasons.
    """
    _validate(q, k, queries, keys, cluster_mask)
    (sorted_q,) = gather_tokens((q,), queries.order)
    sorted_k, sorted_v = gather_tokens((k, v), keys.order)
    request = Request(
        *place_of(q.device),
        q.dtype,
        q.shape[3],
        q_size=ROWS,
        kv_size=ROWS,
        ragged=True,
        unaligned=not loadable(sorted_q, sorted_k, sorted_v),
        backward=records_gradient(q, k, v),
        num_kv=cluster_mask.shape[3],
        device=q.device.index,
    )
    kernel = choose(BLOCK_SPARSE, kernel, request)
    as_clusters = serves(CLUSTERS, kernel, request)
    with_tail = num_pooled > 0
    if as_clusters:
        from multimodal_gen.kernels.cluster_attention.cluster_attention_kernel import attend

        size, pieces = TILE_ROWS, pieces or query_pieces(queries)
        found, lse = attend(
            sorted_q,
            sorted_k,
            sorted_v,
            pieces,
            keys,
            cluster_mask,
            scale=scale,
            return_lse=with_tail,
        )
    else:
        size, pieces = ROWS, cut(queries, ROWS) if with_tail else None
        plan = _plan_for(kernel, queries, keys, cluster_mask)
        result = block_sparse_attention(
            sorted_q, sorted_k, sorted_v, plan, scale=scale, kernel=kernel, return_lse=with_tail
        )
        found, lse = (result, None) if isinstance(result, torch.Tensor) else result
    if pieces is not None and lse is not None:
        rows = Blocks.ragged(pieces.starts, pieces.lengths, total=sorted_q.shape[1], size=size)
        of = pieces.cluster.long().unsqueeze(3).expand(-1, -1, -1, num_pooled)
        kept = cluster_mask[..., :num_pooled].gather(2, of)
        num_keys = sorted_k.shape[1]
        clusters = Blocks.ragged(keys.starts, keys.counts, total=num_keys, size=num_keys)
        pooled = pool_blocks(sorted_k, sorted_v, clusters, num_pooled)
        found, _ = add_tail(found, lse, sorted_q, pooled, kept, rows, scale=scale, kernel=kernel)
    scatter_tokens(found, queries.order, out)


def _plan_for(kernel: str, queries: Groups, keys: Groups, cluster_mask: torch.Tensor) -> BlockPlan:
    """Return the plan; for the reference of small blocks, as it computes what fills them up too."""
    if kernel != "reference":
        return cluster_plan(queries, keys, cluster_mask)
    q_size, kv_size = (
        min(-(-2 * groups.order.shape[2] // max(groups.counts.shape[2], 1)), ROWS)
        for groups in (queries, keys)
    )
    return cluster_plan(queries, keys, cluster_mask, q_size=max(q_size, 1), kv_size=max(kv_size, 1))


def query_pieces(queries: Groups) -> Pieces:
    """Return what the kernel for clusters on SM90 takes as tiles."""
    return cut(queries, TILE_ROWS, multiple=TILE_ROWS // 3)


def _validate(
    q: torch.Tensor, k: torch.Tensor, queries: Groups, keys: Groups, cluster_mask: torch.Tensor
) -> None:
    for name, groups, tensor in (("queries", queries, q), ("keys", keys, k)):
        leading = (tensor.shape[0], tensor.shape[2])
        if tuple(groups.counts.shape[:2]) != leading:
            raise UsageError(
                f"`{name}` must be clusters of {leading[0]} entries and {leading[1]} heads, got "
                f"{list(groups.counts.shape[:2])}"
            )
    wanted = (*queries.counts.shape, keys.counts.shape[2])
    if cluster_mask.dtype != torch.bool or tuple(cluster_mask.shape) != wanted:
        raise UsageError(
            f"`cluster_mask` must be bool {list(wanted)}, got {cluster_mask.dtype} "
            f"{list(cluster_mask.shape)}"
        )
