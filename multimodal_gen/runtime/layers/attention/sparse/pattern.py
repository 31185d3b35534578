"""Patterns: which blocks each block keeps, known before a call, and what plans become of them.

Ranks of a ring know every other rank's part of a pattern without a word, so what a rank needs of
all others, its halo, comes in one exchange, during attention to its own keys.

Shapes: N blocks of the video, K blocks that a row keeps at most, n blocks of a shard, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import Halo, shard_lists
from multimodal_gen.runtime.layers.attention.sparse.tiles import Shard, blocks_without_gaps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """Which blocks each block of a video keeps. Equal ones should be one object: plans go by it.

    Attributes:
        indices: int32 [N, K] on the CPU, increasing along every row; N past a row's count.
        counts: int32 [N] on the CPU.
    """

    indices: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of_lists(cls, indices: torch.Tensor) -> "Pattern":
        """Return the pattern of lists of one length."""
        return cls(indices=indices, counts=torch.full((len(indices),), indices.shape[1]).int())

    @classmethod
    def of_map(cls, kept: torch.Tensor) -> "Pattern":
        """Return the pattern of a map, bool [N, N]."""
        counts = kept.sum(1, dtype=torch.int32)
        # Kept blocks first, in order.
        order = torch.argsort(kept.logical_not().int(), dim=1, stable=True)
        listed = order[:, : max(int(counts.max()), 1)].int()
        past = torch.arange(listed.shape[1]) >= counts[:, None]
        return cls(indices=listed.masked_fill_(past, len(kept)), counts=counts)

    def as_map(self) -> torch.Tensor:
        """Return the pattern as bool [N, N] on the CPU."""
        num = len(self.counts)
        kept = torch.zeros(num, num + 1, dtype=torch.bool)
        return kept.scatter_(1, self.indices.long(), True)[:, :num]


Patterns = tuple[Pattern, ...]
"""One for every head of a call, or a single one for all of them."""


@lru_cache(maxsize=256)
def share_of(pattern: Pattern, order: TileOrder) -> float:
    """Return the share of the video's pairs that a pattern keeps; cached."""
    lengths = order.lengths.double().cpu()
    kept = F.pad(lengths, (0, 1))[pattern.indices.long()].sum(1)
    return float(lengths @ kept) / float(lengths.sum()) ** 2


def mean_share(patterns: Patterns, order: TileOrder) -> float:
    """Return the share of the video's pairs that heads keep on average."""
    return sum(share_of(pattern, order) for pattern in patterns) / len(patterns)


class _ShardLists:
    """Which blocks of a shard's keys every block of another's queries keeps; on the CPU.

    Args:
        indices: int32 [1, 1, n, K]; room that no row needs is cut off.
        counts: int32 [1, 1, n].

    Attributes:
        least: the least of the counts.
        most: the largest of them.
    """

    def __init__(self, indices: torch.Tensor, counts: torch.Tensor) -> None:
        self.least, self.most = (int(bound) for bound in counts.aminmax())
        self.indices, self.counts = indices[..., : max(self.most, 1)], counts


# A plan is made of lists that few patterns share, so that heads may be combined in any way.
@static_cache(maxsize=128)
def shard_plan(patterns: Patterns, mine: Shard, theirs: Shard) -> BlockPlan | None:
    """Return what the queries of one shard keep of the keys of another, all text behind the lists.

    Args:
        patterns: of the heads.
        mine: the queries; there is a video token among them. In one process, all of the video.
        theirs: the keys; the same.

    Returns:
        The plan, or None where no query keeps a key; cached. Making a new one waits for the device.
    """
    distinct = {pattern: _lists_of(pattern, mine, theirs) for pattern in patterns}
    return _plan_of([distinct[pattern] for pattern in patterns], mine, theirs.keys.blocks)


def _plan_of(heads: Sequence[_ShardLists], mine: Shard, keys: Blocks) -> BlockPlan | None:
    """Return the plan of lists for every head, or None where no query keeps a key.

    Args:
        heads: the lists of each head, of which some may be the same.
        mine: the queries; there is a video token among them.
        keys: the blocks that the lists count.
    """
    heads = heads if len(set(heads)) > 1 else heads[:1]
    room = max(held.indices.shape[3] for held in heads)
    most = max(held.most for held in heads)
    if not most:
        return None
    assert mine.queries is not None, "callers know"
    padded = [F.pad(held.indices, (0, room - held.indices.shape[3])) for held in heads]
    plan = BlockPlan(
        indices=torch.cat(padded, dim=1).to(mine.tiles.device),
        counts=torch.cat([held.counts for held in heads], dim=1).to(mine.tiles.device),
        q=mine.queries,
        kv=keys,
        uniform=all(held.least == most for held in heads),
        shared=True,
    )
    return plan.longest_first()


@lru_cache(maxsize=128)
def shard_map(patterns: Patterns, mine: Shard) -> torch.Tensor:
    """Return which blocks of the video the queries of a shard keep: bool [1, H|1, n, N]; cached."""
    with torch.inference_mode(False):
        rows, heads = mine.tiles.cpu(), patterns if len(set(patterns)) > 1 else patterns[:1]
        maps = torch.stack([pattern.as_map()[rows] for pattern in heads])
        return maps.unsqueeze(0).to(mine.tiles.device)


@lru_cache(maxsize=1024)
def _lists_of(pattern: Pattern, mine: Shard, theirs: Shard) -> _ShardLists:
    """Return which blocks of one shard's keys the queries of another keep."""
    with torch.inference_mode(False), torch.device("cpu"):
        held = replace(theirs, block_of=F.pad(theirs.block_of.cpu(), (0, 1), value=-1))
        return _ShardLists(*shard_lists(pattern.indices[mine.tiles.cpu()][None, None], held))


@static_cache(maxsize=64)
def halo_of(patterns: Patterns, shards: tuple[Shard | None, ...], me: int) -> Halo | None:
    """Return what ranks send each other, the same decision on all of them.

    Args:
        patterns: of the heads.
        shards: the tokens of every rank.
        me: this rank.

    Returns:
        None where a ring serves as well or better: a rank has no tokens, there is text, which
        everything attends to, or all ranks need everything. The last 64 are cached; making a new
        one waits for the device.
    """
    held = [shard for shard in shards if shard is not None and not shard.keys.num_text_blocks]
    if len(held) < len(shards):
        return None
    with torch.device("cpu"):
        kept = torch.stack([pattern.as_map() for pattern in dict.fromkeys(patterns)]).any(0)
        wanted = [kept[shard.tiles.cpu()].any(0) for shard in held]
        lengths = [shard.lengths.cpu() for shard in held]
        # Blocks of each rank (column) that each rank (row) needs, and the tokens in them.
        needs = [
            [want[shard.tiles.cpu()] & (i != j) for j, shard in enumerate(held)]
            for i, want in enumerate(wanted)
        ]
        counts = [
            [int(length[need].sum()) for need, length in zip(row, lengths, strict=True)]
            for row in needs
        ]
        whole = sum(int(length.sum()) for length in lengths)
        if sum(map(sum, counts)) == (len(held) - 1) * whole:
            return None
        leave = [torch.repeat_interleave(row[me], lengths[me]).nonzero().flatten() for row in needs]
        rows = torch.cat(leave).to(held[me].tiles.device)
    return Halo(
        rows=rows,
        send_counts=tuple(row[me] for row in counts),
        recv_counts=tuple(counts[me]),
        plan=_halo_plan(patterns, held, me, needs[me]),
    )


def _halo_plan(
    patterns: Patterns, shards: list[Shard], me: int, needs: list[torch.Tensor]
) -> BlockPlan | None:
    """Return what this rank's queries keep of the blocks that come in, rank by rank."""
    mine = shards[me]
    device = mine.tiles.device
    lengths = torch.cat(
        [shard.lengths[need.to(device)] for shard, need in zip(shards, needs, strict=True)]
    )
    if not len(lengths):
        return None
    rows = mine.tiles.cpu()
    pairs = zip(shards, needs, strict=True)
    tiles = torch.cat([shard.tiles.cpu()[need] for shard, need in pairs])
    distinct = dict.fromkeys(patterns)
    lists = {pattern: _listed(pattern.as_map()[rows][:, tiles]) for pattern in distinct}
    starts, size = (lengths.cumsum(0) - lengths).int(), mine.keys.order.largest
    uniform = bool((lengths == size).all())
    keys = blocks_without_gaps(starts, lengths, int(lengths.sum()), size, uniform=uniform)
    return _plan_of([lists[pattern] for pattern in patterns], mine, keys)


def _listed(kept: torch.Tensor) -> _ShardLists:
    """Return what a map of blocks, bool [n, M], keeps."""
    # Kept blocks first, in order; what is past a count is a block, too.
    order = torch.argsort(kept.logical_not().int(), dim=1, stable=True).int()
    return _ShardLists(order[None, None], kept.sum(1, dtype=torch.int32)[None, None])
