import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import NothingAppliedError, UnsupportedBackendError, UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.transformers import NAME, attention_forward
from multimodal_gen.runtime.layers.attention import selector
from multimodal_gen.runtime.layers.attention.backends.sdpa import SDPABackend
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.testing.tiny_models import text_encoders, tokenizers

PROMPTS = ["A red fox runs", "Two dogs chase a yellow ball along the beach"]
PADDED = torch.tensor([[1] * 5 + [0] * 4, [1] * 9])


def t5(kind="t5"):
    return getattr(text_encoders, kind)(tokenizers.t5_tokenizer())


def clip_text():
    return text_encoders.clip_text(tokenizers.clip_tokenizer())


def llama():
    return text_encoders.llama(tokenizers.llama_tokenizer(""))


def qwen25_vl():
    return text_encoders.qwen25_vl(tokenizers.qwen2_tokenizer(""))


def qwen25_vl_text():
    return text_encoders.qwen25_vl_text(tokenizers.qwen2_tokenizer(""))


def qwen2():
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Qwen2Model(config).eval()


ENCODERS = {
    "t5": t5,
    "umt5": lambda: t5("umt5"),
    "clip_text": clip_text,
    "llama": llama,
    "qwen2": qwen2,
    "qwen25_vl_text": qwen25_vl_text,
}
CAUSAL = {"clip_text", "llama", "qwen2", "qwen25_vl_text"}


def make(name):
    torch.manual_seed(0)
    return ENCODERS[name]()


def encode(model, mask=None, length=9, dtype=torch.long):
    ids = torch.arange(2 * length).reshape(2, length) % 40 + 3
    with torch.no_grad():
        return model(input_ids=ids.to(dtype), attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("mask", [None, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("name", list(ENCODERS))
def test_encodings_equal_the_untouched_models(name, mask):
    model = make(name)
    expected = encode(model, mask)
    with apply(model, attention_backend="torch_sdpa") as handle:
        out = encode(model, mask)
        layers = handle.report().layers
    keep = slice(None) if mask is None else mask.bool()
    assert (out - expected)[keep].abs().max() <= 1e-5
    assert {str(layer.role) for layer in layers} == {"encoder"}
    assert {layer.calls for layer in layers} == {1}
    assert torch.equal(encode(model, mask), expected)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_padding_is_not_attended_to(name):
    model = make(name)
    with apply(model):
        padded = encode(model, PADDED)
        ids = torch.arange(5)[None] % 40 + 3
        with torch.no_grad():
            alone = model(input_ids=ids).last_hidden_state
    assert (padded[0, :5] - alone[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", sorted(CAUSAL))
@pytest.mark.parametrize("mask", [None, PADDED], ids=["full", "padded"])
def test_decoders_stay_causal(name, mask):
    model = make(name)
    ids = torch.arange(18).reshape(2, 9) + 3
    other = ids.clone()
    other[:, 4:] += 7
    with torch.no_grad(), apply(model):
        outs = [model(input_ids=x, attention_mask=mask).last_hidden_state for x in (ids, other)]
    assert torch.allclose(outs[0][:, :4], outs[1][:, :4], atol=1e-6)
    assert not torch.allclose(outs[0][:, 4:], outs[1][:, 4:], atol=1e-3)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_the_position_bias_counts(name):
    model = make(name)
    attention = model.encoder.block[0].layer[0].SelfAttention
    with torch.no_grad(), apply(model):
        before = encode(model, PADDED)
        attention.relative_attention_bias.weight.mul_(-3.0)
        after = encode(model, PADDED)
        handle_free = after
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(handle_free[1], encode(model, PADDED)[1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_encoders_stay_close(dtype):
    model = make("t5").to(dtype)
    expected = encode(model, PADDED).float()
    with apply(model):
        out = encode(model, PADDED).float()
    assert (out - expected)[PADDED.bool()].abs().max() <= 0.1


def test_an_fp32_encoder_stands_beside_a_bf16_denoiser(fresh):
    pipe = fresh("wan")
    pipe.transformer.to(torch.bfloat16)
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        latents = pipe(
            prompt="A red fox", height=64, width=96, num_frames=9, num_inference_steps=2,
            output_type="latent", generator=torch.Generator().manual_seed(0),
        )[0]  # fmt: skip
        assert all(layer.calls for layer in handle.report().layers)
    assert torch.isfinite(latents).all()


def test_grouped_queries_stay_grouped():
    model = make("llama")
    with apply(model) as handle:
        encode(model)
        names = [layer.name for layer in handle.report().layers]
    assert names == [f"layers.{i}.self_attn" for i in range(3)]


def test_the_vision_tower_is_taken_over_too():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=8,
    )  # fmt: skip
    model = CLIPVisionModel(config).eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
        with apply(model) as handle:
            out = model(pixels).last_hidden_state
    assert (out - expected).abs().max() <= 1e-5
    assert {layer.calls for layer in handle.report().layers} == {1}


def test_images_of_different_sizes_do_not_see_each_other():
    model = qwen25_vl()
    patches = torch.randn(24, 3 * 2 * 14 * 14)
    grid = torch.tensor([[1, 2, 4], [1, 4, 4]])
    with torch.no_grad():
        expected = model.model.visual(patches, grid_thw=grid).last_hidden_state
        with apply(model) as handle:
            out = model.model.visual(patches, grid_thw=grid).last_hidden_state
    assert (out - expected).abs().max() <= 1e-5
    calls = {r.name: r.calls for r in handle.report().layers if "visual" in r.name}
    assert len(calls) == 2
    assert all(calls.values())


def test_settings_are_of_this_model_alone():
    model, other = make("t5"), make("t5")
    before = {id(m): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    with apply(model):
        assert model.encoder.config._attn_implementation == NAME
        assert other.config._attn_implementation == other.encoder.config._attn_implementation
        assert other.config._attn_implementation != NAME
    after = {id(m): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert after == before
    assert not [m for m in model.modules() if "_multimodal_gen_attention" in vars(m)]


def test_sub_configurations_are_restored_one_by_one():
    model = qwen25_vl()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    with apply(model):
        assert model.model.visual.config._attn_implementation == NAME
        assert model.model.language_model.config._attn_implementation == NAME
    assert model.config._attn_implementation == "sdpa"
    assert model.model.language_model.config._attn_implementation == "eager"
    assert model.model.visual.config._attn_implementation == "sdpa"


def test_a_model_that_shares_the_configuration_object_runs_on():
    from transformers import T5EncoderModel

    model = make("t5")
    twin = T5EncoderModel(model.config).eval()
    twin.encoder.config = model.encoder.config
    for module in twin.modules():
        if type(module).__name__ == "T5Attention":
            module.config = model.encoder.config
    expected = encode(twin, PADDED)
    with apply(model) as handle:
        out = encode(twin, PADDED)
        assert {layer.calls for layer in handle.report().layers} == {0}
    assert (out - expected)[PADDED.bool()].abs().max() <= 1e-5


def test_the_setting_is_not_saved(tmp_path):
    model = make("llama")
    with apply(model):
        model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_not_attached(copied):
    model = make("llama")
    expected = encode(model)
    with apply(model) as handle:
        twin = copied(model)
        assert (encode(twin) - expected).abs().max() <= 1e-5
        assert {layer.calls for layer in handle.report().layers} == {0}


def test_an_encoder_that_returns_its_weights_is_left_alone():
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation="eager",
    )  # fmt: skip
    config.output_attentions = True
    with pytest.raises(NothingAppliedError, match=r"text_encoder \(LlamaModel\)"):
        apply(LlamaModel(config))


def test_an_encoder_that_caps_its_scores_is_left_alone():
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    capped, plain = Gemma2Model(config).eval(), llama()
    ids = torch.arange(6)[None]
    pipe = SimpleNamespace(components={"text_encoder": capped, "text_encoder_2": plain})
    with torch.no_grad():
        expected = capped(ids).last_hidden_state
        with apply(pipe) as handle:
            assert torch.equal(capped(ids).last_hidden_state, expected)
            assert any("Gemma2Model left alone, it caps" in note for note in handle.report().notes)


def test_an_impossible_backend_leaves_the_encoder_as_it_is():
    model = make("t5")
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedBackendError, match="aiter"):
        apply(model, attention_backend="aiter", strict=True)
    assert model.config._attn_implementation == before


def test_dropout_is_refused():
    model = make("llama").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with apply(model), pytest.raises(UsageError, match=r"dropout must be 0\.0.*self_attn"):
        encode(model)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "head_mask"])
def test_what_needs_an_attention_function_of_its_own_is_refused(name):
    model = make("llama")
    with apply(model):
        module = model.layers[0].self_attn
        query = torch.randn(1, 4, 3, 16)
        key = torch.randn(1, 2, 3, 16)
        with pytest.raises(UsageError, match=f"{name} must be None"):
            attention_forward(module, query, key, key, None, **{name: torch.ones(1)})


@pytest.mark.slow_cases("clip_text-full", "llama-full", "t5-padded")
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *(("t5", PADDED), ("llama", None), ("clip_text", None)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("t5", None), ("llama", PADDED), ("clip_text", PADDED))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "full" if value is None else "padded",
)
def test_encoders_compile_into_one_graph(name, mask):
    model = make(name)
    expected = encode(model, mask)
    keep = slice(None) if mask is None else mask.bool()
    with apply(model) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        out = encode(compiled, mask)
        assert (out - expected)[keep].abs().max() <= 1e-5
        assert {layer.calls for layer in handle.report().layers} == {1}


def test_a_backend_without_causality_serves_an_encoder_that_never_asks_for_it(monkeypatch):
    sdpa = tuple(replace(v, features=v.features - {Feature.CAUSAL}) for v in SDPABackend.variants)
    monkeypatch.setattr(SDPABackend, "variants", sdpa)
    selector._resolve.cache_clear()
    model = make("clip_text")
    try:
        with apply(model, component_attention_backends={"text_encoder": "torch_sdpa"}) as handle:
            assert len(handle.report().layers) == len(model.encoder.layers)
            with pytest.raises(UnsupportedBackendError, match=r"does not support causal"):
                encode(model)
    finally:
        selector._resolve.cache_clear()
