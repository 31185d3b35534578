"""Whole layers on the package's own kernels, to be run once for every release of Triton.

The kernels are written once, but each release compiles them its own way. Run it with one release
after another on one GPU, by PYTHONPATH; FlashAttention 3, which no triton changes, says how far the
runs can be compared: tables of docs/pages/performance are made of `over_fa3`. Sampled rows of
every dense layer are checked before anything is timed.

    python3 scripts/bench/run.py by_triton --commit HASH [--only vmoba] [--case wan] [--rounds 5]
    python3 scripts/bench/run.py by_triton --commit HASH --against CHECKOUT    # see _against.py
    python3 scripts/bench/run.py by_triton --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from _harness import (
    DEVICE,
    Row,
    interleave,
    relative_error,
    rows_of,
    version_of,
    write_rows,
)
from dense_above import KINDS, SVG2, VMOBA, Case, layer_of

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context

FA3 = "fa"
METHODS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    FA3: ("fa", {}),
    "triton_attn": ("triton_attn", {}),
    "sage_attn": ("sage_attn", {"kernel": "triton"}),
    "sta 3x3x3": ("sliding_tile_attn", {"window": [3, 3, 3], "skip_time_steps": 0}),
    "vsa 0.9": ("video_sparse_attn", {"sparsity": 0.9}),
    "sla 0.1": ("sla_attn", {"topk_ratio": 0.1}),
    "sage_sla 0.1": ("sage_sla_attn", {"topk_ratio": 0.1}),
    "sol 64": ("sol_attn", {"topk_ratio": 0.15, "dense_layers": None, "dense_steps": None}),
    **{
        f"vmoba {kind}": ("vmoba_attn", {**VMOBA, **layers, "moba_select_mode": "topk"})
        for kind, layers in KINDS.items()
    },
    "svg2": ("sparse_video_gen_2_attn", SVG2),
}
CASES = [
    Case(name="hunyuan 30x48x80", grid=(30, 48, 80), heads=24, data="video"),
    Case(name="wan 14B 21x45x80", grid=(21, 45, 80), heads=40, data="video"),
]
SMOKE_CASES = [Case(name="smoke", grid=(4, 6, 8), heads=2, data="random", head_size=32)]
DENSE = ("triton_attn", "sage_attn")
BOUND = 0.05  # of 8 bits; in 16 the error is a tenth of it


@dataclass(frozen=True, kw_only=True)
class TritonRow(Row):
    """One line of `by_triton.csv`.

    Attributes:
        label: backend and kernel that ran.
        over_fa3: time over that of FlashAttention 3, or of the first contender without it.
    """

    label: str
    over_fa3: float


def layers_for(case: Case, only: str) -> dict[str, LocalAttention]:
    """Return the layers that are timed, without those that cannot run here."""
    layers = {}
    for name, (backend, config) in METHODS.items():
        if only not in name and name != FA3:
            continue
        scope = scope_from(attention_backend=backend, attention_backend_config=config or None)
        try:
            layers[name] = layer_of(case, scope)
        except UnsupportedBackendError as error:
            print(f"left out: {name}, {error}")
    return layers


def measure(case: Case, *, commit: str, rounds: int, only: str) -> list[TritonRow]:
    """Check and time one case."""
    qkv, layers = case.draw(), layers_for(case, only)

    def run_of(layer: LocalAttention) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with set_forward_context(
                20, latent_grid=case.grid, num_steps=50, request_id="bench", cfg_branch="cond"
            ):
                return layer(*qkv)

        return run

    runs = {name: run_of(layer) for name, layer in layers.items()}
    wanted, errors, labels = runs[FA3](), {}, {}
    for name, run in runs.items():
        errors[name] = relative_error(run(), wanted)
        labels[name] = layers[name].report().entries[-1].selection.label
        if name in DENSE and not errors[name] < BOUND:
            raise SystemExit(f"{case.name}: {name} is wrong, relative error {errors[name]:.2e}")
    times = interleave(runs, rounds=rounds, block_ms=80.0 if DEVICE == "cuda" else 1.0)
    best = statistics.median(times[FA3])
    return [
        TritonRow(
            **asdict(row),
            label=labels[row.contender],
            over_fa3=round(row.median_ms / best, 4),
        )
        for row in rows_of(
            times,
            commit=commit,
            benchmark="by_triton",
            case=case.name,
            shape=f"B1 H{case.heads} S{case.tokens} D{case.head_size} bf16",
            flop=4.0 * case.heads * case.tokens**2 * case.head_size,
            flop_formula="4*H*D*S*S, of all pairs",
            errors=errors,
            versions=dict.fromkeys(times, version_of("fa3-fwd", "torch")),
        )
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--case", default="", help="run the cases whose name contains this")


def main(arguments: argparse.Namespace) -> int:
    """Measure the cases and append their rows to `by_triton.csv`."""
    torch.set_grad_enabled(False)
    for case in SMOKE_CASES if arguments.smoke else CASES:
        if arguments.case not in case.name:
            continue
        rows = measure(case, commit=arguments.commit, rounds=arguments.rounds, only=arguments.only)
        write_rows(arguments.out / "by_triton.csv", rows)
    return 0
