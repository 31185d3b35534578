"""Groups built on a world of processes, and worlds made by torchrun."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.distributed import groups as groups_module
from multimodal_gen.runtime.distributed.groups import (
    broadcast_object,
    build_groups,
    check_same_on_ranks,
    init_parallel,
    init_world,
    is_main_rank,
    join_world,
    leave_parallel,
    parallel_groups,
    ranks_per_host,
    set_parallel_groups,
    use_parallel_groups,
)
from multimodal_gen.runtime.distributed.mesh import Mesh

KINDS = ("ulysses", "ring", "sequence", "cfg")


def sums_of_ranks():
    """Return per kind of group its ranks and the sum of them, as exchanged in it."""
    groups = parallel_groups()
    found = {}
    for kind in (*KINDS, "control"):
        group = getattr(groups, kind)
        total = torch.tensor(groups.rank)
        if group.handle is not None:
            dist.all_reduce(total, group=group.handle)
        found[kind] = (group.ranks, int(total), group.ranks[group.index])
    return found


def initialise_again():
    return init_world()


def build_another(mesh):
    build_groups(mesh)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(ulysses=4),
        Mesh(ring=4),
        Mesh(ulysses=2, ring=2),
        Mesh(cfg=2, ulysses=2),
        Mesh(cfg=2, ring=2),
    ],
    ids=str,
)
def test_data_travels_within_the_groups_of_the_mesh(four_ranks, mesh):
    results = four_ranks.run(mesh, sums_of_ranks)
    for kind in KINDS:
        groups = getattr(mesh, f"{kind}_groups")()
        for rank, found in enumerate(results):
            ranks, total, myself = found[kind]
            assert ranks in groups
            assert total == sum(ranks)
            assert myself == rank
    assert [found["control"] for found in results] == [found["sequence"] for found in results]


def test_a_world_is_joined_once(two_ranks):
    assert two_ranks.run(None, initialise_again) == [2, 2]


@pytest.mark.parametrize(
    ("count", "current"), [(4, [3]), (2, [])], ids=["its GPU", "no such GPU on this host"]
)
def test_in_a_world_that_there_is_a_rank_takes_its_gpu(count, current, monkeypatch):
    taken = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert init_world("cuda") == 4
    assert taken == current
    assert init_world("cpu") == 4
    assert taken == current


def test_a_mesh_of_another_size_is_refused(two_ranks):
    outcomes = two_ranks.outcomes(None, build_another, Mesh(ulysses=4))
    assert [ok for ok, _ in outcomes] == [False, False]
    assert "the mesh must have the 2 ranks of the world, got 1 CFG x 1 ring x 4" in outcomes[0][1]


def test_groups_need_a_world():
    with pytest.raises(ConfigError, match=r"needs a torch.distributed world, got none; call init"):
        build_groups(Mesh())


def test_groups_are_in_use_inside_a_block_only():
    assert parallel_groups() is None
    marker = object()
    with use_parallel_groups(marker):
        assert parallel_groups() is marker
    assert parallel_groups() is None


@pytest.mark.slow
def test_ranks_that_torchrun_started_are_joined(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from pathlib import Path
            import torch.distributed as dist
            from multimodal_gen.runtime.distributed.groups import build_groups, init_world
            from multimodal_gen.runtime.distributed.mesh import plan_mesh

            groups = build_groups(plan_mesh(world_size=init_world()))
            assert groups.sequence.ranks == (0, 1), groups
            Path(sys.argv[1], f"{groups.rank} of {groups.mesh.world_size}").touch()
            dist.barrier(group=groups.sequence.handle)
            dist.destroy_process_group()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        [*command, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # Files, because lines that two processes print at a time run into each other.
    assert sorted(path.name for path in tmp_path.glob("* of *")) == ["0 of 2", "1 of 2"]


def join(degrees):
    """Return the mesh of the groups that are in use afterwards, and whether this rank leads."""
    groups = init_parallel(device_type="cpu", **degrees)
    assert parallel_groups() is groups
    assert is_main_rank() is (dist.get_rank() == 0)
    leave_parallel()
    assert parallel_groups() is None
    assert dist.is_initialized(), "the world was there before"
    return groups.mesh


def join_with_own_degree():
    return join({"ulysses_degree": 1 + dist.get_rank() // 2})


def agree_on(*names):
    check_same_on_ranks({name: dist.get_rank() if name == "seed" else 7 for name in names})


def first_rank():
    return broadcast_object(f"from {dist.get_rank()}")


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
        (
            {"ulysses_degree": 3},
            "ulysses_degree must divide 4, the GPUs there are, got 3; "
            "use ulysses_degree=4 ring_degree=1",
        ),
        ({"num_gpus": 2}, "num_gpus must be the 4 ranks that were started, got 2; use num_gpus=4"),
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
    monkeypatch.setattr(groups_module, "_gathered", lambda mine: locals_)
    assert ranks_per_host() == per_host


def test_ranks_that_nobody_started_cannot_be_joined() -> None:
    with pytest.raises(ConfigError, match="none were; start this program with torchrun, or call"):
        init_parallel(device_type="cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank_timeout": 0}, r"rank_timeout must be a number of seconds .*, got 0; leave it out"),
        ({"rank_timeout": -5}, r"rank_timeout must be .* from 1 to 1000000, got -5;"),
        ({"rank_timeout": "x"}, r"rank_timeout must be .*, got 'x';"),
        ({"rank_timeout": True}, r"rank_timeout must be .*, got True;"),
        ({"rank_timeout": float("nan")}, r"rank_timeout must be .*, got nan;"),
        ({"rank_timeout": float("inf")}, r"rank_timeout must be .*, got inf;"),
        ({"ulysses_degree": "2"}, r"ulysses_degree must be None or an integer >= 1, got '2'; lea"),
        ({"ulysses_degree": 2.0}, r"ulysses_degree must be None or an integer >= 1, got 2.0;"),
        ({"num_gpus": True}, r"num_gpus must be None or an integer >= 1, got True;"),
        ({"num_heads": 0}, r"num_heads must be None or an integer >= 1, got 0;"),
        ({"cfg_parallel": "yes"}, r"cfg_parallel must be True or False, got 'yes'"),
        ({"device_type": ""}, r"device_type must be cuda or cpu where several ranks run, got ''"),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_kind_is_refused_before_the_world_is_joined(
    given, message, monkeypatch
) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(groups_module, "init_world", lambda *_, **__: pytest.fail("joined"))
    with pytest.raises(ConfigError, match=message):
        init_parallel(**{"device_type": "cpu", **given})


def test_a_world_that_was_joined_for_the_groups_is_left_with_them(monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    assert init_parallel(device_type="cpu").owns_world
    assert dist.is_initialized()
    leave_parallel()
    assert parallel_groups() is None
    assert not dist.is_initialized()


def test_groups_whose_world_has_ended_can_be_left() -> None:
    set_parallel_groups(SimpleNamespace(owns_world=True))
    leave_parallel()
    assert parallel_groups() is None
    leave_parallel()
    assert parallel_groups() is None


def test_devices_without_an_exchange_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_type must be cuda or cpu .*, got 'mps'"):
        join_world("mps")


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank: 2)
    monkeypatch.setattr(groups_module.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="got local rank 2 on a host with 2 GPUs; start fewer"):
        join_world("cuda")


def test_a_process_on_its_own_leads() -> None:
    assert is_main_rank()
