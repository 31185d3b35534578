"""The benchmark of `dense_above`: a run on tiny cases."""

import csv

import pytest


@pytest.mark.slow
def test_a_smoke_run_writes_a_row_per_layer(run_bench, tmp_path):
    options = ("--rounds", "1", "--vmoba-copies", "0", "--out", tmp_path)
    result = run_bench("dense_above", "--smoke", *options)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "dense_above.csv").open() as file:
        rows = {(row["case"], row["contender"]): row for row in csv.DictReader(file)}
    methods = ("vsa 0.5", "svg2", "vmoba temporal topk", "vmoba temporal topk, copies 0")
    off = [f"{name}, dense_above=1.0" for name in methods[:3]]
    auto = ("auto", "auto, a generation")  # beside methods whose steps differ
    names = (*auto, *methods, *off, "vmoba temporal topk, dense_above=1.0, copies 0")
    assert set(rows) == {("smoke, random", name) for name in names}
    for name, decided in (("vsa 0.5", "settings"), ("svg2", "data")):
        row = rows["smoke, random", name]
        dense, density = float(row["dense_calls"]), float(row["density"])
        if decided == "settings":
            assert (dense, density) == (1.0, 1.0)
            assert float(row["relative_error"]) < 1e-5
        else:  # the steps that try the method are not dense
            assert 0.5 < dense < 1.0
            assert density < 1.0
        plain = rows["smoke, random", f"{name}, dense_above=1.0"]
        assert float(plain["density"]) < 1.0
        assert float(plain["dense_calls"]) == 0.0
