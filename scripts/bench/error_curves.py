"""Error against time: sparse methods at several densities, each with and without its pooled tail.

Inputs vary over the video as a model's do. Every setting is checked on a small video first, its
kernel against the reference; what is wrong is not timed, and makes the script fail at the end.
Then the whole layer is timed at the size of a model, in the middle of a generation, and some of its
rows are compared with dense attention in float64. `setting` is what is varied along a method's
curve; dense attention has a row of its own. For a tail, `error_at_equal_time` is its error
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
from dataclasses import dataclass

from _attention import FA3, Case, fa3_run, next_step_of
from _harness import Bench, Row, Times, version_of
from tail import CASES, SMALL, make_layer, sample

from multimodal_gen.runtime.layers.attention import LocalAttention
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
        return make_layer(case, backend, given)


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
        next_step_of(case, point.layer(case, kernel=kernel), qkv)().double()
        for kernel in ("auto", "reference")
    )
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).quantile(0.9))


def measure(case: Case, chosen: list[Point], errors: dict[str, float], bench: Bench) -> None:
    """Time and write a case; `errors` are those of the kernels."""
    qkv = case.video()
    exact = sample(qkv)
    runs = fa3_run(qkv)
    to_dense = {name: exact.error(run()) for name, run in runs.items()}
    densities = dict.fromkeys(runs, 1.0)
    for point in chosen:
        layer = point.layer(case)
        run = next_step_of(case, layer, qkv)
        for _ in range(WARM_STEPS):
            out = run()
        to_dense[point.name] = exact.error(out)
        ((_, density), *_) = layer.report().entries[-1].densities[-1:]
        densities[point.name] = density
        runs[point.name] = run
    times = bench.time(runs, block_ms=60.0)
    curves = Curves({point.name: point for point in chosen}, times, densities, to_dense)
    bench.write(
        times,
        case,
        benchmark="error curves",
        flop={name: case.flop * densities[name] for name in times},
        flop_formula="4*H*D*pairs that are attended to exactly",
        errors=errors,
        versions={FA3: version_of("fa3-fwd")},
        more=curves.columns,
    )


class Curves:
    """What is known of the settings of a case, by name.

    Args:
        points: the settings.
        times: what they and dense attention took.
        densities: share of the token pairs that are attended to exactly.
        to_dense: relative L2 distances of sampled rows from dense attention in float64.
    """

    def __init__(
        self,
        points: dict[str, Point],
        times: Times,
        densities: dict[str, float],
        to_dense: dict[str, float],
    ) -> None:
        self.points = points
        self.medians = {name: statistics.median(found) for name, found in times.items()}
        self.densities = densities
        self.to_dense = to_dense

    def columns(self, row: Row) -> Row:
        """Return the columns of a row; dense attention has one of its own."""
        name = row["contender"]
        point, ms = self.points.get(name), self.medians[name]
        return {
            "method": "dense" if point is None else point.method,
            "setting": "" if point is None else name.partition(" ")[2].removesuffix(", tail"),
            "tail": "none" if point is None else point.tail,
            "density": round(self.densities[name], 4),
            "speedup_over_fa3": round(self.medians.get(FA3, math.nan) / ms, 3),
            "error_to_dense": float(f"{self.to_dense[name]:.4g}"),
            "error_at_equal_time": float(f"{self.at_equal_time(name):.4g}"),
        }

    def at_equal_time(self, name: str) -> float:
        """Return the error of a tail over that without it after the same time, else NaN."""
        point = self.points.get(name)
        if point is None or point.tail != "pooled":
            return math.nan
        plain = [
            (self.medians[other.name], self.to_dense[other.name])
            for other in self.points.values()
            if other.method == point.method and other.tail == "none"
        ]
        return self.to_dense[name] / error_at(plain, self.medians[name])


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


def main(bench: Bench) -> int:
    """Check the settings on a small video, then time and write those that are right."""
    options = bench.options
    small, cases = (SMOKE, (SMOKE,)) if options.smoke else (SMALL, CASES)
    qkv = small.video()
    every = {point.name: point for point in points(options.methods, 1 if options.smoke else None)}
    right, errors = bench.check(
        every.items(), lambda name, point: kernel_error(point, small, qkv), BOUND
    )
    for case in cases:
        if options.only in case.name:
            measure(case, [*right.values()], errors, bench)
    return 1 if bench.wrong else 0
