"""What a rank of a ring holds of the tiles of a video."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.ring import RingCall, RingInputs
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import window_patterns
from multimodal_gen.runtime.layers.attention.sparse.pattern import shard_plan
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    ring_layout,
    shards_of,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout
from multimodal_gen.runtime.managers.forward_context import ForwardContext, TextSpan

GRID, TILE, CPU = (3, 5, 7), (2, 2, 3), torch.device("cpu")
VIDEO = 3 * 5 * 7


def ring(lengths, prefix=0, suffix=0, index=0):
    group = Group(ranks=tuple(range(len(lengths))), index=index, handle=None)
    return RingCall(group=group, lengths=lengths, scale=1.0, prefix=prefix, suffix=suffix)


def layout(start=0, total=VIDEO, grid=GRID):
    return SequenceLayout(grid=grid, start=start, num_queries=total, num_keys=total)


def test_whole_tiles_are_regular_blocks():
    first, second = shards_of(layout(grid=(4, 4, 3), total=48), ring((24, 24)), TILE, CPU)
    assert first.keys.blocks.is_regular
    assert second.queries.is_regular
    cut, _ = shards_of(layout(grid=(4, 4, 3), total=48), ring((23, 25)), TILE, CPU)
    assert not cut.keys.blocks.is_regular


def test_chunks_without_a_kept_tile_have_no_plan():
    near, far = shards_of(layout(), ring((35, 70)), (1, 5, 7), CPU)
    patterns = window_patterns(((1, 1, 1),), near.keys.order.tiles)
    assert shard_plan(patterns, near, far) is None
    assert shard_plan(patterns, near, near).counts.tolist() == [[[1]]]


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
