"""Tensors need not lie on the current GPU: kernels run where the tensors are."""

import pytest
import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import (
    current_environment,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.tolerance import assert_within_error_budget

pytestmark = pytest.mark.multi_gpu

GRID = (4, 16, 16)
TOKENS = 1024
BACKENDS = {
    "triton_attn": {},
    "sage_attn": {"kernel": "triton"},
    "sliding_tile_attn": {"window": (1, 1, 1), "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.5},
    "sla_attn": {},
}


def inputs(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, TOKENS, 4, 64)
    return list(torch.randn(shape, generator=generator).to(device, torch.bfloat16).unbind())


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_give_the_same_on_a_gpu_that_is_not_current(name: str) -> None:
    backend = AttentionBackendEnum.parse(name)
    config = find_backend(backend, current_environment().platform).config_cls(**BACKENDS[name])
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    found = []
    with torch.inference_mode(), set_forward_context(0, latent_grid=GRID, num_steps=2):
        for device in ("cuda:0", "cuda:1"):
            layer = LocalAttention(4, 64, scope=SelectionScope(default=asked))
            q, k, v = inputs(device)
            for _ in range(2):  # the second call launches what the first one kept
                out = layer(q, k, v)
            assert layer.backend is backend
            found.append(out.cpu())
    assert torch.cuda.current_device() == 0
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


def test_an_engine_call_runs_where_its_tensors_lie() -> None:
    q, k, v = inputs("cuda:1")
    blocks = Blocks.regular(TOKENS, 128)
    plan = BlockPlan.dense(blocks, blocks, "cuda:1")
    with torch.inference_mode():
        for _ in range(2):
            out = block_sparse_attention(q, k, v, plan)
    assert_within_error_budget(out, q, k, v, scale=64**-0.5)
    assert torch.cuda.current_device() == 0
