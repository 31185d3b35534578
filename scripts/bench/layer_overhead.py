"""Python time a layer takes per call, and what it adds over calling the kernel directly.

Tensors are so small that the host, not the GPU, sets the pace: with the queue never full, the host
time per call is what Python and the launch cost. Of the package's own kernels, dense and sparse,
whole layers are timed, with plans that they made before, where a method's plan is not up to the
data.

    python3 scripts/bench/run.py layer_overhead --commit HASH [--only "sage_attn own"]
    python3 scripts/bench/run.py layer_overhead --commit HASH --against CHECKOUT  # see _against.py
    python3 scripts/bench/run.py layer_overhead --commit HASH --smoke    # few calls, on any machine

`--only direct` leaves the own kernels out, `--only own` the others.
"""

import time
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from _attention import Case, fa3, layer_on, sdpa
from _harness import Bench, Run, Times, shuffled_rounds, synchronize, version_of

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.managers.forward_context import set_forward_context

CALLS, SMOKE_CALLS = 500, 2
SMALL = Case(name="small", grid=(1, 1, 128), heads=4, head_size=64)
# What the own kernels are timed on: several tiles of every method, which cut it evenly.
GRID = (12, 16, 16)
# Backend -> parameters.
OWN: MappingProxyType[str, dict[str, object]] = MappingProxyType(
    {
        "triton_attn": {},
        "sage_attn": {"kernel": "triton"},
        "sliding_tile_attn": {"window": (1, 1, 1), "skip_time_steps": 0},
        "video_sparse_attn": {"sparsity": 0.5, "tile_size": (4, 8, 8)},
        "sla_attn": {},
        "sage_sla_attn": {},
        "sol_attn": {"dense_steps": None, "dense_layers": None},
        "subblock_sparse_attn": {"sparsity": 0.5, "skip_first_steps": 0, "min_seq_len": 0},
        "sparse_video_gen_2_attn": {
            "svg2_num_q_centroids": 32,
            "svg2_num_k_centroids": 64,
            "svg2_first_layers_fp": 0,
            "svg2_first_times_fp": 0,
        },
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
    }
)


SMOKE = SMALL


def host_ms(contenders: dict[str, Run], bench: Bench) -> Times:
    """Return host milliseconds per call; a figure per round is the mean of `CALLS` calls."""
    calls = SMOKE_CALLS if bench.options.smoke else CALLS
    for run in contenders.values():
        for _ in range(calls):
            run()
    times: Times = {name: [] for name in contenders}
    for name in shuffled_rounds(contenders, bench.options.rounds):
        run = contenders[name]
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times[name].append((time.perf_counter() - start) / calls * 1e3)
    return times


def layer_of(case: Case, name: str, config: dict[str, object]) -> LocalAttention | None:
    """Return a layer on a backend; None, and says why, where it cannot run."""
    try:
        layer = layer_on(case, name, config, strict=False)
        if str(layer.backend) == name:
            return layer
        print(f"left out: {name}, {layer.report().entries[-1].selection.reason}")
    except UnsupportedBackendError as error:
        print(f"left out: {error}")
    return None


@torch.inference_mode()
def main(bench: Bench) -> None:
    """Time layers and the kernels behind them, interleaved."""
    qkv = SMALL.draw(torch.bfloat16)
    for name in ("torch_sdpa", "torch_cudnn_sdpa", "fa", "sage_attn"):
        # What a package takes is known by calling it; our own kernels follow below.
        config = {"kernel": "sageattention"} if name == "sage_attn" else {}
        wanted = bench.wants(f"{name} direct")
        layer = layer_of(SMALL, name, config) if wanted else None
        if layer is not None:
            direct = direct_call(name, *qkv)
            expected, actual = direct(), layer(*qkv)
            torch.testing.assert_close(actual, expected.view_as(actual))
            runs = {f"{name} direct": direct, f"{name} layer": partial(layer, *qkv)}
            write(bench, f"host time per call, {name}", host_ms(runs, bench), SMALL.shape, "torch")
    case = replace(SMALL, grid=GRID)
    qkv, runs = case.draw(torch.bfloat16), {}
    # Of a step that goes on from the one before, for methods that do.
    branch = {"request_id": "bench", "cfg_branch": "cond"}
    with set_forward_context(1, latent_grid=GRID, num_steps=3, **branch):
        for name, config in OWN.items():
            wanted = bench.wants(f"{name} own")
            layer = layer_of(case, name, config) if wanted else None
            if layer is not None:
                layer(*qkv)
                label = layer.report().entries[-1].selection.label
                runs[label] = partial(layer, *qkv)
        times = host_ms(runs, bench)
    shape = case.shape.replace(" S", f" {'x'.join(map(str, GRID))} S")
    for label, figures in times.items():
        name = f"host time per call of a whole layer, {label}"
        write(bench, name, {label: figures}, shape, "triton")


def write(bench: Bench, case: str, times: Times, shape: str, distribution: str) -> None:
    """Write rows of host times."""
    bench.write(
        times,
        case=case,
        shape=shape,
        flop=0.0,
        flop_formula="host time only",
        errors=dict.fromkeys(times, 0.0),
        versions=version_of(distribution),
    )


def direct_call(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """Return the plain kernel call a careful user would write, with nothing around it."""
    if name == "torch_cudnn_sdpa":
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return lambda: cudnn(*heads_first, None, True)[0].transpose(1, 2)
    if name == "sage_attn":
        import sageattention

        # The kernel smooths K in place, so a careful caller hands it a copy.
        return lambda: sageattention.sageattn(q, k.clone(), v, tensor_layout="NHD")
    return partial(fa3() if name == "fa" else sdpa, q, k, v)
