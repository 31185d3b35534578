"""Whole layers on the package's own kernels, to be run once for every release of Triton.

The kernels are written once, but each release compiles them its own way. Run it with one release
after another on one GPU, by PYTHONPATH; FlashAttention 3, which no triton changes, says how far the
runs can be compared: tables of docs/pages/performance are made of `over_fa3`. `label` is the
backend and the kernel that ran. Sampled rows of every dense layer are checked before anything is
timed.

    python3 scripts/bench/run.py by_triton --commit HASH [--only vmoba] [--case wan] [--rounds 5]
    python3 scripts/bench/run.py by_triton --commit HASH --against CHECKOUT    # see _against.py
    python3 scripts/bench/run.py by_triton --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
import statistics
from collections.abc import Mapping

import torch
from _attention import Method, layer_on
from _harness import Bench, relative_error, version_of
from dense_above import KINDS, DataCase, call_of
from dense_above import METHODS as SPARSE

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention

FA3 = "fa"
METHODS: Mapping[str, Method] = {
    FA3: ("fa", {}),
    "triton_attn": ("triton_attn", {}),
    "sage_attn": ("sage_attn", {"kernel": "triton"}),
    **{name: SPARSE[name] for name in ("sta 3x3x3", "vsa 0.9", "sla 0.1")},
    "sage_sla 0.1": ("sage_sla_attn", {"topk_ratio": 0.1}),
    "sol 64": ("sol_attn", {"topk_ratio": 0.15, "dense_layers": None, "dense_steps": None}),
    **{f"vmoba {kind}": SPARSE[f"vmoba {kind} topk"] for kind in KINDS},
    "svg2": SPARSE["svg2"],
}
CASES = [
    DataCase(name="hunyuan 30x48x80", grid=(30, 48, 80), heads=24, data="video"),
    DataCase(name="wan 14B 21x45x80", grid=(21, 45, 80), heads=40, data="video"),
]
SMOKE = [DataCase(name="smoke", grid=(4, 6, 8), heads=2, data="random", head_size=32)]
DENSE = ("triton_attn", "sage_attn")
BOUND = 0.05  # of 8 bits; in 16 the error is a tenth of it


def layers_for(case: DataCase, only: str) -> dict[str, LocalAttention]:
    """Return the layers that are timed, without those that cannot run here."""
    layers = {}
    for name, (backend, config) in METHODS.items():
        if only not in name and name != FA3:
            continue
        try:
            layers[name] = layer_on(case, backend, config, dtype=None, num_layers=1, strict=False)
        except UnsupportedBackendError as error:
            print(f"left out: {name}, {error}")
    return layers


@torch.no_grad()
def measure(case: DataCase, bench: Bench) -> None:
    """Check, time and write a case."""
    qkv, layers = case.draw(), layers_for(case, bench.options.only)
    runs = {name: call_of(case, layer, qkv) for name, layer in layers.items()}
    wanted, errors, labels = runs[FA3](), {}, {}
    for name, run in runs.items():
        errors[name] = relative_error(run(), wanted)
        labels[name] = layers[name].report().entries[-1].selection.label
        if name in DENSE and not errors[name] < BOUND:
            raise SystemExit(f"{case.name}: {name} is wrong, relative error {errors[name]:.2e}")
    times = bench.time(runs, block_ms=80.0)
    best = statistics.median(times[FA3])
    bench.write(
        times,
        case,
        flop_formula="4*H*D*S*S, of all pairs",
        errors=errors,
        versions=version_of("fa3-fwd", "torch"),
        more=lambda row: {
            "label": labels[row["contender"]],
            "over_fa3": round(row["median_ms"] / best, 4),
        },
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--case", default="", help="run the cases whose name contains this")
