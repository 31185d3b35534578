"""Every family: the stock output by dense backends, and sparse ones where they are asked for."""

import re
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.denoisers import LINEAR, SPLIT, WHOLE
from tests.helpers.methods import SMALL

# Mochi asks for autocast to 32 bits.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")

NEW = {**SPLIT, **WHOLE}
TEXT_ALONE = [name for name in NEW if name.startswith(("qwen 2.1", "cosmos 3"))]


def call(model, inputs):
    with torch.no_grad():
        return tensors(model(**inputs, return_dict=False))


def tensors(value):
    """Return the first output as a flat tensor: some models return lists."""
    while not isinstance(value, torch.Tensor):
        value = torch.stack(value[0]) if isinstance(value[0], list) else value[0]
    return value


def run(case, **settings):
    model, inputs = case.make()
    stock = call(model, inputs)
    with apply(model, **settings) as handle:
        return stock, call(model, inputs), handle.report()


def self_layers(report):
    return [layer for layer in report.layers if layer.role is AttentionRole.SELF]


def check_sparse(report, backend, *, text_alone=False):
    """Check what ran, where some models let the text attend to itself in the same modules."""
    layers = self_layers(report)
    assert layers
    also = {AttentionBackendEnum.TORCH_SDPA} if text_alone else set()
    for layer in layers:
        ran = {entry.selection.backend for entry in layer.entries if entry.calls}
        assert ran == {AttentionBackendEnum(backend)} | also, layer.name
        assert not any(detour.calls for detour in layer.detours), layer.name


@pytest.mark.slow_cases(
    "allegro",
    "helios without a history",
    "hunyuan image",
    "kandinsky 6",
    "krea 2",
    "ltx 2",
    "minimax h3",
    "qwen 2.1",
    "z image whose caption is half as long",
)
@pytest.mark.parametrize("name", NEW)
def test_dense_backends_give_the_stock_output_and_sparse_ones_run(name):
    stock, dense, report = run(NEW[name], attention_backend="torch_sdpa")
    assert (dense - stock).abs().max() <= 2e-5 * stock.abs().max()
    assert not report.notes or "adapter" not in " ".join(report.notes)
    settings = {"VSA_sparsity": 0.5, "dense_above": 1.0}
    _, out, report = run(
        NEW[name],
        attention_backend="video_sparse_attn",
        attention_backend_config=settings,
        strict=True,
    )
    assert bool(out.isfinite().all())
    check_sparse(report, "video_sparse_attn", text_alone=name in TEXT_ALONE)


@pytest.mark.slow_cases("cosmos 3", "framepack", "qwen 2.1 with a picture", "qwen 2.1")
@pytest.mark.parametrize("name", ["minimax h3 with keyframes", *TEXT_ALONE, "helios", "framepack"])
def test_a_sparse_method_that_leaves_nothing_out_gives_the_stock_output(name):
    stock, out, report = run(
        NEW[name],
        attention_backend="video_sparse_attn",
        attention_backend_config={"VSA_sparsity": 0.0, "dense_above": 1.0},
    )
    assert (out - stock).abs().max() <= 2e-5 * stock.abs().max()
    check_sparse(report, "video_sparse_attn", text_alone=name in TEXT_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("backend", SMALL)
@pytest.mark.parametrize("name", NEW)
def test_every_sparse_method_runs(name, backend):
    settings = {**SMALL[backend], "dense_above": 1.0}
    stock, out, report = run(
        NEW[name], attention_backend=backend, attention_backend_config=settings, strict=True
    )
    assert out.shape == stock.shape
    assert bool(out.isfinite().all())
    check_sparse(report, backend, text_alone=name in TEXT_ALONE)


def alone_and_shared(name):
    """Return the outputs of one process and of the ranks, and the report of the latter."""
    settings = {
        "attention_backend": "video_sparse_attn",
        "attention_backend_config": {"VSA_sparsity": 0.5, "dense_above": 1.0},
    }
    with use_parallel_groups(None):
        _, want, _ = run(NEW[name], **settings)
    model, inputs = NEW[name].make()
    with apply(model, **settings) as handle:
        return want, call(model, inputs), handle.report()


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "flux with reference tokens" else [pytest.mark.slow])
        for name in SPLIT
    ],
)
def test_sparse_methods_on_two_ranks_give_the_output_of_one(two_ranks, name, mesh):
    for want, got, report in two_ranks.run(mesh, alone_and_shared, name):
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()
        check_sparse(report, "video_sparse_attn", text_alone=name in TEXT_ALONE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sd3 with layers over the image alone", "dual_attention_layers must be empty where"),
        ("motif video with decoder layers", "num_decoder_layers must be 0 where ranks share"),
        ("flux 3 with references", "image_cond_hidden_states must be None where ranks share"),
        ("mochi", "MochiTransformer3DModel makes a call for each sample"),
        ("sana video", "SanaVideoTransformer3DModel has linear attention and convolutions"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_reason(two_ranks, name, message):
    for error in two_ranks.run(Mesh(ulysses=2), refusal, name):
        assert re.search(message, error)


def refusal(name):
    """Return why ranks cannot share the tokens of a model."""
    model, inputs = {**NEW, "sana video": LINEAR}[name].make()
    try:
        with apply(model):
            call(model, inputs)
    except UsageError as error:
        return str(error)
    return ""


def test_steps_of_minimax_h3_are_those_of_its_video():
    """Its keyframes keep the largest timestep, near 1, while that of the video rises to it."""
    model, inputs = NEW["minimax h3 with keyframes"].make()
    schedule = torch.tensor([0.1, 0.3, 0.7])
    scheduler = SimpleNamespace(timesteps=schedule)
    pipe = SimpleNamespace(components={"transformer": model}, scheduler=scheduler)
    seen = []

    def note(*args):
        context = current_forward_context()
        seen.append((context.current_timestep, context.num_steps))

    model.norm_out.register_forward_hook(note)
    with apply(pipe):
        for value in schedule:
            call(model, inputs | {"timestep": torch.tensor([value, 0.6, 0.99])})
    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_steps_of_cosmos_3_are_told_by_its_vision_timesteps():
    model, inputs = NEW["cosmos 3"].make()
    scheduler = SimpleNamespace(timesteps=torch.tensor([900.0, 700.0]))
    pipe = SimpleNamespace(components={"transformer": model}, scheduler=scheduler)
    seen = []
    model.norm_moe_gen.register_forward_hook(
        lambda *args: seen.append(current_forward_context().current_timestep)
    )
    with apply(pipe):
        call(model, inputs)
    assert seen == [1]


def test_linear_self_attention_is_left_alone_and_the_report_says_so():
    stock, out, report = run(LINEAR, attention_backend="video_sparse_attn")
    assert (out - stock).abs().max() <= 2e-5 * stock.abs().max()
    assert any("SanaLinearAttnProcessor3_0" in note for note in report.notes)
