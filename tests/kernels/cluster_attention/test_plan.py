"""Which clusters are kept, and how they become blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.cluster_attention.api import cluster_attention
from multimodal_gen.kernels.cluster_attention.plan import (
    Groups,
    cluster_plan,
    cluster_weights,
    cut,
    kept_clusters,
    kept_pairs,
)
from tests.helpers.inputs import random


def groups(counts: torch.Tensor) -> Groups:
    """Return clusters one behind the other, of shuffled tokens."""
    starts = (counts.cumsum(2) - counts).int()
    total = int(counts.sum(2).max())
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(total, generator=generator) for _ in range(starts[..., 0].numel())]
    order = torch.stack(orders).view(*counts.shape[:2], total).int()
    return Groups(order=order, starts=starts, counts=counts.int())


def test_the_weight_of_a_cluster_is_that_of_its_keys_at_their_centroid() -> None:
    queries, keys = random(1, 4, 2, 8), random(1, 2, 3, 8, seed=1)
    counts = torch.tensor([[[2, 5, 1], [3, 0, 4]]], dtype=torch.int32)
    weights = cluster_weights(queries, keys, counts, scale=0.5)
    for h in range(4):
        scores = [math.exp(0.5 * float(queries[0, h, 1] @ keys[0, h // 2, j])) for j in range(3)]
        mass = [n * s for n, s in zip(counts[0, h // 2].tolist(), scores, strict=True)]
        wanted = torch.tensor([m / sum(mass) for m in mass])
        assert torch.allclose(weights[0, h, 1], wanted, atol=1e-6)
    assert (weights[:, 2:, :, 1] == 0).all()


def test_clusters_are_kept_until_they_carry_the_mass() -> None:
    weights = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).view(1, 1, 1, 5)

    def kept(top_p: float, min_count: int = 0) -> list[int]:
        keep = kept_clusters(weights, top_p=top_p, min_count=min_count)
        return keep[0, 0, 0].nonzero().flatten().tolist()

    assert kept(0.0) == [1]
    assert kept(0.39) == [1]
    assert kept(0.5) == [1, 3]
    assert kept(0.75) == [1, 3, 4]
    assert kept(0.0, min_count=4) == [0, 1, 3, 4]
    assert kept(1.0) == [0, 1, 2, 3, 4]


def test_of_equal_clusters_the_first_is_kept() -> None:
    weights = torch.full((1, 1, 1, 4), 0.25)
    assert kept_clusters(weights, top_p=0.3, min_count=0).tolist() == [
        [[[True, True, False, False]]]
    ]


@given(
    num=st.integers(1, 60),
    top_p=st.floats(0, 1),
    min_share=st.floats(0, 1),
    spread=st.sampled_from([0.1, 2.0, 10.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None)
def test_what_is_kept_carries_the_mass_with_as_few_clusters_as_can_be(
    num: int, top_p: float, min_share: float, spread: float, seed: int
) -> None:
    weights = (spread * random(1, 1, 3, num, seed=seed)).softmax(3)
    least = int(min_share * num)
    keep = kept_clusters(weights, top_p=top_p, min_count=least)
    rounding = num * torch.finfo(torch.float32).eps
    for row, kept in zip(weights[0, 0].double(), keep[0, 0], strict=True):
        count = int(kept.sum())
        assert count >= max(least, 1)
        assert float(row[kept].sum()) >= min(top_p, 1.0) - rounding
        assert float(row[kept].min()) >= float(row[~kept].max()) if count < num else True
        if max(least, 1) < count and top_p < 1:
            without_last = float(row[kept].sum() - row[kept].min())
            assert without_last <= top_p + rounding


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1.5, "min_count": 0}, r"`top_p` must be in \[0, 1\], got 1.5"),
        ({"top_p": 0.5, "min_count": -1}, r"`min_count` must be at least 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kept_clusters(torch.ones(1, 1, 1, 2), **options)  # type: ignore[arg-type]


@given(
    counts=st.lists(st.integers(0, 500), min_size=1, max_size=12),
    size=st.sampled_from([128, 192]),
    equal=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_pieces_cover_every_cluster_once(counts: list[int], size: int, equal: bool) -> None:
    side = groups(torch.tensor(counts).view(1, 1, -1))
    pieces = cut(side, size, multiple=64 if equal else None)
    covered = []
    for start, length, cluster in zip(
        *(x[0, 0].tolist() for x in (pieces.starts, pieces.lengths, pieces.cluster)), strict=True
    ):
        assert 0 <= length <= size
        if length:
            begin = int(side.starts[0, 0, cluster])
            assert begin <= start
            assert start + length <= begin + counts[cluster]
            covered += range(start, start + length)
    assert covered == list(range(sum(counts)))
    needed = sum(-(-count // size) for count in counts)
    assert int((pieces.lengths > 0).sum()) == needed


def test_a_plan_keeps_the_pairs_that_are_kept() -> None:
    q_counts = torch.tensor([[[200, 0, 37], [1, 130, 106]]])
    k_counts = torch.tensor([[[129, 5, 0, 300]]])
    queries, keys = groups(q_counts), groups(k_counts)
    keep = torch.rand(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    plan = cluster_plan(queries, keys, keep).check()
    wanted = kept_pairs(keep, queries.counts, keys.counts)
    by_hand = sum(
        int(q_counts[0, h, i] * k_counts[0, 0, j]) for _, h, i, j in keep.nonzero().tolist()
    )
    assert int(plan.pairs().sum()) == by_hand == float(wanted)


def test_attention_is_that_of_the_kept_clusters() -> None:
    queries = groups(torch.tensor([[[100, 60, 40]] * 4]))
    keys = groups(torch.tensor([[[30, 150, 20]] * 2]))
    keep = torch.tensor([[True, False, True], [False, True, False], [True, True, True]])
    keep = keep.expand(1, 4, 3, 3)
    q, k, v = random(1, 200, 4, 16), random(1, 200, 2, 16, seed=1), random(1, 200, 2, 16, seed=2)
    out = torch.full_like(q, float("nan"))
    cluster_attention(q, k, v, queries, keys, keep, out, scale=0.3)
    for h in range(4):
        q_of, k_of = torch.empty(200).long(), torch.empty(200).long()
        sides = ((q_of, queries, h), (k_of, keys, h // 2))
        for of, side, head in sides:
            of[side.order[0, head].long()] = torch.repeat_interleave(
                torch.arange(3), side.counts[0, head]
            )
        mask = keep[0, h][q_of][:, k_of]
        scores = (q[0, :, h] @ k[0, :, h // 2].T * 0.3).masked_fill(~mask, -torch.inf)
        assert torch.allclose(out[0, :, h], scores.softmax(1) @ v[0, :, h // 2], atol=1e-5)


def test_clusters_of_other_heads_and_maps_of_other_clusters_are_refused() -> None:
    side = groups(torch.tensor([[[10, 10]] * 2]))
    x, keep = torch.zeros(1, 20, 2, 16), torch.ones(1, 2, 2, 2, dtype=torch.bool)
    with pytest.raises(UsageError, match=r"`keys` must be clusters of 1 entries and 1 heads"):
        cluster_attention(x, x[:, :, :1], x, side, side, keep, x, scale=1.0)
    with pytest.raises(
        UsageError, match=r"`cluster_mask` must be bool \[1, 2, 2, 2\], got torch.float32"
    ):
        cluster_attention(x, x, x, side, side, keep.float(), x, scale=1.0)
    refused = "kernel 'gluon' of block-sparse attention cannot serve this call"
    with pytest.raises(UnsupportedBackendError, match=refused):
        cluster_attention(x, x, x, side, side, keep, x, scale=1.0, kernel="gluon")
