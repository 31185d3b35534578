"""`sglang attention calibrate`, and a generation by what it wrote."""

import json
import math
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal_gen.runtime.layers.attention.sparse.methods.skip_softmax import SkipSoftmaxConfig
from tests.helpers.flags import changed

pytestmark = pytest.mark.usefixtures("black_frames")

SIZE = ("--height", 128, "--width", 192, "--num-frames", 17, "--num-inference-steps", 2)


def peaked_in(source, folder, component):
    """Copy a tiny Wan of 480 tokens in a grid of 5x8x12; scores of one fall with the distance."""
    shutil.copytree(source, folder)
    (file,) = (folder / component).glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("attn1.to_q.bias", "attn1.to_k.bias")):
            weights[name] = torch.full_like(weight, 20.0)  # which its rotation turns
        if name.endswith("attn1.norm_q.weight"):
            weights[name] = 4.0 * weight
    save_file(weights, file)
    return folder


@pytest.fixture
def peaked(tiny_pipeline, tmp_path):
    return peaked_in(tiny_pipeline("wan"), tmp_path / "model", "transformer")


def test_a_curve_is_written_that_a_generation_takes(sglang, peaked, tmp_path):
    file, prompts = tmp_path / "skip.json", tmp_path / "prompts.txt"
    prompts.write_text("a fox\na cat\n")
    run = ("--model-path", peaked, *SIZE, "--guidance-scale", 3)
    found = sglang(
        *("attention", "calibrate", *run, "--prompts", prompts, "--seed", 0),
        *("--target-sparsity", "0.15,0.2", "--output", file),
    )
    assert found.code == 0, found.err
    assert "[2/2]" in found.out
    assert found.out.startswith(f"output: {file}\n")
    assert f"--attention-backend skip_softmax --attention-backend-config {file}" in found.out
    written = json.loads(file.read_text())
    assert written["target_sparsity"] == 0.15
    producer = written["sparse_attention_config"]["producer"]
    assert (producer["component"], producer["keys"]) == ("transformer", 480)
    at_least, more = producer["measured"]
    assert set(at_least["by_step"]) == {"0", "1"}
    assert set(at_least["by_layer"]) == {"blocks.0.attn1", "blocks.1.attn1"}
    assert 0 < at_least["share"] <= more["share"] < 1
    assert at_least["threshold_scale_factor"] < more["threshold_scale_factor"]
    other = tmp_path / "new" / "other.json"
    beyond = sglang(
        *("attention", "calibrate", *run, "--prompt", "a fox", "--seed", 0),
        *("--target-sparsity", 0.9, "--output", other),
    )
    assert beyond.code == 2
    assert beyond.out.startswith(f"output: {other}, in a new folder\n")
    asks = json.loads(other.read_text())["target_sparsity"]
    assert 0.2 < asks < 0.9
    assert "--target-sparsity must be reached by a lambda below 1, got 0.9; " in beyond.err
    assert f"other.json' has the curve, and asks for {asks:g}" in beyond.err
    given = SkipSoftmaxConfig(**json.loads(other.read_text()))
    assert 10 * math.log10(1 / 0.95) <= given.decibels(480) < 1
    out = tmp_path / "out"
    made = sglang(
        *("generate", *run, "--prompt", "a fox", "--seed", 0, "--output-path", out),
        *("--attention-backend", "skip_softmax", "--attention-backend-config", file),
    )
    assert made.code == 0, made.err
    (record,) = out.glob("*.json")
    layers = json.loads(record.read_text())["attention"]["layers"]
    skipped = [e["skipped"] for layer in layers for e in layer["entries"] if e.get("skipped")]
    # All heads and rows are looked at, and one prompt of the two is generated again.
    assert sum(skipped) / 2 == pytest.approx(at_least["share"], abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target-sparsity", "0.5,2"), "--target-sparsity must be shares between 0 and 1 such"),
        (("--output", "skip.txt"), "--output must end in .json, .yaml, .yml, got 'skip.txt'"),
        ((), "a curve must be fitted to two shares from 0.1 to 0.9 at least, which rise, got 0"),
        (
            ("--component", "vae"),
            "--component must name one of the denoisers of WanPipeline (transformer), got 'vae'",
        ),
        (("--height", 40), "--height must be a multiple of 16 for WanPipeline, got 40: "),
        (("--output", "folder.json"), "--output must be a file, got 'folder.json', which is a fol"),
        (("--prompts", "empty"), "at least one prompt, got none in 'empty'; write one per line"),
        (("--prompt",), "a calibration must have at least one prompt, got none"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    sglang, tiny_pipeline, tmp_path, monkeypatch, arguments, message
):
    given = {"--output": tmp_path / "skip.json", "--prompt": "a fox"}
    if arguments == ("--prompt",):
        del given["--prompt"]
    elif arguments:
        given[arguments[0]] = arguments[1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "empty").touch()
    if "--prompts" in given:
        del given["--prompt"]
    model = ("--model-path", tiny_pipeline("wan"), "--width", 96)
    given = {"--height": 64, **given}
    size = ("--num-frames", 9, "--num-inference-steps", 1)
    typed = [each for pair in given.items() for each in pair]
    found = sglang("attention", "calibrate", *model, *size, *typed)
    assert found.code == 2
    assert message in found.err
    assert not (tmp_path / "skip.json").exists()
    if arguments:
        assert "[1/1]" not in found.out  # nothing was generated


@pytest.mark.parametrize(
    "wrong", [("--model-path", "nowhere/at/all"), ("--target-sparsity", "0.1,9")], ids=str
)
def test_what_is_wrong_before_measuring_makes_no_folder(sglang, tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    given = changed(("--model-path", "a/b", "--prompt", "x", "--output", "typo/c.json"), wrong)
    found = sglang("attention", "calibrate", *given)
    assert (found.code, found.out) == (2, "")
    assert wrong[0] in found.err
    assert list(tmp_path.iterdir()) == []


def test_a_curve_takes_the_place_of_no_file_of_the_model(sglang, tiny_pipeline):
    model = tiny_pipeline("wan")
    index = model / "model_index.json"
    before = index.read_bytes()
    found = sglang(
        *("attention", "calibrate", "--model-path", model, "--prompt", "a fox"),
        *("--output", index),
    )
    assert found.code == 2
    assert f"--output must not be a file of the model, got {str(index)!r}; give" in found.err
    assert index.read_bytes() == before


def test_of_two_denoisers_one_is_named_before_anything_is_generated(
    sglang, tiny_pipeline, tmp_path
):
    model = ("--model-path", tiny_pipeline("wan22"), "--height", 64, "--width", 96)
    size = ("--num-frames", 9, "--num-inference-steps", 2, "--prompt", "a fox")
    found = sglang("attention", "calibrate", *model, *size, "--output", tmp_path / "skip.json")
    assert found.code == 2
    assert "denoisers of WanPipeline (transformer, transformer_2), got none" in found.err
    assert "[1/1]" not in found.out


def test_the_curve_of_one_of_two_denoisers_is_for_that_one(sglang, tiny_pipeline, tmp_path):
    file = tmp_path / "skip.json"
    model = peaked_in(tiny_pipeline("wan22"), tmp_path / "model", "transformer_2")
    run = ("--model-path", model, *SIZE, "--prompt", "a fox", "--seed", 0)
    found = sglang(
        *("attention", "calibrate", *run, "--component", "transformer_2"),
        *("--target-sparsity", 0.15, "--output", file),
    )
    assert found.code == 0, found.err
    options = shlex.split(found.out.partition("next: sglang generate ... ")[2])
    out = tmp_path / "out"
    made = sglang("generate", *run, "--output-path", out, *options)
    assert made.code == 0, made.err
    (record,) = out.glob("*.json")
    layers = json.loads(record.read_text())["attention"]["layers"]
    of = {
        layer["component"]
        for layer in layers
        for entry in layer["entries"]
        if entry.get("skipped") is not None
    }
    assert of == {"transformer_2"}
