"""A Ulysses call in chunks of heads, so that exchanges run behind the attention of other chunks.

Everything is packed and sent at once, chunk by chunk; attention of a chunk waits for its own heads
alone, and its output leaves while the next chunk runs.

Sliding tiles gain a little on four GPUs. Dense attention of our own kernel takes longer by about
what is hidden, and that of FlashAttention 3 by far more.

Shapes: B batch, S tokens of a rank, H heads, D head size.
"""

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from multimodal_gen.runtime.distributed.timing import attending
from multimodal_gen.runtime.layers.attention.binding import Bound, Route
from multimodal_gen.runtime.layers.attention.observing import ObservingImpl
from multimodal_gen.runtime.layers.attention.remembering import RememberingImpl
from multimodal_gen.runtime.layers.attention.split_call import SplitCall
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.base import AttentionLayer

__all__ = ["attend_in_chunks", "num_chunks"]

# Chunks with which a forward on four GPUs was faster than with one, by the rows of
# scripts/bench/results/parallel.csv; what is not here was slower, or was not measured.
_MEASURED = MappingProxyType({AttentionBackendEnum.SLIDING_TILE_ATTN: 2})


def num_chunks(call: SplitCall, route: Route) -> int:
    """Return how many chunks a call without mask, gate or gradient takes; 1 for none.

    What an implementation keeps from call to call is about all heads of the rank; key heads that
    several query heads read would travel more than once.
    """
    bound, asked = route.primary, call.groups.head_chunks
    keeps = isinstance(bound.impl, (ObservingImpl, RememberingImpl))
    if keeps or route.observers or call.shares.num_heads != call.shares.num_kv_heads:
        return 1
    if asked is None:
        asked = _MEASURED.get(bound.selection.backend, 1)
    return min(asked, *(stop - start for start, stop in call.shares.queries))


def attend_in_chunks(
    layer: "AttentionLayer",
    bound: Bound,
    call: SplitCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Return attention of this rank's tokens, as one call of the layer.

    Args:
        layer: whose call it is.
        bound: what computes it.
        call: how the tokens are split; there is no ring.
        query: [B, prefix + S + suffix, H, D].
        key: [B, prefix + in_front + S + suffix, H, D].
        value: [B, prefix + in_front + S + suffix, H, Dv].
        count: number of chunks, at most the heads of a rank.

    Returns:
        [B, prefix + S + suffix, H, Dv].
    """
    chunks = [replace(call, shares=shares) for shares in call.shares.in_chunks(count)]
    coming = [chunk.start_heads(query, key, value) for chunk in chunks]
    bound.calls += 1
    context = current_forward_context()
    leaving = []
    for chunk, arrived in zip(chunks, coming, strict=True):
        layer.hold_heads_from(chunk.heads[0])
        q, k, v, _ = chunk.joined(arrived())
        with attending(query.device):
            part = bound.impl.forward(q, k, v, context)
        leaving.append(chunk.start_tokens(part))
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    for tokens in leaving:
        tokens.arrive_in(out)
    return out
