"""The authors' own kernel, of the package fastvideo-kernel, where a call fits it.

It wants whole chunks (the last of temporal ones may be short), no text, and one batch entry at a
time. It waits for the GPU several times per call, and attends to everything where a call selects
only own chunks.

Shapes: B batch, L tokens, H heads, D head size.
"""

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention.sparse.vmoba.chunks import ChunkCall

__all__ = ["UPSTREAM", "attend_upstream"]

UPSTREAM = "fastvideo_kernel"


def attend_upstream(call: ChunkCall, *, keeps_own: bool) -> torch.Tensor:
    """Compute a call with the package's kernel.

    Args:
        call: the call.
        keeps_own: whether a call that selects only own chunks must keep to them.

    Returns:
        [B, L, H, D].

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    found = _reasons(call, keeps_own=keeps_own)
    if found:
        raise UnsupportedBackendError(
            f"kernel {UPSTREAM} of vmoba_attn cannot serve this call: {'; '.join(found)}; "
            f"use kernel=auto"
        )
    attend = cast("Callable[..., Any]", importlib.import_module(UPSTREAM).moba_attn_varlen)
    query, rule, order = call.query, call.rule, call.chunks.keys.order
    length, token = query.shape[1], order.order.long()
    ends = torch.tensor([0, length], dtype=torch.int32, device=query.device)
    out = torch.empty_like(query)
    for b in range(query.shape[0]):
        q, k, v = (x[b, token] for x in (query, call.key, call.value))
        out[b, token] = attend(
            q,
            k,
            v,
            ends,
            length,
            order.largest,
            rule.topk or 1,
            select_mode="threshold" if rule.topk is None else "topk",
            simsum_threshold=rule.threshold,
            threshold_type=rule.scope,
        )
    return out


def _reasons(call: ChunkCall, *, keeps_own: bool) -> tuple[str, ...]:
    """Return every reason the kernel cannot serve the call, requirement then actual."""
    layout, order, found = call.layout, call.chunks.keys.order, []
    tokens, chunks = order.num_tokens, call.chunks.num_chunks
    # Chunks of equal length, but for the last one, which lie one after the other.
    if chunks != -(-tokens // order.largest) or not _short_at_end(call):
        found.append(
            f"needs chunks that divide the grid, got {list(order.tile)} in {list(order.grid)}"
        )
    text = max(layout.num_queries, layout.num_keys) - tokens
    if text:
        found.append(f"needs sequences without text, got {text} text tokens")
    if call.keep is not None:
        found.append("has no key mask, and keys are masked")
    head_size, heads, kv_heads = (*call.query.shape[:1:-1], call.key.shape[2])
    if abs(call.scale * head_size**0.5 - 1) > 1e-6:
        found.append(
            f"needs the inverse root of the head size as scale, got {call.scale:.6g} for "
            f"{head_size}"
        )
    if kv_heads != heads:
        found.append(f"needs as many key heads as the {heads}, got {kv_heads}")
    if keeps_own:
        found.append("attends to everything where only own chunks are selected, got keep")
    return tuple(found)


def _short_at_end(call: ChunkCall) -> bool:
    """Whether no chunk is short except the last in time."""
    order = call.chunks.keys.order
    (t, h, w), (tile_t, tile_h, tile_w) = order.grid, order.tile
    spatial = h % tile_h == 0 and w % tile_w == 0
    return spatial and (t % tile_t == 0 or (tile_h, tile_w) == (h, w))
