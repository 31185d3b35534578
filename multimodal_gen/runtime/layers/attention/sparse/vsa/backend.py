"""Video Sparse Attention: a coarse stage over tiles picks the tiles of a fine stage.

The coarse stage attends among means of tiles. Every query tile keeps the key tiles that score
best there; the fine stage attends to their tokens, and to all text. Text attends to everything.
Where a model has a gate, output = fine + gate * coarse output of the token's tile.

Shapes: B batch, S tokens, H heads, D head size, N tiles; q/k suffix = query/key side.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.slots import (
    CacheCut,
    KeptChunks,
    SeenTiles,
    best_cells,
    best_means,
    means_of_seen,
)
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.kernels.tile_pool.api import select_tiles
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import (
    FASTVIDEO_KERNEL,
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, ratio_now
from multimodal_gen.runtime.layers.attention.sparse.base import (
    SparseImpl,
    Tail,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.ring_tail import attend_ring_lists
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    attend_ring_tiles,
    shards_of,
    whole_shards,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    attend_densely,
    attend_tiled,
    cell_means,
    fit_tile,
    head_slices,
    in_tiles,
    plan_of_tiles,
)
from multimodal_gen.runtime.layers.attention.sparse.vsa.coarse import (
    coarse_stage,
    ring_coarse_stage,
)
from multimodal_gen.runtime.layers.attention.sparse.vsa.upstream import UPSTREAM, attend_upstream
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

# Looked for on disk only: importing it needs a GPU.
_VSA = PackageProbe(module="vsa", distribution="vsa", install="pip install vsa")

_CELLS = 4  # of a tile, where they rank tiles
_TILE_SIZES = ((4, 4, 4), (4, 8, 4), (4, 8, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSparseConfig(SparseConfig):
    """Parameters of `video_sparse_attn`.

    Where a checkpoint has gates, dense steps keep the coarse stage that they weigh; dense layers
    compute as the stock model, without it.

    Attributes:
        sparsity: share of key tiles each query tile skips; 0 equals dense attention. It may change
            over the steps: {0: 0.5, 0.4: 0.9}.
        topk: key tiles each query tile keeps, instead of `sparsity`.
        topk_convention: what `sparsity` is a share of when the number of kept tiles is computed:
            `tiles` of the grid, ragged ones included, or `tokens` / tokens per tile. FastVideo
            counted by `tokens` until July 2026, so for FastWan 2.1 and 2.2 and Wan2.1-VSA, and
            counts `tiles` since.
        router: what tiles are ranked by: the products of their means (`mean`), as in the paper, or
            the log-sum-exp over those of their cells (`subblock`), see `subblock_sparse_attn`. A
            gate's coarse stage is the same with both.
        tile_size: tokens per tile along (time, height, width): 64, 128 or 256 in all.
        skip_below: products of weights and values are left out where all weights of a step of the
            kernel lie so many decibels below the largest ones so far; 30 is a thousandth. None
            leaves nothing out.
        tail: what becomes of tiles that a query tile does not keep: `none` drops them, as the paper
            does; `pooled` counts each by the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    sparsity: Ratio = option(
        0.0, "share of key tiles to skip", aliases=("VSA_sparsity",), ge=0, le=1
    )
    topk: int | None = option(None, "key tiles to keep, instead of sparsity", ge=1)
    topk_convention: Literal["tiles", "tokens"] = option(
        "tiles",
        "what sparsity is a share of: tiles of the grid, or tokens / tokens per tile, as FastWan "
        "2.1 and 2.2 and Wan2.1-VSA were trained",
    )
    router: Literal["mean", "subblock"] = option("mean", "what tiles are ranked by")
    tile_size: tuple[int, ...] = option(
        (4, 4, 4), "tokens per tile along time, height, width", ge=1, length=3
    )
    skip_below: float | None = option(
        None, "decibels below the largest weight so far at which products are left out", ge=1
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "vsa", "fastvideo_kernel"] = (
        option("auto", "kernel that runs")
    )

    def check(self) -> None:
        """The budget is given once, and the tile is one the kernels have."""
        refuse_foreign_tail("video_sparse_attn", self.tail, self.kernel, *UPSTREAM)
        if self.skip_below is not None and self.kernel in UPSTREAM:
            raise ConfigError(
                f"`skip_below` of video_sparse_attn must not be given with kernel {self.kernel}, "
                f"which leaves no products out, got {self.skip_below}; remove one"
            )
        if self.router == "subblock" and self.kernel in UPSTREAM:
            raise ConfigError(
                f"`router` of video_sparse_attn must be mean with kernel {self.kernel}, which "
                f"ranks by means, got subblock; remove one"
            )
        if self.topk is not None and self.sparsity != 0:
            raise ConfigError(
                f"`topk` of video_sparse_attn must not be given with `sparsity`, got topk "
                f"{self.topk} and sparsity {self.sparsity}; remove one"
            )
        if self.tile_size not in _TILE_SIZES:
            valid = ", ".join(str(list(tile)) for tile in _TILE_SIZES)
            raise ConfigError(
                f"`tile_size` of video_sparse_attn must be one of {valid}, "
                f"got {list(self.tile_size)}"
            )


class VideoSparseBackend(AttentionBackend):
    """Video Sparse Attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.VIDEO_SPARSE_ATTN
    summary: ClassVar[str] = "Video Sparse Attention: coarse attention picks the tiles to attend to"
    config_cls: ClassVar[type[VideoSparseConfig]] = VideoSparseConfig
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants(BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)),
        upstream_variant("vsa", _VSA),
        upstream_variant("fastvideo_kernel", FASTVIDEO_KERNEL),
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a tile; see `AttentionBackend.block_sizes`."""
        size = math.prod(getattr(config, "tile_size", _TILE_SIZES[0]))
        return size, size

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return VideoSparseImpl


class VideoSparseImpl(SparseImpl[VideoSparseConfig]):
    """Video Sparse Attention of one layer."""

    declaration = VideoSparseBackend
    trains_in_ring = True

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return the fine stage, and the coarse one where the call has a gate."""
        config = self.settings(context)
        queries, keys = in_tiles(call.layout, config.tile_size, call.query.device)
        num_tiles, num_heads = len(queries.order.starts), call.query.shape[2]
        kept = kept_tiles(config, num_tiles, call.layout.num_video)
        is_upstream = call.kernel.name in UPSTREAM
        if config.topk is None:
            share = 1 - ratio_now(config.sparsity)
            self.warn_of_density(call.layout, share, kept, num_tiles)
        is_dense = kept == num_tiles and call.keep is None and not is_upstream
        if is_dense or is_upstream or queries.order.uniform:
            self.record(context, call.layout.density(kept / num_tiles), num_heads)
        if is_dense:
            out = attend_densely(call)
            return out if call.gate is None else coarse_stage(call, queries, keys).add(out, call)
        coarse = coarse_stage(call, queries, keys)
        cells = None
        if config.router == "subblock":
            cells = cell_means(call, queries, (_CELLS, _CELLS))

        def plan_of(heads: slice) -> BlockPlan:
            if cells is None:
                plan = coarse.plan(heads, kept)
            else:
                text = keys.num_text_blocks
                lists = cells.best(heads, kept, scale=call.scale, always=text)
                plan = plan_of_tiles(lists, queries, keys)
            if heads.start == 0 and not queries.order.uniform:
                self.record_pairs(context, plan, call.layout, num_heads)
            return plan

        if is_upstream:

            def select() -> torch.Tensor:
                return select_tiles(coarse.query, coarse.key, kept)

            out = attend_upstream(call, queries.order, select, kept, self.label)
        else:
            out = attend_tiled(call, queries, keys, plan_of)
        return out if call.gate is None else coarse.add(out, call)

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`; of whole tiles."""
        tile = fit_tile(self.config.tile_size, layout.grid)
        num_tiles = math.prod(-(-n // edge) for n, edge in zip(layout.grid, tile, strict=True))
        kept = kept_tiles(self.settings(context), num_tiles, layout.num_video)
        return layout.density(kept / num_tiles), math.prod(tile)

    def forward_gated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        first_head: int = 0,
    ) -> torch.Tensor:
        """Return both stages; see `AttentionImpl.forward_gated`."""
        if not query.shape[0]:
            return torch.empty_like(query)
        self.kernel.begin_call()
        call = self.call(query, key, value, context, gate=gate, first_head=first_head)
        assert context is not None, "a layout needs a context"
        return self.attend(call, context)

    def add_coarse(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        context: ForwardContext | None = None,
    ) -> torch.Tensor:
        """Add the coarse stage; see `AttentionImpl.add_coarse`."""
        call = self.call(query, key, value, context, gate=gate)
        tiles = in_tiles(call.layout, self.config.tile_size, query.device)
        return coarse_stage(call, *tiles).add(out, call)

    def cut_of_cache(self, kept: KeptChunks, context: ForwardContext | None) -> CacheCut | str:
        """See `AttentionImpl`: it chooses among all tiles that the cache shows."""
        return self.cut_with(kept.in_tiles(self.config.tile_size), UPSTREAM)

    def forward_tiles(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fine stage; see `AttentionImpl.forward_tiles`."""
        config, lists = self.settings(context), None
        kept = kept_tiles(config, tiles.num_tiles, tiles.num_tokens)
        if kept < tiles.num_tiles and config.router == "subblock":
            cells, scale = (_CELLS, _CELLS), self.softmax_scale
            lists = best_cells(query, key, tiles, kept, cells=cells, scale=scale)
        elif kept < tiles.num_tiles:
            lists = best_means(means_of_seen(query, key, tiles), kept)
        return self.attend_lists(query, key, value, tiles, lists, context)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if self.config.skip_below is not None:
            return "skip_below compares the scores of a row over all keys in one pass"
        if self.config.router == "subblock":
            return "router subblock compares cells, which ranks do not exchange"
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        layout = self.ring_layout(inputs, context)
        assert context is not None, "a layout needs a context"
        call, gate, device = inputs.call, inputs.gate, inputs.query.device
        queries, keys = in_tiles(layout, self.config.tile_size, device)
        num_tiles = len(queries.order.starts)
        kept = kept_tiles(self.settings(context), num_tiles, layout.num_video)
        num_heads, is_dense = inputs.query.shape[2], kept == num_tiles and call.keep is None
        if is_dense or queries.order.uniform:
            self.record(context, layout.density(kept / num_tiles), num_heads)
        if is_dense:
            out = attend_ring_tiles(
                inputs,
                whole_shards(call, device),
                lambda _: None,
                scale=self.softmax_scale,
                kernel=self.kernel,
            )
            return out if gate is None else self.add_coarse_ring(out, inputs, context)
        shards = shards_of(layout, call, queries.order.tile, device)
        coarse = ring_coarse_stage(inputs, queries, keys, shards)
        mine = shards[call.group.index]
        if not queries.order.uniform:
            plan = coarse.plan(_first_heads(inputs, layout), kept)
            self.record_pairs(context, plan, layout, num_heads)
        out = attend_ring_lists(
            inputs,
            shards,
            coarse.lists_of(mine, kept),
            scale=self.softmax_scale,
            kernel=self.kernel,
            pooled=self.pools_tail,
        )
        return out if gate is None else coarse.add_to_shard(mine, out, gate, self.softmax_scale)

    def add_coarse_ring(
        self, out: torch.Tensor, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.add_coarse_ring`."""
        layout, call = self.ring_layout(inputs, context), inputs.call
        assert inputs.gate is not None, "callers know"
        queries, keys = in_tiles(layout, self.config.tile_size, out.device)
        shards = shards_of(layout, call, queries.order.tile, out.device)
        coarse = ring_coarse_stage(inputs, queries, keys, shards)
        mine = shards[call.group.index]
        return coarse.add_to_shard(mine, out, inputs.gate, self.softmax_scale)


@lru_cache(maxsize=1024)
def kept_tiles(config: VideoSparseConfig, num_tiles: int, num_tokens: int) -> int:
    """Return how many key tiles each query tile keeps, in [1, `num_tiles`].

    Args:
        config: the budget, and what its share is of.
        num_tiles: tiles of the grid, ragged ones included.
        num_tokens: tokens of the grid.
    """
    if config.topk is not None:
        return min(config.topk, num_tiles)
    if config.sparsity == 0:
        return num_tiles  # also where ragged tiles outnumber tokens / tokens per tile
    whole = Fraction(num_tiles)
    if config.topk_convention == "tokens":
        whole = Fraction(num_tokens, math.prod(config.tile_size))
    # In decimals, as people write them: 1 - 0.7 is more than 0.3 in binary.
    kept = math.ceil((1 - Fraction(repr(config.sparsity))) * whole)
    return min(max(kept, 1), num_tiles)


def _first_heads(inputs: RingInputs, layout: SequenceLayout) -> slice:
    """Return the query heads whose plan one process would make first, of this rank's heads."""
    query, kv_heads = inputs.query, inputs.key.shape[2]
    whole = query.new_empty((len(query), layout.num_queries, *query.shape[2:]), device="meta")
    return slice(0, head_slices(whole, whole, kv_heads)[0].stop * (query.shape[2] // kv_heads))
