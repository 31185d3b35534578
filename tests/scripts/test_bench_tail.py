"""The benchmark of the pooled tail, on a case that takes no time."""

import csv
import importlib

import pytest


@pytest.fixture
def tail(bench, monkeypatch):
    harness = bench("_harness")
    monkeypatch.setattr(harness, "interleave", lambda runs, **_: {key: [1.0] for key in runs})
    return bench("tail")


@pytest.mark.slow
def test_a_tail_brings_every_method_nearer_to_dense_attention(tail, tmp_path):
    arguments = ["tail", "--commit", "x", "--smoke", "--rounds", "1", "--out", str(tmp_path)]
    assert importlib.import_module("run").main(arguments) == 0
    with (tmp_path / "tail.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    for name in tail.LAYERS:
        without, pooled = (
            float(rows[label]["error_to_dense"]) for label in (name, f"{name}, tail")
        )
        assert pooled < without or without < 1e-2  # a window that covers the grid


def test_what_is_wrong_is_told_and_not_timed(tail, monkeypatch, tmp_path, capsys):
    arguments = ["tail", "--commit", "x", "--smoke", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(tail, "LAYERS", {})
    monkeypatch.setattr(tail, "expected_rows", lambda qkv, plan, rows, **_: qkv.query[0, rows, 0])
    assert importlib.import_module("run").main(arguments) == 1
    assert "WRONG blocks of 64: relative error" in capsys.readouterr().out
