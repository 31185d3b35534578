"""What routers cost, what `skip_below` saves, and Sol-Attn beside comfy-kitchen's kernel for it.

Layers run on inputs that vary over the video as a model's do, at the size of a model. Our kernels
are checked against the reference on a small video first, and with `skip_below` against the same
layer without; what is wrong is not timed, and makes the script fail at the end. The distance of
some rows from dense attention in float64 is a column, of other packages too. A router's time is
that between device events around its calls inside of a layer, which runs on one stream then.

    python3 scripts/bench/run.py sparse_routers --commit HASH [--groups sol skip scores]
    python3 scripts/bench/run.py sparse_routers --commit HASH --smoke  # a tiny case, on any machine
"""

import argparse
import importlib
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

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
from sparse import split
from tail import (
    CASES,
    DENSE,
    DENSITY,
    LAYER_BOUND,
    SMALL,
    SMOKE,
    Case,
    Run,
    Sample,
    dense_run,
    kernel_error,
    make_layer,
    run_layer,
    sample,
    video_of,
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
SKIPPING: dict[str, tuple[str, dict[str, object]]] = {
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


@dataclass(frozen=True, kw_only=True)
class RouterRow(Row):
    """One line of `sparse_routers.csv`.

    Attributes:
        speedup_over_fa3: time of FlashAttention 3, dense on the same tensors, over this one.
        error_to_dense: relative L2 distance of sampled rows from dense attention in float64.
        over_plain: time over that of the same layer without `skip_below`.
        skipped: share of the kernel's steps that `skip_below` left out.
        share_of_layer: of a router, its time over that of the layer.
    """

    speedup_over_fa3: float
    error_to_dense: float
    over_plain: float = math.nan
    skipped: float = math.nan
    share_of_layer: float = math.nan


@dataclass(kw_only=True)
class Found:
    """What is known of a case's contenders, by name, before they are timed."""

    case: Case
    qkv: QKV
    exact: Sample
    runs: dict[str, Run]
    errors: dict[str, float]
    to_dense: dict[str, float]
    skipped: dict[str, float]
    wrong: list[str]

    def add(self, name: str, run: Run, *, error: float = math.nan, bound: float = 1.0) -> None:
        """Take a contender in, unless its error is above its bound; `error` nan if unknown."""
        self.errors[name] = error
        if error >= bound:
            print(f"WRONG {name}: relative error {error:.2e}", flush=True)
            self.wrong.append(name)
            return
        self.to_dense[name] = self.exact.error(run())
        self.runs[name] = run


def layer_of(found: Found, backend: str, given: dict[str, object]) -> tuple[LocalAttention, Run]:
    """Return a layer of a case, and a call of it."""
    layer = make_layer(found.case, found.case.heads, backend, given)
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


def score_rows(found: Found, options: Any, fa3_ms: float) -> list[Row]:
    """Return the rows of what layers spend on choosing blocks, measured inside of them."""
    rows: list[Row] = []
    for name, (backend, given, pieces) in ROUTED.items():
        layer, run = layer_of(found, backend, given)
        del layer
        run()
        times = split(run, options.rounds, pieces=pieces)
        whole = [sum(values) for values in zip(*times.values(), strict=True)]
        called = {f"{name}: {piece}": times[piece] for piece, _, _ in pieces}
        called[f"{name}: both"] = [sum(v) for v in zip(*called.values(), strict=True)]
        called[f"{name}: layer in line"] = whole
        layer_ms = statistics.median(whole)
        for row in rows_for(found, options.commit, called, fa3_ms):
            share = round(row.median_ms / layer_ms, 4)
            rows.append(replace(row, share_of_layer=share))
    return rows


def rows_for(
    found: Found, commit: str, times: dict[str, list[float]], fa3_ms: float
) -> list[RouterRow]:
    """Return the rows of what was timed."""
    case = found.case
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    rows: list[RouterRow] = []
    for name, samples in times.items():
        (row,) = rows_of(
            {name: samples},
            commit=commit,
            benchmark="routers",
            case=case.name,
            shape=f"B1 H{case.heads} S{case.tokens} D{case.head_size} bf16",
            flop=case.flop if name == DENSE else 0.0,
            flop_formula="4*H*D*S*S of dense attention; of others none are counted",
            errors=found.errors,
            versions={DENSE: version_of("fa3-fwd")}
            | ({name: version_of(PEER)} if name.startswith(PEER) else {}),
        )
        plain = name.partition(", skip_below")[0]
        over = medians[name] / medians[plain] if plain != name else math.nan
        rows.append(
            RouterRow(
                **asdict(replace(row, ratio_to_best=round(medians[name] / fa3_ms, 4))),
                speedup_over_fa3=round(fa3_ms / medians[name], 3),
                error_to_dense=float(f"{found.to_dense.get(name, math.nan):.4g}"),
                over_plain=round(over, 4),
                skipped=round(found.skipped.get(name, math.nan), 4),
            )
        )
    return rows


def measure(case: Case, options: Any) -> tuple[list[Row], list[str]]:
    """Return the rows of a case, and the names of what was wrong."""
    qkv = video_of(case)
    found = Found(
        case=case,
        qkv=qkv,
        exact=sample(qkv),
        runs={},
        errors={},
        to_dense={},
        skipped={},
        wrong=[],
    )
    for name, run in dense_run(qkv).items():
        found.add(name, run)
    small = SMOKE[0] if options.smoke else SMALL
    if "sol" in options.groups:
        add_sol(found, small, video_of(small))
    if "skip" in options.groups:
        add_skipping(found)
    times = interleave(found.runs, rounds=options.rounds, block_ms=options.block_ms)
    fa3_ms = statistics.median(times[DENSE]) if DENSE in times else math.nan
    rows: list[Row] = [*rows_for(found, options.commit, times, fa3_ms)]
    if "scores" in options.groups:
        rows += score_rows(found, options, fa3_ms)
    return rows, found.wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    groups = ("sol", "skip", "scores")
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups, help="all three")
    parser.add_argument("--block-ms", type=float, default=60.0, help="length of a timing (60)")


def main(options: argparse.Namespace) -> int:
    """Measure, print and append the rows."""
    wrong: list[str] = []
    for case in SMOKE if options.smoke else CASES:
        if options.only not in case.name:
            continue
        rows, bad = measure(case, options)
        wrong += bad
        write_rows(options.out / "sparse_routers.csv", rows)
        for row in rows:
            assert isinstance(row, RouterRow)
            print(
                f"   {row.contender:40} {row.speedup_over_fa3:.2f} x fa3, error to dense "
                f"{row.error_to_dense:.3g}, skipped {row.skipped:.3f} at {row.over_plain:.3f} of "
                f"the time, {row.share_of_layer:.3f} of its layer",
                flush=True,
            )
    return 1 if wrong else 0
