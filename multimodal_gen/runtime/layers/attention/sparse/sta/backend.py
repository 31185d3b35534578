"""Sliding Tile Attention: every tile of the latent grid attends to a window of tiles around it.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.slots import CacheCut, KeptChunks, SeenTiles
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    DenseAbove,
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
from multimodal_gen.runtime.layers.attention.sparse.base import (
    SparseImpl,
    Tail,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.ring_tail import ring_tail
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    Shard,
    attend_ring_tiles,
    shards_of,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.ring import halo_of, ring_map, ring_plan
from multimodal_gen.runtime.layers.attention.sparse.sta.search import (
    branch_parts,
    head_losses,
    session_for,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.strategy import (
    Strategy,
    WindowSource,
    load_strategy,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.tuning import tuned_strategy
from multimodal_gen.runtime.layers.attention.sparse.sta.upstream import UPSTREAM, attend_upstream
from multimodal_gen.runtime.layers.attention.sparse.sta.windows import (
    DEFAULT_TILE,
    Window,
    pair_density,
    tile_lists,
    tiles_of,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    TiledSequence,
    attend_tiled,
    fit_tile,
    in_tiles,
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
        skip_below: products of weights and values are left out where all weights of a step of the
            kernel lie so many decibels below the largest ones so far; 30 is a thousandth. None
            leaves nothing out.
        tail: what becomes of tiles outside of a window: `none` drops them, as the paper does;
            `pooled` counts each by the mean of its keys and values. Searches and tuning find other
            windows with it.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    first_dense_steps: ClassVar[str] = "skip_time_steps"
    example: ClassVar[str] = "window=[3,3,3],skip_time_steps=15"

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
    skip_below: float | None = option(
        None, "decibels below the largest weight so far at which products are left out", ge=1
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal[
        "auto", "gluon", "fa4", "triton", "reference", "st_attn", "fastvideo_kernel"
    ] = option("auto", "kernel that runs")

    def check(self) -> None:
        """Each mode has exactly the sources it reads; only tuning has a target."""
        refuse_foreign_tail("sliding_tile_attn", self.tail, self.kernel, *UPSTREAM)
        if self.skip_below is not None and self.kernel in UPSTREAM:
            raise ConfigError(
                f"`skip_below` of sliding_tile_attn must not be given with kernel {self.kernel}, "
                f"which leaves no products out, got {self.skip_below}; remove one"
            )
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
        for name in ("mask_strategy_file_path", "dense_steps", "dense_sigma", "dense_layers"):
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
    head_groups: ClassVar[int] = 2
    # sparse.csv at 56740c3, 21x45x80: 0.123 of the tiles in 23.5 ms, dense 162.2 ms; triton 534.6
    # of the 690.6 TFLOP/s of FA3, less what the layer loses with gluon.
    dense_above: ClassVar[DenseAbove] = MappingProxyType(
        {"gluon": ((0, 0.84),), "triton": ((0, 0.70),)}
    )
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


class SlidingTileImpl(SparseImpl[SlidingTileConfig]):
    """Sliding Tile Attention of one layer.

    Raises:
        ConfigError: the strategy cannot be read, or is for another model.
        UsageError: the strategy needs to know the layer, and it is not known.
    """

    declaration = SlidingTileBackend
    trains_in_ring = True
    varies_by_step = True

    def prepare(self) -> None:
        """Read the strategy, and check that it has the layer."""
        config = self.config
        self._searches = config.sta_mode == "STA_searching"
        self._source: WindowSource | None = None
        if self._searches:
            return
        window = config.window
        self._source = WindowSource(
            strategy=_strategy(config) if window is None else None,
            window=None if window is None else (window[0], window[1], window[2]),
            retarget=config.retarget,
            layer=None if self.site is None else self.site.layer,
            num_layers=None if self.site is None else self.site.num_layers,
            num_heads=self.num_heads,
            tile_size=(config.tile_size[0], config.tile_size[1], config.tile_size[2]),
        )

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention over the windows of this step; see `SparseImpl.attend`."""
        layout, device = call.layout, call.query.device
        queries, keys = in_tiles(layout, self.config.tile_size, device)
        if self._searches:
            return self._search(call, queries, keys, context)
        heads = slice(call.first_head, call.first_head + call.query.shape[2])
        windows = self._windows(layout, queries.order.tiles, heads, context)
        return self._attend_windows(call, queries, keys, windows)

    def cut_of_cache(self, kept: KeptChunks, context: ForwardContext | None) -> CacheCut | str:
        """See `AttentionImpl`: that of `window`; the cache has its own window in time."""
        window = self.config.window
        if window is None:
            return "windows by head and step are of one latent grid"
        if self.pools_tail:
            return "its windows are lists that change in place, which a tail is not made from"
        cut = self.cut_with(kept.in_tiles(self.config.tile_size), UPSTREAM)
        return cut if isinstance(cut, str) else CacheCut(window=(window[1], window[2]))

    def forward_tiles(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_tiles`."""
        order, window = tiles.order, self.config.window
        assert window is not None, "others have no window"
        density = pair_density(
            (1, window[1], window[2]),
            (1, order.grid[1], order.grid[2]),
            (1, order.tile[1], order.tile[2]),
        )
        return self.attend_plan(query, key, value, tiles.plan, context, density)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if self._searches:
            return "STA_searching compares whole heads, and strategies serve any number of GPUs"
        if self.config.skip_below is not None:
            return "skip_below compares the scores of a row over all keys in one pass"
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        layout = self.ring_layout(inputs, context)
        assert context is not None, "a layout needs a context"
        query, call, me = inputs.query, inputs.call, inputs.call.group.index
        tile = fit_tile(self.config.tile_size, layout.grid)
        shards = shards_of(layout, call, tile, query.device)
        heads = slice(inputs.first_head, inputs.first_head + query.shape[2])
        windows = self._windows(layout, tiles_of(layout.grid, tile), heads, context)
        mine = shards[me]

        def plan_of(theirs: Shard) -> BlockPlan | None:
            assert mine is not None, "only queries of the video have a plan"
            return ring_plan(windows, mine, theirs)

        halo, tail = None, None
        if call.keep is None and inputs.shared_key is None:
            halo = halo_of(windows, shards, me)
        if self.pools_tail:
            kept = None if mine is None else ring_map(windows, mine)
            tail = ring_tail(inputs, shards, kept, scale=self.softmax_scale)
        return attend_ring_tiles(
            inputs,
            shards,
            plan_of,
            scale=self.softmax_scale,
            kernel=self.kernel,
            halo=halo,
            tail=tail,
        )

    def check_run(self, context: ForwardContext) -> None:
        """Refuse a strategy that does not fit the run, as a call would; warn if no step is sparse.

        For callers that know the run before the first step that is not dense.

        Raises:
            ConfigError: the strategy is for other steps or another grid.
        """
        if self._source is None:
            return
        super().check_run(context)
        if context.latent_grid is not None:
            tile = fit_tile(self.config.tile_size, context.latent_grid)
            self._source.check(tiles_of(context.latent_grid, tile), context.num_steps)

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`; a search looks at every step."""
        if self._source is None:
            return None
        tile = fit_tile(self.config.tile_size, layout.grid)
        windows = self._windows_of(layout, tiles_of(layout.grid, tile), heads, context)
        return _density(windows, layout, self.config.tile_size), math.prod(tile)

    def _windows(
        self, layout: SequenceLayout, tiles: Window, heads: slice, context: ForwardContext
    ) -> tuple[Window, ...]:
        """Return the windows of this step for some of the layer's heads, once that is noted."""
        windows = self._windows_of(layout, tiles, heads, context)
        density = _density(windows, layout, self.config.tile_size)
        self.record(context, density, heads.stop - heads.start)
        return windows

    def _windows_of(
        self, layout: SequenceLayout, tiles: Window, heads: slice, context: ForwardContext
    ) -> tuple[Window, ...]:
        assert self._source is not None, "a search tries windows of its own"
        return self._source.windows(
            tiles,
            step=context.current_timestep,
            num_steps=context.num_steps,
            first_head=heads.start,
            num_heads=heads.stop - heads.start,
        )

    def _attend_windows(
        self,
        call: SparseCall,
        queries: TiledSequence,
        keys: TiledSequence,
        windows: tuple[Window, ...],
    ) -> torch.Tensor:
        """Return attention over a window per head, [B, Sq, H, D]."""
        if call.kernel.name in UPSTREAM:
            return attend_upstream(call, keys, windows, self.label)
        return attend_tiled(
            call,
            queries,
            keys,
            lambda heads: _plan(queries, keys, windows[heads]),
            cached_plans=True,
        )

    def _search(
        self,
        call: SparseCall,
        queries: TiledSequence,
        keys: TiledSequence,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Record how far each candidate takes every head from full attention, and return that."""
        layer = None if self.site is None else self.site.layer
        heads, order = call.query.shape[2], queries.order
        if heads != self.num_heads:
            raise _searches_alone()
        if layer is None:
            raise UsageError(
                "STA_searching must know the layer's index, got a layer without one; construct it "
                "with a `prefix` such as 'blocks.3.attn', or run `sglang attention sta search`"
            )
        assert self.config.search_path is not None, "the configuration checks that"
        session = session_for(self.config.search_path, context.request_id)
        full = self._attend_windows(call, queries, keys, (order.tiles,) * heads)
        losses: dict[str, list[torch.Tensor]] = {}
        for window in session.recorder.candidates(order.tiles):
            out = self._attend_windows(call, queries, keys, (window,) * heads)
            for branch, part, whole in branch_parts(context.cfg_branch, out, full):
                losses.setdefault(branch, []).append(head_losses(part, whole))
        step = context.current_timestep
        for branch, found in losses.items():
            session.recorder.add(torch.stack(found), step=step, layer=layer, branch=branch)
            session.finish(branch, context.num_steps, order.grid, order.tile)
        self.record(context, 1.0, heads)
        return full


def _searches_alone() -> UsageError:
    return UsageError(
        "STA_searching must see all tokens and heads of a layer, got a part of them; search with "
        "--num-gpus 1, and use the strategy with any number of GPUs"
    )


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


# Few heads share a pass, so there are few combinations of windows.
@static_cache(maxsize=128)
def _plan(queries: TiledSequence, keys: TiledSequence, windows: tuple[Window, ...]) -> BlockPlan:
    # Not as inference tensors: the first caller must not decide what later ones may do with them.
    with torch.inference_mode(False):
        indices, counts, uniform = tile_lists(
            windows,
            queries.order.tiles,
            query_text=queries.num_text_blocks,
            key_text=keys.num_text_blocks,
            device=queries.index.device,
        )
        plan = BlockPlan(
            indices=indices, counts=counts, q=queries.blocks, kv=keys.blocks, uniform=uniform
        )
        return plan.longest_first()


@lru_cache(maxsize=64)
def _density(
    windows: tuple[Window, ...], layout: SequenceLayout, tile_size: tuple[int, ...]
) -> float:
    """Return the share of pairs kept, as a mean over heads."""
    tile = fit_tile(tile_size, layout.grid)
    of_video = sum(pair_density(window, layout.grid, tile) for window in windows) / len(windows)
    return layout.density(of_video)
