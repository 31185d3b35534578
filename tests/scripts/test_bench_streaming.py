"""The benchmark of streaming, on a model that takes no time."""

import csv
import importlib

import pytest


@pytest.fixture
def streaming(bench, monkeypatch):
    harness = bench("_harness")
    monkeypatch.setattr(harness, "interleave", lambda runs, **_: {key: [1.0] for key in runs})
    return bench("streaming")


def arguments(tmp_path):
    return ["streaming", "--commit", "x", "--smoke", "--rounds", "1", "--out", str(tmp_path)]


def test_every_way_to_keep_the_past_is_compared_and_timed(streaming, tmp_path):
    importlib.import_module("run").main(arguments(tmp_path))
    with (tmp_path / "streaming.csv").open() as file:
        rows = list(csv.DictReader(file))
    chunks = {row["contender"]: row for row in rows if "chunk 30" in row["case"]}
    assert set(chunks) == {
        "sdpa, clone-and-shift", "cache, auto", "cache, in pieces", "cache, windows in space",
        "cache, tall windows in space", "cache, 8 bits", "cache, 4 bits", "cache, 2 bits",
        "no self-attention",
    }  # fmt: skip
    assert all(float(row["frames_per_second"]) > 0 for row in chunks.values())
    errors = [float(chunks[f"cache, {bits} bits"]["relative_error"]) for bits in (8, 4, 2)]
    assert errors[0] < 1e-2
    assert errors == sorted(errors)
    (last,) = [row for row in rows if "chunk 1000" in row["case"]]
    assert last["contender"] == "cache, auto"


def test_what_is_wrong_is_told_and_not_timed(streaming, monkeypatch, tmp_path):
    attend = streaming.SlottedPast.attend

    def broken(past, layer, **options):
        run = attend(past, layer, **options)
        return lambda i, q, k, v: run(i, q, k, v) * (past.cache.size.bits == 16)

    monkeypatch.setattr(streaming.SlottedPast, "attend", broken)
    with pytest.raises(SystemExit, match="wrong, and not timed: cache, 8 bits"):
        importlib.import_module("run").main([*arguments(tmp_path), "--only", "one call"])
    with (tmp_path / "streaming.csv").open() as file:
        assert "cache, 8 bits" not in {row["contender"] for row in csv.DictReader(file)}
