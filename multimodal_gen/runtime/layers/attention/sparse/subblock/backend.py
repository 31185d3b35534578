"""Sub-block sparse attention: blocks are chosen by the means of their cells.

A block of queries keeps the blocks of keys with the largest log-sum-exp over pairs of their cells,
which a mean of the whole block would blur. Text is attended to by everything, and attends to
everything. The rule is that of sglang's `subblock_sparse_attn`.

Shapes: B batch, S tokens, H heads, D head size, N blocks.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.slots import CacheCut, KeptChunks, SeenTiles, best_cells
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.tile_pool.api import select_cells
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import BackendConfig, SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, ratio_now
from multimodal_gen.runtime.layers.attention.sparse.base import SparseImpl, Tail, tail_option
from multimodal_gen.runtime.layers.attention.sparse.ring_tail import attend_ring_lists
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    own_queries,
    pool_over_ring,
    shards_of,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    attend_tiled,
    cell_means,
    in_one_row,
    in_tiles,
    plan_of_tiles,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_BLOCK = 64
_MULTIPLE = 8  # what the number of kept blocks is rounded up to


@dataclass(frozen=True, slots=True, kw_only=True)
class SubblockConfig(SparseConfig):
    """Parameters of `subblock_sparse_attn`.

    Attributes:
        sparsity: share of the blocks of keys that a block of queries skips; what is kept is rounded
            up to a multiple of eight blocks. It may change over the steps: {0: 0.5, 0.4: 0.75}.
        n_q: cells of a block of queries.
        n_k: cells of a block of keys.
        skip_first_steps: first denoising steps that stay dense.
        skip_first_layers: first layers that stay dense.
        min_seq_len: sequences of fewer tokens stay dense.
        compute_mode: what attention is computed in.
        tail: what becomes of blocks that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    first_dense_steps: ClassVar[str] = "skip_first_steps"
    first_dense_layers: ClassVar[str] = "skip_first_layers"

    sparsity: Ratio = option(0.75, "share of key blocks to skip", ge=0, le=1)
    n_q: Literal[1, 2, 4, 8] = option(4, "cells of a block of queries")
    n_k: Literal[1, 2, 4, 8] = option(4, "cells of a block of keys")
    skip_first_steps: int = option(10, "first denoising steps that stay dense", ge=0)
    skip_first_layers: int = option(0, "first layers that stay dense", ge=0)
    min_seq_len: int = option(4096, "sequences of fewer tokens stay dense", ge=0)
    compute_mode: Literal["bf16"] = option("bf16", "what attention is computed in")
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference"] = option(
        "auto", "kernel that runs"
    )


class SubblockBackend(AttentionBackend):
    """Sub-block sparse attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SUBBLOCK_SPARSE_ATTN
    summary: ClassVar[str] = "the best blocks by the means of their cells"
    config_cls: ClassVar[type[SubblockConfig]] = SubblockConfig
    variants: ClassVar[tuple[Variant, ...]] = engine_variants(
        BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a block; see `AttentionBackend.block_sizes`."""
        return _BLOCK, _BLOCK

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return SubblockImpl


class SubblockImpl(SparseImpl[SubblockConfig]):
    """Sub-block sparse attention of one layer."""

    declaration = SubblockBackend

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention over the selected blocks; see `SparseImpl.attend`."""
        config, layout = self.settings(context), call.layout
        call = replace(call, layout=in_one_row(layout))
        queries, keys = in_tiles(call.layout, (1, 1, _BLOCK), call.query.device)
        num = len(queries.order.starts)
        kept = kept_blocks(ratio_now(config.sparsity), num)
        self.warn_of_density(layout, 1 - ratio_now(config.sparsity), kept, num)
        if queries.order.uniform:
            self.record(context, layout.density(kept / num), call.query.shape[2])
        means = cell_means(call, queries, (config.n_q, config.n_k))

        def plan_of(heads: slice) -> BlockPlan:
            lists = means.best(heads, kept, scale=self.softmax_scale, always=keys.num_text_blocks)
            plan = plan_of_tiles(lists, queries, keys)
            if heads.start == 0 and not queries.order.uniform:
                self.record_pairs(context, plan, layout, call.query.shape[2])
            return plan

        return attend_tiled(call, queries, keys, plan_of)

    def cut_of_cache(self, kept: KeptChunks, context: ForwardContext | None) -> CacheCut | str:
        """See `AttentionImpl`: its blocks are those of the chunks, one chunk after the other."""
        return self.cut_with(kept.in_rows(_BLOCK))

    def forward_tiles(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_tiles`; what is seen stays dense where it is short."""
        config, lists = self.settings(context), None
        kept = kept_blocks(ratio_now(config.sparsity), tiles.num_tiles)
        if kept < tiles.num_tiles and tiles.num_tokens >= config.min_seq_len:
            cells = (config.n_q, config.n_k)
            lists = best_cells(query, key, tiles, kept, cells=cells, scale=self.softmax_scale)
        return self.attend_lists(query, key, value, tiles, lists, context)

    def dense_reason(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        first_head: int = 0,
    ) -> str | None:
        """See `AttentionImpl.dense_reason`; short sequences are dense, too."""
        if query.shape[1] < self.config.min_seq_len:
            return (
                f"{self.label} leaves sequences of fewer than {self.config.min_seq_len} tokens "
                f"dense (`min_seq_len`)"
            )
        return super().dense_reason(query, key, context, first_head)

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`; of whole blocks."""
        num = -(-layout.num_video // _BLOCK)
        kept = kept_blocks(ratio_now(self.settings(context).sparsity), num)
        return layout.density(kept / num), _BLOCK

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`; ranks exchange the means of cells."""
        whole, call = self.ring_layout(inputs, context), inputs.call
        layout = in_one_row(whole)
        assert context is not None, "a layout needs a context"
        config, device = self.settings(context), inputs.query.device
        num = -(-layout.num_video // _BLOCK)
        kept = kept_blocks(ratio_now(config.sparsity), num)
        if layout.num_queries < config.min_seq_len:
            kept = num
        self.warn_of_density(whole, 1 - ratio_now(config.sparsity), kept, num)
        self.record(context, layout.density(kept / num), inputs.query.shape[2])
        shards = shards_of(layout, call, (1, 1, _BLOCK), device)
        sides = []
        for x, cells in ((own_queries(inputs), config.n_q), (inputs.key, config.n_k)):
            held = shards_of(layout, call, (1, 1, _BLOCK // cells), device)
            (means,), counts = pool_over_ring((x,), held, call)
            missing = num * cells - means.shape[2]  # of the last block
            sides += [F.pad(means.to(x.dtype), (0, 0, 0, missing)), F.pad(counts, (0, missing)) > 0]
        mine, lists = shards[call.group.index], None
        if mine is not None and mine.queries is not None:
            query, q_real, key, k_real = sides
            rows = mine.tiles[:, None] * config.n_q + torch.arange(config.n_q, device=device)
            lists = select_cells(
                query[:, :, rows.flatten()],
                key,
                q_real[:, rows.flatten()],
                k_real,
                kept,
                cells=(config.n_q, config.n_k),
                scale=self.softmax_scale,
            )
        return attend_ring_lists(
            inputs,
            shards,
            lists,
            scale=self.softmax_scale,
            kernel=self.kernel,
            pooled=self.pools_tail,
        )


def kept_blocks(sparsity: float, num_blocks: int) -> int:
    """Return how many key blocks a query block keeps: rounded up to a multiple of eight."""
    kept = math.ceil((1 - Fraction(repr(float(sparsity)))) * num_blocks)
    return min(max(-(-kept // _MULTIPLE) * _MULTIPLE, 1), num_blocks)
