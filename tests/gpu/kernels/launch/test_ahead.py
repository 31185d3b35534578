"""First calls on a GPU: with an empty cache, and with the kernels that a rehearsal compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# In processes of their own, because kernels are compiled once per process.
PREPARE = """
import json, sys
import torch
from multimodal_gen.kernels.launch.ahead import make
from multimodal_gen.kernels.launch.rehearsal import Rehearsal
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.managers.forward_context import ForwardContext, use_forward_context

def run():
    scope = scope_from(attention_backend=sys.argv[1], attention_backend_config=sys.argv[2] or None)
    site = LayerSite(name="blocks.5", component="t", layer=5, num_layers=30)
    layer = LocalAttention(12, 128, compute_dtype=torch.bfloat16, scope=scope, site=site)
    make_one = torch.empty if rehearsed else torch.randn
    q, k, v = (make_one(1, 32760, 12, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for step in (20, 21):
        context = ForwardContext(
            current_timestep=step, num_steps=50, latent_grid=(21, 30, 52), request_id="r"
        )
        with torch.inference_mode(), use_forward_context(context):
            layer(q, k, v)
"""
AHEAD = """
rehearsed = True
with torch.inference_mode(), Rehearsal() as rehearsal:
    run()
print(json.dumps([each.name for each in make(list(rehearsal.noted.values()))]))
"""
CALL = """
import triton
rehearsed, compiled = False, []
def listener(*, src, cache_hit, **told):
    if not cache_hit:
        compiled.append(src.name)
triton.knobs.compilation.listener = listener
run()
print(json.dumps(compiled))
"""
METHODS = [
    ("triton_attn", ""),
    ("sage_attn", ""),
    ("sliding_tile_attn", "window=[3,3,3],skip_time_steps=0"),
    ("video_sparse_attn", "sparsity=0.9"),
    ("sla_attn", ""),
    ("sage_sla_attn", ""),
    ("vmoba_attn", "configs/attention/vmoba_attn.yaml"),
    ("sparse_video_gen_2_attn", "dense_above=1.0"),  # of random data it keeps most
]


def run(script: str, cache: Path, *arguments: str) -> object:
    """Return what a process printed whose kernels are cached in a folder."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PREPARE + script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "config"), METHODS)
def test_a_first_call_finds_all_kernels_that_a_rehearsal_compiled(
    backend: str, config: str, tmp_path: Path
) -> None:
    assert run(AHEAD, tmp_path, backend, config)
    assert run(CALL, tmp_path, backend, config) == []
