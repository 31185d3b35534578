"""Whether a sparse call is ever slower than dense attention: sparse layers beside what `auto` runs.

Every method on three kinds of data: like a model's (`video`), normal without any structure
(`random`), and all tokens the same (`constant`); at its usual settings and at such that keep much.
Each is timed as it comes and with `dense_above=1.0`, in the middle of a generation; where the data
decide what is kept, and so which steps are dense, the time is a step's mean over 50 of them.
`over_dense` is the time over that of `auto`, over as many steps at once; `dense_calls` is the share
of calls that were dense.

V-MoBA works on a few heads at a time; `--vmoba-copies` times it with copies of at most so
much of queries, keys, values and results, beside its own choice.

    python3 scripts/bench/run.py dense_above --commit HASH [--only svg2] [--rounds 5]
    python3 scripts/bench/run.py dense_above --commit HASH --only vmoba --vmoba-copies 0 0.25 1
    python3 scripts/bench/run.py dense_above --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from _attention import DTYPE, Case, Method, layer_on
from _harness import Bench, Row, Run, event_ms, extra_memory, relative_error, version_of

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.sparse.executors import rows as by_rows
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import QKV

STEPS = 50
SUSTAINED = "auto, a generation"
SVG2 = {"svg2_first_layers_fp": 0, "svg2_first_times_fp": 0}
VMOBA = {
    "first_full_step": 0,
    "temporal_chunk_size": 3,
    "spatial_chunk_size": [5, 13],
    "st_chunk_size": [7, 5, 13],
    "temporal_topk": 2,
    "spatial_topk": 6,
    "st_topk": 18,
}
# One kind of chunk in every layer.
KINDS = {
    kind: {f"{other}_layer": int(other == kind) for other in ("temporal", "spatial", "st")}
    for kind in ("temporal", "spatial", "st")
}
METHODS: Mapping[str, Method] = {
    "vsa 0.9": ("video_sparse_attn", {"sparsity": 0.9}),
    "vsa 0.5": ("video_sparse_attn", {"sparsity": 0.5}),
    "vsa 0.2": ("video_sparse_attn", {"sparsity": 0.2}),
    "sla 0.1": ("sla_attn", {"topk_ratio": 0.1}),
    "sla 0.6": ("sla_attn", {"topk_ratio": 0.6}),
    "sla 0.95": ("sla_attn", {"topk_ratio": 0.95}),
    "sta 3x3x3": ("sliding_tile_attn", {"window": [3, 3, 3], "skip_time_steps": 0}),
    "sta 5x5x9": ("sliding_tile_attn", {"window": [5, 5, 9], "skip_time_steps": 0}),
    "svg2": ("sparse_video_gen_2_attn", SVG2),
    "svg2 100/500": (
        "sparse_video_gen_2_attn",
        {**SVG2, "svg2_num_q_centroids": 100, "svg2_num_k_centroids": 500},
    ),
    **{
        f"vmoba {kind} topk": ("vmoba_attn", {**VMOBA, **layers, "moba_select_mode": "topk"})
        for kind, layers in KINDS.items()
    },
    **{
        f"vmoba {kind} threshold {share}": (
            "vmoba_attn",
            {**VMOBA, **layers, "moba_threshold": share},
        )
        for kind, layers in KINDS.items()
        for share in (0.25, 0.8)
    },
}
SMOKE_METHODS: Mapping[str, Method] = {
    "vsa 0.5": ("video_sparse_attn", {"sparsity": 0.5, "dense_above": 0.3}),
    "vmoba temporal topk": (
        "vmoba_attn",
        {
            **VMOBA,
            **KINDS["temporal"],
            "moba_select_mode": "topk",
            "temporal_chunk_size": 1,
            "dense_above": 0.9,
        },
    ),
    "svg2": (
        "sparse_video_gen_2_attn",
        {**SVG2, "svg2_num_q_centroids": 4, "svg2_num_k_centroids": 8, "dense_above": 0.2},
    ),
}


@dataclass(frozen=True, kw_only=True)
class DataCase(Case):
    """A video of one model, with one kind of data."""

    data: str

    def draw(self) -> QKV:
        """Return its tensors."""
        if self.data == "video":
            return self.video(DTYPE)
        qkv = self.normal()
        return QKV(*(x.fill_(0.5) for x in qkv)) if self.data == "constant" else qkv


CASES = [
    DataCase(name=f"{size}, {data}", grid=grid, heads=heads, data=data)
    for size, grid, heads in (
        ("wan 1.3B 21x30x52", (21, 30, 52), 12),
        ("hunyuan 30x48x80", (30, 48, 80), 24),
    )
    for data in ("video", "random", "constant")
]
SMOKE = [DataCase(name="smoke, random", grid=(4, 6, 8), heads=2, data="random", head_size=32)]


def layers_of(case: Case, methods: Mapping[str, Method], only: str) -> dict[str, LocalAttention]:
    """Return what is timed, by name; `auto` is dense."""
    layers = {"auto": layer_on(case, dtype=None, num_layers=1, strict=False)}
    for name, (backend, config) in methods.items():
        if only not in name:
            continue
        for suffix, more in (("", {}), (", dense_above=1.0", {"dense_above": 1.0})):
            given = {**config, **more}
            layers[name + suffix] = layer_on(case, backend, given, dtype=None, num_layers=1)
    return layers


def call_of(case: Case, layer: LocalAttention, qkv: QKV) -> Callable[..., torch.Tensor]:
    """Return a call of a layer in a step of a generation, in its middle where none is named."""

    def run(step: int = 20, request: str = "bench") -> torch.Tensor:
        # A step behind the first, so that what is carried from step to step is there.
        with set_forward_context(
            step, latent_grid=case.grid, num_steps=STEPS, request_id=request, cfg_branch="cond"
        ):
            return layer(*qkv)

    return run


def with_copies(run: Callable[[], torch.Tensor], share: float) -> Callable[[], torch.Tensor]:
    """Return a call of V-MoBA that copies at most such a share of its tensors at once."""

    def limited() -> torch.Tensor:
        kept = by_rows._MOST_COPIES, by_rows._PAIRS_AT_ONCE
        by_rows._MOST_COPIES, by_rows._PAIRS_AT_ONCE = share, 0.0
        try:
            return run()
        finally:
            by_rows._MOST_COPIES, by_rows._PAIRS_AT_ONCE = kept

    return limited


def generation_ms(run: Callable[..., torch.Tensor], request: str) -> float:
    """Return what all steps of a generation take."""

    def generate() -> None:
        for step in range(STEPS):
            run(step, request)

    return event_ms(generate)


def density_of(layer: LocalAttention) -> tuple[float, float]:
    """Return the share of pairs of a layer's calls, and the share of calls that were dense."""
    report = layer.report()
    dense = sum(part.calls for part in report.detours)
    if not any(entry.densities for entry in report.entries):
        return 1.0, dense / report.calls
    (entry,) = report.entries
    return entry.density or 0.0, dense / report.calls


def errors_of(
    case: DataCase, runs: Mapping[str, Run], layers: Mapping[str, LocalAttention]
) -> dict[str, float]:
    """Return the errors against `auto` where calls are dense or all tokens the same, else NaN."""
    wanted, errors = runs["auto"](), {}
    for name, run in runs.items():
        out = run()
        dense = density_of(layers[name])[1] == 1.0 or case.data == "constant"
        errors[name] = relative_error(out, wanted) if dense or name == "auto" else math.nan
        if errors[name] > 1e-2:
            raise SystemExit(f"{case.name}: {name} is wrong, relative error {errors[name]:.2e}")
    return errors


@torch.no_grad()
def measure(case: DataCase, bench: Bench) -> None:
    """Check what can be compared with dense attention, then time and write a case."""
    options = bench.options
    qkv = case.draw()
    layers = layers_of(case, SMOKE_METHODS if options.smoke else METHODS, options.only)
    runs = {name: call_of(case, layer, qkv) for name, layer in layers.items()}
    for name in [name for name in runs if name.startswith("vmoba")]:
        for share in options.vmoba_copies:
            layers[f"{name}, copies {share:g}"] = layers[name]
            runs[f"{name}, copies {share:g}"] = with_copies(runs[name], share)
    errors = errors_of(case, runs, layers)
    memory = {name: extra_memory(run) for name, run in runs.items()}
    times = bench.time(runs, block_ms=80.0)
    decided = [name for name in runs if "svg2" in name or "threshold" in name]
    layers[SUSTAINED], errors[SUSTAINED] = layers["auto"], math.nan
    memory[SUSTAINED] = memory["auto"]
    for name, run in ((SUSTAINED, runs["auto"]), *((name, runs[name]) for name in decided)):
        times[name] = [generation_ms(run, f"{name} {i}") / STEPS for i in range(2)]
    # A GPU that is busy for long runs slower: like is compared with like.
    dense = {name: times[SUSTAINED if name in decided else "auto"] for name in times}

    def more(row: Row) -> Row:
        name = row["contender"]
        density, dense_calls = density_of(layers[name])
        return {
            "density": round(density, 4),
            "dense_calls": round(dense_calls, 3),
            "over_dense": round(row["median_ms"] / statistics.median(dense[name]), 3),
            "extra_memory_share": round(memory[name], 4),
        }

    rows = bench.write(
        times,
        case,
        shape=case.shape.removesuffix(" bf16"),
        flop_formula="4*H*S*S*D, of all pairs",
        errors=errors,
        versions=version_of("torch"),
        more=more,
    )
    for row in rows:
        if row["over_dense"] > 1.1 and "dense_above" not in row["contender"]:
            print(f"SLOW {row['case']}: {row['contender']} takes {row['over_dense']} of dense")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--vmoba-copies", type=float, nargs="*", default=[], help="share of copies")
    parser.add_argument("--case", default="", help="run the cases whose name contains this")
