"""A Ulysses call in chunks of heads, so that exchanges run behind the attention of other chunks.

Everything is packed and sent at once, chunk by chunk; attention of a chunk waits for its own heads
alone, and its output leaves while the next chunk runs.

Whether that wins depends on the kernel: one that fills the GPU with as many programs as it has
processors waits for the slowest of them, and exchanges take processors away.

Shapes: B batch, S tokens of a rank, H heads, D head size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from multimodal_gen.runtime.distributed.exchange import TokensUnderWay
from multimodal_gen.runtime.distributed.timing import attending, recording
from multimodal_gen.runtime.layers.attention.backends.sparse import SparseImpl
from multimodal_gen.runtime.layers.attention.binding import Bound, Route
from multimodal_gen.runtime.layers.attention.observing import ObservingImpl
from multimodal_gen.runtime.layers.attention.remembering import RememberingImpl
from multimodal_gen.runtime.layers.attention.split_call import HeadsOfRank, SplitCall
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
    if query.device.type == "cuda" and not isinstance(bound.impl, SparseImpl):
        leaving = _attend_in_turns(bound, chunks, coming, query.device)
    else:
        leaving = []
        for chunk, arrived in zip(chunks, coming, strict=True):
            layer.hold_heads_from(chunk.heads[0])
            heads = arrived()
            with attending(query.device):
                leaving.append(_attend(bound, chunk, heads))
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    for tokens in leaving:
        tokens.arrive_in(out)
    return out


def _attend_in_turns(
    bound: Bound,
    chunks: list[SplitCall],
    coming: list[Callable[[], HeadsOfRank]],
    device: torch.device,
) -> list[TokensUnderWay]:
    """Attend on two streams in turns, so that a chunk fills the GPU while the last one's ends.

    Sparse methods do that with their own passes. What is made here lives until the current stream
    has waited for the other one.
    """
    here, beside = torch.cuda.current_stream(device), _stream_beside(device)
    beside.wait_stream(here)
    first = coming[0]()
    leaving = []
    # Regions of two streams overlap: this is one.
    with attending(device), recording(None):
        for i, (chunk, arrived) in enumerate(zip(chunks, coming, strict=True)):
            with torch.cuda.stream(beside if i % 2 else here):
                leaving.append(_attend(bound, chunk, arrived() if i else first))
        here.wait_stream(beside)
    return leaving


def _attend(bound: Bound, chunk: SplitCall, heads: HeadsOfRank) -> TokensUnderWay:
    """Return the output of a chunk, under way to the ranks whose tokens it is."""
    q, k, v, _ = chunk.joined(heads)
    return chunk.start_tokens(bound.impl.forward(q, k, v, current_forward_context()))


@lru_cache(maxsize=16)
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Return a stream; cached, because memory belongs to the stream it was made for."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
