from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.passthrough import (
    DiffusersAttention,
    choose_backend,
    diffusers_backend_names,
)


def _wan():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=1,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=8,
        num_layers=1,
    )


def _cogvideox():
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=1,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=8,
        num_layers=1,
    )


def _pipe(**components) -> SimpleNamespace:
    return SimpleNamespace(components=components)


def _backends(model) -> set:
    return {
        module.processor._attention_backend
        for module in model.modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    }


@pytest.fixture(autouse=True)
def _active_backend_is_left_alone():
    before = _AttentionBackendRegistry._active_backend
    yield
    assert _AttentionBackendRegistry._active_backend is before


def test_every_denoiser_takes_the_backend_and_gives_it_back() -> None:
    pipe = _pipe(transformer=_wan(), transformer_2=_wan(), text_encoder=torch.nn.Linear(1, 1))
    with DiffusersAttention(pipe, "_native-Math") as session:
        for name in ("transformer", "transformer_2"):
            assert _backends(pipe.components[name]) == {AttentionBackendName._NATIVE_MATH}
        report = session.report()
    assert report.layers == {"transformer": 2, "transformer_2": 2}
    assert report.summary().splitlines() == [
        "transformer (2 layers): diffusers _native_math [settings]",
        "transformer_2 (2 layers): diffusers _native_math [settings]",
    ]
    assert _backends(pipe.components["transformer"]) == {None}


def test_what_the_user_had_set_before_comes_back() -> None:
    model = _wan()
    model.blocks[0].attn1.processor._attention_backend = AttentionBackendName.FLEX
    with DiffusersAttention(_pipe(transformer=model), "native"):
        assert _backends(model) == {AttentionBackendName.NATIVE}
    assert model.blocks[0].attn1.processor._attention_backend is AttentionBackendName.FLEX
    assert model.blocks[0].attn2.processor._attention_backend is None


def test_a_model_on_which_nothing_changes_is_refused() -> None:
    pipe = _pipe(transformer=_cogvideox())
    with pytest.raises(UsageError, match="native changes nothing in SimpleNamespace: the attent"):
        DiffusersAttention(pipe, "native")


def test_a_model_that_is_not_reached_beside_one_that_is_gets_reported() -> None:
    pipe = _pipe(transformer=_wan(), unet=_cogvideox())
    report = DiffusersAttention(pipe, "native")
    assert report.report().layers == {"transformer": 2, "unet": 0}
    assert report.report().summary().splitlines()[1] == (
        "unet: its own attention, which diffusers' backends do not reach"
    )
    report.remove()


def test_a_requirement_of_diffusers_is_passed_on_and_leaves_nothing_changed(monkeypatch) -> None:
    first, second = _wan(), _wan()

    def refuse(name: str) -> None:
        raise RuntimeError("needs a kernel.\nMore text.")

    monkeypatch.setattr(second, "set_attention_backend", refuse)
    with pytest.raises(UsageError, match=r"cannot use attention backend native here: needs a ker"):
        DiffusersAttention(_pipe(transformer=first, transformer_2=second), "native")
    assert _backends(first) == {None}


def test_without_a_name_nothing_changes_and_the_default_is_reported() -> None:
    model = _wan()
    report = DiffusersAttention(_pipe(transformer=model), notes=("why",)).report()
    assert _backends(model) == {None}
    assert report.as_dict() == {
        "diffusers_backend": "native",
        "source": "diffusers' default",
        "layers": {"transformer": 2},
        "notes": ["why"],
    }
    assert report.summary().endswith("\nnote: why")


@pytest.mark.parametrize(
    ("backend", "name", "chosen"),
    [
        ("auto", None, "sglang"),
        ("auto", "fa3", "sglang"),
        ("auto", "xformers", "sglang"),
        ("auto", "_native_cudnn", "diffusers"),
        ("auto", "FLASH", "diffusers"),
        ("sglang", "sliding-tile-attn", "sglang"),
        ("diffusers", "xformers", "diffusers"),
        ("diffusers", None, "diffusers"),
    ],
)
def test_the_name_decides_whose_attention_runs(backend: str, name, chosen: str) -> None:
    picked, reason = choose_backend(backend, name)
    assert picked == chosen
    assert reason


@pytest.mark.parametrize(
    ("backend", "name", "rule"),
    [
        (
            "auto",
            "tourch_sdpa",
            r"must be one of fa, .* with --backend sglang, got 'tourch_sdpa', d",
        ),
        ("auto", "qqq", r"with --backend sglang, got 'qqq'$"),
        ("sglang", "native", r"native is an attention backend of diffusers, use it with --backe"),
        ("diffusers", "sliding_tile_attn", r"must be one of flash, .*use it with --backend sglang"),
        ("diffusers", "nativ", r"got 'nativ', did you mean 'native'\?"),
    ],
)
def test_a_name_that_is_not_the_backends_is_refused(backend: str, name: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        choose_backend(backend, name)


def test_the_names_are_those_of_this_diffusers() -> None:
    assert set(diffusers_backend_names()) == {member.value for member in AttentionBackendName}
