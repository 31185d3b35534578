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

from multimodal_gen.kernels.select.row_reference import Rule
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.layers.attention.backends.engine import refuse_upstream
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall
from multimodal_gen.runtime.layers.attention.sparse.upstream import call_reasons

UPSTREAM = "fastvideo_kernel"


def attend_upstream(
    call: SparseCall, order: TileOrder, rule: Rule, *, keeps_own: bool, backend: str
) -> torch.Tensor:
    """Compute a call with the package's kernel.

    Args:
        call: the call.
        order: the chunks of its video.
        rule: how queries choose among them.
        keeps_own: whether a call that selects only own chunks must keep to them.
        backend: the method, for messages.

    Returns:
        [B, L, H, D].

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    found = call_reasons(call)
    # Chunks of equal length, but for the last one, which lie one after the other.
    one_after_the_other = len(order.starts) == -(-order.num_tokens // order.largest)
    if not (one_after_the_other and _short_at_end(order)):
        found.insert(
            0, f"needs chunks that divide the grid, got {list(order.tile)} in {list(order.grid)}"
        )
    if keeps_own:
        found.append("attends to everything where only own chunks are selected, got keep")
    refuse_upstream(found, kernel=UPSTREAM, backend=backend)
    attend = cast("Callable[..., Any]", importlib.import_module(UPSTREAM).moba_attn_varlen)
    query, token = call.query, order.order.long()
    length = query.shape[1]
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


def _short_at_end(order: TileOrder) -> bool:
    """Whether no chunk is short except the last in time."""
    (t, h, w), (tile_t, tile_h, tile_w) = order.grid, order.tile
    spatial = h % tile_h == 0 and w % tile_w == 0
    return spatial and (t % tile_t == 0 or (tile_h, tile_w) == (h, w))
