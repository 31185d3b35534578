"""Blocks of raster order: they cover every token once, and masks take tokens out of them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.runtime.layers.attention.sparse.raster import raster_blocks
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout

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
