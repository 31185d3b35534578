"""VSA-H3: Video Sparse Attention over the packed sequence of MiniMax-H3.

H3 has one sequence of text, keyframes, sound and video, the video last. The rule is that of
FastVideo's `VIDEO_SPARSE_ATTN_H3` (2f3d407), as sglang has it under `video_sparse_attn_h3`, whose
names the parameters have. What lies in front of the video is cut into P pieces of as many tokens as
a tile has, the video into N tiles, and of all of them means are made. With s the scale and
k = max(1, ceil((1 - sparsity) N)),

    score(i, j) = s qbar_i.kbar_j
    exempt      a tile of queries keeps the k best tiles of keys, and all pieces
    compete     it keeps the k + P best of all tiles and pieces together
    out         = attention to what is kept + gate * softmax over all j of score(i, j) vbar_j

Pieces attend to everything, and have the gated part as tiles do. Here everything that is not the
video's counts as such a piece, also behind it, as text does in all methods; `compete` is the one
choice by which text may be left out.

What differs from them, or is easily missed:

- Without a gate `exempt` is `video_sparse_attn` with the same sparsity. With one, the coarse stage
  of that method knows nothing of text, so gates trained for one of them are not those of the other.
- They cut pieces at the ends of the text, of each keyframe and of the sound, so that none holds two
  kinds. Layers know where all of it ends and not where a part does: pieces are cut every tile's
  length. That changes the means of pieces, so `compete` and the gated part, not `exempt` alone.
- `vsa_dense_layers` and the first dense steps keep the gated part, as in their code; the common
  `dense_layers` are those of the stock model, without it.
- sglang has tiles of 64 tokens alone; 128 and 256 are FastVideo's.
- `ref_keep_rate` of FastVideo, a share of its own for reference videos, is not here, nor are
  several videos in one sequence: all but the last one are pieces.
- A mask of the first frame (`use_vsa_first_frame_mask`) is one of xDiT's AITER_VSA, another rule,
  and no VSA-H3 that is public has one. Nor has any windows in some layers: those of VDN-H3 are in
  all of them, beside a trained linear part. A rule of `--attention-config` gives layers another
  method, such as `pattern: chunks` of `static_sparse_attn`.

Shapes: B batch, H heads, D head size, N tiles, P pieces of text.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.config import (
    EngineKernel,
    IndexSelector,
    Ratio,
    SparseConfig,
    Tail,
    first_of,
    option,
    ratio_now,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Cut,
    Limits,
    Router,
    attend_means,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_TILES = MappingProxyType({64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8)})


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSparseH3Config(SparseConfig):
    """Parameters of `video_sparse_attn_h3`.

    Attributes:
        sparsity: share of the video's key tiles that each query tile skips. It may change over the
            steps: {0: 0.5, 0.4: 0.9}.
        vsa_mode: whether pieces of text are kept by all (`exempt`), or compete with tiles.
        vsa_dense_first_n_steps: first denoising steps that stay dense.
        vsa_dense_layers: layers that keep all tiles, and the gated part.
        vsa_tile_size: tokens of a tile, and of a piece of text: 64 are 4 x 4 x 4, 128 are 4 x 4 x 8
            and 256 are 4 x 8 x 8.
        tail: what becomes of tiles that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values. Only where text is exempt.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    first_dense_steps = "vsa_dense_first_n_steps"
    names_layers = ("dense_layers", "vsa_dense_layers")

    sparsity: Ratio = option(
        0.9, "share of the video's key tiles to skip", aliases=("VSA_sparsity",), ge=0, le=1
    )
    vsa_mode: Literal["exempt", "compete"] = option("exempt", "text is kept, or competes")
    vsa_dense_first_n_steps: int = option(0, "first denoising steps that stay dense", ge=0)
    vsa_dense_layers: IndexSelector | None = option(
        None, "layers that keep all tiles and their gate, e.g. '0-3,38'"
    )
    vsa_tile_size: Literal[64, 128, 256] = option(64, "tokens of a tile")
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: EngineKernel = option("auto", "kernel that runs")

    def check(self) -> None:
        """Text that is not kept has no tail."""
        if self.vsa_mode == "compete" and self.tail != "none":
            raise ConfigError(
                f"`tail` of video_sparse_attn_h3 must be none with vsa_mode compete, whose pieces "
                f"of text no tail counts, got {self.tail}; remove one"
            )


class VideoSparseH3Router(Router[VideoSparseH3Config]):
    """The tiles that score best in the coarse stage, with all text or in competition with it."""

    cuts_text = True
    branch = staticmethod(attend_means)

    def cut(self, settings: VideoSparseH3Config, grid: Window) -> Cut:
        """Return the tiles."""
        return Cut(_TILES[settings.vsa_tile_size])

    def keeps_all(self, settings: VideoSparseH3Config) -> bool:
        """Return whether the layer is one of those that keep all tiles."""
        site, dense = self.layer.site, settings.vsa_dense_layers
        return dense is not None and site is not None and site.layer in dense

    def budget(self, settings: VideoSparseH3Config, blocks: int, tokens: int) -> Budget:
        """Return how many tiles are kept; with competition, besides as many as there are pieces."""
        if self.keeps_all(settings):
            return Budget(blocks, blocks)
        sparsity = ratio_now(settings.sparsity)
        kept = max(blocks - first_of(sparsity, blocks), 1)
        asked = 1 - sparsity if settings.vsa_mode == "exempt" else None
        return Budget(kept, blocks, asked)

    def density(self, settings: VideoSparseH3Config, blocks: int, tokens: int) -> float | None:
        """Return the share of tiles; where text competes, the data decide what of it is kept."""
        share = self.budget(settings, blocks, tokens).share
        return share if settings.vsa_mode == "exempt" or share == 1 else None

    def limits(self, settings: VideoSparseH3Config) -> Limits:
        """Return why text does not compete in a ring."""
        if settings.vsa_mode == "exempt":
            return Limits()
        return Limits(ring="`vsa_mode` compete ranks pieces of text, whose means no ring exchanges")

    def choose(
        self, settings: VideoSparseH3Config, stats: BlockStats, budget: Budget | None
    ) -> torch.Tensor:
        """Return the best tiles and all pieces, or the best of both."""
        assert budget is not None, "it is always known"
        assert stats.order is not None, "tiles are cut"
        tiles, real = stats.num - stats.always, stats.real[1]
        if not stats.always or tiles < len(stats.order.starts):  # no text, or none of its means
            return stats.best(budget.kept)
        if settings.vsa_mode == "compete":
            count = budget.kept + stats.always
            return stats.by_scores(lambda x: x.topk(count).indices.sort().values.int())
        real = None if real is None else real[:, :tiles]
        return replace(stats, key=stats.key[:, :, :tiles], real=(None, real)).best(budget.kept)


class VideoSparseH3Backend(SparseBackend):
    """VSA-H3."""

    backend = AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3
    summary = "VSA of MiniMax-H3: text is kept, or competes, and has a coarse stage"
    config_cls = VideoSparseH3Config
    # Of video_sparse_attn, which runs the same plans.
    dense_above = MappingProxyType({"gluon": ((0, 0.50),), "triton": ((0, 0.48),)})
    router = VideoSparseH3Router
