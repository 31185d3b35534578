"""compute-sanitizer finds no invalid access in the kernels, on small cases of every form."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of CUDA"
)

CASES = """
import torch
from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.coded_attention.api import coded_attention
from multimodal_gen.kernels.coded_attention.codes import OF_KEYS, OF_VALUES, quantise
from multimodal_gen.kernels.linear_attention.api import (
    Projection, add_linear, add_unselected, key_means, key_state,
)
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens, tile_order
from multimodal_gen.kernels.select.api import add_gated, pool_tiles, select_tiles
from multimodal_gen.kernels.select.reference import Tiles
from tests.helpers.block_plans import PlanShape, random_plan

def draw(plan, heads=4):
    q = torch.randn(2, plan.q.total, heads, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(2, plan.kv.total, 2, 128, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    return q, k, v

plans = [
    random_plan(
        PlanShape(heads=4, num_q=3, num_kv=5, q_size=size, kv_size=size, q_form=form, kv_form=form),
        seed=1,
        device="cuda",
    )
    for size in (64, 128, 384)
    for form in ("regular", "ragged")
]
queries, keys = Blocks.regular(200, 128), Blocks.regular(300, 128)
plans.append(BlockPlan.dense(queries, keys, "cuda", causal=True))
ran = 0
for kernel in ("gluon", "triton"):
    for plan in plans:
        try:
            block_sparse_attention(*draw(plan), plan, return_lse=True, kernel=kernel)
        except UnsupportedBackendError:
            continue
        ran += 1
for size in (64, 90, 128):
    for form in ("regular", "ragged"):
        shape = PlanShape(num_q=3, num_kv=5, q_size=size, kv_size=size, q_form=form, kv_form=form)
        plan = random_plan(shape, seed=1, device="cuda")
        for kernel in ("gluon", "triton"):
            for values in ("16-bit", "e4m3"):
                options = {"kernel": kernel, "values": values, "return_lse": True}
                try:
                    quantized_attention(*draw(plan), plan, **options)
                except UnsupportedBackendError:
                    continue
                ran += 1
for bits in (2, 4):
    q, k, v = draw(plans[0])
    rows = torch.tensor([k.shape[1] - 1], dtype=torch.int32, device="cuda")
    coded_attention(q, quantise(k, bits, OF_KEYS), quantise(v, bits, OF_VALUES), rows)
order = tile_order((3, 5, 7), (4, 4, 4), "cuda")
x = torch.randn(2, 105, 4, 128, device="cuda", dtype=torch.bfloat16)
(tiled,) = gather_tokens((x,), order.order)
back = torch.empty_like(x)
scatter_tokens(tiled, order.order, back)
assert torch.equal(back, x)
(pooled,) = pool_tiles((tiled,), Tiles(order.starts, order.lengths, order.largest))
select_tiles(pooled, pooled, 2, always=1)
tiles = Tiles(order.starts, order.lengths, order.largest, order.order)
add_gated(x.clone(), x, pooled, tiles)
weights = Projection(weight=torch.randn(128, 128, device="cuda"))
for kv in (Blocks.regular(300, 64), Blocks.regular(300, 128)):
    keep = torch.rand(2, 4, queries.num, kv.num, device="cuda") < 0.5
    plan = BlockPlan.from_map(keep, queries, kv)
    q, k, v = draw(plan)
    key_means(k, kv)
    _, state = key_state(k, v, kv, feature_map="softmax")
    add_linear(q.clone(), q, state, weights, rows=slice(3, 197), feature_map="softmax")
    add_unselected(q.clone(), q, k, v, plan, weights, feature_map="elu")
torch.cuda.synchronize()
print("kernels ran:", ran)
"""


def test_no_kernel_reads_or_writes_where_it_must_not(tmp_path: Path) -> None:
    script = tmp_path / "cases.py"
    script.write_text(CASES)
    # Newer releases of triton call the driver in ways that it refuses, and go on.
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    command += ["--report-api-errors", "no"]
    result = subprocess.run(
        [*command, sys.executable, str(script)], capture_output=True, text=True, timeout=400
    )
    log = result.stdout[-6000:] + result.stderr[-3000:]
    assert result.returncode == 0, log
    assert "ERROR SUMMARY: 0 errors" in log
    assert int(log.split("kernels ran: ")[1].split()[0]) >= 7
