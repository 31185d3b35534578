"""The clusters of a call: what one denoising step leaves to the next, and attention among them.

The video is clustered by k-means; text and masked tokens are groups of their own. A layer keeps
centroids per request and guidance branch, so that neither two interleaved requests nor the two
branches of one ever start from each other's. Of calls without a request's name nothing is kept:
nobody could tell whose it is.

Shapes: B batch, S tokens, H query heads, Hkv key heads, D head size, N positions in cluster order.
"""

import importlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.cluster_attention.api import cluster_attention, query_pieces
from multimodal_gen.kernels.cluster_attention.plan import Groups, cluster_plan
from multimodal_gen.kernels.kmeans.api import Clusters
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import pairs_are_told, tell_plan
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    head_slices,
    run_on_two_streams,
)
from multimodal_gen.runtime.layers.attention.sparse.upstream import call_reasons, refuse_upstream
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "UPSTREAM",
    "CentroidCache",
    "Centroids",
    "ClusterMap",
    "attend_clusters",
    "attend_upstream",
    "cluster_map",
]

UPSTREAM = "svg"

# Of requests that nobody says have ended, so many branches are remembered.
_MAX_BRANCHES = 8

# Of the heads at a time where there is a tail, whose many small operations take the host long.
_SHARE_WITH_TAIL = 0.1

_Run = tuple[str, str | None]
_Branch = tuple[str, str | None, Hashable]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Centroids:
    """Where the clusters of one layer ended.

    Attributes:
        step: denoising step they are of.
        query: [B, H, Cq, D].
        key: [B, Hkv, Ck, D].
    """

    step: int
    query: torch.Tensor
    key: torch.Tensor


class CentroidCache:
    """The centroids of one layer, by request and guidance branch."""

    def __init__(self) -> None:
        self._found: OrderedDict[_Branch, Centroids] = OrderedDict()
        self._calls: OrderedDict[_Run, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def branch(self, context: ForwardContext) -> _Branch | None:
        """Return what the running call's centroids go by; to be asked once per call.

        Calls of one step whose branch is unknown count as branches in turn. Calls without a
        request's name have no branch.
        """
        if context.request_id is None:
            return None
        run, step = (context.request_id, context.component), context.current_timestep
        if context.branch_key is not None:
            return *run, context.branch_key
        if context.cfg_branch is not None:
            return *run, (context.cfg_branch, 0)
        last, calls = self._calls.pop(run, (step, -1))
        calls = calls + 1 if last == step else 0
        self._calls[run] = step, calls
        while len(self._calls) > _MAX_BRANCHES:
            self._calls.popitem(last=False)
        return *run, (None, calls)

    def find(self, branch: _Branch | None, step: int) -> Centroids | None:
        """Return what an earlier step of the same run left, or None.

        Args:
            branch: as `branch` returned it.
            step: the running step; the first one starts anew, and so does one that is before the
                centroids', which then are an earlier run's.
        """
        found = None if branch is None else self._found.get(branch)
        if found is None or step == 0 or step < found.step:
            return None
        return found

    def keep(self, branch: _Branch | None, centroids: Centroids, num_steps: int | None) -> None:
        """Keep centroids for the next step; after the last one, drop what there is."""
        if branch is None:
            return
        self._found.pop(branch, None)
        if num_steps is not None and centroids.step >= num_steps - 1:
            return
        self._found[branch] = centroids
        while len(self._found) > _MAX_BRANCHES:
            self._found.popitem(last=False)

    def end(self, request_id: str) -> None:
        """Drop what there is of a request."""
        for branch in list(self._found):
            if branch[0] == request_id:
                self._found.pop(branch, None)
        for run in list(self._calls):
            if run[0] == request_id:
                self._calls.pop(run, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterMap:
    """What attends to what.

    Attributes:
        queries: the video's queries; the last group is of masked ones where keys are masked.
        keys: all keys; the last group is text where there is any.
        keep: bool [B, H, groups, groups]: masked queries attend to everything, and everything
            attends to text.
    """

    queries: Groups
    keys: Groups
    keep: torch.Tensor


def cluster_map(
    queries: Clusters,
    keys: Clusters,
    keep: torch.Tensor,
    layout: SequenceLayout,
    mask: torch.Tensor | None,
) -> ClusterMap:
    """Put the clusters of the video into the sequence.

    Args:
        queries: clusters of the video's queries; those of masked tokens are left out.
        keys: clusters of the video's keys, the same.
        keep: bool [B, H, Cq, Ck].
        layout: where the video lies.
        mask: bool [B, Sk], keys to attend to; None for all.
    """
    q_order = queries.order + layout.start
    k_order = keys.order + layout.start
    q_groups = queries.starts, queries.counts
    k_groups = keys.starts, keys.counts
    if mask is not None:
        left = layout.num_video - queries.counts.sum(2, keepdim=True, dtype=torch.int32)
        q_groups = _append(q_groups, layout.num_video - left, left)
        keep = F.pad(keep, (0, 0, 0, 1), value=True)
    num_text = layout.num_keys - layout.num_video
    if num_text:
        text, count = _text(layout, mask, k_order.device)
        heads, batch = k_order.shape[1], k_order.shape[0]
        k_order = torch.cat((k_order, text.unsqueeze(1).expand(batch, heads, -1)), 2)
        count = count.view(-1, 1, 1).expand(batch, heads, 1)
        k_groups = _append(k_groups, torch.full_like(count, layout.num_video), count)
        keep = F.pad(keep, (0, 1), value=True)
    return ClusterMap(
        queries=Groups(order=q_order, starts=q_groups[0], counts=q_groups[1]),
        keys=Groups(order=k_order, starts=k_groups[0], counts=k_groups[1]),
        keep=keep,
    )


def _append(
    groups: tuple[torch.Tensor, torch.Tensor], start: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    starts, counts = groups
    return torch.cat((starts, start), 2), torch.cat((counts, count), 2)


def _text(
    layout: SequenceLayout, mask: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of text [B|1, text], kept ones first, and how many are kept [B|1]."""
    end = layout.start + layout.num_video
    before = torch.arange(layout.start, dtype=torch.int32, device=device)
    behind = torch.arange(end, layout.num_keys, dtype=torch.int32, device=device)
    text = torch.cat((before, behind)).unsqueeze(0)
    if mask is None:
        return text, torch.full((1,), text.shape[1], dtype=torch.int32, device=device)
    kept = torch.cat((mask[:, : layout.start], mask[:, end:]), 1)
    first = torch.argsort(~kept, dim=1, stable=True)
    return text.expand_as(first).gather(1, first), kept.sum(1, dtype=torch.int32)


def attend_clusters(call: SparseCall, clusters: ClusterMap, out: torch.Tensor) -> None:
    """Write the attention of the video's queries into `out`; does not wait for the device.

    Works on a share of the heads at a time, which bounds the memory of the copies.

    Args:
        call: the call.
        clusters: what attends to what.
        out: [B, Sq, H, D].
    """
    query, kv_heads = call.query, call.key.shape[2]
    group = query.shape[2] // kv_heads
    pieces = query_pieces(clusters.queries)
    if pairs_are_told():
        order, keys = clusters.queries.order, clusters.keys.order
        tell_plan(
            slice(0, query.shape[2]),
            cluster_plan(clusters.queries, clusters.keys, clusters.keep),
            (call.layout.num_queries, call.layout.num_keys),
            queries=order,
            keys=keys.repeat_interleave(group, dim=1),
        )
    text = call.layout.num_keys > call.layout.num_video
    num_pooled = clusters.keys.counts.shape[2] - text  # the last group is text

    def attend(kv: slice) -> None:
        heads = slice(kv.start * group, kv.stop * group)
        cluster_attention(
            query[:, :, heads],
            call.key[:, :, kv],
            call.value[:, :, kv],
            clusters.queries.heads(heads),
            clusters.keys.heads(kv),
            clusters.keep[:, heads],
            out[:, :, heads],
            scale=call.scale,
            kernel=call.kernel,
            pieces=pieces.heads(heads),
            num_pooled=num_pooled if call.tail else 0,
        )

    slices = head_slices(query, out, kv_heads)
    if call.tail:
        slices = head_slices(query, out, kv_heads, _SHARE_WITH_TAIL)
    run_on_two_streams([partial(attend, kv) for kv in slices], query.device)


def attend_upstream(
    call: SparseCall, clusters: ClusterMap, out: torch.Tensor, backend: str
) -> None:
    """Do as `attend_clusters` by the authors' own attention, of the package svg, where it fits.

    It takes the clusters that were chosen here: queries and keys in cluster order, the sizes of the
    clusters and the map between them. It waits for the device.

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
