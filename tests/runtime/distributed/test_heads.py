"""Who gets which heads."""

import itertools

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.heads import share_heads

SIZES = [
    (heads, kv, ranks)
    for heads, kv, ranks in itertools.product(range(1, 13), range(1, 13), range(1, 6))
    if heads % kv == 0 and heads >= ranks
]


def test_the_shares_of_six_heads_on_four_ranks_are_these():
    shares = share_heads(6, 2, 4)
    assert shares.queries == ((0, 2), (2, 4), (4, 5), (5, 6))
    assert shares.keys == ((0, 1), (0, 2), (1, 2), (1, 2))


@pytest.mark.parametrize(("heads", "kv", "ranks"), SIZES)
def test_every_query_head_finds_the_key_head_it_reads(heads, kv, ranks):
    shares = share_heads(heads, kv, ranks)
    assert list(itertools.chain(*(range(*span) for span in shares.queries))) == list(range(heads))
    sizes = {stop - start for start, stop in shares.queries}
    assert max(sizes) - min(sizes) <= 1
    keys = torch.arange(kv).view(1, 1, kv, 1)
    for rank, span in enumerate(shares.queries):
        arranged = shares.arrange_keys(keys[:, :, slice(*shares.keys[rank])], rank)
        count = span[1] - span[0]
        assert count % arranged.shape[2] == 0
        read = arranged.flatten().repeat_interleave(count // arranged.shape[2])
        assert read.tolist() == [head // (heads // kv) for head in range(*span)]


def test_key_heads_that_serve_equal_groups_are_not_copied():
    shares = share_heads(8, 4, 2)
    keys = torch.randn(1, 3, 2, 4)
    assert shares.arrange_keys(keys, 1) is keys


def test_a_rank_without_a_head_is_refused():
    with pytest.raises(UsageError, match=r"a head for each of the 4 ranks .* got 3 heads; use"):
        share_heads(3, 3, 4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_chunks_cover_the_heads_of_every_rank_in_order(count):
    shares = share_heads(13, 13, 4)
    chunks = shares.in_chunks(count)
    assert len(chunks) == count
    for rank, span in enumerate(shares.queries):
        spans = [chunk.queries[rank] for chunk in chunks]
        assert list(itertools.chain(*(range(*s) for s in spans))) == list(range(*span))
        sizes = {stop - start for start, stop in spans}
        assert max(sizes) - min(sizes) <= 1
        assert [chunk.keys[rank] for chunk in chunks] == spans
