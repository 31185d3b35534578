"""Kernels around attention in other shapes: moving tokens, choosing blocks, lists, the pooled tail.

What they take inside of a layer are its pieces, see `layers.py`. Every contender is checked first.
The one without figures in its name is what runs by default. Of kernels that move memory `flop`
holds bytes, read and written, and `tflops` terabytes per second: `device copy` is the most that
there is. `tail` are lists of random blocks without and with a tail, and what a call with one
consists of.

    python3 scripts/bench/run.py stages --commit HASH [--only "select|tail"] [--case 21x45x80]
    python3 scripts/bench/run.py stages --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any
from unittest import mock

import torch
from _attention import Case, Grid, random_lists
from _harness import DEVICE, Bench, Run, pattern, relative_error

from multimodal_gen.kernels.block_sparse import tail as tail_module
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.tail import PooledTail, add_tail, kept_map, pool_blocks
from multimodal_gen.kernels.block_sparse.tuning import GluonTile
from multimodal_gen.kernels.launch.launcher import form_of
from multimodal_gen.kernels.select.api import (
    mark_tiles,
    pool_cells,
    pool_tiles,
    select_tiles,
)
from multimodal_gen.kernels.select.reference import (
    Ranking,
    Tiles,
    select_tiles_reference,
)
from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens, tile_order

BOUND = 6e-3
HEADS = 2  # that are checked
COPIES = ((8, 512, 2), (8, 1024, 4), (8, 2048, 4), (4, 4096, 4), (16, 512, 4), (16, 1024, 8),
          (16, 2048, 8), (32, 512, 4), (64, 256, 4))  # fmt: skip
BUFFERS = [(megabytes, warps) for megabytes in (32, 64, 128) for warps in (1, 2, 4, 8)]
TAILS = [(consumers, stages, 240 if consumers == 2 else 160)
         for consumers in (2, 3) for stages in (3, 4)]  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class TiledCase(Case):
    """A video in tiles, of which a share is kept; its tensors are made once."""

    tile: Grid = (4, 4, 4)
    share: float = 0.1

    @cached_property
    def qkv(self) -> Any:
        """The tensors."""
        return self.draw()

    @cached_property
    def order(self) -> Any:
        """The order of the tiles."""
        return tile_order(self.grid, self.tile, DEVICE)

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of tokens that lie as they came."""
        order = self.order
        return Tiles(order.starts, order.lengths, order.largest, order.order)

    @property
    def count(self) -> int:
        """Tiles that are kept."""
        return max(1, round(self.share * len(self.order.starts)))


CASES = (
    TiledCase(name="30x48x80", grid=(30, 48, 80), heads=24),
    TiledCase(name="21x45x80", grid=(21, 45, 80), heads=40),
    TiledCase(name="21x30x52", grid=(21, 30, 52), heads=12),
    TiledCase(name="21x45x80 by 256", grid=(21, 45, 80), tile=(4, 8, 8), heads=40),
    TiledCase(name="21x45x80 by 384", grid=(21, 45, 80), tile=(6, 8, 8), heads=40),
)
SMOKE = (TiledCase(name="smoke", grid=(5, 9, 13), heads=2, head_size=32, share=0.3),)


@dataclass(kw_only=True)
class Stage:
    """The contenders of a kernel.

    Attributes:
        runs: what runs, by name.
        error: the error of what one returned, by its name.
        work: FLOP, or bytes.
        unit: of the work.
    """

    runs: dict[str, Run]
    error: Callable[[str, Any], float]
    work: float = 0.0
    unit: str = "bytes read + written; tflops is TB/s"


def gather(case: TiledCase) -> Stage:
    """q, k and v into tile order, and a copy of the same bytes."""
    q, order = case.qkv[0], case.order.order
    wanted, whole = q[:, order.long()], torch.stack(case.qkv)
    copied = torch.empty_like(whole)
    runs: dict[str, Run] = {
        "gather": lambda: gather_tokens(case.qkv, order)[0],
        "device copy": lambda: copied.copy_(whole),
    }
    for name, tile in copy_tiles("gather"):
        from multimodal_gen.kernels.tile_order.tile_order_kernel import prepare_gather

        move = prepare_gather(tuple(map(form_of, case.qkv)), form_of(order), tile=tile)
        runs[name] = lambda move=move: move(case.qkv, order)[0]

    def error(name: str, out: torch.Tensor) -> float:
        return 0.0 if name == "device copy" or torch.equal(out, wanted) else 1.0

    return Stage(runs=runs, error=error, work=2.0 * whole.nbytes)


def scatter(case: TiledCase) -> Stage:
    """An output out of tile order, which lies as engines leave it: heads first."""
    order = case.order
    source = case.qkv[0].transpose(1, 2).contiguous().transpose(1, 2)
    out, copied = torch.empty_like(case.qkv[0]), torch.empty_like(source)

    def run(move: Callable[..., object]) -> torch.Tensor:
        move(source, order.order, out)
        return out

    runs: dict[str, Run] = {
        "scatter": partial(run, scatter_tokens),
        "device copy": lambda: copied.copy_(source),
    }
    for name, tile in copy_tiles("scatter"):
        from multimodal_gen.kernels.tile_order.tile_order_kernel import prepare_scatter

        move = prepare_scatter(*map(form_of, (source, order.order, out)), tile=tile)
        runs[name] = partial(run, move)
    wanted = source[:, order.inverse.long()]

    def error(name: str, found: torch.Tensor) -> float:
        right = name == "device copy" or torch.equal(found, wanted)
        out.fill_(torch.nan)
        return 0.0 if right else 1.0

    return Stage(runs=runs, error=error, work=2.0 * source.nbytes)


def copy_tiles(move: str) -> Iterator[tuple[str, Any]]:
    """Yield other shapes of the programs that move tokens."""
    if DEVICE == "cuda":
        from multimodal_gen.kernels.tile_order.tile_order_kernel import CopyTile

        for tokens, row_bytes, warps in COPIES:
            tile = CopyTile(tokens=tokens, row_bytes=row_bytes, warps=warps)
            yield f"{move} {tokens} tokens x {row_bytes} B w{warps}", tile


def select(case: TiledCase) -> Stage:
    """The best tiles by products of means, and by those of cells."""
    q, k, _ = case.qkv
    query, key = pool_tiles((q, k), case.tiles)
    (rows, real), (keys, _) = (pool_cells(x, case.tiles, cells=4) for x in (q, k))
    num, count = len(case.order.starts), case.count
    cells: dict[str, Any] = {"cells": (4, 4), "scale": q.shape[3] ** -0.5, "real": (real, real)}
    runs: dict[str, Run] = {
        "select": lambda: select_tiles(query, key, count),
        "select by cells": lambda: select_tiles(rows, keys, count, **cells),
    }
    out = torch.empty((*query.shape[:3], count), dtype=torch.int32, device=DEVICE)

    def buffered(prepared: dict[str, Any], megabytes: int, warps: int) -> torch.Tensor:
        from multimodal_gen.kernels.select import tile_kernel as kernel

        if not prepared:  # once, as in a layer
            prepared["_prepared"] = cache(kernel._prepared.__wrapped__)
        with mock.patch.multiple(kernel, _warps=lambda _: warps, **prepared):
            ranking = Ranking(query, key, count, 0, out)
            kernel.select_tiles(ranking, scratch_bytes=megabytes * 2**20)
        return out

    for megabytes, warps in BUFFERS if DEVICE == "cuda" else ():
        name = f"select, buffer {megabytes} MiB, {warps} warps"
        runs[name] = partial(buffered, {}, megabytes, warps)

    def error(name: str, found: torch.Tensor) -> float:
        """Return the share of tiles that the definition does not choose: ties may be either."""
        sides, more = ((rows, keys), cells) if "cells" in name else ((query, key), {})
        best = out[:, :HEADS].clone()
        few = (x[:, :HEADS] for x in sides)
        select_tiles_reference(Ranking(*few, count, 0, best, **more))
        kept = torch.zeros(*best.shape[:3], num, dtype=torch.bool, device=DEVICE)
        kept.scatter_(-1, best.long(), True)
        return 1.0 - float(kept.gather(-1, found[:, :HEADS].long()).double().mean())

    work = 2.0 * case.heads * num**2 * case.head_size
    return Stage(runs=runs, error=error, work=work, unit="2*H*N*N*D")


def lists(case: TiledCase) -> Stage:
    """A map of the best tiles, and its lists, by the entries that are looked at at once."""
    query, key = pool_tiles(case.qkv[:2], case.tiles)
    marked = mark_tiles(query, key, case.count, near=1)
    runs: dict[str, Run] = {"map": lambda: mark_tiles(query, key, case.count, near=1)}

    def listed(entries: int | None) -> torch.Tensor:
        from multimodal_gen.kernels.block_sparse import steps_kernel

        entries = entries or steps_kernel.LONG_ROW_CHUNK
        with mock.patch.object(steps_kernel, "LONG_ROW_CHUNK", entries):
            return steps_kernel.make_lists(marked)[0]

    for entries in (None, 256, 512, 1024, 2048) if DEVICE == "cuda" else ():
        runs["lists" + (f", {entries} at once" if entries else "")] = partial(listed, entries)

    def error(name: str, found: torch.Tensor) -> float:
        if name == "map":
            return 0.0 if torch.equal(found, marked) else 1.0
        slots = torch.where(marked, marked.long().cumsum(-1) - 1, marked.shape[-1] - 1)
        place = torch.arange(marked.shape[-1], device=DEVICE, dtype=torch.int32)
        return float((marked & (found.gather(-1, slots) != place)).double().mean())

    return Stage(runs=runs, error=error, unit="time only")


def tail(case: TiledCase) -> Stage:
    """Lists of random blocks, of which 15 % are kept, and the means of the others."""
    q, k, v = case.qkv
    plan = random_lists(case.tokens, case.heads, 64, share=0.15)
    attend = partial(block_sparse_attention, q, k, v, plan)
    out, lse = attend(return_lse=True)
    pooled, kept = pool_blocks(k, v, plan.kv, plan.kv.num), kept_map(plan, plan.kv.num)
    parts: dict[str, Run] = {
        "part: lists and lse": lambda: attend(return_lse=True)[0],
        "part: means": lambda: pool_blocks(k, v, plan.kv, plan.kv.num),
        # It goes on from its own last result, which costs no other time.
        "part: tail alone": lambda: add_tail(
            out, lse, q, pooled, kept, plan.q, scale=case.head_size**-0.5
        ),
    }
    runs: dict[str, Run] = {"lists": attend, "lists, tail": partial(attend, tail=PooledTail())}

    def with_tile(name: str, value: object) -> torch.Tensor:
        with mock.patch.object(tail_module, name, value):
            return attend(tail=PooledTail())

    if DEVICE == "cuda":
        only_triton = {"gluon": tail_module._launch_triton}
        runs["lists, tail triton"] = partial(with_tile, "_LAUNCH", only_triton)
        for consumers, stages, registers in TAILS:
            tile = GluonTile(consumers=consumers, keys=64, stages=stages, registers=registers)
            name = f"lists, tail {consumers} consumers, {stages} stages"
            runs[name] = partial(with_tile, "gluon_tail_tile", lambda tile=tile: tile)
    few = replace(plan, indices=plan.indices[:, :HEADS], counts=plan.counts[:, :HEADS])
    inputs = [x[:, :, :HEADS].float() for x in case.qkv]

    @cache
    def wanted(pooled_too: bool) -> torch.Tensor:
        with_tail = PooledTail() if pooled_too else None
        return block_sparse_attention(*inputs, few, tail=with_tail, kernel="reference")

    def error(name: str, found: Any) -> float:
        if name in parts:
            return 0.0  # they are what the call consists of
        return relative_error(found[:, :, :HEADS], wanted("tail" in name))

    flop = case.flop * float(plan.pairs().double().mean()) / case.tokens**2
    return Stage(runs={**runs, **parts}, error=error, work=flop, unit="4*H*D*kept pairs")


STAGES = {stage.__name__: stage for stage in (gather, scatter, select, lists, tail)}


@torch.no_grad()
def measure(case: TiledCase, bench: Bench) -> None:
    """Check, time and write the kernels of a case."""
    for name, make in STAGES.items():
        if not bench.wants(name):
            continue
        stage = make(case)
        right, errors = bench.check(
            stage.runs.items(), lambda name, run, stage=stage: stage.error(name, run()), BOUND
        )
        bench.write(
            bench.time(right),
            case,
            case=f"{case.name} {name}",
            flop=stage.work,
            flop_formula=stage.unit,
            errors=errors,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--case", type=pattern, default="", help="run the cases whose name matches")
