"""The package's own table is what the rows of the benchmarks say, and reads those it writes."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from multimodal_gen.runtime.layers.attention.auto_table import (
    COMMITTED,
    CallShape,
    tables_as_json,
)

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def auto(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("auto")


def test_the_committed_table_is_made_of_the_rows(auto):
    made = tables_as_json(auto.tables_of(auto.read_rows()))
    assert made == json.loads(COMMITTED.read_text()), "run scripts/bench/run.py auto --table"


def test_rows_that_were_written_make_a_table(auto, monkeypatch, tmp_path):
    shapes = [CallShape.parse(t) for t in ("1x24x4x16", "2x24x4x16:keys=7:kv_heads=2:mask")]
    monkeypatch.setattr(auto, "SHAPES", shapes)
    monkeypatch.setattr(auto, "COMMITTED", tmp_path / "table.json")
    monkeypatch.setitem(auto.CAPABILITIES, "none", "9.0")
    monkeypatch.setattr("multimodal_gen.runtime.benchmark._EXACT_BOUNDS", {torch.bfloat16: 0.1})
    arguments = ["auto", "--commit", "abc", "--rounds", "1", "--table", "--out", str(tmp_path)]
    importlib.import_module("run").main(arguments)
    (table,) = json.loads((tmp_path / "table.json").read_text())["tables"]
    assert table["source"] == "scripts/bench/results/auto.csv at abc"
    assert [m["shape"] for m in table["measured"]] == [str(shape) for shape in shapes]
    for measured in table["measured"]:
        (timing,) = measured["timings"]
        assert timing["backend"] == "torch_sdpa"
        assert timing["device_ms"] > 0
        assert timing["host_ms"] is None


def test_what_the_last_run_of_a_shape_has_counts_with_its_least_times(auto):
    def row(commit: str, contender: str, ms: str) -> tuple[str, dict[str, str]]:
        known = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "host_ms": "0.05"}
        shape = "B1 H24 S512 D128 bf16 K512 KV24"
        found = {"commit": commit, "contender": contender, "median_ms": ms, "shape": shape}
        return "auto.csv", {**known, **found, "version": "fa3-fwd 0.0.3"}

    runs = {"a": ("torch_sdpa", "fa (fa3_fwd)"), "b": ("fa (fa3_fwd)", "sage_attn")}
    rows = [row(commit, name, "2") for commit, names in runs.items() for name in names]
    rows = [row("0", "fa (fa3_fwd)", "0.5"), *rows]  # a run that is too long ago
    rows[2][1].update(median_ms="1", host_ms="0.07")
    (table,) = auto.tables_of(rows)
    (measured,) = table.measured
    (timing,) = measured.timings
    assert (timing.backend, timing.variant) == ("fa", "fa3_fwd")
    assert (timing.device_ms, timing.host_ms) == (1.0, 0.05)
    assert dict(table.versions) == {"torch": "2.11.0", "triton": "3.6.0", "fa3-fwd": "0.0.3"}
