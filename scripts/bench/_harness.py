"""What the benchmarks share: interleaved timing, the CSV row, the correctness check before it.

The GPU is power-capped, so kernels are compared in interleaved rounds of one process: each round
runs every contender once, in an order drawn anew (a kernel after a hungry one finds lower clocks),
and figures are medians over rounds.

Columns that several benchmarks add:

- density: share of the token pairs that are attended to, by a tail's method exactly; nan where the
  data decide and nothing tells;
- speedup_over_fa3: time of FlashAttention 3, dense on the same tensors, over this one;
- error_to_dense: relative L2 distance of sampled rows from dense attention in float64;
- extra_memory_share: peak memory beyond inputs and output, over inputs and output;
- host_ms: time of the host next to that of the device.
"""

import argparse
import csv
import datetime
import importlib.metadata
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

# Benchmarks share inputs with the tests, which are no part of what is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from multimodal_gen.errors import UnsupportedBackendError

RESULTS = Path(__file__).parent / "results"
RUN = Path(__file__).with_name("run.py")
STARTED = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
if STARTED.parent == RUN.resolve().parent and STARTED.name != RUN.name:
    raise SystemExit(f"a benchmark is started by run.py: python3 {RUN} {STARTED.stem} --help")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


Row = dict[str, Any]
"""One line of a results file, by column; times in milliseconds."""
Times = dict[str, list[float]]
"""Milliseconds per call, per contender and round."""
Run = Callable[[], Any]
C = TypeVar("C")


def version_of(*distributions: str) -> str:
    """Return "name version" for the first of `distributions` that is installed."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "absent"


def interleave(contenders: dict[str, Run], *, rounds: int, block_ms: float = 150.0) -> Times:
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
    times: Times = {name: [] for name in contenders}
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


def extra_memory(run: Callable[[], torch.Tensor], *, inputs: int = 3) -> float:
    """Return peak memory beyond inputs and output, over inputs and output; NaN on the CPU.

    Args:
        run: what allocates it.
        inputs: how many tensors of the size of the output are read.
    """
    if DEVICE == "cpu":
        return math.nan
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor = run().nbytes
    synchronize()
    return (torch.cuda.max_memory_allocated() - before - tensor) / ((inputs + 1) * tensor)


def capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Return what replays a call as a CUDA graph, and its output; the call ran before."""
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def time_calls(
    runs: Mapping[str, Run],
    rounds: int,
    *,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[Times, dict[str, float]]:
    """Time every contender by one call per round; all must have run before.

    Args:
        runs: what to run, by name.
        rounds: number of rounds.
        around: what a contender runs in, by its name; entered outside of the timed region.

    Returns:
        The times, and the peak memory of the last call in GiB, NaN on the CPU.
    """
    times: Times = {name: [] for name in runs}
    peaks = dict.fromkeys(runs, math.nan)
    for name in shuffled_rounds(runs, rounds):
        with around(name):
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times[name].append(event_ms(runs[name]))
            if DEVICE == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    return times, peaks


def machine() -> Row:
    """Return the columns that say when and where rows were measured."""
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "torch": torch.__version__,
        "triton": version_of("triton").split()[-1],
    }


def rows_of(
    times: Times,
    *,
    commit: str,
    benchmark: str,
    case: str,
    shape: str,
    flop: float | Mapping[str, float],
    flop_formula: str,
    errors: Mapping[str, float] = MappingProxyType({}),
    versions: str | Mapping[str, str] = "",
    group: Callable[[str], str] = lambda name: "",
    more: Callable[[Row], Row] = lambda row: {},
) -> list[Row]:
    """Return one row per contender.

    Args:
        times: what was measured.
        commit: a column, as all below that are not told otherwise.
        benchmark: see above.
        case: see above.
        shape: see above.
        flop: of all contenders, or by contender.
        flop_formula: see above.
        errors: relative errors by contender, NaN where there is none.
        versions: of what is timed, of all contenders or by contender.
        group: what contenders compute, by name; `ratio_to_best` compares those of one group.
        more: returns further columns of a row, and those that replace what is in it.
    """
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    rows = []
    for name, samples in times.items():
        ordered, median = sorted(samples), medians[name]
        work = flop[name] if isinstance(flop, Mapping) else flop
        row = {
            **machine(),
            "commit": commit,
            "benchmark": benchmark,
            "case": case,
            "shape": shape,
            "contender": name,
            "version": versions if isinstance(versions, str) else versions.get(name, ""),
            "flop": work,
            "flop_formula": flop_formula,
            "rounds": len(samples),
            "median_ms": round(median, 4),
            "p20_ms": round(ordered[int(0.2 * (len(ordered) - 1))], 4),
            "p80_ms": round(ordered[round(0.8 * (len(ordered) - 1))], 4),
            "tflops": round(work / median / 1e9, 1),
            "relative_error": float(f"{errors.get(name, math.nan):.3g}"),
            "ratio_to_best": round(
                median / min(medians[other] for other in times if group(other) == group(name)), 4
            ),
        }
        rows.append(row | more(row))
    return rows


def described(row: Row) -> str:
    """Return what is printed of a row: its figures, and the columns of its benchmark alone."""
    own = [*row][[*row].index("ratio_to_best") + 1 :]
    return (
        f"{row['case']:28} {row['contender']:22} {row['median_ms']:10.4f} ms "
        f"{row['tflops']:7.1f} TFLOP/s x{row['ratio_to_best']:.3f} "
        f"error {row['relative_error']:.1e}" + "".join(f", {name} {row[name]}" for name in own)
    )


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Append rows of the same columns to a CSV file, with a header when it is new.

    Other columns of the file stay empty.

    Raises:
        SystemExit: the file lacks a column.
    """
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new, names = not path.exists(), [*rows[0]]
    with path.open("a+", newline="") as file:
        file.seek(0)
        header = next(csv.reader(file), names)
        if not set(names) <= set(header):
            raise SystemExit(f"{path} must have the columns {names}, got {header}")
        writer = csv.DictWriter(file, header, restval=math.nan, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


class Bench:
    """One run of a benchmark: what is asked for, what it writes, and what was wrong.

    Args:
        name: of the benchmark, and of its file of results.
        options: those of the command line.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.wrong: list[str] = []
        """Names of what was wrong; the run fails at its end."""
        self.asked: dict[str, dict[str, bool]] = {}
        """Option that selects -> what there is -> whether it is selected."""

    def wants(self, name: str, option: str = "only") -> bool:
        """Tell whether what has this name is selected by an option, a pattern of names."""
        found = re.search(getattr(self.options, option), name) is not None
        self.asked.setdefault(option, {})[name] = found
        return found

    def unknown(self) -> str:
        """Return which options select nothing, and what there is; empty where all do."""
        return "; ".join(
            f"--{option} of {self.name} must match one of {', '.join(map(repr, names))}, got "
            f"{getattr(self.options, option)!r}"
            for option, names in self.asked.items()
            if not any(names.values())
        )

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Let what is found wrong inside be told as that of a case."""
        before, self.wrong = self.wrong, []
        try:
            yield
        finally:
            self.wrong = [*before, *(f"{name}: {each}" for each in self.wrong)]

    def status(self) -> int:
        """Return the exit status of a run: 1 if anything was wrong, which is said."""
        if self.wrong:
            print(f"wrong: {'; '.join(self.wrong)}", file=sys.stderr)
        return 1 if self.wrong else 0

    def is_right(self, name: str, error: float, bound: float) -> bool:
        """Return whether an error is below its bound; if not, it is said and remembered."""
        if error < bound:
            return True
        print(f"WRONG {name}: relative error {error:.2e}", flush=True)
        self.wrong.append(name)
        return False

    def check(
        self,
        contenders: Iterable[tuple[str, C]],
        error_of: Callable[[str, C], float],
        bound: float | Callable[[C], float],
    ) -> tuple[dict[str, C], dict[str, float]]:
        """Return the contenders that are right, and the errors of all that could run.

        Args:
            contenders: each with its name.
            error_of: runs a contender and returns its relative error.
            bound: the error that it must be below, of all or by contender.
        """
        right, errors = {}, {}
        for name, contender in contenders:
            try:
                errors[name] = error_of(name, contender)
            except UnsupportedBackendError as error:
                print(f"left out: {name}, {error}", flush=True)
                continue
            except Exception:  # one contender must not end the others
                print(f"FAILED {name}: {traceback.format_exc()[-800:]}", flush=True)
                self.wrong.append(name)
                continue
            limit = bound(contender) if callable(bound) else bound
            if self.is_right(name, errors[name], limit):
                right[name] = contender
        return right, errors

    def time(self, runs: Mapping[str, Run], *, block_ms: float = 150.0) -> Times:
        """Time contenders in turns, by `interleave`; on the CPU every timing is one call."""
        block_ms = block_ms if DEVICE == "cuda" else 0.0
        return interleave(dict(runs), rounds=self.options.rounds, block_ms=block_ms)

    def write(
        self,
        times: Times,
        measured: Any = None,
        *,
        benchmark: str = "",
        table: str = "",
        show: Callable[[Row], str] = described,
        **of_rows: Any,
    ) -> list[Row]:
        """Append a row per contender to the benchmark's file and print it; returns the rows.

        Args:
            times: what was measured.
            measured: a case; has name, shape and FLOP, as far as `of_rows` does not tell them.
            benchmark: how rows call the benchmark, if not by its name.
            table: the file's name, if not the benchmark's.
            show: what is printed of a row.
            of_rows: see `rows_of`.
        """
        options = self.options
        if measured is not None:
            told = {"case": "name", "shape": "shape", "flop": "flop"}.items()
            of_rows |= {column: getattr(measured, x) for column, x in told if column not in of_rows}
        rows = rows_of(times, commit=options.commit, benchmark=benchmark or self.name, **of_rows)
        if options.out is None:
            options.out = fresh_folder(self.name)
        write_table(options.out / f"{table or self.name}.csv", rows)
        for row in rows:
            print(show(row), flush=True)
        return rows


def fresh_folder(name: str) -> Path:
    """Return a folder for what the tiny cases of a benchmark give, which is said."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    print(f"tiny cases, so their rows go to {folder}", flush=True)
    return folder


def run_apart(name: str, *words: str, seconds: float) -> tuple[str, str | None]:
    """Run a benchmark with other words in a process of its own.

    Returns:
        What it printed, and why it failed; None where it did not.
    """
    return ran([sys.executable, str(RUN), name, "--commit", "-", *words], seconds=seconds)


def ran(command: Sequence[str], *, seconds: float) -> tuple[str, str | None]:
    """Run a command that may fail or hang; returns what `run_apart` does."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        return said, f"hangs, or compiles for more than {seconds} s"
    return said, None if process.returncode == 0 else errors[-600:].strip()


def positive(text: str) -> int:
    """Return the number of an option that counts."""
    count = int(text) if text.isdecimal() else 0
    if not count:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return count


def pattern(text: str) -> str:
    """Return the pattern of an option that selects by name."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"must be a regular expression, got {text!r}: {error}"
        ) from None
    return text


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||actual - reference|| / ||reference||, in fp64."""
    reference = reference.double()
    return float((actual.double() - reference).norm() / reference.norm())
