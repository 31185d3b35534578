"""Sliding Tile and Video Sparse Attention: layers, operators and the engine, beside other packages.

Sampled rows of every output are checked against float32 first; what is wrong is not timed, and
makes the script fail at the end. Packages that may hang or crash are tried in processes of their
own. Layers are also cut into their pieces, and their memory is measured.

    python3 scripts/bench/run.py sparse --commit HASH [--only "wan 14B"] [--rounds 7]
    python3 scripts/bench/run.py sparse --commit HASH --smoke    # tiny cases, on any machine
"""

import argparse
import contextlib
import io
import math
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from unittest import mock

import torch
from _harness import (
    DEVICE,
    RUN,
    Row,
    elapsed_ms,
    interleave,
    mark,
    rows_of,
    synchronize,
    write_rows,
)
from _sparse_cases import CASES, SMOKE, Case, Expected, expect, make_inputs, tiles_of
from _sparse_contenders import (
    OURS,
    Contender,
    LeftOutError,
    Setting,
    make_contenders,
)
from _sparse_peers import OTHERS, SAFE

from multimodal_gen.runtime.layers.attention.sparse import router, tiles
from multimodal_gen.runtime.layers.attention.sparse.executors import local
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context

PROBE_SECONDS = 180
PROBES_AT_ONCE = 5
BLOCK_MS = 80.0
FLOP = "4*H*D*kept pairs; ragged tiles by their real tokens (sta) or as of mean size (vsa)"
DENSE_FLOP = "4*H*S*S*D"
# What a layer spends its time in: (what to call it, where it is called, under what name).
PIECES = (
    ("gather", tiles, "gather_tokens"),
    ("engine", tiles, "block_sparse_attention"),
    ("scatter", tiles, "scatter_tokens"),
    ("pooling", tiles, "pool_tiles"),
    ("selection", router, "select_tiles"),
    ("gate", local, "add_gated"),
)
REST = "rest"


@dataclass(frozen=True, kw_only=True)
class SparseRow(Row):
    """One line of `sparse.csv`.

    Attributes:
        density: share of the token pairs that are attended to.
        padded_tflops: the rate if every tile counted as a full one; where ragged tiles cost no
            more than their padding, it is that of a grid of whole tiles.
        speedup_over_fa3: time of FlashAttention 3, dense on the same tensors, over this one.
        extra_memory_share: peak memory beyond inputs and output, over inputs and output.
    """

    density: float
    padded_tflops: float
    speedup_over_fa3: float
    extra_memory_share: float


@dataclass(kw_only=True)
class Measured:
    """What is known of the contenders of a case, by name."""

    case: Case
    contenders: dict[str, Contender]
    errors: dict[str, float]
    times: dict[str, list[float]]
    densities: dict[str, float]
    memory: dict[str, float]
    pieces: dict[str, dict[str, list[float]]]


def check(
    contenders: dict[str, Contender], expected: Expected
) -> tuple[dict[str, Contender], dict[str, float], list[str]]:
    """Return the contenders that are right, the errors of all, and the names of the others."""
    right, errors, wrong = {}, {}, []
    for name, contender in contenders.items():
        try:
            errors[name] = expected.error(
                contender.kind, contender.take(contender.run(), expected.rows)
            )
        except Exception:  # one contender must not end the others
            print(f"FAILED {name}: {traceback.format_exc()[-800:]}", flush=True)
            wrong.append(name)
            continue
        if errors[name] < contender.bound:
            right[name] = contender
        else:
            print(f"WRONG {name}: relative error {errors[name]:.2e}", flush=True)
            wrong.append(name)
    return right, errors, wrong


def split(
    run: Callable[[], object],
    rounds: int,
    *,
    pieces: tuple[tuple[str, object, str], ...] = PIECES,
) -> dict[str, list[float]]:
    """Return the milliseconds per call that a layer spends in each of its pieces, and in the rest.

    The pieces are marked where the layer itself calls them.
    """
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        run()  # clocks and power settle
        spans: list[tuple[str, object, object]] = []
        with contextlib.ExitStack() as stack:
            for piece, module, name in pieces:
                marked = _marked(piece, getattr(module, name), spans)
                stack.enter_context(mock.patch.object(module, name, marked))
            # One after the other: pieces that overlap cannot be told apart.
            stack.enter_context(mock.patch.object(tiles, "run_on_two_streams", _run_in_line))
            start = mark()
            run()
            stop = mark()
        synchronize()
        total = elapsed_ms(start, stop)
        sums = dict.fromkeys([piece for piece, _, _ in spans], 0.0)
        for piece, first, last in spans:
            sums[piece] += elapsed_ms(first, last)
        for piece, value in {**sums, REST: total - sum(sums.values())}.items():
            times.setdefault(piece, []).append(value)
    return times


def _run_in_line(
    calls: Sequence[Callable[[], None]], device: torch.device, *, recorded: bool = False
) -> None:
    del device
    for call in calls:
        call()


def _marked(
    piece: str, function: Callable[..., object], spans: list[tuple[str, object, object]]
) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        start = mark()
        result = function(*args, **kwargs)
        spans.append((piece, start, mark()))
        return result

    return run


def extra_memory(contender: Contender, case: Case) -> float:
    """Return peak memory beyond inputs and output, over inputs and output; NaN on the CPU."""
    if DEVICE == "cpu":
        return math.nan
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contender.run()
    synchronize()
    tensor = case.tokens * case.heads * case.head_size * 2
    extra = torch.cuda.max_memory_allocated() - before - tensor
    return extra / ((contender.tensors + 1) * tensor)


def measure(case: Case, rounds: int, left_out: dict[str, str]) -> tuple[Measured, list[str]]:
    """Check and time a case; returns also the names of what is wrong."""
    setting = Setting(case=case, inputs=make_inputs(case, DEVICE))
    makers = {**OTHERS, **OURS}
    contenders: dict[str, Contender] = {}
    for name, made in make_contenders(setting, makers):
        if isinstance(made, LeftOutError) or name in left_out:
            print(f"left out of {case.name}: {name}, {left_out.get(name, made)}", flush=True)
        else:
            contenders[made.name] = made
    with in_context(case), torch.inference_mode():
        expected = expect(case, setting.inputs)
        right, errors, wrong = check(contenders, expected)
        runs = {name: contender.run for name, contender in right.items()}
        times = interleave(runs, rounds=rounds, block_ms=BLOCK_MS if DEVICE == "cuda" else 0.0)
        layers = {name: c for name, c in right.items() if c.layer is not None}
        densities = densities_of(layers)
        measured = Measured(
            case=case,
            contenders=right,
            errors=errors,
            times=times,
            densities={name: densities.get(c.kind, math.nan) for name, c in right.items()},
            memory={name: extra_memory(c, case) for name, c in layers.items()},
            pieces={name: split(c.run, rounds) for name, c in layers.items()},
        )
    return measured, wrong


def in_context(case: Case) -> contextlib.AbstractContextManager[object]:
    """Return the context of a denoiser call on the case's grid."""
    span = TextSpan(start=case.video, length=case.text) if case.text else None
    return set_forward_context(0, latent_grid=case.grid, text_span=span)


def densities_of(layers: dict[str, Contender]) -> dict[str, float]:
    """Return the density that layers report, by the kind of their output; 1 for dense ones."""
    densities = {"dense": 1.0}
    for contender in layers.values():
        assert contender.layer is not None
        (entry,) = (e for e in contender.layer.report().entries if e.calls)
        assert entry.density is not None, "sparse layers report a density"
        densities[contender.kind] = entry.density
    # The gate changes nothing about which pairs are attended to.
    for kind, other in (("vsa gate", "vsa"), ("vsa", "vsa gate")):
        if other in densities:
            densities.setdefault(kind, densities[other])
    return densities


def make_rows(measured: Measured, commit: str) -> list[SparseRow]:
    """Return a row per contender, then a row per piece of every layer."""
    fa3 = statistics.median(measured.times.get("fa3 dense", [math.nan]))
    rows = []
    for kind in dict.fromkeys(c.kind for c in measured.contenders.values()):
        for row in _rows_of_kind(measured, kind, commit):
            density = measured.densities[row.contender]
            rate = row.tflops * _padding(measured.case, kind, density)
            memory = measured.memory.get(row.contender, math.nan)
            rows.append(
                SparseRow(
                    **asdict(row),
                    density=round(density, 5),
                    padded_tflops=round(rate, 1),
                    speedup_over_fa3=round(fa3 / row.median_ms, 3),
                    extra_memory_share=round(memory, 4),
                )
            )
    return rows + _rows_of_pieces(measured, commit)


def _rows_of_kind(measured: Measured, kind: str, commit: str) -> list[Row]:
    """Return the rows of what computes the same output."""
    case = measured.case
    contenders = {name: c for name, c in measured.contenders.items() if c.kind == kind}
    density = measured.densities[next(iter(contenders))]
    return rows_of(
        {name: measured.times[name] for name in contenders},
        commit=commit,
        benchmark="sparse",
        case=case.name,
        shape=case.shape,
        flop=4.0 * case.heads * case.head_size * case.tokens**2 * density,
        flop_formula=DENSE_FLOP if kind == "dense" else FLOP,
        errors=measured.errors,
        versions={name: contender.version for name, contender in contenders.items()},
    )


def _rows_of_pieces(measured: Measured, commit: str) -> list[SparseRow]:
    case, rows = measured.case, []
    for name, pieces in measured.pieces.items():
        found = rows_of(
            {f"{name}: {piece}": times for piece, times in pieces.items()},
            commit=commit,
            benchmark="sparse pieces",
            case=case.name,
            shape=case.shape,
            flop=0.0,
            flop_formula="time between marks inside the layer",
            errors={},
            versions={},
        )
        rows += [
            SparseRow(
                **{**asdict(row), "ratio_to_best": math.nan},
                density=round(measured.densities[name], 5),
                padded_tflops=math.nan,
                speedup_over_fa3=math.nan,
                extra_memory_share=math.nan,
            )
            for row in found
        ]
    return rows


def _padding(case: Case, kind: str, density: float) -> float:
    """Return pairs attended to if every tile were full, over those that are."""
    if kind == "dense":
        return 1.0
    tile, kept = case.vsa_tile, case.kept
    if kind == "sta":
        tile = case.sta_tile
        sizes = tiles_of(case.grid, tile)
        kept = math.prod(min(pair) for pair in zip(case.window, sizes, strict=True))
    return case.padded_pairs(tile, kept) / (density * case.tokens**2)


def show(measured: Measured, rows: Sequence[SparseRow]) -> None:
    """Print the rows, and the pieces of a layer on one line."""
    print(f"-- {measured.case.name}: {measured.case.shape}")
    for row in (row for row in rows if row.benchmark == "sparse"):
        print(
            f"   {row.contender:30} {row.median_ms:9.3f} ms {row.tflops:6.0f} TFLOP/s "
            f"(padded {row.padded_tflops:4.0f})  x{row.speedup_over_fa3:.2f} of fa3 dense  "
            f"error {row.relative_error:.1e}  extra memory {row.extra_memory_share:.1%}"
        )
    for name, pieces in measured.pieces.items():
        medians = (f"{piece} {statistics.median(times):.3f}" for piece, times in pieces.items())
        print(f"   {name} in ms: {', '.join(medians)}", flush=True)


def probe(name: str, cases: Sequence[Case]) -> str | None:
    """Check one contender on the first case that it takes part in; returns why it must not."""
    reason = "there is no case for it"
    for case in cases:
        setting = Setting(case=case, inputs=make_inputs(case, DEVICE))
        ((_, made),) = make_contenders(setting, {name: OTHERS[name]})
        if isinstance(made, LeftOutError):
            reason = str(made)
            continue
        with in_context(case), torch.inference_mode():
            _, errors, wrong = check({made.name: made}, expect(case, setting.inputs))
        if not wrong:
            return None
        return f"relative error {errors[made.name]:.2e}" if errors else "it failed, see above"
    return reason


def probe_apart(name: str) -> str | None:
    """Run `probe` in a process of its own; returns why the contender must not take part."""
    command = [sys.executable, str(RUN), "sparse", "--commit", "-", "--probe", name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"hangs, or compiles for more than {PROBE_SECONDS} s"
    if result.returncode == 0:
        return None
    return f"a trial said {(result.stdout + result.stderr)[-600:].strip()}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.set_defaults(rounds=7)
    parser.add_argument("--probe", default=None, help="try one contender, then stop")


def main(arguments: argparse.Namespace) -> None:
    """Try the other packages, then measure every case; append to `sparse.csv`."""
    if DEVICE == "cpu" and not arguments.smoke:
        raise argparse.ArgumentError(None, "needs a GPU; --smoke runs tiny cases anywhere")
    torch.backends.cuda.matmul.allow_tf32 = False
    cases = [c for c in (SMOKE if arguments.smoke else CASES) if arguments.only in c.name]
    if arguments.probe:
        reason = probe(arguments.probe, cases)
        raise SystemExit(reason)
    left_out: dict[str, str] = {}
    if not arguments.smoke:
        names = [name for name in OTHERS if name not in SAFE]
        with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
            reasons = pool.map(probe_apart, names)
        left_out = {n: why for n, why in zip(names, reasons, strict=True) if why is not None}
    failed = []
    for case in cases:
        measured, wrong = measure(case, arguments.rounds, left_out)
        rows = make_rows(measured, arguments.commit)
        show(measured, rows)
        with contextlib.redirect_stdout(io.StringIO()):
            write_rows(arguments.out / "sparse.csv", rows)
        failed += [f"{case.name}: {name}" for name in wrong if name not in OTHERS]
    if failed:
        raise SystemExit(f"wrong: {'; '.join(failed)}")
