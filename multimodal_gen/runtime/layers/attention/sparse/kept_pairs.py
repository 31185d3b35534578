"""Which keys the queries of a sparse call attend to, recorded where that is asked for.

What a method keeps is known exactly where it decides: in the plan it gives to the block-sparse
engine. While `recorded_pairs` is open, executors record their plans as they attend by them; the
tensors of plans are in an order of their own, and answers are in that of the sequence.

Shapes: B batch, S tokens, H query heads, R rows, Q and K tokens of a plan, N blocks; a leading
`B|1` or `H|1` is broadcast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail_reference import block_of_rows
from multimodal_gen.kernels.select.row_reference import bits_of
from multimodal_gen.runtime.managers.forward_context import set_for_block

OfRows: TypeAlias = Callable[[torch.Tensor, slice], torch.Tensor]
"""From rows, int64 [R], and a range of the recorded heads, to the keys that are kept: bool
[B|1, h|1, R, Sk] in the order of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPairs:
    """What some heads of a call attend to.

    Attributes:
        heads: the query heads, among those of the call.
        of_rows: what their rows keep; see `OfRows`. It holds the plan, as long as it lives.
    """

    heads: slice
    of_rows: OfRows


LISTENER: ContextVar[list[KeptPairs] | None] = ContextVar(
    "multimodal_gen_recorded_pairs", default=None
)
"""What `recorded_pairs` collects in; None where nothing is recorded."""


@contextmanager
def recorded_pairs() -> Iterator[list[KeptPairs]]:
    """Collect what the sparse calls inside the block keep.

    Nothing is recorded of what computes its plan elsewhere, as the authors' packages do.
    """
    found: list[KeptPairs] = []
    with set_for_block(LISTENER, found):
        yield found


def record_pairs(heads: slice, of_rows: OfRows) -> None:
    """Record what some heads of the running call keep; see `KeptPairs`."""
    listener = LISTENER.get()
    if listener is not None:
        listener.append(KeptPairs(heads=heads, of_rows=of_rows))


def record_plan(
    heads: slice,
    plan: BlockPlan,
    sizes: tuple[int, int],
    *,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    idle: bool = False,
) -> None:
    """Record the plan that some heads of the running call attend by.

    Queries of the sequence that lie in no block of the plan attend to every key.

    Args:
        heads: the query heads, among those of the call; the heads of the plan.
        plan: the plan.
        sizes: (Sq, Sk) of the sequence.
        queries: int32 [Q] or [B|1, H|1, Q], place in the plan -> place in the sequence; None where
            they are the same.
        keys: the same of the keys, [K], [B, K] or [B|1, H|1, K].
        idle: whether queries with a place in the plan, but in no block, attend to none instead.
    """
    if LISTENER.get() is None:
        return
    q_index, k_index = _spelled(queries), _spelled(keys)
    of_query, of_every_key = (_block_of_places(side, plan.device) for side in (plan.q, plan.kv))

    def of_rows(rows: torch.Tensor, heads: slice) -> torch.Tensor:
        places = _places(q_index, rows.to(plan.device), sizes[0], heads)
        known = torch.where((places >= 0) & (places < plan.q.total), places, plan.q.total)
        mine, known = _broadcast(of_heads(of_query, heads), known)
        own = mine.gather(-1, known)  # [b, h, R]
        blocks = _kept_blocks(plan, own, places, heads)  # [b, h, R, Nk]
        of_key = of_heads(of_every_key, heads)[..., :-1]
        blocks, of_key = _broadcast(blocks, of_key.unsqueeze(2))
        of_key = of_key.expand(*blocks.shape[:3], -1)
        kept = blocks.gather(-1, of_key.clamp_min(0)) & (of_key >= 0) & (own >= 0).unsqueeze(-1)
        if k_index is not None:
            kept, index = _broadcast(kept, of_heads(k_index, heads).unsqueeze(2))
            moved = kept.new_zeros((*kept.shape[:3], sizes[1]))
            kept = moved.scatter_(-1, index.expand(*kept.shape[:3], -1), kept)
        outside = places < 0 if idle else own < 0
        return kept | outside.unsqueeze(-1)

    record_pairs(heads, of_rows)


def _spelled(index: torch.Tensor | None) -> torch.Tensor | None:
    """Return an index as int64 [B|1, H|1, tokens]."""
    if index is None:
        return None
    while index.dim() < 3:
        index = index.unsqueeze(-2)
    return index.long()


def _places(
    index: torch.Tensor | None, rows: torch.Tensor, num_rows: int, heads: slice
) -> torch.Tensor:
    """Return where rows of the sequence are in a plan, [b, h, R]; -1 for those that are not."""
    if index is None:
        return rows.view(1, 1, -1)
    index = of_heads(index, heads)
    place = index.new_full((*index.shape[:2], num_rows), -1)
    place.scatter_(-1, index, torch.arange(index.shape[2], device=index.device).expand_as(index))
    return place[..., rows]


def _block_of_places(blocks: Blocks, device: torch.device) -> torch.Tensor:
    """Return the block of each place and of none, [B|1, H|1, total + 1]; -1 for those in none."""
    found = F.pad(block_of_rows(blocks, device), (0, 1), value=blocks.num)
    return torch.where(found < blocks.num, found, -1)


def _kept_blocks(
    plan: BlockPlan, own: torch.Tensor, places: torch.Tensor, heads: slice
) -> torch.Tensor:
    """Return the key blocks that rows keep, bool [b, h, R, Nk]; `own` are their query blocks."""
    num = plan.kv.num
    kept, own = _broadcast(of_heads(plan.block_mask(num), heads), own.clamp_min(0))
    kept = kept.gather(2, own.unsqueeze(-1).expand(*own.shape, num))
    if plan.row_bits is None:
        return kept
    words, places = _broadcast(of_heads(plan.row_bits, heads), places.clamp_min(0).unsqueeze(-1))
    words = words.gather(2, places.expand(*places.shape[:3], words.shape[3]))
    return kept & bits_of(words, num)


def of_heads(x: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return what some heads have of [B, H, ...]; all have the same where there is but one."""
    return x if x.shape[1] == 1 else x[:, heads]


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with the same first two sizes."""
    lead = (max(x.shape[0], y.shape[0]), max(x.shape[1], y.shape[1]))
    return x.expand(*lead, *x.shape[2:]), y.expand(*lead, *y.shape[2:])
