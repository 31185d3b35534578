"""The clusters of a call: video by k-means, text and masked tokens as groups of their own.

Shapes: B batch, S tokens, H heads, N positions in cluster order.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.cluster_attention.plan import Groups
from multimodal_gen.kernels.kmeans.api import Clusters
from multimodal_gen.runtime.layers.attention.backends.tiled import SequenceLayout

__all__ = ["ClusteredCall", "clustered_call"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusteredCall:
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


def clustered_call(
    queries: Clusters,
    keys: Clusters,
    keep: torch.Tensor,
    layout: SequenceLayout,
    mask: torch.Tensor | None,
) -> ClusteredCall:
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
    return ClusteredCall(
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
