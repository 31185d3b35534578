"""The coarse stage of tile-based sparse attention: pooling, scores with top-k, the gated sum.

Every contender's result is checked first. `select` has a contender per buffer size and per number
of warps that share a row, and `lists` of a map one per number of entries that are looked at at
once; those that run by default carry no figures in their names. `cells` is what ranking by the
cells of tiles takes.

    python3 scripts/bench/run.py tile_pool --commit HASH [--only select] [--case by] [--rounds 9]
"""

import argparse
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from _attention import Case, Grid
from _harness import Bench, Run, relative_error

from multimodal_gen.kernels.block_sparse import steps_kernel
from multimodal_gen.kernels.select import tile_kernel as kernel
from multimodal_gen.kernels.select.api import (
    add_gated,
    mark_tiles,
    pool_cells,
    pool_tiles,
    select_tiles,
)
from multimodal_gen.kernels.select.reference import (
    Ranking,
    Tiles,
    add_gated_reference,
    pool_tiles_reference,
    select_tiles_reference,
)
from multimodal_gen.kernels.tile_order.api import tile_order

BOUND = 4e-3
CHECKED_HEADS = 2
VARIANTS = {
    f"buffer {megabytes} MiB, {warps} warps": (megabytes * 2**20, warps)
    for megabytes in (32, 64, 128)
    for warps in (1, 2, 4, 8)
}

Runs = dict[str, Run]


@dataclass(frozen=True, kw_only=True)
class TiledCase(Case):
    """One latent grid, its tiles, and the share of them that is kept."""

    tile: Grid = (4, 4, 4)
    token_mask: float = 0.1

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        grid, tile = ("x".join(map(str, x)) for x in (self.grid, self.tile))
        return f"B1 H{self.heads} {grid} tiles {tile} D{self.head_size} bf16"


CASES = (
    TiledCase(name="30x48x80", grid=(30, 48, 80), heads=24),
    TiledCase(name="21x45x80", grid=(21, 45, 80), heads=40),
    TiledCase(name="21x30x52", grid=(21, 30, 52), heads=12),
    TiledCase(name="21x45x80 by 256", grid=(21, 45, 80), tile=(4, 8, 8), heads=40),
)


def select_runs(query: torch.Tensor, key: torch.Tensor, count: int) -> Runs:
    """Return the contenders of the selection."""
    runs: Runs = {"select": lambda: select_tiles(query, key, count)}
    out = torch.empty((*query.shape[:3], count), dtype=torch.int32, device=query.device)

    def run(scratch_bytes: int, warps: int) -> torch.Tensor:
        with mock.patch.object(kernel, "_warps", return_value=warps):
            kernel.select_tiles(Ranking(query, key, count, 0, out), scratch_bytes=scratch_bytes)
        return out

    runs.update({f"select, {name}": partial(run, *sizes) for name, sizes in VARIANTS.items()})
    return runs


def map_runs(query: torch.Tensor, key: torch.Tensor, count: int) -> tuple[Runs, dict[str, float]]:
    """Return the contenders of a map of the selection and of its lists, and what is wrong."""
    marked = mark_tiles(query, key, count, near=1)

    def lists(listed: int) -> torch.Tensor:
        with mock.patch.object(steps_kernel, "LONG_ROW_CHUNK", listed):
            return steps_kernel.make_lists(marked)[0]

    runs: Runs = {
        "map": lambda: mark_tiles(query, key, count, near=1),
        "lists": lambda: steps_kernel.make_lists(marked)[0],
        **{f"lists, {n} at once": partial(lists, n) for n in (256, 512, 1024, 2048)},
    }
    wanted = marked.long().cumsum(-1)
    slots = torch.where(marked, wanted - 1, marked.shape[-1] - 1)
    place = torch.arange(marked.shape[-1], device=marked.device, dtype=torch.int32)
    errors = {"map": 0.0}
    for name in runs.keys() - {"map"}:
        found = runs[name]().gather(-1, slots)
        errors[name] = float((marked & (found != place)).double().mean())
    return runs, errors


def cell_runs(
    q: torch.Tensor, k: torch.Tensor, tiles: Tiles, token_mask: float
) -> tuple[Runs, dict[str, float]]:
    """Return the contenders of the ranking by four cells of every tile, and what is wrong."""
    num_tiles = len(tiles.starts)
    pool = partial(pool_cells, tiles=tiles, cells=4)
    (query, real), (key, _) = pool(q), pool(k)
    count, scale = max(1, round(token_mask * num_tiles)), q.shape[3] ** -0.5
    few = slice(0, CHECKED_HEADS)
    means = pool_tiles_reference(q[:, :, few].float(), tiles.cells(4))
    best = torch.empty((1, CHECKED_HEADS, num_tiles, count), dtype=torch.int32, device=q.device)
    by_cells: dict[str, Any] = {"cells": (4, 4), "scale": scale, "real": (real, real)}
    select_tiles_reference(Ranking(query[:, few], key[:, few], count, 0, best, **by_cells))
    kept = best.new_zeros((*best.shape[:3], num_tiles), dtype=torch.bool)
    kept.scatter_(-1, best.long(), True)

    def select() -> torch.Tensor:
        return select_tiles(query, key, count, **by_cells)

    wrong = 1.0 - float(kept.gather(-1, select()[:, few].long()).double().mean())
    errors = {
        "pool cells of q": relative_error(query[:, few], means),
        "select by cells": wrong,
    }
    return {"pool cells of q": lambda: pool(q)[0], "select by cells": select}, errors


def select_errors(
    runs: Runs, query: torch.Tensor, key: torch.Tensor, count: int
) -> dict[str, float]:
    """Return the share of tiles that contenders choose and the definition does not.

    Neighbours in rank may change places where the order of a sum differs.
    """
    best = torch.empty((*query.shape[:3], count), dtype=torch.int32, device=query.device)
    select_tiles_reference(Ranking(query, key, count, 0, best))
    kept = torch.zeros((*best.shape[:3], key.shape[2]), dtype=torch.bool, device=query.device)
    kept.scatter_(-1, best.long(), True)
    heads = slice(0, query.shape[1])
    return {
        name: 1.0 - float(kept.gather(-1, run()[:, heads].long()).double().mean())
        for name, run in runs.items()
    }


def measure(case: TiledCase, bench: Bench) -> None:
    """Check, time and write the stages of a case."""
    order = tile_order(case.grid, case.tile, "cuda")
    torch.manual_seed(0)
    shape = (1, order.num_tokens, case.heads, case.head_size)
    q, k = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tiles = Tiles(order.starts, order.lengths, order.largest, order.order)
    pooled_q, pooled_k = pool_tiles((q, k), tiles)
    num_tiles = len(order.starts)
    count = max(1, round(case.mask * num_tiles))
    few = slice(0, CHECKED_HEADS)

    errors = {}
    wanted = pool_tiles_reference(q[:, :, few].float(), tiles)
    errors["pool q, k"] = relative_error(pooled_q[:, few], wanted)
    coarse = pooled_k
    whole = add_gated_reference(
        q[:, :, few].float(), k[:, :, few].float(), coarse[:, few].float(), tiles
    )
    summed = add_gated(q.clone(), k, coarse, tiles)
    errors["gated sum"] = relative_error(summed[:, :, few], whole)
    selects = select_runs(pooled_q, pooled_k, count)
    errors.update(select_errors(selects, pooled_q[:, few], pooled_k[:, few], count))
    maps, wrong_maps = map_runs(pooled_q, pooled_k, count)
    cells, wrong_cells = cell_runs(q, k, tiles, case.mask)
    errors |= wrong_maps | wrong_cells
    stages: dict[str, tuple[Runs, float]] = {
        "pool": ({"pool q, k": lambda: pool_tiles((q, k), tiles)[0]}, 0.0),
        "select": (selects, 2.0 * case.heads * num_tiles**2 * case.head_size),
        "cells": (cells, 0.0),
        "lists": (maps, 0.0),
        "gate": ({"gated sum": lambda: add_gated(summed, k, coarse, tiles)}, 0.0),
    }
    for stage, (runs, flop) in stages.items():
        if bench.options.only not in stage:
            continue
        right = {name: run for name, run in runs.items() if errors[name] < BOUND}
        for name in runs.keys() - right.keys():
            print(f"{case.name}: {name} is wrong, error {errors[name]:.2e}")
        if not right:
            continue
        times = bench.time(right, block_ms=bench.options.block_ms)
        bench.write(
            times,
            case=f"{case.name} {stage}",
            shape=case.shape,
            flop=flop,
            flop_formula="2*H*N*N*D",
            errors=errors,
        )
        if stage in ("pool", "gate"):
            moved = {"pool": 2, "gate": 3}[stage] * q.numel() * q.element_size()
            (samples,) = times.values()
            print(f"{case.name} {stage}: {moved / statistics.median(samples) / 1e9:.2f} TB/s")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--case", default="", help="cases whose name contains this")
    parser.add_argument("--block-ms", type=float, default=150.0, help="length of a timing (150)")
