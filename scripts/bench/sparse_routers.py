"""What routers cost, what `skip_below` saves, and Sol-Attn beside comfy-kitchen's kernel for it.

Layers run on inputs that vary over the video as a model's do, at the size of a model. Our kernels
are checked against the reference on a small video first, and with `skip_below` against the same
layer without; what is wrong is not timed, and makes the script fail at the end. The distance of
some rows from dense attention in float64 is a column, of other packages too. A router's time is
that between device events around its calls inside of a layer, which runs on one stream then, and
`share_of_layer` that over the layer's. `over_plain` is the time over that of the same layer without
`skip_below`, `skipped` the share of the kernel's steps that it left out.

    python3 scripts/bench/run.py sparse_routers --commit HASH [--groups sol skip scores]
    python3 scripts/bench/run.py sparse_routers --commit HASH --smoke  # a tiny case, on any machine
"""

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from _attention import FA3, Case, Method, fa3_run
from _harness import DEVICE, Bench, Row, Run, Times, relative_error, version_of
from sparse import split
from tail import (
    CASES as CASES,
)
from tail import (
    DENSITY,
    LAYER_BOUND,
    SMALL,
    SMOKE,
    Sample,
    kernel_error,
    make_layer,
    run_layer,
    sample,
)

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.sparse import router
from multimodal_gen.runtime.layers.attention.sparse.executors import local
from tests.helpers.inputs import QKV

BELOW = (20.0, 30.0, 40.0)  # decibels
# What may be left out together: a hundredth, a thousandth and less of every weight.
SKIP_BOUND = 5e-2
PEER = "comfy-kitchen"
_SUBBLOCK = {"sparsity": 1 - DENSITY, "skip_first_steps": 0, "min_seq_len": 0}
_STA = {"window": [3, 3, 3], "skip_time_steps": 0}

# What Sol-Attn is compared in: name -> parameters.
SOL: dict[str, dict[str, object]] = {
    "15 % of blocks": {"topk_ratio": DENSITY},
    "15 % of blocks of 128": {"topk_ratio": DENSITY, "block_size": 128},
    "tau 1": {"tau": 1.0},
}
# The same for comfy-kitchen's, whose blocks have 64 tokens.
PEERS: dict[str, dict[str, object]] = {
    "15 % of blocks": {"topk_ratio": DENSITY},
    "tau 1": {"tau": 1.0},
}
# Methods whose kernels may leave steps out: name -> backend and parameters.
SKIPPING: dict[str, Method] = {
    "sta 3x3x3": ("sliding_tile_attn", _STA),
    "vsa": ("video_sparse_attn", {"sparsity": 1 - DENSITY}),
}
# Methods that rank blocks by scores: name -> backend, parameters and the calls that do.
ROUTED: dict[str, tuple[str, dict[str, object], tuple[tuple[str, object, str], ...]]] = {
    "subblock": (
        "subblock_sparse_attn",
        _SUBBLOCK,
        (("pooling", local, "pool_cells"), ("scores", router, "select_tiles")),
    ),
}


@dataclass(kw_only=True)
class Found:
    """What is known of a case's contenders, by name, before they are timed."""

    bench: Bench
    case: Case
    qkv: QKV
    exact: Sample
    runs: dict[str, Run] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    to_dense: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, run: Run, *, error: float = math.nan, bound: float = 1.0) -> None:
        """Take a contender in, unless its error is above its bound; `error` nan if unknown."""
        self.errors[name] = error
        if math.isnan(error) or self.bench.is_right(name, error, bound):
            self.to_dense[name] = self.exact.error(run())
            self.runs[name] = run


def layer_of(found: Found, backend: str, given: Mapping[str, object]) -> tuple[LocalAttention, Run]:
    """Return a layer of a case, and a call of it."""
    layer = make_layer(found.case, backend, given)
    return layer, partial(run_layer, found.case, layer, found.qkv)


def add_sol(found: Found, small: Case, small_qkv: QKV) -> None:
    """Add our layers of Sol-Attn, and comfy-kitchen's operator where it can run."""
    for name, given in SOL.items():
        for tail in ("none", "pooled"):
            given = {**given, "tail": tail}
            label = f"sol, {name}" + (", tail" if tail == "pooled" else "")
            error = kernel_error(small, small_qkv, "sol_attn", given)
            run = layer_of(found, "sol_attn", given)[1]
            found.add(label, run, error=error, bound=LAYER_BOUND)
    function = peer()
    for name, given in PEERS.items() if function is not None else ():
        for tail in (False, True):
            label = f"{PEER}, {name}" + (", tail" if tail else "")
            # Its definition is another: scores of means for the tail, and products in 8 bits.
            found.add(label, partial(function, *found.qkv, tail=tail, **given))


def peer() -> Callable[..., torch.Tensor] | None:
    """Return comfy-kitchen's `sol_attn`, or None where its kernel cannot run."""
    try:
        package = importlib.import_module("comfy_kitchen")
    except Exception as error:  # a broken build fails in many ways
        print(f"{PEER} is left out: {type(error).__name__}: {error}", flush=True)
        return None
    if DEVICE != "cuda" or not package.sol_attn_is_available(torch.device("cuda")):
        print(f"{PEER} is left out: its kernel needs a GPU of SM80 or later", flush=True)
        return None
    return package.sol_attn


def add_skipping(found: Found) -> None:
    """Add layers that leave steps out, in both kernels, beside those that do not."""
    for name, (backend, given) in SKIPPING.items():
        for kernel in ("gluon", "triton") if DEVICE == "cuda" else ("reference",):
            plain = {**given, "kernel": kernel}
            run = layer_of(found, backend, plain)[1]
            found.add(f"{name}, {kernel}", run)
            wanted = run()[0, found.exact.rows]
            for below in BELOW:
                layer, run = layer_of(found, backend, {**plain, "skip_below": below})
                error = relative_error(run()[0, found.exact.rows], wanted)
                label = f"{name}, {kernel}, skip_below {below:g} dB"
                found.skipped[label] = layer.report().entries[-1].skipped or 0.0
                found.add(label, run, error=error, bound=SKIP_BOUND)


def write_scores(found: Found, fa3_ms: float) -> None:
    """Write the rows of what layers spend on choosing blocks, measured inside of them."""
    for name, (backend, given, pieces) in ROUTED.items():
        _, run = layer_of(found, backend, given)
        run()
        times = split(run, found.bench.options.rounds, pieces=pieces)
        whole = [sum(values) for values in zip(*times.values(), strict=True)]
        called = {f"{name}: {piece}": times[piece] for piece, _, _ in pieces}
        called[f"{name}: both"] = [sum(v) for v in zip(*called.values(), strict=True)]
        called[f"{name}: layer in line"] = whole
        write(found, called, fa3_ms, layer_ms=statistics.median(whole))


def write(found: Found, times: Times, fa3_ms: float, *, layer_ms: float = math.nan) -> None:
    """Write the rows of what was timed; of a router, `layer_ms` is the time of its layer."""
    case = found.case
    medians = {name: statistics.median(samples) for name, samples in times.items()}

    def more(row: Row) -> Row:
        name = row["contender"]
        plain = name.partition(", skip_below")[0]
        over = medians[name] / medians[plain] if plain != name else math.nan
        return {
            "ratio_to_best": round(medians[name] / fa3_ms, 4),
            "speedup_over_fa3": round(fa3_ms / medians[name], 3),
            "error_to_dense": float(f"{found.to_dense.get(name, math.nan):.4g}"),
            "over_plain": round(over, 4),
            "skipped": round(found.skipped.get(name, math.nan), 4),
            "share_of_layer": round(row["median_ms"] / layer_ms, 4),
        }

    versions = {name: version_of(PEER) for name in times if name.startswith(PEER)}
    found.bench.write(
        times,
        case,
        benchmark="routers",
        flop={name: case.flop if name == FA3 else 0.0 for name in times},
        flop_formula="4*H*D*S*S of dense attention; of others none are counted",
        errors=found.errors,
        versions={FA3: version_of("fa3-fwd"), **versions},
        more=more,
    )


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a case."""
    qkv, options = case.video(), bench.options
    found = Found(bench=bench, case=case, qkv=qkv, exact=sample(qkv))
    for name, run in fa3_run(qkv).items():
        found.add(name, run)
    small = SMOKE[0] if options.smoke else SMALL
    if "sol" in options.groups:
        add_sol(found, small, small.video())
    if "skip" in options.groups:
        add_skipping(found)
    times = bench.time(found.runs, block_ms=options.block_ms)
    fa3_ms = statistics.median(times.get(FA3, [math.nan]))
    write(found, times, fa3_ms)
    if "scores" in options.groups:
        write_scores(found, fa3_ms)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    groups = ("sol", "skip", "scores")
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups, help="all three")
    parser.add_argument("--block-ms", type=float, default=60.0, help="length of a timing (60)")
