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


def test_a_wrong_output_is_named_and_not_timed(sla, monkeypatch, capsys):
    case = sla.SMOKE[0]
    contenders = sla.Setting.contenders

    def tampered(self):
        for name, contender in contenders(self):
            if name == "sla layer":
                out = contender.run() * 1.1
                contender = sla.Contender(branch="all", run=lambda out=out: out, version="")
            yield name, contender

    monkeypatch.setattr(sla.Setting, "contenders", tampered)
    rows, wrong = sla.measure(case, 1, "c0ffee")
    assert wrong == ["sla layer"]
    assert "sla layer" not in [row.contender for row in rows]
    assert "WRONG sla layer: relative error 1.00e-01" in capsys.readouterr().out


def test_rows_whose_selection_is_too_close_are_left_out(sla):
    setting = sla.Setting(sla.SMOKE[0])
    query, key, value = setting.qkv
    setting.qkv = (torch.zeros_like(query), key, value)
    expected = sla.Expected(setting)
    for dense, sparse in zip(expected._outputs["dense"], expected._outputs["all"], strict=True):
        assert dense.isfinite().all()
        assert sparse.isnan().all()


def test_backward_passes_are_timed_where_their_gradients_agree(sla, monkeypatch, capsys):
    runs = sla.backward_runs

    def with_another(setting):
        for name, version, run, heads_first in runs(setting):
            yield name, version, run, heads_first
            yield "wrong", "", lambda run=run: tuple(2 * x for x in run()), heads_first

    monkeypatch.setattr(sla, "backward_runs", with_another)
    (row,), wrong = sla.measure_backward(sla.SMOKE[0], 1, "c0ffee")
    assert (row.contender, row.benchmark, wrong) == ("sla layer", "sla backward", ["wrong"])
    assert "WRONG wrong: 1.00e+00 from the layer's gradients" in capsys.readouterr().out
