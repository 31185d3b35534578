"""Sliding Tile and Video Sparse Attention: layers, operators and the engine, beside other packages.

Sampled rows of every output are checked against float32 first; what is wrong is not timed, and
makes the script fail at the end. Packages that may hang or crash are tried in processes of their
own. Layers are also cut into their pieces, and their memory is measured.

    python3 scripts/bench/run.py sparse --commit HASH [--only "wan 14B"] [--rounds 7]
    python3 scripts/bench/run.py sparse --commit HASH --smoke    # tiny cases, on any machine
"""

import argparse
import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from _attention import FA3
from _harness import (
    DEVICE,
    Bench,
    Row,
    Times,
    elapsed_ms,
    extra_memory,
    mark,
    run_apart,
    synchronize,
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


def check(
    contenders: dict[str, Contender], expected: Expected, bench: Bench
) -> tuple[dict[str, Contender], dict[str, float]]:
    """Return the contenders that are right, and the errors of all that could run."""
    return bench.check(
        contenders.items(),
        lambda name, c: expected.error(c.kind, c.take(c.run(), expected.rows)),
        lambda c: c.bound,
    )


def split(
    run: Callable[[], object],
    rounds: int,
    *,
    pieces: tuple[tuple[str, object, str], ...] = PIECES,
) -> Times:
    """Return the milliseconds per call that a layer spends in each of its pieces, and in the rest.

    The pieces are marked where the layer itself calls them.
    """
    times: Times = {}
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


def measure(case: Case, bench: Bench, left_out: dict[str, str]) -> None:
    """Check, time and write a case, then what its layers spend their time in."""
    setting = Setting(case=case, inputs=make_inputs(case, DEVICE))
    contenders: dict[str, Contender] = {}
    for name, made in make_contenders(setting, {**OTHERS, **OURS}):
        if isinstance(made, LeftOutError) or name in left_out:
            print(f"left out of {case.name}: {name}, {left_out.get(name, made)}", flush=True)
        else:
            contenders[made.name] = made
    with in_context(case), torch.inference_mode():
        right, errors = check(contenders, expect(case, setting.inputs), bench)
        times = bench.time({name: c.run for name, c in right.items()}, block_ms=BLOCK_MS)
        layers = {name: c for name, c in right.items() if c.layer is not None}
        densities = densities_of(layers)
        memory = {name: extra_memory(c.run, inputs=c.tensors) for name, c in layers.items()}
        pieces = {name: split(c.run, bench.options.rounds) for name, c in layers.items()}
    print(f"-- {case.name}: {case.shape}")
    write(bench, case, right, times, densities, errors=errors, memory=memory)
    for name, found in pieces.items():
        write_pieces(bench, case, name, found, densities[layers[name].kind])


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


def write(
    bench: Bench,
    case: Case,
    contenders: dict[str, Contender],
    times: Times,
    densities: dict[str, float],
    *,
    errors: dict[str, float],
    memory: dict[str, float],
) -> list[Row]:
    """Write a row per contender; returns them.

    Args:
        bench: what writes.
        case: what was measured.
        contenders: what was measured of it, by name.
        times: of each.
        densities: by kind of output.
        errors: of each.
        memory: of some, beyond inputs and output.
    """
    fa3_ms, dense_flop = statistics.median(times.get(FA3, [math.nan])), case.flop
    rows: list[Row] = []
    for kind in dict.fromkeys(c.kind for c in contenders.values()):
        density = densities.get(kind, math.nan)
        padding = _padding(case, kind, density)

        def more(row: Row, density: float = density, padding: float = padding) -> Row:
            return {
                "density": round(density, 5),
                # The rate if every tile counted as a full one; where ragged tiles cost no more
                # than their padding, it is that of a grid of whole tiles.
                "padded_tflops": round(row["tflops"] * padding, 1),
                "speedup_over_fa3": round(fa3_ms / row["median_ms"], 3),
                "extra_memory_share": round(memory.get(row["contender"], math.nan), 4),
            }

        alike = {name: c for name, c in contenders.items() if c.kind == kind}
        rows += bench.write(
            {name: times[name] for name in alike},
            case,
            flop=dense_flop * density,
            flop_formula=DENSE_FLOP if kind == "dense" else FLOP,
            errors=errors,
            versions={name: contender.version for name, contender in alike.items()},
            more=more,
        )
    return rows


def write_pieces(bench: Bench, case: Case, name: str, pieces: Times, density: float) -> list[Row]:
    """Write a row per piece of a layer; returns them."""
    unknown = ("ratio_to_best", "padded_tflops", "speedup_over_fa3", "extra_memory_share")
    return bench.write(
        {f"{name}: {piece}": times for piece, times in pieces.items()},
        case,
        benchmark="sparse pieces",
        flop=0.0,
        flop_formula="time between marks inside the layer",
        more=lambda row: {"density": round(density, 5), **dict.fromkeys(unknown, math.nan)},
    )


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


def probe(name: str, cases: Sequence[Case], bench: Bench) -> str | None:
    """Check one contender on the first case that it takes part in; returns why it must not."""
    reason = "there is no case for it"
    for case in cases:
        setting = Setting(case=case, inputs=make_inputs(case, DEVICE))
        ((_, made),) = make_contenders(setting, {name: OTHERS[name]})
        if isinstance(made, LeftOutError):
            reason = str(made)
            continue
        with in_context(case), torch.inference_mode():
            right, errors = check({made.name: made}, expect(case, setting.inputs), bench)
        if right:
            return None
        return f"relative error {errors[made.name]:.2e}" if errors else "it failed, see above"
    return reason


def probe_apart(name: str) -> str | None:
    """Run `probe` in a process of its own; returns why the contender must not take part."""
    said, failure = run_apart("sparse", "--probe", name, seconds=PROBE_SECONDS)
    return None if failure is None else f"a trial said {(said + failure)[-600:].strip()}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.set_defaults(rounds=7)
    parser.add_argument("--probe", default=None, help="try one contender, then stop")


def main(bench: Bench) -> int:
    """Try the other packages, then measure every case; 1 if anything of ours was wrong."""
    options = bench.options
    if DEVICE == "cpu" and not options.smoke:
        raise argparse.ArgumentError(None, "needs a GPU; --smoke runs tiny cases anywhere")
    cases = [c for c in (SMOKE if options.smoke else CASES) if options.only in c.name]
    if options.probe:
        reason = probe(options.probe, cases, bench)
        raise SystemExit(reason)
    left_out: dict[str, str] = {}
    if not options.smoke:
        names = [name for name in OTHERS if name not in SAFE]
        with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
            reasons = pool.map(probe_apart, names)
        left_out = {n: why for n, why in zip(names, reasons, strict=True) if why is not None}
    failed = []
    for case in cases:
        bench.wrong.clear()
        measure(case, bench, left_out)
        failed += [f"{case.name}: {name}" for name in bench.wrong if name not in OTHERS]
    if failed:
        raise SystemExit(f"wrong: {'; '.join(failed)}")
    return 0
