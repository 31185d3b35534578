"""The authors' own attention, of the package svg, where a call fits it.

It takes the clusters that were chosen here: queries and keys in cluster order, the sizes of the
clusters and the map between them.
"""

import importlib

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.layers.attention.svg2.clusters import ClusteredCall

__all__ = ["attend_upstream"]


def _reasons(
    query: torch.Tensor, key: torch.Tensor, call: ClusteredCall, *, masked: bool, scale: float
) -> tuple[str, ...]:
    """Return every reason the package cannot serve a call, requirement then actual."""
    found = []
    size, video = query.shape[3], call.queries.order.shape[2]
    if key.shape[1] != video:
        found.append(f"needs sequences without text, got {key.shape[1] - video} text tokens")
    if masked:
        found.append("has no key mask, and keys are masked")
    if key.shape[2] != query.shape[2]:
        found.append(f"needs as many key heads as the {query.shape[2]}, got {key.shape[2]}")
    if abs(scale * size**0.5 - 1) > 1e-6:
        found.append(
            f"needs the inverse root of the head size as scale, got {scale:.6g} for {size}"
        )
    return tuple(found)


def attend_upstream(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: ClusteredCall,
    keep: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Write the attention of the video's queries into `out`, by the package; waits for the device.

    Args:
        query: [B, S, H, D].
        key: as `query`.
        value: as `query`.
        call: what attends to what.
        keep: bool [B, S], which the package does not take.
        out: as `query`.
        scale: factor of the scores.

    Raises:
        UnsupportedBackendError: the package cannot serve the call; lists the reasons.
    """
    reasons = _reasons(query, key, call, masked=keep is not None, scale=scale)
    if reasons:
        raise UnsupportedBackendError(
            f"sparse_video_gen_2_attn with kernel 'svg' cannot serve this call: "
            f"{'; '.join(reasons)}; use kernel='auto'"
        )
    attend = importlib.import_module("svg.kmeans_utils").dynamic_block_sparse_fwd_flashinfer
    (q,) = gather_tokens((query,), call.queries.order)
    k, v = gather_tokens((key, value), call.keys.order)
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    sizes = call.queries.counts, call.keys.counts
    found = attend(*heads_first, call.keep, *sizes, is_cpu=False)
    scatter_tokens(found.transpose(1, 2), call.queries.order, out)
