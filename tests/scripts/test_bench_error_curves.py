"""The benchmark of error against time, on a case that takes no time, and its picture."""

import csv
import importlib
import math

import pytest


@pytest.fixture
def curves(bench, monkeypatch):
    module, harness = bench("error_curves"), bench("_harness")
    methods = {name: module.METHODS[name] for name in ("top-k", "svg2")}
    monkeypatch.setattr(module, "METHODS", methods)
    monkeypatch.setattr(harness, "interleave", lambda runs, **_: {key: [2.0] for key in runs})
    return module


def run(folder):
    arguments = ["error_curves", "--commit", "x", "--smoke", "--out", str(folder)]
    return importlib.import_module("run").main(arguments)


def test_rows_tell_the_error_of_every_method_without_and_with_its_tail(
    curves, monkeypatch, tmp_path
):
    assert run(tmp_path) == 0
    with (tmp_path / "error_curves.csv").open() as file:
        rows = {(row["method"], row["tail"]): row for row in csv.DictReader(file)}
    assert set(rows) == {(m, tail) for m in curves.METHODS for tail in ("none", "pooled")}
    for method in curves.METHODS:
        plain, pooled = (rows[method, tail] for tail in ("none", "pooled"))
        assert 0 < float(plain["density"]) < 1
        # Both took the same time.
        share = float(pooled["error_to_dense"]) / float(plain["error_to_dense"])
        assert share < 1
        assert float(pooled["error_at_equal_time"]) == pytest.approx(share, rel=1e-2)
        assert plain["error_at_equal_time"] == "nan"


def test_a_kernel_that_is_wrong_is_told_and_not_timed(curves, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(curves, "BOUND", -1.0)
    assert run(tmp_path) == 1
    assert "WRONG top-k topk_ratio=0.05: relative error" in capsys.readouterr().out
    assert not (tmp_path / "error_curves.csv").exists()


def test_the_error_at_a_time_lies_on_the_lines_between_the_best_settings(curves):
    curve = [(4.0, 0.25), (1.0, 1.0), (2.0, 2.0), (16.0, 0.0625)]
    assert curves.error_at(curve, 4.0) == pytest.approx(0.25)
    assert curves.error_at(curve, 2.0) == pytest.approx(0.5)  # not the setting that is beaten
    assert curves.error_at(curve, 100.0) == 0.0625
    assert math.isnan(curves.error_at(curve, 0.5))
    assert math.isnan(curves.error_at([], 1.0))


def rows_file(folder):
    text = "date,gpu,commit,case,method,tail,median_ms,error_to_dense\n"
    for commit in ("old", "new"):
        text += f"d,H,{commit},wan,dense,none,9,1e-3\n"
        for tail, error in (("none", 0.5), ("pooled", 0.2)):
            text += f"d,H,{commit},wan,vsa,{tail},2,{error}\nd,H,{commit},wan,vsa,{tail},4,0.1\n"
    path = folder / "rows.csv"
    path.write_text(text)
    return path


def test_the_rows_of_the_last_commit_are_drawn(curves, tmp_path):
    plot, path = importlib.import_module("plot_error_curves"), rows_file(tmp_path)
    rows = plot.read_rows(path, "wan")
    assert {row["commit"] for row in rows} == {"new"}
    with pytest.raises(SystemExit, match="must hold rows of a case with 'hunyuan' in its name"):
        plot.read_rows(path, "hunyuan")
    with pytest.raises(SystemExit, match=r"must exist; scripts/bench/error_curves\.py writes it"):
        plot.read_rows(tmp_path / "none.csv", "wan")
    pytest.importorskip("matplotlib")
    plot.draw(rows, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()
