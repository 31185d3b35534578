"""Sliding Tile Attention: every tile of the latent grid attends to a window of tiles around it.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.slots import CacheCut, KeptChunks
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.layers.attention.backends.engine import upstream_variant
from multimodal_gen.runtime.layers.attention.backends.packages import FASTVIDEO_KERNEL, ST_ATTN
from multimodal_gen.runtime.layers.attention.config import (
    Axis,
    BackendConfig,
    DensePart,
    EngineKernel,
    SparseConfig,
    Tail,
    option,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    branch_rows,
    find_searches,
    head_losses,
    recorder_for,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    Strategy,
    fitted,
    load_strategy,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.tuning import tune_into
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.upstream import (
    UPSTREAM,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sparse.pattern import Pattern, Patterns
from multimodal_gen.runtime.layers.attention.sparse.router import (
    Attend,
    Cut,
    Limits,
    Router,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SparseCall,
    fit_tile,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    DEFAULT_TILE,
    Window,
    effective_window,
    kept_indices,
    pair_density,
    tiles_of,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

# A search tries every step and layer, with candidates of its own.
_NOT_SEARCHED = ("mask_strategy_file_path", "dense_steps", "dense_sigma", "dense_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingTileConfig(SparseConfig):
    """Parameters of `sliding_tile_attn`; windows are (time, height, width) in tiles.

    Attributes:
        mask_strategy_file_path: JSON file with a window per step, layer and head; the tuning modes
            write it.
        window: one window for every step, layer and head, instead of a file; clamped to the grid.
        sta_mode: inference with known windows; searching, which tries windows and goes on with
            full attention; tuning (on both branches of guidance: tuning_cfg), which makes the
            strategy file of searches and goes on with it.
        skip_time_steps: first denoising steps that stay dense.
        retarget: rescale a file made for other steps or another grid instead of refusing it.
        search_path: folder of searches: STA_searching writes them, the tuning modes read them.
        tile_size: tokens per tile along (time, height, width).
        target_density: share of the attention matrix the tuning modes aim at; None for the least
            loss per head.
        tail: what becomes of tiles outside of a window: `none` drops them, as the paper does;
            `pooled` counts each by the mean of its keys and values. Searches and tuning find other
            windows with it.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    first_dense_steps = "skip_time_steps"
    example = "window=[3,3,3],skip_time_steps=15"

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
    search_path: str | None = option(None, "folder of searches, written and tuned on")
    tile_size: tuple[int, ...] = option(
        DEFAULT_TILE, "tokens per tile along time, height, width", ge=1, length=3
    )
    target_density: float | None = option(
        None, "share of the attention matrix tuning aims at", ge=0, le=1
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal[EngineKernel, "st_attn", "fastvideo_kernel"] = option(
        "auto", "kernel that runs"
    )

    def check(self) -> None:
        """Each mode has exactly the sources it reads; only tuning has a target."""
        refuse_foreign_tail("sliding_tile_attn", self.tail, self.kernel, *UPSTREAM)
        file, window, mode = self.mask_strategy_file_path, self.window, self.sta_mode
        inference, tuning = mode == "STA_inference", mode.startswith("STA_tuning")
        if inference and file is None and window is None:
            raise ConfigError(
                "`mask_strategy_file_path` of sliding_tile_attn must name a strategy file, or "
                "`window` must give one window such as [3, 3, 3]; `sglang attention sta search` "
                "and `sglang attention sta tune` make a strategy file"
            )
        if window is not None and not (inference and file is None):
            other = f"sta_mode {mode}" if file is None else "mask_strategy_file_path"
            raise ConfigError(
                f"`window` of sliding_tile_attn must not be given with `{other}`, got "
                f"{list(window)}; remove one"
            )
        if not inference and self.search_path is None:
            raise ConfigError(
                f"`search_path` of sliding_tile_attn must name a folder for sta_mode {mode}, got "
                f"None"
            )
        if tuning and file is None:
            raise ConfigError(
                f"`mask_strategy_file_path` of sliding_tile_attn must name the file that {mode} "
                f"writes, got None"
            )
        if self.target_density is not None and not tuning:
            raise ConfigError(
                "`target_density` of sliding_tile_attn must be given only with sta_mode STA_tuning "
                f"or STA_tuning_cfg, got sta_mode {mode}"
            )
        for name in _NOT_SEARCHED if mode == "STA_searching" else ():
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"`{name}` of sliding_tile_attn must not be given with sta_mode "
                    f"STA_searching, which tries every step and layer, got {getattr(self, name)}"
                )

    def dense_parts(self, axis: Axis) -> tuple[DensePart, ...]:
        """Return the steps or the layers that stay dense; a search tries all of them."""
        if self.sta_mode == "STA_searching":
            return ()
        return SparseConfig.dense_parts(self, axis)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowPattern(Pattern):
    """The tiles of a window around every tile.

    Attributes:
        window: tiles along time, height and width, all of them kept.
    """

    window: Window


@static_cache(maxsize=1024)
def _pattern(window: Window, tiles: Window) -> WindowPattern:
    with torch.device("cpu"):
        kept = Pattern.of_lists(kept_indices(window, tiles))
    return WindowPattern(indices=kept.indices, counts=kept.counts, window=window)


def window_patterns(windows: tuple[Window, ...], tiles: Window) -> Patterns:
    """Return the patterns of windows, one per head, on a grid of tiles."""
    return tuple(_pattern(effective_window(window, tiles), tiles) for window in windows)


class SlidingTileRouter(Router[SlidingTileConfig]):
    """A window of tiles per step, layer and head."""

    chooses = "pattern"

    _strategy: Strategy | None = None
    _layer: int = 0

    def prepare(self, settings: SlidingTileConfig) -> None:
        """Read the strategy, and check that it has the layer.

        Raises:
            ConfigError: the strategy cannot be read, or is for another model.
            UsageError: the strategy needs to know the layer, and it is not known.
        """
        if settings.sta_mode == "STA_searching":
            self.search = self._search
        elif settings.window is None:
            self._strategy, site = _strategy(settings), self.layer.site
            if site is None or site.layer is None:
                raise UsageError(
                    "a mask strategy must know the layer's index, got a layer without one; "
                    "construct it with a `prefix` such as 'blocks.3.attn', or use `window`"
                )
            self._layer = site.layer
            self._strategy.check_sizes(
                num_heads=self.layer.num_heads, num_layers=site.num_layers, layer=site.layer
            )

    def cut(self, settings: SlidingTileConfig, grid: Window) -> Cut:
        """Return the tiles."""
        return Cut(settings.tile_size)

    def varies(self, settings: SlidingTileConfig) -> bool:
        """A strategy has other windows in every step."""
        return settings.window is None

    def pattern(
        self, settings: SlidingTileConfig, grid: Window, heads: slice, context: ForwardContext
    ) -> Patterns:
        """Return the windows of a step."""
        strategy, step = self._fitted(settings, grid, context), context.current_timestep
        if strategy is None:
            assert settings.window is not None, "a search tries windows of its own"
            windows = (cast("Window", settings.window),) * (heads.stop - heads.start)
        elif step < strategy.num_steps:
            windows = strategy.windows[step][self._layer][heads]
        else:
            raise UsageError(
                f"{strategy.name} must have every step of the run, it has {strategy.num_steps} and "
                f"this is step {step}"
            )
        return window_patterns(windows, tiles_of(grid, fit_tile(settings.tile_size, grid)))

    def attend_upstream(
        self, settings: SlidingTileConfig, call: SparseCall, keys: Any, select: Any
    ) -> torch.Tensor | None:
        """Return what a package computes, which takes windows."""
        windows = [pattern.window for pattern in select()]
        return attend_upstream(call, keys, windows, self.layer.label)

    def check_run(self, settings: SlidingTileConfig, context: ForwardContext) -> None:
        """Refuse a strategy for other steps or another grid, as a call would."""
        if context.latent_grid is not None:
            self._fitted(settings, context.latent_grid, context)

    def _fitted(
        self, settings: SlidingTileConfig, grid: Window, context: ForwardContext
    ) -> Strategy | None:
        """Return the strategy for a run, where there is one; warn of what was rescaled."""
        if self._strategy is None:
            return None
        strategy, notes = fitted(
            self._strategy,
            tiles=tiles_of(grid, fit_tile(settings.tile_size, grid)),
            tile_size=cast("Window", settings.tile_size),
            num_steps=context.num_steps,
            retarget=settings.retarget,
        )
        for note in notes:
            self.layer.warnings.warn(note)
        return strategy

    def limits(self, settings: SlidingTileConfig) -> Limits:
        """Windows by head and step are of one grid, and a search sees whole heads."""
        ring = cache = None
        if settings.sta_mode == "STA_searching":
            ring = "STA_searching compares whole heads, and strategies serve any number of GPUs"
        if settings.window is None:
            cache = "windows by head and step are of one latent grid"
        elif self.layer.pools_tail:
            cache = "its windows are lists that change in place, which a tail is not made from"
        return Limits(ring=ring, cache=cache)

    def cut_of_cache(
        self, settings: SlidingTileConfig, kept: KeptChunks, grid: Window | None
    ) -> CacheCut | str:
        """Return the window in space; the cache has its own window in time."""
        cut, window = kept.in_tiles(settings.tile_size), settings.window
        if isinstance(cut, str) or window is None:
            return cut
        return CacheCut(window=(window[1], window[2]))

    def density_of_cache(self, settings: SlidingTileConfig, order: TileOrder) -> float:
        """Return the share of the tiles of a frame that a window keeps."""
        window, grid, tile = settings.window, order.grid, order.tile
        assert window is not None, "others have no window"
        return pair_density((1, window[1], window[2]), (1, grid[1], grid[2]), (1, tile[1], tile[2]))

    def _search(
        self, settings: SlidingTileConfig, call: SparseCall, context: ForwardContext, attend: Attend
    ) -> torch.Tensor:
        """Record how far each candidate takes every head from full attention, and return that."""
        heads, grid, site = call.query.shape[2], call.layout.grid, self.layer.site
        if heads != self.layer.num_heads:
            raise UsageError(
                "STA_searching must see all tokens and heads of a layer, got a part of them; "
                "search with --num-gpus 1, and use the strategy with any number of GPUs"
            )
        if site is None or site.layer is None:
            raise UsageError(
                "STA_searching must know the layer's index, got a layer without one; construct it "
                "with a `prefix` such as 'blocks.3.attn', or run `sglang attention sta search`"
            )
        assert settings.search_path is not None, "the configuration checks that"
        recorder = recorder_for(settings.search_path, context.request_id)
        tile = fit_tile(settings.tile_size, grid)
        tiles = tiles_of(grid, tile)
        full = attend(window_patterns((tiles,) * heads, tiles))
        rows = branch_rows(context.cfg_branch, len(full))
        losses: dict[str, list[torch.Tensor]] = {branch: [] for branch in rows}
        for window in recorder.candidates(tiles):
            out = attend(window_patterns((window,) * heads, tiles))
            for branch, part in rows.items():
                losses[branch].append(head_losses(out[part], full[part]))
        step = context.current_timestep
        for branch, found in losses.items():
            recorder.add(torch.stack(found), step=step, layer=site.layer, branch=branch)
            recorder.finish(branch, context.num_steps, grid, tile)
        return full


def _strategy(config: SlidingTileConfig) -> Strategy:
    """Read the strategy, which the tuning modes make first."""
    assert config.mask_strategy_file_path is not None, "the configuration checks that"
    path = Path(config.mask_strategy_file_path).expanduser()
    if config.sta_mode != "STA_inference":
        assert config.search_path is not None, "the configuration checks that"
        folder = Path(config.search_path).expanduser()
        branches = (POSITIVE, NEGATIVE) if config.sta_mode == "STA_tuning_cfg" else (POSITIVE,)
        files = [file for branch in branches for file in find_searches(folder, branch)]
        versions = tuple((file, file.stat().st_mtime_ns) for file in files)
        tune_into(path, versions, skip=config.skip_time_steps, target=config.target_density)
    return load_strategy(path)


class SlidingTileBackend(SparseBackend):
    """Sliding Tile Attention."""

    backend = AttentionBackendEnum.SLIDING_TILE_ATTN
    summary = "Sliding Tile Attention: a window of tiles per step, layer and head"
    config_cls = SlidingTileConfig
    head_groups = 2
    # sparse.csv at 56740c3, 21x45x80: 0.123 of the tiles in 23.5 ms, dense 162.2 ms; triton 534.6
    # of the 690.6 TFLOP/s of FA3, less what the layer loses with gluon.
    dense_above = MappingProxyType({"gluon": ((0, 0.84),), "triton": ((0, 0.70),)})
    router = SlidingTileRouter
    variants = (
        *SparseBackend.variants,
        upstream_variant("st_attn", ST_ATTN, head_sizes=(128,)),
        upstream_variant("fastvideo_kernel", FASTVIDEO_KERNEL, head_sizes=(128,)),
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a tile; there are no parameters by default."""
        size = math.prod(getattr(config, "tile_size", DEFAULT_TILE))
        return size, size
