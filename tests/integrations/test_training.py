"""Gradients through stock models whose attention was taken over, with and without checkpointing."""

import copy

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.denoisers import COMMON
from tests.helpers.methods import SMALL

METHODS = {
    name: SMALL[name]
    for name in ("sliding_tile_attn", "video_sparse_attn", "sla_attn", "vmoba_attn")
}


@pytest.fixture(scope="module")
def model():
    return COMMON["wan"].make()[0]


def output(model, *, grad: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 4, 3, 16, 16),
        "timestep": torch.tensor([900.0]),
        "encoder_hidden_states": torch.randn(1, 7, 12),
    }
    with torch.set_grad_enabled(grad):
        return model(**inputs)[0]


def gradients(model) -> list[torch.Tensor]:
    loss = output(model, grad=True).square().mean()
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "method",
    [m if m == "sla_attn" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
)
def test_compiled_blocks_have_the_gradients_of_eager_ones(model, method):
    torch._dynamo.reset()  # tests before may have used up how often a layer is compiled
    model, options = copy.deepcopy(model), {"attention_backend_config": METHODS[method]}
    train = method in ("sla_attn", "video_sparse_attn")
    with apply(model, attention_backend=method, **options, train=train):
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "proj_l" in name or "gate" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        plain = gradients(model)
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        found = gradients(model)
    for one, other in zip(plain, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:Some weights of the model checkpoint")
@pytest.mark.parametrize(
    ("method", "part", "count"),
    [("sla_attn", "proj_l", 2), ("video_sparse_attn", "to_gate_compress", 2)],
)
def test_trained_parts_are_made_trained_saved_and_found_again(model, tmp_path, method, part, count):
    options = {"attention_backend": method, "attention_backend_config": METHODS[method]}
    before = list(model.state_dict())
    with apply(model, **options):
        plain = output(model)
    with apply(model, **options, train=True) as handle:
        torch.testing.assert_close(output(model), plain)  # zeros
        names = {n for n, _ in model.named_parameters()} - set(before)
        owners = {f"blocks.{i}.attn1.{part}" for i in range(count)}
        assert names == {f"{owner}.{kind}" for owner in owners for kind in ("weight", "bias")}
        assert any("2 layers got new gates or projections" in n for n in handle.report().notes)
        trained = [model.get_parameter(name) for name in sorted(names)]
        optimizer = torch.optim.Adam(trained, lr=0.05)
        target = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(8):
            loss = (output(model, grad=True) - target).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[-1] < losses[0]
        model.zero_grad()
        wanted = output(model)
        model.save_pretrained(tmp_path)
    assert list(model.state_dict()) == before
    fresh = type(model).from_pretrained(tmp_path)
    with apply(fresh, **options):
        torch.testing.assert_close(output(fresh), wanted)
    with apply(fresh, **options, train=True) as handle:
        torch.testing.assert_close(output(fresh), wanted)
        assert not any("new gates" in note for note in handle.report().notes)
        assert fresh.get_submodule(f"blocks.0.attn1.{part}").weight.requires_grad


def test_sparsity_may_change_over_the_steps_of_a_training_run(model):
    model, found = copy.deepcopy(model), []
    given = {"sparsity": {0: 0.0, 0.5: 0.7}}
    with apply(model, attention_backend="video_sparse_attn", attention_backend_config=given) as own:
        model.enable_gradient_checkpointing()
        for step in range(4):
            with set_forward_context(step, num_steps=4):
                loss = output(model, grad=True).square().mean()
            found.append(torch.autograd.grad(loss, model.proj_out.weight)[0])
        (entry, *_) = own.report().layers[0].entries
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.allclose(found[1], found[2])
    densities = dict(entry.densities)
    assert densities[0] == densities[1] == 1
    assert densities[2] == densities[3] <= 0.5


def test_what_cannot_be_trained_is_refused_before_anything_changes(model):
    before = list(model.state_dict())
    with pytest.raises(UnsupportedBackendError, match="or train with sla_attn"):
        apply(model, attention_backend="sage_sla_attn", train=True)
    assert list(model.state_dict()) == before


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"refresh_every": 4}, "`refresh_every` of video_sparse_attn must be 1 where a gradient"),
        ({"skip_below": 30}, "`skip_below` of video_sparse_attn must be left out where a gradient"),
    ],
)
def test_parameters_without_gradients_are_refused_before_anything_changes(model, given, rule):
    before = list(model.state_dict())
    with pytest.raises(UsageError, match=rule):
        apply(
            model,
            attention_backend="video_sparse_attn",
            attention_backend_config=given,
            train=True,
        )
    assert list(model.state_dict()) == before


def test_8_bits_are_refused_before_anything_is_trained(model):
    asked = {"attention_backend": "video_sparse_attn"}
    with pytest.raises(UnsupportedBackendError, match="or leave out `compute_mode`"):
        apply(model, **asked, attention_backend_config="compute_mode=sage_bf16", train=True)


@pytest.mark.parametrize(
    ("method", "given", "remedy"),
    [
        (
            "sparse_video_gen_2_attn",
            {"svg2_first_times_fp": 0, "svg2_first_layers_fp": 0},
            "train with a dense backend",
        ),
        ("sage_sla_attn", {}, "train with sla_attn"),
        ("video_sparse_attn", {"compute_mode": "sage_bf16"}, "leave out `compute_mode`"),
    ],
)
def test_methods_without_a_backward_pass_say_what_to_do(model, method, given, remedy):
    with (
        apply(model, attention_backend=method, attention_backend_config=given),
        pytest.raises(UnsupportedBackendError, match=f"has no backward; .* or {remedy}"),
    ):
        gradients(model)


@pytest.mark.parametrize(
    ("method", "part"), [("sla_attn", "proj_l"), ("video_sparse_attn", "to_gate_compress")]
)
def test_new_parts_train_where_peft_puts_them(model, method, part):
    peft = pytest.importorskip("peft")
    options = {"attention_backend": method, "attention_backend_config": METHODS[method]}
    model = copy.deepcopy(model)
    with apply(model, **options, train=True):
        config = peft.LoraConfig(r=2, target_modules=["to_q"], modules_to_save=[part])
        wrapped = peft.get_peft_model(model, config)
        output(wrapped, grad=True).square().mean().backward()
        found = [p for n, p in wrapped.named_parameters() if part in n and p.requires_grad]
        assert len(found) == 4
        assert all(p.grad is not None and p.grad.any() for p in found)


def test_a_lora_of_a_projection_is_refused(model):
    peft = pytest.importorskip("peft")
    options = {"attention_backend": "sla_attn", "attention_backend_config": METHODS["sla_attn"]}
    model = copy.deepcopy(model)
    with apply(model, **options, train=True):
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["proj_l"]))
        with pytest.raises(UsageError, match="must be trained as a whole, got a Linear of peft"):
            output(wrapped)
