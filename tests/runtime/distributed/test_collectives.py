"""Who gets which heads."""

import itertools

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.collectives import (
    all_gather_tokens,
    gather_heads,
    partition_heads,
    scatter_heads,
)
from multimodal_gen.runtime.distributed.groups import Group, parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh

SIZES = [
    (heads, kv, ranks)
    for heads, kv, ranks in itertools.product(range(1, 13), range(1, 13), range(1, 6))
    if heads % kv == 0 and heads >= ranks
]


def test_the_shares_of_six_heads_on_four_ranks_are_these():
    shares = partition_heads(6, 2, 4)
    assert shares.queries == ((0, 2), (2, 4), (4, 5), (5, 6))
    assert shares.keys == ((0, 1), (0, 2), (1, 2), (1, 2))


@pytest.mark.parametrize(("heads", "kv", "ranks"), SIZES)
def test_every_query_head_finds_the_key_head_it_reads(heads, kv, ranks):
    shares = partition_heads(heads, kv, ranks)
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
    shares = partition_heads(8, 4, 2)
    keys = torch.randn(1, 3, 2, 4)
    assert shares.arrange_keys(keys, 1) is keys


def test_a_rank_without_a_head_is_refused():
    with pytest.raises(UsageError, match=r"a head for each of the 4 ranks .* got 3 heads; use"):
        partition_heads(3, 3, 4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_chunks_cover_the_heads_of_every_rank_in_order(count):
    shares = partition_heads(13, 13, 4)
    chunks = shares.in_groups(count)
    assert len(chunks) == count
    for rank, span in enumerate(shares.queries):
        spans = [chunk.queries[rank] for chunk in chunks]
        assert list(itertools.chain(*(range(*s) for s in spans))) == list(range(*span))
        sizes = {stop - start for start, stop in spans}
        assert max(sizes) - min(sizes) <= 1
        assert [chunk.keys[rank] for chunk in chunks] == spans


BATCH = 2
CASES = [
    ((3, 3), 4, 4),
    ((5, 3), 4, 2),
    ((0, 4), 3, 1),
    ((2, 1), 6, 6),
    ((0, 0), 4, 2),
]
CASES_OF_FOUR = [
    ((2, 2, 2, 2), 4, 4),
    ((3, 1, 0, 2), 6, 2),
    ((2, 3, 2, 1), 7, 1),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape, seed=0, dtype=torch.float32):
    # Small whole numbers: sums are exact in every dtype, so results can be compared bit by bit.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def own(x, lengths, rank):
    start = sum(lengths[:rank])
    return x[:, start : start + lengths[rank]]


def check_there_and_back(lengths, heads, kv_heads, dtype):
    group = parallel_groups().ulysses
    rank, total = group.index, sum(lengths)
    shares = partition_heads(heads, kv_heads, group.size)
    spans = (shares.queries, shares.keys, shares.keys)
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 5))
    whole = [numbers(BATCH, total, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    local = [own(x, lengths, rank).clone().requires_grad_() for x in whole]
    scattered = scatter_heads(local, spans, lengths, group)
    for x, got, span in zip(whole, scattered, spans, strict=True):
        assert torch.equal(got, x[:, :, slice(*span[rank])])
    back = gather_heads(scattered[0], shares.queries, lengths, group)
    assert torch.equal(back, local[0])
    # The transposed exchanges: what a head earns on all ranks that hold it is summed.
    weights = [numbers(*x.shape, seed=7, dtype=dtype) for x in scattered]
    expected = [
        sum_of_ranks(own(x, lengths, rank).shape, lengths, rank, span, seed=7, dtype=dtype)
        for x, span in zip(whole, spans, strict=True)
    ]
    grads = torch.autograd.grad(scattered, local, weights, retain_graph=True)
    for got, want in zip(grads, expected, strict=True):
        assert torch.equal(got, want)
    weight = numbers(BATCH, total, *shapes[0], seed=9, dtype=dtype)
    (grad,) = torch.autograd.grad(back, local[0], own(weight, lengths, rank))
    assert torch.equal(grad, own(weight, lengths, rank))


def sum_of_ranks(shape, lengths, rank, span, *, seed, dtype):
    out = torch.zeros(shape)
    for start, stop in span:
        size = (BATCH, sum(lengths), stop - start, shape[3])
        out[:, :, start:stop] += own(numbers(*size, seed=seed), lengths, rank)
    return out.to(dtype)


def check_shared_rows(lengths, heads, prefix, suffix):
    group = parallel_groups().ulysses
    rank, rows = group.index, prefix + sum(lengths) + suffix
    spans = partition_heads(heads, heads, group.size).queries
    whole = numbers(BATCH, rows, heads, 4)
    x = whole[:, :, slice(*spans[rank])].clone().requires_grad_()
    out = gather_heads(x, spans, lengths, group, prefix=prefix, suffix=suffix)
    start = prefix + sum(lengths[:rank])
    parts = (
        whole[:, :prefix],
        whole[:, start : start + lengths[rank]],
        whole[:, rows - suffix :],
    )
    assert torch.equal(out, torch.cat(parts, dim=1))
    # Every rank weighs its copy of the shared rows by its own number.
    weight = torch.full_like(out, float(rank + 1))
    (grad,) = torch.autograd.grad(out, x, weight)
    copies = float(sum(range(1, group.size + 1)))
    per_rank = [torch.full((length,), i + 1.0) for i, length in enumerate(lengths)]
    column = torch.cat((torch.full((prefix,), copies), *per_rank, torch.full((suffix,), copies)))
    assert torch.equal(grad, column[None, :, None, None].expand_as(grad))


def check_masks(lengths, dtype):
    group = parallel_groups().ulysses
    whole = numbers(BATCH, sum(lengths)).to(dtype)
    local = own(whole, lengths, group.index)
    assert torch.equal(all_gather_tokens(local, lengths, group), whole)
    wide = whole[:, None, None]
    got = all_gather_tokens(local[:, None, None], lengths, group)
    assert torch.equal(got, wide)


def check_inference_mode(lengths):
    with torch.inference_mode():
        check_masks(lengths, torch.bool)
        group = parallel_groups().ulysses
        spans = partition_heads(4, 4, group.size).queries
        whole = numbers(BATCH, sum(lengths), 4, 8)
        (got,) = scatter_heads([own(whole, lengths, group.index)], [spans], lengths, group)
        assert torch.equal(got, whole[:, :, slice(*spans[group.index])])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads"), CASES)
def test_two_ranks_exchange_tokens_for_heads_and_back(two_ranks, lengths, heads, kv_heads, dtype):
    two_ranks.run(Mesh(ulysses=2), check_there_and_back, lengths, heads, kv_heads, dtype)


@pytest.mark.slow_cases("lengths0-4-4")
@pytest.mark.parametrize(("lengths", "heads", "kv_heads"), CASES_OF_FOUR)
def test_four_ranks_exchange_tokens_for_heads_and_back(four_ranks, lengths, heads, kv_heads):
    four_ranks.run(Mesh(ulysses=4), check_there_and_back, lengths, heads, kv_heads, torch.float32)


def test_pairs_of_four_ranks_exchange_side_by_side(four_ranks):
    args = (check_there_and_back, (3, 2), 5, 1, torch.float32)
    four_ranks.run(Mesh(ulysses=2, ring=2), *args)
    four_ranks.run(Mesh(cfg=2, ulysses=2), *args)


@pytest.mark.parametrize(("prefix", "suffix"), [(2, 0), (0, 3), (1, 1)])
def test_rows_that_belong_to_no_rank_reach_every_rank(two_ranks, prefix, suffix):
    two_ranks.run(Mesh(ulysses=2), check_shared_rows, (3, 1), 5, prefix, suffix)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16], ids=str)
def test_masks_are_gathered_in_their_dtype(two_ranks, dtype):
    two_ranks.run(Mesh(ulysses=2), check_masks, (3, 1), dtype)


def test_exchanges_work_in_inference_mode(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check_inference_mode, (2, 3))


def test_one_rank_keeps_what_it_has():
    group = Group(ranks=(0,), index=0, handle=None)
    x = numbers(BATCH, 3, 4, 8)
    assert torch.equal(scatter_heads([x], [((0, 4),)], [3], group)[0], x)
    assert torch.equal(gather_heads(x, ((0, 4),), [3], group), x)
    assert all_gather_tokens(x, [8], group) is x


def test_a_split_mask_that_wants_gradients_is_refused():
    group = Group(ranks=(0,), index=0, handle=None)
    with pytest.raises(UsageError, match=r"split over ranks must not require grad; detach it"):
        all_gather_tokens(torch.zeros(1, 3, requires_grad=True), [3], group)
