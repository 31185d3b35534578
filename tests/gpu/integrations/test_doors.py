"""On a GPU: the node of ComfyUI on stand-ins of its models, and kernels loaded from a path."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal_gen.integrations.comfyui.takeover import KEY, Settings, take_over
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from scripts import hf_kernels
from tests.helpers.block_plans import PlanShape, random_plan
from tests.integrations.comfyui.fakes import Patcher, WanModel, sample

DENSE = ("auto", "torch_sdpa", "triton_attn")
WHOLE = {
    "sliding_tile_attn": "window=[9,9,9],tile_size=[4,4,4],dense_above=1.0,skip_time_steps=0",
    "video_sparse_attn": "sparsity=0.0,dense_above=1.0",
}


def taken(patcher: Patcher, backend: str, config: str = "") -> tuple[torch.Tensor, str]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 4, 8, 24, 32, generator=generator)  # a latent grid of 8x12x16
    context = torch.randn(1, 77, 128, generator=generator)
    model = take_over(patcher, Settings(backend=backend, config=config, strict=True))
    given = (part.to("cuda", torch.bfloat16) for part in (x, context))
    with torch.inference_mode():
        return sample(model, *given), model.get_attachment(KEY).report().summary()


@pytest.mark.parametrize("split", [False, True], ids=["joined heads", "split heads"])
def test_layers_of_a_model_run_on_kernels_with_either_layout(split):
    torch.manual_seed(0)
    patcher = Patcher(WanModel(64, split=split).to("cuda", torch.bfloat16).requires_grad_(False))
    expected, _ = taken(patcher, "torch_sdpa")
    size = expected.float().abs().max()
    for backend in (*DENSE, *WHOLE):
        out, report = taken(patcher, backend, WHOLE.get(backend, ""))
        assert (out.float() - expected.float()).abs().max() < 2e-2 * size, backend
        assert "(reference)" not in report, report
        if backend in WHOLE:
            assert f"{backend} (" in report, report


def _load(variant: Path) -> Any:
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec: Any = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_kernels_loaded_from_a_path_compute_what_the_package_does(tmp_path):
    hf_kernels.build(tmp_path / "kernel", "multimodal-gen-attention", 1)
    module = _load(tmp_path / "kernel" / "build" / "torch-cuda")
    shape = PlanShape(heads=4, num_q=5, num_kv=9, q_size=64, kv_size=64)
    plan = random_plan(shape, seed=0, device="cuda")
    sizes = (plan.q.total, plan.kv.total, plan.kv.total)
    q, k, v = (torch.randn(1, n, 4, 128, device="cuda", dtype=torch.bfloat16) for n in sizes)
    blocks = {
        side: module.Blocks(num=b.num, size=b.size, total=b.total)
        for side, b in (("q", plan.q), ("kv", plan.kv))
    }
    own = module.BlockPlan(indices=plan.indices, counts=plan.counts, **blocks)
    for kernel in ("auto", "triton"):
        expected = block_sparse_attention(q, k, v, plan, kernel=kernel)
        out = module.block_sparse_attention(q, k, v, own, kernel=kernel)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
