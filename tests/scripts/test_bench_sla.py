"""The benchmark of Sparse-Linear Attention: a run on a tiny case, and what it refuses."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def sla(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("sla")
    # As on a machine without a GPU, wherever the tests run.
    for name in ("_harness", "sla"):
        monkeypatch.setattr(importlib.import_module(name), "DEVICE", "cpu")
    return module


def test_a_smoke_run_writes_a_row_per_contender(tmp_path):
    command = [sys.executable, str(BENCH / "sla.py"), "--commit", "c0ffee", "--smoke"]
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
    assert "left out: thu-ml/SLA" in result.stdout


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
