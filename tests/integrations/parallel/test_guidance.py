"""The branches of guidance on different ranks: the same latents, with half of the calls."""

import pytest
import torch

from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.integrations.conftest import generate
from tests.integrations.parallel import pipelines
from tests.integrations.parallel.pipelines import GUIDED

CFG = Mesh(cfg=2)
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("family", "steps", "calls"),
    [
        # The first step of each denoiser is computed by all, to see what it returns.
        ("wan", 3, 4),
        ("wan22", 4, 6),
        ("qwen_image", 3, 4),
        ("hunyuan_video_15", 3, 4),
        # One call for both branches: half of the batch each.
        ("ltx", 3, 3),
        ("cogvideox", 3, 3),
    ],
)
def test_each_rank_computes_its_branch(two_ranks, tiny_pipeline, fresh, family, steps, calls):
    overrides = {"num_inference_steps": steps}
    want = generate(fresh(family), family, **overrides)
    folder = tiny_pipeline(family)
    results = two_ranks.run(CFG, pipelines.latents, folder, family, overrides)
    for latents, notes, count in results:
        assert (latents - want).abs().max() <= TOLERANCE
        assert "transformer: 2 guidance branches at the same time, 1 rank each" in notes
        assert count == calls
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("family", ["hunyuan_video", "flux"])
def test_guidance_that_shows_in_the_first_step_only_is_shared_from_the_second_on(
    two_ranks, tiny_pipeline, fresh, family
):
    want = generate(fresh(family), family, **GUIDED)
    results = two_ranks.run(CFG, pipelines.latents, tiny_pipeline(family), family, GUIDED)
    for latents, _, count in results:
        assert (latents - want).abs().max() <= TOLERANCE
        assert count == 4


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("wan", {"guidance_scale": 1.0}),
        ("flux", {}),
        ("ltx", {"guidance_scale": 1.0}),
        ("cogvideox", {"guidance_scale": 1.0}),
    ],
)
def test_a_generation_without_guidance_is_refused(two_ranks, tiny_pipeline, family, overrides):
    folder = tiny_pipeline(family)
    for text in two_ranks.run(CFG, pipelines.message, folder, family, overrides):
        assert "must use classifier-free guidance under --cfg-parallel" in text
        assert "drop --cfg-parallel" in text
