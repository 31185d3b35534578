"""The benchmark of V-MoBA: a run on a tiny case, and what it refuses."""

import csv
import math

import pytest
import torch


def test_a_smoke_run_writes_a_row_per_contender(run_bench, tmp_path):
    result = run_bench("vmoba", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "vmoba.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == ["vmoba layer", "sdpa dense"]
    assert all(float(row["relative_error"]) < 1e-5 for row in rows)
    assert [float(row["density"]) for row in rows] == [0.375, 1.0]  # 3 of 8 chunks
    assert float(rows[0]["union"]) > 1.0
    assert "left out: fastvideo-kernel" in result.out


def test_a_wrong_output_is_named_and_not_timed(bench, bench_of, monkeypatch, capsys, tmp_path):
    vmoba = bench("vmoba")
    monkeypatch.setattr(vmoba, "attend_choice", lambda call, *_: torch.zeros_like(call.query))
    run = bench_of("vmoba")
    vmoba.measure(vmoba.SMOKE[0], run)
    assert run.wrong == ["vmoba layer"]
    with (tmp_path / "vmoba.csv").open() as file:
        assert [row["contender"] for row in csv.DictReader(file)] == ["sdpa dense"]
    assert "WRONG vmoba layer: relative error 1.0" in capsys.readouterr().out


def test_the_cases_keep_about_a_quarter_of_the_chunks(bench):
    for case in bench("vmoba").CASES:
        edges = zip(case.grid, case.chunk, strict=True)
        chunks = math.prod(size // edge for size, edge in edges)
        assert case.topk / chunks == pytest.approx(0.25, abs=0.04)
