"""Error against time: sparse methods at several densities, each with and without its pooled tail.

Inputs vary over the video as a model's do. Every setting is checked on a small video first, its
kernel against the reference; what is wrong is not timed, and makes the script fail at the end.
Then the whole layer is timed at the size of a model, in the middle of a generation, and some of its
rows are compared with dense attention in float64. For a tail, `error_at_equal_time` is its error
over that which the method without it has after the same time, by the straight line between settings
in logarithms; beyond the slowest setting, that of the slowest.

    python3 scripts/bench/run.py error_curves --commit HASH [--only wan] [--methods svg2]
    python3 scripts/bench/run.py error_curves --commit HASH --smoke    # a tiny case, on any machine
    python3 scripts/bench/plot_error_curves.py
"""

import argparse
import itertools
import math
import statistics
from dataclasses import asdict, dataclass, replace

import torch
from _harness import Row, interleave, rows_of, version_of, write_rows
from tail import (
    CASES,
    DENSE,
    SMALL,
    Case,
    Run,
    dense_run,
    make_layer,
    sample,
    video_of,
)

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import QKV

SMOKE = Case(name="smoke", grid=(5, 9, 13), heads=2, head_size=32)
BOUND = 1e-2  # of nine rows in ten: where scores are alike, another block may be chosen
WARM_STEPS = 2

_SVG2 = {
    "svg2_first_layers_fp": 0,
    "svg2_first_times_fp": 0,
    "svg2_min_kc_ratio": 0.0,
    "svg2_kmeans_iter_init": 6,
}
_SUBBLOCK = {"skip_first_steps": 0, "min_seq_len": 0}
_STA = {"skip_time_steps": 0}

# Method, by what the results call it -> backend, what all settings share, and the settings.
METHODS: dict[str, tuple[str, dict[str, object], tuple[dict[str, object], ...]]] = {
    "top-k": (
        "sol_attn",
        {"neighbours": 0},
        tuple({"topk_ratio": ratio} for ratio in (0.05, 0.1, 0.2, 0.35)),
    ),
    "sol": ("sol_attn", {}, tuple({"tau": tau} for tau in (2.0, 1.5, 1.0, 0.5))),
    "subblock": (
        "subblock_sparse_attn",
        _SUBBLOCK,
        tuple({"sparsity": share} for share in (0.95, 0.9, 0.8, 0.65)),
    ),
    "sta": (
        "sliding_tile_attn",
        _STA,
        tuple({"window": window} for window in ([1, 3, 3], [3, 3, 3], [3, 3, 5], [3, 5, 5])),
    ),
    "vsa": (
        "video_sparse_attn",
        {},
        tuple({"sparsity": share} for share in (0.95, 0.9, 0.8, 0.65)),
    ),
    "svg2": (
        "sparse_video_gen_2_attn",
        _SVG2,
        tuple({"svg2_top_p_kmeans": mass} for mass in (0.5, 0.7, 0.8, 0.9)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class CurveRow(Row):
    """One line of `error_curves.csv`.

    Attributes:
        method: what `METHODS` calls it; dense attention has a row of its own.
        setting: what is varied along its curve.
        tail: `pooled` or `none`.
        density: share of the token pairs that are attended to exactly.
        speedup_over_fa3: time of FlashAttention 3, dense on the same tensors, over this one.
        error_to_dense: relative L2 distance of sampled rows from dense attention in float64.
        error_at_equal_time: of a tail, its error over that without it after the same time.
    """

    method: str
    setting: str
    tail: str
    density: float
    speedup_over_fa3: float
    error_to_dense: float
    error_at_equal_time: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of one method."""

    method: str
    setting: dict[str, object]
    tail: str

    @property
    def name(self) -> str:
        """What the results file calls it."""
        ((key, value),) = self.setting.items()
        return f"{self.method} {key}={value}" + (", tail" if self.tail == "pooled" else "")

    def layer(self, case: Case, **more: object) -> LocalAttention:
        """Return a layer that runs it on a case."""
        backend, shared, _ = METHODS[self.method]
        given = {**shared, **self.setting, "tail": self.tail, **more}
        if self.method == "svg2":
            given["svg2_num_q_centroids"] = min(300, case.tokens // 200)
            given["svg2_num_k_centroids"] = min(1000, case.tokens // 75)
        return make_layer(case, case.heads, backend, given)


def steps_of(case: Case, layer: LocalAttention, qkv: QKV) -> Run:
    """Return a call of the layer, each at the next step of one generation."""
    step = itertools.count()

    def run() -> torch.Tensor:
        known = {"latent_grid": case.grid, "request_id": "bench", "cfg_branch": "cond"}
        with torch.inference_mode(), set_forward_context(next(step), **known):
            return layer(*qkv)

    return run


def points(methods: list[str], most: int | None = None) -> list[Point]:
    """Return every setting of methods, or the first `most` of each, without and with a tail."""
    return [
        Point(method=method, setting=setting, tail=tail)
        for method in methods
        for tail in ("none", "pooled")
        for setting in METHODS[method][2][:most]
    ]


def kernel_error(point: Point, case: Case, qkv: QKV) -> float:
    """Return how far the kernel is from the reference: nine rows in ten are nearer."""
    found, wanted = (
        steps_of(case, point.layer(case, kernel=kernel), qkv)().double()
        for kernel in ("auto", "reference")
    )
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).quantile(0.9))


def right_points(case: Case, every: list[Point]) -> tuple[list[Point], dict[str, float], list[str]]:
    """Return the settings whose kernels are right, all errors, and the names of the others."""
    qkv = video_of(case)
    errors = {point.name: kernel_error(point, case, qkv) for point in every}
    wrong = [name for name, error in errors.items() if not error < BOUND]
    for name in wrong:
        print(f"WRONG {name}: relative error {errors[name]:.2e}", flush=True)
    return [point for point in every if point.name not in wrong], errors, wrong


def measure(case: Case, chosen: list[Point], options: object) -> list[Row]:
    """Return the rows of a case; `options` are those of the command line."""
    qkv = video_of(case)
    exact = sample(qkv)
    runs = dense_run(qkv)
    to_dense = {name: exact.error(run()) for name, run in runs.items()}
    densities = dict.fromkeys(runs, 1.0)
    for point in chosen:
        layer = point.layer(case)
        run = steps_of(case, layer, qkv)
        for _ in range(WARM_STEPS):
            out = run()
        to_dense[point.name] = exact.error(out)
        ((_, density), *_) = layer.report().entries[-1].densities[-1:]
        densities[point.name] = density
        runs[point.name] = run
    times = interleave(runs, rounds=options.rounds, block_ms=60.0)
    return rows_for(case, options.commit, times, chosen, densities, to_dense)


def rows_for(
    case: Case,
    commit: str,
    times: dict[str, list[float]],
    chosen: list[Point],
    densities: dict[str, float],
    to_dense: dict[str, float],
) -> list[Row]:
    """Return the rows of what was timed; the kernels' errors are added by `main`."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    by_name = {point.name: point for point in chosen}
    found: list[Row] = []
    for name, samples in times.items():
        point = by_name.get(name)
        (row,) = rows_of(
            {name: samples},
            commit=commit,
            benchmark="error curves",
            case=case.name,
            shape=f"B1 H{case.heads} S{case.tokens} D{case.head_size} bf16",
            flop=case.flop * densities[name],
            flop_formula="4*H*D*pairs that are attended to exactly",
            errors={},
            versions={DENSE: version_of("fa3-fwd")},
        )
        over = math.nan
        if point is not None and point.tail == "pooled":
            plain = [
                (medians[other.name], to_dense[other.name])
                for other in chosen
                if other.method == point.method and other.tail == "none"
            ]
            over = to_dense[name] / error_at(plain, medians[name])
        found.append(
            CurveRow(
                **asdict(
                    replace(row, ratio_to_best=round(medians[name] / min(medians.values()), 4))
                ),
                method="dense" if point is None else point.method,
                setting="" if point is None else name.partition(" ")[2].removesuffix(", tail"),
                tail="none" if point is None else point.tail,
                density=round(densities[name], 4),
                speedup_over_fa3=round(medians.get(DENSE, math.nan) / medians[name], 3),
                error_to_dense=float(f"{to_dense[name]:.4g}"),
                error_at_equal_time=float(f"{over:.4g}"),
            )
        )
    return found


def error_at(curve: list[tuple[float, float]], ms: float) -> float:
    """Return the error that a curve of (milliseconds, error) has after `ms`; nan before it begins.

    Only settings count that no faster one beats.
    """
    best: list[tuple[float, float]] = []
    for time, error in sorted(curve):
        if not best or error < best[-1][1]:
            best.append((time, error))
    if not best or ms < best[0][0]:
        return math.nan
    for (start, high), (stop, low) in itertools.pairwise(best):
        if ms <= stop:
            share = math.log(ms / start) / math.log(stop / start)
            return high * (low / high) ** share
    return best[-1][1]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=[*METHODS], help="of these alone"
    )


def main(options: argparse.Namespace) -> int:
    """Check, measure, print and append the rows."""
    every = points(options.methods, 1 if options.smoke else None)
    chosen, errors, wrong = right_points(SMOKE if options.smoke else SMALL, every)
    for case in (SMOKE,) if options.smoke else CASES:
        if options.only not in case.name:
            continue
        rows = [
            replace(row, relative_error=float(f"{errors.get(row.contender, math.nan):.3g}"))
            for row in measure(case, chosen, options)
        ]
        write_rows(options.out / "error_curves.csv", rows)
        for row in rows:
            assert isinstance(row, CurveRow)
            print(
                f"   {row.contender:40} density {row.density:.3f} {row.speedup_over_fa3:.2f} x fa3"
                f", error to dense {row.error_to_dense:.3g}, over that without tail at equal time "
                f"{row.error_at_equal_time:.3g}",
                flush=True,
            )
    return 1 if wrong else 0
