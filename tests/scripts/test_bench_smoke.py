"""Benchmarks that no other test runs: a run on tiny cases, and whether the others import."""

import csv
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from multimodal_gen.cli.main import main
from tests.helpers.skipping import attend_naively, peaked_inputs

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.mark.parametrize("name", ["dense", "engine", "stages"])
def test_a_tiny_run_is_right(run_bench, name, tmp_path):
    result = run_bench(name, "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    assert "WRONG" not in result.out


def test_a_kernel_that_is_wrong_is_told_and_not_timed(run_bench, bench, monkeypatch, tmp_path):
    stages = bench("stages")
    monkeypatch.setattr(stages, "mark_tiles", lambda *_, **__: torch.rand(1, 2, 9, 9) < 0.5)
    result = run_bench("stages", "--smoke", "--only", "lists", "--out", tmp_path)
    assert result.code == 1
    assert "WRONG map: relative error" in result.out
    assert "wrong: smoke: map" in result.err


def test_the_host_time_of_layers_is_measured(run_bench, tmp_path, monkeypatch, bench):
    monkeypatch.setattr(bench("layer_overhead"), "GRID", (4, 8, 8))
    result = run_bench("layer_overhead", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "layer_overhead.csv").open() as file:
        rows = [row["contender"] for row in csv.DictReader(file)]
    assert rows[:2] == ["torch_sdpa direct", "torch_sdpa layer"]
    assert rows[2:] == [
        f"{name} (reference)"
        for name in (
            "sliding_tile_attn",
            "video_sparse_attn",
            "sla_attn",
            "sage_sla_attn",
            "sol_attn",
            "subblock_sparse_attn",
            "sparse_video_gen_2_attn",
            "vmoba_attn",
        )
    ]


def test_first_calls_are_measured_in_processes_of_their_own(run_bench, tmp_path):
    result = run_bench("cold_start", "--smoke", "--case", "layer", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "cold_start.csv").open() as file:
        empty, full = csv.DictReader(file)
    assert (empty["contender"], full["contender"]) == ("empty cache", "full cache")
    waited = float(empty["median_ms"]) - float(full["median_ms"])
    assert float(empty["waited_ms"]) == pytest.approx(waited, abs=0.1)


def test_a_first_call_that_fails_makes_the_run_fail(run_bench, bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench("cold_start"), "said_by_python", lambda *_: None)
    result = run_bench("cold_start", "--smoke", "--case", "layer", "--out", tmp_path)
    assert result.code == 1
    assert "video_sparse_attn: empty cache" in result.err


def test_generations_are_warmed_by_the_options_they_are_made_with(bench, capfd, tmp_path):
    cold_start = bench("cold_start")
    (tmp_path / "model_index.json").touch()
    words = cold_start.words_of(cold_start.SMOKE[1], "video_sparse_attn", tmp_path)
    assert main(["attention", "warm", *words, "--device", "cpu"]) == 2
    assert "must be compiled ahead for an NVIDIA GPU" in capfd.readouterr().err


def test_steps_under_a_guard_are_timed_next_to_those_without(run_bench, tmp_path, eight_bits):
    pytest.importorskip("diffusers")
    result = run_bench("guard", "--smoke", "--rounds", "1", "--only", "sage", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "guard.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == ["sage_attn", "sage_attn, guard"]
    assert [row["checked"] for row in rows] == ["0", "2"]
    assert [row["relative_error"] for row in rows] == ["0.0", "0.0"]


def test_graphs_give_what_calls_give_and_are_timed_in_turns(run_bench, tmp_path):
    pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")
    result = run_bench("graphs", "--smoke", "--rounds", "1", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    with (tmp_path / "graphs.csv").open() as file:
        rows = list(csv.DictReader(file))
    cases = ("smoke flux", "smoke wan", "smoke wan", "smoke helios chunk")
    assert [row["case"] for row in rows[::2]] == [*cases]
    for plain, graph in zip(rows[::2], rows[1::2], strict=True):
        assert graph["contender"] == f"{plain['contender']}, cuda_graph"
        assert (plain["relative_error"], graph["relative_error"]) == ("0.0", "0.0")
        assert float(graph["host_ms"]) > 0


def test_a_graph_that_gives_nearly_what_a_call_gives_is_wrong(
    run_bench, bench, monkeypatch, tmp_path
):
    pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")
    monkeypatch.setattr(bench("graphs"), "relative_error", lambda *_: 1e-12)
    options = ("--smoke", "--only", "flux", "--rounds", "1", "--out", tmp_path)
    result = run_bench("graphs", *options)
    assert result.code == 1
    assert "WRONG auto, cuda_graph: relative error 1.00e-12" in result.out


def test_a_host_that_waits_in_spite_of_a_graph_is_told(bench):
    pytest.importorskip("accelerate")
    hosts = {"auto": [90.0], "auto, cuda_graph": [0.4, 3.0, 0.5], "sage_attn, cuda_graph": [1.5]}
    assert bench("graphs").slow_hosts(hosts) == ["sage_attn, cuda_graph: host 1.50 ms"]


def test_shares_of_steps_are_those_of_skip_softmax_and_no_bound_finds_more(bench):
    skip_bound, block, below = bench("skip_bound"), 16, 20.0
    q, k, v = peaked_inputs(16 * block, 2, 32, block)
    q, k = 2 * q, k + torch.linspace(0, 1, k.shape[1])[:, None, None]
    layer = skip_bound.Layer(0.5, 0, q[0], k[0], 32**-0.5)
    limits = {"20 dB": below * math.log(10) / 10}
    found = skip_bound.shares_of(layer, (block, block), limits)
    _, _, skipped = attend_naively(q, k, v, block, below)
    left_out, *bounds = found["20 dB", "so far"].values()
    assert left_out == pytest.approx(skipped / (2 * 16 * 16))
    assert 0 < max(bounds) < left_out
    assert left_out < found["20 dB", "of all"]["left_out"]
    query, key = q[0, :, 0].unflatten(0, (-1, block)), k[0, :, 0].unflatten(0, (-1, block))
    best = (query @ key.flatten(0, 1).T).unflatten(2, (-1, block)).amax(3)
    for bound in skip_bound.bounds_of(query, key).values():
        assert (bound >= best - 1e-4).all()


def test_bounds_are_tried_on_attention_that_was_learnt(run_bench, bench, monkeypatch, tmp_path):
    pytest.importorskip("diffusers")
    monkeypatch.setattr(bench("skip_bound"), "NOISE", (0.5,))
    monkeypatch.setattr(bench("skip_bound"), "TILES", ((128, 64),))
    result = run_bench("skip_bound", "--out", tmp_path)
    assert result.code == 0, result.out + result.err
    assert "left out: threshold_scale_factor=18239" in result.out
    with (tmp_path / "skip_bound.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 3 * 2  # layers, thresholds, and what is known
    for row in rows:
        assert float(row["maxima_of_both"]) <= float(row["maxima"]) <= float(row["left_out"])


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py")))
def test_benchmarks_import(bench, name):
    for package in ("diffusers", "matplotlib"):
        pytest.importorskip(package)
    assert bench(name).__doc__


def test_the_list_tells_what_every_benchmark_asks(bench, capsys):
    assert bench("run").main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(bench("run").BENCHMARKS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("words", [["fast"], []])
def test_benchmarks_must_be_known(bench, words):
    with pytest.raises(SystemExit, match="name benchmarks among auto, backward"):
        bench("run").main(words)


def test_a_benchmark_that_is_started_by_itself_says_how_to():
    done = subprocess.run(
        [sys.executable, str(BENCH / "dense.py"), "5B"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch("a benchmark is started by run.py: .*run.py dense --help\n", done.stderr)


def test_a_run_needs_the_commit_that_it_measures(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench("run").main(["vmoba"])
    assert "required: --commit" in capsys.readouterr().err


def test_tiny_cases_leave_the_committed_results_alone(bench, capsys):
    results = {file: file.stat().st_mtime_ns for file in (BENCH / "results").iterdir()}
    assert bench("run").main(["dense", "--smoke", "--rounds", "1"]) == 0
    (folder,) = re.findall("tiny cases, so their rows go to (.*)\n", capsys.readouterr().out)
    assert (Path(folder) / "dense.csv").is_file()
    shutil.rmtree(folder)
    assert {file: file.stat().st_mtime_ns for file in (BENCH / "results").iterdir()} == results


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dense", "--only", "nosuch"], "--only of dense must match one of 'smoke', got 'nosuch'"),
        (["vmoba", "--case", "nosuch"], "--case of vmoba must match one of 'smoke.*, got 'nosuch'"),
        (["vmoba", "--only", "nosuch"], "--only of vmoba must match one of 'dense', .*"),
        (["streaming", "--contenders", "nosuch"], "--contenders of .* 'cache, auto', .* 'nosuch'"),
        (["dense", "--rounds", "0"], "argument --rounds: must be an integer >= 1, got '0'; see .*"),
        (["dense", "--turns", "-1"], "argument --turns: must be an integer >= 1, got '-1'; see .*"),
        (["dense", "--only", "("], "argument --only: must be a regular expression, got '\\(': .*"),
        (["vmoba", "--case", "("], "argument --case: must be a regular expression, got .*"),
        (["parallel"], "start it on several ranks: python3 -m torch.distributed.run .*"),
        (["parallel", "--only", "nosuch"], "--only must be part of one of exchange, .*"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_what_cannot_be_measured_is_one_line(run_bench, tmp_path, words, message):
    result = run_bench(*words, "--smoke", "--out", tmp_path)
    assert result.code == 2
    assert re.fullmatch(f"error: {message}\n", result.err), result.err
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_be_that_of_a_case_of_one_of_several_benchmarks(bench, capsys, tmp_path):
    words = ["--smoke", "--rounds", "1", "--out", str(tmp_path), "--only"]
    assert bench("run").main(["dense", "backward", *words, "nosuch"]) == 2
    assert re.search("of dense must .*; --only of backward must ", capsys.readouterr().err)
    assert bench("run").main(["dense", "vmoba", *words, "smoke"]) == 0


def test_help_without_a_name_says_how_to_start(bench, capsys):
    assert bench("run").main(["--help"]) == 0
    assert "run.py NAME... --commit HASH" in capsys.readouterr().out


def test_rows_of_other_columns_are_not_appended(bench, tmp_path):
    write, table = bench("_harness").write_table, tmp_path / "table.csv"
    for _ in range(2):
        write(table, [{"case": "smoke", "median_ms": 1.0}])
    assert table.read_text() == "case,median_ms\nsmoke,1.0\nsmoke,1.0\n"
    with pytest.raises(SystemExit, match=r"must have the columns \['case', 'density'\], got"):
        write(table, [{"case": "smoke", "density": 1.0}])
    write(table, [{"case": "less"}])
    assert table.read_text().endswith("smoke,1.0\nless,nan\n")
