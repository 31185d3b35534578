"""What the centroids of a layer go by, and how long they are kept."""

import pytest
import torch

from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import CentroidCache, Centroids
from multimodal_gen.runtime.managers.forward_context import ForwardContext


def context(step: int, request: str | None = "a", branch: str | None = "cond") -> ForwardContext:
    return ForwardContext(current_timestep=step, request_id=request, cfg_branch=branch)


def centroids(step: int) -> Centroids:
    return Centroids(step=step, query=torch.zeros(1), key=torch.zeros(1))


def test_requests_branches_and_components_have_entries_of_their_own() -> None:
    cache = CentroidCache()
    known = [
        ForwardContext(current_timestep=1, request_id=r, cfg_branch=b, component=c)
        for r in ("a", "b")
        for b in ("cond", "uncond", "both")
        for c in ("transformer", "transformer_2")
    ]
    assert len({cache.branch(c) for c in known}) == 12
    assert cache.branch(known[0]) == cache.branch(known[0])


def test_calls_of_a_step_whose_branch_is_unknown_are_branches_in_turn() -> None:
    cache = CentroidCache()
    first, second = cache.branch(context(3, branch=None)), cache.branch(context(3, branch=None))
    assert first != second
    assert cache.branch(context(4, branch=None)) == first
    assert cache.branch(context(4, "b", None)) not in (first, second)
    assert cache.branch(context(4, branch=None)) == second


def test_the_branches_of_many_requests_at_a_time_are_their_own() -> None:
    cache = CentroidCache()
    requests = [str(i) for i in range(20)]
    branches = [cache.branch(context(3, name, None)) for _ in range(2) for name in requests]
    assert len({*branches}) == 40


@pytest.mark.parametrize(
    ("kept", "asked", "found"), [(3, 4, True), (3, 3, True), (3, 2, False), (0, 0, False)]
)
def test_a_run_starts_anew_at_its_first_step(kept: int, asked: int, found: bool) -> None:
    cache = CentroidCache()
    branch = cache.branch(context(kept))
    entry = centroids(kept)
    cache.store(branch, entry, 9)
    assert (cache.find(branch, asked) is entry) == found


def test_nothing_is_kept_of_calls_whose_request_has_no_name() -> None:
    cache = CentroidCache()
    branch = cache.branch(context(1, None))
    cache.store(branch, centroids(1), 9)
    assert len(cache) == 0
    assert cache.find(cache.branch(context(2, None)), 2) is None


def test_a_request_that_ends_leaves_the_others_alone() -> None:
    cache = CentroidCache()
    known = [(request, branch) for request in ("a", "b") for branch in ("cond", None)]
    branches = [cache.branch(context(1, *names)) for names in known]
    for branch in branches:
        cache.store(branch, centroids(1), 9)
    cache.end("a")
    assert [cache.find(branch, 2) is not None for branch in branches] == [False, False, True, True]
    # The first call of a step again, also where the branch is unknown.
    assert cache.branch(context(1, "a", None)) == branches[1]
    assert cache.branch(context(1, "b", None)) != branches[3]


@pytest.mark.parametrize(("num_steps", "left"), [(5, 0), (6, 1), (None, 1)])
def test_the_last_step_drops_what_there_is(num_steps: int | None, left: int) -> None:
    cache = CentroidCache()
    branch = cache.branch(context(3))
    cache.store(branch, centroids(3), num_steps)
    cache.store(branch, centroids(4), num_steps)
    assert len(cache) == left


def test_the_branch_that_was_kept_longest_ago_is_forgotten_first() -> None:
    cache = CentroidCache()
    branches = [cache.branch(context(1, str(i))) for i in range(9)]
    for branch in branches[:8]:
        cache.store(branch, centroids(1), 9)
    cache.store(branches[0], centroids(2), 9)
    cache.store(branches[8], centroids(1), 9)
    assert cache.find(branches[0], 3) is not None
    assert cache.find(branches[1], 3) is None
