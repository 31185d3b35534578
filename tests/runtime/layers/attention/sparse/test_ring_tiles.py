"""What a rank of a ring holds of the tiles of a video."""

import itertools

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.ring import RingCall, RingInputs
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import window_patterns
from multimodal_gen.runtime.layers.attention.sparse.pattern import shard_plan
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    ring_layout,
    shard_lists,
    shards_of,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout
from multimodal_gen.runtime.layers.attention.sparse.windows import kept_map
from multimodal_gen.runtime.managers.forward_context import ForwardContext, TextSpan

GRID, TILE, CPU = (3, 5, 7), (2, 2, 3), torch.device("cpu")
VIDEO = 3 * 5 * 7
LENGTHS = [(53, 52), (105, 0), (20, 1, 60, 24)]


def ring(lengths, prefix=0, suffix=0, index=0):
    group = Group(ranks=tuple(range(len(lengths))), index=index, handle=None)
    return RingCall(group=group, lengths=lengths, scale=1.0, prefix=prefix, suffix=suffix)


def layout(start=0, total=VIDEO, grid=GRID):
    return SequenceLayout(grid=grid, start=start, num_queries=total, num_keys=total)


def tokens_of(shard, first):
    """Return the tokens of the sequence in each block."""
    starts, lengths = (bound[0, 0].tolist() for bound in shard.keys.blocks.bounds(CPU))
    index = shard.keys.index + first
    return [index[s : s + n].tolist() for s, n in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("text", [(0, 0), (4, 0), (0, 15)])
def test_every_token_is_in_the_block_of_its_tile_or_in_text(lengths, text):
    """Text here is in shards, as where a model splits it with the video."""
    lengths = (lengths[0] + text[0], *lengths[1:-1], lengths[-1] + text[1])
    shards = shards_of(layout(text[0], VIDEO + sum(text)), ring(lengths), TILE, CPU)
    order = tile_order(GRID, TILE)
    tile_of = torch.repeat_interleave(torch.arange(len(order.starts)), order.lengths)[order.inverse]
    seen = []
    for shard, stop in zip(shards, itertools.accumulate(lengths), strict=True):
        if shard is None:
            continue
        blocks = tokens_of(shard, stop - shard.keys.blocks.total)
        for tile, tokens in zip(shard.tiles.tolist(), blocks, strict=False):
            assert {int(tile_of[t - text[0]]) for t in tokens} == {tile}
            assert shard.block_of[tile] == shard.tiles.tolist().index(tile)
        rest = [t for tokens in blocks[shard.keys.num_tiles :] for t in tokens]
        assert all(t < text[0] or t >= text[0] + VIDEO for t in rest)
        assert (shard.block_of >= 0).sum() == len(shard.tiles) == shard.keys.num_tiles
        seen += [t for tokens in blocks for t in tokens]
    assert sorted(seen) == list(range(VIDEO + sum(text)))


def test_whole_tiles_are_regular_blocks():
    first, second = shards_of(layout(grid=(4, 4, 3), total=48), ring((24, 24)), TILE, CPU)
    assert first.keys.blocks.is_regular
    assert second.queries.is_regular
    cut, _ = shards_of(layout(grid=(4, 4, 3), total=48), ring((23, 25)), TILE, CPU)
    assert not cut.keys.blocks.is_regular


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_plans_of_all_chunks_together_keep_what_one_plan_does(lengths):
    shards = shards_of(layout(total=VIDEO + 4), ring((*lengths[:-1], lengths[-1] + 4)), TILE, CPU)
    windows, stops = ((1, 1, 1), (1, 3, 1)), list(itertools.accumulate(lengths))
    order = tile_order(GRID, TILE)
    of_tiles = torch.stack([kept_map(window, order.tiles) for window in windows])
    kept = torch.zeros(2, VIDEO, VIDEO + 4, dtype=torch.bool)
    for (i, mine), (j, theirs) in itertools.product(enumerate(shards), repeat=2):
        if mine is None or theirs is None or mine.queries is None:
            continue
        plan = shard_plan(window_patterns(windows, order.tiles), mine, theirs)
        if plan is None:
            continue
        plan.check()
        first, other = (stops[n] - lengths[n] for n in (i, j))
        rows, keys = tokens_of(mine, first), tokens_of(theirs, other)
        for head, row in itertools.product(range(2), range(mine.keys.num_tiles)):
            for column in plan.indices[0, head, row, : plan.counts[0, head, row]].tolist():
                kept[head, torch.tensor(rows[row])[:, None], torch.tensor(keys[column])] = True
    tile_of = torch.repeat_interleave(torch.arange(len(order.starts)), order.lengths)[order.inverse]
    assert torch.equal(kept[..., :VIDEO], of_tiles[:, tile_of][:, :, tile_of])
    assert kept[..., VIDEO:].all()


def test_chunks_without_a_kept_tile_have_no_plan():
    near, far = shards_of(layout(), ring((35, 70)), (1, 5, 7), CPU)
    patterns = window_patterns(((1, 1, 1),), near.keys.order.tiles)
    assert shard_plan(patterns, near, far) is None
    assert shard_plan(patterns, near, near).counts.tolist() == [[[1]]]


def test_lists_keep_the_tiles_that_are_at_hand_in_order():
    _, shard = shards_of(layout(total=VIDEO + 2), ring((40, 67)), TILE, CPU)
    lists = torch.tensor([[[[0, 5, 9, 17], [1, 2, 3, 4]]]], dtype=torch.int32)
    indices, counts = shard_lists(lists, shard)
    for row, count, tiles in zip(indices[0, 0], counts[0, 0], lists[0, 0], strict=True):
        wanted = [shard.block_of[t] for t in tiles.tolist() if t in shard.tiles]
        assert row[:count].tolist() == [*wanted, shard.keys.num_tiles]
    plan = BlockPlan(
        indices=indices,
        counts=counts,
        q=shard.keys.blocks.regular(2, 1),
        kv=shard.keys.blocks,
    )
    plan.check()


def inputs(call, shared):
    rows = call.prefix + call.lengths[0] + call.suffix
    tokens, text = torch.zeros(1, call.lengths[0], 1, 32), torch.zeros(1, shared, 1, 32)
    return RingInputs(
        call=call,
        query=torch.zeros(1, rows, 1, 32),
        key=tokens,
        value=tokens,
        shared_key=text if shared else None,
        shared_value=text if shared else None,
    )


def test_a_video_that_all_ranks_hold_a_part_of_is_refused():
    context = ForwardContext(current_timestep=0, latent_grid=GRID)
    with pytest.raises(UsageError, match="must have the video among the 105 tokens that ranks sha"):
        ring_layout(inputs(ring((53, 52), prefix=4), 4), context, "a method")
    text = TextSpan(start=0, length=4)
    context = ForwardContext(current_timestep=0, latent_grid=GRID, text_span=text)
    assert ring_layout(inputs(ring((53, 52), prefix=4), 4), context, "a method").start == 4


def test_keys_without_queries_are_refused():
    context = ForwardContext(current_timestep=0, latent_grid=GRID)
    with pytest.raises(UsageError, match="must have a query for every key in a ring, got other"):
        ring_layout(inputs(ring((53, 52)), 4), context, "a method")
