"""V-MoBA: the whole layer at its authors' settings, beside dense attention and their own kernel.

TFLOP/s count the pairs that are kept. `over_ideal` is the time over density x the time of
FlashAttention 3, `union` the pairs that the kernel computes over those that are kept. Inputs vary
over the video as a model's do, or are independent and normal, which the choice does not depend on.
The authors' kernel wants flash-attn 2; where that is not installed FlashAttention 3 computes its
dense parts, and its name says so.

    python3 scripts/bench/run.py vmoba --commit HASH [--only 720p] [--rounds 9]
    python3 scripts/bench/run.py vmoba --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
import importlib.util
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import _flash_attn_2
import torch
import torch.nn.functional as F
from _harness import (
    DEVICE,
    Row,
    interleave,
    relative_error,
    rows_of,
    version_of,
    write_rows,
)

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
from tests.helpers.inputs import QKV, make_video_qkv

HEAD_SIZE = 128
SAMPLED = 24
BOUND = 6e-3
FLOP = "4*H*D*kept pairs"
DENSE = ("fa3 dense", "sdpa dense")
# It copies every query once per chunk that it selects, which takes tens of GB with more heads.
MOST_HEADS_OF_THEIRS = 12
THEIRS, THEIRS_ON_FA3 = "fastvideo-kernel", "fastvideo-kernel on fa3"

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting of the authors, or a tiny one."""

    name: str
    grid: tuple[int, int, int]
    chunk: tuple[int, int, int]
    topk: int
    heads: int
    smooth: bool = True
    head_size: int = HEAD_SIZE


@dataclass(frozen=True, kw_only=True)
class VMoBARow(Row):
    """One line of `vmoba.csv`; see above."""

    density: float
    union: float
    over_ideal: float


KINDS = {
    "480p": ((21, 30, 52), (((3, 30, 52), 2), ((21, 5, 13), 6), ((7, 5, 13), 18))),
    "720p": ((21, 45, 80), (((3, 45, 80), 2), ((21, 9, 10), 10), ((7, 15, 20), 9))),
}
CASES = [
    Case(
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
    Case(name="smoke", grid=(4, 6, 8), chunk=(2, 3, 4), topk=3, heads=2, head_size=32),
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


def make_call(case: Case) -> ChunkCall:
    """Return the call of a case, its chunks and the rule."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if case.smooth:
        qkv = make_video_qkv(case.grid, case.heads, case.head_size, dtype=dtype, device=DEVICE)
    else:
        shape = (1, math.prod(case.grid), case.heads, case.head_size)
        generator = torch.Generator(DEVICE).manual_seed(0)
        drawn = (torch.randn(shape, generator=generator, device=DEVICE) for _ in range(3))
        qkv = QKV(*(x.to(dtype) for x in drawn))
    tokens = math.prod(case.grid)
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


def make_contenders(given: ChunkCall) -> dict[str, Run]:
    """Return what can run here; the rest is named and left out."""
    call, chunks, rule = given.call, given.chunks, given.rule
    query, key, value = call.query, call.key, call.value
    found: dict[str, Run] = {"vmoba layer": lambda: attend_choice(call, chunks, given.select()[0])}
    if DEVICE == "cuda" and importlib.util.find_spec("fa3_fwd_interface"):
        dense = importlib.import_module("fa3_fwd_interface").flash_attn_func

        def fa3() -> torch.Tensor:
            out = dense(query, key, value)
            return out[0] if isinstance(out, tuple) else out

        found["fa3 dense"] = fa3
    else:
        print("left out: fa3 dense, needs fa3-fwd and a GPU")
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]
        found["sdpa dense"] = lambda: F.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    upstream = find_upstream(fa3="fa3 dense" in found)
    if upstream is None:
        print("left out: fastvideo-kernel, needs it and flash-attn 2, or fa3-fwd instead")
    elif query.shape[2] > MOST_HEADS_OF_THEIRS:
        print(f"left out: fastvideo-kernel, copies the queries of {query.shape[2]} heads per chunk")
    else:
        found[upstream] = lambda: attend_upstream(
            call, chunks.keys.order, rule, keeps_own=False, backend="vmoba_attn"
        )
    return found


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


def measure(case: Case, *, commit: str, rounds: int) -> tuple[list[VMoBARow], list[str]]:
    """Check and time a case; returns its rows and who was wrong."""
    given = make_call(case)
    layout, contenders = given.call.layout, make_contenders(given)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, layout.num_video, (SAMPLED,), generator=generator).to(DEVICE)
    errors, wrong = {}, []
    for name, run in list(contenders.items()):
        wanted = expected(given, rows, dense=name in DENSE)
        errors[name] = relative_error(run()[0, rows], wanted)
        if not errors[name] < BOUND:
            print(f"WRONG {case.name} {name}: relative error {errors[name]:.2e}")
            wrong.append(f"{case.name} {name}")
            del contenders[name]
    times = interleave(contenders, rounds=rounds, block_ms=80.0)
    kept = float(given.select()[1])
    density = kept / (case.heads * layout.num_video**2)
    ideal = density * min(statistics.median(times[name]) for name in DENSE if name in times)
    every = case.heads * layout.num_video**2
    written = []
    for row in rows_of(
        times,
        commit=commit,
        benchmark="vmoba",
        case=case.name,
        shape=f"B1 H{case.heads} S{layout.num_video} D{case.head_size} chunk {case.chunk} "
        f"topk {case.topk}",
        flop=4.0 * case.head_size * kept,
        flop_formula=FLOP,
        errors=errors,
        versions={
            "fa3 dense": version_of("fa3-fwd"),
            THEIRS: f"{version_of('fastvideo-kernel')}, {version_of('flash-attn')}",
            THEIRS_ON_FA3: f"{version_of('fastvideo-kernel')}, "
            f"dense parts by {version_of('fa3-fwd')}",
        },
    ):
        dense = row.contender in DENSE
        written.append(
            VMoBARow(
                **{
                    **asdict(row),
                    "flop": 4.0 * case.head_size * (every if dense else kept),
                    "tflops": round(
                        4.0 * case.head_size * (every if dense else kept) / row.median_ms / 1e9, 1
                    ),
                },
                density=1.0 if dense else round(density, 4),
                union=round(union(given, kept), 3) if row.contender == "vmoba layer" else 1.0,
                over_ideal=round(row.median_ms / ideal, 3),
            )
        )
    return written, wrong


def main(arguments: argparse.Namespace) -> None:
    """Measure the cases and append their rows."""
    torch.set_grad_enabled(False)
    wrong = []
    for case in SMOKE if arguments.smoke else CASES:
        if arguments.only in case.name:
            rows, failed = measure(case, commit=arguments.commit, rounds=arguments.rounds)
            write_rows(arguments.out / "vmoba.csv", rows)
            for row in rows:
                print(
                    f"  {row.case}, {row.contender}: {row.over_ideal} of ideal, union {row.union}",
                    flush=True,
                )
            wrong += failed
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")
