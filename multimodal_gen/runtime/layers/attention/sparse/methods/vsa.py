"""Video Sparse Attention: a coarse stage over tiles picks the tiles of a fine stage.

The coarse stage attends among means of tiles. Every query tile keeps the key tiles that score
best there; the fine stage attends to their tokens, and to all text. Text attends to everything.
Where a model has a gate, output = fine + gate * coarse output of the token's tile.

Shapes: B batch, S tokens, H heads, D head size, N tiles; q/k suffix = query/key side.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import torch
from typing_extensions import override

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.backends.engine import upstream_variant
from multimodal_gen.runtime.layers.attention.backends.packages import FASTVIDEO_KERNEL, VSA
from multimodal_gen.runtime.layers.attention.config import (
    ComputeMode,
    EngineKernel,
    Ratio,
    SparseConfig,
    Tail,
    compute_mode_option,
    in_decimals,
    option,
    ratio_now,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import VARIANTS_OF_BOTH, SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa_upstream import (
    UPSTREAM,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sparse.router import (
    Budget,
    Cut,
    Router,
    attend_means,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_CELLS = 4  # of a tile, where they rank tiles
_TILE_SIZES = ((4, 4, 4), (4, 8, 4), (4, 8, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSparseConfig(SparseConfig):
    """Parameters of `video_sparse_attn`.

    Where a checkpoint has gates, dense steps keep the coarse stage that they weigh; dense layers
    compute as the stock model, without it.

    Attributes:
        sparsity: share of key tiles each query tile skips; 0 equals dense attention. It may change
            over the steps: {0: 0.5, 0.4: 0.9}.
        topk: key tiles each query tile keeps, instead of `sparsity`.
        topk_convention: what `sparsity` is a share of when the number of kept tiles is computed:
            `tiles` of the grid, ragged ones included, or `tokens` / tokens per tile. FastVideo
            counted by `tokens` until July 2026, so for FastWan 2.1 and 2.2 and Wan2.1-VSA, and
            counts `tiles` since.
        router: what tiles are ranked by: the products of their means (`mean`), as in the paper, or
            the log-sum-exp over those of their cells (`subblock`), see `subblock_sparse_attn`. A
            gate's coarse stage is the same with both.
        tile_size: tokens per tile along (time, height, width): 64, 128 or 256 in all.
        compute_mode: `bf16` multiplies in the dtype of the inputs; `sage_bf16` queries and keys in
            8 bits, which has no gradients.
        tail: what becomes of tiles that a query tile does not keep: `none` drops them, as the paper
            does; `pooled` counts each by the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    example = "sparsity=0.9"

    sparsity: Ratio = option(
        0.0, "share of key tiles to skip", aliases=("VSA_sparsity",), ge=0, le=1
    )
    topk: int | None = option(None, "key tiles to keep, instead of sparsity", ge=1)
    topk_convention: Literal["tiles", "tokens"] = option(
        "tiles",
        "what sparsity is a share of: tiles of the grid, or tokens / tokens per tile, as FastWan "
        "2.1 and 2.2 and Wan2.1-VSA were trained",
    )
    router: Literal["mean", "subblock"] = option("mean", "what tiles are ranked by")
    tile_size: tuple[int, ...] = option(
        (4, 4, 4), "time, height, width of a tile: 4x4x4, 4x8x4 or 4x8x8 tokens", ge=1, length=3
    )
    compute_mode: ComputeMode = compute_mode_option()  # noqa: RUF009 - it returns a field
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal[EngineKernel, "vsa", "fastvideo_kernel"] = option("auto", "kernel that runs")

    def check(self) -> None:
        """The budget is given once, and the tile is one the kernels have."""
        refuse_foreign_tail("video_sparse_attn", self.tail, self.kernel, *UPSTREAM)
        if self.router == "subblock" and self.kernel in UPSTREAM:
            raise ConfigError(
                f"`router` of video_sparse_attn must be mean with kernel {self.kernel}, which "
                f"ranks by means, got subblock; remove one"
            )
        if self.topk is not None and self.sparsity != 0:
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


class VideoSparseRouter(Router[VideoSparseConfig]):
    """The tiles that score best in the coarse stage."""

    branch = staticmethod(attend_means)

    def cut(self, settings: VideoSparseConfig, grid: Window) -> Cut:
        """Return the tiles."""
        return Cut(settings.tile_size)

    def cells(self, settings: VideoSparseConfig) -> tuple[int, int]:
        """Return the cells of a tile, where they rank it."""
        return (_CELLS, _CELLS) if settings.router == "subblock" else (1, 1)

    def budget(self, settings: VideoSparseConfig, blocks: int, tokens: int) -> Budget:
        """Return how many of the tiles are kept."""
        asked = None if settings.topk is not None else 1 - ratio_now(settings.sparsity)
        return Budget(kept_tiles(settings, blocks, tokens), blocks, asked)

    @override
    def attend_upstream(
        self, settings: VideoSparseConfig, call: SparseCall, keys: Any, select: Any
    ) -> torch.Tensor | None:
        kept = self.budget(settings, len(keys.order.starts), keys.order.num_tokens).kept
        return attend_upstream(call, keys, select, kept, self.layer.label)


@lru_cache(maxsize=1024)
def kept_tiles(config: VideoSparseConfig, num_tiles: int, num_tokens: int) -> int:
    """Return how many key tiles each query tile keeps, in [1, `num_tiles`].

    Args:
        config: the budget, and what its share is of.
        num_tiles: tiles of the grid, ragged ones included.
        num_tokens: tokens of the grid.
    """
    if config.topk is not None:
        return min(config.topk, num_tiles)
    if config.sparsity == 0:
        return num_tiles  # also where ragged tiles outnumber tokens / tokens per tile
    whole = Fraction(num_tiles)
    if config.topk_convention == "tokens":
        whole = Fraction(num_tokens, math.prod(config.tile_size))
    kept = math.ceil((1 - in_decimals(ratio_now(config.sparsity))) * whole)
    return min(max(kept, 1), num_tiles)


class VideoSparseBackend(SparseBackend):
    """Video Sparse Attention."""

    backend = AttentionBackendEnum.VIDEO_SPARSE_ATTN
    summary = "Video Sparse Attention: coarse attention picks the tiles to attend to"
    config_cls = VideoSparseConfig
    # sparse.csv at 56740c3, 21x45x80: 0.1 of the tiles in 32.5 ms, dense 162.2 ms; triton 434.3 of
    # the 675.0 TFLOP/s of FA3 in blocks of 64, less what the layer loses with gluon.
    dense_above = MappingProxyType({"gluon": ((0, 0.50),), "triton": ((0, 0.48),)})
    router = VideoSparseRouter
    variants = (
        *VARIANTS_OF_BOTH,
        upstream_variant("vsa", VSA),
        upstream_variant("fastvideo_kernel", FASTVIDEO_KERNEL),
    )
