"""Calls of Sliding Tile Attention over a window per head, and their plans.

Shapes: B batch, S tokens, H heads, D head size.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.runtime.layers.attention.backends.ring_tiles import Chunk, tiles_held
from multimodal_gen.runtime.layers.attention.backends.tiled import TiledSequence, attend_tiled
from multimodal_gen.runtime.layers.attention.sta.upstream import (
    UPSTREAM,
    UpstreamCall,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sta.windows import (
    Window,
    effective_window,
    kept_indices,
    tile_lists,
)

__all__ = ["WindowedCall", "ring_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowedCall:
    """One call, ready to attend over any windows; see `attend_tiled`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    queries: TiledSequence
    keys: TiledSequence
    keep: torch.Tensor | None
    scale: float
    kernel: str

    @property
    def tiles(self) -> Window:
        """The grid of tiles."""
        return self.queries.order.tiles

    def over(self, windows: tuple[Window, ...]) -> torch.Tensor:
        """Return attention over a window per head, [B, Sq, H, D]."""
        if self.kernel in UPSTREAM:
            return self._upstream(windows)
        return attend_tiled(
            self.query,
            self.key,
            self.value,
            self.queries,
            self.keys,
            lambda heads: _plan(self.queries, self.keys, windows[heads]),
            scale=self.scale,
            kernel=self.kernel,
            keep=self.keep,
            cached_plans=True,
        )

    def _upstream(self, windows: tuple[Window, ...]) -> torch.Tensor:
        order = self.queries.order
        call = UpstreamCall(
            grid=order.grid,
            tile=order.tile,
            windows=windows,
            query_text=self.query.shape[1] - order.num_tokens,
            key_text=self.key.shape[1] - order.num_tokens,
            masked=self.keep is not None,
            scale=self.scale,
            head_size=self.query.shape[3],
            kv_heads=self.key.shape[2],
        )
        index = self.keys.index  # that of the queries too, where the kernels serve the call
        return attend_upstream(self.kernel, self.query, self.key, self.value, index, call)


# Few heads share a pass, so there are few combinations of windows.
@lru_cache(maxsize=128)
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


# A plan is made of lists that few windows share, so that heads may be combined in any way.
@lru_cache(maxsize=128)
def ring_plan(windows: tuple[Window, ...], mine: Chunk, theirs: Chunk) -> BlockPlan | None:
    """Return what the queries of one chunk keep of the keys of another.

    Args:
        windows: one per head.
        mine: the queries; there is a video token among them.
        theirs: the keys.

    Returns:
        The plan, or None where no query keeps a key. The last 128 are cached; only making the
        lists of a window that is new to the chunks waits for the device.
    """
    tiles = mine.keys.order.tiles
    effective = [effective_window(window, tiles) for window in windows]
    distinct = {window: _held(window, mine, theirs) for window in effective}
    room = max(held.indices.shape[3] for held in distinct.values())
    most = max(held.most for held in distinct.values())
    if not most:
        return None
    assert mine.queries is not None, "callers know"
    heads = [distinct[w] for w in (effective if len(distinct) > 1 else effective[:1])]
    with torch.inference_mode(False):
        padded = [F.pad(held.indices, (0, room - held.indices.shape[3])) for held in heads]
        plan = BlockPlan(
            indices=torch.cat(padded, dim=1),
            counts=torch.cat([held.counts for held in heads], dim=1),
            q=mine.queries,
            kv=theirs.keys.blocks,
            uniform=all(held.least == most for held in heads),
        )
        return plan.longest_first()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """The lists of a window: indices, counts, and the bounds of the counts."""

    indices: torch.Tensor
    counts: torch.Tensor
    least: int
    most: int


@lru_cache(maxsize=1024)
def _held(window: Window, mine: Chunk, theirs: Chunk) -> _Held:
    with torch.inference_mode(False):
        device = mine.tiles.device
        rows = kept_indices(window, mine.keys.order.tiles, device)[mine.tiles]
        indices, counts = tiles_held(rows[None, None], theirs)
        least, most = (int(bound) for bound in counts.aminmax())
        return _Held(indices=indices[..., : max(most, 1)], counts=counts, least=least, most=most)
