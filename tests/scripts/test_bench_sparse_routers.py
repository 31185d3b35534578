"""The benchmark of routers, `skip_below` and a peer of Sol-Attn, on a case that takes no time."""

import csv
import importlib
import sys
import types

import pytest
import torch


@pytest.fixture
def routers(bench, monkeypatch):
    module = bench("sparse_routers")
    harness = bench("_harness")
    monkeypatch.setattr(harness, "interleave", lambda runs, **_: {key: [2.0] for key in runs})
    monkeypatch.setattr(module, "SOL", {"15 % of blocks": module.SOL["15 % of blocks"]})
    monkeypatch.setattr(module, "BELOW", (20.0,))
    return module


def run(folder):
    words = ["sparse_routers", "--commit", "x", "--smoke", "--rounds", "1", "--out", str(folder)]
    return importlib.import_module("run").main(words)


def test_rows_tell_what_routers_cost_and_what_is_left_out(routers, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)  # not installed
    assert run(tmp_path) == 0
    with (tmp_path / "sparse_routers.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    plain, pooled = (
        float(rows[f"sol, 15 % of blocks{tail}"]["error_to_dense"]) for tail in ("", ", tail")
    )
    assert 0 < pooled < plain
    low = rows["vsa, reference, skip_below 20 dB"]
    assert 0 < float(low["skipped"]) < 1
    assert float(low["over_plain"]) == 1
    assert 0 < float(low["relative_error"]) < routers.SKIP_BOUND
    parts, both = ("pooling", "scores"), rows["subblock: both"]
    shares = [float(rows[f"subblock: {part}"]["share_of_layer"]) for part in parts]
    assert float(both["share_of_layer"]) == pytest.approx(sum(shares), abs=1e-3)
    assert 0 < float(both["share_of_layer"]) < 1
    assert not any(name.startswith(routers.PEER) for name in rows)


def test_the_peer_is_measured_where_its_kernel_runs(routers, bench_of, monkeypatch):
    def dense(q, k, v, **given):
        assert given.pop("tail") in (True, False)
        assert given in routers.PEERS.values()
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    package = types.SimpleNamespace(sol_attn=dense, sol_attn_is_available=lambda device: True)
    run = bench_of("sparse_routers")
    monkeypatch.setitem(sys.modules, "comfy_kitchen", package)
    monkeypatch.setattr(routers, "DEVICE", "cuda")
    monkeypatch.setattr(routers, "SOL", {})
    case = routers.SMOKE[0]
    qkv = case.video()
    found = routers.Found(bench=run, case=case, qkv=qkv, exact=routers.sample(qkv))
    routers.add_sol(found, case, qkv)
    assert set(found.runs) == {
        f"comfy-kitchen, {name}{tail}" for name in routers.PEERS for tail in ("", ", tail")
    }
    assert max(found.to_dense.values()) < 1e-2
