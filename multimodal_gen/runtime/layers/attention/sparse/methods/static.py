"""Static sparse attention: patterns that follow from the latent grid and the step alone.

`radial` is Radial Attention, whose windows shrink with the distance of frames; `lvsa` lets frames
attend to global ones and to a window; `chunks` to chunks of frames nearby, as in VDN-H3, without
the trained gate and the trained linear part that this model has beside them. Text is attended to by
everything, and attends to everything. Windows of tiles are `sliding_tile_attn`.

Shapes: B batch, S tokens, H heads, D head size, N blocks of the video.
"""

import math
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    SparseConfig,
    Tail,
    option,
    parameters_of,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SPARSE_FEATURES, SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.pattern import Pattern, Patterns
from multimodal_gen.runtime.layers.attention.sparse.router import Cut, Router
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_BLOCK = 128
# Parameters that one pattern has and the other has not.
_OF_PATTERN = MappingProxyType(
    {
        "radial": ("decay_factor", "model_type", "radial_rule"),
        "lvsa": (
            "window_size",
            "n_first_frames",
            "reference_latent_frames",
            "sparsity_scale",
            "key_frame_interval",
        ),
        "chunks": ("chunk", "radius", "anchor_frames"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig(SparseConfig):
    """Parameters of `static_sparse_attn`.

    Attributes:
        pattern: `radial`, `lvsa` or `chunks`; the others are of one of them.
        decay_factor: radial: factor of the widths.
        model_type: radial: whose rule: of Wan all frames keep the first one, too.
        radial_rule: radial: the authors' rule of that month; by that of `2025-07` all frames of
            HunyuanVideo keep the first one, too, and frames of Wan a half of the next one.
        window_size: lvsa: frames of the window on either side.
        n_first_frames: lvsa: leading frames that all attend to.
        reference_latent_frames: lvsa: frames that the model was trained on, and that every frame
            attends to about as many of: 21 for Wan, 33 for HunyuanVideo. Shorter videos are dense.
        sparsity_scale: lvsa: factor of that number.
        key_frame_interval: lvsa: every so many frames is global, instead. Which ones rotates from
            step to step.
        chunk: chunks: frames of a chunk; 0 has windows around each frame instead.
        radius: chunks: chunks on either side, or frames where there are no chunks.
        anchor_frames: chunks: what the first and the last frame are: attended to by all
            (`columns`), attending to all (`rows`), `both` or `none`.
        tail: what becomes of blocks, or frames, that are not kept: `none` drops them; `pooled`
            counts each by the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    pattern: Literal["radial", "lvsa", "chunks"] = option("radial", "which pattern")
    decay_factor: float = option(1.0, "radial: factor of the widths", ge=0)
    model_type: Literal["wan", "hunyuan"] = option("wan", "radial: whose rule for the first frame")
    radial_rule: Literal["2025-11", "2025-07"] = option("2025-11", "radial: the rule of that month")
    window_size: int = option(4, "lvsa: frames of the window on either side", ge=1)
    n_first_frames: int = option(1, "lvsa: leading frames that all attend to", ge=0)
    reference_latent_frames: int = option(21, "lvsa: frames the model was trained on", ge=1)
    sparsity_scale: float = option(1.0, "lvsa: factor of reference_latent_frames", ge=0)
    key_frame_interval: int | None = option(
        None, "lvsa: interval of the global frames, instead", ge=1
    )
    chunk: int = option(5, "chunks: frames of a chunk; 0: windows around each frame", ge=0)
    radius: int = option(1, "chunks: chunks, or frames, on either side", ge=0)
    anchor_frames: Literal["none", "columns", "rows", "both"] = option(
        "both", "chunks: what the first and the last frame see, and who sees them"
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


class StaticRouter(Router[StaticConfig]):
    """A pattern that the grid and the step give."""

    chooses = "pattern"

    def cut(self, settings: StaticConfig, grid: Window) -> Cut:
        """Return blocks in the order of the sequence, or frames."""
        return Cut.rows(_BLOCK) if settings.pattern == "radial" else Cut((1, *grid[1:]))

    def varies(self, settings: StaticConfig) -> bool:
        """The global frames of LVSA rotate."""
        return settings.pattern == "lvsa"

    def pattern(
        self, settings: StaticConfig, grid: Window, heads: slice, context: ForwardContext
    ) -> Patterns:
        """Return the pattern of a step, the same for all heads."""
        frames, height, width = grid
        step = context.current_timestep
        if settings.pattern == "radial":
            tokens, is_wan = height * width, settings.model_type == "wan"
            is_older = settings.radial_rule == "2025-07"
            following = tokens // 2 if is_wan and is_older else tokens
            return (_radial(frames, tokens, settings.decay_factor, is_wan or is_older, following),)
        if settings.pattern == "chunks":
            return (_chunks(frames, settings.chunk, settings.radius, settings.anchor_frames),)
        every = _interval(settings, frames)
        window, first = settings.window_size, settings.n_first_frames
        return (_lvsa(frames, window, first, every, step % every),)

    def dense_reason(self, settings: StaticConfig, tokens: int, frames: int | None) -> str | None:
        """Videos that LVSA, or windows of chunks, attend to all of are dense."""
        if frames is None or settings.pattern == "radial":
            return None
        if settings.pattern == "lvsa":
            every, why = _interval(settings, frames) == 1, "reference_latent_frames"
        else:
            given = settings.chunk, settings.radius, settings.anchor_frames
            every, why = bool((_chunks(frames, *given).counts == frames).all()), "radius"
        return f"{self.layer.label} keeps all of {frames} frames (`{why}`)" if every else None


def _interval(config: StaticConfig, frames: int) -> int:
    if config.key_frame_interval is not None:
        return config.key_frame_interval
    scaled = int(config.reference_latent_frames * config.sparsity_scale)
    return key_frame_interval(
        frames,
        window=config.window_size,
        first=config.n_first_frames,
        budget=max(config.n_first_frames + 1, scaled),
    )


@static_cache(maxsize=64)
def _radial(frames: int, tokens: int, decay: float, sink: bool, following: int) -> Pattern:
    with torch.device("cpu"):
        kept = radial_map(frames, tokens, block=_BLOCK, decay=decay, sink=sink, following=following)
        return Pattern.of_map(kept)


@static_cache(maxsize=256)
def _lvsa(frames: int, window: int, first: int, interval: int, offset: int) -> Pattern:
    with torch.device("cpu"):
        kept = lvsa_map(frames, window=window, first=first, interval=interval, offset=offset)
        return Pattern.of_map(kept)


@static_cache(maxsize=64)
def _chunks(frames: int, chunk: int, radius: int, anchors: str) -> Pattern:
    with torch.device("cpu"):
        return Pattern.of_map(chunks_map(frames, chunk=chunk, radius=radius, anchors=anchors))


_HIGH = 1 / 3  # share of a block's rows that a column must be kept by
_MOST = 0.6  # share of such columns among those that are kept at all, which keeps a block


def radial_map(
    frames: int, tokens: int, *, block: int, decay: float, sink: bool, following: int
) -> torch.Tensor:
    """Return what Radial Attention keeps: bool [N, N] on the CPU (arXiv:2506.19852).

    Token r of frame i keeps token c of frame j, with d = |i - j|, b(n) the bits of n, and
    L = 2^b(P) / 2^b(d), where

        |r - c| <= max(L * decay, block)  and  (L >= block  or  d % int(block / L) = 0)

    and inside of a frame all, and where there is a sink all of frame 0; for d = 1 the width is
    `following`. A pair of frames keeps a block of tokens if more than 0.6 of the columns it has in
    there are kept by more than a third of the block's rows. Blocks of the diagonal are always kept,
    so that no row is empty where frames are shorter than blocks; tokens behind the last whole block
    have a block of their own; and of a frame that begins inside a block the last one counts, too.
    The authors' code (72788d4) does none of the three.

    Args:
        frames: T.
        tokens: P.
        block: tokens of a block, in the order of the sequence.
        decay: factor of the widths.
        sink: whether all frames keep the first one.
        following: width of the next frame, in tokens.
    """
    num = -(-frames * tokens // block)
    kept = torch.eye(num, dtype=torch.bool)
    for i in range(frames):
        for j in range(frames):
            width: float | None = tokens
            if i != j and not (sink and j == 0):
                width = _width(abs(i - j), tokens, block, decay, following)
            if width is None:
                continue
            first, other = i * tokens, j * tokens
            part = _blocks_of_band(first % block, other % block, tokens, width, block)
            rows, columns = (
                slice(start // block, start // block + size)
                for start, size in zip((first, other), part.shape, strict=True)
            )
            kept[rows, columns] |= part
    return kept


def _width(distance: int, tokens: int, block: int, decay: float, following: int) -> float | None:
    """Return how far kept tokens of a frame so far away may lie from the same; None for none."""
    length = 2 ** tokens.bit_length() / 2 ** distance.bit_length()
    if length < block and distance % int(block / length):
        return None
    return following if distance == 1 else max(length * decay, block)


@cache
def _blocks_of_band(row: int, column: int, tokens: int, width: float, block: int) -> torch.Tensor:
    """Return the blocks that a band of a pair of frames keeps, bool [n, m].

    Args:
        row: tokens of its first block that lie before the frame, on the side of queries.
        column: the same for keys.
        tokens: P.
        width: tokens r and c are kept where |r - c| <= width.
        block: tokens of a block.
    """
    num_rows, num_columns = -(-(row + tokens) // block), -(-(column + tokens) // block)
    starts = torch.arange(num_rows)[:, None] * block - row
    c = torch.arange(tokens)
    reach = math.floor(width)
    top = torch.maximum(starts.clamp_min(0), c - reach)
    bottom = torch.minimum((starts + block).clamp_max(tokens), c + reach + 1)
    kept = (bottom - top).clamp_min(0)  # rows of the block that keep column c, [n, P]
    place = ((c + column) // block).expand(num_rows, -1)
    high, any_row = (
        torch.zeros(num_rows, num_columns).scatter_add_(1, place, x.float())
        for x in (kept > block * _HIGH, kept > 0)
    )
    return high > _MOST * any_row


def key_frame_interval(frames: int, *, window: int, first: int, budget: int) -> int:
    """Return the interval of global frames at which frames attend to about `budget` frames.

    1, which is dense, where the video has no more frames than the budget (arXiv:2605.31057).

    Args:
        frames: T.
        window: half the width of the window.
        first: leading frames that are global.
        budget: frames to attend to, more than `first`.
    """
    if frames <= budget:
        return 1
    wanted = max(first, budget - min(2 * window + 1, frames))
    strict = next(n for n in range(frames, 0, -1) if len(_global(frames, first, n, 0)) >= wanted)
    floor = 2 * window + first
    return max(strict, math.ceil(max(frames - floor, budget - floor) / max(budget - floor, 1)))


def lvsa_map(frames: int, *, window: int, first: int, interval: int, offset: int) -> torch.Tensor:
    """Return which frames each frame attends to: bool [T, T] on the CPU (arXiv:2605.31057).

    Frame f sees the global frames, and a window around it: [f - window, f + window], shifted inside
    at the borders, and widened to either side in turns until 2 window + 1 frames of it are not
    global, or nothing is left.

    Args:
        frames: T.
        window: half the width of the window.
        first: leading frames that are global.
        interval: of the other global frames.
        offset: of the first of these; they go around the end, so that there are always as many.
    """
    shared = _global(frames, first, interval, offset)
    kept = torch.zeros(frames, frames, dtype=torch.bool)
    kept[:, sorted(shared)] = True
    wanted = min(2 * window + 1, frames - len(shared))
    for f in range(frames):
        low = max(0, min(f - window, frames - 1 - 2 * window))
        high = min(frames - 1, max(f + window, 2 * window))
        to_left = True
        while sum(g not in shared for g in range(low, high + 1)) < wanted:
            if low > 0 and (to_left or high == frames - 1):
                low -= 1
            else:
                high += 1
            to_left = not to_left
        kept[f, low : high + 1] = True
    return kept


def chunks_map(frames: int, *, chunk: int, radius: int, anchors: str) -> torch.Tensor:
    """Return which frames each frame attends to: bool [T, T] on the CPU.

    Frame f of chunk f // chunk sees the chunks at most `radius` away, whole ones, cut at the ends
    of the video. It is the softmax part of VDN-H3 (`hybrid_window_attn_h3` of sglang at 0c8165c).

    Args:
        frames: T.
        chunk: frames of a chunk; 0 for windows of `radius` frames on either side of each.
        radius: of the windows.
        anchors: what the first and the last frame are; see `StaticConfig`.
    """
    place = torch.arange(frames) // max(chunk, 1)
    kept = (place[:, None] - place).abs() <= radius
    ends = [0, frames - 1]
    kept[ends] |= anchors in ("rows", "both")
    kept[:, ends] |= anchors in ("columns", "both")
    return kept


def _global(frames: int, first: int, interval: int, offset: int) -> set[int]:
    """Return the frames that every frame attends to."""
    periodic = {(offset + i * interval) % frames for i in range(-(-frames // interval))}
    return set(range(min(first, frames))) | periodic


class StaticBackend(SparseBackend):
    """Static sparse attention."""

    backend = AttentionBackendEnum.STATIC_SPARSE_ATTN
    summary = "Patterns known in advance: Radial Attention, LVSA, or chunks"
    config_cls = StaticConfig
    router = StaticRouter
    variants = engine_variants(BLOCK_SPARSE, SPARSE_FEATURES, plans=("ragged",))

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Blocks are frames of any size."""
        return 0, 0
