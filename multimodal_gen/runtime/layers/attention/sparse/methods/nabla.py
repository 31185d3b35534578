"""NABLA: tiles that hold a share of the mass of a pooled attention map, and tiles nearby.

The rule is that of the authors (Neighborhood Adaptive Block-Level Attention, arXiv:2507.13546), as
in their Kandinsky 5 and in diffusers' integration of it (`nablaT_v2`, `fast_sta_nabla`), whose
names the parameters have. With qbar_i and kbar_j the means of tiles of 1 x 8 x 8 tokens and s the
scale,

    p_i     = softmax over j of s qbar_i.kbar_j
    kept(i) = those j for which p_ij and all that is smaller in the row sums up to 1 - P or more
            + those j at most wT // 2, wH // 2 and wW // 2 tiles away (`add_sta`)

so what is dropped holds less than 1 - P of the mass. `method: topk`, of their newer code, keeps a
share P of the tiles instead. Text is attended to by everything, and attends to everything.

What differs from them, or is easily missed:

- They reorder the tokens of the whole model to squares of 8 x 8, so a video must be of whole
  squares. Here layers cut the video themselves: tiles at its edges may be cut short, and count once
  in the softmax like all others. Tiles may have another size.
- The neighbourhood is cut at the edges of the video; windows of Sliding Tile Attention are shifted
  inside. An even width is the next odd one.
- diffusers adds the neighbourhood whatever `add_sta` says, and knows no `method`.
- Sums over a row are in fp32, in any dtype of the inputs. The best tile is always kept, which
  rounding might else drop at P = 0; at P = 1 everything is, and the call is dense.

Shapes: B batch, H heads, D head size, R and N tiles of queries and of keys.
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.config import (
    EngineKernel,
    Ratio,
    SparseConfig,
    Tail,
    option,
    ratio_now,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Cut,
    KnownCall,
    Router,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout
from multimodal_gen.runtime.layers.attention.sparse.windows import Window, tiles_of
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class NablaConfig(SparseConfig):
    """Parameters of `nabla_attn`.

    Attributes:
        P: share of the mass of a row that is kept at least; of its tiles with `method: topk`. It
            may change over the steps: {0: 0.95, 0.4: 0.8}.
        method: what P is a share of: the mass of a row (`topcdf`), or its tiles (`topk`), rounded
            down to at least one.
        add_sta: whether tiles nearby are kept, too.
        wT: how many tiles along time these are; the tile is in their middle.
        wH: the same along the height.
        wW: the same along the width.
        tile_size: tokens per tile along (time, height, width).
        tail: what becomes of tiles that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.

    Raises:
        ConfigError: a width is given without `add_sta`.
    """

    P: Ratio = option(0.9, "share of the mass of a row to keep, or of its tiles", ge=0, le=1)
    method: Literal["topcdf", "topk"] = option("topcdf", "P is a share of mass, or of tiles")
    add_sta: bool = option(True, "tiles nearby are kept, too")
    wT: int = option(11, "tiles nearby along time", ge=1)  # noqa: N815 - as its authors name it
    wH: int = option(3, "tiles nearby along the height", ge=1)  # noqa: N815
    wW: int = option(3, "tiles nearby along the width", ge=1)  # noqa: N815
    tile_size: tuple[int, ...] = option(
        (1, 8, 8), "tokens per tile along time, height, width", ge=1, length=3
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: EngineKernel = option("auto", "kernel that runs")

    def check(self) -> None:
        """Widths are of a neighbourhood."""
        widths = [field for field in fields(self) if field.name in ("wT", "wH", "wW")]
        given = [x.name for x in widths if getattr(self, x.name) != x.default]
        if given and not self.add_sta:
            raise ConfigError(
                f"`{given[0]}` of nabla_attn must not be given with add_sta false, which keeps no "
                f"tiles nearby, got {getattr(self, given[0])}; remove one"
            )


class NablaRouter(Router[NablaConfig]):
    """The tiles that hold most of a row's mass, and those nearby."""

    chooses = "map"

    def known(
        self, settings: NablaConfig, whole: SequenceLayout, heads: slice, context: ForwardContext
    ) -> KnownCall:
        """Return that all tiles are kept, too, where the neighbourhood covers the grid."""
        known = super().known(settings, whole, heads, context)
        tiles = tiles_of(known.layout.grid, known.tile)
        widths = (settings.wT, settings.wH, settings.wW)
        num, far = math.prod(tiles), any(w // 2 < n - 1 for w, n in zip(widths, tiles, strict=True))
        if far or not settings.add_sta:
            return known
        return known._replace(share=1.0, budget=Budget(num, num))

    def cut(self, settings: NablaConfig, grid: Window) -> Cut:
        """Return the tiles."""
        return Cut(settings.tile_size)

    def budget(self, settings: NablaConfig, blocks: int, tokens: int) -> Budget | None:
        """Return how many tiles the best are; None where their mass decides."""
        if settings.method == "topcdf":
            return Budget(blocks, blocks) if ratio_now(settings.P) == 1 else None
        return Budget.of_share(settings.P, blocks)

    def density(self, settings: NablaConfig, blocks: int, tokens: int) -> float | None:
        """Return the share where all tiles are kept, or where none are kept besides the best."""
        budget = self.budget(settings, blocks, tokens)
        known = budget is not None and (not settings.add_sta or budget.kept == blocks)
        return budget.share if known and budget is not None else None

    def choose(
        self, settings: NablaConfig, stats: BlockStats, budget: Budget | None
    ) -> torch.Tensor:
        """Return the tiles that are kept."""
        if budget is None:
            chosen = stats.mark_by_scores(partial(_holding, mass=ratio_now(settings.P)))
        else:
            chosen = stats.mark_best(budget.kept)
        if settings.add_sta:
            chosen |= _nearby((settings.wT, settings.wH, settings.wW), stats)
        return chosen


def _holding(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Return the best tiles that hold so much mass together, bool like scores [B, h, R, N]."""
    shares, order = scores.softmax(-1).sort(dim=-1, stable=True)
    held = shares.cumsum(-1) >= 1 - mass
    held[..., -1] = True
    return torch.zeros_like(held).scatter_(-1, order, held)


def _nearby(widths: Window, stats: BlockStats) -> torch.Tensor:
    """Return the tiles in a neighbourhood of so many tiles around a row's own, bool [R, N]."""
    assert stats.order is not None, "tiles are cut"
    _, high, wide = stats.order.tiles
    rows, tiles = stats.in_time()
    times, heights, sides = (min(width // 2, stats.num) for width in widths)
    found = (rows[:, None] // (high * wide) - tiles // (high * wide)).abs() <= times
    found &= (rows[:, None] // wide % high - tiles // wide % high).abs() <= heights
    found &= (rows[:, None] % wide - tiles % wide).abs() <= sides
    return found


class NablaBackend(SparseBackend):
    """NABLA."""

    backend = AttentionBackendEnum.NABLA_ATTN
    summary = "NABLA: tiles that hold most of a pooled map's mass, and those nearby"
    config_cls = NablaConfig
    router = NablaRouter
