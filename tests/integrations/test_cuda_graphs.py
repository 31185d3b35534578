"""`apply(..., cuda_graph=True)`, on a recorder of the CPU: replays are bit for bit what calls are.

The recorder leaves NaN where a recording would compute, and re-runs operations on what their memory
holds then: a replay that read anything of the call it was captured in would not be that of another.
"""

import copy
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter, tree_map_only

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.integrations import cuda_graphs
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.generator import DiffGenerator
from multimodal_gen.integrations.graph_kinds import ModelFacts
from multimodal_gen.runtime.attention_report import AttentionReport, DenoiserGraphs, GraphReport
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.scope import (
    global_force_attn_backend_context_manager as forced,
)
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.helpers.denoisers import DENOISERS
from tests.helpers.recorded_graphs import CpuRecorder
from tests.integrations.conftest import generate
from tests.integrations.test_sparse import ABOVE_DENSE, METHODS, OTHERS

STEPS = 5
STATEFUL = "sparse_video_gen_2_attn"
SETTINGS = {
    **{name: {**each.given, **each.some} for name, each in METHODS.items() if name != STATEFUL},
    **OTHERS,
    "sliding_tile_attn": {"window": [1, 1, 1], "tile_size": [1, 2, 2], "skip_time_steps": 0},
    "static_sparse_attn": {"decay_factor": 0.5},  # another pattern has other frames in every step
}
CHUNKWISE = ("skyreels v2",)
QUICK = (
    "wan with a timestep per token",
    "hunyuan with different padding",
    "qwen 2.1 that keeps its text's keys",
    "z image with captions of different lengths",
    "cosmos 3",
    "framepack",
)
READ_MASKS = ("hunyuan_video_15",)  # on the host, in every call
DENSE = {"attention_backend": "torch_sdpa"}
VSA = {"attention_backend": "video_sparse_attn", "attention_backend_config": {"topk": 1}}


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[CpuRecorder]:
    class Counted(CpuRecorder):
        recorded = freed = 0

    monkeypatch.setattr(cuda_graphs, "Recorder", Counted)
    return Counted


@contextmanager
def warned(caplog: pytest.LogCaptureFixture, pattern: str) -> Iterator[None]:
    """Assert that the block warns of something, once."""
    before = len(caplog.messages)
    yield
    assert len([each for each in caplog.messages[before:] if re.search(pattern, each)]) == 1


def replays(report: AttentionReport) -> int:
    assert report.graphs is not None
    return sum(each.replays for each in report.graphs.denoisers)


def plain(report: AttentionReport) -> dict[str, int]:
    assert report.graphs is not None
    return {reason: n for each in report.graphs.denoisers for reason, n in each.plain.items()}


def ran(report: AttentionReport) -> list[tuple[Any, ...]]:
    """Return what a report says of calls and densities of every layer."""
    return [(each.name, each.entries, each.detours, each.not_run) for each in report.layers]


def tensors_of(out: Any) -> list[torch.Tensor]:
    return [x for x in tree_iter(out) if isinstance(x, torch.Tensor)]


def model_of(name: str = "wan") -> tuple[Any, dict[str, Any]]:
    return DENOISERS[name].make()


@torch.no_grad()
def outputs(model: Any, inputs: dict[str, Any], count: int = 4) -> list[torch.Tensor]:
    """Return what a model makes of other latents and timesteps each, all read at the end."""
    made, latents = [], inputs["hidden_states"]
    for index in range(count):
        now = {**inputs, "hidden_states": latents + index}
        now["timestep"] = inputs["timestep"] - index
        made.append(model(**now, return_dict=False)[0])
    return made


def both(family: str, pipe: Any, **asked: Any) -> tuple[list[torch.Tensor], list[AttentionReport]]:
    """Generate without graphs and with them."""
    latents, reports = [], []
    for cuda_graph in (False, True):
        with apply(pipe, **asked, cuda_graph=cuda_graph) as handle:
            latents.append(generate(pipe, family, num_inference_steps=STEPS))
            reports.append(handle.report())
    return latents, reports


@pytest.mark.slow_cases("flux2_klein", "hunyuan_video_15", "cogvideox", "ltx")
@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_of_every_family_are_as_without(family, fresh) -> None:
    latents, reports = both(family, fresh(family), **DENSE)
    assert torch.equal(*latents)
    if family in READ_MASKS:
        assert all("not permitted when stream is capturing" in why for why in plain(reports[1]))
    else:
        assert replays(reports[1]) > 0
    assert bool(plain(reports[1])) == (family in READ_MASKS)
    assert ran(reports[0]) == ran(reports[1])


@pytest.mark.slow_cases("sla_attn", *OTHERS)
@pytest.mark.parametrize("backend", SETTINGS)
def test_every_method_is_as_without_and_counts_its_replays(backend, fresh) -> None:
    config = {**SETTINGS[backend], **ABOVE_DENSE}
    latents, reports = both(
        "wan", fresh("wan"), attention_backend=backend, attention_backend_config=config
    )
    assert torch.equal(*latents)
    assert replays(reports[1]) == 2 * STEPS - 2
    assert ran(reports[0]) == ran(reports[1])
    assert any(entry.densities for layer in reports[1].layers for entry in layer.entries)


def others(value: Any, index: int) -> Any:
    """Return an argument of another call: other numbers, and masks of other samples."""
    if isinstance(value, (list, tuple)):
        return type(value)(others(each, index) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value + 0.125 * index
    return value.flip(0) if index % 2 and value.dim() == 2 else value


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in DENOISERS
        if name not in CHUNKWISE
    ],
)
def test_calls_of_every_model_are_as_without(name) -> None:
    made = []
    for cuda_graph in (False, True):
        model, inputs = model_of(name)
        with apply(model, **DENSE, cuda_graph=cuda_graph) as handle, torch.no_grad():
            calls = [{k: others(x, index) for k, x in inputs.items()} for index in range(5)]
            made.append([tensors_of(model(**call)) for call in calls])
            reports = handle.report()
    for expected, found in zip(*made, strict=True):
        assert len(expected) == len(found)
        assert all(map(torch.equal, expected, found))
    assert reports.graphs.denoisers[0].calls == 5


@pytest.mark.parametrize("name", CHUNKWISE)
def test_models_that_work_chunk_by_chunk_are_refused(name) -> None:
    model, _ = model_of(name)
    with pytest.raises(UsageError, match="chunk by chunk"):
        apply(model, **DENSE, cuda_graph=True)


def test_dense_steps_and_sparse_ones_have_a_graph_each(fresh, recorder) -> None:
    asked = {**VSA, "attention_backend_config": {"topk": 1, "dense_steps": "0-1"}}
    latents, reports = both("wan", fresh("wan"), **asked)
    assert torch.equal(*latents)
    assert recorder.recorded == reports[1].graphs.num_graphs == 2
    assert replays(reports[1]) == 2 * STEPS - 4
    assert ran(reports[0]) == ran(reports[1])


def test_layers_that_no_step_changes_are_not_asked_in_each(monkeypatch) -> None:
    model, inputs = model_of()
    monkeypatch.delattr(AttentionLayer, "step_kind")
    with apply(model, **DENSE, cuda_graph=True) as handle:
        outputs(model, inputs)
        assert replays(handle.report()) == 2


def test_every_ratio_of_a_schedule_has_a_graph(fresh, recorder) -> None:
    asked = {**VSA, "attention_backend_config": {"sparsity": {0: 0.3, 0.4: 0.8}}}
    latents, reports = both("wan", fresh("wan"), **asked)
    assert torch.equal(*latents)
    assert recorder.recorded == 2
    assert ran(reports[0]) == ran(reports[1])


def test_other_prompts_and_sizes_have_other_graphs_and_come_back_to_theirs(fresh) -> None:
    pipe, family = fresh("hunyuan_video"), "hunyuan_video"
    prompts, found = ("a cat", 'a much longer prompt that says "more" of it', "a cat"), {}
    for cuda_graph in (False, True):
        with apply(pipe, **VSA, cuda_graph=cuda_graph) as handle:
            found[cuda_graph] = [
                generate(pipe, family, prompt=prompt, height=size, num_inference_steps=4)
                for size in (32, 64)
                for prompt in prompts
            ]
            report = handle.report()
    assert all(map(torch.equal, found[False], found[True]))
    assert replays(report) > 6
    assert not plain(report)


def test_outputs_are_not_written_by_later_replays() -> None:
    model, inputs = model_of()
    with apply(model, **DENSE):
        expected = outputs(model, inputs)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        found = outputs(model, inputs)
        assert replays(handle.report()) == 2
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[2], found[3])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_graphs_of_one_mode_serve_the_other(mode) -> None:
    model, inputs = model_of()
    with apply(model, **DENSE):
        expected = outputs(model, inputs)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        with mode():
            model(**inputs), model(**inputs)
        for other in (torch.no_grad, torch.inference_mode):
            with other():
                out = model(**inputs).sample
            assert torch.equal(out, expected[0])
        assert replays(handle.report()) == 2


def test_what_may_be_a_view_is_recorded_where_it_copies(recorder) -> None:
    with torch.inference_mode():
        x = torch.arange(6.0).view(2, 3)
        out, graph = recorder().record(lambda: x.T.reshape(6), x.device)
        x += 1
        graph.replay()
        assert torch.equal(out, x.T.reshape(6))


def test_arguments_that_are_no_tensors_are_part_of_a_kind(recorder) -> None:
    model, inputs = model_of()
    with torch.no_grad(), apply(model, **DENSE, cuda_graph=True):
        for scale in (1.0, 2.0, 1.0, 2.0):
            model(**inputs, attention_kwargs={"scale": scale})
        assert recorder.recorded == 2
        model(**inputs, return_dict=False), model(**inputs, return_dict=False)
        assert recorder.recorded == 3


def test_an_expanded_argument_may_be_one(recorder) -> None:
    model, inputs = model_of()
    batch = inputs["hidden_states"].shape[0]
    with torch.no_grad(), apply(model, **DENSE, cuda_graph=True) as handle:
        for step in (9, 8, 7):
            inputs["timestep"] = torch.tensor([step]).expand(batch)
            found = model(**inputs).sample
        assert replays(handle.report()) == 1
    with torch.no_grad(), apply(model, **DENSE):
        assert torch.equal(found, model(**inputs).sample)


def test_an_argument_whose_tensors_are_not_known_leaves_a_call_as_it_is(caplog) -> None:
    model, inputs = model_of()

    class Odd:
        pass

    with torch.no_grad(), apply(model, **DENSE, cuda_graph=True) as handle:
        with warned(caplog, "an argument is a Odd"):
            model(**inputs, attention_kwargs={"odd": Odd()})
        # What has a state of its own would be copied without it, or not be written to.
        model(**inputs, attention_kwargs=OrderedDict(scale=1.0))
        kinds = " ".join(plain(handle.report()))
    assert "Odd" in kinds
    assert "OrderedDict" in kinds


class Opaque(torch.Tensor):
    """A tensor that wraps another one, and has no memory of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Opaque":
        like = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **like)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        found = function(*args, **kwargs)
        return cls(found) if function is torch.ops.aten.detach.default else found


class Wrapped(Opaque):
    """One that says what it wraps, as quantised weights of torchao do."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"])


def wrap_weight(model: Any, kind: type[Opaque] = Wrapped, scale: float = 1.0) -> None:
    linear = model.blocks[0].ffn.net[2]
    weight = linear.weight.inner if isinstance(linear.weight, kind) else linear.weight.data
    linear.weight = torch.nn.Parameter(kind(weight * scale), requires_grad=False)


@pytest.mark.parametrize("change", ["another", "inside", "in place"])
def test_weights_that_wrap_others_have_graphs_and_their_change_is_seen(change) -> None:
    (model, inputs), (other, _) = model_of(), model_of()
    wrap_weight(model), wrap_weight(other)
    with apply(model, **DENSE, cuda_graph=True) as handle, apply(other, **DENSE):
        outputs(model, inputs)
        before = replays(handle.report())
        for each in (model, other):
            weight = each.blocks[0].ffn.net[2].weight
            if change == "another":
                wrap_weight(each, scale=2.0)
            elif change == "inside":
                weight.inner = weight.inner * 2
            else:
                weight.inner.mul_(2)
        found, expected = outputs(model, inputs), outputs(other, inputs)
        assert replays(handle.report()) > before > 0
    assert all(map(torch.equal, found, expected))


def narrow(model: Any) -> None:
    """Let a block have half of its hidden features, in the same memory."""
    first, _, last = model.blocks[0].ffn.net
    for weight in (first.proj.weight, first.proj.bias, last.weight.data.T):
        weight.data = weight.data[: len(weight) // 2]
    last.weight.data = last.weight.data[:, : len(first.proj.bias)]


# What changes a model, and whether its graph is dropped.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "weights in place": (lambda model: model.blocks[0].ffn.net[2].weight.data.mul_(2), False),
    "weights elsewhere": (
        lambda model: setattr(
            model.blocks[0].ffn.net[2].weight, "data", model.blocks[0].ffn.net[2].weight.data * 2
        ),
        True,
    ),
    "a part of the weights": (narrow, True),
    "another module": (lambda model: setattr(model.blocks[0], "ffn", torch.nn.Identity()), True),
    "training": (lambda model: model.train(), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_is_computed_as_it_is_then(change) -> None:
    (model, inputs), (other, _) = model_of(), model_of()
    for each in (model, other):
        each.blocks[0].ffn.net[1].p = 1.0  # in training, nothing is left
    make, drops = CHANGES[change]
    with apply(model, **DENSE, cuda_graph=True) as handle, apply(other, **DENSE):
        before = outputs(model, inputs)
        make(model), make(other)
        found, expected = outputs(model, inputs), outputs(other, inputs)
        report = handle.report()
    assert report.graphs.denoisers[0].dropped == drops
    assert replays(report) == (2 + 2 if drops else 2 + 4)
    assert all(map(torch.equal, found, expected))
    assert not any(map(torch.equal, found, before))


def test_a_bias_that_moves_to_the_next_module_is_seen() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.LayerNorm(2, elementwise_affine=False)
    )
    facts = ModelFacts(model)
    assert facts.hold()
    model[0].bias, model[1].bias = None, model[0].bias
    assert not facts.hold()


@pytest.mark.parametrize("inner", [False, True])
def test_another_class_of_a_module_is_seen(inner: bool) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    linear = torch.nn.Linear(2, 2)
    facts = ModelFacts(torch.nn.Sequential(linear) if inner else linear)
    assert facts.hold()
    linear.__class__ = Doubled
    assert not facts.hold()


def test_weights_in_a_mapping_of_its_own_class_are_looked_at() -> None:
    class Mapping(OrderedDict):  # type: ignore[type-arg]
        pass

    model = torch.nn.Linear(2, 2)
    model._parameters = Mapping(model._parameters)
    facts = ModelFacts(model)
    assert facts.hold()
    model.weight.data = model.weight.data * 2
    assert not facts.hold()


def test_an_attribute_that_decides_nothing_drops_no_graph() -> None:
    model, inputs = model_of()
    with apply(model, **DENSE, cuda_graph=True) as handle:
        before = outputs(model, inputs)
        model.blocks[0].ffn.seen = True
        found = outputs(model, inputs)
        report = handle.report()
    assert report.graphs.denoisers[0].dropped == 0
    assert replays(report) == 2 + 4
    assert all(map(torch.equal, found, before))


def setting(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


CUDA, CONV = torch.backends.cuda, torch.backends.cudnn.conv
# How torch computes: what reads it, what sets it, and another value.
SETTINGS_OF_TORCH: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "products in fp32": (*setting(CUDA.matmul, "fp32_precision"), "tf32"),
    "convolutions in fp32": (*setting(CONV, "fp32_precision"), "ieee"),
    "sums in fp16": (*setting(CUDA.matmul, "allow_fp16_reduced_precision_reduction"), False),
    "sums in bf16": (*setting(CUDA.matmul, "allow_bf16_reduced_precision_reduction"), False),
    "flash": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, False),
    "memory-efficient": (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, False),
    "math": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp, False),
    "cudnn": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp, False),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float16),
}


@contextmanager
def computed_with(name: str) -> Iterator[None]:
    read, write, value = SETTINGS_OF_TORCH[name]
    before = read()
    assert before != value
    write(value)
    try:
        yield
    finally:
        write(before)


def strided(inputs: dict[str, Any]) -> dict[str, Any]:
    latents = inputs["hidden_states"].transpose(-1, -2).contiguous().transpose(-1, -2)
    return {**inputs, "hidden_states": latents}


# What later calls are made in and with, of another kind than those before.
OTHER_KINDS: dict[str, Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    "strides": lambda model, inputs: (nullcontext(), strided(inputs)),
    "both branches": lambda model, inputs: (model.cache_context("cond_uncond"), inputs),
    **{
        name: lambda model, inputs, name=name: (computed_with(name), inputs)
        for name in SETTINGS_OF_TORCH
    },
}


@pytest.mark.parametrize("other", OTHER_KINDS)
def test_calls_of_another_kind_have_a_graph_of_their_own(other, recorder) -> None:
    model, inputs = model_of()
    with apply(model, **DENSE, cuda_graph=True) as handle:
        outputs(model, inputs)
        context, others = OTHER_KINDS[other](model, inputs)
        with context:
            found = outputs(model, others)
        assert replays(handle.report()) == 2 + 2
        outputs(model, inputs)
        report = handle.report()
    assert replays(report) == 2 + 2 + 4
    assert (recorder.recorded, report.graphs.denoisers[0].dropped) == (2, 0)
    context, others = OTHER_KINDS[other](model, inputs)
    with apply(model, **DENSE), context:
        assert all(map(torch.equal, found, outputs(model, others)))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_calls_under_autocast_have_no_graph(caplog) -> None:
    (model, inputs), (other, _) = model_of(), model_of()
    with apply(model, **DENSE, cuda_graph=True) as handle, apply(other, **DENSE):
        outputs(model, inputs)
        with torch.autocast("cpu", torch.bfloat16), warned(caplog, "autocast keeps copies"):
            found, expected = outputs(model, inputs), outputs(other, inputs)
        outputs(model, inputs)
        report = handle.report()
    assert all(map(torch.equal, found, expected))
    assert list(plain(report).values()) == [4]
    assert replays(report) == 2 + 4
    assert report.graphs.denoisers[0].dropped == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_is_compiled_as_a_whole_later_runs_so_and_it_is_said(whole) -> None:
    torch._dynamo.reset()
    model, inputs = model_of()
    with torch.no_grad(), apply(model, **DENSE, cuda_graph=True) as handle:
        expected = model(**inputs).sample
        if whole:
            compiled = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
            compiled = model
        for _ in range(3):
            assert torch.allclose(compiled(**inputs).sample, expected, atol=1e-5)
        assert plain(handle.report()) == {"it was compiled as a whole": 3}


def test_adapters_are_computed_as_strong_as_they_are_then() -> None:
    from peft import LoraConfig

    def steps(model: Any) -> list[torch.Tensor]:
        made = outputs(model, inputs)
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(target_modules=["to_q"], init_lora_weights=False), "one")
        made += outputs(model, inputs)
        for weight in (0.5, 0.0):
            model.set_adapters(["one"], [weight])
            made += outputs(model, inputs)
        model.disable_adapters()
        made += outputs(model, inputs)
        model.enable_adapters()
        model.fuse_lora()
        made += outputs(model, inputs)
        model.delete_adapters("one")
        return made + outputs(model, inputs)

    (model, inputs), (other, _) = model_of(), model_of()
    with apply(model, **DENSE, cuda_graph=True) as handle, apply(other, **DENSE):
        found, expected = steps(model), steps(other)
        report = handle.report()
    assert all(map(torch.equal, found, expected))
    assert replays(report) == len(found) // 2
    assert report.graphs.denoisers[0].dropped >= 5


def test_a_graph_that_was_not_used_for_the_longest_is_dropped(monkeypatch, recorder) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    model, inputs = model_of()
    with torch.no_grad(), apply(model, **DENSE, cuda_graph=True) as handle:
        for scale in (1.0, 2.0, 1.0, 3.0):
            for _ in range(3):
                model(**inputs, attention_kwargs={"scale": scale})
        report = handle.report()
        assert (recorder.recorded, recorder.freed, report.graphs.num_graphs) == (3, 1, 2)
        assert report.graphs.denoisers[0].dropped == 1
        model(**inputs, attention_kwargs={"scale": 1.0})
        assert replays(handle.report()) == replays(report) + 1


def test_remove_frees_the_graphs_and_leaves_the_model_as_it_was(recorder) -> None:
    model, inputs = model_of()
    handle = apply(model, **DENSE, cuda_graph=True)
    outputs(model, inputs)
    copied = copy.deepcopy(model)
    assert "graphed" not in repr(vars(copied)["forward"])
    assert copied.forward.__func__ is type(model).forward
    assert copied.forward.__self__ is copied
    handle.remove()
    assert recorder.recorded == recorder.freed == 1
    assert "forward" not in vars(model)
    report = handle.report()
    assert report.graphs.num_graphs == report.graphs.denoisers[0].dropped == 0


def test_a_forward_that_was_wrapped_since_stays_and_runs_without_graphs() -> None:
    model, inputs = model_of()
    handle = apply(model, **DENSE, cuda_graph=True)
    inner, seen = model.forward, []
    model.forward = lambda *args, **kwargs: (seen.append(1), inner(*args, **kwargs))[1]
    outputs(model, inputs)
    assert replays(handle.report()) == 2
    handle.remove()
    outputs(model, inputs)
    assert len(seen) == 8
    assert handle.report().graphs.denoisers[0].calls == 4


def test_the_signature_stays() -> None:
    model, _ = model_of()
    before = inspect.signature(model.forward)
    with apply(model, **DENSE, cuda_graph=True):
        assert inspect.signature(model.forward) == before


def test_a_forced_backend_has_graphs_of_its_own(fresh, recorder) -> None:
    pipe, found = fresh("wan"), []
    for cuda_graph in (False, True):
        with apply(pipe, **DENSE, cuda_graph=cuda_graph):
            found.append(generate(pipe, "wan", num_inference_steps=STEPS))
            with forced("triton_attn"):
                found.append(generate(pipe, "wan", num_inference_steps=STEPS))
            found.append(generate(pipe, "wan", num_inference_steps=STEPS))
    assert recorder.recorded == 2
    assert all(map(torch.equal, found[:3], found[3:]))


# What cannot be captured: refused at once, ...
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "from step to step": (
        {"attention_backend": STATEFUL},
        "goes on from the step before",
    ),
    "kept choices": (
        {**VSA, "attention_backend_config": {"topk": 1, "refresh_every": 2}},
        "goes on from the step before",
    ),
    "other frames in every step": (
        {
            "attention_backend": "static_sparse_attn",
            "attention_backend_config": OTHERS["static_sparse_attn"],
        },
        "changes from step to step",
    ),
    "a guard": ({**DENSE, "attention_guard": 0.05}, "decides in every step"),
    "training": ({**DENSE, "train": True}, "records no gradients"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_can_repeat_is_refused(case) -> None:
    asked, why = REFUSED[case]
    model, inputs = model_of()
    with pytest.raises(UsageError, match=why):
        apply(model, **asked, cuda_graph=True)
    assert "forward" not in vars(model)
    model(**inputs)


def hooked(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda *args: None)


def with_a_cache(model: Any) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))


def wrapped(model: Any) -> None:
    model.blocks[0].forward = model.blocks[0].forward.__func__.__get__(model.blocks[1])


def compiled(model: Any) -> None:
    model.compile(backend="eager")


def opaque(model: Any) -> None:
    wrap_weight(model, Opaque)


def scripted(model: Any) -> None:
    model.blocks[0].ffn.net[1] = torch.jit.script(torch.nn.Identity())


OF_MODELS: dict[Callable[[Any], None], str] = {
    hooked: "has hooks",
    with_a_cache: "a step cache is enabled",
    wrapped: "a forward of its own",
    compiled: "compiled as a whole",
    scripted: "blocks.0.ffn.net.1 is a ScriptModule, which does not show what it holds",
    opaque: "blocks.0.ffn.net.2.weight is a Opaque, which does not say where it lies",
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("change", OF_MODELS)
def test_models_that_no_graph_can_repeat_are_refused(change) -> None:
    model, _ = model_of()
    change(model)
    with pytest.raises(UsageError, match=OF_MODELS[change]):
        apply(model, **DENSE, cuda_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("change", [hooked, wrapped, scripted])
def test_models_that_become_so_run_without_graphs_and_it_is_said(change, caplog) -> None:
    model, inputs = model_of()
    with apply(model, **DENSE, cuda_graph=True) as handle:
        outputs(model, inputs)
        change(model)
        with warned(caplog, OF_MODELS[change]):
            found = outputs(model, inputs)
        report = handle.report()
    assert list(plain(report).values()) == [4]
    assert report.graphs.num_graphs == 0
    with apply(model, **DENSE):
        assert all(map(torch.equal, found, outputs(model, inputs)))


def test_a_step_cache_that_is_enabled_later_works_as_without(fresh, caplog) -> None:
    found = []
    for cuda_graph in (False, True):
        pipe = fresh("wan")
        with apply(pipe, **DENSE, cuda_graph=cuda_graph) as handle:
            generate(pipe, "wan", num_inference_steps=STEPS)
            with_a_cache(pipe.transformer)
            if cuda_graph:
                with warned(caplog, "a step cache is enabled"):
                    found.append(generate(pipe, "wan", num_inference_steps=STEPS))
            else:
                found.append(generate(pipe, "wan", num_inference_steps=STEPS))
            pipe.transformer.disable_cache()
            found.append(generate(pipe, "wan", num_inference_steps=STEPS))
            report = handle.report()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert replays(report) == 2 * (2 * STEPS - 2)


def test_calls_that_may_record_gradients_have_no_graph(caplog) -> None:
    model, inputs = model_of()
    with apply(model, **DENSE, cuda_graph=True) as handle:
        with warned(caplog, "gradients may be recorded"):
            model(**inputs).sample.sum().backward()
        assert model.blocks[0].attn1.to_q.weight.grad is not None
        assert len(plain(handle.report())) == 1


def failing(monkeypatch: pytest.MonkeyPatch, recorder: type[CpuRecorder]) -> None:
    def record(*args: object) -> None:
        raise RuntimeError("no memory for that")

    monkeypatch.setattr(recorder, "record", record)


def test_a_capture_that_fails_leaves_the_call_and_what_was_counted(
    monkeypatch, recorder, caplog
) -> None:
    model, inputs = model_of()
    with apply(model, **DENSE) as handle:
        expected, counted = outputs(model, inputs), ran(handle.report())
    failing(monkeypatch, recorder)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        with warned(caplog, "no memory for that"):
            found = outputs(model, inputs)
        report = handle.report()
    assert all(map(torch.equal, found, expected))
    assert ran(report) == counted
    assert plain(report) == {"no memory for that": 2}
    assert report.graphs.num_graphs == 0


def test_what_the_host_reads_in_a_call_leaves_it_without_a_graph(recorder, caplog) -> None:
    model, inputs = model_of()
    block = type(model.blocks[0])

    class Reading(block):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            found = super().forward(hidden_states, *args, **kwargs)
            return found * (1.0 if float(found.sum()) else 2.0)

    model.blocks[1].__class__ = Reading
    with apply(model, **DENSE, cuda_graph=True) as handle:
        with warned(caplog, "not permitted when stream is capturing"):
            found = outputs(model, inputs)
        assert recorder.recorded == 0
        assert ran(handle.report())
    with apply(model, **DENSE):
        assert all(map(torch.equal, found, outputs(model, inputs)))


def test_a_model_that_writes_to_its_arguments_has_no_graph(recorder, caplog) -> None:
    model, inputs = model_of()
    block = type(model)

    class Writing(block):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(hidden_states, *args, **kwargs)
            hidden_states.zero_()
            return found

    model.__class__ = Writing
    with apply(model, **DENSE, cuda_graph=True), torch.inference_mode():
        with warned(caplog, "writes to its arguments"):
            for _ in range(3):
                given = {**inputs, "hidden_states": inputs["hidden_states"].clone()}
                model(**given)
                assert not given["hidden_states"].any()
        assert recorder.recorded == 0


def test_a_model_that_changes_a_mapping_it_is_given_has_no_graph(recorder) -> None:
    model, inputs = model_of()
    base = type(model)

    class Taking(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, attention_kwargs: Any = None, **kwargs: Any) -> Any:
            attention_kwargs["seen"] = kwargs["encoder_hidden_states"].double()
            return super().forward(*args, **kwargs)

    model.__class__ = Taking
    with torch.no_grad(), apply(model, **DENSE, cuda_graph=True) as handle:
        for _ in range(3):
            model(**inputs, attention_kwargs=(given := {}))
            assert "seen" in given
        report = handle.report()
        assert plain(report) == {"it writes to its arguments": 1}
        assert all(entry.calls == 3 for layer in report.layers for entry in layer.entries)
    assert recorder.recorded == 0


def test_what_a_graph_reads_beside_its_own_memory_is_held() -> None:
    model = torch.nn.Linear(2, 2)
    kept, gone = torch.ones(2), torch.ones(2)
    places = [kept.data_ptr(), gone.data_ptr()]
    with torch.no_grad(), cuda_graphs._Reads(model) as reads:
        found = model(kept) + gone
        del gone
        found = found.relu().add_(kept)
    assert [each.data_ptr() for each in reads.held] == places
    del kept
    for each in reads.held:
        assert each.tolist() == torch.ones(2).untyped_storage().tolist()


def test_blocks_that_are_compiled_run_so_in_a_capture(recorder) -> None:
    torch._dynamo.reset()
    model, inputs = model_of()
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    compiled = [block._compiled_call_impl for block in model.blocks]

    def looked_at() -> bool:
        modes = _get_current_dispatch_mode_stack()
        return any(isinstance(mode, cuda_graphs._Reads) for mode in modes)

    seen: list[bool] = []
    with apply(model, **DENSE, cuda_graph=True) as handle:
        outputs(model, inputs, 1)
        ran_by = [
            lambda *a, own=own, **k: (seen.append(looked_at()), own(*a, **k))[1] for own in compiled
        ]
        for block, each in zip(model.blocks, ran_by, strict=True):
            block._compiled_call_impl = each
        outputs(model, inputs, 2)
        handle.report()
        assert [block._compiled_call_impl for block in model.blocks] == ran_by
    assert seen
    assert not any(seen)


def test_strict_refuses_calls_without_a_graph(monkeypatch, recorder) -> None:
    model, inputs = model_of()
    with apply(model, **DENSE, cuda_graph=True, strict=True):
        with pytest.raises(UsageError, match=r"gradients.*--strict-attention refuses"):
            model(**inputs)
        failing(monkeypatch, recorder)
        with pytest.raises(UsageError, match=r"no memory.*--strict-attention refuses"):
            outputs(model, inputs)


def test_a_method_that_learns_from_its_calls_is_not_captured(fresh, recorder, caplog) -> None:
    config = {**SETTINGS["vmoba_attn"], "moba_select_mode": "threshold", "dense_above": 0.9}
    asked = {"attention_backend": "vmoba_attn", "attention_backend_config": config}
    with warned(caplog, r"learns from its calls .*`dense_above=1`"):
        latents, reports = both("wan", fresh("wan"), **asked)
    assert torch.equal(*latents)
    assert recorder.recorded == 0
    assert ran(reports[0]) == ran(reports[1])


def test_an_encoder_alone_has_no_calls_to_replay(fresh) -> None:
    with pytest.raises(UsageError, match="must be given for a denoiser"):
        apply(fresh("wan").text_encoder, cuda_graph=True)


def test_only_cuda_has_graphs(monkeypatch) -> None:
    monkeypatch.undo()
    model, _ = model_of()
    with pytest.raises(UsageError, match="it is on cpu, and graphs are of CUDA"):
        apply(model, **DENSE, cuda_graph=True)
    with pytest.raises(ConfigError, match="cuda_graph must be True or False"):
        apply(model, **DENSE, cuda_graph="yes")


def test_a_generator_makes_the_same_with_graphs(tiny_pipeline) -> None:
    settings = {"prompt": "a cat", "height": 32, "width": 32, "num_frames": 5, "seed": 0}
    with DiffGenerator.from_pretrained(tiny_pipeline("wan"), device="cpu") as generator:
        found = [
            generator.generate(**settings, num_inference_steps=STEPS, cuda_graph=cuda_graph)
            for cuda_graph in (False, True, True)
        ]
    assert all(torch.equal(each.latents, found[0].latents) for each in found)
    assert "cuda_graphs" not in found[0].record["attention"]
    for each in found[1:]:
        (denoiser,) = each.record["attention"]["cuda_graphs"]["denoisers"]
        assert denoiser["replays"] == denoiser["calls"] - 2 == 2 * STEPS - 2


def test_the_report_says_what_was_replayed_what_not_and_what_is_held() -> None:
    one = DenoiserGraphs(
        component="transformer",
        calls=20,
        replays=14,
        learning=4,
        dropped=1,
        plain={"a reason": 2},
    )
    report = GraphReport(num_graphs=2, num_bytes=3 * 2**20, denoisers=(one,))
    assert report.lines() == [
        "CUDA graphs: transformer, 14 of 20 calls were replayed; 4 ran as the first two of their "
        "kind; graphs were dropped once, for others or another model",
        "CUDA graphs: transformer, 2 calls ran without one: a reason",
        "CUDA graphs: 2, which hold 3 MiB",
    ]
    whole = AttentionReport(layers=(), graphs=report)
    assert whole.as_dict()["cuda_graphs"]["denoisers"][0]["plain"] == {"a reason": 2}
    assert "14 of 20" in whole.summary()
