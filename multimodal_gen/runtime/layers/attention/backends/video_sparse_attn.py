"""Video Sparse Attention: a coarse stage over tiles picks the tiles of a fine stage."""

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

# Looked for on disk only: importing it needs a GPU.
_VSA = PackageProbe(module="vsa", distribution="vsa", install="pip install vsa")

_TILE_SIZES = ((4, 4, 4), (4, 8, 4), (4, 8, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSparseConfig(SparseConfig):
    """Parameters of `video_sparse_attn`.

    Attributes:
        sparsity: share of key tiles each query tile skips; 0 equals dense attention.
        topk: key tiles each query tile keeps, instead of `sparsity`.
        topk_convention: what `sparsity` is a share of when the number of kept tiles is computed:
            `tiles` of the grid, ragged ones included, or `tokens` / tokens per tile.
        tile_size: tokens per tile along (time, height, width): 64, 128 or 256 in all.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    sparsity: float = option(
        0.0, "share of key tiles to skip", aliases=("VSA_sparsity",), ge=0, le=1
    )
    topk: int | None = option(None, "key tiles to keep, instead of sparsity", ge=1)
    topk_convention: Literal["tiles", "tokens"] = option(
        "tiles", "what sparsity is a share of: tiles of the grid, or tokens / tokens per tile"
    )
    tile_size: tuple[int, ...] = option(
        (4, 4, 4), "tokens per tile along time, height, width", ge=1, length=3
    )
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "vsa", "fastvideo_kernel"] = (
        option("auto", "kernel that runs")
    )

    def check(self) -> None:
        """The budget is given once, and the tile is one the kernels have."""
        if self.topk is not None and self.sparsity > 0:
            raise ConfigError(
                f"`topk` of video_sparse_attn must not be given with `sparsity`, got topk "
                f"{self.topk} and sparsity {self.sparsity}; remove one"
            )
        if self.tile_size not in _TILE_SIZES:
            valid = ", ".join(str(list(tile)) for tile in _TILE_SIZES)
            raise ConfigError(
                f"`tile_size` of video_sparse_attn must be one of {valid}, "
                f"got {list(self.tile_size)}"
            )


class VideoSparseBackend(AttentionBackend):
    """Video Sparse Attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.VIDEO_SPARSE_ATTN
    summary: ClassVar[str] = "Video Sparse Attention: coarse attention picks the tiles to attend to"
    config_cls: ClassVar[type[VideoSparseConfig]] = VideoSparseConfig
    not_in_this_build: ClassVar[str | None] = "Video Sparse Attention is not in this build yet"
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants((Feature.GQA,)),
        upstream_variant("vsa", _VSA),
        upstream_variant("fastvideo_kernel", FASTVIDEO_KERNEL),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Raise `NotInThisBuildError`."""
        raise NotInThisBuildError(cls.not_in_this_build)
