"""The benchmarks of whole layers: runs on a tiny case, what is refused, and peers on stand-ins."""

import csv
import dataclasses
import importlib
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError


@pytest.fixture
def layers(bench, monkeypatch):
    monkeypatch.setattr(bench("_harness"), "interleave", lambda runs, **_: {x: [2.0] for x in runs})
    return bench("layers")


@pytest.fixture
def run(run_bench, layers, tmp_path):
    """Run a benchmark on its tiny case; returns how it ended, and its rows by contender."""

    def make(name, *words):
        result = run_bench(name, "--smoke", "--rounds", "1", "--out", tmp_path, *words)
        path, rows = tmp_path / f"{name}.csv", {}
        if path.exists():
            with path.open() as file:
                rows = {row["contender"]: row for row in csv.DictReader(file)}
        return result, rows

    return make


def test_layers_of_every_method_run(run):
    result, rows = run("by_triton")
    assert result.code == 0, result.out + result.err
    assert rows["vsa 0.9"]["label"] == "video_sparse_attn (reference)"
    assert len(rows) == 10, "all but the package's dense kernels, which need a GPU"
    assert "left out of smoke: triton_attn" in result.out
    assert rows["fa"]["over_fa3"] == "1.0"


def test_rows_have_the_share_of_pairs_and_their_flop(run):
    result, rows = run("sla", "--only", "sla layer")
    assert result.code == 0, result.out + result.err
    assert list(rows) == [
        "sdpa dense",
        *(f"sla layer{ending}" for ending in ("", ", no projection", ", unselected")),
    ]
    dense, layer = rows["sdpa dense"], rows["sla layer"]
    assert (dense["commit"], dense["case"]) == ("c0ffee", "smoke 0.05")
    assert 0 < float(layer["density"]) < 0.2
    share = float(layer["flop"]) / float(dense["flop"])
    assert share == pytest.approx(float(layer["density"]), rel=1e-3)
    assert "left out: FlashAttention 3" in result.out


def test_backward_passes_are_checked_and_timed(run):
    result, rows = run("tail", "--backward", "--only", "^(sla|pisa)")
    assert result.code == 0, result.out + result.err
    assert set(rows) == {"sla", "sla, tail", "pisa", "pisa, tail"}
    assert {row["benchmark"] for row in rows.values()} == {"tail backward"}


def test_a_tail_brings_methods_nearer_to_dense_attention(run):
    result, rows = run("tail", "--only", "^(sol|vsa|sla|pisa)")
    assert result.code == 0, result.out + result.err
    for name in [name for name in rows if ", tail" not in name and name != "sdpa dense"]:
        pooled, plain = rows[f"{name}, tail"], rows[name]
        assert float(pooled["error_to_dense"]) < float(plain["error_to_dense"])
        assert pooled["over_without_tail"] == "1.0"  # both took the same time


def test_rows_of_curves_tell_the_error_at_equal_time(run):
    result, rows = run("error_curves", "--only", "topk_ratio=0.2|p_kmeans=0.8")
    assert result.code == 0, result.out + result.err
    known = {(row["method"], row["setting"], row["tail"]): row for row in rows.values()}
    for method, setting in (("top-k", "topk_ratio=0.2"), ("svg2", "svg2_top_p_kmeans=0.8")):
        plain, pooled = (known[method, setting, tail] for tail in ("none", "pooled"))
        assert 0 < float(plain["density"]) < 1
        share = float(pooled["error_to_dense"]) / float(plain["error_to_dense"])
        assert share < 1
        assert float(pooled["error_at_equal_time"]) == pytest.approx(share, rel=1e-2)
        assert plain["error_at_equal_time"] == "nan"


def test_steps_of_a_generation_are_compared_with_dense_ones(run, layers, monkeypatch):
    # K-means of hundreds of clusters takes long.
    few = {**layers.SUITES["smoke"], "grid": (4, 6, 8)}
    monkeypatch.setitem(layers.SUITES, "smoke", few)
    monkeypatch.setattr(layers, "SMOKE", layers.Case(**few))
    result, rows = run("dense_above", "--only", "^(auto|svg2|vsa sparsity=0.2)")
    assert result.code == 0, result.out + result.err
    names = ("auto, a generation", "svg2", "svg2 100/500", "vsa sparsity=0.2")
    assert {"auto", *names, *(f"{name}, dense_above=1.0" for name in names[1:])} == set(rows)
    assert rows["auto, a generation"]["over_dense"] == "1.0"
    assert float(rows["vsa sparsity=0.2, dense_above=1.0"]["dense_calls"]) == 0.0
    ratio = float(rows["svg2"]["median_ms"]) / float(rows["auto, a generation"]["median_ms"])
    assert float(rows["svg2"]["over_dense"]) == pytest.approx(ratio, rel=1e-2)


def test_what_is_left_out_of_products_and_the_pieces_of_a_layer_are_told(run):
    result, rows = run("sparse_routers", "--only", "^(vsa(, skip_below 20 dB)?|subblock)$")
    assert result.code == 0, result.out + result.err
    low = rows["vsa, skip_below 20 dB"]
    assert 0 < float(low["skipped"]) < 1
    assert low["over_plain"] == "1.0"
    pieces = {name.partition(": ")[2]: row for name, row in rows.items() if ": " in name}
    assert set(pieces) == {"pooling", "selection", "engine", "rest"}
    shares = [float(row["share_of_layer"]) for row in pieces.values()]
    assert sum(shares) == pytest.approx(1, abs=0.2)
    assert {row["benchmark"] for row in pieces.values()} == {"sparse_routers pieces"}


def test_the_pieces_of_a_layer_add_up_to_its_time(layers, bench_of):
    given = {"backend": "video_sparse_attn", "config": {"sparsity": 0.5}, "gate": True}
    part = {"methods": {"x": given}}
    (case,) = layers.cases_of(part, smoke=True)
    found = layers.Layers(part, case, bench_of("sparse", backward=False, only="", trial=False))
    pieces = layers.split(found.runs["x"], 2)
    wanted = {"gather", "engine", "scatter", "pooling", "selection", "gate", "rest"}
    assert set(pieces) == wanted
    assert all(len(times) == 2 and min(times) > 0 for times in pieces.values())


def test_a_kernel_that_is_wrong_is_told_and_not_timed(run, layers, monkeypatch):
    monkeypatch.setattr(layers, "kernel_error", lambda method, *_, **__: 0.5)
    result, rows = run("vmoba", "--only", "^(spatial|st)$", "--case", "normal")
    assert (result.code, rows) == (2, {}), "tiny cases have the first ending alone"
    result, rows = run("vmoba", "--only", "^(spatial|st)$")
    assert result.code == 1
    assert "WRONG spatial: relative error 5.00e-01" in result.out
    assert "wrong: smoke: spatial; smoke: st" in result.err
    assert set(rows) == {"sdpa dense"}


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_outputs_are_compared_with_attention_to_the_pairs_that_are_kept(layers, bench_of, off):
    part = {"methods": {"x": {"backend": "video_sparse_attn", "config": {"sparsity": 0.5}}}}
    (case,) = layers.cases_of(part, smoke=True)
    found = layers.Layers(part, case, bench_of("sparse", backward=False, only="", trial=False))
    run = found.runs["x"]
    found.runs["x"] = lambda: run() * (1 + off)
    assert found.error("x") == pytest.approx(off, abs=1e-5)
    assert found.to_dense["x"] > 0.2, "pairs are left out"


def test_a_contender_that_fails_is_not_timed(layers, bench_of, capsys):
    runs = {
        "right": lambda: 0.0,
        "wrong": lambda: 0.01,
        "nan": lambda: math.nan,
        "fails": lambda: 1 / 0,
        "refused": lambda: exec("raise E('no kernel image')", {"E": UnsupportedBackendError}),
    }
    bench = bench_of("sparse")
    right, errors = bench.check(runs.items(), lambda _, run: run(), 4e-3)
    assert list(right) == ["right"]
    assert bench.wrong == ["wrong", "nan", "fails"]
    assert errors["wrong"] == 0.01
    said = capsys.readouterr().out
    assert "left out: refused, no kernel image" in said
    assert "division by zero" in said


def test_variants_and_settings_are_those_that_are_listed(layers):
    part = {
        "methods": {
            "a": {"backend": "sol_attn", "config": {"x": 1}, "settings": {"tau": [2, 1]}},
            "b": {"backend": "fa", "variants": {"": {}}},
        },
        "variants": {"": {}, ", skip": {"config": {"skip": 3}, "like": "plain"}},
    }
    case = SimpleNamespace(config={"y": 2})
    found = {method.name: method for method in layers.methods_of(part, case)}
    assert list(found) == ["a tau=2", "a tau=1", "a tau=2, skip", "a tau=1, skip", "b"]
    skip = found["a tau=1, skip"]
    assert skip.config == {"dense_above": 1.0, "x": 1, "y": 2, "tau": 1, "skip": 3}
    assert (skip.like, skip.plain, skip.curve, skip.setting) == ("a tau=1", "a tau=1", "a", "tau=1")
    assert "dense_above" not in found["b"].config


def test_every_benchmark_of_layers_names_cases_and_columns_that_there_are(layers):
    for name, suite in layers.SUITES["benchmarks"].items():
        for part in suite["parts"]:
            cases = list(layers.cases_of(part))
            assert cases, name
            assert set(part.get("columns", ())) <= set(layers.COLUMNS)
            methods = {method.name: method for method in layers.methods_of(part, cases[0])}
            for method in methods.values():
                assert not method.like or method.like in methods
                assert not method.peer or method.peer in layers.PEERS


def test_data_of_every_name_are_others_and_an_unknown_name_is_refused(bench):
    cases = bench("_attention")
    case = cases.Case(name="smoke", grid=(4, 16, 16), heads=2, head_size=32)
    drawn = {data: dataclasses.replace(case, data=data).draw(torch.float32) for data in cases.DATA}
    assert len({float(qkv[0].double().square().sum()) for qkv in drawn.values()}) == len(drawn)
    with pytest.raises(ValueError, match=r"`data` of smoke must be one of .* got 'offset'"):
        dataclasses.replace(case, data="offset")


def test_offsets_are_a_vector_that_the_tokens_of_a_head_have_in_common(bench):
    cases = bench("_attention")
    size = {"grid": (4, 16, 16), "heads": 4, "batch": 2}
    with_offsets, without = (
        cases.Case(name=data, data=data, **size).draw(torch.float32)
        for data in ("offsets", "random")
    )
    for x, plain, deviation in zip(with_offsets, without, (2.0, 3.0, 0.0), strict=True):
        added = x - plain
        torch.testing.assert_close(added, added[:, :1].expand_as(added), rtol=0, atol=1e-5)
        # Of 2 * 4 * 128 normal numbers.
        assert float(added[:, 0].std()) == pytest.approx(deviation, rel=0.1)


def test_the_cases_of_vmoba_keep_about_a_quarter_of_the_chunks(layers):
    for name, case in layers.SUITES["cases"].items():
        if "config" in case:
            (t, h, w), config = case["grid"], case["config"]
            for kind, chunk in (
                ("temporal", (config["temporal_chunk_size"], h, w)),
                ("spatial", (t, *config["spatial_chunk_size"])),
                ("st", config["st_chunk_size"]),
            ):
                chunks = math.prod(n // edge for n, edge in zip((t, h, w), chunk, strict=True))
                assert config[f"{kind}_topk"] / chunks == pytest.approx(0.25, abs=0.04), name


def test_the_error_at_a_time_lies_on_the_lines_between_the_best_settings(layers):
    curve = [(4.0, 0.25), (1.0, 1.0), (2.0, 2.0), (16.0, 0.0625)]
    assert layers.error_at(curve, 4.0) == pytest.approx(0.25)
    assert layers.error_at(curve, 2.0) == pytest.approx(0.5)  # not the setting that is beaten
    assert layers.error_at(curve, 100.0) == 0.0625
    assert math.isnan(layers.error_at(curve, 0.5))
    assert math.isnan(layers.error_at([], 1.0))


def rows_file(folder):
    text = "date,gpu,commit,case,method,tail,median_ms,error_to_dense\n"
    for commit in ("old", "new"):
        text += f"d,H,{commit},wan,dense,none,9,1e-3\n"
        for tail, error in (("none", 0.5), ("pooled", 0.2)):
            text += f"d,H,{commit},wan,vsa,{tail},2,{error}\nd,H,{commit},wan,vsa,{tail},4,0.1\n"
    path = folder / "rows.csv"
    path.write_text(text)
    return path


def test_the_rows_of_the_last_commit_are_drawn(layers, tmp_path):
    plot, path = importlib.import_module("plot_error_curves"), rows_file(tmp_path)
    rows = plot.read_rows(path, "wan")
    assert {row["commit"] for row in rows} == {"new"}
    with pytest.raises(SystemExit, match="must hold rows of a case with 'hunyuan' in its name"):
        plot.read_rows(path, "hunyuan")
    with pytest.raises(SystemExit, match=r"must exist; `run\.py error_curves` writes it"):
        plot.read_rows(tmp_path / "none.csv", "wan")
    pytest.importorskip("matplotlib")
    plot.draw(rows, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_comfy_kitchen_is_measured_where_its_kernel_runs(bench, monkeypatch):
    peers = bench("_peers")
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)  # not installed
    with pytest.raises(UnsupportedBackendError, match="ModuleNotFoundError"):
        peers.comfy_kitchen((), {}, None)
    asked = {}
    package = SimpleNamespace(
        sol_attn=lambda q, **given: asked.update(given) or q,
        sol_attn_is_available=lambda device: True,
    )
    monkeypatch.setitem(sys.modules, "comfy_kitchen", package)
    with pytest.raises(UnsupportedBackendError, match="needs a GPU"):
        peers.comfy_kitchen((1,), {"tail": "none"}, None)
    monkeypatch.setattr(peers, "DEVICE", "cuda")
    run, _ = peers.comfy_kitchen((1,), {"tail": "pooled", "tau": 1.0, "dense_above": 1.0}, None)
    assert run() == 1
    assert asked == {"tail": True, "tau": 1.0}


class EagerWrapper:
    """Takes and returns what FlashInfer's does: heads first, masks and sizes per head."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        self.plans = []

    def plan(
        self,
        block_mask_map,
        block_row_sz,
        block_col_sz,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        q_data_type="float16",
    ):
        assert num_qo_heads == num_kv_heads
        assert q_data_type is torch.float32
        rows, columns = (
            torch.stack([torch.arange(len(n)).repeat_interleave(n) for n in sizes])
            for sizes in (block_row_sz, block_col_sz)
        )
        heads = torch.arange(num_qo_heads)[:, None, None]
        self.plans.append((block_mask_map[heads, rows[:, :, None], columns[:, None]], head_dim))

    def run(self, q, k, v):
        mask, size = self.plans[-1]
        assert q.is_contiguous()
        return (q @ k.mT * size**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def test_flashinfer_is_asked_for_the_clusters_that_the_layer_keeps(layers, bench, monkeypatch):
    flashinfer = ModuleType("flashinfer")
    flashinfer.sparse = SimpleNamespace(VariableBlockSparseAttentionWrapper=EagerWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    (part,) = layers.SUITES["benchmarks"]["svg2"]["parts"]
    (case,) = layers.cases_of(part, smoke=True)
    options = SimpleNamespace(backward=False, only="layer$|flash", trial=False, smoke=True)
    found = layers.Layers(part, case, bench("_harness").Bench("svg2", options))
    errors = found.check()
    assert errors["flashinfer variable blocks"] < 1e-5
    assert list(found.runs) == ["sdpa dense", "layer", "flashinfer variable blocks"]


def test_the_kernel_of_the_authors_of_vmoba_gets_the_call_of_the_layer(bench, layers, monkeypatch):
    peers, seen = bench("_peers"), {}

    def attend(q, k, v, ends, length, chunk, topk, **options):
        seen.update(chunk=chunk, topk=topk, **options)
        heads_first = (x.transpose(0, 1) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(0, 1)

    package = SimpleNamespace(moba_attn_varlen=attend)
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", package)
    monkeypatch.setattr(peers._flash_attn_2, "is_installed", lambda: True)
    config = {"temporal_chunk_size": 1, "temporal_topk": 2, "spatial_layer": 0, "st_layer": 0}
    config |= {"moba_select_mode": "topk", "first_full_step": 0}
    case = layers.Case(name="x", grid=(4, 6, 8), heads=2, head_size=64)
    qkv = case.draw(torch.bfloat16)
    method = layers.Method(name="x", plain="x", curve="x", setting="", config=config)
    monkeypatch.setattr(layers, "DTYPE", torch.bfloat16)

    def make(backend):
        own = layers.replace(method, backend=backend, config={"dense_above": 1.0, **config})
        return layers.call_of(own, case, layers.layer_of(own, case), qkv)

    run, version = peers.fastvideo_vmoba(qkv, config, make)
    assert run().shape == qkv[0].shape
    assert (seen["chunk"], seen["topk"], seen["select_mode"]) == (48, 2, "topk")
    assert version == "absent, absent"
