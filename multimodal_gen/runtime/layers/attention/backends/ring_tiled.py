"""Attention by plans of tiles whose keys and values travel round a ring.

A rank brings its tokens into tile order once, before they travel. Of every chunk it is given it
then does the blocks that its queries keep. Text attends to everything and is attended to by all,
whether it lies in chunks or on all ranks.

Shapes: B batch, S tokens of a chunk, H heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens
from multimodal_gen.runtime.distributed.exchange import RowsUnderWay
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.partial import KeyPart, Merger
from multimodal_gen.runtime.distributed.ring import ring_attention
from multimodal_gen.runtime.distributed.timing import attending
from multimodal_gen.runtime.layers.attention.backends._common import attend_to_nothing
from multimodal_gen.runtime.layers.attention.backends.ring_tiles import Chunk, Reach, text_chunk
from multimodal_gen.runtime.layers.attention.backends.tiled import masked_keys
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.ring_method import RingInputs

__all__ = ["Engine", "PlanOf", "attend_in_ring"]

PlanOf = Callable[[Chunk], BlockPlan | None]
# Computes q, k, v and a plan to out and lse.
Engine = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, BlockPlan], tuple[torch.Tensor, torch.Tensor]
]

# Rows of a query block where everything is attended to.
_DENSE_ROWS = (64, 128, 384)


def attend_in_ring(
    inputs: RingInputs,
    chunks: Sequence[Chunk | None],
    plan_of: PlanOf,
    *,
    scale: float,
    kernel: str = "auto",
    queries: Chunk | None = None,
    engine: Engine | None = None,
    reach: Reach | None = None,
) -> torch.Tensor:
    """Attend by a plan of tiles: into tile order, once round the ring, and back.

    Args:
        inputs: what this rank holds.
        chunks: the tokens of every rank, from `chunks_of` or `whole_chunks`.
        plan_of: gives the plan of this rank's video queries over the keys of a chunk, its text
            included, or None where they keep none of them. Other queries attend to every key.
        scale: factor of the scores.
        kernel: provider of the block-sparse engine.
        queries: this rank's tokens in the tiles of queries, where those of keys are others.
        engine: what computes the plans, where that is not the block-sparse engine.
        reach: which keys ranks send each other instead of passing all of them round, where the
            sequence has no text and no mask; None for the ring.

    Returns:
        [B, prefix + S + suffix, H, D] in the order of the sequence. Queries that see no key are
        zero.
    """
    call = inputs.call
    held = {
        owner: _hold(chunk, call.keep_of(owner))
        for owner, chunk in enumerate(chunks)
        if chunk is not None
    }
    here, mine = held.get(call.group.index), queries or chunks[call.group.index]
    query, key, value = inputs.query, inputs.key, inputs.value
    if here is not None:
        key, value = here.ordered(key, value)
    order, rows = None, slice(0, 0)
    if mine is not None and mine.num_video:
        rows = slice(call.prefix, call.prefix + mine.num_video)
        order = None if mine.in_order else _query_order(mine, call.prefix, call.suffix)
    if order is not None:
        (query,) = gather_tokens((query,), order)
    dense = partial(_block_sparse, scale=scale, kernel=kernel)
    parts = _Parts(plan_of=plan_of, engine=engine or dense, dense=dense, held=held, queries=rows)
    shared: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if inputs.shared_key is not None and inputs.shared_value is not None:
        text = _hold(text_chunk(inputs.shared_key.shape[1], query.device), call.shared_keep)
        parts.shared = text
        shared = text.ordered(inputs.shared_key, inputs.shared_value)
    if reach is not None:
        out = _attend_to_reached(query, key, value, call.group, parts, reach)
    else:
        plain = replace(call, keep=None, shared_keep=None)  # the plans leave masked keys out
        out = ring_attention(query, key, value, *shared, parts.attend, plain)
    if order is None:
        return out
    result = torch.empty_like(out)
    scatter_tokens(out, order, result)
    return result


def _attend_to_reached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group,
    parts: "_Parts",
    reach: Reach,
) -> torch.Tensor:
    """Attend to this rank's keys while those of others are under way, then to all of them."""
    under_way = RowsUnderWay(group, (key, value), reach.rows, reach.leaving, reach.coming)
    merger, rows = Merger(query, value.shape[3]), slice(0, query.shape[1])
    with attending(query.device):
        own = KeyPart(key=key, value=value, owner=group.index)
        merger.add(rows, *parts.attend(query, own))
    key, value = under_way.arrived()
    with attending(query.device):
        if reach.plan is not None:
            merger.add(rows, *parts.engine(query, key, value, reach.plan))
        return merger.result()[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """The keys of a chunk as they travel: masked ones behind the others of their block.

    Attributes:
        chunk: the chunk.
        blocks: what its blocks hold of kept keys.
        index: the order the keys travel in, int32 [S] or [B, S].
        keep: bool [B, S], or None.
    """

    chunk: Chunk
    blocks: Blocks
    index: torch.Tensor
    keep: torch.Tensor | None

    def ordered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chunk's keys and values as they travel."""
        if self.keep is not None:
            # Kernels read masked rows beside others, and a weight of zero times NaN is NaN.
            key, value = (zero_masked_rows(x, self.keep) for x in (key, value))
        elif self.chunk.in_order:
            return key, value
        key, value = gather_tokens((key, value), self.index)
        return key, value

    def kept(self, plan: BlockPlan) -> BlockPlan:
        """Return a plan over the chunk's keys without those that are masked."""
        return plan if self.keep is None else replace(plan, kv=self.blocks)


def _hold(chunk: Chunk, keep: torch.Tensor | None) -> _Held:
    if keep is None:
        return _Held(chunk=chunk, blocks=chunk.keys.blocks, index=chunk.keys.index, keep=None)
    index, blocks = masked_keys(chunk.keys, keep)
    return _Held(chunk=chunk, blocks=blocks, index=index, keep=keep)


@dataclass(slots=True, kw_only=True, eq=False)
class _Parts:
    """Computes the parts of one call.

    Attributes:
        plan_of: see `attend_in_ring`.
        engine: what computes the plans.
        dense: what computes attention to everything.
        held: the keys of every rank that has any.
        queries: rows of this rank's video tokens.
        shared: the keys that all ranks hold.
    """

    plan_of: PlanOf
    engine: Engine
    dense: Engine
    held: dict[int, _Held]
    queries: slice
    shared: _Held | None = None

    def attend(self, query: torch.Tensor, part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a part; see `AttendPart`."""
        if part.owner is None:
            assert self.shared is not None, "the ring yields them only where there are any"
            return self._to_all(query, part, self.shared)
        theirs = self.held[part.owner]
        first, stop = self.queries.start, self.queries.stop
        if first == stop:
            return self._to_all(query, part, theirs)
        video = self._by_plan(query[:, first:stop], part, theirs)
        if stop - first == query.shape[1]:
            return video
        texts = [self._to_all(x, part, theirs) for x in (query[:, :first], query[:, stop:])]
        outs, stats = zip(texts[0], video, texts[1], strict=True)
        return torch.cat(outs, dim=1), torch.cat(stats, dim=2)

    def _by_plan(
        self, query: torch.Tensor, part: KeyPart, theirs: _Held
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.plan_of(theirs.chunk)
        if plan is None:
            return attend_to_nothing(query, part.value)
        return self.engine(query, part.key, part.value, theirs.kept(plan))

    def _to_all(
        self, query: torch.Tensor, part: KeyPart, theirs: _Held
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not query.shape[1]:
            return attend_to_nothing(query, part.value)
        plan = _plan_of_all(query.shape[1], theirs.chunk)
        return self.dense(query, part.key, part.value, theirs.kept(plan))


def _block_sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = block_sparse_attention(
        query, key, value, plan, scale=scale, return_lse=True, kernel=kernel
    )
    return out, lse


@lru_cache(maxsize=128)
def _query_order(mine: Chunk, prefix: int, suffix: int) -> torch.Tensor:
    """Return the order of a rank's queries: its tokens in tiles between those that all hold."""
    index = mine.keys.index
    total = prefix + len(index)
    with torch.inference_mode(False):
        before = torch.arange(prefix, dtype=torch.int32, device=index.device)
        after = torch.arange(total, total + suffix, dtype=torch.int32, device=index.device)
        return torch.cat((before, index + prefix, after))


@lru_cache(maxsize=256)
def _plan_of_all(num_queries: int, theirs: Chunk) -> BlockPlan:
    size = next((rows for rows in _DENSE_ROWS if num_queries <= rows), _DENSE_ROWS[-1])
    with torch.inference_mode(False):
        return BlockPlan.dense(
            Blocks.regular(num_queries, size), theirs.keys.blocks, theirs.keys.index.device
        )
