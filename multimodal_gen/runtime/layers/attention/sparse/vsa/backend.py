"""Video Sparse Attention: a coarse stage over tiles picks the tiles of a fine stage.

The coarse stage attends among means of tiles. Every query tile keeps the key tiles that score
best there; the fine stage attends to their tokens, and to all text. Text attends to everything.
Where a model has a gate, output = fine + gate * coarse output of the token's tile.

Shapes: B batch, S tokens, H heads, D head size, N tiles; q/k suffix = query/key side.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import BLOCK_SPARSE, KernelChoice
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
from multimodal_gen.runtime.layers.attention.sparse.base import SparseImpl
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    attend_in_ring,
    chunks_of,
    ring_layout,
    whole_chunks,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    attend_tiled,
    heads_at_once,
    sequence_layout,
)
from multimodal_gen.runtime.layers.attention.sparse.vsa.coarse import (
    Coarse,
    coarse_alone,
    coarse_in_ring,
)
from multimodal_gen.runtime.layers.attention.sparse.vsa.upstream import (
    UPSTREAM,
    UpstreamCall,
    attend_upstream,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

# Looked for on disk only: importing it needs a GPU.
_VSA = PackageProbe(module="vsa", distribution="vsa", install="pip install vsa")

# Rows of a query block where everything is attended to: what the engine is fastest with.
_DENSE_BLOCK = 384
_Share = TypeVar("_Share", float, torch.Tensor)
_TILE_SIZES = ((4, 4, 4), (4, 8, 4), (4, 8, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSparseConfig(SparseConfig):
    """Parameters of `video_sparse_attn`.

    Where a checkpoint has gates, dense steps keep the coarse stage that they weigh; dense layers
    compute as the stock model, without it.

    Attributes:
        sparsity: share of key tiles each query tile skips; 0 equals dense attention.
        topk: key tiles each query tile keeps, instead of `sparsity`.
        topk_convention: what `sparsity` is a share of when the number of kept tiles is computed:
            `tiles` of the grid, ragged ones included, or `tokens` / tokens per tile.
        tile_size: tokens per tile along (time, height, width): 64, 128 or 256 in all.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    sparsity: float = option(
        0.0, "share of key tiles to skip", aliases=("VSA_sparsity",), ge=0, le=1
    )
    topk: int | None = option(None, "key tiles to keep, instead of sparsity", ge=1)
    topk_convention: Literal["tiles", "tokens"] = option(
        "tiles", "what sparsity is a share of: tiles of the grid, or tokens / tokens per tile"
    )
    tile_size: tuple[int, ...] = option(
        (4, 4, 4), "tokens per tile along time, height, width", ge=1, length=3
    )
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "vsa", "fastvideo_kernel"] = (
        option("auto", "kernel that runs")
    )

    def check(self) -> None:
        """The budget is given once, and the tile is one the kernels have."""
        if self.topk is not None and self.sparsity > 0:
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
        size = math.prod(getattr(config, "tile_size", VideoSparseConfig().tile_size))
        return size, size

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return VideoSparseImpl


class VideoSparseImpl(SparseImpl):
    """Video Sparse Attention of one layer."""

    backend = AttentionBackendEnum.VIDEO_SPARSE_ATTN
    config_cls: ClassVar[type[SparseConfig]] = VideoSparseConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self._config = config if isinstance(config, VideoSparseConfig) else VideoSparseConfig()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        context: ForwardContext,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the fine stage; see `SparseImpl.attend`."""
        return self._attend(query, key, value, layout, context, keep, None)

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
        self._first_head = first_head
        self.kernel.begin_call()
        layout = sequence_layout(query, key, context, str(self.backend))
        assert context is not None, "a layout needs a context"
        return self._attend(query, key, value, layout, context, None, gate)

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
        layout = sequence_layout(query, key, context, str(self.backend))
        coarse = coarse_alone(query, key, layout, self._tile(layout.grid), None)
        return coarse.add(out, value, gate, self.softmax_scale)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        self._first_head = inputs.first_head
        self.kernel.begin_call()
        layout = ring_layout(inputs, context, str(self.backend))
        assert context is not None, "a layout needs a context"
        call, gate, device = inputs.call, inputs.gate, inputs.query.device
        run = partial(attend_in_ring, inputs, scale=self.softmax_scale, kernel=self.kernel)
        num_tiles = math.prod(self._tiles(layout.grid))
        kept = kept_tiles(self._config, num_tiles, layout.num_video)
        self.record(context, _density(kept / num_tiles, layout))  # of whole tiles
        if kept == num_tiles and call.keep is None:
            out = run(whole_chunks(call, device), lambda _: None)
            return out if gate is None else self.add_coarse_ring(out, inputs, context)
        tile = self._tile(layout.grid)
        chunks = chunks_of(layout, call, tile, device)
        coarse, mine = coarse_in_ring(inputs, layout, tile, chunks), chunks[call.group.index]
        if not coarse.queries.order.uniform:
            heads = _first_heads(inputs, layout)
            self._record_pairs(context, coarse.plan(heads, kept), layout)
        out = run(chunks, coarse.plans_of(mine, kept))
        return out if gate is None else coarse.add_to(mine, out, gate, self.softmax_scale)

    def add_coarse_ring(
        self, out: torch.Tensor, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.add_coarse_ring`."""
        layout = ring_layout(inputs, context, str(self.backend))
        assert inputs.gate is not None, "callers know"
        tile, call = self._tile(layout.grid), inputs.call
        chunks = chunks_of(layout, call, tile, out.device)
        coarse, mine = coarse_in_ring(inputs, layout, tile, chunks), chunks[call.group.index]
        return coarse.add_to(mine, out, inputs.gate, self.softmax_scale)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        context: ForwardContext,
        keep: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        scale, kernel = self.softmax_scale, self.kernel
        tiles = self._tiles(layout.grid)
        kept = kept_tiles(self._config, math.prod(tiles), layout.num_video)
        self.record(context, _density(kept / math.prod(tiles), layout))  # of whole tiles
        if kept == math.prod(tiles) and keep is None and kernel.name not in UPSTREAM:
            out = _attend_to_all(query, key, value, scale, kernel)
            return out if gate is None else self.add_coarse(out, query, key, value, gate, context)
        coarse = coarse_alone(query, key, layout, self._tile(layout.grid), keep)
        if kernel.name in UPSTREAM:
            out = self._upstream(query, key, value, coarse, kept, keep)
            return out if gate is None else coarse.add(out, value, gate, scale)

        def plan_of(heads: slice) -> BlockPlan:
            plan = coarse.plan(heads, kept)
            if heads.start == 0 and not coarse.queries.order.uniform:
                self._record_pairs(context, plan, layout)
            return plan

        out = attend_tiled(
            query,
            key,
            value,
            coarse.queries,
            coarse.keys,
            plan_of,
            scale=scale,
            kernel=kernel,
            keep=keep,
        )
        return out if gate is None else coarse.add(out, value, gate, scale)

    def _record_pairs(
        self, context: ForwardContext, plan: BlockPlan, layout: SequenceLayout
    ) -> None:
        """Note what a plan of the first heads keeps, which stand for all.

        Which tiles are cut short is up to the data.
        """
        of_video = plan.pairs().double().mean() / layout.num_video**2
        of_tiles = of_video - (layout.num_keys - layout.num_video) / layout.num_video
        self.record(context, _density(of_tiles, layout))

    def _upstream(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        coarse: Coarse,
        kept: int,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        order = coarse.queries.order
        call = UpstreamCall(
            tokens_per_tile=order.largest,
            text=max(query.shape[1], key.shape[1]) - order.num_tokens,
            masked=keep is not None,
            scale=self.softmax_scale,
            head_size=query.shape[3],
            heads=query.shape[2],
            kv_heads=key.shape[2],
        )
        return attend_upstream(
            self.kernel.name,
            query,
            key,
            value,
            order,
            lambda: select_tiles(coarse.pooled_query, coarse.pooled_key, kept),
            kept,
            call,
        )

    def _tile(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return tiles no larger than the grid: kernels make room for whole ones."""
        t, h, w = (min(pair) for pair in zip(self._config.tile_size, grid, strict=True))
        return t, h, w

    def _tiles(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        """Return the number of tiles along each axis."""
        return tuple(-(-n // edge) for n, edge in zip(grid, self._tile(grid), strict=True))


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


def _attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, kernel: KernelChoice
) -> torch.Tensor:
    """Return dense attention, in the order of the sequence: there is nothing to select."""
    q_blocks, kv_blocks = (Blocks.regular(x.shape[1], _DENSE_BLOCK) for x in (query, key))
    plan = BlockPlan.dense(q_blocks, kv_blocks, query.device)
    out = block_sparse_attention(query, key, value, plan, scale=scale, kernel=kernel)
    assert isinstance(out, torch.Tensor)
    return out


def _first_heads(inputs: RingInputs, layout: SequenceLayout) -> slice:
    """Return the query heads whose plan one process would make first, of this rank's heads."""
    query, kv_heads = inputs.query, inputs.key.shape[2]
    whole = query.new_empty((len(query), layout.num_queries, *query.shape[2:]), device="meta")
    return slice(0, heads_at_once(whole, whole, kv_heads)[0].stop * (query.shape[2] // kv_heads))


def _density(of_video: _Share, layout: SequenceLayout) -> _Share:
    """Return the share of all pairs attended to, from that of pairs of the video."""
    video, queries, keys = layout.num_video, layout.num_queries, layout.num_keys
    kept = video * (of_video * video + keys - video) + (queries - video) * keys
    return kept / (queries * keys)
