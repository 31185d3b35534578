"""V-MoBA: each query picks temporal, spatial or spatio-temporal chunks of keys, layer by layer.

A query scores a chunk by the mean of its keys, neither scaled nor normalised, and attends to its
own chunk, to those it selects, and to all text. Text attends to everything. Masked tokens count in
no chunk and compete in no scope.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.slots import CacheCut, KeptChunks, SeenTiles
from multimodal_gen.kernels.chunk_select.api import Rule
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    DenseLimits,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import (
    FASTVIDEO_KERNEL,
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, ratio_now
from multimodal_gen.runtime.layers.attention.sparse.base import (
    SparseImpl,
    Tail,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba.chunks import (
    ChunkKind,
    attend_chunks,
    attend_seen_chunks,
    chunk_kind,
    chunk_shape,
    density,
    partition,
    select,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba.upstream import (
    UPSTREAM,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    attend_densely,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_FLASH_ATTN = PackageProbe(
    module="flash_attn.flash_attn_interface",
    distribution="flash-attn",
    install="pip install flash-attn --no-build-isolation",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VMoBAConfig(SparseConfig):
    """Parameters of `vmoba_attn`; they may also stand in a mapping under `moba_config`.

    From `first_full_layer` on, layers cycle through `temporal_layer` layers with temporal chunks,
    `spatial_layer` with spatial and `st_layer` with spatio-temporal ones. Sizes are in latent
    positions after patching; a kind with no layers needs no sizes.

    Attributes:
        temporal_chunk_size: frames per temporal chunk.
        temporal_topk: temporal chunks each query keeps in mode `topk`.
        spatial_chunk_size: (height, width) of a spatial chunk.
        spatial_topk: spatial chunks each query keeps in mode `topk`.
        st_chunk_size: (time, height, width) of a spatio-temporal chunk.
        st_topk: spatio-temporal chunks each query keeps in mode `topk`.
        moba_select_mode: keep a number of chunks, or a share of the summed scores.
        moba_threshold: share of the summed scores to keep in mode `threshold`; 1 keeps all chunks.
            It may change over the steps: {0: 0.5, 0.4: 0.25}.
        moba_threshold_type: over what scores compete: the chunks of one query and head, one chunk
            over heads and queries (not in mode `topk`), one head, or all of a sample.
        patch_resolution: (time, height, width) of the latent after patching that the settings are
            for. A run knows its own: other ones are refused, and none is needed.
        first_full_step: first denoising steps that stay dense.
        first_full_layer: first layers that stay dense.
        temporal_layer: layers with temporal chunks in each cycle.
        spatial_layer: layers with spatial chunks in each cycle.
        st_layer: layers with spatio-temporal chunks in each cycle.
        only_own_chunk: what a call does when no query selects more than its own chunk, which is
            when `topk` is 1: `full` attention, as the authors' kernel does, or `keep` to them.
        tail: what becomes of chunks that a query does not keep: `none` drops them, as the paper
            does; `pooled` counts each by the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    groups: ClassVar[tuple[str, ...]] = ("moba_config",)
    first_dense_steps: ClassVar[str] = "first_full_step"
    first_dense_layers: ClassVar[str] = "first_full_layer"
    example: ClassVar[str] = "temporal_chunk_size=2,spatial_layer=0,st_layer=0"

    temporal_chunk_size: int | None = option(None, "frames per temporal chunk", ge=1)
    temporal_topk: int | None = option(None, "temporal chunks each query keeps", ge=1)
    spatial_chunk_size: tuple[int, ...] | None = option(
        None, "height and width of a spatial chunk", ge=1, length=2
    )
    spatial_topk: int | None = option(None, "spatial chunks each query keeps", ge=1)
    st_chunk_size: tuple[int, ...] | None = option(
        None, "time, height and width of a spatio-temporal chunk", ge=1, length=3
    )
    st_topk: int | None = option(None, "spatio-temporal chunks each query keeps", ge=1)
    moba_select_mode: Literal["threshold", "topk"] = option(
        "threshold", "keep a share of the summed scores, or a number of chunks"
    )
    moba_threshold: Ratio = option(0.25, "share of the summed scores to keep", ge=0, le=1)
    moba_threshold_type: Literal["query_head", "block", "overall", "head_global"] = option(
        "query_head", "over what scores compete"
    )
    patch_resolution: tuple[int, ...] | None = option(
        None, "time, height, width of the patched latent it is meant for", ge=1, length=3
    )
    first_full_step: int = option(12, "first denoising steps that stay dense", ge=0)
    first_full_layer: int = option(0, "first layers that stay dense", ge=0)
    temporal_layer: int = option(1, "layers with temporal chunks in each cycle", ge=0)
    spatial_layer: int = option(1, "layers with spatial chunks in each cycle", ge=0)
    st_layer: int = option(1, "layers with spatio-temporal chunks in each cycle", ge=0)
    only_own_chunk: Literal["full", "keep"] = option(
        "full", "what a call does when only own chunks are selected"
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "triton", "reference", "fastvideo_kernel"] = option(
        "auto", "kernel that runs"
    )

    def check(self) -> None:
        """Every kind of chunk that some layer uses has its size, and its count in mode `topk`."""
        refuse_foreign_tail("vmoba_attn", self.tail, self.kernel, UPSTREAM)
        if self.moba_select_mode == "topk" and self.moba_threshold_type == "block":
            raise ConfigError(
                "`moba_threshold_type` of vmoba_attn must be query_head, head_global or overall "
                "with `moba_select_mode` topk, got block"
            )
        kinds = ("temporal", "spatial", "st")
        used = [kind for kind in kinds if getattr(self, f"{kind}_layer") > 0]
        if not used:
            raise ConfigError(
                "one of `temporal_layer`, `spatial_layer` and `st_layer` of vmoba_attn must be "
                ">= 1, got 0 for all"
            )
        topk = self.moba_select_mode == "topk"
        for kind in used:
            names = [f"{kind}_chunk_size", *([f"{kind}_topk"] if topk else [])]
            for name in names:
                if getattr(self, name) is None:
                    why = f"`{kind}_layer` is {getattr(self, f'{kind}_layer')}"
                    mode = " and `moba_select_mode` is topk" if name.endswith("topk") else ""
                    raise ConfigError(
                        f"`{name}` of vmoba_attn must be given because {why}{mode}; "
                        f"give it, or set `{kind}_layer` to 0"
                    )

    def kind(self, layer: int | None) -> ChunkKind:
        """Return the kind of chunk that a layer has.

        Raises:
            UsageError: the layer's index is unknown, and the kinds take turns.
        """
        cycle = (self.temporal_layer, self.spatial_layer, self.st_layer)
        if layer is None and sum(n > 0 for n in cycle) > 1:
            raise UsageError(
                "vmoba_attn must know the layer's index to choose its kind of chunk, got a layer "
                "without one; construct it with site=LayerSite(layer=3, ...), or layers that take "
                "a `prefix` with one such as 'blocks.3.attn'"
            )
        return chunk_kind(layer or 0, self.first_full_layer, cycle)

    def chunk_size(self, kind: ChunkKind) -> tuple[int, ...]:
        """Return the size of a kind of chunk as it was given."""
        size = getattr(self, f"{kind}_chunk_size")
        return (size,) if kind == "temporal" else tuple(size)

    def rule(self, kind: ChunkKind) -> Rule:
        """Return how queries choose among chunks of a kind."""
        scope = self.moba_threshold_type
        if self.moba_select_mode == "topk":
            return Rule(topk=getattr(self, f"{kind}_topk"), scope=scope)
        return Rule(threshold=ratio_now(self.moba_threshold), scope=scope)


class VMoBABackend(AttentionBackend):
    """V-MoBA."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.VMOBA_ATTN
    summary: ClassVar[str] = "V-MoBA: each query picks temporal, spatial or 3-D chunks of keys"
    config_cls: ClassVar[type[VMoBAConfig]] = VMoBAConfig
    # vmoba.csv, 40 heads: chunks of 455, 1,365 and 4,680 keys at 1da8268, of 1,890 at 505f3d8.
    dense_above: ClassVar[DenseLimits] = MappingProxyType(
        {"gluon": ((0, 0.43), (1365, 0.62), (1890, 0.71), (4680, 0.79))}
    )
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants(BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK), plans=("row_bits",)),
        upstream_variant(UPSTREAM, FASTVIDEO_KERNEL, _FLASH_ATTN),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return VMoBAImpl


class VMoBAImpl(SparseImpl[VMoBAConfig]):
    """V-MoBA of one layer."""

    declaration = VMoBABackend

    def check_run(self, context: ForwardContext) -> None:
        """Refuse settings for another latent grid, as a call would; warn if no step is sparse.

        Raises:
            ConfigError: the settings are for another grid.
        """
        super().check_run(context)
        if context.latent_grid is not None:
            self._check_grid(context.latent_grid)

    def ulysses_reason(self) -> str | None:
        """See `AttentionImpl.ulysses_reason`."""
        scope = self.config.moba_threshold_type
        if scope in ("query_head", "head_global"):
            return None
        return (
            f"`moba_threshold_type` {scope} ranks the chunks of all heads together, and a rank has "
            f"some of the heads; query_head and head_global rank within a head"
        )

    def _check_grid(self, grid: tuple[int, int, int]) -> None:
        given = self.config.patch_resolution
        if given not in (None, grid):
            raise ConfigError(
                f"`patch_resolution` of vmoba_attn must be the run's, {list(grid)} in latent "
                f"positions after patching, got {list(given or ())}; leave it out to use these "
                f"chunks at any resolution"
            )

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`; of whole chunks. Where scores decide, nobody knows."""
        config, grid = self.settings(context), layout.grid
        self._check_grid(grid)
        kind = config.kind(None if self.site is None else self.site.layer)
        rule, shape = config.rule(kind), chunk_shape(kind, config.chunk_size(kind), grid)
        num = math.prod(-(-n // edge) for n, edge in zip(grid, shape, strict=True))
        if rule.keeps_own_only(num) and config.only_own_chunk == "full":
            share = 1.0
        elif rule.topk is not None or rule.keeps_all(num):
            share = 1.0 if rule.keeps_all(num) else (rule.topk or 0) / num
        else:
            return None
        return layout.density(share), math.prod(shape)

    def cut_of_cache(self, kept: KeptChunks, context: ForwardContext | None) -> CacheCut | str:
        """See `AttentionImpl`: temporal chunks are frames, all others are the cache's tiles.

        The chunks of a cache are cut by themselves in time.
        """
        kind = self.config.kind(None if self.site is None else self.site.layer)
        size = self.config.chunk_size(kind)
        if kind == "spatial":  # which has a part in every chunk of the cache
            size = (kept.frames, *size)
        if kind != "temporal":
            return self.cut_with(kept.in_tiles(size), (UPSTREAM,))
        grid = None if context is None else context.latent_grid
        if kept.frames:
            rows = size[0] * (kept.tokens // kept.frames)
        elif grid is not None:
            rows = size[0] * grid[1] * grid[2]
        else:
            return "how many tokens a latent frame has is unknown"
        whole = rows >= kept.tokens
        cut = CacheCut(rows=kept.tokens) if whole else kept.in_rows(rows)
        return self.cut_with(cut, (UPSTREAM,))

    def forward_tiles(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_tiles`."""
        config, num = self.settings(context), tiles.num_tiles
        kind = config.kind(None if self.site is None else self.site.layer)
        rule = config.rule(kind)
        if kind == "spatial":
            num = len(tiles.order.starts)
        all_of_it = rule.keeps_own_only(num) and config.only_own_chunk == "full"
        if rule.keeps_all(num) or all_of_it:
            return self.attend_lists(query, key, value, tiles, None, context)
        self.kernel.begin_call()
        call = SparseCall(
            query=query,
            key=key,
            value=value,
            layout=SequenceLayout(
                grid=(1, 1, query.shape[1]),
                start=0,
                num_queries=query.shape[1],
                num_keys=key.shape[1],
            ),
            scale=self.softmax_scale,
            kernel=self.kernel,
            tail=self.pools_tail,
        )
        out, lse, share = attend_seen_chunks(call, tiles, rule, spatial=kind == "spatial")
        if context is not None:
            self.record(context, share, query.shape[2])
        return out, lse

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention over the selected chunks; see `SparseImpl.attend`."""
        config, grid = self.settings(context), call.layout.grid
        self._check_grid(grid)
        kind = config.kind(None if self.site is None else self.site.layer)
        rule, shape = config.rule(kind), chunk_shape(kind, config.chunk_size(kind), grid)
        chunks = partition(call.layout, shape, call.query.device)
        own_only = rule.keeps_own_only(chunks.num_chunks)
        share: float | torch.Tensor = 1.0
        if call.kernel.name == UPSTREAM:
            keeps_own = own_only and config.only_own_chunk == "keep"
            if not own_only:
                share = density(call, select(call, chunks, rule)[1])
            out = attend_upstream(call, chunks, rule, keeps_own=keeps_own, backend=self.label)
        elif rule.keeps_all(chunks.num_chunks) or (own_only and config.only_own_chunk == "full"):
            out = attend_densely(call)
        else:
            out, kept = attend_chunks(call, chunks, rule)
            self.learn_share(kept, math.prod(shape), context, call.first_head)
            share = kept
        self.record(context, share, call.query.shape[2])
        return out
