"""Cluster attention over a share of the heads at a time, which bounds the memory of the copies.

Shapes: B batch, S tokens, H query heads, Hkv key heads, D head size.
"""

from functools import partial

import torch

from multimodal_gen.kernels.cluster_attention.api import cluster_attention, query_pieces
from multimodal_gen.runtime.layers.attention.backends.tiled import heads_at_once, run_in_turns
from multimodal_gen.runtime.layers.attention.svg2.clusters import ClusteredCall

__all__ = ["attend_clusters"]


def attend_clusters(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: ClusteredCall,
    out: torch.Tensor,
    *,
    scale: float,
    kernel: str,
) -> None:
    """Write the attention of the video's queries into `out`; does not wait for the device.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        call: what attends to what.
        out: [B, Sq, H, D].
        scale: factor of the scores.
        kernel: provider of the block-sparse engine.
    """
    kv_heads = key.shape[2]
    group = query.shape[2] // kv_heads
    pieces = query_pieces(call.queries)

    def attend(kv: slice) -> None:
        heads = slice(kv.start * group, kv.stop * group)
        cluster_attention(
            query[:, :, heads],
            key[:, :, kv],
            value[:, :, kv],
            call.queries.heads(heads),
            call.keys.heads(kv),
            call.keep[:, heads],
            out[:, :, heads],
            scale=scale,
            kernel=kernel,
            pieces=pieces.heads(heads),
        )

    calls = [partial(attend, kv) for kv in heads_at_once(query, out, kv_heads)]
    run_in_turns(calls, query.device)
