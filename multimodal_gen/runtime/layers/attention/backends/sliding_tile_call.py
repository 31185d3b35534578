"""Calls of Sliding Tile Attention over a window per head, and their plans.

Shapes: B batch, S tokens, H heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
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

__all__ = ["Held", "WindowedCall", "bounded", "held_by", "plan_of_heads", "ring_plan"]


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
    distinct = {window: held_by(window, mine, theirs) for window in effective}
    return plan_of_heads([distinct[window] for window in effective], mine, theirs.keys.blocks)


def plan_of_heads(heads: Sequence["Held"], mine: Chunk, keys: Blocks) -> BlockPlan | None:
    """Return the plan of lists for every head, or None where no query keeps a key.

    Args:
        heads: the lists of each head, of which some may be the same.
        mine: the queries; there is a video token among them.
        keys: the blocks that the lists count.
    """
    heads = heads if len({id(held) for held in heads}) > 1 else heads[:1]
    room = max(held.indices.shape[3] for held in heads)
    most = max(held.most for held in heads)
    if not most:
        return None
    assert mine.queries is not None, "callers know"
    with torch.inference_mode(False):
        padded = [F.pad(held.indices, (0, room - held.indices.shape[3])) for held in heads]
        plan = BlockPlan(
            indices=torch.cat(padded, dim=1),
            counts=torch.cat([held.counts for held in heads], dim=1),
            q=mine.queries,
            kv=keys,
            uniform=all(held.least == most for held in heads),
        )
        return plan.longest_first()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """The lists of a window.

    Attributes:
        indices: int32 [1, 1, Nq, K], the blocks that each query block keeps.
        counts: int32 [1, 1, Nq], how many.
        least: the least of the counts.
        most: the largest of them.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    least: int
    most: int


@lru_cache(maxsize=1024)
def held_by(window: Window, mine: Chunk, theirs: Chunk) -> Held:
    """Return which blocks of one chunk's keys the queries of another keep, over a whole window."""
    with torch.inference_mode(False):
        device = mine.tiles.device
        rows = kept_indices(window, mine.keys.order.tiles, device)[mine.tiles]
        return bounded(*tiles_held(rows[None, None], theirs))


def bounded(indices: torch.Tensor, counts: torch.Tensor) -> Held:
    """Return lists without the room that none of them needs; waits for the device."""
    least, most = (int(bound) for bound in counts.aminmax())
    return Held(indices=indices[..., : max(most, 1)], counts=counts, least=least, most=most)
