"""What pipelines of diffusers tell of their guidance without being made."""

import diffusers
import pytest

from multimodal_gen.runtime.managers.guidance import has_branches


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
