"""The authors' own attention of clusters, of the package svg, where a call fits it.

Shapes: B batch, S tokens, H heads, D head size.
"""

import importlib

import torch

from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.layers.attention.backends.engine import refuse_upstream
from multimodal_gen.runtime.layers.attention.sparse.router import GroupMap, SparseLayer
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall
from multimodal_gen.runtime.layers.attention.sparse.upstream import (
    call_reasons,
    shape_reasons,
    text_reasons,
)

UPSTREAM = "svg"


def refuse_layer(layer: SparseLayer, what: str, text: int = 0) -> None:
    """Raise where the package is to run and cannot serve a layer, or a run of one.

    Args:
        layer: the layer.
        what: what it is about, for the message: "layer" or "run".
        text: text tokens of the run.

    Raises:
        UnsupportedBackendError: lists the reasons.
    """
    if layer.kernel.name != UPSTREAM:
        return
    reasons = text_reasons(text) + shape_reasons(
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        scale=layer.scale,
    )
    refuse_upstream(reasons, kernel=UPSTREAM, backend=layer.label, what=what)


def attend_upstream(call: SparseCall, groups: GroupMap, backend: str) -> torch.Tensor:
    """Return the package's attention, [B, S, H, D]; it waits for the device.

    It takes the clusters that were chosen here: queries and keys in cluster order, the sizes of the
    clusters and the map between them.

    Raises:
        UnsupportedBackendError: the package cannot serve the call; lists the reasons.
    """
    refuse_upstream(call_reasons(call), kernel=UPSTREAM, backend=backend)
    attend = importlib.import_module("svg.kmeans_utils").dynamic_block_sparse_fwd_flashinfer
    (q,) = gather_tokens((call.query,), groups.queries.order)
    k, v = gather_tokens((call.key, call.value), groups.keys.order)
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    sizes = groups.queries.counts, groups.keys.counts
    found = attend(*heads_first, groups.cluster_mask, *sizes, is_cpu=False)
    out = torch.empty_like(call.query)
    scatter_tokens(found.transpose(1, 2), groups.queries.order, out)
    return out
