"""Dense backends at the shapes that `auto` chooses by, and the table that is made of the rows.

    python3 scripts/bench/run.py auto --commit HASH --table

measures every shape, appends to `auto.csv`, and writes the package's own table anew from it and
from `dense.csv`. `--table` alone measures nothing.
"""

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from _harness import DEVICE, RESULTS, Bench, Row, version_of

from multimodal_gen.runtime.benchmark import SHAPES, measure
from multimodal_gen.runtime.layers.attention.auto_table import (
    COMMITTED,
    AutoTable,
    CallShape,
    Measured,
    write_tables,
)
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.request import Timing
from multimodal_gen.runtime.platforms import AttentionBackendEnum

# What nothing but the name of the GPU tells in the rows.
CAPABILITIES = {"NVIDIA H200": "9.0", "NVIDIA H100 80GB HBM3": "9.0"}
FILES = ("dense.csv", "auto.csv")
# Runs of a shape that a table is made of.
LAST_RUNS = 2
_Runs: TypeAlias = dict[str, list[dict[str, str]]]  # source -> rows
BACKENDS = ("triton_attn", "fa", "torch_sdpa", "torch_cudnn_sdpa", "sage_attn")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def measure_shape(
    bench: Bench, shape: str | CallShape, backends: Sequence[str] = BACKENDS, *, name: str = ""
) -> None:
    """Check and time backends at a shape, and write a row for each.

    Args:
        bench: what writes.
        shape: the shape, or its text.
        backends: those to time.
        name: of the case, in a file of calls that keep the device busy; the shape by default.
    """
    shape = CallShape.parse(shape) if isinstance(shape, str) else shape
    result = measure(
        shape,
        dtype=torch.bfloat16,
        device=torch.device(DEVICE),
        backends=[AttentionBackendEnum(each) for each in backends],
        rounds=bench.options.rounds,
    )
    for backend, reason in result.left_out.items():
        print(f"{shape}: left out: {backend}: {reason}")
    keys = f" K{shape.keys} KV{shape.kv_heads}" + (" mask" if shape.masked else "")
    size = f"B{shape.batch} H{shape.heads} S{shape.queries} D{shape.head_size} bf16"
    by_label = {each.label: each for each in result.times}

    def more(row: Row) -> Row:
        each = by_label[row["contender"]]
        host = {} if name else {"host_ms": round(each.timing.host_ms or float("nan"), 5)}
        return {
            "rounds": each.rounds,
            "median_ms": round(each.timing.device_ms, 5),
            "p20_ms": round(each.p20_ms, 5),
            "p80_ms": round(each.p80_ms, 5),
            **host,
        }

    bench.write(
        {label: [each.timing.device_ms] for label, each in by_label.items()},
        case=name or str(shape),
        shape=size + ("" if name else keys),
        flop=shape.flop,
        flop_formula="4*B*H*Sq*Sk*D",
        errors={label: each.relative_error for label, each in by_label.items()},
        versions={
            label: " ".join(f"{name} {version}" for name, version in each.versions.items())
            or version_of("torch")
            for label, each in by_label.items()
        },
        more=more,
    )


def read_rows(folder: Path = RESULTS) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file, row) of every row that a table may be made of."""
    for name in FILES:
        path = folder / name
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    if row["gpu"] in CAPABILITIES and row["contender"] != "auto":
                        yield name, row


def tables_of(rows: Iterable[tuple[str, dict[str, str]]]) -> list[AutoTable]:
    """Return one table per GPU, torch and triton, of the last runs of every shape."""
    machines: dict[tuple[str, ...], dict[CallShape, _Runs]] = {}
    for file, row in rows:
        shapes = machines.setdefault((row["gpu"], row["torch"], row["triton"]), {})
        runs = shapes.setdefault(shape_of(row), {})
        runs.setdefault(f"{file} at {row['commit']}", []).append(row)
    last = {
        machine: {shape: dict([*runs.items()][-LAST_RUNS:]) for shape, runs in shapes.items()}
        for machine, shapes in machines.items()
    }
    return [_table(machine, shapes) for machine, shapes in last.items()]


def shape_of(row: dict[str, str]) -> CallShape:
    """Return the shape of a row such as "B1 H24 S4096 D128 bf16", "... bf16 K77 KV8 mask"."""
    batch, heads, tokens, size, _, *rest = row["shape"].split()
    keys = next((part[1:] for part in rest if part.startswith("K") and part[1] != "V"), tokens[1:])
    kv_heads = next((part[2:] for part in rest if part.startswith("KV")), heads[1:])
    text = f"{batch[1:]}x{tokens[1:]}x{heads[1:]}x{size[1:]}:keys={keys}:kv_heads={kv_heads}"
    return CallShape.parse(text + (":mask" if "mask" in rest else ""))


def _table(machine: tuple[str, ...], shapes: dict[CallShape, _Runs]) -> AutoTable:
    gpu, torch_version, triton = machine
    versions = {"torch": torch_version, "triton": triton}
    measured = []
    for shape, runs in shapes.items():
        rows = [row for run in runs.values() for row in run]
        timings = {}
        for contender in dict.fromkeys(row["contender"] for row in [*runs.values()][-1]):
            its = [row for row in rows if row["contender"] == contender]
            name, _, variant = contender.rstrip(")").partition(" (")
            if not backends_of(AttentionBackendEnum(name))[0].never_unasked:
                timings[contender] = _timing(name, variant or name, its)
                versions |= _versions(its[-1]["version"])
        dtype = DTYPES[rows[0]["shape"].split()[4]]
        measured.append(Measured(shape=shape, dtype=dtype, timings=tuple(timings.values())))
    sources = dict.fromkeys(source for runs in shapes.values() for source in runs)
    return AutoTable(
        name=f"{gpu}, torch {torch_version}, triton {triton}",
        platform="cuda",
        device=gpu,
        capability=CAPABILITIES[gpu],
        versions=dict(sorted(versions.items())),
        source=", ".join(f"scripts/bench/results/{source}" for source in sources),
        measured=tuple(measured),
    )


def _timing(name: str, variant: str, rows: list[dict[str, str]]) -> Timing:
    """Return the least times of some runs: what disturbs a run adds to them."""
    host = [float(row["host_ms"]) for row in rows if row.get("host_ms") not in (None, "", "nan")]
    return Timing(
        backend=name,
        variant=variant,
        device_ms=min(float(row["median_ms"]) for row in rows),
        host_ms=min(host, default=None),
    )


def _versions(text: str) -> dict[str, str]:
    """Return the distribution that a row names, if it is not torch, which has a column."""
    name, _, version = text.partition(" ")
    return {} if name in ("torch", "triton", "") else {name: version}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.set_defaults(rounds=5)
    parser.add_argument("--table", action="store_true", help="write the package's table anew")


def main(bench: Bench) -> None:
    """Measure what was asked for, and write the table where that was asked for."""
    options = bench.options
    for shape in SHAPES if options.commit else ():
        if bench.wants(str(shape)):
            measure_shape(bench, shape)
    if options.table:
        write_tables(COMMITTED, tables_of(read_rows(options.out)))
