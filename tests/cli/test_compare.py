"""`sglang attention compare`, and the checks of attention in `sglang generate`."""

import json
import re

import pytest

from multimodal_gen.runtime.comparison.record import Report, read_record
from tests.helpers.flags import changed

SIZE = ("--height", "64", "--width", "128", "--dtype", "float32")
FLOOR = "video_sparse_attn:sparsity=0,dense_above=1"
CLOSE = "sliding_tile_attn:window=[1,1,3],skip_time_steps=0,tile_size=[1,2,2]"


def test_a_comparison_prints_tables_and_writes_its_report(sglang, tiny_pipeline, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox\n\n")
    (tmp_path / "score.py").write_text("def half(video, prompt):\n    return 0.5\n")
    score = f"{tmp_path / 'score.py'}:half"
    outcome = sglang(
        *("attention", "compare", "--model-path", tiny_pipeline("flux"), "--prompts", prompts),
        *("--backends", CLOSE, "--floor", FLOOR, "--seeds", "3"),
        *("--steps", "1", "--replayed-steps", "1", "--output", tmp_path / "out", *SIZE),
        "--no-page",
        *("--score", score),
    )
    assert outcome.code == 0, outcome.err
    assert "[3/4] sliding_tile_attn, prompt 1, seed 3" in outcome.err
    report = read_record(Report, tmp_path / "out" / "report.json")
    assert (report.prompts, report.seeds) == (("a fox",), (3,))
    assert report.settings["num_inference_steps"] == 1
    assert report.model.path == str(tiny_pipeline("flux"))
    assert report.candidates[0].configuration == CLOSE
    assert report.candidates[0].cost.density < 1
    for line in ("quality, against torch_sdpa", "cost", "sliding_tile_attn", "visible", "PSNR"):
        assert line in outcome.out
    assert f"scores by {score}; differences" in outcome.out
    assert re.search(r"^sliding_tile_attn +0\.500 +0\.000$", outcome.out, re.M)
    assert {clip.score for run in report.runs for clip in run.generations} == {0.5}
    assert "noise of speeds, torch_sdpa against itself: " in outcome.out
    assert outcome.out.splitlines()[-1].endswith("report.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seeds", "3-1"), "--seeds must be seeds and ranges such as 0-3,7, got '3-1'"),
        (("--seeds", "x"), "--seeds must be seeds and ranges"),
        (("--reference", "video_sparse_attn"), "--reference must be a dense backend"),
        (("--floor", "video_sparse_attn"), "--floor must be exact kernels, got 'video_sparse"),
        (("--floor", "torch_sdpa"), "--floor must be other kernels than the reference, got 'torch"),
        (("--num-gpus", "2"), "--num-gpus must be 1, got 2"),
        (("--num-gpus", "2"), "with `sglang generate --num-gpus`, once for each backend"),
        (("--backends", "best"), "--backends must be one of"),
        (("--score", "x.txt"), "--score must be FILE.py:function, got 'x.txt'"),
        (("--score", "no.py:f"), "--score must name a file that is there, got 'no.py:f'"),
    ],
)
def test_options_that_cannot_be_are_refused(sglang, tmp_path, flags, message) -> None:
    given = ("--prompt", "p", "--backends", "fa", "--output", tmp_path / "out")
    outcome = sglang("attention", "compare", "--model-path", "nowhere", *changed(given, flags))
    assert outcome.code == 2
    assert message in outcome.err


def test_a_comparison_needs_a_prompt(sglang, tmp_path) -> None:
    outcome = sglang(
        *("attention", "compare", "--model-path", "nowhere", "--backends", "fa"),
        *("--output", tmp_path / "out"),
    )
    assert outcome.code == 2
    assert "a comparison must have at least one prompt" in outcome.err


def test_generations_record_and_check_their_attention(sglang, tiny_pipeline, tmp_path) -> None:
    path = tmp_path / "attention.json"
    flags = (
        *("generate", "--model-path", tiny_pipeline("flux"), "--prompt", "a fox", *SIZE),
        *("--attention-backend", "sliding_tile_attn", "--num-inference-steps", "1"),
        *("--attention-backend-config", CLOSE.partition(":")[2], "--seed", "0"),
        *("--output-path", tmp_path / "out", "--record-attention", path),
    )
    outcome = sglang(*flags, "--check-attention", "1")
    assert outcome.code == 0, outcome.err
    assert f"attention record: {path}" in outcome.out
    record = json.loads(path.read_text())
    assert record["arguments"]["check_attention"] == 1
    assert record["attention"]["layers"]
    assert (record["check"]["rows"], record["check"]["calls_per_step"]) == (64, 1)
    (layer,) = record["check"]["layers"]
    assert (layer["component"], layer["layer"], layer["steps"]) == ("transformer", 0, [0])
    assert 0.01 < layer["relative_l2"] <= layer["relative_l2_of_worst_head"]
    assert 0 < layer["density"] < 1
    outcome = sglang(*flags)
    assert outcome.code == 2
    assert "--record-attention must be a file that does not exist yet" in outcome.err


def test_generations_run_under_a_guard(sglang, tiny_pipeline, tmp_path) -> None:
    path = tmp_path / "attention.json"
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--prompt", "a fox", *SIZE),
        *("--attention-backend", "sliding_tile_attn", "--num-inference-steps", "2"),
        *("--attention-backend-config", CLOSE.partition(":")[2], "--seed", "0"),
        *("--output-path", tmp_path / "out", "--record-attention", path),
        *("--attention-guard", "sparse=0.001"),
    )
    assert outcome.code == 0, outcome.err
    record = json.loads(path.read_text())
    assert record["arguments"]["attention_guard"] == "quantized=0.05,sparse=0.001"
    guard = record["attention"]["guard"]
    assert guard["bounds"] == {"quantized": 0.05, "sparse": 0.001}
    miss, *_ = guard["missed"]
    assert (miss["component"], miss["layer"], miss["step"]) == ("transformer", 0, 0)
    assert miss["error"] > 0.001
    assert "guard: transformer.self, layer 0" in outcome.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--attention-guard", "much"), "--attention-guard must be a finite number above 0"),
        (
            ("--attention-guard", "0.05", "--backend", "diffusers"),
            "--attention-guard must not be given with --backend diffusers",
        ),
        (("--check-attention", "1"), "--check-attention needs --record-attention"),
        (
            ("--check-attention", "1", "--record-attention", "x.json", "--num-gpus", "2"),
            "--check-attention must be 0 on several GPUs",
        ),
        (
            ("--check-attention", "1", "--record-attention", "x.json", "--backend", "diffusers"),
            "--check-attention must be 0 with --backend diffusers",
        ),
        (("--record-attention", "."), "--record-attention must be a file"),
        (
            ("--record-attention", "~no-such-user/a.json"),
            "--record-attention must be a file that can",
        ),
        (("--record-attention", "/dev/null/a.json"), "--record-attention must lie in a folder"),
        (
            ("--record-attention", "a.json", "--output-path", "a.png"),
            "--record-attention must be a file of its own",
        ),
    ],
)
def test_checks_that_cannot_be_made_are_refused(sglang, tiny_pipeline, flags, message) -> None:
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--prompt", "a fox", "--device"),
        *("cpu", *flags),
    )
    assert outcome.code == 2, outcome.out
    assert message in outcome.err
