"""A Ulysses call in chunks of heads, so that exchanges run behind the attention of other chunks.

Everything is packed and sent at once, chunk by chunk; attention of a chunk waits for its own heads
alone, and its output leaves while the next chunk runs.

Shapes: B batch, S tokens of a rank, H heads, D head size.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from multimodal_gen.runtime.distributed.timing import attending
from multimodal_gen.runtime.layers.attention.binding import Bound, Route
from multimodal_gen.runtime.layers.attention.observing import ObservingImpl
from multimodal_gen.runtime.layers.attention.remembering import RememberingImpl
from multimodal_gen.runtime.layers.attention.split_call import SplitCall
from multimodal_gen.runtime.managers.forward_context import current_forward_context

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.base import AttentionLayer

__all__ = ["attend_in_chunks", "num_chunks"]


def num_chunks(call: SplitCall, route: Route) -> int:
    """Return how many chunks a call without mask, gate or gradient takes; 1 for none.

    What an implementation keeps from call to call is about all heads of the rank; key heads that
    several query heads read would travel more than once.
    """
    keeps = isinstance(route.primary.impl, (ObservingImpl, RememberingImpl))
    if keeps or route.observers or call.shares.num_heads != call.shares.num_kv_heads:
        return 1
    return min(call.groups.head_chunks, *(stop - start for start, stop in call.shares.queries))


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
    context = current_forward_context()
    bound.calls += 1
    leaving = []
    for chunk, heads in zip(chunks, coming, strict=True):
        layer.hold_heads_from(chunk.heads[0])
        q, k, v, _ = chunk.joined(heads())
        with attending(query.device):
            part = bound.impl.forward(q, k, v, context)
        leaving.append(chunk.start_tokens(part))
    out = part.new_empty((*query.shape[:3], value.shape[3]))
    for tokens in leaving:
        tokens.arrive_in(out)
    return out
