"""The authors' own attention, of the package svg, where a call fits it.

It takes the clusters that were chosen here: queries and keys in cluster order, the sizes of the
clusters and the map between them.
"""

import importlib

import torch

from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.layers.attention.sparse.svg2.clusters import ClusterMap
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall
from multimodal_gen.runtime.layers.attention.sparse.upstream import call_reasons, refuse_upstream

__all__ = ["UPSTREAM", "attend_upstream"]

UPSTREAM = "svg"


def attend_upstream(
    call: SparseCall, clusters: ClusterMap, out: torch.Tensor, backend: str
) -> None:
    """Write the attention of the video's queries into `out`, by the package; waits for the device.

    Args:
        call: the call.
        clusters: what attends to what.
        out: [B, S, H, D].
        backend: the method, for messages.

    Raises:
        UnsupportedBackendError: the package cannot serve the call; lists the reasons.
    """
    refuse_upstream(call_reasons(call), kernel=UPSTREAM, backend=backend)
    attend = importlib.import_module("svg.kmeans_utils").dynamic_block_sparse_fwd_flashinfer
    (q,) = gather_tokens((call.query,), clusters.queries.order)
    k, v = gather_tokens((call.key, call.value), clusters.keys.order)
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    sizes = clusters.queries.counts, clusters.keys.counts
    found = attend(*heads_first, clusters.keep, *sizes, is_cpu=False)
    scatter_tokens(found.transpose(1, 2), clusters.queries.order, out)
