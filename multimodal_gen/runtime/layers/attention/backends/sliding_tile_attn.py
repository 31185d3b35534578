"""Sliding Tile Attention: every tile of the latent grid attends to a window of tiles around it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from multimodal_gen.errors import ConfigError, NotInThisBuildError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine_variants import (
    FASTVIDEO_KERNEL,
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_ST_ATTN = PackageProbe(module="st_attn", distribution="st-attn", install="pip install st-attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingTileConfig(SparseConfig):
    """Parameters of `sliding_tile_attn`; windows are (time, height, width) in tiles.

    Attributes:
        mask_strategy_file_path: JSON file with a window per step, layer and head.
        window: one window for every step, layer and head, instead of a file; clamped to the grid.
        sta_mode: inference with known windows, or one of the modes that look for them.
        skip_time_steps: first denoising steps that stay dense.
        retarget: rescale a file made for other steps or another grid instead of refusing it.
        tile_size: tokens per tile along (time, height, width).
        target_density: share of the attention matrix the tuning modes aim at; None for the least
            loss per head.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    mask_strategy_file_path: str | None = option(
        None, "JSON file with a window per step, layer and head"
    )
    window: tuple[int, ...] | None = option(
        None, "one window for all, tiles along time, height, width", ge=1, length=3
    )
    sta_mode: Literal["STA_inference", "STA_searching", "STA_tuning", "STA_tuning_cfg"] = option(
        "STA_inference", "use windows, or search and tune them", aliases=("STA_mode",)
    )
    skip_time_steps: int = option(15, "first denoising steps that stay dense", ge=0)
    retarget: bool = option(False, "rescale a file made for other steps or another grid")
    tile_size: tuple[int, ...] = option(
        (6, 8, 8), "tokens per tile along time, height, width", ge=1, length=3
    )
    target_density: float | None = option(
        None, "share of the attention matrix tuning aims at", ge=0, le=1
    )
    kernel: Literal[
        "auto", "gluon", "fa4", "triton", "reference", "st_attn", "fastvideo_kernel"
    ] = option("auto", "kernel that runs")

    def check(self) -> None:
        """Inference takes its windows from exactly one place; only tuning has a target."""
        sources = (self.mask_strategy_file_path, self.window)
        if self.sta_mode == "STA_inference" and sources == (None, None):
            raise ConfigError(
                "`mask_strategy_file_path` of sliding_tile_attn must name a strategy file, or "
                "`window` must give one window such as [3, 3, 3]"
            )
        if None not in sources:
            raise ConfigError(
                "`window` of sliding_tile_attn must not be given with `mask_strategy_file_path`, "
                f"got {list(self.window or ())}; remove one"
            )
        if self.target_density is not None and not self.sta_mode.startswith("STA_tuning"):
            raise ConfigError(
                "`target_density` of sliding_tile_attn must be given only with sta_mode STA_tuning "
                f"or STA_tuning_cfg, got sta_mode {self.sta_mode}"
            )


class SlidingTileBackend(AttentionBackend):
    """Sliding Tile Attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SLIDING_TILE_ATTN
    summary: ClassVar[str] = "Sliding Tile Attention: a window of tiles per step, layer and head"
    config_cls: ClassVar[type[SlidingTileConfig]] = SlidingTileConfig
    not_in_this_build: ClassVar[str | None] = "Sliding Tile Attention is not in this build yet"
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants((Feature.GQA, Feature.LSE)),
        upstream_variant("st_attn", _ST_ATTN, head_sizes=(128,)),
        upstream_variant("fastvideo_kernel", FASTVIDEO_KERNEL, head_sizes=(128,)),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Raise `NotInThisBuildError`."""
        raise NotInThisBuildError(cls.not_in_this_build)
