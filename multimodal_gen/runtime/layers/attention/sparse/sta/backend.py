"""Sliding Tile Attention: every tile of the latent grid attends to a window of tiles around it.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import (
    FASTVIDEO_KERNEL,
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import (
    Axis,
    BackendConfig,
    DensePart,
    SparseConfig,
    option,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.sparse.base import SparseImpl
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    Chunk,
    attend_in_ring,
    chunks_of,
    ring_layout,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.ring import (
    WindowedCall,
    reach_of,
    ring_plan,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.search import (
    branch_parts,
    head_losses,
    session_for,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.strategy import Strategy, load_strategy
from multimodal_gen.runtime.layers.attention.sparse.sta.tuning import WindowSource, tuned_strategy
from multimodal_gen.runtime.layers.attention.sparse.sta.windows import (
    DEFAULT_TILE,
    Window,
    joint_density,
    pair_density,
    tiles_of,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    tiled_sequence,
    tiled_video,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_ST_ATTN = PackageProbe(module="st_attn", distribution="st-attn", install="pip install st-attn")


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
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    first_dense_steps: ClassVar[str] = "skip_time_steps"

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
    kernel: Literal[
        "auto", "gluon", "fa4", "triton", "reference", "st_attn", "fastvideo_kernel"
    ] = option("auto", "kernel that runs")

    def check(self) -> None:
        """Each mode has exactly the sources it reads; only tuning has a target."""
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
        self._check_searching()

    def _check_searching(self) -> None:
        """A search tries every step and layer, with candidates of its own."""
        if self.sta_mode != "STA_searching":
            return
        for name in ("mask_strategy_file_path", "dense_steps", "dense_layers"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(
                    f"`{name}` of sliding_tile_attn must not be given with sta_mode "
                    f"STA_searching, which tries every step and layer, got {value}"
                )

    def dense_parts(self, axis: Axis) -> tuple[DensePart, ...]:
        """Return the steps or the layers that stay dense; a search tries all of them."""
        if self.sta_mode == "STA_searching":
            return ()
        return SparseConfig.dense_parts(self, axis)


class SlidingTileBackend(AttentionBackend):
    """Sliding Tile Attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SLIDING_TILE_ATTN
    summary: ClassVar[str] = "Sliding Tile Attention: a window of tiles per step, layer and head"
    config_cls: ClassVar[type[SlidingTileConfig]] = SlidingTileConfig
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants(BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)),
        upstream_variant("st_attn", _ST_ATTN, head_sizes=(128,)),
        upstream_variant("fastvideo_kernel", FASTVIDEO_KERNEL, head_sizes=(128,)),
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a tile; see `AttentionBackend.block_sizes`."""
        size = math.prod(getattr(config, "tile_size", DEFAULT_TILE))
        return size, size

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return SlidingTileImpl


class SlidingTileImpl(SparseImpl):
    """Sliding Tile Attention of one layer."""

    backend = AttentionBackendEnum.SLIDING_TILE_ATTN
    config_cls: ClassVar[type[SparseConfig]] = SlidingTileConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Chosen without a configuration, its defaults name no window, and say so.
        config = self.config
        self._config = config if isinstance(config, SlidingTileConfig) else SlidingTileConfig()
        tile = self._config.tile_size
        self._tile: Window = (tile[0], tile[1], tile[2])
        self._searches = self._config.sta_mode == "STA_searching"
        # Reads the strategy and checks that it has the layer.
        known = self.site is not None and not self._searches
        self._source = self._window_source() if known else None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        context: ForwardContext,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention over the windows of this step; see `SparseImpl.attend`."""
        tile = _clamped(self._tile, layout.grid)
        call = WindowedCall(
            query=query,
            key=key,
            value=value,
            queries=tiled_video(layout, tile, query.device),
            keys=tiled_sequence(layout, layout.num_keys, tile, query.device),
            keep=keep,
            scale=self.softmax_scale,
            kernel=self.kernel,
        )
        if self._searches:
            return self._search(call, layout, context)
        return call.over(self._windows(query, layout, context))

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if self._searches:
            return "STA_searching compares whole heads, and strategies serve any number of GPUs"
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        self._first_head = inputs.first_head
        self.kernel.begin_call()
        layout = ring_layout(inputs, context, str(self.backend))
        assert context is not None, "a layout needs a context"
        query, call = inputs.query, inputs.call
        chunks = chunks_of(layout, call, _clamped(self._tile, layout.grid), query.device)
        windows = self._windows(query, layout, context)
        mine = chunks[call.group.index]

        def plan_of(theirs: Chunk) -> BlockPlan | None:
            assert mine is not None, "only queries of the video have a plan"
            return ring_plan(windows, mine, theirs)

        reach = None
        if call.keep is None and inputs.shared_key is None:
            reach = reach_of(windows, chunks, call.group.index)
        scale, kernel = self.softmax_scale, self.kernel
        return attend_in_ring(inputs, chunks, plan_of, scale=scale, kernel=kernel, reach=reach)

    def _windows(
        self, query: torch.Tensor, layout: SequenceLayout, context: ForwardContext
    ) -> tuple[Window, ...]:
        """Return the windows of this step for the heads of a call."""
        tile = _clamped(self._tile, layout.grid)
        windows = (self._source or self._window_source()).windows(
            tiles_of(layout.grid, tile),
            step=context.current_timestep,
            num_steps=context.num_steps,
            first_head=self._first_head,
            num_heads=query.shape[2],
        )
        self.record(context, _density(windows, layout, tile))
        return windows

    @property
    def _layer(self) -> int | None:
        return None if self.site is None else self.site.layer

    def check_run(self, context: ForwardContext) -> None:
        """Refuse a strategy that does not fit the run, as a call would; warn if no step is sparse.

        For callers that know the run before the first step that is not dense.

        Raises:
            ConfigError: the strategy is for other steps or another grid.
        """
        if not self._searches:
            super().check_run(context)
        if self._source is not None and context.latent_grid is not None:
            tile = _clamped(self._tile, context.latent_grid)
            self._source.check(tiles_of(context.latent_grid, tile), context.num_steps)

    def _window_source(self) -> WindowSource:
        config = self._config
        window = config.window
        return WindowSource(
            strategy=_strategy(config) if window is None else None,
            window=None if window is None else (window[0], window[1], window[2]),
            retarget=config.retarget,
            layer=self._layer,
            num_layers=None if self.site is None else self.site.num_layers,
            num_heads=self.num_heads,
            tile_size=self._tile,
        )

    def _search(
        self, call: WindowedCall, layout: SequenceLayout, context: ForwardContext
    ) -> torch.Tensor:
        """Record how far each candidate takes every head from full attention, and return that."""
        layer = self._layer
        if call.query.shape[2] != self.num_heads:
            raise _searches_alone()
        if layer is None:
            raise UsageError(
                "STA_searching must know the layer's index, got a layer without one; construct it "
                "with a `prefix` such as 'blocks.3.attn', or run `sglang attention sta search`"
            )
        assert self._config.search_path is not None, "the configuration checks that"
        session = session_for(self._config.search_path, context.request_id)
        heads = call.query.shape[2]
        full = call.over((call.tiles,) * heads)
        losses: dict[str, list[torch.Tensor]] = {}
        for window in session.recorder.candidates(call.tiles):
            out = call.over((window,) * heads)
            for branch, part, whole in branch_parts(context.cfg_branch, out, full):
                losses.setdefault(branch, []).append(head_losses(part, whole))
        step = context.current_timestep
        for branch, found in losses.items():
            session.recorder.add(torch.stack(found), step=step, layer=layer, branch=branch)
            session.finish(branch, context.num_steps, layout.grid, call.queries.order.tile)
        self.record(context, 1.0)
        return full


def _searches_alone() -> UsageError:
    return UsageError(
        "STA_searching must see all tokens and heads of a layer, got a part of them; search with "
        "--num-gpus 1, and use the strategy with any number of GPUs"
    )


def _clamped(tile: Window, grid: Window) -> Window:
    """Return the same cut with tiles no larger than the grid: kernels make room for whole tiles."""
    return (min(tile[0], grid[0]), min(tile[1], grid[1]), min(tile[2], grid[2]))


def _strategy(config: SlidingTileConfig) -> Strategy:
    path = config.mask_strategy_file_path
    assert path is not None, "the configuration checks that"
    if config.sta_mode == "STA_inference":
        return load_strategy(path)
    assert config.search_path is not None, "the configuration checks that"
    return tuned_strategy(
        config.search_path,
        path,
        both=config.sta_mode == "STA_tuning_cfg",
        skip_time_steps=config.skip_time_steps,
        target_density=config.target_density,
    )


@lru_cache(maxsize=64)
def _density(windows: tuple[Window, ...], layout: SequenceLayout, tile: Window) -> float:
    """Return the share of pairs kept, as a mean over heads."""
    of_video = sum(pair_density(window, layout.grid, tile) for window in windows) / len(windows)
    video = layout.num_video
    return joint_density(of_video, video, layout.num_queries - video, layout.num_keys - video)
