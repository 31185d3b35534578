"""Blocks of raster order: they cover every token once, and masks take tokens out of them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.runtime.layers.attention.sparse.executors.linear import plan_of_blocks
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import kept_blocks
from multimodal_gen.runtime.layers.attention.sparse.raster import raster_blocks
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, kept_first

CPU = torch.device("cpu")

LAYOUTS = st.builds(
    lambda grid, before, behind, dropped: SequenceLayout(
        grid=grid,
        start=before,
        num_queries=before + grid[0] * grid[1] * grid[2] + behind,
        num_keys=before + grid[0] * grid[1] * grid[2] + behind - min(dropped, behind),
    ),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.sampled_from([0, 0, 5, 64, 100]),
    st.sampled_from([0, 0, 1, 64, 130]),
    st.sampled_from([0, 0, 3]),
)
SIZES = st.sampled_from([(64, 64), (128, 64), (64, 128)])


def best(query, means, keys, blocks, kept):
    """Return the plan of the best blocks."""
    if kept == blocks.num_video:
        return BlockPlan.dense(blocks.queries, keys, CPU)
    return plan_of_blocks(lambda stats: stats.best(kept), query, means, keys, blocks)


def covered(blocks):
    """Return the tokens of every block."""
    starts, lengths = (x[0, 0].tolist() for x in blocks.bounds(CPU))
    return [list(range(a, a + n)) for a, n in zip(starts, lengths, strict=True)]


@given(layout=LAYOUTS, sizes=SIZES)
@settings(deadline=None, max_examples=80)
def test_blocks_cover_every_token_once(layout, sizes):
    blocks = raster_blocks(layout, *sizes, CPU)
    video = list(range(layout.start, layout.start + layout.num_video))
    keys = covered(blocks.keys)
    assert [t for block in keys[: blocks.num_video] for t in block] == video
    assert sorted(t for block in keys for t in block) == list(range(layout.num_keys))
    starts, lengths = (x[0, 0].tolist() for x in blocks.ordered.bounds(CPU))
    for start, length, block in zip(starts, lengths, keys, strict=True):
        assert blocks.order[start : start + length].tolist() == block
    assert [t for block in covered(blocks.queries) for t in block] == video
    rest = [t for span in layout.text for t in range(span.start, span.stop)]
    assert sorted([*video, *rest]) == list(range(layout.num_queries))
    assert (layout.video.start, layout.video.stop) == (video[0], video[-1] + 1)


def test_sequences_without_text_have_regular_blocks():
    layout = SequenceLayout(grid=(3, 7, 11), start=0, num_queries=231, num_keys=231)
    blocks = raster_blocks(layout, 128, 64, CPU)
    assert blocks.queries.is_regular
    assert blocks.keys.is_regular
    assert blocks.num_text == 0


def test_blocks_of_a_layout_are_made_once():
    layouts = [
        SequenceLayout(grid=(3, 7, 11), start=2, num_queries=240, num_keys=240) for _ in range(2)
    ]
    first, second = (raster_blocks(layout, 128, 64, CPU) for layout in layouts)
    assert first is second


@given(layout=LAYOUTS, sizes=SIZES, share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=80)
def test_packed_blocks_hold_what_the_mask_leaves_of_them(layout, sizes, share, seed):
    blocks = raster_blocks(layout, *sizes, CPU)
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(2, layout.num_keys, generator=generator) < share
    index, packed = kept_first(blocks.order, blocks.ordered, keep)
    every = torch.arange(layout.num_keys).expand(2, -1)
    assert torch.equal(index.long().sort(dim=1).values, every)
    starts, lengths = (x.expand(2, 1, -1)[:, 0] for x in packed.bounds(CPU))
    for b in range(2):
        for i, tokens in enumerate(covered(blocks.keys)):
            first, count = int(starts[b, i]), int(lengths[b, i])
            left = [t for t in tokens if keep[b, t]]
            assert index[b, first : first + count].tolist() == left


@given(layout=LAYOUTS, ratio=st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_the_density_is_that_of_the_plan(layout, ratio):
    """Exactly so where the last block is as long as the others."""
    blocks = raster_blocks(layout, 64, 64, CPU)
    kept = kept_blocks(ratio, blocks.num_video)
    query = torch.randn(1, layout.num_queries, 1, 4)
    plan = best(query, torch.randn(1, 1, blocks.keys.num, 4), blocks.keys, blocks, kept)
    text = layout.num_queries - layout.num_video
    pairs = float(plan.pairs()) + text * layout.num_keys
    found = layout.density(kept / blocks.num_video)
    slack = 64 * layout.num_video / (layout.num_queries * layout.num_keys)
    if layout.num_video % 64 == 0 or kept == blocks.num_video:
        slack = 1e-9
    assert abs(found - pairs / (layout.num_queries * layout.num_keys)) <= slack


def test_every_row_keeps_all_text():
    layout = SequenceLayout(grid=(4, 8, 8), start=70, num_queries=350, num_keys=350)
    blocks = raster_blocks(layout, 64, 64, CPU)
    means = torch.randn(1, 1, blocks.keys.num, 4)
    plan = best(torch.randn(1, 350, 1, 4), means, blocks.keys, blocks, 1)
    text = list(range(blocks.num_video, blocks.keys.num))
    assert blocks.num_text == 3
    assert all(row[1:] == text for row in plan.indices[0, 0].tolist())
