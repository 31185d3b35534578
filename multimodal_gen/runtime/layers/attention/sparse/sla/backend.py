"""Sparse-Linear Attention: exact attention over the best blocks plus linear attention.

Tokens stay in raster order. Every block of queries attends exactly to the key blocks whose means
match its own best, and to all text; text attends to everything. To that is added what a linear
attention finds, projected by the layer's trained `proj_l`; without one that branch is zero.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import BLOCK_SPARSE, TRITON
from multimodal_gen.kernels.linear_attention.api import add_linear
from multimodal_gen.kernels.requirements import Capability, PackageProbe
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
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
from multimodal_gen.runtime.layers.attention.sparse.base import SparseImpl
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    attend_in_ring,
    ring_layout,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.sla.blocks import (
    LinearBranch,
    RasterBlocks,
    block_map,
    density,
    kept_blocks,
    notice_no_projection,
    pack_keys,
    projection_of,
    raster_blocks,
)
from multimodal_gen.runtime.layers.attention.sparse.sla.ring import RingBlocks, ring_state
from multimodal_gen.runtime.layers.attention.sparse.sla.upstream import (
    UPSTREAM,
    UpstreamCall,
    attend_upstream,
    upstream_module,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, attend_rows
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_SLA = PackageProbe(
    module="sparse_linear_attention",
    distribution="sparse_linear_attention",
    install="pip install git+https://github.com/thu-ml/SLA.git",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SLAConfig(SparseConfig):
    """Parameters of `sla_attn`.

    Attributes:
        topk_ratio: share of key blocks that get exact attention; at least one block always does.
        feature_map: feature map of the linear branch.
        BLKQ: tokens per query block.
        BLKK: tokens per key block.
        use_bf16: compute in bfloat16, else in float16, where inputs have 16 bits.
        linear_branch: linear attention over `all` tokens, text included, or over `unselected`
            blocks only. Queries of text have none: they attend exactly to everything.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    topk_ratio: float = option(0.1, "share of key blocks with exact attention", ge=0, le=1)
    feature_map: Literal["softmax", "elu", "relu"] = option(
        "softmax", "feature map of the linear branch"
    )
    BLKQ: Literal[64, 128] = option(128, "tokens per query block")
    BLKK: Literal[64, 128] = option(64, "tokens per key block")
    use_bf16: bool = option(True, "compute in bfloat16, else float16, on 16-bit inputs")
    linear_branch: Literal["all", "unselected"] = option(
        "all", "tokens of the linear branch: all, or those of unselected blocks"
    )
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "sparse_linear_attention"] = (
        option("auto", "kernel that runs")
    )


class SLABackend(AttentionBackend):
    """Sparse-Linear Attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SLA_ATTN
    summary: ClassVar[str] = "Sparse-Linear Attention: exact over the best blocks, linear beside it"
    config_cls: ClassVar[type[SLAConfig]] = SLAConfig
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants(BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)),
        upstream_variant(
            "sparse_linear_attention", _SLA, TRITON, capability=Capability(minimum=(8, 0))
        ),
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


class SLAOptions(Protocol):
    """The parameters that every form of the method has; see `SLAConfig`."""

    topk_ratio: float
    feature_map: str
    BLKQ: int
    BLKK: int
    use_bf16: bool
    linear_branch: str
    kernel: str


class SLAImpl(SparseImpl):
    """Sparse-Linear Attention of one layer; a subclass may compute the sparse branch otherwise."""

    backend = AttentionBackendEnum.SLA_ATTN
    config_cls: ClassVar[type[SparseConfig]] = SLAConfig
    takes_projection: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        if not isinstance(config, self.config_cls):
            config = self.config_cls()
        self.options = cast("SLAOptions", config)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        context: ForwardContext,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return both branches, and dense attention for text; see `SparseImpl.attend`."""
        options = self.options
        blocks = raster_blocks(layout, options.BLKQ, options.BLKK, query.device)
        kept = self._kept(blocks, layout, context)
        if self.by_upstream:
            return self.attend_upstream(query, key, value, blocks, keep)
        dtype = self._exact_dtype(query.dtype)
        q, k, v = (x.to(dtype) for x in (query, key, value))
        keys, scored = blocks.keys, q
        if keep is not None:
            index, keys = pack_keys(blocks, keep)
            k, v = gather_tokens((k, v), index)
            if q.shape[1] == keep.shape[1]:  # padding may hold anything, NaN too
                scored = torch.where(keep[..., None, None], q, 0.0)
        branch = self._linear_branch(k, v, keys)
        plan = block_map(scored, branch.means, keys, blocks, kept)
        out = self.attend_blocks(q, k, v, plan, branch.means)
        for span in blocks.rest:
            out[:, span] = attend_rows(query[:, span], key, value, keep, self.softmax_scale)
        return branch.add(out, q, k, v, plan, blocks.video).to(query.dtype)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if self.options.linear_branch == "unselected":
            return "linear_branch unselected needs a state per query block of keys it never joins"
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        self._first_head = inputs.first_head
        self.kernel.begin_call()
        layout, options = ring_layout(inputs, context, str(self.backend)), self.options
        assert context is not None, "a layout needs a context"
        blocks = raster_blocks(layout, options.BLKQ, options.BLKK, inputs.query.device)
        kept = self._kept(blocks, layout, context)
        given = inputs.query.dtype
        inputs = inputs.to(self._exact_dtype(given))
        held = RingBlocks.of(inputs, layout, options.BLKQ, options.BLKK)
        out = attend_in_ring(
            inputs,
            held.keys,
            held.plans_of(inputs, kept, blocks.num_video),
            scale=self.softmax_scale,
            queries=held.queries[held.mine],
            engine=self.attend_part,
        )
        rows = held.rows(inputs, layout)
        if self.projection.linear is not None:
            state = ring_state(inputs, held.keys, options.feature_map)
            if rows.start < rows.stop:
                out = add_linear(
                    out,
                    inputs.query,
                    state,
                    projection_of(self.projection.linear, out.device),
                    rows=rows,
                    feature_map=options.feature_map,
                )
        return out.to(given)

    def attend_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        means: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sparse branch: softmax attention over the pairs of `plan`.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: as `key`.
            plan: the selected blocks.
            means: means of the key blocks, fp32 or fp64 [B, Hkv, Nk, D].

        Returns:
            [B, Sq, H, D], a new tensor; queries in no block are zero.
        """
        del means
        out = block_sparse_attention(
            query, key, value, plan, scale=self.softmax_scale, kernel=self.kernel
        )
        assert isinstance(out, torch.Tensor)
        return out

    def attend_part(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: BlockPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sparse branch over some of the keys, and its log-sum-exp, for a ring."""
        out, lse = block_sparse_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            return_lse=True,
            kernel=self.kernel,
        )
        return out, lse

    @property
    def by_upstream(self) -> bool:
        """Whether the authors' package computes everything."""
        return self.kernel.name == UPSTREAM

    def attend_upstream(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: RasterBlocks,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return both branches as the authors' package computes them.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: as `key`.
            blocks: the blocks that it will use, too.
            keep: bool [B, Sk], keys that may be attended to; None for all.

        Raises:
            UnsupportedBackendError: it cannot serve the call; lists the reasons.
        """
        options = self.options
        module = upstream_module(
            self.head_size,
            self.projection.linear,
            topk=options.topk_ratio,
            feature_map=options.feature_map,
            BLKQ=options.BLKQ,
            BLKK=options.BLKK,
            use_bf16=options.use_bf16,
        )
        call = UpstreamCall(
            text=max(query.shape[1], key.shape[1]) - (blocks.video.stop - blocks.video.start),
            masked=keep is not None,
            unselected=options.linear_branch == "unselected",
            scale=self.softmax_scale,
            head_size=query.shape[3],
            heads=query.shape[2],
            kv_heads=key.shape[2],
            blocks=blocks.num_video,
            topk_ratio=options.topk_ratio,
        )
        return attend_upstream(module, query, key, value, call)

    def _kept(self, blocks: RasterBlocks, layout: SequenceLayout, context: ForwardContext) -> int:
        """Return how many blocks a query block keeps, once that is noted."""
        ratio = self.options.topk_ratio
        kept = kept_blocks(ratio, blocks.num_video)
        self.record(context, density(kept, blocks, layout))
        if self.projection.linear is None and kept < blocks.num_video:
            component = None if self.site is None else self.site.component
            notice_no_projection(self.warnings, str(self.backend), component, ratio, kept)
        return kept

    def _linear_branch(self, key: torch.Tensor, value: torch.Tensor, keys: Blocks) -> LinearBranch:
        linear = self.projection.linear
        return LinearBranch.of(
            key,
            value,
            keys,
            None if linear is None else projection_of(linear, key.device),
            feature_map=self.options.feature_map,
            unselected=self.options.linear_branch == "unselected",
        )

    def _exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what both branches compute in; `use_bf16` is about 16 bits only."""
        if dtype not in HALF_DTYPES:
            return dtype
        return torch.bfloat16 if self.options.use_bf16 else torch.float16
