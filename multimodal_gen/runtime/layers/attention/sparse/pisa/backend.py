"""PISA: the best blocks exactly, all others by their means and a first-order term.

Blocks of 64 tokens attend exactly to the blocks whose means score best (arXiv:2602.01077). Every
other block counts by the mean of its keys and values; how values follow keys inside of blocks is
one matrix per head. Text is attended to by everything, and attends to everything.

Shapes: B batch, S tokens, H heads, D head size, N blocks.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.tile_pool.api import select_tiles
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import BackendConfig, SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, first_of, ratio_now
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
    in_one_row,
    in_tiles,
    plan_of_tiles,
    tile_means,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PisaConfig(SparseConfig):
    """Parameters of `pisa_attn`.

    Attributes:
        density: share of the blocks of keys that is exact, rounded down to at least one block. It
            may change over the steps: {0: 0.3, 0.4: 0.1}.
        first_order: whether values follow keys inside of blocks; without, blocks count by their
            means alone.
        tail: `pooled` as the paper has it; `none` drops what is not exact.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    density: Ratio = option(0.1, "share of key blocks that is exact", ge=0, le=1)
    first_order: bool = option(True, "values follow keys inside of blocks")
    tail: Tail = tail_option("pooled")  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference"] = option(
        "auto", "kernel that runs"
    )


class PisaBackend(AttentionBackend):
    """PISA."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.PISA_ATTN
    summary: ClassVar[str] = "PISA: the best blocks exactly, the others to first order"
    config_cls: ClassVar[type[PisaConfig]] = PisaConfig
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
        return PisaImpl


class PisaImpl(SparseImpl[PisaConfig]):
    """PISA of one layer."""

    declaration = PisaBackend
    cache_reason: ClassVar[str] = "its first-order term is a sum over all keys of one call"

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention to the best blocks and to the others' means; see `SparseImpl.attend`."""
        config = self.settings(context)
        layout = in_one_row(call.layout)
        call = replace(call, layout=layout, first_order=config.first_order)
        queries, keys = in_tiles(layout, (1, 1, _BLOCK), call.query.device)
        kept, num = self._kept(config, layout), len(queries.order.starts)
        if queries.order.uniform:
            self.record(context, layout.density(kept / num), call.query.shape[2])
        query, key, real = tile_means(call, queries)
        group = query.shape[1] // key.shape[1]

        def plan_of(heads: slice) -> BlockPlan:
            used = key[:, heads.start // group : heads.stop // group]
            text = keys.num_text_blocks
            lists = select_tiles(query[:, heads], used, kept, always=text, real=real)
            plan = plan_of_tiles(lists, queries, keys)
            if heads.start == 0 and not queries.order.uniform:
                self.record_pairs(context, plan, layout, call.query.shape[2])
            return plan

        return attend_tiled(call, queries, keys, plan_of)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        layout, call = in_one_row(self.ring_layout(inputs, context)), inputs.call
        assert context is not None, "a layout needs a context"
        config = self.settings(context)
        kept, num = self._kept(config, layout), -(-layout.num_video // _BLOCK)
        self.record(context, layout.density(kept / num), inputs.query.shape[2])
        shards = shards_of(layout, call, (1, 1, _BLOCK), inputs.query.device)
        means, counts = pool_over_ring((own_queries(inputs), inputs.key), shards, call)
        query, key = (mean.to(inputs.query.dtype) for mean in means)
        mine, lists = shards[call.group.index], None
        if mine is not None and mine.queries is not None:
            real = None if call.keep is None else counts > 0
            lists = select_tiles(query[:, :, mine.tiles], key, kept, real=real)
        return attend_ring_lists(
            inputs,
            shards,
            lists,
            scale=self.softmax_scale,
            kernel=self.kernel,
            pooled=self.pools_tail,
            first_order=config.first_order,
        )

    def _kept(self, config: PisaConfig, layout: SequenceLayout) -> int:
        """Return how many blocks a block attends to exactly; warns where it is another share."""
        ratio, num = ratio_now(config.density), -(-layout.num_video // _BLOCK)
        kept = max(1, first_of(ratio, num))
        self.warn_of_density(layout, ratio, kept, num)
        return kept
