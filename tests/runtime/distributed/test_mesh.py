"""Degrees from flags, and which ranks form which group."""

import itertools

import pytest

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.distributed.mesh import Mesh, Place, plan_mesh


def test_the_groups_of_eight_ranks_are_these():
    mesh = Mesh(cfg=2, ulysses=2, ring=2)
    assert mesh.ulysses_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.ring_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.sequence_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.cfg_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.place(6) == Place(cfg=1, ring=1, ulysses=0)
    assert str(mesh) == "2 CFG x 2 ring x 2 Ulysses = 8 GPUs"


SIZES = list(itertools.product((1, 2), (1, 2, 3, 4), (1, 2, 3)))


@pytest.mark.parametrize(("cfg", "ulysses", "ring"), SIZES)
def test_every_rank_is_in_one_group_of_each_kind(cfg, ulysses, ring):
    mesh = Mesh(cfg=cfg, ulysses=ulysses, ring=ring)
    kinds = {
        "ulysses": (mesh.ulysses_groups(), ulysses),
        "ring": (mesh.ring_groups(), ring),
        "cfg": (mesh.cfg_groups(), cfg),
        "sequence": (mesh.sequence_groups(), ulysses * ring),
    }
    for kind, (groups, size) in kinds.items():
        assert {len(group) for group in groups} == {size}
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
        for group, (position, rank) in ((g, x) for g in groups for x in enumerate(g)):
            if kind != "sequence":
                assert getattr(mesh.place(rank), kind) == position, (kind, group)


@pytest.mark.parametrize(("cfg", "ulysses", "ring"), SIZES)
def test_groups_cross_in_one_rank(cfg, ulysses, ring):
    mesh = Mesh(cfg=cfg, ulysses=ulysses, ring=ring)
    for first, second in itertools.product(mesh.ulysses_groups(), mesh.ring_groups()):
        assert len(set(first) & set(second)) <= 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, Mesh()),
        ({"num_gpus": 4}, Mesh(ulysses=4)),
        ({"num_gpus": 4, "ulysses_degree": 2}, Mesh(ulysses=2, ring=2)),
        ({"num_gpus": 4, "ring_degree": 4}, Mesh(ring=4)),
        ({"num_gpus": 4, "cfg_parallel": True}, Mesh(cfg=2, ulysses=2)),
        ({"sp_degree": 3}, Mesh(ulysses=3)),
        ({"ulysses_degree": 2, "ring_degree": 3}, Mesh(ulysses=2, ring=3)),
        ({"world_size": 6, "ring_degree": 3}, Mesh(ulysses=2, ring=3)),
        ({"world_size": 6, "num_gpus": 6}, Mesh(ulysses=6)),
        ({"num_gpus": 8, "num_heads": 5}, Mesh(ulysses=4, ring=2)),
        ({"num_gpus": 5, "num_heads": 12}, Mesh(ulysses=5)),
        ({"num_gpus": 7, "num_heads": 5}, Mesh(ring=7)),
        ({"world_size": 16, "gpus_per_host": 8}, Mesh(ulysses=8, ring=2)),
        ({"world_size": 16, "gpus_per_host": 8, "ulysses_degree": 16}, Mesh(ulysses=16)),
        ({"world_size": 6, "gpus_per_host": 3, "cfg_parallel": True}, Mesh(cfg=2, ulysses=3)),
    ],
    ids=str,
)
def test_open_degrees_follow_from_the_others(flags, expected):
    assert plan_mesh(**flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_gpus": 0}, r"--num-gpus must be an integer >= 1, got 0"),
        (
            {"num_gpus": 4, "ulysses_degree": 3},
            r"--ulysses-degree must divide 4, the GPUs there are, got 3; use --ulysses-degree 4 "
            r"--ring-degree 1, or --num-gpus 3 --ulysses-degree 3 --ring-degree 1$",
        ),
        (
            {"num_gpus": 8, "ring_degree": 3, "cfg_parallel": True},
            r"--ring-degree must divide 4 \(8 GPUs / 2 CFG branches\), got 3; use --ulysses-degree "
            r"1 --ring-degree 4, or --num-gpus 6 --ulysses-degree 1 --ring-degree 3$",
        ),
        (
            {"num_gpus": 8, "ulysses_degree": 2, "ring_degree": 2},
            r"x --ring-degree must be 8, the GPUs there are, got 2 x 2 = 4; use --ulysses-degree "
            r"4 --ring-degree 2, or --num-gpus 4 --ulysses-degree 2 --ring-degree 2$",
        ),
        (
            {"num_gpus": 1, "ulysses_degree": 2},
            r"got 2; use --ulysses-degree 1 --ring-degree 1, or --num-gpus 2 --ulysses-degree 2 "
            r"--ring-degree 1$",
        ),
        (
            {"num_gpus": 1, "ulysses_degree": 2, "gpus_per_host": 1},
            r"got 2; use --ulysses-degree 1 --ring-degree 1$",
        ),
        (
            {"num_gpus": 5, "ulysses_degree": 5, "num_heads": 4},
            r"got 5; use --ulysses-degree 1 --ring-degree 5, or --num-gpus 4 --ulysses-degree 4 "
            r"--ring-degree 1$",
        ),
        (
            {"num_gpus": 4, "sp_degree": 2},
            r"--sp-degree must be 4, the GPUs there are, got 2; use --sp-degree 4$",
        ),
        (
            {"num_gpus": 4, "sp_degree": 4, "cfg_parallel": True},
            r"--sp-degree must be 2 \(4 GPUs / 2 CFG branches\), got 4; use --sp-degree 2$",
        ),
        (
            {"num_gpus": 3, "cfg_parallel": True},
            r"--num-gpus must be even with --cfg-parallel, .* got 3; use --num-gpus 2$",
        ),
        (
            {"num_gpus": 1, "cfg_parallel": True},
            r"got 1; use --num-gpus 2$",
        ),
        (
            {"num_gpus": 8, "ulysses_degree": 8, "num_heads": 6},
            r"--ulysses-degree must be at most 6, the heads of a layer, .* got 8; use "
            r"--ulysses-degree 4 --ring-degree 2, or --num-gpus 6 --ulysses-degree 6 "
            r"--ring-degree 1$",
        ),
        (
            {"num_gpus": 8, "ring_degree": 1, "num_heads": 6},
            r"--ulysses-degree must be at most 6, .* got 8 \(8 / ring 1\); use --ulysses-degree 4",
        ),
        (
            {"world_size": 12, "gpus_per_host": 4, "ulysses_degree": 3},
            r"--ulysses-degree must divide the 4 GPUs of a host .* got 3; use --ulysses-degree 4 "
            r"--ring-degree 3$",
        ),
        (
            {"world_size": 4, "num_gpus": 8},
            r"--num-gpus must be the 4 ranks that were started, got 8; use --num-gpus 4 or leave",
        ),
        (
            {"num_gpus": 8, "gpus_per_host": 4},
            r"--num-gpus must be at most 4, the GPUs of this host, got 8; use --num-gpus 4, or",
        ),
        (
            {"ulysses_degree": 4, "ring_degree": 2, "gpus_per_host": 4},
            r"--num-gpus must be at most 4, the GPUs of this host, got 8",
        ),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_are_one_error_with_the_arithmetic_and_a_remedy(flags, message):
    with pytest.raises(ConfigError, match=message):
        plan_mesh(**flags)


def arguments(flags):
    """Return what a text of flags with numbers says, as arguments."""
    words = flags.split()
    names = [flag.removeprefix("--").replace("-", "_") for flag in words[::2]]
    return dict(zip(names, map(int, words[1::2]), strict=True))


def test_every_remedy_is_accepted():
    refused = resized = 0
    for total, heads, ulysses, ring in itertools.product(
        range(1, 9), (1, 3, 8), (None, 1, 2, 3, 5), (None, 1, 2, 3)
    ):
        flags = {"num_gpus": total, "num_heads": heads}
        try:
            mesh = plan_mesh(ulysses_degree=ulysses, ring_degree=ring, **flags)
        except ConfigError as error:
            refused += 1
            first, *others = str(error).split("; use ")[1].split(", or ")
            mesh = plan_mesh(**flags, **arguments(first))
            for other in others:
                resized += 1
                given = arguments(other)
                assert plan_mesh(num_heads=heads, **given).world_size == given["num_gpus"] != total
        assert mesh.world_size == total
        assert mesh.ulysses <= heads
    assert refused > resized > 100


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ring": 0}, r"ring must be an integer >= 1, got 0"),
        ({"ulysses": True}, r"ulysses must be an integer >= 1, got True"),
        ({"cfg": 3}, r"cfg must be 1 or 2, the branches there are, got 3"),
    ],
)
def test_a_mesh_of_no_size_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Mesh(**sizes)


def test_a_rank_outside_the_mesh_is_refused():
    with pytest.raises(ConfigError, match=r"rank must be in \[0, 3\], got 4"):
        Mesh(ulysses=2, ring=2).place(4)
