"""The benchmark of V-MoBA: a run on a tiny case, and what it refuses."""

import csv
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def test_a_smoke_run_writes_a_row_per_contender(tmp_path):
    command = [sys.executable, str(BENCH / "vmoba.py"), "--commit", "c0ffee", "--smoke"]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(BENCH.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [*command, "--rounds", "1", "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    with (tmp_path / "vmoba.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == ["vmoba layer", "sdpa dense"]
    assert all(float(row["relative_error"]) < 1e-5 for row in rows)
    assert [float(row["density"]) for row in rows] == [0.375, 1.0]  # 3 of 8 chunks
    assert float(rows[0]["union"]) > 1.0
    assert "left out: fastvideo-kernel" in result.stdout


def test_a_wrong_output_is_named_and_not_timed(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH))
    vmoba = importlib.import_module("vmoba")
    for name in ("_harness", "vmoba"):
        monkeypatch.setattr(importlib.import_module(name), "DEVICE", "cpu")
    monkeypatch.setattr(
        vmoba, "attend_chunks", lambda call: (torch.zeros_like(call.query), torch.zeros(()))
    )
    rows, wrong = vmoba.measure(vmoba.SMOKE[0], commit="c0ffee", rounds=1)
    assert wrong == ["smoke vmoba layer"]
    assert [row.contender for row in rows] == ["sdpa dense"]
    assert "WRONG smoke vmoba layer: relative error 1.0" in capsys.readouterr().out


def test_the_cases_keep_about_a_quarter_of_the_chunks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    vmoba = importlib.import_module("vmoba")
    for case in vmoba.CASES:
        edges = zip(case.grid, case.chunk, strict=True)
        chunks = math.prod(size // edge for size, edge in edges)
        assert case.topk / chunks == pytest.approx(0.25, abs=0.04)
