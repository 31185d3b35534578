"""Sorting rows by their choices and merging their parts on the CPU, which is the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.select.row_reference import ChunkGroups, sort_keys
from multimodal_gen.kernels.select.rows import (
    chunk_groups,
    lse_of_parts,
    merge_parts,
    move_rows,
    sort_rows,
)
from tests.helpers.inputs import random
from tests.kernels.select.naive_rows import assert_sorted, random_bits

ROWS = 128  # of a block


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("block", [128, 192])
@pytest.mark.parametrize(("num_chunks", "size"), [(1, 1), (5, 5), (13, 4), (40, 7), (72, 6)])
def test_every_group_holds_the_rows_that_chose_any_of_its_chunks(num_chunks, size, block, extra):
    query, bits = random(2, 300, 2, 8), random_bits((2, 2, 300), num_chunks)
    groups = ChunkGroups(num_chunks=num_chunks, size=size)
    rows = sort_rows(bits, groups, block=block, extra=extra)
    assert_sorted(rows, move_rows(query, rows), query, bits, groups, extra=extra)


def test_the_rows_of_some_heads_are_those_heads_rows():
    groups = ChunkGroups(num_chunks=5, size=2)
    query, bits = random(2, 300, 3, 8), random_bits((2, 3, 300), 5)
    rows = sort_rows(bits, groups, extra=True).of_heads(slice(1, 3))
    query, bits = query[:, :, 1:], bits[:, 1:]
    assert_sorted(rows, move_rows(query, rows), query, bits, groups, extra=True)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 2 * ROWS + 3),
    st.integers(1, 45),
    st.integers(1, 8),
    st.booleans(),
    st.integers(),
)
def test_rows_of_any_number_are_sorted(tokens, num_chunks, size, extra, seed):
    query = random(1, tokens, 1, 4)
    bits = random_bits((1, 1, tokens), num_chunks, seed=seed % 2**31)
    groups = ChunkGroups(num_chunks=num_chunks, size=size)
    rows = sort_rows(bits, groups, extra=extra)
    assert_sorted(rows, move_rows(query, rows), query, bits, groups, extra=extra)


def test_neighbours_in_the_order_differ_in_one_chunk_and_the_empty_choice_is_last():
    for size in range(1, 9):
        order = sort_keys(torch.arange(2**size), size).argsort()
        assert order[-1] == 0
        differ = order[:-1] ^ order[1:]
        assert ((differ & (differ - 1)) == 0).all()


def test_rows_that_chose_nothing_cost_no_blocks():
    groups = ChunkGroups(num_chunks=4, size=2)
    bits = torch.full((1, 1, 4 * ROWS, 1), 0b0100, dtype=torch.int32)
    rows = sort_rows(bits, groups)
    assert rows.counts[0].tolist() == [[0] * 4, [1] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_merge_to_the_softmax_over_all_of_them(dtype):
    groups = ChunkGroups(num_chunks=7, size=3)
    bits = random_bits((2, 3, 200), 7)
    rows = sort_rows(bits, groups)
    room = rows.room
    parts = random(2, room, 9, 8, seed=1).to(dtype)
    lse = random(2, 9, room, seed=2) * 5
    out = torch.empty(2, 3, 200, 8, dtype=dtype).transpose(1, 2)
    merge_parts(parts, lse, rows, out)
    for b, s, h in ((0, 0, 0), (1, 199, 2), (0, 77, 1), (1, 5, 0)):
        total, weights = torch.zeros(8).double(), 0.0
        for g in range(3):
            position = int(rows.position[b, h, g, s])
            if position < int(rows.used[b, h, g]):
                weight = lse[b, h * 3 + g, position].double().exp()
                total += weight * parts[b, position, h * 3 + g].double()
                weights += weight
        wanted = total / weights if weights else total
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(out[b, s, h].double(), wanted, rtol=rounding, atol=rounding)


def test_rows_without_any_key_become_zero():
    groups = ChunkGroups(num_chunks=2, size=1)
    bits = torch.tensor([0b01, 0b11, 0b00]).int().view(1, 1, 3, 1)
    rows = sort_rows(bits, groups)
    parts = torch.full((1, ROWS, 2, 4), torch.nan)
    lse = torch.full((1, 2, ROWS), -torch.inf)
    out = torch.ones(1, 3, 1, 4)
    merge_parts(parts, lse, rows, out)
    assert (out == 0).all()


def test_rows_without_any_key_leave_gradients_of_their_parts_finite():
    rows = sort_rows(random_bits((1, 1, 20), 7), ChunkGroups(num_chunks=7, size=3))
    lse = random(1, 3, rows.room).index_fill(2, torch.arange(0, rows.room, 2), -torch.inf)
    total = lse_of_parts(lse.requires_grad_(), rows)
    seen = total > -torch.inf
    assert 0 < int(seen.sum()) < 20
    (found,) = torch.autograd.grad(total.masked_fill(~seen, 0.0).sum(), lse)
    assert found.isfinite().all()
    assert torch.equal(total.detach(), lse_of_parts(lse.detach(), rows))


def test_gradients_flow_through_sorting_and_merging():
    groups = ChunkGroups(num_chunks=3, size=2)
    bits = random_bits((1, 1, 6), 3)
    query = random(1, 6, 1, 4).double().requires_grad_()

    def run(query: torch.Tensor) -> torch.Tensor:
        rows = sort_rows(bits, groups)
        moved, out = move_rows(query, rows), torch.zeros_like(query)
        merge_parts(moved * 2, moved.sum(-1).transpose(1, 2), rows, out)
        return out

    assert torch.autograd.gradcheck(run, (query,))


@pytest.mark.parametrize(
    ("chunks", "tokens", "size", "num"),
    [(7, 32760, 7, 1), (8, 10, 8, 1), (24, 32760, 8, 3), (72, 32760, 8, 9), (40, 75600, 8, 5),
     (36, 75600, 8, 5), (9, 50, 3, 3), (40, 14400, 6, 7), (500, 200000, 8, 63)],
)  # fmt: skip
def test_groups_have_few_patterns_for_the_rows_there_are(chunks, tokens, size, num):
    groups = chunk_groups(chunks, tokens)
    assert (groups.size, groups.num) == (size, num)
    assert (num - 1) * size < chunks <= num * size


Q, BITS = torch.zeros(1, 6, 2, 4), torch.zeros(1, 2, 6, 1, dtype=torch.int32)
GROUPS = ChunkGroups(num_chunks=3, size=2)
SORTED = sort_rows(BITS, GROUPS)
PARTS, LSE = torch.zeros(1, ROWS, 4, 4), torch.zeros(1, 4, ROWS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ChunkGroups(num_chunks=3, size=9), r"`size` must lie in \[1, 8\]"),
        (lambda: ChunkGroups(num_chunks=0, size=1), r"`num_chunks` be positive, got 1 and 0"),
        (lambda: sort_rows(BITS, GROUPS, block=300), r"`block` must lie in \[1, 256\], got 300"),
        (
            lambda: sort_rows(BITS.long(), GROUPS),
            r"`bits` must be int32 \[B, H, S, 1\], got torch.int64 \[1, 2, 6, 1\]",
        ),
        (
            lambda: move_rows(Q[0], SORTED),
            r"`query` must be \[1, 6, 2, D\], got \[6, 2, 4\]",
        ),
        (
            lambda: move_rows(Q.to("meta"), SORTED),
            r"`query` must be on cpu, got meta",
        ),
        (
            lambda: merge_parts(PARTS[:, :5], LSE, SORTED, Q),
            rf"`parts` must be \[1, {ROWS}, 4, D\] and `lse` \[1, 4, {ROWS}\], got \[1, 5, 4, 4\]",
        ),
        (
            lambda: merge_parts(PARTS, LSE, SORTED, Q[:, :5]),
            r"`out` must be \[1, 6, 2, 4\], got \[1, 5, 2, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()
