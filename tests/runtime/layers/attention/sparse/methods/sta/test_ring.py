"""What ranks send each other by the geometry of windows, and that it is what a ring computes."""

import pytest
import torch

from multimodal_gen.runtime.distributed.groups import Group
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.distributed.ring import RingCall
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.layers.attention.sparse.executors import ring as executor
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import window_patterns
from multimodal_gen.runtime.layers.attention.sparse.pattern import halo_of, shard_plan
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import shards_of
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    effective_window,
    tiles_of,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.server_args import ServerArgs
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import own
from tests.helpers.sparse import kept_map

GRID, TILE = (10, 3, 5), (2, 2, 2)
LENGTHS = (43, 20, 51, 36)
WINDOWS = ((1, 2, 1), (3, 1, 1))
TILES = tiles_of(GRID, TILE)


def shards(lengths=LENGTHS, text=0):
    total = sum(lengths)
    layout = SequenceLayout(grid=GRID, start=0, num_queries=total, num_keys=total)
    group = Group(ranks=tuple(range(len(lengths))), index=0, handle=None)
    call = RingCall(group=group, lengths=lengths, scale=1.0)
    assert total == layout.num_video + text
    return shards_of(layout, call, TILE, torch.device("cpu"))


def needed(windows, me):
    """Return how many tokens of each rank the queries of one keep, token by token."""
    tiles = tiles_of(GRID, TILE)
    places = torch.cartesian_prod(*(torch.arange(size) for size in GRID)) // torch.tensor(TILE)
    tile = (places[:, 0] * tiles[1] + places[:, 1]) * tiles[2] + places[:, 2]
    keeps = torch.stack([kept_map(effective_window(w, tiles), tiles) for w in windows]).any(0)
    parts = torch.split(tile, LENGTHS)
    return tuple(
        0 if rank == me else int(keeps[parts[me]][:, part].any(0).sum())
        for rank, part in enumerate(parts)
    )


def test_ranks_send_each_other_the_tokens_that_windows_keep_and_no_others():
    held = shards()
    halos = [halo_of(window_patterns(WINDOWS, TILES), held, me) for me in range(4)]
    for me, halo in enumerate(halos):
        assert halo.recv_counts == needed(WINDOWS, me)
        assert halo.send_counts == tuple(other.recv_counts[me] for other in halos)
        assert len(halo.rows) == sum(halo.send_counts)
    assert 0 < sum(len(halo.rows) for halo in halos) < 3 * sum(LENGTHS)


@pytest.mark.parametrize("windows", [WINDOWS, ((1, 1, 1),) * 2, ((3, 2, 1), (3, 2, 3))], ids=str)
def test_a_rank_attends_to_the_same_pairs_as_in_a_ring(windows):
    held, patterns = shards(), window_patterns(windows, TILES)
    for me, mine in enumerate(held):
        plans = [shard_plan(patterns, mine, held[i]) for i in range(4) if i != me]
        pairs = sum(plan.pairs() for plan in plans if plan is not None)
        halo = halo_of(patterns, held, me)
        pairs_of_halo = 0 if halo.plan is None else halo.plan.check().pairs()
        assert torch.equal(torch.as_tensor(pairs_of_halo), torch.as_tensor(pairs))


@pytest.mark.parametrize(
    ("windows", "held"),
    [
        (((5, 1, 1),), shards()),
        (WINDOWS, shards((63, 0, 51, 36))),
        (WINDOWS, shards((43, 20, 51, 43), text=7)),
    ],
    ids=["everything is needed", "a rank has no tokens", "there is text"],
)
def test_keys_go_round_where_nothing_is_saved(windows, held):
    assert [halo_of(window_patterns(windows, TILES), held, me) for me in range(4)] == [None] * 4


def by_both_ways(config, batch):
    """Compare what an exchange gives with what a ring does; return which of two was which."""
    args = ServerArgs(
        model_path="none",
        attention_backend="sliding_tile_attn",
        attention_backend_config=config,
    )
    layer = USPAttention(4, 32, prefix="blocks.1.attn", scope=scope_from_args(args))
    local = [own(x, LENGTHS) for x in make_qkv(batch, sum(LENGTHS), 4, 32)]
    outs, found = [], []
    original = executor.halo_of
    for way in (original, lambda *given: None):
        executor.halo_of = lambda *given, way=way: found.append(way(*given)) or found[-1]
        try:
            with torch.no_grad(), set_forward_context(1, latent_grid=GRID, num_steps=2):
                outs.append(layer(*local))
        finally:
            executor.halo_of = original
    assert layer.report().times.communication_ms > 0
    torch.testing.assert_close(*outs)
    return [halo is not None for halo in found]


@pytest.mark.slow_cases("[1, 2, 1]-1", "[3, 1, 3]-2")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("window", [[1, 2, 1], [3, 1, 3]], ids=str)
def test_an_exchange_gives_what_a_ring_does(four_ranks, window, batch):
    config = {"window": window, "tile_size": list(TILE), "skip_time_steps": 0}
    ways = four_ranks.run(Mesh(ring=4), by_both_ways, config, batch)
    assert ways == [[True, False]] * 4
