"""Cube sparse attention: cubes of tokens attend to the cubes whose means match theirs best.

A cube always attends to itself. Text is attended to by everything, and attends to everything. The
rule is that of sglang's `cube_sparse_attn`, whose ratios are one per denoising step.
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
    best_means,
    near,
)
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.tile_pool.api import select_tiles
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import (
    Axis,
    BackendConfig,
    DensePart,
    IndexSelector,
    SparseConfig,
    option,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, first_of, ratio_now
from multimodal_gen.runtime.layers.attention.sparse.base import (
    Cut,
    MapImpl,
    Means,
    Tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, fit_tile
from multimodal_gen.runtime.layers.attention.sparse.upstream import lists_as_map
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_RATIO = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CubeConfig(SparseConfig):
    """Parameters of `cube_sparse_attn`.

    Attributes:
        local_cube_size: tokens per cube along (time, height, width).
        topk_ratio_list: share of the cubes that each cube keeps besides itself, one for every
            denoising step; steps of 1 stay dense. Of n cubes, floor(ratio * n) are kept, at least
            one.
        topk_ratio: the same for all steps, instead; or by share of the schedule:
            {0: 0.8, 0.4: 0.5}.
        tail: what becomes of cubes that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    local_cube_size: tuple[int, ...] = option(
        (4, 4, 4), "tokens per cube along time, height, width", ge=1, length=3
    )
    topk_ratio_list: tuple[float, ...] | None = option(
        None, "share of cubes to keep, one for every step; 1: dense", ge=0, le=1
    )
    topk_ratio: Ratio = option(_RATIO, "share of cubes to keep in all steps, instead", ge=0, le=1)
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference"] = option(
        "auto", "kernel that runs"
    )

    def check(self) -> None:
        """The ratio is given once, and a list of them has some."""
        if self.topk_ratio_list is None:
            return
        if self.topk_ratio != _RATIO:
            raise ConfigError(
                f"`topk_ratio` of cube_sparse_attn must not be given with `topk_ratio_list`, got "
                f"{self.topk_ratio}; remove one"
            )
        if not self.topk_ratio_list:
            raise ConfigError(
                "`topk_ratio_list` of cube_sparse_attn must have one ratio for every step, got none"
            )

    def dense_parts(self, axis: Axis) -> tuple[DensePart, ...]:
        """Return the steps or the layers that stay dense; steps of ratio 1 among them."""
        parts = SparseConfig.dense_parts(self, axis)
        ratios = enumerate(self.topk_ratio_list or ())
        dense = tuple((i, i) for i, ratio in ratios if ratio == 1 and axis == "steps")
        if not dense:
            return parts
        return (*parts, DensePart("topk_ratio_list of 1", IndexSelector(dense)))


class CubeBackend(AttentionBackend):
    """Cube sparse attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.CUBE_SPARSE_ATTN
    summary: ClassVar[str] = "the best cubes by their means, a ratio per step"
    config_cls: ClassVar[type[CubeConfig]] = CubeConfig
    variants: ClassVar[tuple[Variant, ...]] = engine_variants(
        BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a cube; see `AttentionBackend.block_sizes`."""
        size = math.prod(getattr(config, "local_cube_size", (4, 4, 4)))
        return size, size

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return CubeImpl


class CubeImpl(MapImpl[CubeConfig]):
    """Cube sparse attention of one layer."""

    declaration = CubeBackend

    def prepare(self) -> None:
        """A list has another ratio in every step."""
        self.varies_by_step |= self.config.topk_ratio_list is not None

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`; of whole cubes, without a cube itself."""
        cube = fit_tile(self.config.local_cube_size, layout.grid)
        num = math.prod(-(-n // edge) for n, edge in zip(layout.grid, cube, strict=True))
        kept = max(1, first_of(self._ratio(self.settings(context), context), num))
        return layout.density(kept / num), math.prod(cube)

    def cut(self, config: CubeConfig, layout: SequenceLayout) -> Cut:
        """Return the cubes; see `MapImpl.cut`."""
        return layout, config.local_cube_size

    def choose(self, config: CubeConfig, means: Means, context: ForwardContext) -> torch.Tensor:
        """Return the best cubes, and itself; see `MapImpl.choose`."""
        num, ratio = means.query.shape[2], self._ratio(config, context)
        kept = max(1, first_of(ratio, num))
        self.warn_of_density(means.layout, ratio, kept, num)
        lists = select_tiles(means.query, means.key, kept, real=means.real)
        itself = torch.eye(num, dtype=torch.bool, device=lists.device)
        return lists_as_map(lists, num) | itself

    def cut_of_cache(self, kept: KeptChunks, context: ForwardContext | None) -> CacheCut | str:
        """See `AttentionImpl`: it chooses among all cubes that the cache shows."""
        return self.cut_with(kept.in_tiles(self.config.local_cube_size))

    def choose_seen(
        self,
        config: CubeConfig,
        means: SeenMeans,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> torch.Tensor:
        """Return the best cubes, and itself; see `MapImpl.choose_seen`."""
        kept = max(1, first_of(self._ratio(config, context), tiles.num_tiles))
        return lists_as_map(best_means(means, kept), means.key.shape[2]) | near(tiles, 0)

    def check_run(self, context: ForwardContext) -> None:
        """Refuse a list of ratios for another number of steps; warn if no step is sparse.

        Raises:
            ConfigError: the run has another number of steps.
        """
        super().check_run(context)
        self._check_steps(context.num_steps)

    def _check_steps(self, total: int | None) -> None:
        ratios = self.config.topk_ratio_list
        if ratios is not None and total is not None and len(ratios) != total:
            raise ConfigError(
                f"`topk_ratio_list` of {self.label} must have one ratio for each of the run's "
                f"{total} steps, got {len(ratios)}; topk_ratio takes them by share of the schedule"
            )

    def _ratio(self, config: CubeConfig, context: ForwardContext | None) -> float:
        """Return the ratio of the running step."""
        ratios = config.topk_ratio_list
        if ratios is None or context is None:
            return ratio_now(config.topk_ratio) if ratios is None else ratios[0]
        step = context.current_timestep
        self._check_steps(context.num_steps)
        if step >= len(ratios):
            raise ConfigError(
                f"`topk_ratio_list` of {self.label} must have a ratio for step {step}, got "
                f"{len(ratios)} ratios"
            )
        return ratios[step]
