import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import multimodal_gen
from multimodal_gen.kernels import gluon_check
from multimodal_gen.runtime.layers.attention.backends import registry
from multimodal_gen.runtime.layers.attention.backends.registry import all_backends
from multimodal_gen.runtime.platforms import PlatformEnum
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.helpers.fakes import FakeDevice, machine_with, simulated_environment


def test_list_names_every_backend_with_its_state(sglang) -> None:
    outcome = sglang("attention", "list", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    backends = {item["backend"]: item for item in document["backends"]}
    assert list(backends) == [str(backend) for backend in all_backends()]
    for item in backends.values():
        assert item["usable"] == (not item["reasons"]) == (item["variant"] is not None)
        assert item["summary"]
    assert backends["torch_sdpa"]["usable"]
    assert document["platform"]["name"]


def test_list_says_what_auto_picks_for_the_layer(sglang) -> None:
    document = json.loads(sglang("attention", "list", "--json").out)
    picked = document["auto"]
    (item,) = [b for b in document["backends"] if b["backend"] == picked["backend"]]
    assert item["usable"]
    assert item["variant"] == picked["variant"]
    assert "automatic choices" in picked["reason"]


def test_list_starts_with_the_platform_and_explains_what_is_missing(sglang) -> None:
    lines = sglang("attention", "list").out.splitlines()
    assert lines[0].startswith("platform: ")
    assert lines[1].startswith("layer:    self attention, 24 heads of size 128, ")
    assert lines[2].startswith("auto:     ")
    assert all(len(line) <= 100 for line in lines)


def test_list_says_how_to_install_what_would_run_on_this_gpu(sglang, monkeypatch) -> None:
    gpu = simulated_environment(FakeDevice(platform=PlatformEnum.CUDA, capability=(9, 0)))
    monkeypatch.setattr(registry, "current_environment", lambda: gpu)
    text = " ".join(sglang("attention", "list", "--dtype", "bfloat16").out.split())
    assert "sage_attn no - " in text
    assert "pip install sageattention" in text
    assert "sage_attn_3 no - needs compute capability 12.0 or 12.1, this GPU has 9.0" in text


def test_list_gives_the_platform_alone_where_it_rules_a_backend_out(sglang, monkeypatch) -> None:
    machine = simulated_environment(FakeDevice(platform=PlatformEnum.CPU))
    monkeypatch.setattr(registry, "current_environment", lambda: machine)
    text = " ".join(sglang("attention", "list").out.split())
    assert "sage_attn no - needs platform cuda or musa, this is cpu sage_attn_3 " in text


@pytest.mark.parametrize(("fault", "variant"), [(None, "gluon"), ("all wrong", "triton")])
def test_list_checks_what_would_run_with_an_untried_release(
    sglang, monkeypatch, fault, variant
) -> None:
    device = FakeDevice(
        platform=PlatformEnum.CUDA,
        capability=(9, 0),
        packages=frozenset({("triton", "triton", "3.10.0")}),
    )
    gpu = simulated_environment(device)
    monkeypatch.setattr(registry, "current_environment", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("block_sparse", "pooled_tail", "quantized"):
        monkeypatch.setattr(gluon_check, name, lambda device: fault)
    with machine_with({"triton": "3.10.0"}):
        document = json.loads(sglang("attention", "list", "--json", "--dtype", "bfloat16").out)
    backends = {item["backend"]: item for item in document["backends"]}
    assert backends["video_sparse_attn"]["variant"] == variant
    found = {check["kernels"]: check["fault"] for check in document["self_checks"]}
    checked = ["block_sparse", "quantized"] + ([] if fault else ["pooled_tail"])
    assert found == {f"kernel gluon ({name})": fault for name in checked}
    said = "failed: all wrong" if fault else "passed"
    assert f"its self-check on GPU 0 {said}" in document["auto"]["reason"]


def test_list_is_about_the_layer_asked_for(sglang) -> None:
    arguments = ("--head-size", "96", "--heads", "7", "--dtype", "float16", "--role", "cross")
    document = json.loads(sglang("attention", "list", "--json", *arguments).out)
    assert document["request"] == {
        "role": "cross",
        "heads": 7,
        "head_size": 96,
        "dtype": "float16",
    }
    (sparse,) = [b for b in document["backends"] if b["backend"] == "video_sparse_attn"]
    assert not sparse["usable"]


@pytest.mark.parametrize("columns", [40, 60])
def test_list_cuts_no_name_off_on_a_narrow_terminal(columns, sglang, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = sglang("attention", "list").out.splitlines()
    words = " ".join(lines).replace(";", "").split()
    assert {str(backend) for backend in all_backends()} <= set(words)
    longest = max((line for line in lines), key=len)
    assert len(longest) <= columns, longest


@pytest.mark.parametrize("columns", [40, 60])
def test_explain_cuts_no_name_off_on_a_narrow_terminal(
    columns, tiny_pipeline, sglang, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = sglang("attention", "explain", "--model-path", tiny_pipeline("wan"))
    assert outcome.code == 0, outcome.err
    words = outcome.out.replace(";", "").split()
    assert {"text_encoder", "transformer", "encoder", "self", "cross", "torch_sdpa"} <= set(words)
    assert all(len(line) <= columns for line in outcome.out.splitlines())


def _install_broken_plugins(folder: Path) -> None:
    """Lay out an installed package whose backend and platform do not import."""
    (folder / "broken_plugin.py").write_text("raise OSError('libbroken.so.3 is missing')\n")
    info = folder / "broken_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[multimodal_gen.attention_backends]\n"
        "broken_attn = broken_plugin:Backend\n"
        "broken-name = broken_plugin:Backend\n"
        "[multimodal_gen.platforms]\n"
        "broken_device = broken_plugin:Platform\n"
    )


LIST_TWICE = """
from multimodal_gen.cli.main import main
assert main(["attention", "list", "--json"]) == 0
print("---")
raise SystemExit(main(["attention", "list"]))
"""


def _lists_in(folder: Path) -> tuple[str, str]:
    """Return the list as JSON and as text, in a process that has the packages of `folder`."""
    document, _, text = _printed_in(folder, LIST_TWICE).partition("---\n")
    return document, text


def _printed_in(folder: Path, script: str) -> str:
    """Return what a process prints that has the packages of `folder`."""
    path = f"{folder}{os.pathsep}{Path(multimodal_gen.__file__).parents[1]}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_list_shows_broken_plug_ins_with_their_errors(tmp_path) -> None:
    _install_broken_plugins(tmp_path)
    printed, text = _lists_in(tmp_path)
    document = json.loads(printed)
    found = {(item["name"], item["group"]) for item in document["broken_plugins"]}
    assert found == {
        ("broken_attn", "multimodal_gen.attention_backends"),
        ("broken-name", "multimodal_gen.attention_backends"),
        ("broken_device", "multimodal_gen.platforms"),
    }
    errors = [item["error"] for item in document["broken_plugins"]]
    assert all("libbroken.so.3 is missing" in error for error in errors)

    _, _, table = text.partition("broken plug-in ")
    assert all(name in table for name, _ in found)
    assert " ".join(table.split()).count("must load, got OSError('libbroken.so.3 is missing')") == 3


PLUGIN = """
from multimodal_gen.runtime.layers.attention.backends.sdpa import SDPABackend
from multimodal_gen.runtime.platforms import AttentionBackendEnum

class Backend(SDPABackend):
    backend = AttentionBackendEnum.register_plugin_name("own_backend")
    summary = "of another package"
"""

DESCRIBE = """
from multimodal_gen.cli.main import main
raise SystemExit(main(["attention", "describe", "own_backend"]))
"""


def test_describe_knows_backends_of_other_packages(tmp_path) -> None:
    (tmp_path / "own_plugin.py").write_text(PLUGIN)
    info = tmp_path / "own_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n")
    entry = "[multimodal_gen.attention_backends]\nown_backend = own_plugin:Backend\n"
    (info / "entry_points.txt").write_text(entry)
    assert "own_backend: of another package" in _printed_in(tmp_path, DESCRIBE)


def test_list_says_nothing_of_plug_ins_where_all_is_well(sglang) -> None:
    assert json.loads(sglang("attention", "list", "--json").out)["broken_plugins"] == []
    assert "plug-in" not in sglang("attention", "list").out


def test_install_commands_come_with_what_is_missing(sglang) -> None:
    document = json.loads(sglang("attention", "list", "--json").out)
    for item in document["backends"]:
        absent = [reason for reason in item["reasons"] if "not installed" in reason]
        assert bool(item["install"]) == bool(absent)
        assert all(any(f"({line})" in reason for reason in absent) for line in item["install"])


def _by_name(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(layers, key=lambda layer: (layer["component"], layer["name"]))


@pytest.mark.slow_cases(
    "cogvideox", "flux2_klein", "flux", "hunyuan_video", "hunyuan_video_15", "qwen_image"
)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_explain_finds_the_layers_that_a_run_uses(family: str, tiny_pipeline, sglang) -> None:
    from diffusers import DiffusionPipeline

    folder = tiny_pipeline(family)
    outcome = sglang("attention", "explain", "--model-path", folder, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["pipeline"] == FAMILIES[family].pipeline_class

    with multimodal_gen.apply(DiffusionPipeline.from_pretrained(folder)) as handle:
        loaded = json.loads(json.dumps(handle.report().as_dict()))
    # Components come in no particular order; within one, layers come in the model's.
    assert _by_name(document["layers"]) == _by_name(loaded["layers"])
    assert sum(group["count"] for group in document["groups"]) == len(loaded["layers"])


def test_explain_reads_no_weights(tiny_pipeline, sglang, tmp_path) -> None:
    source = tiny_pipeline("wan22")
    configs = [path for path in source.rglob("*.json") if "index" not in path.name]
    for path in (*configs, source / "model_index.json"):
        target = tmp_path / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    assert not list(tmp_path.rglob("*.safetensors"))
    given = ("--attention-backend", "video_sparse_attn")
    outcome = sglang("attention", "explain", "--model-path", tmp_path, *given)
    assert outcome.code == 0, outcome.err
    assert "pipeline: WanPipeline (10 attention layers)" in outcome.out
    # A run looks into the files of the weights; this command must not say that it finds none.
    said = " ".join(outcome.out.split())
    assert "checkpoint may have (to_gate_compress) are looked for when it is loaded" in said


def test_explain_shows_who_asked_for_what(tiny_pipeline, sglang) -> None:
    outcome = sglang(
        *("attention", "explain", "--model-path", tiny_pipeline("wan"), "--json"),
        *("--component-attention-backends.transformer.cross", "torch_sdpa"),
        *("-ac.rules.0.steps", "0-3", "-ac.rules.0.role", "self"),
        *("-ac.rules.0.backend", "torch_sdpa"),
    )
    assert outcome.code == 0, outcome.err
    found = {
        (group["component"], group["role"], group["steps"]): (group["source"], group["detail"])
        for group in json.loads(outcome.out)["groups"]
    }
    assert found == {
        ("text_encoder", "encoder", "all"): ("auto", ""),
        ("transformer", "self", "0-3"): ("settings", "rule 1"),
        ("transformer", "self", "other"): ("auto", ""),
        ("transformer", "cross", "all"): ("component", "transformer.cross"),
    }


def test_explain_names_steps_by_the_noise_levels_of_the_scheduler(tiny_pipeline, sglang) -> None:
    given = ("--attention-backend", "sol_attn", "--attention-backend-config")
    outcome = sglang(
        *("attention", "explain", "--model-path", tiny_pipeline("wan"), "--json", *given),
        "dense_sigma=>0.9,dense_steps=null,dense_layers=null",
    )
    assert outcome.code == 0, outcome.err
    groups = [group for group in json.loads(outcome.out)["groups"] if group["role"] == "self"]
    assert {group["steps"]: group["backend"] for group in groups} == {
        "of sigma >0.9": "torch_sdpa",
        "other": "sol_attn",
    }


def test_explain_prints_a_table_that_pipes_well(tiny_pipeline, sglang, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = sglang(
        *("attention", "explain", "--model-path", tiny_pipeline("wan")),
        *("--attention-backend", "fa", "--device", "cpu"),
    )
    assert done.code == 0, done.err
    assert "\x1b" not in done.out
    lines = done.out.splitlines()
    assert lines[3].split() == ["component", "role", "layers", "steps", "backend", "source"]
    assert lines[5].split() == ["text_encoder", "encoder", "0-1", "all", "torch_sdpa", "settings"]
    assert lines[6].startswith("    fa was asked for the whole pipeline and cannot serve this")
    assert "    fallback, because fa cannot serve this layer [1]" in lines
    assert sum(line.startswith("[1] fa rejected: ") for line in lines) == 1
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--strict-attention", "--attention-backend", "fa"), "attention backend fa (settings"),
        (("--attention-backend", "native"), "need `sglang generate --backend diffusers`"),
        (("--component-attention-backends", "unet=fa"), "unet"),
        (("--attention-backend-config", "a=1"), "needs --attention-backend"),
        (("--attention-config", "nowhere.json"), "nowhere.json"),
        (("--device", "toaster"), "--device must be a torch device of this machine"),
    ],
)
def test_explain_refuses_what_generate_refuses(
    flags: tuple[str, ...], message: str, tiny_pipeline, sglang
) -> None:
    if torch.cuda.is_available() and "fa" in flags:
        pytest.skip("fa may be usable here")
    outcome = sglang("attention", "explain", "--model-path", tiny_pipeline("wan"), *flags)
    assert outcome.code == 2
    (line,) = [text for text in outcome.err.splitlines() if text.startswith("error: ")]
    assert message in line


def test_explain_names_a_component_without_a_config(tiny_pipeline, sglang, tmp_path) -> None:
    index = tiny_pipeline("wan") / "model_index.json"
    (tmp_path / "model_index.json").write_text(index.read_text())
    outcome = sglang("attention", "explain", "--model-path", tmp_path)
    assert outcome.code == 2
    assert "component text_encoder of" in outcome.err
    assert "must have a config for UMT5EncoderModel" in outcome.err


def test_explaining_a_rule_that_matches_no_layer_is_one_line(tiny_pipeline, sglang) -> None:
    rules = '{"rules": [{"layers": "900", "backend": "torch_sdpa"}]}'
    outcome = sglang(
        *("attention", "explain", "--model-path", tiny_pipeline("flux")),
        *("--attention-config", rules),
    )
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert "rules[0] must match at least one attention layer" in line
