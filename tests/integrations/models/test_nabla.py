"""Kandinsky 5 with the mask of its own NABLA, and with `nabla_attn` in its place."""

from types import SimpleNamespace

import torch

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.denoisers import SPLIT, normal

GRID = (3, 16, 24)


def made():
    """Return a model whose layers choose by NABLA, and inputs of 18 tiles."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    model = SPLIT["kandinsky 5"].model().eval()
    for parameter in model.parameters():  # made with outputs of zero
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.register_to_config(
        attention_type="nabla", attention_P=0.5, attention_wT=3, attention_wH=1, attention_wW=3
    )
    frames, height, width = GRID
    inputs = {
        **SPLIT["kandinsky 5"].inputs(),
        "hidden_states": normal(1, frames, 2 * height, 2 * width, 4),
        "visual_rope_pos": tuple(torch.arange(size) for size in GRID),
    }
    return model, inputs


def sparse_params(model, inputs):
    """Return what a pipeline hands to the model."""
    from diffusers import Kandinsky5T2VPipeline

    pipe = SimpleNamespace(transformer=model, fast_sta_nabla=Kandinsky5T2VPipeline.fast_sta_nabla)
    return Kandinsky5T2VPipeline.get_sparse_params(pipe, inputs["hidden_states"], "cpu")


@torch.no_grad()
def test_nabla_attn_computes_what_the_model_does_with_its_own_mask() -> None:
    model, inputs = made()
    dense = model(**inputs).sample
    params = sparse_params(model, inputs)
    with apply(model, attention_backend="nabla_attn") as handle:
        own = model(**inputs, sparse_params=params).sample
        notes = [detour.selection.reason for x in handle.report().layers for detour in x.detours]
    assert "the mask is one of blocks" in " ".join(notes)
    model.register_to_config(attention_type="regular")
    assert sparse_params(model, inputs) is None
    config = {"P": 0.5, "wT": 3, "wH": 1, "wW": 3}
    with apply(model, attention_backend="nabla_attn", attention_backend_config=config) as handle:
        ours = model(**inputs).sample
        ran = {x.selection.backend for layer in handle.report().layers for x in layer.entries}
    assert AttentionBackendEnum.NABLA_ATTN in ran
    assert (own - dense).norm() > 1e-3 * dense.norm()
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)
