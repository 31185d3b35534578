"""Cube sparse attention: cubes of tokens attend to the cubes whose means match theirs best.

A cube always attends to itself. Text is attended to by everything, and attends to everything. The
rule is that of sglang's `cube_sparse_attn`, whose ratios are one per denoising step.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.config import (
    Axis,
    DensePart,
    EngineKernel,
    IndexSelector,
    Ratio,
    SparseConfig,
    StepSet,
    Tail,
    option,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import BlockStats, Budget, Cut, Router
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
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
    kernel: EngineKernel = option("auto", "kernel that runs")

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
        return (*parts, DensePart("topk_ratio_list of 1", StepSet(indices=IndexSelector(dense))))


class CubeRouter(Router[CubeConfig]):
    """The cubes whose means match best, and the cube itself."""

    chooses = "map"

    def cut(self, settings: CubeConfig, grid: Window) -> Cut:
        """Return the cubes."""
        return Cut(settings.local_cube_size)

    def varies(self, settings: CubeConfig) -> bool:
        """A list has another ratio in every step."""
        return settings.topk_ratio_list is not None

    def at(self, settings: CubeConfig, step: int, total: int | None) -> CubeConfig:
        """Return the parameters with the ratio of a step."""
        return settings if settings.topk_ratio_list is None else _at(settings, step, total)

    def check_run(self, settings: CubeConfig, context: ForwardContext) -> None:
        """Refuse a list of ratios for another number of steps."""
        self.at(settings, 0, context.num_steps)

    def budget(self, settings: CubeConfig, blocks: int, tokens: int) -> Budget:
        """Return how many of the cubes are kept, besides itself."""
        return Budget.of_share(settings.topk_ratio, blocks)

    def choose(
        self, settings: CubeConfig, stats: BlockStats, budget: Budget | None
    ) -> torch.Tensor:
        """Return the best cubes, and itself."""
        assert budget is not None, "it is always known"
        return stats.mark_best(budget.kept, near=0)


@lru_cache(maxsize=1024)
def _at(config: CubeConfig, step: int, total: int | None) -> CubeConfig:
    ratios = config.topk_ratio_list or ()
    if total is not None and len(ratios) != total:
        raise ConfigError(
            f"`topk_ratio_list` of cube_sparse_attn must have one ratio for each of the run's "
            f"{total} steps, got {len(ratios)}; topk_ratio takes them by share of the schedule"
        )
    if step >= len(ratios):
        raise ConfigError(
            f"`topk_ratio_list` of cube_sparse_attn must have a ratio for step {step}, got "
            f"{len(ratios)} ratios"
        )
    return replace(config, topk_ratio_list=None, topk_ratio=ratios[step])


class CubeBackend(SparseBackend):
    """Cube sparse attention."""

    backend = AttentionBackendEnum.CUBE_SPARSE_ATTN
    summary = "the best cubes by their means, a ratio per step"
    config_cls = CubeConfig
    router = CubeRouter
