"""Tiles in a ring: every rank holds a shard of the sequence, which may cut tiles.

Where a shard cuts a tile, it holds a shorter block of it, and what its tokens attend to is the sum
of what they attend to in every shard. A rank brings its tokens into tile order once, before they
travel. Of every shard it is given it then does the blocks that its queries keep. Text attends to
everything and is attended to by all, whether it lies in shards or on all ranks.

Shapes: B batch, S tokens of a shard, H heads, D head size, N tiles of the grid, n tiles that have
tokens in a shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.call import PooledBlocks
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail import add_tail, plan_of_map
from multimodal_gen.kernels.engine import (
    AUTO,
    KernelChoice,
    records_gradient,
)
from multimodal_gen.kernels.select.api import pool_tiles
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import (
    gather_tokens,
    scatter_tokens,
)
from multimodal_gen.runtime.distributed.collectives import (
    ExchangeRowsWork,
    all_gather_tokens,
    all_gather_with_gradients,
)
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.ring import (
    KeyPart,
    PartMerger,
    RingCall,
    RingInputs,
    recorded_ring_attention,
    ring_attention,
)
from multimodal_gen.runtime.distributed.timing import attending
from multimodal_gen.runtime.layers.attention.backends.common import attend_to_nothing
from multimodal_gen.runtime.layers.attention.backends.engine import DENSE_BLOCK
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    Shard,
    count_kept,
    kept_first,
    layout_of,
    shard_of,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext

# Rows of a block where everything is attended to, of which calls take the first that holds theirs.
_DENSE_ROWS = (64, 128, DENSE_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Halo:
    """Which keys of other ranks the queries of each rank keep, where the grid alone tells.

    Attributes:
        rows: int64, rows of this rank's tiles that others need, those for the first rank first.
        send_counts: how many of them are for each rank.
        recv_counts: how many rows of each rank this one needs.
        plan: what this rank's queries keep of them; None for nothing.
    """

    rows: torch.Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    plan: BlockPlan | None


class RingTail(NamedTuple):
    """What a rank's queries see of the tiles that they do not keep.

    It joins the softmax together with the rank's own keys, once.

    Attributes:
        pooled: the means of all tiles of the grid.
        kept: bool [B|1, H|1, n, N], which of them each of the rank's tiles keeps.
    """

    pooled: PooledBlocks
    kept: torch.Tensor


class ShardKeys:
    """The keys of a shard as they travel: masked ones behind the others of their block.

    Args:
        shard: the shard.
        mask: bool [B, S], or None.
        is_own: whether it is the shard of the rank that attends.

    Attributes:
        index: the order the keys travel in, int32 [S] or [B, S].
        blocks: what its blocks hold of kept keys.
    """

    def __init__(self, shard: Shard, mask: torch.Tensor | None, *, is_own: bool = False) -> None:
        self.shard, self.mask, self.is_own = shard, mask, is_own
        self.index, self.blocks = shard.keys.index, shard.keys.blocks
        if mask is not None:
            self.index, self.blocks = kept_first(self.index, self.blocks, mask)

    def ordered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shard's keys and values as they travel."""
        if self.mask is not None:
            # Kernels read masked rows with others, and a weight of zero times NaN is NaN.
            key, value = (zero_masked_rows(x, self.mask) for x in (key, value))
        elif self.shard.keys.in_order:
            return key, value
        key, value = gather_tokens((key, value), self.index)
        return key, value

    def kept(self, plan: BlockPlan) -> BlockPlan:
        """Return a plan over the shard's keys without those that are masked."""
        return plan if self.mask is None else replace(plan, kv=self.blocks, shared=False)


PlanOf = Callable[[Shard], BlockPlan | None]
"""Gives the plan of a rank's video queries over the keys of a shard, its text included; None where
they keep none of them."""

AttendPlan = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, BlockPlan], tuple[torch.Tensor, torch.Tensor]
]
"""Computes q, k, v and a plan to the output and its log-sum-exp."""

AttendShard = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, ShardKeys], tuple[torch.Tensor, torch.Tensor]
]
"""Computes a rank's video queries over the keys and values of a shard as they travel."""


def ring_layout(inputs: RingInputs, context: ForwardContext | None, backend: str) -> SequenceLayout:
    """Find the video in a sequence that is split over a ring.

    Args:
        inputs: what this rank holds.
        context: the running denoiser call.
        backend: who asks, for messages.

    Raises:
        UsageError: the latent grid is unknown or does not fit, video tokens are on all ranks, or
            there are other keys than queries.
    """
    call = inputs.call
    total, shared = sum(call.lengths), call.prefix + call.suffix
    keys = 0 if inputs.shared_key is None else inputs.shared_key.shape[1]
    if call.num_queries not in (None, call.lengths[call.group.index]) or keys != shared:
        raise UsageError(
            f"{backend} must have a query for every key in a ring, got other numbers of them; use "
            f"--ring-degree 1, or run such layers on a dense backend"
        )
    layout = layout_of(total + shared, total + shared, context, backend)
    if layout.start < call.prefix or layout.start + layout.num_video > call.prefix + total:
        raise UsageError(
            f"{backend} must have the video among the {total} tokens that ranks share, behind "
            f"{call.prefix} that all hold, got a video that starts at {layout.start} and has "
            f"{layout.num_video} tokens; set text_span to where text is"
        )
    return layout


def own_queries(inputs: RingInputs) -> torch.Tensor:
    """Return the queries of this rank's shard, [B, S, H, D], without those that all ranks hold."""
    call = inputs.call
    return inputs.query[:, call.prefix : call.prefix + call.lengths[call.group.index]]


def shards_of(
    layout: SequenceLayout,
    call: RingCall,
    tile: Window,
    device: torch.device,
    *,
    cells: int = 1,
    one_rest: bool = False,
) -> tuple[Shard | None, ...]:
    """Return what every rank of a ring holds; None for those without tokens.

    Args:
        layout: where the video lies in the sequence.
        call: how its tokens are split.
        tile: tokens per tile along (time, height, width).
        device: where the tensors lie.
        cells: pieces of every tile, which then are the tiles; see `pool_cells`.
        one_rest: whether what is not of the video is one block of each shard.
    """
    stops = [call.prefix + sum(call.lengths[: i + 1]) for i in range(len(call.lengths))]
    return tuple(
        shard_of(layout.grid, layout.start, stop - length, stop, tile, device, cells, one_rest)
        if length
        else None
        for length, stop in zip(call.lengths, stops, strict=True)
    )


def whole_shards(call: RingCall, device: torch.device) -> tuple[Shard | None, ...]:
    """Return what every rank of a ring holds for methods that attend to everything just now."""
    return tuple(text_shard(length, device) if length else None for length in call.lengths)


def text_shard(length: int, device: torch.device, size: int = DENSE_BLOCK) -> Shard:
    """Return tokens without video, which everything attends to, in blocks of `size`."""
    return shard_of((1, 1, 1), length, 0, length, (1, 1, size), device, 1, False)


def shard_lists(indices: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what lists of tiles become where only a shard's keys are at hand.

    Does not wait for the device.

    Args:
        indices: int32 [B|1, H|1, Nq, K], tiles of the grid, increasing along every row.
        shard: the keys.

    Returns:
        indices int32 [B|1, H|1, Nq, K'] into the shard's blocks, its text included, and counts
        int32 [B|1, H|1, Nq], which may be 0.
    """
    block = shard.block_of[indices.long()]
    held = block >= 0
    num_tiles, text = shard.keys.num_tiles, shard.keys.num_text_blocks
    room = min(indices.shape[-1], num_tiles) + text
    # What is not here goes to one slot that is cut off again.
    slot = torch.where(held, held.cumsum(-1) - 1, room)
    lists = block.new_zeros((*block.shape[:-1], room + 1)).scatter_(-1, slot, block)
    counts = held.sum(-1, keepdim=True)
    if text:
        every = torch.arange(text, device=block.device)
        behind = counts + every
        lists.scatter_(-1, behind, (every + num_tiles).int().expand_as(behind))
    return lists[..., :room], (counts.squeeze(-1) + text).int()


def plan_of_lists(lists: torch.Tensor, queries: Blocks, theirs: Shard) -> BlockPlan:
    """Return the plan of a rank's queries over a shard's keys.

    Args:
        lists: int32 [B|1, H|1, n or 1, K], tiles of the grid, increasing along every row.
        queries: the rank's blocks.
        theirs: the keys.
    """
    indices, counts = shard_lists(lists, theirs)
    rows = (*indices.shape[:2], queries.num)
    return BlockPlan(
        indices=indices.expand(*rows, -1),
        counts=counts.expand(rows),
        q=queries,
        kv=theirs.keys.blocks,
    )


def plan_of_rows(kept: torch.Tensor, queries: Blocks, theirs: Shard) -> BlockPlan:
    """Return the plan of a rank's queries over a shard's keys, by a map, bool [B|1, H|1, n, N]."""
    held = F.pad(kept[..., theirs.tiles], (0, theirs.keys.num_text_blocks), value=True)
    return plan_of_map(held, queries, theirs.keys.blocks, theirs.keys.num_tiles)


def ring_plans(mine: Shard | None, select: Callable[[torch.Tensor], torch.Tensor]) -> PlanOf:
    """Return what gives the plans of a shard's queries; for methods that attend themselves.

    Args:
        mine: the queries.
        select: gives what some of the tiles, int64 [n], keep; see `plan_of_lists`.
    """
    if mine is None or mine.queries is None:
        return lambda _: None
    return partial(plan_of_lists, select(mine.tiles), mine.queries)


def pool_over_ring(
    tensors: Sequence[torch.Tensor], shards: Sequence[Shard | None], call: RingCall
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the mean of every tile's tokens, the same numbers on every rank.

    Ranks exchange the means of what they hold, in fp32, and weigh them by how many tokens they are
    of. A tile that one rank holds is not changed by that. Does not wait for the device.

    Args:
        tensors: this rank's tokens, [B, S, H, D], alike but for H. If they carry gradients, all
            ranks must use the means in what they differentiate.
        shards: the tokens of every rank.
        call: how they are split; masked tokens do not count.

    Returns:
        For every tensor [B, H, N, D], fp32 (fp64 for fp64), zero where no token counts; and how
        many tokens of every tile count, [B, N] in the same dtype.

    Raises:
        UsageError: a gradient is asked for, and a rank holds no token of the video.
    """
    recorded = records_gradient(*tensors)
    if recorded and not all(shard is not None and shard.num_video for shard in shards):
        raise UsageError(
            "every rank of a ring must hold tokens of the video where a gradient goes through "
            "means of tiles, got one without; use --ring-degree 1, or fewer ranks"
        )
    (batch, _, _, size), like = tensors[0].shape, tensors[0]
    precise = torch.promote_types(like.dtype, torch.float32)
    held = [
        (shard, _counts(shard, call.mask_of(owner), precise))
        for owner, shard in enumerate(shards)
        if shard is not None and shard.num_video
    ]
    order = next(shard.keys.order for shard, _ in held)
    total = like.new_zeros((batch, len(order.starts)), dtype=precise)
    for shard, counts in held:
        total.index_add_(1, shard.tiles, counts.expand(batch, -1))

    columns = [x.shape[2] * size for x in tensors]
    sizes = [0 if c is None else batch * len(c.tiles) * sum(columns) for c in shards]
    gather = all_gather_with_gradients if recorded else all_gather_tokens
    mine = shards[call.group.index]
    received = gather(_own(tensors, mine, call, precise), sizes, call.group)
    blocks = [block for block in torch.split(received, sizes) if len(block)]
    means = like.new_zeros((len(order.starts), batch, sum(columns)), dtype=precise)
    for (shard, counts), block in zip(held, blocks, strict=True):
        share = counts / total[:, shard.tiles].clamp_min(1)
        parts = block.view(len(shard.tiles), batch, -1) * share.mT.unsqueeze(-1)
        means.index_add_(0, shard.tiles, parts)
    pooled = tuple(
        torch.unflatten(x, -1, (-1, size)).permute(1, 2, 0, 3).contiguous()
        for x in torch.split(means, columns, dim=-1)
    )
    return pooled, total


def _own(
    tensors: Sequence[torch.Tensor], mine: Shard | None, call: RingCall, dtype: torch.dtype
) -> torch.Tensor:
    """Return the means of what this rank holds, as they travel: [n, B, H * D] of all, flat."""
    if mine is None or not mine.num_video:
        return tensors[0].new_empty(0, dtype=dtype)
    mask = call.mask_of(call.group.index)
    means = pool_tiles(tuple(tensors), mine.held, mask=mask, dtype=dtype)
    return torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in means], dim=-1).flatten()


def _counts(shard: Shard, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return how many tokens of a shard's tiles count, [1 or B, n]."""
    return count_kept(mask, shard.held, dtype).to(dtype)


def sum_over_ring(own: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of what every rank has, tensors of one shape; the same on all of them."""
    sizes = [own.numel()] * group.size
    return all_gather_tokens(own.flatten(), sizes, group).view(-1, *own.shape).sum(0)


def attend_ring_tiles(
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    plan_of: PlanOf,
    *,
    scale: float,
    kernel: KernelChoice = AUTO,
    queries: Shard | None = None,
    engine: AttendPlan | None = None,
    halo: Halo | None = None,
    tail: RingTail | None = None,
) -> torch.Tensor:
    """Attend by a plan of tiles; see `attend_ring_shards`.

    Args:
        inputs: what this rank holds.
        shards: the tokens of every rank.
        plan_of: see `PlanOf`.
        scale: factor of the scores.
        kernel: what the block-sparse engine is to run.
        queries: see `attend_ring_shards`.
        engine: what computes the plans, where that is not the block-sparse engine.
        halo: see `attend_ring_shards`.
        tail: what queries of the video see of tiles that they do not keep; None for nothing.
    """
    mine = queries or shards[inputs.call.group.index]
    sparse = engine or partial(_block_sparse, scale=scale, kernel=kernel)

    def by_plan(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, theirs: ShardKeys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = plan_of(theirs.shard)
        if plan is None:
            found = attend_to_nothing(query, value)
        else:
            found = sparse(query, key, value, theirs.kept(plan))
        if tail is None or not theirs.is_own:
            return found
        assert mine is not None, "there are queries"
        assert mine.queries is not None, "they are of the video"
        kept, blocks = tail.kept.expand(-1, -1, mine.queries.num, -1), mine.queries
        return add_tail(*found, query, tail.pooled, kept, blocks, scale=scale, kernel=kernel)

    return attend_ring_shards(
        inputs, shards, by_plan, scale=scale, kernel=kernel, queries=queries, halo=halo
    )


def attend_ring_shards(
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    attend: AttendShard | None,
    *,
    scale: float,
    kernel: KernelChoice = AUTO,
    queries: Shard | None = None,
    halo: Halo | None = None,
) -> torch.Tensor:
    """Attend to the shards of all ranks: into tile order, once round the ring, and back.

    Args:
        inputs: what this rank holds.
        shards: the tokens of every rank, from `shards_of` or `whole_shards`.
        attend: computes this rank's queries of the video; None where no rank has any. Others
            attend to every key.
        scale: factor of the scores.
        kernel: what the block-sparse engine is to run.
        queries: this rank's tokens in the tiles of queries, where those of keys are others.
        halo: which keys ranks send each other instead of passing all of them round, where the
            sequence has no text and no mask and no gradient is asked for; None for the ring.

    Returns:
        [B, prefix + S + suffix, H, D] in the order of the sequence. Queries that see no key are
        zero.
    """
    call, me = inputs.call, inputs.call.group.index
    held: dict[int | None, ShardKeys] = {
        owner: ShardKeys(shard, call.mask_of(owner), is_own=owner == me)
        for owner, shard in enumerate(shards)
        if shard is not None
    }
    mine = queries or shards[me]
    query, key, value = inputs.query, inputs.key, inputs.value
    if me in held:
        key, value = held[me].ordered(key, value)
    order, rows = None, slice(0, 0)
    if mine is not None and mine.num_video:
        rows = slice(call.prefix, call.prefix + mine.num_video)
        order = None if mine.keys.in_order else _query_order(mine, call.prefix, call.suffix)
    if order is not None:
        (query,) = gather_tokens((query,), order)
    shared: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if inputs.shared_key is not None and inputs.shared_value is not None:
        text = text_shard(inputs.shared_key.shape[1], query.device)
        held[None] = ShardKeys(text, call.shared_mask)
        shared = held[None].ordered(inputs.shared_key, inputs.shared_value)
    dense = partial(_block_sparse, scale=scale, kernel=kernel)
    parts = _Parts(attend=attend, dense=dense, held=held, video=rows)
    recorded = records_gradient(query, key, value, *(x for x in shared if x is not None))
    if halo is not None and not recorded:
        out = parts.over_halo(query, key, value, call.group, halo)
    else:
        plain = replace(call, mask=None, shared_mask=None)  # the plans leave masked keys out
        travel = recorded_ring_attention if recorded else ring_attention
        out = travel(query, key, value, *shared, parts.of, plain)
    if order is None:
        return out
    result = torch.empty_like(out)
    scatter_tokens(out, order, result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """Computes the parts of one call.

    Attributes:
        attend: what computes queries of the video.
        dense: what computes attention to everything.
        held: the keys of every rank that has any; of None those that all ranks hold.
        video: rows of this rank's video tokens.
    """

    attend: AttendShard | None
    dense: AttendPlan
    held: Mapping[int | None, ShardKeys]
    video: slice

    def of(self, query: torch.Tensor, part: KeyPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a part; see `AttendPart`."""
        theirs, first, stop = self.held[part.owner], self.video.start, self.video.stop
        if part.owner is None or first == stop:
            return self._to_all(query, part, theirs)
        assert self.attend is not None, "there are queries of the video"
        video = self.attend(query[:, first:stop], part.key, part.value, theirs)
        if stop - first == query.shape[1]:
            return video
        texts = [self._to_all(x, part, theirs) for x in (query[:, :first], query[:, stop:])]
        outs, stats = zip(texts[0], video, texts[1], strict=True)
        return torch.cat(outs, dim=1), torch.cat(stats, dim=2)

    def over_halo(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Group, halo: Halo
    ) -> torch.Tensor:
        """Attend to this rank's keys while those of others are under way, then to all of them."""
        sizes = halo.send_counts, halo.recv_counts
        under_way = ExchangeRowsWork(group, (key, value), halo.rows, *sizes)
        merger, rows = PartMerger(query, value.shape[3]), slice(0, query.shape[1])
        with attending(query.device):
            own = KeyPart(key=key, value=value, owner=group.index)
            merger.add(rows, *self.of(query, own))
        key, value = under_way.wait()
        with attending(query.device):
            if halo.plan is not None:
                merger.add(rows, *self.dense(query, key, value, halo.plan))
            return merger.result()[0]

    def _to_all(
        self, query: torch.Tensor, part: KeyPart, theirs: ShardKeys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not query.shape[1]:
            return attend_to_nothing(query, part.value)
        plan = _plan_of_all(query.shape[1], theirs.shard)
        return self.dense(query, part.key, part.value, theirs.kept(plan))


def _block_sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    kernel: KernelChoice,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = block_sparse_attention(
        query, key, value, plan, scale=scale, return_lse=True, kernel=kernel
    )
    return out, lse


@static_cache(maxsize=128)
def _query_order(mine: Shard, prefix: int, suffix: int) -> torch.Tensor:
    """Return the order of a rank's queries: its tokens in tiles between those that all hold."""
    index = mine.keys.index
    total = prefix + len(index)
    before = torch.arange(prefix, dtype=torch.int32, device=index.device)
    after = torch.arange(total, total + suffix, dtype=torch.int32, device=index.device)
    return torch.cat((before, index + prefix, after))


@static_cache(maxsize=256)
def _plan_of_all(num_queries: int, theirs: Shard) -> BlockPlan:
    size = next((rows for rows in _DENSE_ROWS if num_queries <= rows), _DENSE_ROWS[-1])
    rows, keys = Blocks.regular(num_queries, size), theirs.keys
    return replace(BlockPlan.dense(rows, keys.blocks, keys.index.device), shared=True)
