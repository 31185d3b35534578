"""Stock pipelines that make a video chunk by chunk, on our layers and on diffusers' own."""

import pytest
import torch

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.testing.tiny_models.streaming import ANYFLOW_FAR

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")


def latents_of(pipe, **settings) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    call = {**ANYFLOW_FAR.generate_kwargs, "output_type": "latent", **settings}
    return pipe(**call, generator=torch.Generator().manual_seed(0)).frames


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_past_that_is_encoded_by_block_masks_and_read_again_gives_the_stock_latents(guidance):
    pipe = ANYFLOW_FAR.build(0)
    stock = latents_of(pipe, guidance_scale=guidance)
    with apply(pipe) as handle:
        ours = latents_of(pipe, guidance_scale=guidance)
        layers = {layer.name: layer for layer in handle.report().layers}
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)
    assert torch.equal(latents_of(pipe, guidance_scale=guidance), stock)
    # Five chunks of two steps, and the past of four of them.
    (entry,), (detour,) = layers["blocks.0.attn1"].entries, layers["blocks.0.attn1"].detours
    assert (entry.calls, detour.calls) == (10, 4)
    assert "the mask is one of blocks" in detour.selection.reason


@pytest.mark.slow
def test_a_sparse_backend_leaves_a_past_of_other_tokens_dense_and_says_so():
    pipe = ANYFLOW_FAR.build(0)
    stock = latents_of(pipe)
    with apply(pipe, attention_backend="video_sparse_attn") as handle:
        ours = latents_of(pipe)
        report = handle.report()
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)
    assert any("its latent grid is unknown" in note for note in report.notes)
