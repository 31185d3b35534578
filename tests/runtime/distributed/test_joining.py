"""Joining ranks that were started: meshes from degrees, and what ranks must agree on."""

import pytest
import torch.distributed as dist

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.distributed import joining
from multimodal_gen.runtime.distributed.groups import parallel_groups, set_parallel_groups
from multimodal_gen.runtime.distributed.joining import (
    check_same,
    from_first,
    init_parallel,
    join_world,
    leads,
    ranks_per_host,
)
from multimodal_gen.runtime.distributed.mesh import Mesh


def join(degrees):
    """Return the mesh of the groups that are in use afterwards, and whether this rank leads."""
    groups = init_parallel(device_type="cpu", **degrees)
    assert parallel_groups() is groups
    assert leads() is (dist.get_rank() == 0)
    set_parallel_groups(None)
    return groups.mesh


def join_with_own_degree():
    return join({"ulysses_degree": 1 + dist.get_rank() // 2})


def agree_on(*names):
    check_same({name: dist.get_rank() if name == "seed" else 7 for name in names})


def first_rank():
    return from_first(f"from {dist.get_rank()}")


@pytest.mark.parametrize(
    ("degrees", "mesh"),
    [
        ({}, Mesh(ulysses=4)),
        ({"num_heads": 3}, Mesh(ulysses=2, ring=2)),
        ({"ring_degree": 4, "num_gpus": 4}, Mesh(ring=4)),
        ({"cfg_parallel": True}, Mesh(cfg=2, ulysses=2)),
        ({"sp_degree": 4, "ulysses_degree": 2}, Mesh(ulysses=2, ring=2)),
    ],
    ids=str,
)
def test_degrees_become_groups_that_are_in_use(degrees, mesh, four_ranks) -> None:
    assert four_ranks.run(None, join, degrees) == [mesh] * 4


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"ulysses_degree": 3}, "--ulysses-degree must divide 4, the GPUs there are, got 3"),
        ({"num_gpus": 2}, "--num-gpus must be the 4 ranks that were started, got 2"),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_are_refused_on_every_rank(degrees, message, four_ranks) -> None:
    outcomes = four_ranks.outcomes(None, join, degrees)
    assert [ok for ok, _ in outcomes] == [False] * 4
    assert all(f"ConfigError: {message}" in text for _, text in outcomes)


def test_ranks_that_ask_for_different_degrees_are_told_who_asks_for_what(four_ranks) -> None:
    outcomes = four_ranks.outcomes(None, join_with_own_degree)
    message = "ulysses_degree must be the same on all ranks, got 1 on rank 0 and 2 on rank 2"
    assert all(not ok and f"UsageError: {message}" in text for ok, text in outcomes)


def test_values_are_compared_and_taken_from_the_first_rank(four_ranks) -> None:
    assert four_ranks.run(None, agree_on, "prompt", "height") == [None] * 4
    outcomes = four_ranks.outcomes(None, agree_on, "prompt", "seed")
    message = "seed must be the same on all ranks, got 0 on rank 0 and 1 on rank 1"
    assert all(not ok and message in text for ok, text in outcomes)
    assert four_ranks.run(None, first_rank) == ["from 0"] * 4


def test_one_launcher_is_one_host(four_ranks) -> None:
    assert four_ranks.run(None, ranks_per_host) == [4] * 4


@pytest.mark.parametrize(
    ("locals_", "per_host"), [([0, 1, 0, 1], 2), ([0, 0, 0], 1), ([0, 1, 2, 0], None)], ids=str
)
def test_hosts_are_told_apart_by_their_first_ranks(locals_, per_host, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(locals_))
    monkeypatch.setattr(joining, "_gathered", lambda mine: locals_)
    assert ranks_per_host() == per_host


def test_ranks_that_nobody_started_cannot_be_joined() -> None:
    with pytest.raises(ConfigError, match="none were; start this program with torchrun, or call"):
        init_parallel(device_type="cpu")


def test_devices_without_an_exchange_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_type must be cuda or cpu .*, got 'mps'"):
        join_world("mps")


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank: 2)
    monkeypatch.setattr(joining.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="got local rank 2 on a host with 2 GPUs; start fewer"):
        join_world("cuda")


def test_a_process_on_its_own_leads() -> None:
    assert leads()
