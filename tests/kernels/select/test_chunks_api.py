"""Means of chunks and their choice on the CPU, which is the definition, against loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.select.row_reference import ChunkMeans, Rule
from multimodal_gen.kernels.select.rows import chunk_means, select_chunks
from tests.helpers.inputs import random
from tests.kernels.select.naive_chunks import (
    layout,
    naive_choice,
    naive_means,
    tokens_of,
    unpacked,
)

LENGTHS = [9, 9, 4, 9, 1, 6]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCOPES = ["query_head", "block", "head_global", "overall"]
RULES = [
    *(Rule(topk=k, scope=s) for k in (1, 2, 4) for s in SCOPES if s != "block"),
    *(Rule(threshold=t, scope=s) for t in (0.0, 0.25, 0.6, 0.95) for s in SCOPES),
]


def given_means(means: torch.Tensor) -> ChunkMeans:
    counts = torch.full((1, means.shape[2]), 3, dtype=torch.int32)
    return ChunkMeans(means=means, counts=counts, masked=False)


def own_chunks(queries: int, chunks: int) -> torch.Tensor:
    return (torch.arange(queries) * chunks // queries).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("indexed", [False, True])
def test_means_are_of_the_true_number_of_keys_and_not_rounded(dtype, indexed):
    starts, lengths, order = layout(LENGTHS)
    index = order if indexed else None
    key = random(2, sum(LENGTHS) + 3, 2, 16, dtype=dtype)
    found = chunk_means(key, Tiles(starts, lengths, 9, index))
    wanted = naive_means(key, tokens_of(LENGTHS, index))
    assert found.means.dtype == torch.float32
    assert (found.means - wanted).abs().max() <= 9 * torch.finfo(
        torch.float32
    ).eps * key.abs().max()
    assert found.counts.tolist() == [LENGTHS]
    assert not found.masked


def test_masked_keys_do_not_count_and_may_be_no_numbers():
    starts, lengths, index = layout(LENGTHS)
    key = random(2, sum(LENGTHS), 2, 16)
    token_mask = random(2, sum(LENGTHS), seed=1) > 0
    chunks = tokens_of(LENGTHS, index)
    token_mask[0, chunks[2]] = False
    dirty = key.masked_fill(~token_mask[..., None, None], torch.nan)
    found = chunk_means(dirty, Tiles(starts, lengths, 9, index), mask=token_mask)
    for b in range(2):
        kept = [[t for t in chunk if token_mask[b, t]] for chunk in chunks]
        assert found.counts[b].tolist() == [len(chunk) for chunk in kept]
        for n, chunk in enumerate(kept):
            wanted = key[b, chunk].double().mean(0) if chunk else torch.zeros(2, 16).double()
            torch.testing.assert_close(found.means[b, :, n].double(), wanted)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_choice_is_the_papers(rule, kv_heads):
    query, means = random(2, 24, 4, 8), random(2, kv_heads, 7, 8, seed=1)
    own = own_chunks(24, 7)
    bits, pairs = select_chunks(query, given_means(means), own, rule)
    wanted = naive_choice(query, means, own.tolist(), rule)
    assert torch.equal(unpacked(bits, 7), wanted)
    assert int(pairs) == 3 * int(wanted.sum())


@pytest.mark.parametrize("scope", SCOPES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    queries=st.integers(1, 9),
    chunks=st.integers(1, 40),
    threshold=st.floats(0, 0.99),
)
def test_a_query_always_chooses_its_own_chunk_and_thresholds_are_reached(
    scope, seed, queries, chunks, threshold
):
    query, means = random(1, queries, 2, 8, seed=seed), random(1, 2, chunks, 8, seed=seed + 1)
    own = own_chunks(queries, chunks)
    bits, _ = select_chunks(query, given_means(means), own, Rule(threshold=threshold, scope=scope))
    chosen = unpacked(bits, chunks)
    assert chosen[0, :, torch.arange(queries), own.long()].all()
    dims = {"query_head": -1, "block": (1, 2), "head_global": (2, 3), "overall": (1, 2, 3)}[scope]
    scores = (query.transpose(1, 2) @ means.mT).double()
    least, largest = scores.amin(dims, keepdim=True), scores.amax(dims, keepdim=True)
    mass = (scores - least) / (largest - least).clamp_min(1e-6)
    share = (mass * chosen).sum(dims) / mass.sum(dims).clamp_min(1e-9)
    assert ((share >= threshold - 1e-4) | (largest - least < 1e-5).reshape(share.shape)).all()


def test_a_threshold_always_adds_a_chunk_to_the_own_one():
    query, means = random(1, 20, 2, 8), random(1, 2, 5, 8, seed=1)
    bits, _ = select_chunks(query, given_means(means), own_chunks(20, 5), Rule(threshold=0.0))
    assert (unpacked(bits, 5).sum(-1) == 2).all()


def test_samples_of_a_batch_do_not_compete():
    query, means = random(2, 24, 2, 8), random(2, 2, 5, 8, seed=1)
    query[1] *= 100.0
    for scope in SCOPES:
        rule, own = Rule(threshold=0.4, scope=scope), own_chunks(24, 5)
        together, _ = select_chunks(query, given_means(means), own, rule)
        for b in range(2):
            alone, _ = select_chunks(query[b, None], given_means(means[b, None]), own, rule)
            assert torch.equal(together[b], alone[0])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_masked_queries_choose_their_own_chunk_and_compete_with_none(rule):
    query, means = random(2, 24, 4, 8), random(2, 2, 7, 8, seed=1)
    own, token_mask = own_chunks(24, 7), random(2, 24, seed=2) > -0.5
    for value in (torch.nan, torch.inf, 1e4):
        dirty = query.masked_fill(~token_mask[..., None, None], value)
        bits, _ = select_chunks(dirty, given_means(means), own, rule, mask=token_mask)
        chosen = unpacked(bits, 7)
        for b in range(2):
            kept = token_mask[b].nonzero().flatten()
            wanted = naive_choice(query[b, None, kept], means[b, None], own[kept].tolist(), rule)
            assert torch.equal(chosen[b, :, kept], wanted[0])
            alone = torch.nn.functional.one_hot(own[~token_mask[b]].long(), 7).bool()
            assert torch.equal(chosen[b, :, ~token_mask[b]], alone.expand(4, -1, -1))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_sample_without_a_query_that_counts_chooses_own_chunks(rule):
    query, means, own = torch.full((1, 12, 2, 8), torch.nan), random(1, 2, 4, 8), own_chunks(12, 4)
    bits, _ = select_chunks(
        query, given_means(means), own, rule, mask=torch.zeros(1, 12, dtype=torch.bool)
    )
    assert (unpacked(bits, 4).sum(-1) == 1).all()


def test_equal_scores_go_to_the_lowest_chunk_of_a_query():
    query, means = torch.zeros(1, 6, 1, 4), random(1, 1, 9, 4)
    own = own_chunks(6, 3) + 4
    bits, _ = select_chunks(query, given_means(means), own.int(), Rule(topk=3))
    chosen = unpacked(bits, 9)[0, 0]
    assert all(
        row.nonzero().flatten().tolist() == [0, 1, o]
        for row, o in zip(chosen, own.tolist(), strict=True)
    )


def test_chunks_without_keys_are_chosen_only_as_own():
    query, means = random(1, 12, 2, 8), random(1, 2, 4, 8, seed=1)
    counts = torch.tensor([[3, 0, 2, 0]], dtype=torch.int32)
    chunks = ChunkMeans(means=means, counts=counts, masked=True)
    for rule in (Rule(topk=3), Rule(threshold=0.9), Rule(threshold=0.9, scope="overall")):
        bits, pairs = select_chunks(query, chunks, own_chunks(12, 4), rule)
        chosen = unpacked(bits, 4)[0]
        assert chosen[:, :3, 0].all()
        assert chosen[:, 3:6, 1].all()
        assert not chosen[:, :3, [1, 3]].any()
        assert int(pairs) == int((chosen * counts[0]).sum())


def test_more_chunks_than_a_word_has_bits():
    query, means = random(1, 40, 2, 8), random(1, 2, 70, 8, seed=1)
    rule, own = Rule(topk=18), own_chunks(40, 70)
    bits, _ = select_chunks(query, given_means(means), own, rule)
    assert bits.shape == (1, 2, 40, 3)
    assert torch.equal(unpacked(bits, 70), naive_choice(query, means, own.tolist(), rule))


@pytest.mark.parametrize(
    ("rule", "chunks", "everything", "own"),
    [
        (Rule(topk=5), 5, True, False),
        (Rule(topk=4), 5, False, False),
        (Rule(topk=1), 5, False, True),
        (Rule(topk=1), 1, True, False),
        (Rule(threshold=1.0), 5, True, False),
        (Rule(threshold=0.0), 5, False, False),
    ],
    ids=str,
)
def test_a_rule_knows_when_scores_do_not_matter(rule, chunks, everything, own):
    assert rule.keeps_all(chunks) is everything
    assert rule.keeps_own_only(chunks) is own


Q, CHUNKS = torch.zeros(1, 6, 2, 4), given_means(torch.zeros(1, 2, 3, 4))
OWN, STARTS = torch.zeros(6, dtype=torch.int32), torch.tensor([0, 3]).int()
TILES = Tiles(STARTS, STARTS, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Rule(topk=0), "`topk` must be at least 1, got 0"),
        (lambda: Rule(topk=2, scope="block"), "`scope` must be query_head, .* got block"),
        (lambda: Rule(threshold=1.5), r"`threshold` must lie in \[0, 1\], got 1.5"),
        (lambda: Rule(threshold=math.nan), r"`threshold` must lie in \[0, 1\], got nan"),
        (
            lambda: chunk_means(Q[0], TILES),
            r"`key` must be \[B, S, H, D\], got \[6, 2, 4\]",
        ),
        (
            lambda: chunk_means(Q, TILES._replace(starts=STARTS.long())),
            r"`starts` must be int32, 1-D and on cpu, got torch.int64",
        ),
        (
            lambda: chunk_means(Q, TILES._replace(lengths=STARTS[:1])),
            "`lengths` must hold one value per",
        ),
        (lambda: chunk_means(Q, TILES._replace(size=0)), "`size` must be at least 1, got 0"),
        (
            lambda: chunk_means(Q, TILES, mask=torch.ones(1, 5).bool()),
            r"`mask` must be bool \[1, 6\], got torch.bool \[1, 5\]",
        ),
        (
            lambda: select_chunks(Q[0], CHUNKS, OWN, Rule(topk=1)),
            r"`query` must be \[B, S, H, D\], got \[6, 2, 4\]",
        ),
        (
            lambda: select_chunks(Q[:, :, :1], CHUNKS, OWN, Rule(topk=1)),
            r"`chunks` must hold means \[1, a divisor of 1, N, 4\] on cpu, got \[1, 2, 3, 4\]",
        ),
        (
            lambda: select_chunks(Q, CHUNKS, OWN[:5], Rule(topk=1)),
            r"`own` must be int32 \[6\] on cpu, got torch.int32 \[5\]",
        ),
        (
            lambda: select_chunks(Q, CHUNKS, OWN, Rule(topk=1), mask=torch.ones(1, 6)),
            r"`mask` must be bool \[1, 6\], got torch.float32 \[1, 6\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()
