"""Groups built on a world of processes, and worlds made by torchrun."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.distributed.groups import (
    build_groups,
    init_world,
    parallel_groups,
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
