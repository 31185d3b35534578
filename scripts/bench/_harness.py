"""What the benchmarks share: interleaved timing, the CSV row, the correctness check before it.

The GPU is power-capped, so kernels are compared in interleaved rounds of one process: each round
runs every contender once, in an order drawn anew (a kernel after a hungry one finds lower clocks),
and figures are medians over rounds.
"""

import csv
import datetime
import importlib.metadata
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

# Benchmarks share inputs with the tests, which are no part of what is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

RESULTS = Path(__file__).parent / "results"
RUN = Path(__file__).with_name("run.py")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a results file; times in milliseconds."""

    date: str
    gpu: str
    torch: str
    triton: str
    commit: str
    benchmark: str
    case: str
    shape: str
    contender: str
    version: str
    flop: float
    flop_formula: str
    rounds: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    tflops: float
    relative_error: float
    ratio_to_best: float


def version_of(*distributions: str) -> str:
    """Return "name version" for the first of `distributions` that is installed."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "absent"


def interleave(
    contenders: dict[str, Callable[[], object]], *, rounds: int, block_ms: float = 150.0
) -> dict[str, list[float]]:
    """Time every contender once per round with device events, after one warm-up each.

    Args:
        contenders: what to run, by name.
        rounds: number of rounds.
        block_ms: a timing repeats the call until it lasts about this long, so that clocks and
            power settle on the contender itself rather than on the one before it.

    Returns:
        Milliseconds per call, per contender and round.
    """
    for run in contenders.values():
        run()
    synchronize()
    repeats = {n: max(1, round(block_ms / event_ms(run))) for n, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in shuffled_rounds(contenders, rounds):
        times[name].append(event_ms(contenders[name], repeat=repeats[name]))
    return times


def shuffled_rounds(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield every name once per round, in an order drawn anew for each round."""
    order = list(names)
    draw = random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        yield from order


def event_ms(run: Callable[[], object], *, repeat: int = 1) -> float:
    """Return milliseconds per call between two device events."""
    start = mark()
    for _ in range(repeat):
        run()
    stop = mark()
    synchronize()
    return elapsed_ms(start, stop) / repeat


def mark() -> "torch.cuda.Event | float":
    """Return a point in time: a recorded device event; on the CPU, the clock."""
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: "torch.cuda.Event | float", stop: "torch.cuda.Event | float") -> float:
    """Return the milliseconds between two marks; on a device, after `synchronize`."""
    if isinstance(start, float) and isinstance(stop, float):
        return (stop - start) * 1e3
    return start.elapsed_time(stop)


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def extra_memory(run: Callable[[], torch.Tensor]) -> float:
    """Return peak memory beyond inputs and output, over inputs and output; NaN on the CPU."""
    if DEVICE == "cpu":
        return math.nan
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor = run().nbytes
    synchronize()
    return (torch.cuda.max_memory_allocated() - before - tensor) / (4 * tensor)


def rows_of(
    times: dict[str, list[float]],
    *,
    commit: str,
    benchmark: str,
    case: str,
    shape: str,
    flop: float,
    flop_formula: str,
    errors: dict[str, float],
    versions: dict[str, str],
) -> list[Row]:
    """Return one row per contender."""
    best = min(statistics.median(t) for t in times.values())
    rows = []
    for name, samples in times.items():
        median = statistics.median(samples)
        ordered = sorted(samples)
        rows.append(
            Row(
                date=datetime.date.today().isoformat(),
                gpu=torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
                torch=torch.__version__,
                triton=version_of("triton").split()[-1],
                commit=commit,
                benchmark=benchmark,
                case=case,
                shape=shape,
                contender=name,
                version=versions.get(name, ""),
                flop=flop,
                flop_formula=flop_formula,
                rounds=len(samples),
                median_ms=round(median, 4),
                p20_ms=round(ordered[int(0.2 * (len(ordered) - 1))], 4),
                p80_ms=round(ordered[round(0.8 * (len(ordered) - 1))], 4),
                tflops=round(flop / median / 1e9, 1),
                relative_error=float(f"{errors.get(name, float('nan')):.3g}"),
                ratio_to_best=round(median / best, 4),
            )
        )
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows, all of one class, to a CSV file, with a header when it is new."""
    write_table(path, rows)
    for row in rows:
        print(
            f"{row.case:28} {row.contender:22} {row.median_ms:10.4f} ms {row.tflops:7.1f} TFLOP/s "
            f"x{row.ratio_to_best:.3f} error {row.relative_error:.1e}",
            flush=True,
        )


def write_table(path: Path, rows: Sequence[Any]) -> None:
    """Append dataclasses, all of one class, to a CSV file, with a header when it is new."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||actual - reference|| / ||reference||, in fp64."""
    reference = reference.double()
    return float((actual.double() - reference).norm() / reference.norm())
