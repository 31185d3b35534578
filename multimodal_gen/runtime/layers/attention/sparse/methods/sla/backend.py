"""Sparse-Linear Attention: exact attention over the best blocks plus linear attention.

Tokens stay in raster order. Every block of queries attends exactly to the key blocks whose means
match its own best, and to all text; text attends to everything. To that is added what a linear
attention finds, projected by the layer's trained `proj_l`; without one that branch is zero.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.tail import PooledTail
from multimodal_gen.kernels.engine import BLOCK_SPARSE, TRITON
from multimodal_gen.kernels.linear_attention.api import add_linear
from multimodal_gen.kernels.requirements import Capability, PackageProbe
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    DenseLimits,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine import (
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
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import tell_plan
from multimodal_gen.runtime.layers.attention.sparse.methods.sla.blocks import (
    LinearBranch,
    RasterBlocks,
    block_map,
    kept_blocks,
    notice_no_projection,
    projection_of,
    raster_blocks,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sla.ring import RingBlocks, ring_state
from multimodal_gen.runtime.layers.attention.sparse.methods.sla.upstream import (
    UPSTREAM,
    attend_upstream,
    upstream_module,
)
from multimodal_gen.runtime.layers.attention.sparse.ring_tail import ring_tail
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    attend_ring_tiles,
    plans_of_lists,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    attend_text,
    kept_first,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_SLA = PackageProbe(
    module="sparse_linear_attention",
    distribution="sparse_linear_attention",
    install="pip install git+https://github.com/thu-ml/SLA.git",
)


_FEW_BLOCKS = 256  # of more, one that is cut short changes the density by less than a point


@dataclass(frozen=True, slots=True, kw_only=True)
class SLAParameters(SparseConfig):
    """Parameters that both forms of the method have.

    Attributes:
        topk_ratio: share of key blocks in the sparse branch; at least one block always is. It may
            change over the steps: {0: 0.5, 0.4: 0.1}.
        feature_map: feature map of the linear branch.
        BLKQ: tokens per query block.
        BLKK: tokens per key block.
        use_bf16: compute in bfloat16, else in float16, where inputs have 16 bits.
        linear_branch: linear attention over `all` tokens, text included, or over `unselected`
            blocks only. Queries of text have none: they attend exactly to everything.
    """

    topk_ratio: Ratio = option(0.1, "share of key blocks with exact attention", ge=0, le=1)
    feature_map: Literal["softmax", "elu", "relu"] = option(
        "softmax", "feature map of the linear branch"
    )
    BLKQ: Literal[64, 128] = option(128, "tokens per query block")
    BLKK: Literal[64, 128] = option(64, "tokens per key block")
    use_bf16: bool = option(True, "compute in bfloat16, else float16, on 16-bit inputs")
    linear_branch: Literal["all", "unselected"] = option(
        "all", "tokens of the linear branch: all, or those of unselected blocks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SLAConfig(SLAParameters):
    """Parameters of `sla_attn`; see `SLAParameters` for the others.

    Attributes:
        tail: what becomes of video blocks that a query block does not keep, where a checkpoint has
            no trained `proj_l`: `none` drops them; `pooled` counts each by the mean of its keys
            and values. With a `proj_l`, which stands for them, it must be `none`.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "sparse_linear_attention"] = (
        option("auto", "kernel that runs")
    )

    def check(self) -> None:
        """The authors' package has no tail."""
        refuse_foreign_tail("sla_attn", self.tail, self.kernel, UPSTREAM)


def _density(plan: BlockPlan, call: SparseCall) -> torch.Tensor:
    """Return the share of the pairs of kept keys that a plan and text attend to, a tensor []."""
    layout = call.layout
    pairs = plan.pairs(full=True).double().mean()
    others = layout.num_queries - layout.num_video
    if call.keep is None:
        return pairs / (layout.num_queries * layout.num_keys) + others / layout.num_queries
    keys = call.keep.sum(1).double().mean()
    return (pairs + others * keys) / (layout.num_queries * keys).clamp_min(1.0)


class SLABackend(AttentionBackend):
    """Sparse-Linear Attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SLA_ATTN
    summary: ClassVar[str] = "Sparse-Linear Attention: exact over the best blocks, linear beside it"
    config_cls: ClassVar[type[SLAConfig]] = SLAConfig
    # sla.csv at 694f3b1, 21x45x80, no projection: 0.0998 in 17.7 ms; blocks of 64 queries by
    # engine.csv at 56740c3, r64: 505.4 of 754.7 TFLOP/s; triton 434.3 of 675.0 and, in blocks of
    # 128, 505.4 of 688.2 TFLOP/s of FA3.
    dense_above: ClassVar[DenseLimits] = MappingProxyType(
        {"gluon": ((0, 0.67), (128, 0.91)), "triton": ((0, 0.64), (128, 0.73))}
    )
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants(BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)),
        upstream_variant(UPSTREAM, _SLA, TRITON, capability=Capability(minimum=(8, 0))),
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a block; see `AttentionBackend.block_sizes`."""
        options = config if isinstance(config, SLAConfig) else SLAConfig()
        return options.BLKQ, options.BLKK

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return SLAImpl


_ParametersT = TypeVar("_ParametersT", bound=SLAParameters)


class SLAImpl(SparseImpl[_ParametersT]):
    """Sparse-Linear Attention of one layer; another form differs in `sparse_branch` alone."""

    declaration: ClassVar[type[AttentionBackend]] = SLABackend
    takes_projection: ClassVar[bool] = True
    cache_reason: ClassVar[str] = "its linear branch sums over all keys of one call"

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return both branches; see `SparseImpl.attend`."""
        layout, config, keep = call.layout, self.settings(context), call.keep
        ratio = ratio_now(config.topk_ratio)
        blocks = raster_blocks(layout, config.BLKQ, config.BLKK, call.query.device)
        kept = self._kept(blocks, layout, ratio, call.projection)
        # Blocks that are cut short, of which there are few in long sequences, or by a mask.
        is_cut = keep is not None or blocks.num_video <= _FEW_BLOCKS
        by_pairs = is_cut and kept < blocks.num_video and call.kernel.name != UPSTREAM
        if not by_pairs:
            self._record_blocks(context, layout, kept / blocks.num_video, call.query.shape[2])
        if call.kernel.name == UPSTREAM:
            return self._attend_upstream(call, blocks.num_video, ratio)
        dtype = self._exact_dtype(call.query.dtype)
        q, k, v = (x.to(dtype) for x in (call.query, call.key, call.value))
        keys, scored = blocks.keys, q
        if keep is not None:
            index, keys = kept_first(blocks.order, blocks.ordered, keep)
            k, v = gather_tokens((k, v), index)
            if q.shape[1] == keep.shape[1]:  # padding may hold anything, NaN too
                scored = torch.where(keep[..., None, None], q, 0.0)
        linear = call.projection
        branch = LinearBranch.of(
            k,
            v,
            keys,
            None if linear is None else projection_of(linear, k.device),
            feature_map=config.feature_map,
            unselected=config.linear_branch == "unselected",
        )
        plan = block_map(scored, branch.means, keys, blocks, kept)
        if by_pairs:
            self.record(context, _density(plan, call), call.query.shape[2])
        moved = None if keep is None else index
        tell_plan(slice(0, q.shape[2]), plan, (q.shape[1], k.shape[1]), keys=moved)
        pooled = blocks.num_video if call.tail else 0
        out: torch.Tensor = self.sparse_branch(q, k, v, plan, means=branch.means, num_pooled=pooled)
        if layout.text and out.requires_grad:
            out = out.clone()  # the backward pass of the sparse branch reads what it gave
        attend_text(call, out)
        return branch.add(out, q, k, v, plan, layout.video).to(call.query.dtype)

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`."""
        num_blocks = -(-layout.num_video // self.config.BLKK)
        kept = kept_blocks(ratio_now(self.settings(context).topk_ratio), num_blocks)
        return layout.density(kept / num_blocks), self.config.BLKQ

    def sparse_branch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        *,
        means: torch.Tensor | None = None,
        num_pooled: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """Return softmax attention over the pairs of `plan`, a new tensor.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: as `key`.
            plan: the selected blocks; queries in no block are zero.
            means: means of the key blocks, fp32 or fp64 [B, Hkv, Nk, D], where they are known.
            num_pooled: of so many of the first key blocks, those that are not selected count by
                their means.
            return_lse: whether to return the log-sum-exp beside it, for a ring.
        """
        del means
        return block_sparse_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            return_lse=return_lse,
            kernel=self.kernel,
            tail=PooledTail(num_blocks=num_pooled) if num_pooled else None,
        )

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if self.config.linear_branch == "unselected":
            return "linear_branch unselected needs a state per query block of keys it never joins"
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        layout, config = self.ring_layout(inputs, context), self.config
        assert context is not None, "a layout needs a context"
        blocks = raster_blocks(layout, config.BLKQ, config.BLKK, inputs.query.device)
        ratio = ratio_now(self.settings(context).topk_ratio)
        kept = self._kept(blocks, layout, ratio, inputs.projection)
        self._record_blocks(context, layout, kept / blocks.num_video, inputs.query.shape[2])
        given = inputs.query.dtype
        inputs = inputs.to(self._exact_dtype(given))
        held = RingBlocks.of(inputs, layout, config.BLKQ, config.BLKK)
        lists, tail = held.lists_of(inputs, kept, blocks.num_video), None
        mine = held.queries[held.mine]
        if self.pools_tail:
            tail = ring_tail(inputs, held.keys, lists, scale=self.softmax_scale)
        out = attend_ring_tiles(
            inputs,
            held.keys,
            plans_of_lists(mine, lists),
            scale=self.softmax_scale,
            kernel=self.kernel,
            queries=mine,
            attend=partial(self.sparse_branch, return_lse=True),
            tail=tail,
        )
        rows, linear = held.rows(inputs, layout), inputs.projection
        if linear is not None:
            state = ring_state(inputs, held.keys, config.feature_map)
            if rows.start < rows.stop:
                out = add_linear(
                    out,
                    inputs.query,
                    state,
                    projection_of(linear, out.device),
                    rows=rows,
                    feature_map=config.feature_map,
                )
        return out.to(given)

    def _attend_upstream(self, call: SparseCall, num_blocks: int, ratio: float) -> torch.Tensor:
        """Return both branches as the authors' package computes them."""
        config = self.config
        module = upstream_module(
            self.head_size,
            call.projection,
            topk=ratio,
            feature_map=config.feature_map,
            BLKQ=config.BLKQ,
            BLKK=config.BLKK,
            use_bf16=config.use_bf16,
        )
        return attend_upstream(
            call,
            module,
            num_blocks=num_blocks,
            topk_ratio=ratio,
            linear_branch=config.linear_branch,
            backend=self.label,
        )

    def _record_blocks(
        self, context: ForwardContext, layout: SequenceLayout, share: float, num_heads: int
    ) -> None:
        """Note a share of blocks, as if every block were of mean size."""
        self.record(context, layout.density(share), num_heads)

    def _kept(
        self, blocks: RasterBlocks, layout: SequenceLayout, ratio: float, linear: nn.Linear | None
    ) -> int:
        """Return how many blocks a query block keeps; warns of what that means."""
        kept = kept_blocks(ratio, blocks.num_video)
        self.warn_of_density(layout, ratio, kept, blocks.num_video)
        component = None if self.site is None else self.site.component
        if linear is not None and self.pools_tail:
            raise UsageError(
                f"`tail` of {self.label} must be none where a checkpoint has a trained proj_l, as "
                f"{component or 'this layer'} has: its linear branch stands for the blocks that "
                f"are not kept; remove it, got pooled"
            )
        if linear is None and kept < blocks.num_video and not self.pools_tail:
            can_pool = hasattr(self.config, "tail")
            notice_no_projection(
                self.warnings, self.label, component, ratio, kept, can_pool=can_pool
            )
        return kept

    def _exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what both branches compute in; `use_bf16` is about 16 bits only."""
        if dtype not in HALF_DTYPES:
            return dtype
        return torch.bfloat16 if self.config.use_bf16 else torch.float16
