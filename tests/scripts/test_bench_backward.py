"""The benchmark of the backward pass: a run on a tiny case."""

import csv


def test_a_smoke_run_checks_gradients_and_writes_a_row_per_direction(run_bench, tmp_path) -> None:
    result = run_bench("backward", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "backward.csv").open() as file:
        rows = list(csv.DictReader(file))
    engine = {f"engine {blocks}" for blocks in ("dense", "128x128", "64x64")}
    for kind, factor in (("forward", 4), ("backward", 10)):
        found = {row["contender"]: row for row in rows if row["benchmark"] == f"backward: {kind}"}
        assert set(found) == {*engine, "sdpa dense"}
        assert float(found["engine dense"]["flop"]) == factor * 2 * 300**2 * 32
        assert all(0 < float(row["relative_error"]) < 1e-2 for row in found.values())


def test_what_errs_too_much_is_not_timed(run_bench, bench, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(bench("backward"), "errors_of", lambda *_: (0.5, 2.0))
    result = run_bench("backward", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 1
    assert "WRONG engine dense: error 5.00e-01, 2.00 of what is allowed" in result.out
    assert not (tmp_path / "backward.csv").exists()
