"""Static sparse attention: patterns that follow from the latent grid and the step alone.

`radial` is Radial Attention, whose windows shrink with the distance of frames; `lvsa` lets frames
attend to global ones and to a window. Text is attended to by everything, and attends to everything.
Windows of tiles are `sliding_tile_attn`.

Shapes: B batch, S tokens, H heads, D head size, N blocks of the video.
"""

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.tail import PooledBlocks
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option, parameters_of
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.sparse.base import SparseImpl, Tail, tail_option
from multimodal_gen.runtime.layers.attention.sparse.ring_tail import attend_ring_map
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    pool_over_ring,
    shards_of,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.static.patterns import (
    key_frame_interval,
    lvsa_map,
    radial_map,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    TiledSequence,
    attend_tiled,
    in_one_row,
    in_tiles,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_BLOCK = 128
# Parameters that one pattern has and the other has not.
_OF_PATTERN = MappingProxyType(
    {
        "radial": ("decay_factor", "model_type"),
        "lvsa": (
            "window_size",
            "n_first_frames",
            "reference_latent_frames",
            "sparsity_scale",
            "key_frame_interval",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig(SparseConfig):
    """Parameters of `static_sparse_attn`.

    Attributes:
        pattern: `radial` or `lvsa`; the others are of one of them.
        decay_factor: radial: factor of the widths.
        model_type: radial: what a frame keeps of the next one, half of a width (`wan`) or all of it
            (`hunyuan`).
        window_size: lvsa: frames of the window on either side.
        n_first_frames: lvsa: leading frames that all attend to.
        reference_latent_frames: lvsa: frames that the model was trained on, and that every frame
            attends to about as many of: 21 for Wan, 33 for HunyuanVideo. Shorter videos are dense.
        sparsity_scale: lvsa: factor of that number.
        key_frame_interval: lvsa: every so many frames is global, instead. Which ones rotates from
            step to step.
        tail: what becomes of blocks, or frames, that are not kept: `none` drops them; `pooled`
            counts each by the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    pattern: Literal["radial", "lvsa"] = option("radial", "which pattern")
    decay_factor: float = option(1.0, "radial: factor of the widths", ge=0)
    model_type: Literal["wan", "hunyuan"] = option("wan", "radial: whose rule for the next frame")
    window_size: int = option(4, "lvsa: frames of the window on either side", ge=1)
    n_first_frames: int = option(1, "lvsa: leading frames that all attend to", ge=0)
    reference_latent_frames: int = option(21, "lvsa: frames the model was trained on", ge=1)
    sparsity_scale: float = option(1.0, "lvsa: factor of reference_latent_frames", ge=0)
    key_frame_interval: int | None = option(
        None, "lvsa: interval of the global frames, instead", ge=1
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "triton", "reference"] = option("auto", "kernel that runs")

    def check(self) -> None:
        """Nothing is given that the pattern does not have."""
        for pattern, names in _OF_PATTERN.items():
            for name in names if pattern != self.pattern else ():
                value = getattr(self, name)
                if value != parameters_of(StaticConfig)[name].default:
                    raise ConfigError(
                        f"`{name}` of static_sparse_attn must be given with pattern {pattern} "
                        f"only, got {value} with pattern {self.pattern}; remove one"
                    )


class StaticBackend(AttentionBackend):
    """Static sparse attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.STATIC_SPARSE_ATTN
    summary: ClassVar[str] = "Patterns known in advance: Radial Attention, or LVSA"
    config_cls: ClassVar[type[StaticConfig]] = StaticConfig
    variants: ClassVar[tuple[Variant, ...]] = engine_variants(
        BLOCK_SPARSE,
        (Feature.GQA, Feature.KEY_MASK, Feature.RING),
        kernels=("gluon", "triton", "reference"),  # blocks are frames of any size
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return StaticImpl


class StaticImpl(SparseImpl[StaticConfig]):
    """Static sparse attention of one layer."""

    declaration = StaticBackend
    cache_reason: ClassVar[str] = "its patterns are places in one latent grid"

    def prepare(self) -> None:
        """The global frames of LVSA rotate."""
        self.varies_by_step = self.config.pattern == "lvsa"

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention by the pattern; see `SparseImpl.attend`."""
        kept = self._kept(call.layout, context)
        layout, tile = self._cut(call.layout)
        queries, keys = in_tiles(layout, tile, call.query.device)
        self.record(context, layout.density(_share(kept, queries)), call.query.shape[2])
        plan = _plan(kept, queries, keys)
        call = replace(call, layout=layout)
        return attend_tiled(call, queries, keys, lambda _: plan, cached_plans=True)

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`."""
        kept = self._kept(layout, context)
        cut, tile = self._cut(layout)
        queries, _ = in_tiles(cut, tile, torch.device("cpu"))
        return layout.density(_share(kept, queries)), math.prod(tile)

    def dense_reason(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        first_head: int = 0,
    ) -> str | None:
        """See `AttentionImpl.dense_reason`; videos that LVSA attends to all of are dense."""
        if context is not None and context.latent_grid is not None:
            frames = context.latent_grid[0]
            if self.config.pattern == "lvsa" and self._interval(frames) == 1:
                return f"{self.label} keeps all of {frames} frames (`reference_latent_frames`)"
        return super().dense_reason(query, key, context, first_head)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`; ranks know the pattern."""
        layout, device = self.ring_layout(inputs, context), inputs.query.device
        assert context is not None, "a layout needs a context"
        kept = self._kept(layout, context)
        layout, tile = self._cut(layout)
        queries, _ = in_tiles(layout, tile, device)
        shards = shards_of(layout, inputs.call, queries.order.tile, device)
        self.record(context, layout.density(_share(kept, queries)), inputs.query.shape[2])
        tail = None
        if self.pools_tail:
            (key, value), counts = pool_over_ring((inputs.key, inputs.value), shards, inputs.call)
            tail = PooledBlocks(
                keys=key.to(inputs.key.dtype),
                values=value.to(inputs.key.dtype),
                counts=counts.int().unsqueeze(1),
            )
        return attend_ring_map(
            inputs,
            shards,
            _on_device(kept, device)[None, None],
            scale=self.softmax_scale,
            kernel=self.kernel,
            tail=tail,
        )

    def _cut(self, layout: SequenceLayout) -> tuple[SequenceLayout, tuple[int, ...]]:
        """Return the layout whose tiles are the blocks, and the tokens of a tile."""
        if self.config.pattern == "radial":
            return in_one_row(layout), (1, 1, _BLOCK)
        return layout, (1, *layout.grid[1:])

    def _interval(self, frames: int) -> int:
        config = self.config
        if config.key_frame_interval is not None:
            return config.key_frame_interval
        scaled = int(config.reference_latent_frames * config.sparsity_scale)
        return key_frame_interval(
            frames,
            window=config.window_size,
            first=config.n_first_frames,
            budget=max(config.n_first_frames + 1, scaled),
        )

    def _kept(self, layout: SequenceLayout, context: ForwardContext) -> torch.Tensor:
        """Return the pattern of the running step, bool [N, N] on the CPU; equal ones are one."""
        config, (frames, height, width) = self.config, layout.grid
        if config.pattern == "radial":
            return _radial(frames, height * width, config.decay_factor, config.model_type)
        interval = self._interval(frames)
        offset = context.current_timestep % interval
        return _lvsa(frames, config.window_size, config.n_first_frames, interval, offset)


@static_cache(maxsize=64)
def _radial(
    frames: int, tokens: int, decay: float, model: Literal["wan", "hunyuan"]
) -> torch.Tensor:
    with torch.inference_mode(False), torch.device("cpu"):
        return radial_map(frames, tokens, block=_BLOCK, decay=decay, model=model)


@static_cache(maxsize=256)
def _lvsa(frames: int, window: int, first: int, interval: int, offset: int) -> torch.Tensor:
    with torch.inference_mode(False), torch.device("cpu"):
        return lvsa_map(frames, window=window, first=first, interval=interval, offset=offset)


@static_cache(maxsize=64)
def _on_device(kept: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return kept.to(device)


@static_cache(maxsize=64)
def _share(kept: torch.Tensor, queries: TiledSequence) -> float:
    """Return the share of the video's pairs that a pattern keeps."""
    lengths = queries.order.lengths.double().cpu()
    return float(lengths @ kept.double() @ lengths) / float(lengths.sum()) ** 2


@static_cache(maxsize=64)
def _plan(kept: torch.Tensor, queries: TiledSequence, keys: TiledSequence) -> BlockPlan:
    """Return the plan of a pattern, for all heads."""
    text, device = keys.num_text_blocks, queries.index.device
    most = int(kept.sum(1).max()) + text
    with torch.inference_mode(False):
        listed = F.pad(kept, (0, text), value=True).to(device)[None, None]
        plan = BlockPlan.from_map(listed, queries.blocks, keys.blocks, max_count=most)
        return plan.longest_first()
