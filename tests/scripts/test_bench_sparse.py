"""The benchmark of sparse attention: its references, its rows, and a run on tiny cases."""

import csv
import importlib
import math
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch


@pytest.fixture
def sparse(bench):
    return bench("sparse")


@pytest.fixture
def cases(sparse):
    return importlib.import_module("_sparse_cases")


@pytest.fixture
def contenders(sparse):
    return importlib.import_module("_sparse_contenders")


def ragged(cases, **changes):
    return replace(next(c for c in cases.SMOKE if c.name == "smoke ragged"), **changes)


def dense_output(case, inputs) -> torch.Tensor:
    q, k, v = (x[0].double().transpose(0, 1) for x in inputs.qkv)
    return ((q @ k.mT * case.scale).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.slow
def test_a_smoke_run_checks_and_writes_a_row_per_contender_and_piece(run_bench, tmp_path) -> None:
    result = run_bench("sparse", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "sparse.csv").open() as file:
        rows = list(csv.DictReader(file))
    of_case = {row["case"]: set() for row in rows}
    for row in rows:
        of_case[row["case"]].add(row["contender"])
        assert row["commit"] == "c0ffee"
        if row["benchmark"] == "sparse":
            assert float(row["relative_error"]) < 4e-3
    assert {"sta layer", "vsa layer, gate", "vsa operator"} <= of_case["smoke ragged"]
    assert {"sta flex_attention", "vsa flex_attention"} <= of_case["smoke whole"]
    pieces = {"gather", "engine", "scatter", "pooling", "selection", "gate", "rest"}
    assert {f"vsa layer, gate: {piece}" for piece in pieces} <= of_case["smoke ragged"]
    assert {"sta layer", "vsa layer"} <= of_case["smoke text"]
    assert "vsa layer, gate" not in of_case["smoke text"]
    assert "left out of smoke text: vsa layer, gate, takes no text" in result.out


def test_full_size_needs_a_gpu(run_bench) -> None:
    result = run_bench("sparse")
    assert result.code == 2
    assert "needs a GPU; --smoke runs tiny cases anywhere" in result.err


def test_the_cases_are_the_grids_of_the_models(cases) -> None:
    found = {(case.grid, case.heads, case.text) for case in cases.CASES if case.sta and case.vsa}
    wan = product([(21, 45, 80), (21, 30, 52), (18, 48, 80)], [40, 12], [0])
    assert found == {((30, 48, 80), 24, 0), ((30, 48, 80), 24, 256), *wan}
    (whole,) = (case for case in cases.CASES if not case.sta)
    assert (whole.tokens, whole.kept) == (115_200, 180)


@pytest.mark.parametrize("text", [0, 3])
def test_the_windows_of_the_reference_are_those_of_the_definition(cases, text) -> None:
    case = ragged(cases, grid=(3, 9, 5), text=text, window=(1, 3, 2))
    keep = cases.sta_keep(case, torch.arange(case.tokens))[:, 0]
    places = list(product(*map(range, case.grid)))
    for i, j in product(range(0, case.tokens, 7), range(case.tokens)):
        wanted = True
        if max(i, j) < case.video:
            # Along time tiles of their own; along height 3 of 5; a width of 2 means 3, so all.
            (t, h, _), (u, g, _) = places[i], places[j]
            centre = min(max(h // 2, 1), 3)
            wanted = t // 2 == u // 2 and abs(g // 2 - centre) <= 1
        assert bool(keep[i, j]) == wanted, (i, j)


def test_the_reference_of_a_full_window_and_of_no_sparsity_is_dense_attention(cases) -> None:
    case = ragged(cases, text=4, window=(9, 9, 9), sparsity=0.0)
    inputs = cases.make_inputs(case, "cpu")
    expected = cases.expect(case, inputs)
    dense = dense_output(case, inputs)[expected.rows]
    assert (expected.rows >= case.video).any()
    for kind in ("dense", "sta", "vsa"):
        assert expected.error(kind, dense) < 1e-5, kind
    assert expected.clear.all()
    assert expected.error("vsa gate", dense) > 0.1


def test_padded_pairs_count_every_tile_as_full(cases) -> None:
    case = ragged(cases, grid=(5, 4, 4), text=3)
    assert case.padded_pairs((4, 4, 4), 1) == 128 * 64 + 2 * 128 * 3 + 9
    assert case.kept == 1
    assert replace(case, grid=(8, 8, 12), sparsity=0.7).kept == 4


def test_a_contender_that_is_wrong_or_fails_is_not_timed(
    sparse, cases, contenders, bench_of, capsys
) -> None:
    case = ragged(cases)
    inputs = cases.make_inputs(case, "cpu")
    expected = cases.expect(case, inputs)
    dense = dense_output(case, inputs).unsqueeze(0)

    def contender(run):
        return contenders.Contender(
            name="x", kind="dense", run=run, take=contenders.in_place, version=""
        )

    def fails() -> torch.Tensor:
        raise RuntimeError("no kernel image")

    made = {
        "right": contender(lambda: dense),
        "scaled": contender(lambda: dense * 1.01),
        "fails": contender(fails),
        "nan": contender(lambda: dense * math.nan),
    }
    run = bench_of("sparse")
    right, errors = sparse.check(made, expected, run)
    assert list(right) == ["right"]
    assert run.wrong == ["scaled", "fails", "nan"]
    assert errors["scaled"] == pytest.approx(0.01, rel=1e-3)
    assert "no kernel image" in capsys.readouterr().out


def test_rows_give_speed_ups_and_rates_on_kept_and_padded_pairs(
    sparse, cases, contenders, bench_of
) -> None:
    case = ragged(cases, grid=(5, 4, 4), heads=1, head_size=64, vsa_tile=(4, 4, 4))
    made = {
        name: contenders.Contender(
            name=name, kind=kind, run=lambda: None, take=contenders.in_place, version="v 1"
        )
        for name, kind in (("fa3 dense", "dense"), ("vsa layer", "vsa"))
    }
    run = bench_of("sparse")
    dense, layer = sparse.write(
        run,
        case,
        made,
        {"fa3 dense": [3.0, 4.0, 5.0], "vsa layer": [1.0, 1.0, 1.0]},
        {"dense": 1.0, "vsa": 0.5},
        errors={"fa3 dense": 1e-3, "vsa layer": 2e-3},
        memory={"vsa layer": 0.07},
    )
    pieces = {"engine": [0.75], "rest": [0.25]}
    engine, rest = sparse.write_pieces(run, case, "vsa layer", pieces, 0.5)
    assert (dense["speedup_over_fa3"], layer["speedup_over_fa3"]) == (1.0, 4.0)
    assert dense["flop"] == 4 * 64 * 80**2
    assert layer["flop"] == dense["flop"] / 2
    assert (layer["extra_memory_share"], layer["density"], layer["version"]) == (0.07, 0.5, "v 1")
    assert math.isnan(dense["extra_memory_share"])
    assert sparse._padding(case, "vsa", 0.5) == 128 * 64 / (0.5 * 80**2)
    assert (engine["contender"], engine["median_ms"]) == ("vsa layer: engine", 0.75)
    assert (rest["benchmark"], rest["density"]) == ("sparse pieces", 0.5)


def test_the_pieces_of_a_layer_add_up_to_its_time(sparse, cases, contenders) -> None:
    case = ragged(cases)
    setting = contenders.Setting(case=case, inputs=cases.make_inputs(case, "cpu"))
    layer = contenders.vsa_gated_layer(setting)
    with sparse.in_context(case):
        pieces = sparse.split(layer.run, 2)
    names = {"gather", "engine", "scatter", "pooling", "selection", "gate", "rest"}
    assert set(pieces) == names
    assert all(len(times) == 2 for times in pieces.values())
    assert all(min(times) > 0 for times in pieces.values())


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="FlexAttention of torch 2.9 takes no masks that read a tensor on a CPU",
)
def test_a_probe_says_why_a_contender_cannot_take_part(sparse, cases, bench_of) -> None:
    run = bench_of("sparse")
    assert sparse.probe("sta flex_attention", cases.SMOKE, run) is None
    assert sparse.probe("sta flex_attention", [ragged(cases)], run) == "needs whole tiles alone"


def test_a_package_that_is_missing_is_left_out(contenders, sparse, cases, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", None)
    case = ragged(cases)
    setting = contenders.Setting(case=case, inputs=cases.make_inputs(case, "cpu"))
    peers = importlib.import_module("_sparse_peers")
    makers = {"fine": peers.fastvideo_vsa_fine}
    ((name, made),) = contenders.make_contenders(setting, makers)
    assert name == "fine"
    assert isinstance(made, contenders.LeftOutError)
    assert "ModuleNotFoundError" in str(made)


def test_padded_tensors_hold_every_token_in_its_slot(contenders, cases) -> None:
    case = ragged(cases)
    setting = contenders.Setting(case=case, inputs=cases.make_inputs(case, "cpu"))
    tiled = setting.vsa
    q = tiled.padded[0]
    num = math.prod(cases.tiles_of(case.grid, case.vsa_tile))
    assert q.shape == (1, case.heads, num * 64, case.head_size)
    rows = torch.arange(case.tokens)
    assert torch.equal(tiled.take_padded(q, rows), setting.inputs.q[0])
    assert torch.equal(tiled.take(tiled.tensors[0], rows), setting.inputs.q[0])
    assert int((q != 0).any(-1).sum()) == case.heads * case.tokens
