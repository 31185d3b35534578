"""Which blocks Sol-Attn attends to exactly: by the scores of block means (arXiv:2607.24027).

Shapes: B batch, H heads, D head size, N blocks of the video, R of them as rows.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.kernels.tile_pool.api import mark_near, mark_tiles
from multimodal_gen.runtime.layers.attention.sparse.upstream import lists_as_map

__all__ = ["Router", "blocks_of_span"]

# Scores that are held at a time: 128 MiB in fp32.
_SCORES_AT_ONCE = 2**25
_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    """How blocks are chosen.

    With s the scale, qbar and kc means of blocks, and mean and variance taken over the blocks of a
    head, every block with weight 1, block i attends to block j exactly where

        s qbar_i.kc_j > s qbar_i.mean(kc) + tau sqrt(s^2 var_i + 1e-6)

    or |i - j| <= neighbours, or j is in the sink.

    Attributes:
        scale: s.
        tau: how many standard deviations a score must lie above the mean of its row.
        thresh_type: var_i is that of the row's scores (`exact`), or the sum of qbar_i^2 times the
            variance of every channel of kc (`diag`).
        topk_ratio: share of the blocks that is exact instead, those that score best; None for the
            threshold.
        neighbours: see above.
        sink: bool [N], blocks that everything attends to exactly; None for none.
        sink_rows: whether the queries of these blocks attend to everything exactly.
    """

    scale: float
    tau: float
    thresh_type: Literal["diag", "exact"]
    topk_ratio: float | None
    neighbours: int
    sink: torch.Tensor | None
    sink_rows: bool

    def choose(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        real: torch.Tensor | None,
        best: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return which blocks each block attends to exactly: bool [B, H, N, N].

        Does not wait for the device. A few heads are computed at a time.

        Args:
            query: means of the blocks' queries, [B, H, N, D].
            key: means of their keys, [B, Hkv, N, D].
            real: bool [B, N], blocks of which not everything is masked; None for all.
            best: lists of the blocks that score best, int32 [B, H, N, K], where others found them.
        """
        num = query.shape[2]
        if best is None:
            chosen = self.choose_among(query, key, real, num, near=self.neighbours)
        else:
            chosen = mark_near(lists_as_map(best, num), self.neighbours)
        if self.sink is not None:
            chosen |= self.sink
            if self.sink_rows:
                chosen |= self.sink[:, None]
        return chosen

    def choose_among(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        real: torch.Tensor | None,
        total: int,
        *,
        near: int = -1,
    ) -> torch.Tensor:
        """Return the blocks that stand out or score best, without the sink.

        Args:
            query: means of blocks of queries, [B, H, Nq, D].
            key: means of blocks of keys, [B, Hkv, Nk, D].
            real: bool [B, Nk], see `choose`.
            total: how many blocks of keys the share is of.
            near: how far from a block's own number others are chosen, too; -1 for none.

        Returns:
            bool [B, H, Nq, Nk].
        """
        if self.topk_ratio is None:
            return mark_near(self._outstanding(query, key, real), near)
        kept = max(1, min(round(self.topk_ratio * total), total - 1))
        return mark_tiles(query, key, kept, near=near, real=real)

    def _outstanding(
        self, query: torch.Tensor, key: torch.Tensor, real: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the blocks that score above their row's threshold."""
        batch, heads, num, _ = query.shape
        group = heads // key.shape[1]
        at_once = max(1, _SCORES_AT_ONCE // max(1, batch * num * key.shape[2]))
        parts = []
        for first in range(0, heads, at_once):
            rows = query[:, first : first + at_once].float()
            used = torch.arange(first, first + rows.shape[1], device=key.device) // group
            parts.append(self._above(rows, key[:, used].float(), real))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _above(
        self, query: torch.Tensor, key: torch.Tensor, real: torch.Tensor | None
    ) -> torch.Tensor:
        """Return where scores of [B, h, N, D] lie above what their row asks for."""
        scores = (query @ key.mT) * self.scale
        weight = key.new_ones(1, 1, key.shape[2], 1)
        if real is not None:  # the mean of nothing is zero
            weight = real[:, None, :, None].to(key.dtype)
        count = weight.sum(2, keepdim=True).clamp_min(1)
        mean = (key * weight).sum(2, keepdim=True) / count
        middle = (query @ mean.mT) * self.scale
        if self.thresh_type == "exact":
            variance = (scores - middle).square() @ weight / count
        else:
            of_channel = ((key - mean).square() * weight).sum(2, keepdim=True) / count
            variance = (query.square() @ of_channel.mT) * self.scale**2
        return scores > middle + self.tau * (variance + _LEAST_VARIANCE).sqrt()


@lru_cache(maxsize=64)
def blocks_of_span(
    grid: tuple[int, int, int],
    tile: tuple[int, int, int],
    start: int,
    stop: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the blocks that hold a token of the video in [start, stop): bool [N].

    Args:
        grid: (T, H, W) of the video.
        tile: tokens of a block along (time, height, width).
        start: position of the first token among those of the video, in raster order.
        stop: position behind the last one.
        device: where the tensor is to lie.
    """
    order = tile_order(grid, tile, "cpu")
    with torch.inference_mode(False), torch.device("cpu"):
        inside = (order.order >= start) & (order.order < stop)
        block = torch.repeat_interleave(torch.arange(len(order.starts)), order.lengths)
        found = torch.bincount(block[inside], minlength=len(order.starts)) > 0
        return found.to(device)
