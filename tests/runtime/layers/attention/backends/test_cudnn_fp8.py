"""cuDNN's attention in e4m3, against a stand-in for its graphs with the same conventions."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.layers.attention.backends import cudnn_fp8
from multimodal_gen.runtime.layers.attention.backends.sdpa import (
    CudnnSDPABackend,
    CudnnSDPAConfig,
    CudnnSDPAImpl,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_e4m3_budget

FRONTEND = ("cudnn", "nvidia-cudnn-frontend", "1.32.0")
INPUTS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


class NotSupportedError(Exception):
    """What cuDNN raises of graphs that it does not plan."""


class FakeTensor:
    """A tensor of a graph: what was declared of it."""

    def __init__(self, **declared: Any) -> None:
        self.declared = declared

    def __getattr__(self, name: str) -> Callable[[Any], "FakeTensor"]:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def declare(value: Any) -> FakeTensor:
            self.declared[name.removeprefix("set_")] = value
            return self

        return declare

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory as it was declared, [B, H, S, D]."""
        dim, stride = self.declared["dim"], self.declared["stride"]
        assert torch.Size(dim).numel() == memory.numel()
        wanted = {"e4m3": torch.float8_e4m3fn, "fp32": torch.float32}[self.declared["data_type"]]
        assert memory.dtype is wanted
        return memory.as_strided(dim, stride)


class FakeGraph:
    """A graph that computes in float64 when it is executed, and rounds where cuDNN does."""

    planned = 0

    def __init__(self, **types: str) -> None:
        assert types == {
            "io_data_type": "e4m3",
            "intermediate_data_type": "fp32",
            "compute_data_type": "fp32",
        }
        self.node: dict[str, Any] = {}

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: str) -> FakeTensor:
        return FakeTensor(name=name, dim=dim, stride=stride, data_type=data_type)

    def sdpa_fp8(
        self,
        *,
        attn_scale: float,
        use_causal_mask: bool,
        generate_stats: bool,
        **inputs: FakeTensor,
    ) -> tuple[FakeTensor, ...]:
        assert set(inputs) == {"q", "k", "v", *INPUTS}
        outputs = {name: FakeTensor(name=name) for name in ("o", "stats", "amax_s", "amax_o")}
        self.node = {**inputs, **outputs}
        self.scale, self.causal, self.lse = attn_scale, use_causal_mask, generate_stats
        return tuple(outputs.values())

    def build(self, heuristics: list[str]) -> None:
        assert heuristics == ["A", "FALLBACK"]
        if self.node["q"].declared["dim"][3] == 48:
            raise NotSupportedError("No valid engine configs for this graph")
        FakeGraph.planned += 1

    def get_workspace_size(self) -> int:
        return 32

    def execute(
        self, pack: dict[FakeTensor, torch.Tensor], workspace: torch.Tensor, *, handle: Any
    ) -> None:
        assert (handle.stream, workspace.numel(), workspace.dtype) == (7, 32, torch.uint8)
        found = {n: t.of(pack[t]) for n, t in self.node.items() if self.lse or n != "stats"}
        assert all(found[name].numel() == 1 for name in INPUTS)
        parts = (found[x].double() * found[f"descale_{x}"].double() for x in "qkv")
        q, k, v = (x.transpose(1, 2) for x in parts)
        if self.causal:
            assert q.shape[1] == k.shape[1], "cuDNN aligns causality to the top left"
        out, lse = reference_attention(q, k, v, scale=self.scale, causal=self.causal)
        weights = found["scale_s"] * found["descale_s"]
        scaled = (out.transpose(1, 2) * weights * found["scale_o"]).float()
        assert scaled.abs().max() <= 448
        found["o"].copy_(scaled.to(torch.float8_e4m3fn))
        if self.lse:
            found["stats"].copy_(lse.float()[..., None])


@pytest.fixture(autouse=True)
def cudnn(fake_package: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    FakeGraph.planned = 0
    cudnn_fp8._planned.cache_clear()
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return fake_package(
        "cudnn",
        data_type=SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        cudnnGraphNotSupportedError=NotSupportedError,
        pygraph=FakeGraph,
        create_handle=lambda: SimpleNamespace(stream=None),
        set_stream=lambda handle, stream: setattr(handle, "stream", stream),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_honours_every_call_in_the_callers_dtype(call, dtype, assert_honours_in_e4m3):
    assert_honours_in_e4m3(CudnnSDPABackend, "fp8", call, dtype, by_head=False)


def test_an_output_as_large_as_the_values_fits_into_e4m3():
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16)
    v = torch.full_like(v, 3e4)
    out = CudnnSDPAImpl(2, 64, 0.2, variant="fp8").forward(q, k, v)
    assert torch.allclose(out, v, rtol=2**-4)


def test_a_graph_is_planned_once_for_each_shape():
    impl = CudnnSDPAImpl(2, 64, 0.2, variant="fp8")
    for length, planned in ((8, 1), (8, 1), (16, 2), (8, 2)):
        impl.forward(*make_qkv(1, length, 2, 64, dtype=torch.bfloat16))
        assert FakeGraph.planned == planned
    CudnnSDPAImpl(2, 64, 0.3, variant="fp8").forward(*make_qkv(1, 8, 2, 64, dtype=torch.bfloat16))
    assert FakeGraph.planned == 3


def test_a_call_that_cudnn_does_not_plan_is_refused_with_its_words():
    impl = CudnnSDPAImpl(2, 48, 0.2, variant="fp8")
    with pytest.raises(UnsupportedBackendError, match=r"2 heads of 48 channels.* No valid engine"):
        impl.forward(*make_qkv(1, 8, 2, 48, dtype=torch.bfloat16))


def test_gradients_and_masks_are_refused():
    impl = CudnnSDPAImpl(2, 64, 0.2, variant="fp8")
    q, k, v = make_qkv(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"attn_mask must be None on torch_cudnn_sdpa \(fp8\)"):
        impl.forward(q, k, v, attn_mask=torch.ones(1, 1, 1, 8, dtype=torch.bool))
    with pytest.raises(UsageError, match=r"must not require grad on torch_cudnn_sdpa \(fp8\)"):
        impl.forward(q.requires_grad_(), k, v)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_without_queries_or_keys_it_gives_zeros(num_queries, num_keys, causal):
    q, k = torch.ones(2, num_queries, 4, 32), torch.ones(2, num_keys, 4, 32)
    out, lse = CudnnSDPAImpl(4, 32, 0.2, causal, variant="fp8").forward_lse(q, k, k)
    assert torch.equal(out, torch.zeros(2, num_queries, 4, 32))
    assert torch.equal(lse, torch.full((2, 4, num_queries), -torch.inf))


def test_it_runs_for_those_who_ask_alone(request_on):
    def on(config, capability=(9, 0), packages=(FRONTEND,), **changes):
        request = request_on(PlatformEnum.CUDA, capability=capability, packages=packages, **changes)
        variant = CudnnSDPABackend.choose_variant(request, config)
        return variant and variant.name

    asked = CudnnSDPAConfig(kernel="fp8")
    assert on(asked) == "fp8"
    for refused in (
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"packages": ()},
        {"packages": (("cudnn", "nvidia-cudnn-frontend", "1.9.0"),)},
        {"dtype": torch.float32},
        {"head_size": 72},
        {"needs": (Feature.KEY_MASK,)},
        {"needs": (Feature.BACKWARD,)},
    ):
        assert on(asked, **refused) is None, refused
    for config in (None, CudnnSDPAConfig()):
        assert on(config) == "torch_cudnn_sdpa"
        assert on(config, capability=(8, 0)) == "sm80"
        assert on(config, dtype=torch.float32) is None


def test_a_large_tensor_does_not_spoil_a_sample_of_another_scale_more_than_e4m3_does():
    q, k, v = make_qkv(2, 32, 2, 64, dtype=torch.bfloat16)
    v = v * torch.tensor([1.0, 0.1], dtype=v.dtype)[:, None, None, None]
    out = CudnnSDPAImpl(2, 64, 0.2, variant="fp8").forward(q, k, v)
    for sample in range(2):
        part = (x[sample : sample + 1] for x in (out, q, k, v))
        found, *qkv = part
        assert_within_e4m3_budget(found, None, *qkv, scale=0.2)
