"""The authors' own attention, of the package svg, where a call fits it.

It takes the clusters that were chosen here: queries and keys in cluster order, the sizes of the
clusters and the map between them.
"""

import importlib
from collections.abc import Sequence

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.layers.attention.sparse.svg2.clusters import ClusteredCall

__all__ = ["UPSTREAM", "attend_upstream", "refuse_upstream", "upstream_reasons"]

UPSTREAM = "svg"


def upstream_reasons(
    *, heads: int, kv_heads: int, head_size: int, scale: float, text: int = 0
) -> tuple[str, ...]:
    """Return what is known beforehand of why the package cannot serve, requirement then actual.

    Args:
        heads: query heads.
        kv_heads: key and value heads.
        head_size: channels per head.
        scale: factor of the scores.
        text: number of tokens beyond the video's.
    """
    found = []
    if text:
        found.append(f"needs sequences without text, got {text} text tokens")
    if kv_heads != heads:
        found.append(f"needs as many key heads as the {heads}, got {kv_heads}")
    if abs(scale * head_size**0.5 - 1) > 1e-6:
        found.append(
            f"needs the inverse root of the head size as scale, got {scale:.6g} for {head_size}"
        )
    return tuple(found)


def refuse_upstream(reasons: Sequence[str], *, what: str = "call") -> None:
    """Raise where there are reasons against the package.

    Args:
        reasons: from `upstream_reasons` and beyond.
        what: "call", "run" or "layer", whatever they are about.

    Raises:
        UnsupportedBackendError: there are reasons; lists them.
    """
    if reasons:
        raise UnsupportedBackendError(
            f"sparse_video_gen_2_attn with kernel {UPSTREAM!r} cannot serve this {what}: "
            f"{'; '.join(reasons)}; use kernel='auto'"
        )


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
    reasons = upstream_reasons(
        heads=query.shape[2],
        kv_heads=key.shape[2],
        head_size=query.shape[3],
        scale=scale,
        text=key.shape[1] - call.queries.order.shape[2],
    )
    masked = () if keep is None else ("has no key mask, and keys are masked",)
    refuse_upstream((*reasons, *masked))
    attend = importlib.import_module("svg.kmeans_utils").dynamic_block_sparse_fwd_flashinfer
    (q,) = gather_tokens((query,), call.queries.order)
    k, v = gather_tokens((key, value), call.keys.order)
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    sizes = call.queries.counts, call.keys.counts
    found = attend(*heads_first, call.keep, *sizes, is_cpu=False)
    scatter_tokens(found.transpose(1, 2), call.queries.order, out)
