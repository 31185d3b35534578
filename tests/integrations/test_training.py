"""Gradients through stock models whose attention was taken over, with and without checkpointing."""

import copy
from types import MappingProxyType

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.integrations.diffusers import apply

METHODS = MappingProxyType(
    {
        "sliding_tile_attn": {"window": [1, 1, 3], "tile_size": [1, 2, 2], "skip_time_steps": 0},
        "video_sparse_attn": {"sparsity": 0.7},
        "sla_attn": {"topk_ratio": 0.2, "BLKQ": 64},
        "vmoba_attn": {
            "temporal_chunk_size": 1,
            "spatial_layer": 0,
            "st_layer": 0,
            "first_full_step": 0,
            "moba_select_mode": "topk",
            "temporal_topk": 1,
        },
    }
)


@pytest.fixture(scope="module")
def model():
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
    )


def gradients(model) -> list[torch.Tensor]:
    torch.manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 16, 16),
        "timestep": torch.tensor([900.0]),
        "encoder_hidden_states": torch.randn(1, 7, 32),
    }
    loss = model(**inputs)[0].square().mean()
    # Autograd recomputes in another thread on a GPU; here, after the call.
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpointed_model_recomputes_in_the_context_of_its_call(model, method):
    with apply(model, attention_backend=method, attention_backend_config=METHODS[method]) as handle:
        plain = gradients(model)
        model.enable_gradient_checkpointing()
        own = model._gradient_checkpointing_func
        try:
            found = gradients(model)
            assert copy.deepcopy(model)._gradient_checkpointing_func is own
        finally:
            handle.remove()
            assert model._gradient_checkpointing_func is own
            model.disable_gradient_checkpointing()
    ran = {str(e.selection.backend) for layer in handle.report().layers for e in layer.entries}
    assert method in ran
    for one, other in zip(plain, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("method", "given", "remedy"),
    [
        (
            "sparse_video_gen_2_attn",
            {"svg2_first_times_fp": 0, "svg2_first_layers_fp": 0},
            "train with a dense backend",
        ),
        ("sage_sla_attn", {}, "train with sla_attn"),
    ],
)
def test_methods_without_a_backward_pass_say_what_to_do(model, method, given, remedy):
    with (
        apply(model, attention_backend=method, attention_backend_config=given),
        pytest.raises(UnsupportedBackendError, match=f"has no backward; .* or {remedy}"),
    ):
        gradients(model)
