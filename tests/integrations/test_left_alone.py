"""What `apply` cannot take over, and what is set or called after it: nothing crashes."""

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.integrations.diffusers import apply
from tests.helpers.denoisers import COMMON, SPLIT
from tests.integrations.conftest import generate


def sparse(backend="sla_attn"):
    return {"attention_backend": backend, "attention_backend_config": {"topk_ratio": 0.5}}


def subclass_of(cls):
    """Return a processor class that calls the one it derives from."""

    class Scaled(cls):
        def __call__(self, attn, *args, **kwargs):
            return super().__call__(attn, *args, **kwargs)

    return Scaled


def test_a_processor_that_calls_its_base_is_taken_over(fresh, stock_latents):
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    pipe = fresh("wan")
    for block in pipe.transformer.blocks:
        block.attn1.set_processor(subclass_of(WanAttnProcessor)())
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        out = generate(pipe, "wan")
        report = handle.report()
    torch.testing.assert_close(out, stock_latents("wan"))
    assert all(layer.calls for layer in report.layers if layer.component == "transformer")
    assert not any("modules left alone" in note for note in report.notes)


def test_a_component_that_cannot_be_taken_over_is_left_as_it_is(fresh, stock_latents):
    class Eager:
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    pipe = fresh("wan")
    for module in pipe.transformer.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(Eager(module.processor))
    pipe.register_modules(transformer_2=fresh("wan").transformer)
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        notes = handle.report().notes
        assert not any(type(m.attn1.processor).__name__ != "Eager" for m in pipe.transformer.blocks)
    assert any(n.startswith("transformer: ") and "left alone, Eager calls" in n for n in notes)


def test_processors_set_after_apply_are_taken_over_again_and_stay_after_remove(
    fresh, stock_latents
):
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    pipe = fresh("wan")
    mine = WanAttnProcessor()
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        pipe.transformer.blocks[0].attn1.set_processor(mine)
        out = generate(pipe, "wan")
        report = handle.report()
    torch.testing.assert_close(out, stock_latents("wan"))
    calls = {r.calls for r in report.layers if r.component == "transformer"}
    assert calls == {6}
    assert any(
        "1 attention modules got a WanAttnProcessor after apply()" in n for n in report.notes
    )
    assert pipe.transformer.blocks[0].attn1.processor is mine


def test_a_processor_set_after_apply_that_cannot_be_taken_over_runs_with_a_warning(fresh):
    class Nothing:
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return hidden_states

    pipe = fresh("wan")
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        pipe.transformer.blocks[0].attn1.set_processor(Nothing())
        generate(pipe, "wan")
        notes = handle.report().notes
    assert any(
        "set after apply() run as they are, without its backends: Nothing" in n for n in notes
    )


def test_handing_modules_to_diffusers_is_warned_of_once(fresh, caplog):
    pipe = fresh("wan")
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        pipe.transformer.set_attention_backend("native")
        generate(pipe, "wan")
        notes = handle.report().notes
    assert sum("set_attention_backend after apply() handed" in note for note in notes) == 1
    each = [note for note in notes if "was handed to diffusers" in note]
    assert len(each) == 1
    assert each[0].startswith("transformer: blocks.0.attn1 (and 3 more) was handed")


@pytest.mark.parametrize("backend", ["torch_sdpa", "sla_attn"])
def test_a_model_without_data_gives_the_shapes_of_the_stock_one(backend):
    model, inputs = COMMON["wan"].make()
    model, inputs = model.to("meta"), {k: v.to("meta") for k, v in inputs.items()}
    with torch.no_grad(), apply(model, attention_backend=backend):
        assert model(**inputs)[0].shape == inputs["hidden_states"].shape


def test_a_call_without_samples_gives_none():
    model, inputs = SPLIT["anyflow"].make()
    inputs = {k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with torch.no_grad():
        expected = model(**inputs)[0]
        for backend in ("torch_sdpa", "sla_attn"):
            with apply(model, attention_backend=backend):
                assert model(**inputs)[0].shape == expected.shape


def test_images_without_a_grid_run_dense_and_are_reported(fresh):
    """A picture in front of the image's own tokens, which then lie on no grid."""
    model = fresh("flux").transformer
    ids = torch.zeros(32, 3)
    ids[:16, 0] = 1
    ids[:, 1] = torch.arange(32) % 16 // 4
    ids[:, 2] = torch.arange(32) % 4
    inputs = {
        "hidden_states": torch.randn(1, 32, model.config.in_channels),
        "encoder_hidden_states": torch.randn(1, 4, model.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, model.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(4, 3),
        "guidance": torch.tensor([3.5]) if model.config.guidance_embeds else None,
    }
    with torch.no_grad():
        expected = model(**inputs)[0]
        with apply(model, **sparse()) as handle:
            torch.testing.assert_close(model(**inputs)[0], expected, atol=1e-5, rtol=1e-5)
            report = handle.report()
        with (
            apply(model, **sparse(), strict=True),
            pytest.raises(UnsupportedBackendError, match="must get tokens of a latent grid"),
        ):
            model(**inputs)
    detours = [detour for layer in report.layers for detour in layer.detours]
    assert detours
    assert all(
        "works on a latent grid, and this call of the model has none" in d.selection.reason
        for d in detours
    )
    assert sum("such calls run dense" in note for note in report.notes) == 1


def test_calls_with_a_few_keys_of_their_own_run_dense(fresh):
    """As an IP-adapter: image queries and four keys."""

    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    class Twice(WanAttnProcessor):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            out = super().__call__(attn, hidden_states, *args, **kwargs)
            return out + 0 * super().__call__(attn, hidden_states[:, :4], None, None, None).mean()

    pipe = fresh("wan")
    pipe.transformer.blocks[0].attn1.set_processor(Twice())
    with apply(pipe, **sparse()) as handle:
        generate(pipe, "wan")
        report = handle.report()
    (layer,) = [r for r in report.layers if r.name == "blocks.0.attn1"]
    assert [d.calls for d in layer.detours] == [6]
    assert "fewer tokens than it has" in layer.detours[0].selection.reason


def test_masks_that_are_no_tensors_and_no_block_masks_are_left_to_diffusers(fresh, monkeypatch):
    class Bias:
        """As other packages have them."""

    from multimodal_gen.integrations import processor_patch

    pipe = fresh("wan")
    x = torch.randn(1, 128, 2, 16)
    mask = Bias()
    asked = []

    def stock(*tensors, attn_mask, backend, **options):
        asked.append((attn_mask, backend))
        return tensors[0]

    monkeypatch.setattr(processor_patch, "_stock_dispatch", lambda: stock)
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        layer = pipe.transformer.blocks[0].attn1.processor._attention_backend
        assert processor_patch.dispatch(x, x, x, attn_mask=mask, backend=layer) is x
        notes = handle.report().notes
    assert asked == [(mask, None)]
    assert any("calls of transformer with a Bias as their mask are left" in n for n in notes)
