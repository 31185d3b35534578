"""V-MoBA: each query picks temporal, spatial or spatio-temporal chunks of keys, layer by layer.

A query scores a chunk by the mean of its keys, neither scaled nor normalised, and attends to its
own chunk, to those it selects, and to all text. Text attends to everything. Masked tokens count in
no chunk and compete in no scope.

Shapes: B batch, S tokens, H heads, D head size.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.slots import CacheCut, KeptChunks
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.select.row_reference import Rule
from multimodal_gen.kernels.select.rows import select_chunks
from multimodal_gen.runtime.layers.attention.backends.engine import (
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.backends.packages import (
    FASTVIDEO_KERNEL,
    FLASH_ATTN_ANY,
)
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    Ratio,
    SparseConfig,
    Tail,
    option,
    ratio_now,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SPARSE_FEATURES, SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba_upstream import (
    UPSTREAM,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sparse.router import (
    Budget,
    Cut,
    Limits,
    Router,
    RowStats,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_Kind = Literal["temporal", "spatial", "st"]


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
            when `topk` is 1: `full` attention, as the authors' kernel does, or `mask` to them.
        tail: what becomes of chunks that a query does not keep: `none` drops them, as the paper
            does; `pooled` counts each by the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    groups = ("moba_config",)
    first_dense_steps = "first_full_step"
    first_dense_layers = "first_full_layer"
    example = "temporal_chunk_size=2,spatial_layer=0,st_layer=0"

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

    def kind(self, layer: int | None) -> _Kind:
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
        place = ((layer or 0) - self.first_full_layer) % sum(cycle)
        if place < cycle[0]:
            return "temporal"
        return "spatial" if place < cycle[0] + cycle[1] else "st"

    def chunk(self, kind: _Kind, grid: Window) -> tuple[int, ...]:
        """Return the tokens of a chunk along time, height and width, which a grid may cut."""
        size = getattr(self, f"{kind}_chunk_size")
        if kind == "temporal":
            return (size, *grid[1:])
        return (grid[0], *size) if kind == "spatial" else tuple(size)

    def rule(self, kind: _Kind) -> Rule:
        """Return how queries choose among chunks of a kind."""
        scope = self.moba_threshold_type
        if self.moba_select_mode == "topk":
            return Rule(topk=getattr(self, f"{kind}_topk"), scope=scope)
        return Rule(threshold=ratio_now(self.moba_threshold), scope=scope)


class VMoBARouter(Router[VMoBAConfig]):
    """The chunks that each query selects, of the kind that the layer has."""

    chooses = "rows"

    def cut(self, settings: VMoBAConfig, grid: Window) -> Cut:
        """Return the layer's chunks; a `ConfigError` where the settings are for another grid."""
        _check_grid(settings, grid)
        return Cut(settings.chunk(self._kind(settings), grid))

    def spans_time(self, settings: VMoBAConfig) -> bool:
        """Spatial chunks do."""
        return self._kind(settings) == "spatial"

    def budget(self, settings: VMoBAConfig, blocks: int, tokens: int) -> Budget | None:
        """Return how many chunks a query keeps, unless scores decide."""
        rule = self._rule(settings)
        own_only = rule.keeps_own_only(blocks)
        if rule.keeps_all(blocks) or (own_only and settings.only_own_chunk == "full"):
            return Budget(blocks, blocks)
        return None if rule.topk is None else Budget(rule.topk, blocks)

    def choose_rows(
        self, settings: VMoBAConfig, stats: RowStats
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each query's own chunk and those it selects."""
        rule = self._rule(settings)
        return select_chunks(stats.query, stats.chunks, stats.own, rule, mask=stats.mask)

    def attend_upstream(
        self, settings: VMoBAConfig, call: SparseCall, keys: Any, select: Any
    ) -> torch.Tensor | None:
        """Return what the authors' kernel computes, where it was asked for."""
        rule, keeps_own = self._rule(settings), settings.only_own_chunk == "keep"
        keeps_own = keeps_own and rule.keeps_own_only(len(keys.order.starts))
        label = self.layer.label
        return attend_upstream(call, keys.order, rule, keeps_own=keeps_own, backend=label)

    def check_run(self, settings: VMoBAConfig, context: ForwardContext) -> None:
        """Refuse settings for another latent grid, as a call would."""
        if context.latent_grid is not None:
            _check_grid(settings, context.latent_grid)

    def cut_of_cache(
        self, settings: VMoBAConfig, kept: KeptChunks, grid: Window | None
    ) -> CacheCut | str:
        """Return frames for temporal chunks, and the cache's tiles for all others.

        The chunks of a cache are cut by themselves in time.
        """
        kind = self._kind(settings)
        if kind != "temporal":
            return kept.in_tiles(settings.chunk(kind, (kept.frames, 0, 0)))
        frames = settings.chunk(kind, (0, 0, 0))[0]
        if kept.frames:
            rows = frames * (kept.tokens // kept.frames)
        elif grid is not None:
            rows = frames * grid[1] * grid[2]
        else:
            return "how many tokens a latent frame has is unknown"
        return CacheCut(rows=kept.tokens) if rows >= kept.tokens else kept.in_rows(rows)

    def limits(self, settings: VMoBAConfig) -> Limits:
        """What is ranked together must be in one place."""
        scope = settings.moba_threshold_type
        ring = ulysses = None
        if scope != "query_head":
            ring = (
                f"`moba_threshold_type` {scope} ranks the chunks of all queries together, and a "
                f"rank has some of the queries; query_head ranks those of each query"
            )
        if scope not in ("query_head", "head_global"):
            ulysses = (
                f"`moba_threshold_type` {scope} ranks the chunks of all heads together, and a rank "
                f"has some of the heads; query_head and head_global rank within a head"
            )
        return Limits(ring=ring, ulysses=ulysses)

    def _kind(self, settings: VMoBAConfig) -> _Kind:
        site = self.layer.site
        return settings.kind(None if site is None else site.layer)

    def _rule(self, settings: VMoBAConfig) -> Rule:
        return settings.rule(self._kind(settings))


def _check_grid(config: VMoBAConfig, grid: Window) -> None:
    if config.patch_resolution not in (None, grid):
        raise ConfigError(
            f"`patch_resolution` of vmoba_attn must be the run's, {list(grid)} in latent "
            f"positions after patching, got {list(config.patch_resolution)}; leave it out to use "
            f"these chunks at any resolution"
        )


class VMoBABackend(SparseBackend):
    """V-MoBA."""

    backend = AttentionBackendEnum.VMOBA_ATTN
    summary = "V-MoBA: each query picks temporal, spatial or 3-D chunks of keys"
    config_cls = VMoBAConfig
    # vmoba.csv, 40 heads: chunks of 455, 1,365 and 4,680 keys at 1da8268, of 1,890 at 505f3d8.
    dense_above = MappingProxyType({"gluon": ((0, 0.43), (1365, 0.62), (1890, 0.71), (4680, 0.79))})
    router = VMoBARouter
    variants = (
        *engine_variants(BLOCK_SPARSE, SPARSE_FEATURES, plans=("row_bits",)),
        upstream_variant(UPSTREAM, FASTVIDEO_KERNEL, FLASH_ATTN_ANY),
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Rows choose, and chunks are of any size."""
        return 0, 0
