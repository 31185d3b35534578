"""A comparison of a trained model, whose videos show what their caption says."""

import importlib
from pathlib import Path

import pytest

import multimodal_gen
from multimodal_gen.runtime.comparison.record import Report

SHAPES = Path(__file__).resolve().parents[3] / "scripts" / "shapes"
CAPTION = "a red ball moves right over a striped ground"
EVERYTHING = "video_sparse_attn:sparsity=0,dense_above=1"
NEXT_TO_NOTHING = "video_sparse_attn:topk=1"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    from diffusers import DiffusionPipeline

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SHAPES))
        score = importlib.import_module("score").score
    return multimodal_gen.compare(
        DiffusionPipeline.from_pretrained(SHAPES / "small"),
        prompts=CAPTION,
        backends=NEXT_TO_NOTHING,
        floor=EVERYTHING,
        output=tmp_path_factory.mktemp("trained") / "out",
        score=score,
        replayed_steps=0,
        page=False,
        height=128,
        width=128,
        num_frames=17,
        num_inference_steps=3,
        guidance_scale=3.0,
    )


def test_dense_attention_shows_what_the_caption_says(report: Report) -> None:
    (clip,) = report.reference.generations
    assert clip.score >= 0.8


def test_a_method_that_leaves_nothing_out_shows_the_same(report: Report) -> None:
    (exact,) = report.floor
    assert exact.generations[0].score == report.reference.generations[0].score
    assert exact.frames_mean.psnr > 50


def test_a_method_that_leaves_nearly_all_out_shows_another_video(report: Report) -> None:
    ((exact,), (sparse,)) = report.floor, report.candidates
    assert sparse.verdict.word == "visible"
    assert sparse.cost.density < 0.1
    assert sparse.frames_mean.psnr < exact.frames_mean.psnr - 10
    assert sparse.differences["score"].mean == pytest.approx(
        sparse.generations[0].score - report.reference.generations[0].score
    )
