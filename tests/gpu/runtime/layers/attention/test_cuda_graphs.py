"""Calls of the package's own kernels and layers are captured in a CUDA graph, and replayed.

A call runs once before, as a capture demands of every kernel: that compiles, and makes what is
static. Replays read new inputs from the same memory.
"""

from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch

import multimodal_gen
from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.block_plans import PlanShape, random_plan

HEADS, HEAD_SIZE, GRID, TOKENS = 4, 128, (8, 16, 16), 2048
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Programs may begin at other keys in every run, so that sums are rounded in another order.
CLOSE = MappingProxyType({"rtol": 2e-2, "atol": 2e-2})


def draw(tokens: int) -> Inputs:
    q, k, v = (
        torch.randn(1, tokens, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    return q, k, v


def assert_replays(run: Callable[[], torch.Tensor], inputs: Inputs) -> None:
    """Assert that a captured call gives what a plain one does, for other inputs, twice."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        for tensor, new in zip(inputs, draw(inputs[0].shape[1]), strict=True):
            tensor.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        replayed = captured.clone()
        torch.testing.assert_close(replayed, run(), **CLOSE)


PLANS = {
    "dense": None,
    "regular 128": PlanShape(heads=HEADS, num_q=3, num_kv=7, q_size=128, kv_size=128),
    "regular 64": PlanShape(heads=HEADS, num_q=5, num_kv=9, q_size=64, kv_size=64),
    "ragged": PlanShape(
        heads=HEADS, num_q=5, num_kv=20, q_size=128, kv_size=50, q_form="ragged", kv_form="ragged"
    ),
}


def plan_of(name: str) -> BlockPlan:
    shape = PLANS[name]
    if shape is None:
        blocks = Blocks.regular(TOKENS, 384)
        return BlockPlan.dense(blocks, blocks, "cuda")
    return random_plan(shape, seed=1, device="cuda")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kernel", ["gluon", "triton"])
@pytest.mark.parametrize("operation", [block_sparse_attention, quantized_attention])
def test_kernels_replay(operation: Callable[..., torch.Tensor], kernel: str, name: str) -> None:
    plan = plan_of(name)
    q = draw(plan.q.total)[0]
    _, k, v = draw(plan.kv.total)

    def run() -> torch.Tensor:
        return operation(q, k, v, plan, kernel=kernel)

    try:
        run()
    except UnsupportedBackendError as error:
        pytest.skip(str(error))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.testing.assert_close(captured.clone(), run(), **CLOSE)


def test_what_is_derived_in_a_capture_is_not_kept() -> None:
    plan = plan_of("ragged")
    q = draw(plan.q.total)[0]
    _, k, v = draw(plan.kv.total)
    block_sparse_attention(q, k, v, plan_of("ragged"))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block_sparse_attention(q, k, v, plan)
    plain = block_sparse_attention(q, k, v, plan)
    graph.replay()
    torch.testing.assert_close(captured.clone(), plain, **CLOSE)


# Backend -> parameters, of dense backends and of methods whose plans are static or made on the GPU.
LAYERS: dict[str, dict[str, object]] = {
    "torch_sdpa": {},
    "triton_attn": {},
    "sage_attn": {"kernel": "triton"},
    "sliding_tile_attn": {"window": (3, 3, 3), "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.8},
    "sla_attn": {},
    "sage_sla_attn": {},
    "vmoba_attn": {
        "temporal_chunk_size": 2,
        "temporal_topk": 2,
        "spatial_chunk_size": (4, 4),
        "spatial_topk": 2,
        "st_chunk_size": (2, 4, 4),
        "st_topk": 4,
        "first_full_step": 0,
        "first_full_layer": 0,
    },
    "sparse_video_gen_2_attn": {},
    "sol_attn": {"dense_steps": 0, "dense_layers": None},
    "subblock_sparse_attn": {"skip_first_steps": 0, "min_seq_len": 0, "tail": "pooled"},
    "pisa_attn": {"density": 0.2},
    "cube_sparse_attn": {"topk_ratio": 0.2},
    "nabla_attn": {"P": 0.5},
    "draft_attn": {"sparsity_ratio": 0.7},
    "bsa_attn": {"kv_cumulative_threshold": 0.5},
    "video_sparse_attn_h3": {"sparsity": 0.8},
    "sparge_attn": {"topk": 0.3},
    "static_sparse_attn": {"decay_factor": 0.5},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_replay(name: str) -> None:
    backend = AttentionBackendEnum.parse(name)
    config = find_backend(backend, PlatformEnum.CUDA).config_cls(**LAYERS[name])
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    layer = LocalAttention(
        HEADS,
        HEAD_SIZE,
        compute_dtype=torch.bfloat16,
        scope=SelectionScope(default=asked),
        site=LayerSite(layer=0, num_layers=1),
    )
    inputs = draw(TOKENS)
    with torch.inference_mode(), set_forward_context(1, latent_grid=GRID, num_steps=2):
        if layer.backend is not backend:
            pytest.skip(layer.report().entries[-1].selection.reason)
        assert_replays(lambda: layer(*inputs), inputs)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_nothing_is_made_in_a_capture() -> None:
    asked = BackendPreference(
        source=Source.SETTINGS, backend=AttentionBackendEnum.parse("triton_attn")
    )
    layer = LocalAttention(
        HEADS, HEAD_SIZE, compute_dtype=torch.bfloat16, scope=SelectionScope(default=asked)
    )
    inputs = draw(TOKENS - 32)
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UsageError, match="once before the capture"), torch.cuda.graph(graph):
            layer(*inputs)
        torch.cuda.synchronize()
        assert_replays(lambda: layer(*inputs), inputs)


def wan() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a small Wan with random weights, and the arguments of one call."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, num_layers=2, ffn_dim=64, text_dim=32
    )
    drawn = {"device": "cuda", "dtype": torch.bfloat16}
    return model.to("cuda", torch.bfloat16).eval(), {
        "hidden_states": torch.randn(1, 16, 8, 32, 32, **drawn),
        "timestep": torch.tensor([500], device="cuda"),
        "encoder_hidden_states": torch.randn(1, 64, 32, **drawn),
    }


DENOISERS: dict[str, dict[str, object]] = {
    name: LAYERS[name]
    for name in (
        "torch_sdpa",
        "triton_attn",
        "sage_attn",
        "sliding_tile_attn",
        "video_sparse_attn",
        "sla_attn",
        "sage_sla_attn",
        "vmoba_attn",
    )
}


@pytest.mark.parametrize("name", DENOISERS)
def test_a_denoiser_replays(name: str) -> None:
    model, inputs = wan()
    latents = inputs["hidden_states"]
    config = dict(DENOISERS[name]) or None
    with (
        torch.inference_mode(),
        multimodal_gen.apply(model, attention_backend=name, attention_backend_config=config),
    ):
        model(**inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(**inputs, return_dict=False)[0]
        for _ in range(2):
            latents.copy_(torch.randn_like(latents))
            graph.replay()
            replayed = captured.clone()
            torch.testing.assert_close(replayed, model(**inputs, return_dict=False)[0], **CLOSE)


def test_a_method_that_starts_from_the_step_before_is_refused() -> None:
    model, inputs = wan()
    config = {"svg2_first_layers_fp": 0, "svg2_first_times_fp": 0}
    backend = "sparse_video_gen_2_attn"
    with (
        torch.inference_mode(),
        multimodal_gen.apply(model, attention_backend=backend, attention_backend_config=config),
    ):
        model(**inputs)
        torch.cuda.synchronize()
        with (
            pytest.raises(UnsupportedBackendError, match="cannot be captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(**inputs)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_denoiser_is_not_captured_before_it_ran() -> None:
    model, inputs = wan()
    with (
        torch.inference_mode(),
        multimodal_gen.apply(model, attention_backend="torch_sdpa"),
        pytest.raises(UsageError, match="run the denoiser once before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(**inputs)
