"""`--cfg-parallel` without guidance is refused by what is read before the weights."""

import json
import shutil

import pytest

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.guidance import check_guided
from multimodal_gen.runtime.generator.loading import PipelineIndex
from multimodal_gen.runtime.server_args import ServerArgs

NEGATIVE = {"negative_prompt": "blurry"}


def check(folder, **given):
    """Check a generation by the files alone that describe the pipeline."""
    args = ServerArgs(model_path=str(folder), prompt="a", cfg_parallel=True, **given)
    check_guided(PipelineIndex.read(args.model_path), args)


@pytest.mark.parametrize(
    ("family", "given", "got"),
    [
        ("flux", {}, "a true_cfg_scale of 1 and no negative prompt; give --true-cfg-scale above 1"),
        ("flux", {"true_cfg_scale": 4.0}, "no negative prompt; give --true-cfg-scale above 1 and"),
        ("flux", {"guidance_scale": 1.0, **NEGATIVE}, "a true_cfg_scale of 1; give"),
        ("hunyuan_video", NEGATIVE, "a true_cfg_scale of 1; give"),
        ("qwen_image", {}, "no negative prompt; give --true-cfg-scale above 1 and --negative-pro"),
        ("wan", {"guidance_scale": 1.0}, "a guidance scale of 1; give --guidance-scale above 1"),
        ("cogvideox", {"guidance_scale": 0.5}, "a guidance scale of 0.5; give"),
        ("ltx", {"guidance_scale": 1.0}, "a guidance scale of 1; give"),
        ("hunyuan_video_15", {"guidance_scale": 1.0}, "a guidance scale of 1; give"),
    ],
    ids=str,
)
def test_a_generation_with_one_branch_is_refused(tiny_pipeline, family, given, got):
    message = f"Pipeline must use classifier-free guidance under --cfg-parallel, .* got {got}"
    with pytest.raises(UsageError, match=message):
        check(tiny_pipeline(family), **given)


def test_a_pipeline_saved_as_distilled_is_refused_at_any_scale(tiny_pipeline, tmp_path):
    folder = shutil.copytree(tiny_pipeline("flux2_klein"), tmp_path / "distilled")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    with pytest.raises(UsageError, match="its denoiser was distilled to have one branch; drop"):
        check(folder, guidance_scale=4.0)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("wan", {}),
        ("ltx", {}),
        ("hunyuan_video_15", {}),
        ("qwen_image", NEGATIVE),
        ("flux", {"true_cfg_scale": 4.0, **NEGATIVE}),
        ("hunyuan_video", {"true_cfg_scale": 2.0, **NEGATIVE}),
    ],
    ids=str,
)
def test_a_generation_with_two_branches_passes(tiny_pipeline, family, given):
    assert check(tiny_pipeline(family), **given) is None


@pytest.mark.parametrize("embeds", [False, True])
def test_the_guidance_scale_counts_where_the_denoiser_does_not_take_it(
    tiny_pipeline, tmp_path, embeds
):
    folder = tmp_path / "flux"
    shutil.copytree(tiny_pipeline("flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": embeds}))
    if not embeds:
        assert check(folder, guidance_scale=3.0, **NEGATIVE) is None
        return
    with pytest.raises(UsageError, match="got a true_cfg_scale of 1; give --true-cfg-scale above"):
        check(folder, guidance_scale=3.0, **NEGATIVE)


def test_a_pipeline_that_never_has_two_branches_is_refused_whatever_is_given(
    tiny_pipeline, tmp_path
):
    folder = tmp_path / "flux"
    shutil.copytree(tiny_pipeline("flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("FluxPipeline", "FluxFillPipeline"))
    message = "FluxFillPipeline must not run under --cfg-parallel, .* one branch; drop --cfg-par"
    with pytest.raises(UsageError, match=message):
        check(folder, guidance_scale=3.0, **NEGATIVE)
