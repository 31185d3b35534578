"""The benchmark of a training step: a run on a tiny model."""

import csv
import math

import pytest

pytest.importorskip("diffusers")


@pytest.mark.slow
def test_a_smoke_run_trains_every_contender(run_bench, tmp_path) -> None:
    result = run_bench("train_step", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "train_step.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    dense, sparse = rows.pop("stock native"), {n: r for n, r in rows.items() if n != "apply auto"}
    assert float(dense["relative_error"]) == 0
    assert float(rows["apply auto"]["relative_error"]) < 5e-2
    assert set(sparse) == {
        f"apply {name}" for name in ("sliding_tile_attn", "video_sparse_attn", "sla_attn")
    }
    assert all(0 < float(row["relative_error"]) < math.inf for row in sparse.values())
    assert float(dense["flop"]) == 18 * 2 * 1 * (7 * 2 * 26) ** 2 * 128
