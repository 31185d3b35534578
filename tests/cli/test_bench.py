"""`sglang attention bench`, and the use of the table that it writes."""

import errno
import json

import pytest
import torch

from multimodal_gen.runtime.layers.attention import auto_table
from multimodal_gen.runtime.layers.attention.auto_table import read_tables

SMALL = ("--shape", "1x24x2x16", "--rounds", "1", "--dtype", "float32", "--device", "cpu")


def test_bench_prints_what_was_measured_and_what_was_left_out(sglang, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # times of a machine that is busy are longer
    outcome = sglang("attention", "bench", *SMALL, "--shape", "2x24x2x16:keys=7:mask")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == "1x24x2x16 float32"
    assert lines[1].split() == ["backend", "ms", "host", "ms", "TFLOP/s", "error"]
    (sdpa, _) = (line.split() for line in lines if line.startswith("torch_sdpa "))
    assert float(sdpa[1]) > 0
    assert sdpa[2] == "-"
    assert float(sdpa[4]) < 1e-5
    assert sdpa[5:] == ["auto"]
    assert "2x24x2x16:keys=7:mask float32" in lines
    text = " ".join(outcome.out.split())
    assert "flex_attn" in text
    assert "is compiled on first use" in text
    assert "left out: triton_attn: needs platform cuda or rocm, this is cpu" in text


def test_bench_as_json_holds_the_same(sglang):
    outcome = sglang("attention", "bench", *SMALL, "--json", "--backend", "torch_sdpa")
    assert outcome.code == 0, outcome.err
    (found,) = json.loads(outcome.out)
    assert (found["shape"], found["dtype"], found["left_out"]) == ("1x24x2x16", "float32", {})
    (time,) = found["times"]
    assert time["backend"] == time["variant"] == "torch_sdpa"
    assert time["tflops"] == pytest.approx(4 * 2 * 24 * 24 * 16 / time["device_ms"] / 1e9)
    assert time["host_ms"] is None


def test_a_table_that_was_saved_is_what_automatic_choices_go_by(sglang, tmp_path, tiny_pipeline):
    file = tmp_path / "table.json"
    outcome = sglang("attention", "bench", *SMALL, "--save", file)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == f"table: {file}"
    (table,) = read_tables(file, name="it")
    assert dict(table.versions)["torch"] == torch.__version__
    explain = ("attention", "explain", "--model-path", tiny_pipeline("wan"), "--device", "cpu")
    outcome = sglang(*explain, "--attention-auto-table", file)
    assert outcome.code == 0, outcome.err
    assert "at measured shapes the fastest of cpu, torch" in " ".join(outcome.out.split())
    document = json.loads(file.read_text())
    document["tables"][0]["versions"]["torch"] = "2.5.0"
    file.write_text(json.dumps(document))
    outcome = sglang(*explain, "--attention-auto-table", file)
    assert outcome.code == 2
    assert f"torch is {torch.__version__}, not 2.5.0" in outcome.err


def test_bench_of_a_model_measures_its_denoisers_layers(sglang, tiny_pipeline):
    model = ("--model-path", tiny_pipeline("wan"), "--tokens", "16", "--backend", "torch_sdpa")
    outcome = sglang("attention", "bench", *model, "--json", "--rounds", "1", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    shapes = [found["shape"] for found in json.loads(outcome.out)]
    assert len(set(shapes)) == len(shapes) == 4
    assert sorted(shape.partition(":")[2] for shape in shapes) == [
        "",
        "keys=256",
        "keys=512",
        "keys=77",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1x2x3"), "a shape must be BxSxHxD"),
        (
            ("--shape", "1x2x3x4", "--model-path", "x"),
            "--shape must not be given with --model-path",
        ),
        (("--tokens", "16"), "--tokens must be given with --model-path"),
        (("--backend", "no_such"), "--backend must be one of"),
        (("--backend", "sla_attn"), "a benchmark must be of dense backends, got sla_attn"),
        (("--shape", "1x9999999999999x3x4"), "of at most 12 digits"),
        (("--save", "x" * 300), "File name too long"),
        (("--save", ""), "--save must be a file or folder, got ''"),
        (("--save", "/"), "--save must name a new file, got the folder '/'; name a file in it"),
        (("--save", "no/such/folder/x.json"), "--save must lie in a folder that exists"),
    ],
)
def test_bench_refuses_what_it_cannot_do(sglang, arguments, message):
    outcome = sglang("attention", "bench", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_a_backend_by_name_that_is_timed_nowhere_is_an_error(sglang, tmp_path):
    file = tmp_path / "table.json"
    named = ("--backend", "torch_sdpa", "--backend", "triton_attn")
    outcome = sglang("attention", "bench", *SMALL, *named, "--save", file)
    assert outcome.code == 2
    assert (
        "--backend must name what can be timed here, triton_attn was at no shape: " in outcome.err
    )
    assert "needs platform cuda or rocm, this is cpu" in outcome.err
    assert not file.exists()


def test_a_table_of_what_auto_never_takes_is_refused_before_it_is_measured(sglang, tmp_path):
    file = tmp_path / "table.json"
    outcome = sglang("attention", "bench", *SMALL, "--backend", "flex_attn", "--save", file)
    assert (outcome.code, outcome.out) == (2, "")
    assert "a table must hold a time of a backend that `auto` may take, got none" in outcome.err
    assert not file.exists()


def test_bench_overwrites_nothing(sglang, tmp_path):
    file = tmp_path / "table.json"
    file.write_text("kept")
    outcome = sglang("attention", "bench", *SMALL, "--save", file)
    assert outcome.code == 2
    assert "--save must name a new file" in outcome.err
    assert file.read_text() == "kept"


def test_bench_says_what_keeps_a_table_from_being_written(sglang, tmp_path, monkeypatch):
    file = tmp_path / "table.json"

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    outcome = sglang("attention", "bench", *SMALL, "--save", file)
    assert (outcome.code, outcome.out) == (2, "")  # before anything is measured
    assert "--save must be writable, got" in outcome.err
    monkeypatch.undo()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(auto_table, "write_tables", full)
    outcome = sglang("attention", "bench", *SMALL, "--save", file)
    assert outcome.code == 2
    assert "No space left on device" in outcome.err
    assert not file.exists()
