"""Sol-Attn: blocks whose scores stand out are attended to exactly, all others by their means.

Blocks of the video attend exactly to the blocks that score above a threshold of their row, to their
neighbours and to the sink; every other block counts by the mean of its keys and values, so nothing
is dropped. Text is attended to by everything, and attends to everything.

Shapes: B batch, S tokens, H heads, D head size, N blocks.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.slots import (
    CacheCut,
    KeptChunks,
    SeenMeans,
    SeenTiles,
    near,
)
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    IndexSelector,
    SparseConfig,
    option,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, ratio_now
from multimodal_gen.runtime.layers.attention.sparse.base import (
    Cut,
    MapImpl,
    Means,
    Tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.sol.routing import Router, blocks_of_span
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    TiledSequence,
    cell_means,
    in_one_row,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
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
    tail: Tail = tail_option("pooled")  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference"] = option(
        "auto", "kernel that runs"
    )

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


class SolBackend(AttentionBackend):
    """Sol-Attn."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SOL_ATTN
    summary: ClassVar[str] = "Sol-Attn: blocks that stand out exactly, the others by their means"
    config_cls: ClassVar[type[SolConfig]] = SolConfig
    variants: ClassVar[tuple[Variant, ...]] = engine_variants(
        BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a block; see `AttentionBackend.block_sizes`."""
        options = config if isinstance(config, SolConfig) else SolConfig()
        size = options.block_size if options.tile_size is None else math.prod(options.tile_size)
        return size, size

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return SolImpl


class SolImpl(MapImpl[SolConfig]):
    """Sol-Attn of one layer."""

    declaration = SolBackend

    def cut(self, config: SolConfig, layout: SequenceLayout) -> Cut:
        """Return blocks in the order of the sequence, one long row, or tiles; see `MapImpl.cut`."""
        if config.tile_size is None:
            return in_one_row(layout), (1, 1, config.block_size)
        return layout, config.tile_size

    def choose(self, config: SolConfig, means: Means, context: ForwardContext) -> torch.Tensor:
        """Return the exact blocks; see `MapImpl.choose`."""
        router = self._router(config, self._sink(config, means.layout, means.blocks))
        if router.topk_ratio is not None:
            num = means.query.shape[2]
            # At least: a block beside another may be among the best, or not.
            kept = max(round(router.topk_ratio * num), min(1 + config.neighbours, num))
            self.warn_of_density(means.layout, router.topk_ratio, kept, num)
        best = self._best_cells(config, means) if config.router == "subblock" else None
        return router.choose(means.query, means.key, means.real, best)

    def _best_cells(self, config: SolConfig, means: Means) -> torch.Tensor:
        """Return the lists of the blocks that score best by their cells, [B, H, N, K]."""
        assert means.call is not None, "a ring is refused"
        assert config.topk_ratio is not None, "the parameters are checked"
        num = means.query.shape[2]
        kept = max(1, min(round(ratio_now(config.topk_ratio) * num), num - 1))
        cells = cell_means(means.call, means.blocks, (_CELLS, _CELLS))
        return cells.best(slice(None), kept, scale=self.softmax_scale)

    def cut_of_cache(self, kept: KeptChunks, context: ForwardContext | None) -> CacheCut | str:
        """See `AttentionImpl`: its blocks are those of the chunks, one chunk after the other."""
        config = self.config
        if config.sink_tokens:
            return "`sink_tokens` are places in one sequence; the cache has a sink of its own"
        if config.router == "subblock":
            return "router subblock ranks the blocks of one call"
        if config.tile_size is None:
            return self.cut_with(kept.in_rows(config.block_size))
        return self.cut_with(kept.in_tiles(config.tile_size))

    def choose_seen(
        self,
        config: SolConfig,
        means: SeenMeans,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> torch.Tensor:
        """Return the exact blocks; see `MapImpl.choose_seen`."""
        router = self._router(config, None)
        neighbours = near(tiles, config.neighbours)
        return router.choose_among(means.query, means.key, means.real, tiles.num_tiles) | neighbours

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if self.config.router == "subblock":
            return "router subblock compares cells, which ranks do not exchange"
        return super().ring_reason()

    def _sink(
        self, config: SolConfig, layout: SequenceLayout, queries: TiledSequence
    ) -> torch.Tensor | None:
        if not config.sink_tokens:
            return None
        start = config.sink_start
        if start is None:
            start = max(layout.num_keys - config.sink_tokens, 0)
        span = (max(start - layout.start, 0), start + config.sink_tokens - layout.start)
        order, device = queries.order, queries.index.device
        return blocks_of_span(order.grid, order.tile, *span, device)

    def _router(self, config: SolConfig, sink: torch.Tensor | None) -> Router:
        ratio = config.topk_ratio
        return Router(
            scale=self.softmax_scale,
            tau=config.tau,
            thresh_type=config.thresh_type,
            topk_ratio=None if ratio is None else ratio_now(ratio),
            neighbours=config.neighbours,
            sink=sink,
            sink_rows=config.sink_rows,
        )
