import pytest
import torch
import torch._dynamo
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.module_attention import AttentionParams, ModuleAttention
from multimodal_gen.runtime.layers.attention.scope import LayerSite, SelectionScope
from tests.helpers.denoisers import COMMON
from tests.integrations.conftest import generate

# More than the number of recompilations that torch.compile puts up with for one piece of code.
NUM_BLOCKS = 9


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(num_blocks=3):
    return COMMON["wan"].make(num_layers=num_blocks)[0]


def inputs(timestep=900.0):
    return {**COMMON["wan"].make()[1], "timestep": torch.full((2,), timestep)}


def run(model, timestep=900.0):
    with torch.no_grad():
        return model(**inputs(timestep))[0]


@pytest.mark.slow_cases("aot_eager")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_regional_compilation_shares_one_graph_and_never_recompiles(backend, calls):
    model = model_of(NUM_BLOCKS)
    expected = [run(model, timestep) for timestep in (900.0, 500.0, 100.0)]
    with apply(model, attention_backend="torch_sdpa") as handle:
        model.compile_repeated_blocks(fullgraph=True, backend=backend)
        outs = [run(model, 900.0)]
        with torch.compiler.set_stance("fail_on_recompile"):
            outs += [run(model, timestep) for timestep in (500.0, 100.0)]
        reports = handle.report().layers
    for out, reference in zip(outs, expected, strict=True):
        assert (out - reference).abs().max() <= 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    assert [layer.calls for layer in reports] == [3] * 2 * NUM_BLOCKS
    order = [(call.site.name, call.context.current_timestep) for call in calls]
    names = [f"blocks.{block}.attn{part}" for block in range(NUM_BLOCKS) for part in (1, 2)]
    assert order == [(name, step) for step in range(3) for name in names]


@pytest.mark.slow_cases("wrapped-False")
@pytest.mark.parametrize(
    ("how", "fullgraph"),
    [
        ("wrapped", False),
        ("in place", True),
        pytest.param("wrapped", True, marks=pytest.mark.slow),
    ],
)
def test_compiling_the_whole_model_keeps_context_and_layers_apart(how, fullgraph, calls):
    model = model_of()
    expected = run(model, 500.0)
    with apply(model, attention_backend="torch_sdpa"):
        if how == "wrapped":
            compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        else:
            model.compile(backend="eager", fullgraph=fullgraph)
            compiled = model
        run(compiled, 900.0)
        with torch.compiler.set_stance("fail_on_recompile"):
            out = run(compiled, 500.0)
    assert (out - expected).abs().max() <= 1e-5
    seen = [(c.site.name, c.context.current_timestep, c.context.latent_grid) for c in calls]
    names = [f"blocks.{block}.attn{part}" for block in range(3) for part in (1, 2)]
    assert seen == [(name, step, (3, 3, 5)) for step in range(2) for name in names]


@pytest.mark.slow
def test_a_model_compiled_before_apply_is_taken_over(calls):
    model = model_of()
    compiled = torch.compile(model, backend="eager")
    expected = run(compiled)
    with apply(compiled, attention_backend="torch_sdpa") as handle:
        assert (run(compiled) - expected).abs().max() <= 1e-5
        assert len(calls) == len(handle.report().layers) == 6
    calls.clear()
    assert torch.equal(run(compiled), expected)
    assert calls == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "flux",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("hunyuan_video", "hunyuan_video_15", "ltx", "qwen_image")
        ),
    ],
)
def test_families_compile_by_block_with_the_same_latents(family, fresh, calls):
    pipe = fresh(family)
    expected = generate(pipe, family, num_inference_steps=2)
    with apply(pipe, attention_backend="torch_sdpa") as handle:
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        latents = generate(pipe, family, num_inference_steps=2)
        first = counters["stats"]["unique_graphs"]
        calls.clear()
        with torch.compiler.set_stance("fail_on_recompile"):
            again = generate(pipe, family, num_inference_steps=2)
        layers = [r for r in handle.report().layers if r.component == "transformer"]
    assert (latents - expected).abs().max() <= 1e-5
    assert torch.equal(again, latents)
    assert counters["stats"]["unique_graphs"] == first
    assert len({call.site for call in calls if call.context}) == len(layers)


@pytest.mark.slow
def test_cogvideox_compiles_whole(fresh):
    pipe = fresh("cogvideox")
    expected = generate(pipe, "cogvideox", num_inference_steps=2)
    with apply(pipe, attention_backend="torch_sdpa"):
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        latents = generate(pipe, "cogvideox", num_inference_steps=2)
    assert (latents - expected).abs().max() <= 1e-5
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_mask_that_comes_and_goes_between_calls_is_seen_at_run_time(fresh, calls):
    # HunyuanVideo: which keys are padding must not be frozen into the graphs.
    model = fresh("hunyuan_video").transformer
    torch.manual_seed(0)
    common = {
        "hidden_states": torch.randn(1, 16, 3, 8, 12),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 6, 64),
        "pooled_projections": torch.randn(1, 64),
        "guidance": torch.tensor([6000.0]),
    }
    masks = [torch.tensor([[1] * n + [0] * (6 - n)]) for n in (6, 3, 1)]

    def outs():
        with torch.no_grad():
            return [model(encoder_attention_mask=mask, **common)[0] for mask in masks]

    expected = outs()
    with apply(model):
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        for out, reference in zip(outs(), expected, strict=True):
            assert (out - reference).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_gradients_flow_through_a_compiled_model():
    model = model_of()
    reference = torch.autograd.grad(model(**inputs())[0].sum(), model.proj_out.weight)[0]
    with apply(model):
        model.compile_repeated_blocks(backend="eager")
        out = torch.autograd.grad(model(**inputs())[0].sum(), model.proj_out.weight)[0]
    assert torch.allclose(out, reference, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_one_graph_has_gradients():
    model = model_of(1)
    weight = model.blocks[0].attn1.to_q.weight
    reference = torch.autograd.grad(model(**inputs())[0].sum(), weight)[0]
    with apply(model):
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        out = torch.autograd.grad(model(**inputs())[0].sum(), weight)[0]
    assert torch.allclose(out, reference, atol=1e-4)


def test_a_call_first_met_while_compiling_asks_for_a_step_before():
    params = AttentionParams(num_heads=2, head_size=16, num_kv_heads=2)
    site = LayerSite(name="blocks.0.attn")
    layer = ModuleAttention(site, params, torch.float32, SelectionScope())
    q = torch.randn(1, 5, 2, 16)

    def scaled(x):
        return layer.attend(x, x, x, scale=0.5)

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"blocks\.0\.attn .*run one step before compiling"):
        compiled(q)
    expected = scaled(q)
    torch._dynamo.reset()
    assert torch.equal(compiled(q), expected)


def test_a_call_first_met_while_compiling_runs_outside_a_graph_that_may_break():
    params = AttentionParams(num_heads=2, head_size=16, num_kv_heads=2)
    layer = ModuleAttention(LayerSite(), params, torch.float32, SelectionScope())
    q = torch.randn(1, 5, 2, 16)

    def scaled(x):
        return layer.attend(x, x, x, scale=0.5) + 1

    out = torch.compile(scaled, backend="eager")(q)
    assert torch.equal(out, scaled(q))
    assert layer.report().calls == 2
