"""What k-means finds, what is refused, and what runs where."""

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.kmeans.api import (
    Clusters,
    by_similarity,
    initial_centroids,
    kmeans,
    similarity_order,
)
from tests.helpers.fakes import machine_with

X = torch.randn(2, 30, 3, 8, generator=torch.Generator().manual_seed(0))
START = initial_centroids(X, 4)


def members(clusters: Clusters, b: int, h: int) -> list[list[int]]:
    """Return the tokens of every cluster of a head, and last those of none."""
    bounds = zip(clusters.starts[b, h].tolist(), clusters.counts[b, h].tolist(), strict=True)
    order = clusters.order[b, h].tolist()
    found = [order[start : start + count] for start, count in bounds]
    return [*found, order[sum(map(len, found)) :]]


def blobs(num: int, size: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of far apart groups, [1, num * size, 1, 8], and the group of each."""
    generator = torch.Generator().manual_seed(seed)
    centres = 100 * torch.randn(num, 8, generator=generator)
    group = torch.arange(num).repeat(size)
    x = centres[group] + torch.randn(num * size, 8, generator=generator)
    return x.view(1, -1, 1, 8), group


def test_far_apart_groups_are_found() -> None:
    x, group = blobs(5, 20)
    start = x[:, :5].transpose(1, 2)
    found = members(kmeans(x, start, iterations=10), 0, 0)
    assert found == [torch.nonzero(group == i).flatten().tolist() for i in range(5)] + [[]]


def test_centroids_are_means_and_every_token_is_with_its_nearest() -> None:
    found = kmeans(X, START, iterations=50, tolerance=0)
    for b, h in ((0, 0), (1, 2)):
        centroids = found.centroids[b, h]
        for i, tokens in enumerate(members(found, b, h)[:-1]):
            assert tokens == sorted(tokens)
            assert torch.allclose(X[b, tokens, h].mean(0), centroids[i], atol=1e-6)
            nearest = torch.cdist(X[b, tokens, h], centroids).argmin(1)
            assert nearest.tolist() == [i] * len(tokens)


def test_labels_are_those_of_the_centroids_before_the_last_update() -> None:
    once = kmeans(X, START, iterations=1)
    assigned = kmeans(X, START, iterations=0)
    assert torch.equal(once.order, assigned.order)
    assert torch.equal(assigned.centroids, START)
    assert not torch.equal(once.centroids, START)


def test_an_empty_cluster_keeps_its_centroid() -> None:
    start = START.clone()
    start[:, :, 2] = 1e3
    found = kmeans(X, start, iterations=3)
    assert (found.counts[:, :, 2] == 0).all()
    assert (found.centroids[:, :, 2] == 1e3).all()


def test_of_equally_near_centroids_the_first_wins() -> None:
    x = torch.zeros(1, 6, 1, 4)
    start = torch.eye(4).view(1, 1, 4, 4)
    found = kmeans(x, start, iterations=0)
    assert found.counts.tolist() == [[[6, 0, 0, 0]]]


def test_heads_that_do_not_move_stop_and_others_go_on() -> None:
    x, _ = blobs(3, 10)
    moving = X[:1, :30, :1]
    both = torch.cat((x, moving), 2)
    start = torch.cat((x[:, :3], moving[:, :3]), 2).transpose(1, 2)
    many = kmeans(both, start, iterations=40)
    alone = kmeans(moving, start[:, 1:], iterations=40)
    assert torch.equal(many.order[:, 1:], alone.order)
    few = kmeans(both[:, :, :1], start[:, :1], iterations=3)
    assert torch.equal(many.centroids[:, :1], few.centroids)


def test_masked_tokens_are_left_out() -> None:
    token_mask = torch.ones(2, 30, dtype=torch.bool)
    token_mask[0, 10:14] = False
    x = X.clone()
    x[0, 10:14] = float("nan")
    found = kmeans(x, initial_centroids(x, 4, mask=token_mask), iterations=5, mask=token_mask)
    assert members(found, 0, 1)[-1] == [10, 11, 12, 13]
    assert members(found, 1, 1)[-1] == []
    assert found.centroids.isfinite().all()


def test_the_first_centroids_are_tokens_and_always_the_same() -> None:
    for b, h in ((0, 0), (1, 2)):
        tokens = X[b, :, h].tolist()
        assert all(c in tokens for c in START[b, h].tolist())
    assert torch.equal(START, initial_centroids(X, 4))
    assert initial_centroids(X, 50).shape == (2, 3, 30, 8)
    assert len(initial_centroids(X, 50)[0, 0].unique(dim=0)) == 30


def test_similar_centroids_adjoin_in_order() -> None:
    x, group = blobs(6, 8, seed=3)
    order = similarity_order(x.transpose(1, 2))[0, 0]
    assert sorted(order.tolist()) == list(range(48))
    changes = int((group[order].diff() != 0).sum())
    assert changes < 16  # any order has about 40
    assert torch.equal(by_similarity(x[:, :, 0]), x[:, order, 0])


@pytest.mark.parametrize("num", [1, 2, 3, 17])
def test_any_number_of_centroids_has_an_order(num: int) -> None:
    order = similarity_order(torch.ones(2, 3, num, 4))
    assert order.sort().values.tolist() == [[list(range(num))] * 3] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X[0]}, r"`x` must be float16, bfloat16 or float32 \[B, S, H, D\], got .* \[30, 3"),
        ({"x": X.double()}, r"`x` must be float16, bfloat16 or float32 .*, got torch.float64"),
        ({"centroids": START[:1]}, r"`centroids` must be \[2, 3, C, 8\], got \[1, 3, 4, 8\]"),
        ({"centroids": START.to("meta")}, r"`centroids` must be on the device of x \(cpu\)"),
        ({"centroids": START[:, :, :0]}, r"`centroids` must hold at least 1 cluster, got 0"),
        (
            {"mask": torch.ones(2, 30)},
            r"`mask` must be bool \[2, 30\], got torch.float32 \[2, 30",
        ),
        ({"iterations": -1}, r"`iterations` must be at least 0, got -1"),
        ({"tolerance": float("nan")}, r"`tolerance` must be at least 0, got nan"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": X, "centroids": START, "iterations": 1, **changes}
    with pytest.raises(UsageError, match=message):
        kmeans(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("cuml", "`kernel` must be one of auto, triton, flash_kmeans, reference, got 'cuml'"),
        ("flash_kmeans", "needs the package flash_kmeans, which is not installed"),
    ],
)
def test_kernels_that_cannot_run_are_refused(kernel: str, message: str) -> None:
    with machine_with({}), pytest.raises(UnsupportedBackendError, match=message):
        kmeans(X, START, iterations=1, kernel=kernel)


def test_flash_kmeans_leaves_no_tokens_out() -> None:
    token_mask = torch.ones(2, 30, dtype=torch.bool)
    with (
        machine_with({"flash-kmeans": "0.1", "triton": "3.9.0"}),
        pytest.raises(UnsupportedBackendError, match="leaves no tokens out, and some are masked"),
    ):
        kmeans(X, START, iterations=1, mask=token_mask, kernel="flash_kmeans")
