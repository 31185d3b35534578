"""The benchmark of Sparse-Linear Attention: a run on a tiny case, and what it refuses."""

import csv

import pytest
import torch


@pytest.fixture
def sla(bench):
    return bench("sla")


def test_a_smoke_run_writes_a_row_per_contender(run_bench, tmp_path):
    result = run_bench("sla", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "sla.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == [
        "sdpa dense",
        "sla layer",
        "sla layer, no projection",
        "sla layer, unselected",
    ]
    assert {row["commit"] for row in rows} == {"c0ffee"}
    assert all(float(row["relative_error"]) < 1e-5 for row in rows)
    # 585 tokens are 10 key blocks, of which 3 are kept.
    assert [float(row["density"]) for row in rows] == [1.0, 0.3, 0.3, 0.3]
    assert "left out: thu-ml/SLA" in result.out


def test_a_wrong_output_is_named_and_not_timed(sla, bench_of, monkeypatch, capsys, tmp_path):
    case = sla.SMOKE[0]
    contenders = sla.Setting.contenders

    def tampered(self):
        for name, contender in contenders(self):
            if name == "sla layer":
                out = contender.run() * 1.1
                contender = sla.Contender(branch="all", run=lambda out=out: out, version="")
            yield name, contender

    monkeypatch.setattr(sla.Setting, "contenders", tampered)
    run = bench_of("sla", backward=False)
    sla.measure(case, run)
    assert run.wrong == ["sla layer"]
    with (tmp_path / "sla.csv").open() as file:
        assert "sla layer" not in [row["contender"] for row in csv.DictReader(file)]
    assert "WRONG sla layer: relative error 1.00e-01" in capsys.readouterr().out


def test_rows_whose_selection_is_too_close_are_left_out(sla):
    setting = sla.Setting(sla.SMOKE[0])
    query, key, value = setting.qkv
    setting.qkv = (torch.zeros_like(query), key, value)
    expected = sla.Expected(setting)
    for dense, sparse in zip(expected._outputs["dense"], expected._outputs["all"], strict=True):
        assert dense.isfinite().all()
        assert sparse.isnan().all()


def test_backward_passes_are_timed_where_their_gradients_agree(
    sla, bench_of, monkeypatch, capsys, tmp_path
):
    runs = sla.backward_runs

    def with_another(setting):
        for name, version, run, heads_first in runs(setting):
            yield name, version, run, heads_first
            yield "wrong", "", lambda run=run: tuple(2 * x for x in run()), heads_first

    monkeypatch.setattr(sla, "backward_runs", with_another)
    run = bench_of("sla", backward=True)
    sla.measure(sla.SMOKE[0], run)
    with (tmp_path / "sla.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["contender"], row["benchmark"]) == ("sla layer", "sla backward")
    assert run.wrong == ["wrong"]
    assert "WRONG wrong: relative error 1.00e+00" in capsys.readouterr().out
