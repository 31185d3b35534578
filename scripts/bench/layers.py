"""Whole layers of attention, dense and sparse, compared with dense attention and other packages.

`layers.yaml` says which: each of its benchmarks has a name of its own in `run.py` and a file of
that name. Every layer is checked first: dense ones against float64 at sampled rows; sparse ones on
a small video against the reference kernel, and where they add nothing to the pairs that they keep
against float64 attention to these at sampled rows; other packages against our layer. What is
wrong is not timed, and makes the run fail at its end. Layers are timed in the middle of a
generation, as they are called there. TFLOP/s count the pairs that are attended to.

    python3 scripts/bench/run.py NAME --commit HASH [--case wan] [--only "vsa|sta"] [--rounds 9]
    python3 scripts/bench/run.py NAME --commit HASH --backward  # the backward passes alone
    python3 scripts/bench/run.py NAME --commit HASH --smoke     # a tiny case, on any machine
"""

import argparse
import itertools
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from _attention import DTYPE, FA3, Case, Sample, dense_run, layer_on
from _harness import (
    DEVICE,
    Bench,
    Row,
    Run,
    Times,
    elapsed_ms,
    event_ms,
    extra_memory,
    mark,
    pattern,
    relative_error,
    run_apart,
    synchronize,
    version_of,
)
from _peers import PEERS
from torch import nn

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention, UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.sparse import router, tiles
from multimodal_gen.runtime.layers.attention.sparse.executors import groups, linear, local, rows
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import recorded_pairs
from multimodal_gen.runtime.layers.attention.sparse.methods import sla, svg2, vmoba, vsa
from multimodal_gen.runtime.layers.attention.sparse.methods.sta import router as sta
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

SUITES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
STEP, STEPS = 20, 50  # behind the first step, so that what is carried from step to step is there
TRIAL_SECONDS = 180
BOUND = 1e-2
FLOP = "4*B*H*D*pairs that are attended to exactly"
SMOKE = Case(**SUITES["smoke"])
# Ends in a cut block as that of 720p does, so that the same compilations serve both.
SMALL = Case(name="small", grid=(6, 24, 41), heads=2)
# What a layer spends its time in: (what to call it, where it is called, under what name).
PIECES = (
    ("gather", tiles, "gather_tokens"),
    ("engine", tiles, "block_sparse_attention"),
    ("scatter", tiles, "scatter_tokens"),
    ("pooling", tiles, "pool_tiles"),
    ("pooling", local, "pool_cells"),
    ("selection", router, "select_tiles"),
    ("gate", local, "add_gated"),
    ("gather", linear, "gather_tokens"),
    ("pooling", linear, "pool_tiles"),
    ("gather", rows, "gather_tokens"),
    ("engine", rows, "block_sparse_attention"),
    ("k-means", svg2, "kmeans"),
    ("attention", groups, "cluster_attention"),
    *(("other package", module, "attend_upstream") for module in (sla, sta, svg2, vmoba, vsa)),
)
ATTENDING = ("engine", "attention", "other package")


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is timed of a case; see `layers.yaml`.

    Attributes:
        name: what the results call it.
        plain: what they call it without the variant's ending.
        curve: the method alone, without its setting.
        setting: what is varied along its curve.
        backend: None for the automatic choice.
        others: the further keys.
    """

    name: str
    plain: str
    curve: str
    setting: str = ""
    backend: str | None = None
    peer: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    projection: bool = False
    gate: bool = False
    like: str = ""
    bound: float = BOUND
    generation: bool = False
    apart: bool = False

    @property
    def is_sparse(self) -> bool:
        """Whether it has a sparse method's parameters."""
        backend = self.backend
        return backend is not None and AttentionBackendEnum.parse(backend).is_sparse


def methods_of(part: Mapping[str, Any], case: Case) -> Iterator[Method]:
    """Yield the methods of a part on a case, with all settings and variants."""
    for curve, given in part["methods"].items():
        known = dict(given)
        own, variants = known.pop("config", {}), part.get("variants", {"": {}})
        variants = known.pop("variants", variants)
        settings = known.pop("settings", {"": (None,)})
        for ending, more in variants.items():
            for key, value in ((key, x) for key, values in settings.items() for x in values):
                setting = f"{key}={value}" if key else ""
                plain = f"{curve} {setting}".strip()
                config = {**own, **case.config, **({key: value} if key else {})}
                config |= more.get("config", {})
                names = {"name": plain + ending, "plain": plain, "curve": curve, "setting": setting}
                if "like" in more:
                    names["like"] = plain
                method = Method(**{**known, **more, **names, "config": config})
                if method.is_sparse:
                    method = replace(method, config={"dense_above": 1.0, **config})
                yield method


def cases_of(part: Mapping[str, Any], *, smoke: bool = False) -> Iterator[Case]:
    """Yield the cases of a part, or tiny ones."""
    for name in ("smoke",) if smoke else part["cases"]:
        case = SUITES["smoke"] if smoke else SUITES["cases"][name]
        for ending, more in [*part.get("vary", {"": {}}).items()][: 1 if smoke else None]:
            more = dict(more)
            data = more.pop("data", "random")
            config = {**case.get("config", {}), **more}
            yield Case(**{**case, "name": name + ending, "data": data, "config": config})


@cache
def projection(size: int) -> nn.Linear:
    """Return the projection of a linear branch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(size, size).to(DEVICE).requires_grad_(False)


def layer_of(method: Method, case: Case, **more: object) -> LocalAttention:
    """Return a layer of a case on a method.

    Raises:
        UnsupportedBackendError: another backend would run.
    """
    kind = UlyssesAttention_VSA if method.gate else LocalAttention
    config = {**method.config, **more}
    config = {key: value for key, value in config.items() if key != "dense_above" or value}
    layer = layer_on(
        case, method.backend, config or None, dtype=DTYPE, strict=False, num_layers=1, kind=kind
    )
    if method.projection:
        layer.set_projection(projection(case.head_size))
    return layer


def call_of(method: Method, case: Case, layer: LocalAttention, qkv: Any) -> Callable[..., Any]:
    """Return a call of a layer in a step of a generation, in its middle where none is named."""
    span = TextSpan(start=case.tokens - case.text, length=case.text) if case.text else None
    gate = {"gate_compress": qkv[0].detach()} if method.gate else {}

    def run(step: int = STEP, request: str = "bench") -> torch.Tensor:
        known = {"num_steps": STEPS, "request_id": request, "cfg_branch": "cond"}
        with set_forward_context(step, latent_grid=case.grid, text_span=span, **known):
            return layer(*qkv, **gate)

    return run


def gradients_of(run: Run, qkv: Any) -> Run:
    """Return what runs the backward pass of a call alone, again and again."""
    out = run()
    return partial(torch.autograd.grad, out, qkv, torch.ones_like(out), retain_graph=True)


class Layers:
    """The layers of a case: what is known of each by its name.

    Args:
        part: of a benchmark.
        case: the case.
        bench: what runs.
    """

    def __init__(self, part: Mapping[str, Any], case: Case, bench: Bench) -> None:
        self.case, self.bench, options = case, bench, bench.options
        self.backward = options.backward
        self.small = SMOKE if options.smoke else SMALL
        self.qkv = case.draw()
        if self.backward:
            self.qkv = tuple(x.requires_grad_() for x in self.qkv)
        self.exact = Sample(self.qkv)
        self.base = part.get("base", "dense")
        self.methods: dict[str, Method] = {}
        self.layers: dict[str, LocalAttention] = {}
        self.runs: dict[str, Run] = {}
        self.versions: dict[str, str] = {}
        self.to_dense: dict[str, float] = {}
        self.skipped: dict[str, float] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        if self.base == "dense" and not self.backward:
            self.base, self.runs[self.base], self.versions[self.base] = dense_run(self.qkv)
        for method in methods_of(part, case):
            if method.name == self.base or re.search(options.only, method.name):
                self.add(method)

    def add(self, method: Method) -> None:
        """Take a method in, or say why it is left out."""
        name, case = method.name, self.case
        try:
            if method.apart and DEVICE == "cuda" and not self.bench.options.trial:
                tried(self.bench.name, name, case.name)
            if method.peer:
                made = PEERS[method.peer](self.qkv, method.config, partial(self.ours, method))
                self.runs[name], self.versions[name] = made
            else:
                layer = layer_of(method, case)
                if name != self.base and method.backend not in (None, str(layer.backend)):
                    raise UnsupportedBackendError(layer.report().entries[-1].selection.reason)
                self.layers[name] = layer
                self.runs[name] = call_of(method, case, layer, self.qkv)
                self.versions[name] = version_of("triton", "torch")
        except (UnsupportedBackendError, ImportError) as error:
            print(f"left out of {case.name}: {name}, {error}", flush=True)
            return
        self.methods[name] = method

    def ours(self, method: Method, backend: str) -> Run:
        """Return a call of our layer with a peer's parameters."""
        own = replace(method, backend=backend, config={"dense_above": 1.0, **method.config})
        return call_of(own, self.case, layer_of(own, self.case), self.qkv)

    def check(self) -> dict[str, float]:
        """Return the errors; what is wrong is no longer among what runs."""
        bounds = {name: method.bound for name, method in self.methods.items()}
        named = ((name, (name, run)) for name, run in self.runs.items())
        right, errors = self.bench.check(
            named, lambda name, _: self.error(name), lambda given: bounds.get(given[0], BOUND)
        )
        self.runs = {name: self.runs[name] for name in right}
        return errors

    def error(self, name: str) -> float:
        """Return the error of a method, and remember how far it is from dense attention."""
        run, method = self.runs[name], self.methods.get(name)
        if self.backward:
            assert method is not None, "dense attention is not timed backwards"
            self.runs[name] = gradients_of(run, self.qkv)
            return kernel_error(method, self.small, backward=True)
        run()
        with recorded_pairs() as told:
            out = run()  # from where the first call left what is carried over
        self.outputs[name] = self.exact.take(out).detach()
        self.to_dense[name] = self.exact.error(out)
        if name in self.layers:
            self.skipped[name] = self.layers[name].report().entries[-1].skipped or math.nan
        known = method is not None and (method.is_sparse or method.like)
        if not known or self.is_dense(name):
            return self.to_dense[name]
        if method.like:
            wanted = self.outputs.get(method.like)
            if wanted is None:
                raise UnsupportedBackendError(f"needs {method.like} to compare with")
            return relative_error(self.outputs[name], wanted)
        of_pairs = self.exact.error_of_pairs(out, told) if self.is_plain(name) else None
        return max(kernel_error(method, self.small), of_pairs or 0.0)

    def is_plain(self, name: str) -> bool:
        """Whether the output is attention to the pairs that are kept, and nothing more."""
        layer, method = self.layers.get(name), self.methods[name]
        if layer is None or method.gate or method.projection:
            return False
        config = layer.report().entries[-1].selection.config
        adds = {"tail": "none", "skip_below": None, "query_keep_ratio": 1}
        return all(getattr(config, key, value) == value for key, value in adds.items())

    def is_dense(self, name: str) -> bool:
        """Whether a layer gave what dense attention does, by its settings or by the data."""
        return self.case.data == "constant" or self.density(name)[1] == 1.0

    def density(self, name: str) -> tuple[float, float]:
        """Return the share of pairs of a layer's calls, and the share of calls that were dense."""
        layer = self.layers.get(name)
        if layer is None:
            return (math.nan if name in self.methods else 1.0), 0.0
        report = layer.report()
        dense = sum(part.calls for part in report.detours)
        found = [entry.density for entry in report.entries if entry.densities]
        return (found[-1] or 0.0) if found else 1.0, dense / max(1, report.calls)


def kernel_error(method: Method, case: Case, *, backward: bool = False) -> float:
    """Return how far a kernel is from the reference on a small case: nine rows in ten are nearer.

    Where scores are alike, another block may be chosen.
    """
    if not method.is_sparse:
        return math.nan if backward else 0.0
    case = replace(case, data="video", config=method.config)
    found = []
    for kernel in (method.config.get("kernel", "auto"), "reference"):
        qkv = case.draw()
        if backward:
            qkv = tuple(x.requires_grad_() for x in qkv)
        run = call_of(method, case, layer_of(method, case, kernel=kernel), qkv)
        outputs = gradients_of(run, qkv)() if backward else (run(),)
        found.append(torch.cat([x.detach().double() for x in outputs], dim=2))
    lengths = found[1].norm(dim=-1)  # keys that no query attends to have no gradient
    distance = (found[0] - found[1]).norm(dim=-1) / lengths.clamp_min(0.01 * lengths.mean())
    return float(distance.quantile(0.9))


def tried(suite: str, name: str, case: str) -> None:
    """Try a method in a process of its own.

    Raises:
        UnsupportedBackendError: it failed or hangs there.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ("--trial", "--case", case, "--only", f"^{re.escape(name)}$", "--out", folder)
        said, failure = run_apart(suite, *words, seconds=TRIAL_SECONDS)
    if failure is not None:
        raise UnsupportedBackendError(f"a trial said {(said + failure)[-600:].strip()}")


def generation_ms(run: Callable[..., object], request: str, steps: int) -> float:
    """Return what a step of a generation takes on average."""

    def generate() -> None:
        for step in range(steps):
            run(step, request)

    return event_ms(generate) / steps


def split(run: Run, rounds: int) -> Times:
    """Return the milliseconds per call that a layer spends in each of its pieces, and in the rest.

    The pieces are marked where the layer itself calls them.
    """
    times: Times = {}
    for _ in range(rounds):
        run()  # clocks and power settle
        spans: list[tuple[str, Any, Any]] = []
        with ExitStack() as stack:
            for piece, module, name in PIECES:
                marked = _marked(piece, getattr(module, name), spans)
                stack.enter_context(mock.patch.object(module, name, marked))
            for module in (tiles, groups, svg2):
                # One after the other: pieces that overlap cannot be told apart.
                stack.enter_context(mock.patch.object(module, "run_on_two_streams", _run_in_line))
            start = mark()
            run()
            stop = mark()
        synchronize()
        sums = dict.fromkeys([piece for piece, _, _ in spans], 0.0)
        for piece, first, last in spans:
            sums[piece] += elapsed_ms(first, last)
        rest = elapsed_ms(start, stop) - sum(sums.values())
        for piece, value in {**sums, "rest": rest}.items():
            times.setdefault(piece, []).append(value)
    return times


def _run_in_line(calls: Any, device: torch.device, *, recorded: bool = False) -> None:
    del device, recorded
    for call in calls:
        call()


def _marked(piece: str, function: Callable[..., Any], spans: list[Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = mark()
        result = function(*args, **kwargs)
        spans.append((piece, start, mark()))
        return result

    return run


class Columns:
    """What was measured of a case, by contender, as the columns of benchmarks have it.

    Args:
        found: the layers.
        times: of each.
    """

    def __init__(self, found: Layers, times: Times) -> None:
        self.found = found
        self.ms = {name: statistics.median(samples) for name, samples in times.items()}

    def of(self, name: str, column: str) -> object:
        """Return the value of a column for a contender."""
        value = COLUMNS[column](self, name)
        return float(f"{value:.4g}") if isinstance(value, float) else value

    def over(self, name: str, other: str | None = None) -> float:
        """Return the time of a contender over another's, the base's by default; nan without it."""
        return self.ms[name] / self.ms.get(other or self.found.base, math.nan)

    def method(self, name: str) -> Method:
        """Return what a contender is."""
        return self.found.methods.get(name, Method(name=name, plain=name, curve="dense"))

    def tail(self, name: str) -> str:
        """Return what becomes of the pairs that a contender does not keep."""
        return str(self.method(name).config.get("tail", "none"))

    def memory(self, name: str) -> float:
        """Return the extra memory of a contender."""
        inputs = 4 if self.method(name).gate else 3
        return extra_memory(self.found.runs[name], inputs=inputs)

    def over_dense(self, name: str) -> float:
        """Return the time over dense attention's over as many steps: busy GPUs run slower."""
        base, long = self.found.base, self.method(name).generation
        return self.over(name, f"{base}, a generation" if long else base)

    def error_at_equal_time(self, name: str) -> float:
        """Return the error of a tail over that without it after the same time."""
        if self.tail(name) != "pooled":
            return math.nan
        errors = self.found.to_dense
        alike = [x for x in self.ms if self.method(x).curve == self.method(name).curve]
        plain = [(self.ms[x], errors[x]) for x in alike if self.tail(x) == "none"]
        return errors[name] / error_at(plain, self.ms[name])


# `_harness.py` and the benchmarks in `layers.yaml` say what they are.
COLUMNS: dict[str, Callable[[Columns, str], Any]] = {
    "label": lambda of, name: of.found.layers[name].report().entries[-1].selection.label,
    "method": lambda of, name: of.method(name).curve,
    "setting": lambda of, name: of.method(name).setting,
    "tail": Columns.tail,
    "density": lambda of, name: of.found.density(name)[0],
    "dense_calls": lambda of, name: of.found.density(name)[1],
    "skipped": lambda of, name: of.found.skipped.get(name, math.nan),
    "error_to_dense": lambda of, name: of.found.to_dense.get(name, math.nan),
    "error_at_equal_time": Columns.error_at_equal_time,
    "extra_memory_share": Columns.memory,
    "speedup_over_fa3": lambda of, name: 1 / of.over(name, FA3),
    "over_fa3": Columns.over,
    "over_dense": Columns.over_dense,
    "over_ideal": lambda of, name: of.over(name) / of.found.density(name)[0],
    "over_without_tail": lambda of, name: of.over(name, of.method(name).plain),
    "over_plain": lambda of, name: (
        math.nan if of.method(name).plain == name else of.over(name, of.method(name).plain)
    ),
    "share_of_layer": lambda of, name: math.nan,  # of pieces
}


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


def measure(part: Mapping[str, Any], case: Case, bench: Bench) -> None:
    """Check, time and write the layers of a case, then their pieces."""
    with torch.set_grad_enabled(bench.options.backward):
        found = Layers(part, case, bench)
        errors = found.check()
        if bench.options.trial:
            return
        long = [name for name in found.runs if name in found.methods]
        long = [name for name in long if found.methods[name].generation]
        times = bench.time(
            {name: run for name, run in found.runs.items() if name not in long}, block_ms=80.0
        )
        for name in long:
            run = found.runs[name]
            steps = 2 if bench.options.smoke else STEPS
            times[name] = [generation_ms(run, f"{name} {i}", steps) for i in range(2)]
        columns = Columns(found, times)
        factor = 2.5 if found.backward else 1.0
        bench.write(
            times,
            case,
            benchmark=f"{bench.name}{' backward' if found.backward else ''}",
            flop={name: factor * case.flop * found.density(name)[0] for name in times},
            flop_formula=FLOP.replace("4*", "10*") if found.backward else FLOP,
            errors=errors,
            versions=found.versions,
            more=lambda row: {
                name: columns.of(row["contender"], name) for name in part.get("columns", ())
            },
        )
        if part.get("pieces") and not found.backward:
            for name in (name for name in found.layers if name in found.runs):
                write_pieces(found, name, part.get("columns", ()))


def write_pieces(found: Layers, name: str, columns: list[str]) -> None:
    """Write a row per piece of a layer."""
    pieces = split(found.runs[name], found.bench.options.rounds)
    whole = statistics.median(map(sum, zip(*pieces.values(), strict=True)))
    density = round(found.density(name)[0], 5)
    work = {
        f"{name}: {piece}": found.case.flop * density * (piece in ATTENDING) for piece in pieces
    }

    def more(row: Row) -> Row:
        known = {"density": density, "share_of_layer": round(row["median_ms"] / whole, 4)}
        return {column: known.get(column, math.nan) for column in columns}

    found.bench.write(
        {f"{name}: {piece}": samples for piece, samples in pieces.items()},
        found.case,
        benchmark=f"{found.bench.name} pieces",
        flop=work,
        flop_formula=f"time between marks inside the layer; {FLOP}",
        more=more,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of these benchmarks."""
    parser.add_argument("--case", type=pattern, default="", help="run the cases whose name matches")
    parser.add_argument("--backward", action="store_true", help="time the backward passes")
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)


def main(bench: Bench) -> int:
    """Measure the cases that are asked for; 1 if anything was wrong."""
    options = bench.options
    for part in SUITES["benchmarks"][bench.name]["parts"]:
        for case in cases_of(part, smoke=options.smoke):
            names = [part.get("base", "dense"), *(it.name for it in methods_of(part, case))]
            if bench.wants(case.name, "case") and any([*map(bench.wants, names)]):
                with bench.case(case.name):
                    measure(part, case, bench)
    return bench.status()
