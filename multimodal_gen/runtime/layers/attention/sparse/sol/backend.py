"""Sol-Attn: blocks whose scores stand out are attended to exactly, all others by their means.

Blocks of the video attend exactly to the blocks that score above a threshold of their row, to their
neighbours and to the sink; every other block counts by the mean of its keys and values, so nothing
is dropped. Text is attended to by everything, and attends to everything.

Shapes: B batch, S tokens, H heads, D head size, N blocks.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.tail import PooledBlocks, plan_of_map
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.runtime.distributed.ring import RingInputs
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
from multimodal_gen.runtime.layers.attention.sparse.base import SparseImpl, Tail, tail_option
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    RingTail,
    Shard,
    attend_ring_tiles,
    own_queries,
    pool_over_ring,
    shards_of,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.sol.routing import Router, blocks_of_span
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    TiledSequence,
    attend_tiled,
    in_one_row,
    in_tiles,
    tile_means,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

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
        """Blocks are cut in one way."""
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


class SolImpl(SparseImpl[SolConfig]):
    """Sol-Attn of one layer."""

    declaration = SolBackend

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention to exact blocks and to the means of others; see `SparseImpl.attend`."""
        config = self.settings(context)
        call = replace(call, layout=_as_cut(call.layout, config))
        queries, keys = in_tiles(call.layout, _tile(config), call.query.device)
        with torch.no_grad():
            query, key, real = tile_means(call, queries)
            exact = self._router(config, call.layout, queries).choose(query, key, real)
        self._record_blocks(context, call.layout, exact)
        # Text is behind the blocks of the video.
        listed = exact
        if keys.num_text_blocks:
            listed = F.pad(exact, (0, keys.num_text_blocks), value=True)

        def plan_of(heads: slice) -> BlockPlan:
            kept, num = listed[:, heads], keys.num_tiles
            return plan_of_map(kept, queries.blocks, keys.blocks, num)

        return attend_tiled(call, queries, keys, plan_of)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`; every rank chooses for all blocks."""
        layout, call = self.ring_layout(inputs, context), inputs.call
        assert context is not None, "a layout needs a context"
        config = self.settings(context)
        layout = _as_cut(layout, config)
        queries, _ = in_tiles(layout, _tile(config), inputs.query.device)
        shards = shards_of(layout, call, queries.order.tile, inputs.query.device)
        tensors = (own_queries(inputs), inputs.key, inputs.value)
        means, counts = pool_over_ring(tensors[: 2 + self.pools_tail], shards, call)
        query, key, *values = (mean.to(inputs.query.dtype) for mean in means)
        real = None if call.keep is None else counts > 0
        exact = self._router(config, layout, queries).choose(query, key, real)
        self._record_blocks(context, layout, exact)
        mine = shards[call.group.index]
        if mine is None or mine.queries is None:
            rows, blocks = exact[:, :, :0], None
        else:
            rows, blocks = exact[:, :, mine.tiles], mine.queries

        def plan_of(theirs: Shard) -> BlockPlan | None:
            if blocks is None:
                return None
            held = F.pad(rows[..., theirs.tiles], (0, theirs.keys.num_text_blocks), value=True)
            return plan_of_map(held, blocks, theirs.keys.blocks, theirs.keys.num_tiles)

        tail = None
        if self.pools_tail and blocks is not None:
            pooled = PooledBlocks(keys=key, values=values[0], counts=counts.int().unsqueeze(1))
            tail = RingTail(pooled=pooled, kept=rows, scale=self.softmax_scale)
        return attend_ring_tiles(
            inputs, shards, plan_of, scale=self.softmax_scale, kernel=self.kernel, tail=tail
        )

    def _router(self, config: SolConfig, layout: SequenceLayout, queries: TiledSequence) -> Router:
        sink = None
        if config.sink_tokens:
            start = config.sink_start
            if start is None:
                start = max(layout.num_keys - config.sink_tokens, 0)
            span = (max(start - layout.start, 0), start + config.sink_tokens - layout.start)
            order, device = queries.order, queries.index.device
            sink = blocks_of_span(order.grid, order.tile, *span, device)
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

    def _record_blocks(
        self, context: ForwardContext, layout: SequenceLayout, exact: torch.Tensor
    ) -> None:
        """Note the share of exact blocks, as if every block were of mean size."""
        share: Any = exact.sum(dtype=torch.int64).double() / exact.numel()
        self.record(context, layout.density(share), exact.shape[1])


def _tile(config: SolConfig) -> tuple[int, ...]:
    """Return the tokens of a block along the axes of the grid it is cut from."""
    return (1, 1, config.block_size) if config.tile_size is None else config.tile_size


def _as_cut(layout: SequenceLayout, config: SolConfig) -> SequenceLayout:
    """Return a layout whose tiles are the blocks: in the order of the sequence, one long row."""
    if config.tile_size is not None:
        return layout
    return in_one_row(layout)
