"""What pipelines of diffusers tell of their guidance without being made."""

import diffusers
import pytest

from multimodal_gen.runtime.managers.guidance import guides_at, has_branches


@pytest.mark.parametrize(
    ("pipeline", "scale", "guided"),
    [
        ("WanPipeline", 1.0, False),
        ("WanPipeline", 1.5, True),
        ("ZImagePipeline", 0.0, False),
        ("ZImagePipeline", 0.5, True),
        ("CogVideoXPipeline", 1.0, False),
        ("CogVideoXPipeline", 6.0, True),
        ("Flux2KleinPipeline", 1.0, False),
        ("Flux2KleinPipeline", 4.0, None),  # unless it is distilled
        ("LTX2Pipeline", 1.0, None),  # the scale of its sound counts too
        ("LTX2Pipeline", 3.0, True),
    ],
)
def test_the_scale_tells_as_the_pipeline_reads_it(pipeline, scale, guided):
    assert guides_at(getattr(diffusers, pipeline), scale) is guided


@pytest.mark.parametrize("distilled", [True, False])
def test_a_pipeline_that_was_saved_as_distilled_does_not_guide(distilled):
    settings = {"is_distilled": distilled}
    assert guides_at(diffusers.Flux2KleinPipeline, 4.0, settings) is not distilled


@pytest.mark.parametrize(
    ("pipeline", "denoiser", "possible"),
    [
        ("Flux2Pipeline", "Flux2Transformer2DModel", False),
        ("Flux2KleinPipeline", "Flux2Transformer2DModel", True),
        ("FluxFillPipeline", "FluxTransformer2DModel", False),
        ("FluxPipeline", "FluxTransformer2DModel", True),
        ("HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel", True),
        ("DiTPipeline", "DiTTransformer2DModel", True),  # guides by a class of its own
    ],
)
def test_a_distilled_denoiser_that_nothing_else_guides_has_one_branch(pipeline, denoiser, possible):
    found = has_branches(getattr(diffusers, pipeline), [getattr(diffusers, denoiser)])
    assert found is possible
