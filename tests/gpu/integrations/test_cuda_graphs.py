"""On a GPU: `apply(..., cuda_graph=True)` gives what calls without graphs give, and frees all."""

import gc
from typing import Any

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations import cuda_graphs
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.attention_report import AttentionReport
from tests.gpu.runtime.layers.attention.test_cuda_graphs import CLOSE, LAYERS, wan
from tests.integrations.test_cuda_graphs import wrap_weight

STATEFUL = "sparse_video_gen_2_attn"
# Kernels whose sums are in one order in every run.
EXACT = ("torch_sdpa", "sliding_tile_attn")
DENSE = {"attention_backend": "torch_sdpa"}
Inputs = dict[str, Any]


def asked_of(name: str) -> dict[str, Any]:
    return {"attention_backend": name, "attention_backend_config": LAYERS[name] or None}


def outputs(model: Any, inputs: Inputs, count: int = 6) -> list[torch.Tensor]:
    """Return what a model makes of other latents and timesteps each, all read at the end."""
    made = []
    with torch.inference_mode():
        for index in range(count):
            generator = torch.Generator("cuda").manual_seed(index)
            latents = inputs["hidden_states"]
            drawn = torch.randn(
                latents.shape, generator=generator, device="cuda", dtype=latents.dtype
            )
            now = {**inputs, "hidden_states": drawn, "timestep": inputs["timestep"] - 10 * index}
            made.append(model(**now, return_dict=False)[0])
    return made


def replays(report: AttentionReport) -> int:
    assert report.graphs is not None
    return sum(each.replays for each in report.graphs.denoisers)


def calls(report: AttentionReport) -> list[tuple[Any, ...]]:
    return [
        (layer.name, [(entry.selection, entry.calls) for entry in layer.entries])
        for layer in report.layers
    ]


@pytest.mark.parametrize("name", [name for name in LAYERS if name != STATEFUL])
def test_replays_are_as_calls_without(name: str) -> None:
    model, inputs = wan()
    with apply(model, **asked_of(name)) as handle:
        expected, without = outputs(model, inputs), handle.report()
    with apply(model, **asked_of(name), cuda_graph=True) as handle:
        found, report = outputs(model, inputs), handle.report()
    if any("learns from its calls" in note for note in report.notes):
        assert replays(report) == 0
    else:
        assert replays(report) == 4
        assert report.graphs is not None
        assert report.graphs.num_bytes > 0
    assert calls(report) == calls(without)
    for mine, other in zip(found, expected, strict=True):
        if name in EXACT:
            assert torch.equal(mine, other)
        torch.testing.assert_close(mine, other, **CLOSE)


def test_weights_that_wrap_others_are_replayed_and_their_change_is_seen() -> None:
    (model, inputs), (other, _) = wan(), wan()
    for each in (model, other):
        wrap_weight(each)
    with apply(model, **DENSE, cuda_graph=True) as handle, apply(other, **DENSE):
        for scale in (1.0, 2.0):
            wrap_weight(model, scale=scale), wrap_weight(other, scale=scale)
            found, expected = outputs(model, inputs), outputs(other, inputs)
            assert all(map(torch.equal, found, expected))
        assert replays(handle.report()) == 8


def test_densities_that_data_decide_are_those_of_the_calls() -> None:
    model, inputs = wan()
    asked = {
        "attention_backend": "nabla_attn",
        "attention_backend_config": {"P": 0.5, "dense_above": 1},
    }
    shares = []
    for cuda_graph in (False, True):
        with apply(model, **asked, cuda_graph=cuda_graph) as handle:
            outputs(model, inputs)
            entries = [e for layer in handle.report().layers for e in layer.entries]
        shares.append(torch.tensor([share for e in entries for _, share in e.densities]))
    assert shares[0].numel() > 6
    torch.testing.assert_close(*shares, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # which inductor's tuning uses
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compiled_blocks_are_captured(mode: str) -> None:
    model, inputs = wan()
    model.compile_repeated_blocks(mode=mode)
    with apply(model, **DENSE):
        expected = outputs(model, inputs)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        found = outputs(model, inputs)
        assert replays(handle.report()) == 4
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


def test_streams_take_turns() -> None:
    model, inputs = wan()
    with apply(model, **DENSE):
        expected = outputs(model, inputs)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        outputs(model, inputs, 2)
        found, side = [], torch.cuda.Stream()
        for index in range(6):
            stream = side if index % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(outputs(model, inputs, index + 1)[-1])
        torch.cuda.synchronize()
        assert replays(handle.report()) == 21
    assert all(map(torch.equal, found, expected))


def test_weights_that_change_are_used_as_they_are_then() -> None:
    model, inputs = wan()
    with apply(model, **DENSE, cuda_graph=True) as handle:
        outputs(model, inputs)
        weight = model.blocks[0].ffn.net[2].weight
        for change in ("in place", "elsewhere"):
            if change == "in place":
                weight.data.mul_(3)
            else:
                weight.data = weight.data * 3
            found, before = outputs(model, inputs), replays(handle.report())
        assert before >= 14
        report = handle.report()
    with apply(model, **DENSE):
        assert all(map(torch.equal, found, outputs(model, inputs)))
    assert report.graphs is not None
    assert report.graphs.denoisers[0].dropped == 1


def reading(model: Any) -> None:
    """Let a block read on the host."""

    class Reading(type(model.blocks[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            found: torch.Tensor = super().forward(hidden_states, *args, **kwargs)
            return found * (1.0 if float(found.float().sum()) else 2.0)

    model.blocks[1].__class__ = Reading


def test_a_capture_that_fails_leaves_the_device_as_it_was() -> None:
    model, inputs = wan()
    reading(model)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        found, report = outputs(model, inputs), handle.report()
        assert replays(report) == 0
        assert report.graphs is not None
        assert sum(report.graphs.denoisers[0].plain.values()) == 4
        # What follows is as if nothing had been tried: random numbers, memory, other captures.
        torch.manual_seed(0)
        drawn = torch.randn(5, device="cuda"), torch.rand(5, device="cuda")
        torch.manual_seed(0)
        assert torch.equal(drawn[0], torch.randn(5, device="cuda"))
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        other, _ = wan()
        with apply(other, **DENSE, cuda_graph=True) as second:
            outputs(other, inputs)
            assert replays(second.report()) == 4
    with apply(model, **DENSE):
        assert all(map(torch.equal, found, outputs(model, inputs)))


def test_a_capture_that_fails_leaves_other_graphs() -> None:
    model, inputs = wan()
    base = type(model)

    class Reading(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs["attention_kwargs"]["scale"] == 2.0:
                hidden_states = hidden_states * (1.0 if float(hidden_states.sum()) else 2.0)
            return super().forward(hidden_states, *args, **kwargs)

    model.__class__ = Reading
    with apply(model, **DENSE):
        expected = outputs(model, {**inputs, "attention_kwargs": {"scale": 1.0}})
    with apply(model, **DENSE, cuda_graph=True) as handle:
        for scale, num in ((1.0, 4), (2.0, 4), (3.0, 8), (2.0, 8), (1.0, 14)):
            found = outputs(model, {**inputs, "attention_kwargs": {"scale": scale}})
            assert replays(handle.report()) == num
            assert all(map(torch.equal, found, expected))


def test_a_capture_without_memory_leaves_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = wan()
    with apply(model, **DENSE):
        expected = outputs(model, inputs)
    record = cuda_graphs.Recorder.record

    def short_of_memory(self: Any, function: Any, device: torch.device) -> Any:
        def run() -> Any:
            function()
            return torch.empty(1 << 50, dtype=torch.uint8, device=device)

        return record(self, run, device)

    monkeypatch.setattr(cuda_graphs.Recorder, "record", short_of_memory)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        found = outputs(model, inputs)
        assert replays(handle.report()) == 0
    assert all(map(torch.equal, found, expected))
    torch.randn(3, device="cuda")


def test_remove_gives_the_memory_back() -> None:
    model, inputs = wan()
    with apply(model, **DENSE, cuda_graph=True):  # workspaces of libraries stay
        outputs(model, inputs)
    sizes = []
    for _ in range(3):
        with apply(model, **DENSE, cuda_graph=True) as handle:
            outputs(model, inputs)
            assert handle.report().graphs is not None
        del handle
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[0] == sizes[1] == sizes[2]


def test_memory_that_a_module_lets_go_of_is_held() -> None:
    model, inputs = wan()
    base, kept = type(model), {}

    class Keeping(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            frames = hidden_states.shape[2]
            if frames not in kept:
                kept.clear()
                kept[frames] = torch.full_like(hidden_states, 1.0 + frames)
            return super().forward(hidden_states * kept[frames], *args, **kwargs)

    model.__class__ = Keeping
    shorter = {**inputs, "hidden_states": inputs["hidden_states"][:, :, :4]}
    with apply(model, **DENSE):
        expected = outputs(model, inputs)
    with apply(model, **DENSE, cuda_graph=True) as handle:
        outputs(model, inputs)
        outputs(model, shorter)
        spoilt = [torch.full_like(inputs["hidden_states"], torch.nan) for _ in range(64)]
        found = outputs(model, inputs)
        assert replays(handle.report()) == 4 + 4 + 6
        del spoilt
    assert all(map(torch.equal, found, expected))


def test_graphs_share_their_memory() -> None:
    model, inputs = wan()
    with torch.inference_mode(), apply(model, **DENSE, cuda_graph=True) as handle:
        held = []
        for scale in (1.0, 2.0, 3.0):
            for _ in range(3):
                model(**inputs, attention_kwargs={"scale": scale})
            report = handle.report()
            assert report.graphs is not None
            held.append(report.graphs.num_bytes)
        assert report.graphs.num_graphs == 3
    assert held[2] < 2 * held[0]


def test_what_goes_on_from_the_step_before_is_refused() -> None:
    model, _ = wan()
    with pytest.raises(UsageError, match="goes on from the step before"):
        apply(model, attention_backend=STATEFUL, cuda_graph=True)
