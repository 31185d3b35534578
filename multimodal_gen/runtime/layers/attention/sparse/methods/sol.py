"""Sol-Attn: blocks whose scores stand out are attended to exactly, all others by their means.

Blocks of the video attend exactly to the blocks that score above a threshold of their row, to their
neighbours and to the sink; every other block counts by the mean of its keys and values, so nothing
is dropped. Text is attended to by everything, and attends to everything.

Shapes: B batch, S tokens, H heads, D head size, N blocks.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.layers.attention.config import (
    ComputeMode,
    EngineKernel,
    IndexSelector,
    Ratio,
    SparseConfig,
    Tail,
    compute_mode_option,
    option,
    ratio_now,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import VARIANTS_OF_BOTH, SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Cut,
    Limits,
    Router,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import by_heads, shard_of
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_CELLS = 4  # of a block, where they rank blocks
_FIRST_STEPS = 10
_FIRST_LAYERS = IndexSelector(((0, 1),))


@dataclass(frozen=True, slots=True, kw_only=True)
class SolConfig(SparseConfig):
    """Parameters of `sol_attn`.

    Attributes:
        tau: how many standard deviations a block's score must lie above the mean of its row for
            the block to be exact; -1000 is dense attention. The share of exact blocks does not
            fall with length.
        thresh_type: the deviation of a row from the variances of the keys' channels (`diag`), or
            that of the row's scores (`exact`).
        topk_ratio: share of the blocks that is exact instead, those that score best. It may change
            over the steps: {0: 0.5, 0.4: 0.1}. `tau` says nothing then.
        router: what `topk_ratio` ranks blocks by: the products of their means (`mean`), or the
            log-sum-exp over those of their cells (`subblock`), see `subblock_sparse_attn`.
        neighbours: blocks on either side that are exact whatever they score.
        sink_tokens: so many tokens of the sequence, whole blocks of them, are always exact. Text is
            in any case.
        sink_start: position of the first of them; None for the last ones.
        sink_rows: whether the queries of the sink attend to everything exactly, too.
        kv_splits: in how many parts the authors' kernel reads keys; here kernels choose themselves,
            and any value gives the same.
        dense_steps: the first so many denoising steps stay dense; or which ones, e.g. "0-3,38".
        block_size: tokens of a block, in the order of the sequence.
        tile_size: tokens per block along (time, height, width) instead: neighbours in space lie
            together, as with the authors' Morton order.
        compute_mode: `bf16` multiplies in the dtype of the inputs; `sage_bf16` queries and keys in
            8 bits, which has no gradients.
        tail: `pooled` as the paper has it; `none` drops what is not exact.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    tau: float = option(1.0, "standard deviations above its row's mean that make a block exact")
    thresh_type: Literal["diag", "exact"] = option(
        "diag", "deviation from the variances of channels, or of the row's scores"
    )
    topk_ratio: Ratio | None = option(
        None, "share of blocks that is exact, instead of tau", ge=0, le=1
    )
    router: Literal["mean", "subblock"] = option("mean", "what topk_ratio ranks blocks by")
    neighbours: int = option(1, "blocks on either side that are always exact", ge=0)
    sink_tokens: int = option(0, "tokens that are always exact, besides text", ge=0)
    sink_start: int | None = option(0, "where they start; null: the last ones", ge=0)
    sink_rows: bool = option(False, "queries of the sink attend to everything exactly")
    kv_splits: Literal["auto", 1, 2, 4] = option("auto", "taken, and of no effect here")
    dense_steps: int | IndexSelector | None = option(  # type: ignore[assignment]
        _FIRST_STEPS, "first denoising steps that stay dense, or which, e.g. '0-3,38'", ge=0
    )
    dense_layers: IndexSelector | None = option(
        _FIRST_LAYERS, "layers that stay dense, e.g. '0-3,38'"
    )
    block_size: Literal[64, 128] = option(64, "tokens of a block")
    tile_size: tuple[int, ...] | None = option(
        None, "tokens per block along time, height, width, instead", ge=1, length=3
    )
    compute_mode: ComputeMode = compute_mode_option()  # noqa: RUF009 - it returns a field
    tail: Tail = tail_option("pooled")  # noqa: RUF009 - it returns a field
    kernel: EngineKernel = option("auto", "kernel that runs")

    def check(self) -> None:
        """Blocks are cut in one way, and cells rank a given share of them."""
        if self.router == "subblock" and self.topk_ratio is None:
            raise ConfigError(
                "`router` of sol_attn must be mean where no `topk_ratio` is given, got subblock; "
                "cells rank blocks, and a threshold needs no rank: give topk_ratio"
            )
        if self.tile_size is not None and self.block_size != 64:
            raise ConfigError(
                f"`tile_size` of sol_attn must not be given with `block_size`, got "
                f"{list(self.tile_size)} and {self.block_size}; remove one"
            )


class SolRouter(Router[SolConfig]):
    """The blocks that stand out in their row, their neighbours, and the sink."""

    chooses = "map"

    def cut(self, settings: SolConfig, grid: Window) -> Cut:
        """Return blocks in the order of the sequence, or tiles."""
        return (
            Cut.rows(settings.block_size) if settings.tile_size is None else Cut(settings.tile_size)
        )

    def cells(self, settings: SolConfig) -> tuple[int, int]:
        """Return the cells of a block, where they rank it."""
        return (_CELLS, _CELLS) if settings.router == "subblock" else (1, 1)

    def budget(self, settings: SolConfig, blocks: int, tokens: int) -> Budget | None:
        """Return how many blocks a row keeps at least: its neighbours may be among the best."""
        if settings.topk_ratio is None:
            return None
        ratio = ratio_now(settings.topk_ratio)
        kept = max(1, min(round(ratio * blocks), blocks - 1))
        least = max(round(ratio * blocks), min(1 + settings.neighbours, blocks))
        return Budget(kept, blocks, ratio, least)

    def density(self, settings: SolConfig, blocks: int, tokens: int) -> float | None:
        """Nothing is known before: the data decide."""
        return None

    def choose(self, settings: SolConfig, stats: BlockStats, budget: Budget | None) -> torch.Tensor:
        """Return the exact blocks."""
        if budget is not None:
            chosen = stats.mark_best(budget.kept, near=settings.neighbours)
        else:
            chosen = stats.add_near(_outstanding(settings, stats), settings.neighbours)
        if settings.sink_tokens:
            sink = _sink(settings, stats)
            chosen |= sink
            if settings.sink_rows:
                chosen |= (sink if stats.own is None else sink[stats.own])[:, None]
        return chosen

    def limits(self, settings: SolConfig) -> Limits:
        """A sink is a place in one sequence."""
        reason = "`sink_tokens` are places in one sequence; the cache has a sink of its own"
        return Limits(cache=reason if settings.sink_tokens else None)


def _sink(config: SolConfig, stats: BlockStats) -> torch.Tensor:
    """Return the blocks of the sink, bool [N]."""
    order, layout, start = stats.order, stats.layout, config.sink_start
    assert order is not None, "blocks are cut"
    assert layout is not None, "a cache is refused"
    if start is None:
        start = max(layout.num_keys - config.sink_tokens, 0)
    first, stop = max(start - layout.start, 0), start + config.sink_tokens - layout.start
    if stop <= first:  # the sink is text
        return stats.key.new_zeros(stats.num, dtype=torch.bool)
    device = stats.key.device
    return shard_of(order.grid, 0, first, stop, order.tile, device, 1, False).block_of >= 0


_LEAST_VARIANCE = 1e-6


def _outstanding(config: SolConfig, stats: BlockStats) -> torch.Tensor:
    """Return the blocks that score above their row's threshold: bool [B, H, R, N].

    With s the scale, qbar and kc means of blocks, and mean and variance taken over the blocks of a
    head, every block with weight 1, row i has block j where

        s qbar_i.kc_j > s qbar_i.mean(kc) + tau sqrt(s^2 var_i + 1e-6)

    with var_i that of the row's scores (`exact`), or the sum of qbar_i^2 times the variance of
    every channel of kc (`diag`). A few heads are computed at a time; does not wait for the device.
    """
    batch, heads, num, _ = stats.query.shape
    group, scale, real = heads // stats.key.shape[1], stats.scale, stats.real[1]
    keys = stats.key.repeat_interleave(group, dim=1) if group > 1 else stats.key
    weight, count = _even(stats.num, keys.device)
    if real is not None:  # the mean of nothing is zero
        weight = real[:, None, :, None].float()
        count = weight.sum(2, keepdim=True).clamp_min(1)

    def mean_of(x: torch.Tensor) -> torch.Tensor:
        return (x if real is None else x * weight).sum(2, keepdim=True) / count

    def above(some: slice) -> torch.Tensor:
        query, key = stats.query[:, some].float(), keys[:, some].float()
        scores = (query @ key.mT) * scale
        mean = mean_of(key)
        middle = (query @ mean.mT) * scale
        if config.thresh_type == "exact":
            variance = (scores - middle).square() @ weight / count
        else:
            of_channel = mean_of((key - mean).square())
            variance = (query.square() @ of_channel.mT) * scale**2
        return scores > middle + config.tau * (variance + _LEAST_VARIANCE).sqrt()

    return by_heads(heads, batch * num * stats.num, above)


@static_cache(maxsize=64)
def _even(num: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of blocks that all count, [1, 1, N, 1], and their sum; cached."""
    weight = torch.ones(1, 1, num, 1, device=device)
    return weight, weight.sum(2, keepdim=True)


class SolBackend(SparseBackend):
    """Sol-Attn."""

    backend = AttentionBackendEnum.SOL_ATTN
    summary = "Sol-Attn: blocks that stand out exactly, the others by their means"
    config_cls = SolConfig
    router = SolRouter
    variants = VARIANTS_OF_BOTH
