"""Tiles in a ring: every rank holds a shard of the sequence, which may cut tiles.

Where a shard cuts a tile, it holds a shorter block of it, and what its tokens attend to is the sum
of what they attend to in every shard. A rank brings its tokens into tile order once, before they
travel. Of every shard it is given it then does the blocks that its queries keep. Text attends to
everything and is attended to by all, whether it lies in shards or on all ranks.

Shapes: B batch, S tokens of a shard, H heads, D head size, N tiles of the grid, n tiles that have
tokens in a shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail import PooledBlocks, add_tail
from multimodal_gen.kernels.engine import (
    AUTO,
    BLOCK_SPARSE,
    KernelChoice,
    SelectedKernel,
    records_gradient,
)
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import (
    TileOrder,
    gather_tokens,
    scatter_tokens,
    tile_order,
)
from multimodal_gen.kernels.tile_pool.api import pool_tiles
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
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    TiledSequence,
    kept_first,
    layout_of,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "AttendPlan",
    "AttendShard",
    "Halo",
    "PlanOf",
    "RingTail",
    "Shard",
    "attend_ring_tiles",
    "own_queries",
    "plans_of_lists",
    "pool_over_ring",
    "ring_layout",
    "ring_plans",
    "shard_lists",
    "shards_of",
    "text_shard",
    "whole_shards",
    "whole_tiles_only",
]

_Grid = tuple[int, int, int]

# Rows and keys of a block where everything is attended to: what the engine is fastest with.
_DENSE_BLOCK = 384
_DENSE_ROWS = (64, 128, _DENSE_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The tokens of one rank in tiles; shared between callers, not to be written to.

    Attributes:
        keys: the video tokens tile by tile, then text; its index counts from the first token.
        queries: blocks of the video tokens alone; None where there are none.
        num_video: how many tokens are of the video; the first ones of `keys`.
        tiles: int64 [n], the tiles that have tokens here, in increasing order.
        starts: int32 [n], where their tokens start in `keys`.
        lengths: int32 [n], how many there are.
        block_of: int32 [N], the block that holds tokens of a tile, -1 for none.
        in_order: whether tokens lie in the order of the sequence.
    """

    keys: TiledSequence
    queries: Blocks | None
    num_video: int
    tiles: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    block_of: torch.Tensor
    in_order: bool


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingTail:
    """What a rank's queries see of the tiles that they do not keep.

    It joins the softmax together with the rank's own keys, once.

    Attributes:
        pooled: the means of all tiles of the grid.
        kept: bool [B|1, H|1, n, N], which of them each of the rank's tiles keeps.
        scale: factor of the scores.
    """

    pooled: PooledBlocks
    kept: torch.Tensor
    scale: float


PlanOf = Callable[[Shard], BlockPlan | None]
"""Gives the plan of a rank's video queries over the keys of a shard, its text included; None where
they keep none of them."""

AttendPlan = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, BlockPlan], tuple[torch.Tensor, torch.Tensor]
]
"""Computes q, k, v and a plan to the output and its log-sum-exp."""

AttendShard = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Shard, Blocks], tuple[torch.Tensor, torch.Tensor]
]
"""Computes a rank's video queries, which choose for themselves, over the keys and values of a shard
as they travel, with what its blocks hold of kept keys, to the output and its log-sum-exp."""


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
    tile: _Grid,
    device: torch.device,
    *,
    cells: int = 1,
) -> tuple[Shard | None, ...]:
    """Return what every rank of a ring holds; None for those without tokens.

    Args:
        layout: where the video lies in the sequence.
        call: how its tokens are split.
        tile: tokens per tile along (time, height, width).
        device: where the tensors lie.
        cells: pieces of every tile, which then are the tiles; see `pool_cells`.
    """
    stops = [call.prefix + sum(call.lengths[: i + 1]) for i in range(len(call.lengths))]
    return tuple(
        _shard(layout.grid, layout.start, stop - length, stop, tile, device, cells)
        if length
        else None
        for length, stop in zip(call.lengths, stops, strict=True)
    )


def whole_shards(call: RingCall, device: torch.device) -> tuple[Shard | None, ...]:
    """Return what every rank of a ring holds for methods that attend to everything just now."""
    return tuple(text_shard(length, device) if length else None for length in call.lengths)


def text_shard(length: int, device: torch.device, size: int = _DENSE_BLOCK) -> Shard:
    """Return tokens without video, which everything attends to, in blocks of `size`."""
    return _shard((1, 1, 1), length, 0, length, (1, 1, size), device)


@static_cache(maxsize=256)
def _shard(
    grid: _Grid,
    video_start: int,
    first: int,
    stop: int,
    tile: _Grid,
    device: torch.device,
    cells: int = 1,
) -> Shard:
    """Return the tokens [first, stop) of a sequence whose video starts at `video_start`."""
    order = _in_cells(tile_order(grid, tile, "cpu"), cells)
    # Made on the CPU: a copy is waited for, so that any stream may read what is cached.
    with torch.inference_mode(False), torch.device("cpu"):
        here = order.order + (video_start - first)  # counted from the shard's first token
        inside = (here >= 0) & (here < stop - first)
        video = here[inside]
        tile_of = torch.repeat_interleave(torch.arange(len(order.starts)), order.lengths)
        counts = torch.bincount(tile_of[inside], minlength=len(order.starts))
        tiles = counts.nonzero().flatten()
        block_of = torch.full_like(counts, -1).index_copy_(0, tiles, torch.arange(len(tiles)))
        is_text = torch.ones(stop - first, dtype=torch.bool).index_fill_(0, video.long(), False)
        index = torch.cat((video, is_text.nonzero().flatten()))
        lengths = counts[tiles]
        starts = lengths.cumsum(0) - lengths
        pieces = torch.arange(len(video), stop - first, order.largest)
        rest = (stop - first - pieces).clamp_max(order.largest)
        bounds = [torch.cat(pair) for pair in ((starts, pieces), (lengths, rest))]
        moved = [x.to(device, torch.int32) for x in (index, *bounds, block_of)]
        in_order = bool((index == torch.arange(len(index))).all())
        present = tiles.to(device)
    uniform = bool((lengths == order.largest).all())
    keys = TiledSequence(
        order=_in_cells(tile_order(grid, tile, device), cells),
        index=moved[0],
        blocks=_blocks(moved[1], moved[2], stop - first, order.largest, uniform=uniform),
        num_tiles=len(tiles),
        in_order=in_order,
    )
    starts, lengths = (bound[: len(tiles)] for bound in moved[1:3])
    queries = None
    if len(video):
        queries = _blocks(starts, lengths, len(video), order.largest, uniform=uniform)
    return Shard(
        keys=keys,
        queries=queries,
        num_video=len(video),
        tiles=present,
        starts=starts,
        lengths=lengths,
        block_of=moved[3],
        in_order=in_order,
    )


def _in_cells(order: TileOrder, cells: int) -> TileOrder:
    """Return the same order in pieces of tiles, of which some may be empty."""
    if cells == 1:
        return order
    width = -(-order.largest // cells)
    offsets = torch.arange(cells, dtype=torch.int32, device=order.starts.device) * width
    return replace(
        order,
        starts=(order.starts[:, None] + offsets).flatten(),
        lengths=(order.lengths[:, None] - offsets).clamp(0, width).flatten(),
        largest=width,
        uniform=False,
    )


def _blocks(
    starts: torch.Tensor, lengths: torch.Tensor, total: int, size: int, *, uniform: bool
) -> Blocks:
    """Return blocks without gaps, of which all but the last are of one size where `uniform`."""
    if uniform:
        return Blocks.regular(total, size)
    return Blocks.ragged(starts, lengths, total=total, size=size)


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


def ring_plans(mine: Shard | None, select: Callable[[torch.Tensor], torch.Tensor]) -> PlanOf:
    """Return what gives the plans of a shard's queries.

    Tiles are selected once, among those of the grid; a plan has those of them that its keys hold.

    Args:
        mine: the queries.
        select: gives what some of the tiles, int64 [n], keep: int32 [B|1, H|1, n or 1, K], tiles of
            the grid, increasing along every row.
    """
    if mine is None or mine.queries is None:
        return lambda _: None
    return plans_of_lists(mine, select(mine.tiles))


def plans_of_lists(mine: Shard | None, selected: torch.Tensor | None) -> PlanOf:
    """Return what gives the plans of a shard's queries; see `ring_plans`.

    Args:
        mine: the queries.
        selected: int32 [B|1, H|1, n or 1, K], tiles of the grid, increasing along every row; None
            where there are no queries of the video.
    """
    if mine is None or mine.queries is None or selected is None:
        return lambda _: None
    lists, blocks = selected, mine.queries

    def plan_of(theirs: Shard) -> BlockPlan:
        indices, counts = shard_lists(lists, theirs)
        rows = (*indices.shape[:2], blocks.num)
        return BlockPlan(
            indices=indices.expand(*rows, -1),
            counts=counts.expand(rows),
            q=blocks,
            kv=theirs.keys.blocks,
        )

    return plan_of


def whole_tiles_only(kernel: SelectedKernel) -> str | None:
    """Return why a kernel that a user named cannot serve shards, or None."""
    if not kernel.named or kernel.name not in BLOCK_SPARSE.names:
        return None
    if "ragged" in BLOCK_SPARSE.kernel(kernel.name).serves:
        return None
    return f"kernel {kernel.name} takes whole tiles only, and shards cut them"


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
        (shard, _counts(shard, call.keep_of(owner), precise))
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
    received = gather(_own(tensors, shards, call, precise), sizes, call.group)
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
    tensors: Sequence[torch.Tensor],
    shards: Sequence[Shard | None],
    call: RingCall,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the means of what this rank holds, as they travel: [n, B, H * D] of all, flat."""
    mine = shards[call.group.index]
    if mine is None or not mine.num_video:
        return tensors[0].new_empty(0, dtype=dtype)
    means = pool_tiles(
        tuple(tensors),
        mine.starts,
        mine.lengths,
        size=mine.keys.order.largest,
        index=mine.keys.index,
        keep=call.keep_of(call.group.index),
        dtype=dtype,
    )
    return torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in means], dim=-1).flatten()


def _counts(shard: Shard, keep: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return how many tokens of a shard's tiles count, [1 or B, n]."""
    if keep is None:
        return shard.lengths.to(dtype).unsqueeze(0)
    (share,) = pool_tiles(
        (keep[..., None, None].to(dtype),),
        shard.starts,
        shard.lengths,
        size=shard.keys.order.largest,
        index=shard.keys.index,
    )
    return (share[:, 0, :, 0] * shard.lengths).round()


def attend_ring_tiles(
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    plan_of: PlanOf,
    *,
    scale: float,
    kernel: KernelChoice = AUTO,
    queries: Shard | None = None,
    attend: AttendPlan | None = None,
    by_rows: AttendShard | None = None,
    halo: Halo | None = None,
    tail: RingTail | None = None,
) -> torch.Tensor:
    """Attend by a plan of tiles: into tile order, once round the ring, and back.

    Args:
        inputs: what this rank holds.
        shards: the tokens of every rank, from `shards_of` or `whole_shards`.
        plan_of: see `PlanOf`. Queries that are not of the video attend to every key.
        scale: factor of the scores.
        kernel: what the block-sparse engine is to run.
        queries: this rank's tokens in the tiles of queries, where those of keys are others.
        attend: what computes the plans, where that is not the block-sparse engine.
        by_rows: what computes queries of the video instead, where they have no plans.
        halo: which keys ranks send each other instead of passing all of them round, where the
            sequence has no text and no mask and no gradient is asked for; None for the ring.
        tail: what queries of the video see of tiles that they do not keep; None for nothing.

    Returns:
        [B, prefix + S + suffix, H, D] in the order of the sequence. Queries that see no key are
        zero.
    """
    call = inputs.call
    held = {
        owner: _shard_keys(shard, call.keep_of(owner))
        for owner, shard in enumerate(shards)
        if shard is not None
    }
    here, mine = held.get(call.group.index), queries or shards[call.group.index]
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
    parts = _Parts(
        plan_of=plan_of,
        sparse=attend or dense,
        dense=dense,
        held=held,
        queries=rows,
        me=call.group.index,
        blocks=None if mine is None else mine.queries,
        tail=tail,
        kernel=kernel,
        by_rows=by_rows,
    )
    shared: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if inputs.shared_key is not None and inputs.shared_value is not None:
        text = _shard_keys(text_shard(inputs.shared_key.shape[1], query.device), call.shared_keep)
        parts.shared = text
        shared = text.ordered(inputs.shared_key, inputs.shared_value)
    recorded = records_gradient(query, key, value, *(x for x in shared if x is not None))
    if halo is not None and not recorded:
        out = _attend_halo(query, key, value, call.group, parts, halo)
    else:
        plain = replace(call, keep=None, shared_keep=None)  # the plans leave masked keys out
        travel = recorded_ring_attention if recorded else ring_attention
        out = travel(query, key, value, *shared, parts.attend, plain)
    if order is None:
        return out
    result = torch.empty_like(out)
    scatter_tokens(out, order, result)
    return result


def _attend_halo(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group,
    parts: "_Parts",
    halo: Halo,
) -> torch.Tensor:
    """Attend to this rank's keys while those of others are under way, then to all of them."""
    under_way = ExchangeRowsWork(group, (key, value), halo.rows, halo.send_counts, halo.recv_counts)
    merger, rows = PartMerger(query, value.shape[3]), slice(0, query.shape[1])
    with attending(query.device):
        own = KeyPart(key=key, value=value, owner=group.index)
        merger.add(rows, *parts.attend(query, own))
    key, value = under_way.wait()
    with attending(query.device):
        if halo.plan is not None:
            merger.add(rows, *parts.sparse(query, key, value, halo.plan))
        return merger.result()[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ShardKeys:
    """The keys of a shard as they travel: masked ones behind the others of their block.

    Attributes:
        shard: the shard.
        blocks: what its blocks hold of kept keys.
        index: the order the keys travel in, int32 [S] or [B, S].
        keep: bool [B, S], or None.
    """

    shard: Shard
    blocks: Blocks
    index: torch.Tensor
    keep: torch.Tensor | None

    def ordered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shard's keys and values as they travel."""
        if self.keep is not None:
            # Kernels read masked rows beside others, and a weight of zero times NaN is NaN.
            key, value = (zero_masked_rows(x, self.keep) for x in (key, value))
        elif self.shard.in_order:
            return key, value
        key, value = gather_tokens((key, value), self.index)
        return key, value

    def kept(self, plan: BlockPlan) -> BlockPlan:
        """Return a plan over the shard's keys without those that are masked."""
        return plan if self.keep is None else replace(plan, kv=self.blocks)


def _shard_keys(shard: Shard, keep: torch.Tensor | None) -> _ShardKeys:
    if keep is None:
        return _ShardKeys(shard=shard, blocks=shard.keys.blocks, index=shard.keys.index, keep=None)
    index, blocks = kept_first(shard.keys.index, shard.keys.blocks, keep)
    return _ShardKeys(shard=shard, blocks=blocks, index=index, keep=keep)


@dataclass(slots=True, kw_only=True, eq=False)
class _Parts:
    """Computes the parts of one call.

    Attributes:
        plan_of: see `attend_ring_tiles`.
        sparse: what computes the plans.
        dense: what computes attention to everything.
        held: the keys of every rank that has any.
        queries: rows of this rank's video tokens.
        me: this rank.
        blocks: how its video tokens are cut, if there are any.
        tail: what they see of tiles that they do not keep.
        kernel: what the tail is to run.
        by_rows: see `attend_ring_tiles`.
        shared: the keys that all ranks hold.
    """

    plan_of: PlanOf
    sparse: AttendPlan
    dense: AttendPlan
    held: dict[int, _ShardKeys]
    queries: slice
    me: int
    blocks: Blocks | None
    tail: RingTail | None
    kernel: KernelChoice
    by_rows: AttendShard | None = None
    shared: _ShardKeys | None = None

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
        self, query: torch.Tensor, part: KeyPart, theirs: _ShardKeys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.by_rows is not None:
            return self.by_rows(query, part.key, part.value, theirs.shard, theirs.blocks)
        plan, tail = self.plan_of(theirs.shard), self.tail
        if plan is None:
            found = attend_to_nothing(query, part.value)
        else:
            found = self.sparse(query, part.key, part.value, theirs.kept(plan))
        if tail is None or part.owner != self.me:
            return found
        assert self.blocks is not None, "there are queries"
        return add_tail(
            *found,
            query,
            tail.pooled,
            tail.kept.expand(-1, -1, self.blocks.num, -1),
            self.blocks,
            scale=tail.scale,
            kernel=self.kernel,
        )

    def _to_all(
        self, query: torch.Tensor, part: KeyPart, theirs: _ShardKeys
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
    with torch.inference_mode(False):
        before = torch.arange(prefix, dtype=torch.int32, device=index.device)
        after = torch.arange(total, total + suffix, dtype=torch.int32, device=index.device)
        return torch.cat((before, index + prefix, after))


@static_cache(maxsize=256)
def _plan_of_all(num_queries: int, theirs: Shard) -> BlockPlan:
    size = next((rows for rows in _DENSE_ROWS if num_queries <= rows), _DENSE_ROWS[-1])
    with torch.inference_mode(False):
        return BlockPlan.dense(
            Blocks.regular(num_queries, size), theirs.keys.blocks, theirs.keys.index.device
        )
