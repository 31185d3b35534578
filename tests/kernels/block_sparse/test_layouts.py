"""Plans of causal models against the masks that define them."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.layouts import (
    chunk_causal_plan,
    frame_causal_plan,
    segment_plan,
    teacher_forcing_plan,
)
from tests.helpers.block_plans import dense_mask

CHUNKS = [3, 10, 10, 10, 7]


def chunk_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def causal(lengths, window=None, sink=0):
    chunk = chunk_of(lengths)
    q, k = chunk[:, None], chunk[None, :]
    keep = k <= q
    return keep if window is None else keep & ((k > q - window) | (k < sink))


@pytest.mark.parametrize("query_rows", [4, 384])
@pytest.mark.parametrize(("window", "sink"), [(None, 0), (1, 0), (2, 1), (3, 2), (12, 0)])
def test_a_chunk_sees_its_window_and_the_sink(window, sink, query_rows):
    plan = chunk_causal_plan(CHUNKS, window=window, sink=sink, query_rows=query_rows).check()
    assert torch.equal(dense_mask(plan, 1, 1)[0, 0], causal(CHUNKS, window, sink))


def test_frames_are_chunks_of_one_length():
    plan = frame_causal_plan(5, 6, window=2, sink=1).check()
    assert torch.equal(dense_mask(plan, 1, 1)[0, 0], causal([6] * 5, 2, 1))


@pytest.mark.parametrize(("window", "sink"), [(None, 0), (2, 0), (2, 1)])
def test_noisy_chunks_see_themselves_and_clean_ones_before_them(window, sink):
    plan = teacher_forcing_plan(CHUNKS, window=window, sink=sink, query_rows=8).check()
    clean, chunk = causal(CHUNKS, window, sink), chunk_of(CHUNKS)
    own = chunk[:, None] == chunk[None, :]
    want = torch.cat(
        (torch.cat((clean, torch.zeros_like(own)), 1), torch.cat((clean & ~own, own), 1))
    )
    assert torch.equal(dense_mask(plan, 1, 1)[0, 0], want)


def test_lists_cost_chunks_and_not_tokens():
    plan = chunk_causal_plan([4680] * 7)
    assert plan.indices.shape == (1, 1, 7 * 13, 7)
    assert sum(x.numel() for x in plan.tensors()) < 2000


def test_what_is_no_layout_is_refused():
    keep = torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(UsageError, match=r"`keys\[0\]` must be a whole number >= 1, got 0"):
        segment_plan([3, 4], [0], keep)
    with pytest.raises(UsageError, match=r"`mask` must be bool \[2, 1\], .* torch.int64 \[2, 1\]"):
        segment_plan([3, 4], [5], keep.long())
    with pytest.raises(UsageError, match=r"`mask` must be a bool tensor \[2, 1\], got None"):
        segment_plan([3, 4], [5], None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: chunk_causal_plan(CHUNKS, window=0),
            "`window` must be a whole number >= 1, got 0",
        ),
        (lambda: chunk_causal_plan(CHUNKS, window=1.5), "`window` must be .* number >= 1, got 1.5"),
        (lambda: teacher_forcing_plan(CHUNKS, sink=-1), "`sink` must be .* number >= 0, got -1"),
        (lambda: chunk_causal_plan([]), r"`chunks` must be a list of lengths in tokens, got \[\]"),
        (lambda: chunk_causal_plan(12), "`chunks` must be a list of lengths in tokens, got 12"),
        (lambda: chunk_causal_plan([3, 2.0]), r"`chunks\[1\]` must be a whole .* >= 1, got 2.0"),
        (lambda: teacher_forcing_plan(["a"]), r"`chunks\[0\]` must be a whole .* >= 1, got 'a'"),
        (lambda: chunk_causal_plan([3], query_rows=0), "`query_rows` must be .* >= 1, got 0"),
        (lambda: frame_causal_plan(0, 4), "`num_frames` must be a whole number >= 1, got 0"),
        (lambda: frame_causal_plan(2, None), "`tokens_per_frame` must be .* >= 1, got None"),
    ],
)
def test_what_makes_no_layout_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
