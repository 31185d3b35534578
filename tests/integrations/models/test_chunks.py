"""Stock models of causal chunks, on our layers and on diffusers' own attention."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multimodal_gen.integrations.causal_blocks import _plan
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.testing.tiny_models.streaming import ANYFLOW_FAR
from tests.helpers.denoisers import SPLIT

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


class MasksOfPairs(TorchDispatchMode):
    """How many bool tensors with an entry for every pair of `tokens` are made."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.count = tokens, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool:
            self.count += tuple(out.shape[-2:]) == (self.tokens, self.tokens)
        return out


@pytest.fixture
def skyreels():
    """A model whose blocks of two frames see no later ones, and inputs of 6 x 4 x 6 tokens."""
    model, inputs = SPLIT["skyreels v2"].make(num_layers=1, num_frame_per_block=2)
    return model, {**inputs, "hidden_states": torch.randn(2, 4, 6, 8, 12)}


@torch.no_grad()
def run(model, inputs):
    return model(**inputs, return_dict=False)[0]


def test_blocks_of_frames_are_causal_without_a_mask_of_all_tokens(skyreels):
    model, inputs = skyreels
    with MasksOfPairs(6 * 4 * 6) as made:
        stock = run(model, inputs)
    assert made.count
    with apply(model) as handle:
        with MasksOfPairs(6 * 4 * 6) as made:
            ours = run(model, inputs)
        layers = {layer.name: layer for layer in handle.report().layers}
        assert model.config.num_frame_per_block == 2
        model._set_ar_attention(3)
        wider = run(model, inputs)
        assert model.config.num_frame_per_block == 3
    assert made.count == 0
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)
    (detour,) = layers["blocks.0.attn1"].detours
    assert (detour.calls, "the mask is one of blocks" in detour.selection.reason) == (1, True)
    assert layers["blocks.0.attn2"].detours == ()
    torch.testing.assert_close(run(model, inputs), wider, rtol=0, atol=1e-5)
    model._set_ar_attention(1)
    assert (run(model, inputs) - stock).abs().max() > 1e-3


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_fails_leaves_the_configuration_as_it_was(skyreels, error, monkeypatch):
    model, inputs = skyreels
    stock = run(model, inputs)

    def fail(*args, **kwargs):
        raise error

    def run_and_fail():
        with monkeypatch.context() as patch:
            patch.setattr(model.blocks[0], "forward", fail)
            run(model, inputs)

    with apply(model):
        with pytest.raises(error):
            run_and_fail()
        torch.testing.assert_close(run(model, inputs), stock, rtol=0, atol=1e-5)
        with pytest.raises(error):
            run_and_fail()
    assert model.config.num_frame_per_block == 2
    assert torch.equal(run(model, inputs), stock)


def test_layers_on_several_streams_share_the_plan_of_causal_blocks() -> None:
    assert _plan(2, 6, torch.device("cpu")).shared
