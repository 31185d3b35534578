"""The benchmark of whole Wan forwards: which contenders run, and what is checked of them."""

import csv
import math
from types import SimpleNamespace

import pytest

from multimodal_gen.runtime.layers.attention.request import AttentionRole

pytest.importorskip("diffusers")


@pytest.fixture
def script(bench):
    return bench("wan_forward")


@pytest.fixture
def case(script):
    return next(case for case in script.CASES if "14B" in case.name)


def report(*entries, role=AttentionRole.SELF):
    """Return a report of one layer; an entry is (backend, density)."""
    made = [
        SimpleNamespace(selection=SimpleNamespace(backend=backend), density=density, calls=1)
        for backend, density in entries
    ]
    layer = SimpleNamespace(
        name="blocks.0.attn1", role=role, calls=len(made), entries=made, detours=()
    )
    return SimpleNamespace(layers=[layer])


@pytest.mark.slow
def test_a_smoke_run_times_the_contenders_asked_for(run_bench, tmp_path) -> None:
    names = ["stock native", "apply sliding_tile_attn", "apply video_sparse_attn"]
    options = ("--smoke", "--rounds", "1", "--out", tmp_path)
    result = run_bench("wan_forward", *options, "--contenders", ", ".join(names))
    assert result.code == 0, result.out + result.err
    with (tmp_path / "wan_forward.csv").open() as file:
        rows = list(csv.DictReader(file))
    wanted = [(f"smoke, {mode}", name) for mode in ("eager", "compiled") for name in names]
    assert [(row["case"], row["contender"]) for row in rows] == wanted
    assert "apply sliding_tile_attn at density 0.8343 in 2 layers" in result.out


def test_the_sparse_contenders_of_the_large_model_have_the_densities_asked_for(
    script, case
) -> None:
    assert case.grid == (21, 45, 80)
    for backend in script.SPARSE:
        least, most = script.expected_density(case, backend)
        assert 0 < least < most < 0.4
    least, most = script.expected_density(case, "video_sparse_attn")
    assert least < 144 / 1440 < most
    # 27 of 240 tiles; those at the far end are smaller.
    least, most = script.expected_density(case, "sliding_tile_attn")
    assert most - least == pytest.approx(2e-3)
    assert least == pytest.approx(27 / 240, rel=0.25)
    assert not least < 27 / 240 < most


def test_contenders_can_be_picked_by_name(script) -> None:
    contexts = script.contenders(model=None)
    assert list(script.pick(contexts, [])) == list(contexts)
    assert list(script.pick(contexts, ["apply auto", "stock native"])) == [
        "stock native",
        "apply auto",
    ]
    with pytest.raises(SystemExit, match=r"must be among stock native, .* got \['apply sta'\]"):
        script.pick(contexts, ["apply sta"])


def test_modes_must_be_known(run_bench) -> None:
    result = run_bench("wan_forward", "--modes", "fast")
    assert result.code == 2
    assert "--modes must be among eager, compiled" in result.err


@pytest.mark.parametrize(
    ("entries", "ran"),
    [
        ([("torch_sdpa", None)], "torch_sdpa"),
        ([("video_sparse_attn", 1.0)], "1.0"),
        ([("video_sparse_attn", None)], "None"),
    ],
)
def test_a_sparse_contender_that_ran_otherwise_stops_the_script(script, case, entries, ran) -> None:
    name = "apply video_sparse_attn"
    with pytest.raises(SystemExit, match=rf"video_sparse_attn at density 0\.060 to .*{ran}"):
        script.check_report(case, name, report(*entries))


def test_a_sparse_contender_that_ran_as_asked_is_reported(script, case, capsys) -> None:
    script.check_report(case, "apply video_sparse_attn", report(("video_sparse_attn", 0.1)))
    assert "at density 0.1000 in 1 layers" in capsys.readouterr().out


def test_layers_must_run_once_and_one_must_be_self_attention(script, case) -> None:
    with pytest.raises(SystemExit, match=r"apply auto did not run in \['blocks\.0\.attn1'\]"):
        script.check_report(case, "apply auto", report())
    cross = report(("torch_sdpa", None), role=AttentionRole.CROSS)
    with pytest.raises(SystemExit, match="has no self-attention"):
        script.check_report(case, "apply video_sparse_attn", cross)


def test_dense_contenders_have_no_density(script) -> None:
    contexts = script.contenders(model=None)
    sparse = [name for name in contexts if script.sparse_backend(name)]
    assert sparse == [f"apply {backend}" for backend in script.SPARSE]
    assert math.prod(script.SMOKE[0].grid) == script.SMOKE[0].tokens
