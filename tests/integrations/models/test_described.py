"""A model without an adapter whose user says where the video and the text are."""

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.described_tokens import (
    describe_tokens,
    parse_latent_grid,
    parse_text_rows,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.runtime.server_args import ServerArgs

SPARSE = {
    "attention_backend": "video_sparse_attn",
    "attention_backend_config": {"VSA_sparsity": 0.5, "dense_above": 1.0},
}


def cogview(height=16, width=24):
    """Return a model with 7 text tokens in front of the image's, and its arguments."""
    from diffusers import CogView4Transformer2DModel

    torch.manual_seed(3)
    model = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=12,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=16,
        sample_size=16,
        rope_axes_dim=(32, 32),
    )
    size = torch.tensor([[float(height), float(width)]])
    inputs = {
        "hidden_states": torch.randn(1, 4, height, width),
        "timestep": torch.full((1,), 700.0),
        "encoder_hidden_states": torch.randn(1, 7, 12),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(1, 2),
    }
    return model.eval(), inputs


def attend(model, inputs, **settings):
    with apply(model, **SPARSE, **settings) as handle, torch.no_grad():
        return model(**inputs, return_dict=False)[0], handle.report()


def ran(report):
    return {e.selection.backend for layer in report.layers for e in layer.entries if e.calls}


def test_its_layers_run_sparse_where_the_user_says_how_its_tokens_lie():
    model, inputs = cogview()
    _, report = attend(model, inputs, latent_grid="1x8x12", text_rows="0-7")
    assert ran(report) == {AttentionBackendEnum.VIDEO_SPARSE_ATTN}
    assert report.notes[0] == (
        "transformer: CogView4Transformer2DModel has no adapter, its tokens are as given: "
        "latent_grid=1x8x12, text_rows=0-7"
    )


def test_a_grid_that_does_not_fit_a_call_leaves_it_dense_and_says_why():
    model, inputs = cogview()
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0]
    wrong = {"latent_grid": (1, 8, 8), "text_rows": (0, 7)}
    out, report = attend(model, inputs, **wrong)
    torch.testing.assert_close(out, stock, atol=1e-5, rtol=1e-5)
    assert not ran(report)
    reasons = {d.selection.reason for layer in report.layers for d in layer.detours if d.calls}
    assert any(
        "latent_grid=1x8x8, text_rows=0-7 makes 71 tokens, some calls have 103 tokens" in reason
        for reason in reasons
    )
    with pytest.raises(UnsupportedBackendError, match="makes 71 tokens"):
        attend(model, inputs, **wrong, strict=True)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (
            {"latent_grid": "1x8x12"},
            "some calls have 103 tokens; if 7 are text, give text_rows=0-7 ",
        ),
        (
            {"latent_grid": "1x1x103", "text_rows": "0-7"},
            "some calls have 103 tokens, those of the grid alone: .* leave text_rows out",
        ),
    ],
)
def test_what_may_be_meant_by_rows_that_do_not_fit_is_said(given, hint):
    model, inputs = cogview()
    with pytest.raises(UnsupportedBackendError, match=hint):
        attend(model, inputs, **given, strict=True)


@pytest.mark.parametrize(
    ("grid", "rows", "message"),
    [
        ("8x12", None, r"latent_grid must be frames x rows x columns .* got '8x12'"),
        ("1x8x0", None, r"latent_grid must be .* >= 1"),
        ((1, 8, 12.0), None, r"latent_grid must be .* got \(1, 8, 12.0\)"),
        ((1, 8, True), None, "latent_grid must be"),
        ("99999x99999x99999", None, "latent_grid must be"),
        ("1x8x12", "7", r"text_rows must be the first row .* got '7'"),
        ("1x8x12", "7-7", "text_rows must be the first row"),
        ("1x8x12", "3-10", "text_rows must start at 0, .* or at 96, behind the 1x8x12, got 3-10"),
        (None, "0-7", "text_rows needs latent_grid"),
    ],
)
def test_bad_descriptions_get_one_error(grid, rows, message):
    model, _ = cogview()
    with pytest.raises(ConfigError, match=message):
        apply(model, latent_grid=grid, text_rows=rows)


def test_a_model_with_an_adapter_is_not_described(fresh):
    with pytest.raises(UsageError, match=r"--latent-grid, .* without an adapter, got .*WanTr"):
        apply(fresh("wan").transformer, latent_grid="1x8x12")


def test_the_flags_say_the_same():
    args = ServerArgs(model_path="m", latent_grid="21x45x80", text_rows="0-226")
    assert (args.latent_grid, args.text_rows) == ((21, 45, 80), (0, 226))
    found = describe_tokens(args.latent_grid, args.text_rows)
    assert str(found) == "latent_grid=21x45x80, text_rows=0-226"
    with pytest.raises(ConfigError, match="--latent-grid must be"):
        ServerArgs(model_path="m", latent_grid="45x80")
    with pytest.raises(ConfigError, match="--text-rows needs --latent-grid"):
        ServerArgs(model_path="m", text_rows="0-226")
    with pytest.raises(ConfigError, match="--latent-grid must not be given with --backend diff"):
        ServerArgs(model_path="m", backend="diffusers", latent_grid="1x2x3")
    assert parse_latent_grid([1, 2, 3]) == (1, 2, 3)
    assert parse_text_rows(None) is None
