"""`sglang attention describe`: every parameter of every backend, and examples that can be used."""

import csv
import json
from pathlib import Path

import pytest

from multimodal_gen.cli.completion import backend_names
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import build_config, parameters_of
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from multimodal_gen.settings import read_mapping

RESULTS = Path(__file__).parents[2] / "scripts" / "bench" / "results" / "quantized.csv"


@pytest.mark.parametrize("backend", list(AttentionBackendEnum), ids=str)
def test_every_parameter_is_listed_and_the_example_can_be_used(sglang, backend) -> None:
    cls = find_backend(backend, current_platform().name).config_cls
    outcome = sglang("attention", "describe", str(backend))
    assert outcome.code == 0
    assert all(name in outcome.out for name in parameters_of(cls))
    document = json.loads(sglang("attention", "describe", str(backend), "--json").out)
    assert [p["name"] for p in document["parameters"]] == list(parameters_of(cls))
    assert all(p["help"] and p["takes"] for p in document["parameters"])
    _, _, quoted = document["example"].partition("--attention-backend-config ")
    given = read_mapping(quoted.strip("'")) if quoted else {}
    build_config(cls, given, backend=str(backend))


def test_ranges_defaults_and_aliases_are_those_of_the_declarations(sglang) -> None:
    out = sglang("attention", "describe", "video-sparse-attn").out
    assert "a number in [0, 1]" in out
    assert "also written VSA_sparsity" in out


@pytest.mark.parametrize("backend", ["fa", "torch_cudnn_sdpa"])
def test_errors_of_fp8_are_those_that_were_measured(sglang, backend) -> None:
    with RESULTS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["commit"] == "46cdc356"]
    errors = [
        float(row["relative_error"]) for row in rows if row["contender"] == f"{backend} layer, fp8"
    ]
    out = sglang("attention", "describe", backend).out
    assert all(f"{error:.3f}" in out for error in (min(errors), max(errors)))


def test_an_example_does_something(sglang) -> None:
    out = sglang("attention", "describe", "video_sparse_attn").out
    assert "--attention-backend-config 'sparsity=0.9'" in " ".join(out.split())


@pytest.mark.parametrize("columns", ["60", "200"])
def test_every_terminal_shows_the_same_table(sglang, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = sglang("attention", "describe", "sla_attn").out.splitlines()
    assert "parameter      default" in lines
    assert "BLKQ           128" in lines
    assert lines[lines.index("BLKQ           128") + 2] == "    takes one of 64, 128"


def test_a_name_that_is_none_is_refused_with_the_nearest(sglang) -> None:
    outcome = sglang("attention", "describe", "sla_atn")
    assert outcome.code == 2
    assert "did you mean 'sla_attn'?" in outcome.err


def test_shells_complete_the_names_of_backends(sglang, monkeypatch) -> None:
    assert backend_names("SLA-") == ["sla_attn"]
    assert len(backend_names()) == len(list(AttentionBackendEnum))
    monkeypatch.setenv("_SGLANG_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "sglang attention describe sage_")
    monkeypatch.setenv("COMP_CWORD", "3")
    outcome = sglang()
    assert outcome.code == 0
    assert outcome.out.split() == ["sage_attn", "sage_attn_3", "sage_sla_attn"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("--attention-backend sla_attn --attention-backend-config topk", ["topk_ratio="]),
        (
            "--attention-backend sliding_tile_attn --attention-backend-config window=[1,1,1],til",
            ["window=[1,1,1],tile_size="],
        ),
        ("--attention-backend-config topk", []),
        ("--component-attention-backends a=fa,b=torch_c", ["a=fa,b=torch_cudnn_sdpa"]),
        ("--quantize transformer=torchao-i", ["transformer=torchao-int8"]),
    ],
)
def test_shells_complete_parameters_and_what_follows_a_component(
    words, offered, sglang, monkeypatch
) -> None:
    typed = ["sglang", "generate", *words.split()]
    monkeypatch.setenv("_SGLANG_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(typed))
    monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    assert sglang().out.split() == offered
