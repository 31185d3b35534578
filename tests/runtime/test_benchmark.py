"""Timing dense backends: who is timed, who is left out and why, and the table that is made."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime import benchmark
from multimodal_gen.runtime.benchmark import SHAPES, measure, shapes_for, table_of
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.auto_table import CallShape
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention

CPU = torch.device("cpu")
SDPA = AttentionBackendEnum.TORCH_SDPA


def run(text: str, backends=None, **options):
    options = {"dtype": torch.float32, "device": CPU, "rounds": 2, **options}
    return measure(CallShape.parse(text), backends=backends, **options)


@pytest.mark.slow_cases("2x24x4x16:kv_heads=2", "3x24x4x16:mask")
@pytest.mark.parametrize(
    "text", ["2x24x4x16", "1x24x4x16:keys=7", "2x24x4x16:kv_heads=2", "3x24x4x16:mask"]
)
def test_what_can_serve_a_shape_is_checked_and_timed(text):
    found = run(text)
    by_name = {each.timing.backend: each for each in found.times}
    assert {"torch_sdpa", "flex_attn"} <= by_name.keys()
    sdpa = by_name["torch_sdpa"]
    assert 0 < sdpa.p20_ms <= sdpa.timing.device_ms <= sdpa.p80_ms
    assert sdpa.timing.host_ms is None, "on the CPU there is one time"
    assert sdpa.relative_error < 1e-5
    assert sdpa.rounds == 2
    assert [each.timing.ms for each in found.times] == sorted(e.timing.ms for e in found.times)
    reasons = found.left_out
    assert reasons["fa"] == "needs platform cuda or rocm, this is cpu"
    assert by_name.keys() | reasons.keys() == {
        str(backend) for backend in AttentionBackendEnum if not backend.is_sparse
    }


def test_the_reference_is_attention_in_float64():
    shape = CallShape.parse("2x40x4x16:kv_heads=2:mask")
    inputs = benchmark._draw(shape, torch.float32, CPU)
    rows, out = benchmark._reference(shape, inputs)
    expected, _ = reference_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        scale=0.25,
        mask=inputs.mask[:, None, None, :],
    )
    torch.testing.assert_close(out, expected[:, rows])
    assert not inputs.mask.all(1).any(), "every sample lacks keys"
    assert inputs.mask[:, :30].all()


def test_a_backend_that_is_wrong_is_not_timed(monkeypatch):
    forward = LocalAttention.forward
    monkeypatch.setattr(LocalAttention, "forward", lambda *args: forward(*args) * 1.01)
    found = run("1x24x4x16", [SDPA])
    assert found.times == ()
    assert found.left_out == {"torch_sdpa": "is wrong: its relative error is 1.00e-02"}


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (torch.OutOfMemoryError("out of memory\nwith details"), "out of memory"),
        (AssertionError(), "AssertionError"),  # as kernels do that refuse a shape
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_a_backend_that_fails_is_not_timed(monkeypatch, failure, said):
    def fail(*_):
        raise failure

    monkeypatch.setattr(LocalAttention, "forward", fail)
    assert run("1x24x4x16", [SDPA]).left_out == {"torch_sdpa": f"failed: {said}"}


def test_a_shape_without_room_is_left_out():
    found = run("1x999999999999x64x128", [SDPA, SDPA])
    assert found.times == ()
    assert found.left_out["torch_sdpa"].startswith("no inputs: ")


def test_sparse_backends_are_refused_where_they_are_named():
    with pytest.raises(UsageError, match="must be of dense backends, got video_sparse_attn"):
        run("1x8x1x8", [SDPA, AttentionBackendEnum.VIDEO_SPARSE_ATTN])


def test_only_cuda_and_cpu_are_measured():
    with pytest.raises(UsageError, match="must run on a cuda or cpu device, got meta"):
        run("1x8x1x8", device=torch.device("meta"))


def test_the_shapes_are_those_that_auto_is_held_to():
    assert len(set(SHAPES)) == len(SHAPES)
    assert {shape.head_size for shape in SHAPES} == {64, 72, 80, 96, 128}
    assert {1, 2, 4} <= {shape.batch for shape in SHAPES}
    plain = [s for s in SHAPES if s.queries == s.keys]
    assert (min(s.queries for s in plain), max(s.queries for s in plain)) == (256, 118_800)
    assert {s.keys for s in SHAPES if s.queries != s.keys} == {77, 256, 512}
    assert any(s.masked for s in SHAPES)
    assert any(s.grouped for s in SHAPES)


def test_every_length_between_the_shortest_and_the_longest_has_a_shape_that_speaks_for_it():
    for head_size in (64, 72, 80, 96, 128):
        for tokens in range(256, 118_800, 97):
            heads = 24 if head_size == 128 else 16
            shape = CallShape.parse(f"1x{tokens}x{heads}x{head_size}")
            assert any(measured.speaks_for(shape) for measured in SHAPES), shape


def test_the_cpu_gets_the_small_shapes():
    small = shapes_for(CPU)
    assert small
    assert set(small) < set(SHAPES)
    assert shapes_for(torch.device("cuda")) == SHAPES


def test_the_table_leaves_out_what_auto_never_takes():
    found = run("1x24x4x16")
    made = table_of([found], CPU, source="a test")
    (measured,) = made.measured
    assert {timing.backend for timing in measured.timings} == {"torch_sdpa"}
    assert (made.platform, made.capability, made.source) == ("cpu", "", "a test")
    assert dict(made.versions)["torch"] == torch.__version__
    assert made.name.startswith("cpu, torch ")


def test_a_table_of_nothing_is_refused_and_shapes_without_times_are_left_out():
    nothing = run("1x24x4x16", [AttentionBackendEnum.FA])
    with pytest.raises(UsageError, match="a table must hold a time"):
        table_of([nothing], CPU, source="a test")
    (measured,) = table_of([nothing, run("1x8x4x16", [SDPA])], CPU, source="a test").measured
    assert str(measured.shape) == "1x8x4x16"


def test_auto_goes_by_the_table_that_was_made(monkeypatch):
    from multimodal_gen.runtime.layers.attention.backends.flex_attn import FlexAttentionBackend

    monkeypatch.setattr(FlexAttentionBackend, "never_unasked", "")
    found = run("1x24x4x16")
    made = table_of([found], CPU, source="a test")
    layer = LocalAttention(4, 16, scope=SelectionScope(auto_table=made))
    layer(*make_qkv(1, 24, 4, 16, dtype=torch.float32))
    (entry,) = layer.report().entries
    assert str(entry.selection.backend) == found.times[0].timing.backend
    assert entry.selection.reason.startswith("fastest of 2 at 1x24x4x16 (cpu, torch ")
