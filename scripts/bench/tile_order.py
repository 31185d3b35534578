"""Moving tokens into tile order and back, against the rate of a plain device copy.

Every shape of program is checked bit by bit at full size, then timed in interleaved rounds with a
copy of the same bytes, which is the roofline, and with the reference (one index_select or
index_copy_ per tensor). Bytes are read + written, the index not counted. In the results file `flop`
holds them and `tflops` the terabytes per second.

    python3 scripts/bench/run.py tile_order --commit HASH [--only gather] [--rounds 9]
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from _attention import Grid
from _harness import Bench, Row, Run

from multimodal_gen.kernels.launch.launcher import form_of
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.kernels.tile_order.reference import gather_reference, scatter_reference
from multimodal_gen.kernels.tile_order.tile_order_kernel import (
    TILE,
    CopyTile,
    prepare_gather,
    prepare_scatter,
)

HEAD_SIZE = 128
COPY, REFERENCE = "device copy", "reference"

Check = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One movement at full size."""

    move: str
    grid: Grid
    tile: Grid
    heads: int

    @property
    def name(self) -> str:
        """What the results file calls it."""
        grid, tile = ("x".join(map(str, sizes)) for sizes in (self.grid, self.tile))
        return f"{self.move} {grid} by {tile}"


CASES = [
    Case(move=move, grid=grid, tile=tile, heads=heads)
    for grid, heads in (((30, 48, 80), 24), ((21, 45, 80), 40))
    for tile in ((6, 8, 8), (4, 4, 4))
    for move in ("gather qkv", "scatter out", "scatter head-major out")
]


def name_of(tile: CopyTile) -> str:
    """Return what the results file calls a shape of program."""
    default = ", default" if tile == TILE else ""
    return f"triton {tile.tokens} tokens x {tile.row_bytes} B w{tile.warps}{default}"


VARIANTS = {
    name_of(tile): tile
    for tile in (
        TILE,
        CopyTile(tokens=8, row_bytes=512, warps=2),
        CopyTile(tokens=8, row_bytes=1024, warps=4),
        CopyTile(tokens=8, row_bytes=2048, warps=4),
        CopyTile(tokens=4, row_bytes=4096, warps=4),
        CopyTile(tokens=16, row_bytes=512, warps=4),
        CopyTile(tokens=16, row_bytes=1024, warps=8),
        CopyTile(tokens=16, row_bytes=2048, warps=8),
        CopyTile(tokens=32, row_bytes=512, warps=4),
        CopyTile(tokens=64, row_bytes=256, warps=4),
    )
}


def gather_runs(case: Case, device: str) -> tuple[dict[str, Run], Check]:
    """Return the contenders, and a check of their results against plain indexing."""
    order = tile_order(case.grid, case.tile, device)
    whole = torch.randn(
        3, order.num_tokens, case.heads, HEAD_SIZE, device=device, dtype=torch.bfloat16
    )
    tensors = tuple(whole[i : i + 1] for i in range(3))
    target = torch.empty_like(whole)
    runs: dict[str, Run] = {
        COPY: lambda: target.copy_(whole),
        REFERENCE: lambda: [gather_reference(tensor, order.order) for tensor in tensors],
    }
    for name, tile in VARIANTS.items():
        move = prepare_gather(tuple(map(form_of, tensors)), form_of(order.order), tile=tile)
        runs[name] = partial(move, tensors, order.order)

    def check(name: str) -> bool:
        found = runs[name]()
        index = order.order.long()
        return all(torch.equal(a, b[:, index]) for a, b in zip(found, tensors, strict=True))

    return runs, check


def scatter_runs(case: Case, device: str) -> tuple[dict[str, Run], Check]:
    """Return the contenders, and a check of their results against plain indexing."""
    order = tile_order(case.grid, case.tile, device)
    shape = (1, order.num_tokens, case.heads, HEAD_SIZE)
    source = torch.randn(shape, device=device, dtype=torch.bfloat16)
    if "head-major" in case.move:
        source = source.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.empty(shape, device=device, dtype=torch.bfloat16)
    copied = torch.empty_like(source)
    runs: dict[str, Run] = {
        COPY: lambda: copied.copy_(source),
        REFERENCE: lambda: scatter_reference(source, order.order, out),
    }
    for name, tile in VARIANTS.items():
        move = prepare_scatter(*map(form_of, (source, order.order, out)), tile=tile)
        runs[name] = partial(move, source, order.order, out)

    def check(name: str) -> bool:
        out.fill_(torch.nan)
        runs[name]()
        return torch.equal(out, source[:, order.inverse.long()])

    return runs, check


def measure(case: Case, bench: Bench) -> None:
    """Check every contender, then time the ones that are right."""
    gathers = case.move.startswith("gather")
    runs, check = (gather_runs if gathers else scatter_runs)(case, "cuda")
    for name in [name for name in runs if name != COPY]:
        if not check(name):
            print(f"{case.name}: {name} is wrong, left out", flush=True)
            del runs[name]
    times = bench.time(runs)
    tokens, roof = math.prod(case.grid), statistics.median(times[COPY])
    moved = 2.0 * (3 if gathers else 1) * tokens * case.heads * HEAD_SIZE * torch.bfloat16.itemsize

    def show(row: Row) -> str:
        return (
            f"   {row['contender']:40} {moved / row['median_ms'] / 1e6:7.0f} GB/s  "
            f"{roof / row['median_ms']:.3f} of the copy"
        )

    print(f"-- {case.name}: {moved / 1e9:.2f} GB", flush=True)
    bench.write(
        times,
        case,
        shape=f"B1 H{case.heads} S{tokens} D{HEAD_SIZE}",
        flop=moved,
        flop_formula="bytes read + written; tflops is TB/s",
        errors=dict.fromkeys(times, 0.0),
        more=lambda row: {"tflops": round(moved / row["median_ms"] / 1e9, 3)},
        show=show,
    )
