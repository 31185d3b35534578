"""V-MoBA: the whole layer at its authors' settings, beside dense attention and their own kernel.

TFLOP/s count the pairs that are kept. `over_ideal` is the time over density x the time of
FlashAttention 3, `union` the pairs that the kernel computes over those that are kept. Inputs vary
over the video as a model's do, or are independent and normal, which the choice does not depend on.
The authors' kernel wants flash-attn 2; where that is not installed FlashAttention 3 computes its
dense parts, and its name says so.

    python3 scripts/bench/run.py vmoba --commit HASH [--only 720p] [--rounds 9]
    python3 scripts/bench/run.py vmoba --commit HASH --smoke    # a tiny case, on any machine
"""

import importlib
import importlib.util
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import _flash_attn_2
import torch
from _attention import DTYPE, FA3, Case, Grid, dense_run
from _harness import DEVICE, Bench, Row, Run, relative_error, version_of

from multimodal_gen.kernels.block_sparse.api import rows_for_choice
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.select.row_reference import Rule
from multimodal_gen.kernels.select.rows import chunk_groups, select_chunks, sort_rows
from multimodal_gen.runtime.layers.attention.sparse.executors.rows import (
    RowChunks,
    attend_choice,
    key_blocks,
    row_chunks,
    row_stats,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba_upstream import (
    UPSTREAM,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, SparseCall

SAMPLED = 24
BOUND = 6e-3
FLOP = "4*H*D*kept pairs"
DENSE = (FA3, "sdpa dense")
# It copies every query once per chunk that it selects, which takes tens of GB with more heads.
MOST_HEADS_OF_THEIRS = 12
THEIRS, THEIRS_ON_FA3 = "fastvideo-kernel", "fastvideo-kernel on fa3"


@dataclass(frozen=True, kw_only=True)
class ChunkCase(Case):
    """A setting of the authors, or a tiny one."""

    chunk: Grid
    topk: int
    smooth: bool = True


KINDS = {
    "480p": ((21, 30, 52), (((3, 30, 52), 2), ((21, 5, 13), 6), ((7, 5, 13), 18))),
    "720p": ((21, 45, 80), (((3, 45, 80), 2), ((21, 9, 10), 10), ((7, 15, 20), 9))),
}
CASES = [
    ChunkCase(
        name=f"{size} {kind}, {heads} heads{'' if smooth else ', normal'}",
        grid=grid,
        chunk=chunk,
        topk=topk,
        heads=heads,
        smooth=smooth,
    )
    for size, (grid, kinds) in KINDS.items()
    for kind, (chunk, topk) in zip(("temporal", "spatial", "st"), kinds, strict=True)
    for heads, smooth in ((12, True), (12, False), (40, True))
]
SMOKE = [
    ChunkCase(name="smoke", grid=(4, 6, 8), chunk=(2, 3, 4), topk=3, heads=2, head_size=32),
]


@dataclass(frozen=True, kw_only=True)
class ChunkCall:
    """A call, the chunks of its video, and how queries choose among them."""

    call: SparseCall
    chunks: RowChunks
    rule: Rule

    def select(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is selected, and how many pairs that is."""
        stats = row_stats(self.call, self.chunks)
        return select_chunks(stats.query, stats.chunks, stats.own, self.rule)


def make_call(case: ChunkCase) -> ChunkCall:
    """Return the call of a case, its chunks and the rule."""
    qkv = case.video(DTYPE) if case.smooth else case.normal()
    tokens = case.tokens
    layout = SequenceLayout(grid=case.grid, start=0, num_queries=tokens, num_keys=tokens)
    call = SparseCall(
        query=qkv.query,
        key=qkv.key,
        value=qkv.value,
        layout=layout,
        scale=case.head_size**-0.5,
    )
    chunks = row_chunks(layout, case.chunk, qkv.query.device)
    return ChunkCall(call=call, chunks=chunks, rule=Rule(topk=case.topk))


def contenders(given: ChunkCall) -> Iterator[tuple[str, Run]]:
    """Yield what can run here; the rest is named and left out."""
    call, chunks, rule = given.call, given.chunks, given.rule
    yield "vmoba layer", lambda: attend_choice(call, chunks, given.select()[0])
    name, dense, _ = dense_run((call.query, call.key, call.value))
    yield name, dense
    upstream, heads = find_upstream(fa3=name == FA3), call.query.shape[2]
    if upstream is None:
        print("left out: fastvideo-kernel, needs it and flash-attn 2, or fa3-fwd instead")
    elif heads > MOST_HEADS_OF_THEIRS:
        print(f"left out: fastvideo-kernel, copies the queries of {heads} heads per chunk")
    else:
        yield (
            upstream,
            lambda: attend_upstream(
                call, chunks.keys.order, rule, keeps_own=False, backend="vmoba_attn"
            ),
        )


def find_upstream(*, fa3: bool) -> str | None:
    """Import the authors' package; returns how to name it, or None where it cannot run."""
    if importlib.util.find_spec(UPSTREAM) is None:
        return None
    if _flash_attn_2.is_installed():
        return THEIRS
    if not fa3:
        return None
    with _flash_attn_2.standing_in():
        importlib.import_module(UPSTREAM)
    return THEIRS_ON_FA3


def expected(given: ChunkCall, rows: torch.Tensor, *, dense: bool) -> torch.Tensor:
    """Return the attention of a few rows in float64, [rows, H, D]."""
    call, bits, num = given.call, given.select()[0], given.chunks.keys.num_tiles
    n = torch.arange(num, device=bits.device)
    chosen = (bits[0, :, rows][..., n // 32] >> (n % 32) & 1).bool()
    q, k, v = (x[0].transpose(0, 1).double() for x in (call.query, call.key, call.value))
    scores = q[:, rows] @ k.mT * call.scale
    if not dense:
        scores = scores.masked_fill(~chosen[..., given.chunks.own.long()], -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def union(given: ChunkCall, pairs: float) -> float:
    """Return the pairs that are computed over those that are kept, from the first heads."""
    call, (bits, _) = given.call, given.select()
    heads = min(3, call.query.shape[2])
    groups = chunk_groups(given.chunks.keys.num_tiles, call.layout.num_video)
    block = rows_for_choice(call.query, call.kernel, ())
    rows = sort_rows(bits[:, :heads], groups, block=block)
    _, keys = key_blocks(given.chunks.keys, groups, heads, None)
    plan = BlockPlan(
        indices=rows.indices, counts=rows.counts, q=Blocks.padded(rows.lengths, block), kv=keys
    )
    return float(plan.pairs().sum()) / (pairs * heads / call.query.shape[2])


@torch.no_grad()
def measure(case: ChunkCase, bench: Bench) -> None:
    """Check, time and write a case."""
    given = make_call(case)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, case.tokens, (SAMPLED,), generator=generator).to(DEVICE)

    def error_of(name: str, run: Run) -> float:
        return relative_error(run()[0, rows], expected(given, rows, dense=name in DENSE))

    right, errors = bench.check(contenders(given), error_of, BOUND)
    times = bench.time(right, block_ms=80.0)
    kept = float(given.select()[1])
    density = kept / (case.heads * case.tokens**2)
    ideal = density * min(statistics.median(times[name]) for name in DENSE if name in times)

    def more(row: Row) -> Row:
        name = row["contender"]
        return {
            "density": 1.0 if name in DENSE else round(density, 4),
            "union": round(union(given, kept), 3) if name == "vmoba layer" else 1.0,
            "over_ideal": round(row["median_ms"] / ideal, 3),
        }

    theirs, fa3 = version_of("fastvideo-kernel"), version_of("fa3-fwd")
    bench.write(
        times,
        case,
        shape=f"B1 H{case.heads} S{case.tokens} D{case.head_size} chunk {case.chunk} "
        f"topk {case.topk}",
        flop={name: case.flop if name in DENSE else 4.0 * case.head_size * kept for name in times},
        flop_formula=FLOP,
        errors=errors,
        versions={
            FA3: fa3,
            THEIRS: f"{theirs}, {version_of('flash-attn')}",
            THEIRS_ON_FA3: f"{theirs}, dense parts by {fa3}",
        },
        more=more,
    )
