"""Runs a router that groups the tokens of every head itself, where one process has all tokens.

Groups are of any size, and lie anywhere in the video. Text and masked tokens are groups of their
own.

Shapes: B batch, S tokens, H query heads, Hkv key heads, D head size, R and N groups of queries and
keys.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.kernels.cluster_attention.api import cluster_attention, query_pieces
from multimodal_gen.kernels.cluster_attention.plan import Groups, cluster_plan, kept_pairs
from multimodal_gen.kernels.kmeans.api import Clusters
from multimodal_gen.runtime.layers.attention.sparse.density import density_of_pairs
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import LISTENER, record_plan
from multimodal_gen.runtime.layers.attention.sparse.router import BlockStats, GroupMap, Router
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    attend_text,
    head_slices,
    kept_first,
    run_on_two_streams,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext

# Of the heads at a time where there is a tail, whose many small operations take the host long.
_SHARE_WITH_TAIL = 0.1


def attend_groups(
    router: Router[Any], settings: Any, call: SparseCall, context: ForwardContext
) -> torch.Tensor:
    """Return the method's attention of a call, [B, Sq, H, D]; does not wait for the device."""
    query, layer = call.query, router.layer
    with torch.no_grad():
        groups = _chosen(router, settings, call, context)
        pairs = kept_pairs(groups.cluster_mask, groups.queries.counts, groups.keys.counts)
        batch, heads = groups.cluster_mask.shape[:2]
        share = density_of_pairs(pairs / (batch * heads), call.layout, call.mask)
    layer.dense_above.learn(share, 0, context)
    layer.note(context, share, heads)
    out = router.attend_upstream(settings, call, None, lambda: groups) if call.on_package else None
    if out is None:
        out = query.new_empty((*query.shape[:3], call.value.shape[3]))
        attend_text(call, out)
        _attend(call, groups, out)
    return out


def _chosen(
    router: Router[Any], settings: Any, call: SparseCall, context: ForwardContext
) -> GroupMap:
    """Return the router's groups of the whole sequence, and its choice among them."""
    layout, mask = call.layout, call.mask
    video = layout.video
    masked = None if mask is None else mask[:, video]
    queries, keys = router.group(
        settings, call.query[:, video], call.key[:, video], masked, context
    )
    stats = BlockStats(
        query=queries.centroids,
        key=keys.centroids,
        real=(None, None),
        order=None,
        scale=call.scale,
        counts=keys.counts,
        layout=layout,
    )
    budget = router.budget(settings, stats.num, layout.num_video)
    router.layer.warn_of(layout, budget)
    chosen = router.chosen(settings, stats, budget)
    chosen = chosen.expand(*queries.counts.shape, stats.num)
    return _of_sequence(call, queries, keys, chosen)


def _of_sequence(
    call: SparseCall, queries: Clusters, keys: Clusters, chosen: torch.Tensor
) -> GroupMap:
    """Put the groups of the video into the sequence.

    Args:
        call: the call.
        queries: groups of the video's queries; masked tokens are in none.
        keys: groups of the video's keys, the same.
        chosen: bool [B, H, R, N].
    """
    layout, mask, video = call.layout, call.mask, call.layout.num_video
    rows, columns = (
        Groups(x.order + layout.start if layout.start else x.order, x.starts, x.counts)
        for x in (queries, keys)
    )
    if mask is not None:
        left = video - rows.counts.sum(2, keepdim=True, dtype=torch.int32)
        rows = _with_one_more(rows, video - left, left)
        chosen = F.pad(chosen, (0, 0, 0, 1), value=True)
    if layout.num_keys > video:
        text, count = (
            x[:, None].expand(*columns.order.shape[:2], -1)
            for x in _text(layout, mask, columns.order.device)
        )
        columns = columns._replace(order=torch.cat((columns.order, text), 2))
        columns = _with_one_more(columns, torch.full_like(count, video), count)
        chosen = F.pad(chosen, (0, 1), value=True)
    return GroupMap(queries=rows, keys=columns, cluster_mask=chosen)


def _with_one_more(groups: Groups, start: torch.Tensor, count: torch.Tensor) -> Groups:
    """Return groups, and one that begins at `start` in their order; [B, H, 1] each."""
    starts = torch.cat((groups.starts, start), 2)
    return groups._replace(starts=starts, counts=torch.cat((groups.counts, count), 2))


def _text(
    layout: SequenceLayout, mask: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of text [B|1, text], kept ones first, and how many are kept [B|1, 1]."""
    end = layout.start + layout.num_video
    before = torch.arange(layout.start, dtype=torch.int32, device=device)
    behind = torch.arange(end, layout.num_keys, dtype=torch.int32, device=device)
    text = torch.cat((before, behind))
    if mask is None:
        return text.unsqueeze(0), torch.full((1, 1), len(text), dtype=torch.int32, device=device)
    text, block = kept_first(text, Blocks.regular(len(text), len(text)), mask)
    return text, block.bounds(device)[1][:, 0]


def _attend(call: SparseCall, groups: GroupMap, out: torch.Tensor) -> None:
    """Write the attention of the video's queries into `out`, [B, Sq, H, D].

    Works on a share of the heads at a time, which bounds the memory of the copies.
    """
    query, kv_heads = call.query, call.key.shape[2]
    group = query.shape[2] // kv_heads
    pieces = query_pieces(groups.queries)
    if LISTENER.get() is not None:
        _record(call, groups)
    text = call.layout.num_keys > call.layout.num_video
    num_pooled = groups.keys.counts.shape[2] - text  # the last group is text

    def attend(kv: slice) -> None:
        heads = slice(kv.start * group, kv.stop * group)
        cluster_attention(
            query[:, :, heads],
            call.key[:, :, kv],
            call.value[:, :, kv],
            groups.queries.heads(heads),
            groups.keys.heads(kv),
            groups.cluster_mask[:, heads],
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


def _record(call: SparseCall, groups: GroupMap) -> None:
    heads = call.query.shape[2]
    record_plan(
        slice(0, heads),
        cluster_plan(groups.queries, groups.keys, groups.cluster_mask),
        (call.layout.num_queries, call.layout.num_keys),
        queries=groups.queries.order,
        keys=groups.keys.order.repeat_interleave(heads // call.key.shape[2], dim=1),
    )
