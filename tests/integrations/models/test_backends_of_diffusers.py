"""Models that go by diffusers' own backends: what they do by those stays theirs."""

from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import NothingAppliedError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.processor_patch import CannotPatchError, patched_class
from tests.helpers.denoisers import SPLIT


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_modules_that_want_flex_attention_run_its_masks_on_layers():
    case = replace(SPLIT["anyflow"], kind="AnyFlowFARTransformer3DModel")
    model, inputs = case.make(num_layers=1)
    inputs = {
        "hidden_states": torch.randn(2, 2, 4, 8, 8),
        "timestep": inputs["timestep"][:, 1:],
        "r_timestep": inputs["r_timestep"][:, 1:],
        "encoder_hidden_states": inputs["encoder_hidden_states"],
        "chunk_partition": [1, 1],
    }
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0]
        with apply(model, attention_backend="torch_sdpa") as handle:
            out = model(**inputs, return_dict=False)[0]
            report = handle.report()
    torch.testing.assert_close(out, stock)
    found = {layer.name: layer for layer in report.layers}
    assert sorted(found) == ["blocks.0.attn1", "blocks.0.attn2"]
    (detour,) = found["blocks.0.attn1"].detours
    assert (detour.calls, "the mask is one of blocks" in detour.selection.reason) == (1, True)
    assert not any("left alone" in note for note in report.notes)


def test_modules_that_want_another_backend_of_diffusers_keep_it():
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    class Wants(WanAttnProcessor):
        _attention_backend = "sage"

    with pytest.raises(CannotPatchError, match="Wants wants diffusers' backend sage"):
        patched_class(Wants)


def test_a_model_that_asks_which_backend_it_has_is_left_as_it_is():
    from diffusers import AceStepTransformer1DModel

    model = AceStepTransformer1DModel(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        in_channels=6,
        audio_acoustic_hidden_dim=2,
    )
    with pytest.raises(NothingAppliedError, match="asks which of diffusers' backends it has"):
        apply(model)
    with torch.no_grad():
        out = model(
            hidden_states=torch.randn(1, 4, 2),
            timestep=torch.ones(1),
            timestep_r=torch.ones(1),
            encoder_hidden_states=torch.randn(1, 3, 16),
            context_latents=torch.randn(1, 4, 4),
        )[0]
    assert out.shape == (1, 4, 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_calls_that_name_flex_attention_run_on_layers():
    from diffusers import Kandinsky6SRTransformer3DModel

    torch.manual_seed(3)
    model = Kandinsky6SRTransformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        time_dim=16,
        model_dim=32,
        ff_dim=24,
        num_visual_blocks=1,
        axes_dims=(4, 6, 6),
    ).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    inputs = torch.randn(1, 2, 16, 16, 9), torch.full((1,), 500.0)
    with torch.no_grad():
        stock = model(*inputs, return_dict=False)[0]
        with apply(model) as handle:
            out = model(*inputs, return_dict=False)[0]
            (layer,) = handle.report().layers
    torch.testing.assert_close(out, stock)
    assert [detour.calls for detour in layer.detours] == [1]
    assert "the mask is one of blocks" in layer.detours[0].selection.reason


def test_calls_that_are_left_to_diffusers_keep_the_backend_that_was_set(fresh, monkeypatch):
    from multimodal_gen.integrations import processor_patch

    asked = []

    def stock(*tensors, backend, **options):
        asked.append(backend)
        return tensors[0]

    monkeypatch.setattr(processor_patch, "_stock_dispatch", lambda: stock)
    transformer = fresh("wan").transformer
    transformer.blocks[0].attn1.set_attention_backend("flex")
    x = torch.randn(1, 128, 2, 16)
    mask = object()  # such as the biases of other packages
    with apply(transformer, attention_backend="torch_sdpa"):
        layer = transformer.blocks[0].attn1.processor._attention_backend
        assert processor_patch.dispatch(x, x, x, attn_mask=mask, backend=layer) is x
    assert asked == ["flex"]
