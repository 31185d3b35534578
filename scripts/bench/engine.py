"""The block-sparse engine: its variants, checked on small plans and timed beside FA3.

Variants are checked first, each in a process of its own, so that one that fails or hangs costs only
itself; the same step fills the kernel cache. Those that pass are timed in interleaved rounds.

    python3 scripts/bench/run.py engine --commit HASH [--only sta] [--rounds 7]
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from _attention import FA3, Case, fa3_run, random_lists, triton_tiles
from _harness import Bench, Row, relative_error, run_apart, version_of

from multimodal_gen.kernels.block_sparse.api import request_for
from multimodal_gen.kernels.block_sparse.call import Call, CallForm
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.kernels.block_sparse.tuning import GluonTile, TritonTile

HEADS, TOKENS, HEAD_SIZE = 24, 115_200, 128
CHECK_SECONDS = 200
BOUND = 4e-3

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockPlan, float], torch.Tensor]

WIDE = GluonTile(consumers=3, keys=64, stages=4, q_registers=False, registers=160)
PAIR = GluonTile(consumers=2, keys=128, stages=2)
SHORT = GluonTile(consumers=2, keys=64, stages=4)
OWN = GluonTile(consumers=2, keys=64, stages=3, own=True)


def exact(tile: GluonTile, **changes: object) -> GluonTile:
    """Return the exact variant of a tile."""
    return dataclasses.replace(tile, fast=False, **changes)


def lazy(tile: GluonTile, **changes: object) -> GluonTile:
    """Return the exact variant that keeps its reference while it can."""
    return exact(tile, lazy=True, **changes)


TRITON = triton_tiles(
    "triton ", (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)
)
TRITON_64 = triton_tiles("triton ", (64, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 3))
VARIANTS: dict[str, dict[str, GluonTile | TritonTile]] = {
    "sta": {
        "gluon 3x64 fast": WIDE,
        "gluon 3x64 exact": exact(WIDE),
        "gluon 3x64 lazy": lazy(WIDE),
        "gluon 2x128 fast": PAIR,
        "gluon 2x128 exact": exact(PAIR),
        "gluon 2x128 lazy": lazy(PAIR),
        **TRITON,
    },
    "r128": {
        "gluon 2x128 fast": PAIR,
        "gluon 2x128 fast, sync 4": dataclasses.replace(PAIR, sync=4),
        "gluon 2x128 fast, sync 4, 3 stages": dataclasses.replace(PAIR, sync=4, stages=3),
        "gluon 2x128 exact": exact(PAIR),
        "gluon 2x128 exact, sync 4": exact(PAIR, sync=4),
        "gluon 2x128 lazy, sync 4": lazy(PAIR, sync=4),
        "gluon 2x64 fast": SHORT,
        **TRITON,
    },
    "r64": {
        "gluon own fast": OWN,
        "gluon own fast, sync 8": dataclasses.replace(OWN, sync=8),
        "gluon own exact": exact(OWN),
        "gluon own exact, sync 8": exact(OWN, sync=8),
        "gluon own lazy, sync 8": lazy(OWN, sync=8),
        **TRITON_64,
    },
    "dense": {
        "gluon 3x64 fast": WIDE,
        "gluon 2x128 fast": PAIR,
        "gluon 2x128 exact": exact(PAIR),
        "gluon 3x64 exact": exact(WIDE),
        "gluon 3x64 lazy": lazy(WIDE),
        "gluon 2x128 lazy": lazy(PAIR),
        **{name: tile for name, tile in TRITON.items() if "128x64" in name},
    },
}
VARIANTS["ragged dense"] = VARIANTS["dense"]


@dataclass(frozen=True, kw_only=True)
class PlanCase(Case):
    """One plan at full size."""

    plan: BlockPlan

    @property
    def kept_flop(self) -> float:
        """FLOP of the kept pairs, all heads."""
        pairs = self.plan.pairs()
        return 4.0 * HEAD_SIZE * float(pairs.sum()) * HEADS / pairs.numel()


def make_case(name: str, device: str) -> PlanCase:
    """Return the case of a pattern."""
    tokens = 75_600 if name == "ragged dense" else TOKENS
    blocks = Blocks.regular(tokens, 384)
    if name == "sta":
        plan = BlockPlan.from_map(sta_map((5, 6, 10), (3, 3, 3)).to(device), blocks, blocks)
        plan = dataclasses.replace(plan, uniform=True, indices=plan.indices[..., :27].contiguous())
    elif "dense" in name:
        plan = BlockPlan.dense(blocks, blocks, device)
    else:
        plan = random_lists(tokens, HEADS, int(name[1:]), share=0.1)
    return PlanCase(name=name, grid=(1, 1, tokens), heads=HEADS, plan=plan)


def sta_map(grid: tuple[int, int, int], window: tuple[int, int, int]) -> torch.Tensor:
    """Return which tiles attend to which, [1, 1, N, N]: the window is shifted inside at borders."""
    keep = torch.ones(1, 1, dtype=torch.bool)
    for size, width in zip(grid, window, strict=True):
        tiles = torch.arange(size)
        centre = tiles.clamp(width // 2, size - 1 - width // 2)
        axis = (centre.view(-1, 1) - tiles).abs() <= width // 2
        keep = torch.kron(keep, axis)
    return keep.view(1, 1, *keep.shape)


def runner(tile: GluonTile | TritonTile) -> Attend:
    """Return what runs a variant, without the operator around it."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, scale: float
    ) -> torch.Tensor:
        out = torch.full_like(q, math.nan)
        form = CallForm(request_for(q, k, v, plan, backward=False))
        call = Call(q, k, v, plan, scale, False, False, form)
        if isinstance(tile, GluonTile):
            from multimodal_gen.kernels.block_sparse.gluon_kernel import prepare

            key = (tile, q.shape)
            prepared = plan.cache.get(key)
            if prepared is None:
                prepared = prepare(call, out, None, tile=tile)
                plan.remember(key, prepared)
            prepared(call, out, None)
        else:
            from multimodal_gen.kernels.block_sparse.triton_kernel import attend

            attend(call, out, None, tile=tile, copy_engine=True)
        return out

    return run


def small_plans(pattern: str) -> dict[str, BlockPlan]:
    """Return plans that take every path a variant has: whole, ragged end, padded, ragged."""
    size = {"r128": 128, "r64": 64}.get(pattern, 384)
    generator = torch.Generator("cuda").manual_seed(1)

    def lists(q: Blocks, kv: Blocks) -> BlockPlan:
        keep = torch.rand(1, 4, q.num, kv.num, device="cuda", generator=generator) < 0.5
        keep[0, 0, 0] = False
        return BlockPlan.from_map(keep, q, kv)

    lengths = torch.randint(0, size + 1, (1, 4, 7), device="cuda", generator=generator).int()
    padded = Blocks.padded(lengths, size)
    q, kv = Blocks.regular(6 * size, size), Blocks.regular(8 * size, size)
    some = torch.rand(1, 4, 6, 8, device="cuda", generator=generator).topk(3, dim=-1).indices
    whole = torch.zeros(1, 4, 6, 8, device="cuda", dtype=torch.bool).scatter_(-1, some, True)
    short_q, short_kv = Blocks.regular(5 * size - 50, size), Blocks.regular(6 * size - 37, size)
    plans = {
        "whole": dataclasses.replace(BlockPlan.from_map(whole, q, kv), uniform=True),
        "ragged end": lists(short_q, short_kv),
        "padded": lists(padded, padded),
    }
    if pattern == "sta":
        plans["dense"] = BlockPlan.dense(short_q, short_kv, "cuda")
    return plans


def check(pattern: str, variant: str) -> None:
    """Check one variant on the small plans; prints the worst error."""
    run = runner(VARIANTS[pattern][variant])
    errors = {}
    for name, plan in small_plans(pattern).items():
        torch.manual_seed(0)
        q = torch.randn(2, plan.q.total, 4, HEAD_SIZE, device="cuda").bfloat16()
        k, v = (
            torch.randn(2, plan.kv.total, 2, HEAD_SIZE, device="cuda").bfloat16() for _ in range(2)
        )
        for deviation in (1.0, 30.0):
            scale = deviation * HEAD_SIZE**-0.5
            expected, _ = attention_reference(q.double(), k.double(), v.double(), plan, scale=scale)
            error = relative_error(run(q, k, v, plan, scale), expected)
            errors[f"{name} std {deviation:g}"] = error
    print(" ".join(f"{name} {error:.1e};" for name, error in errors.items()))
    if not all(error < BOUND * 2 for error in errors.values()):
        raise SystemExit("wrong")


def check_apart(pattern: str, variant: str) -> tuple[bool, str]:
    """Run `check` in a process of its own."""
    began = time.perf_counter()
    said, failure = run_apart("engine", "--check", pattern, variant, seconds=CHECK_SECONDS)
    seconds = time.perf_counter() - began
    return failure is None, f"{seconds:.0f} s {said}{failure or ''}".strip()


def sampled_error(
    out: torch.Tensor, inputs: tuple[torch.Tensor, ...], plan: BlockPlan, scale: float
) -> float:
    """Return the relative error on a few query blocks against the fp32 reference."""
    q, k, v = inputs
    size = plan.q.size
    chosen = [0, plan.q.num // 3, plan.q.num - 2]
    rows = torch.cat([torch.arange(i * size, (i + 1) * size, device=q.device) for i in chosen])
    part = BlockPlan(
        indices=plan.indices[:, :, chosen],
        counts=plan.counts[:, :, chosen],
        q=Blocks.regular(len(rows), size),
        kv=plan.kv,
    )
    heads = slice(0, 4)
    if part.counts.shape[1] > 1:
        part = dataclasses.replace(
            part, indices=part.indices[:, heads], counts=part.counts[:, heads]
        )
    expected, _ = attention_reference(
        q[:, rows, heads].float(),
        k[:, :, heads].float(),
        v[:, :, heads].float(),
        part,
        scale=scale,
    )
    return relative_error(out[:, rows, heads], expected)


def measure(pattern: str, passed: list[str], bench: Bench) -> None:
    """Time the variants of a pattern that passed their check, and FlashAttention 3 dense."""
    case = make_case(pattern, "cuda")
    qkv, scale = case.normal(), HEAD_SIZE**-0.5
    variants = {
        name: partial(runner(VARIANTS[pattern][name]), *qkv, case.plan, scale) for name in passed
    }
    runs, errors = bench.check(
        variants.items(),
        lambda name, run: sampled_error(run(), qkv, case.plan, scale),
        BOUND,
    )
    times = bench.time({**runs, **fa3_run(qkv)})
    baseline = times.pop(FA3, None)
    fa3_rate = case.flop / statistics.median(baseline) / 1e9 if baseline else math.nan

    def show(row: Row) -> str:
        return (
            f"   {row['contender']:30} {row['median_ms']:8.3f} ms {row['tflops']:6.0f} TFLOP/s  "
            f"x{row['tflops'] / fa3_rate:.3f} of fa3  error {row['relative_error']:.1e}"
        )

    print(f"-- {pattern}: {case.kept_flop / 1e12:.2f} TFLOP; fa3 dense {fa3_rate:.0f} TFLOP/s")
    groups = [(times, case.kept_flop, "4*H*D*kept pairs", {})]
    if baseline:
        groups.append(({FA3: baseline}, case.flop, "4*H*S*S*D", {FA3: version_of("fa3-fwd")}))
    for group, flop, formula, versions in groups:
        bench.write(
            dict(sorted(group.items(), key=lambda item: statistics.median(item[1]))),
            case=pattern,
            shape=case.shape,
            flop=flop,
            flop_formula=formula,
            errors=errors,
            versions=versions,
            show=show,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.set_defaults(rounds=7)
    parser.add_argument("--check", nargs=2, default=None, help="check one variant, then stop")


def main(bench: Bench) -> None:
    """Check every variant apart, then time the ones that are right."""
    if bench.options.check:
        check(*bench.options.check)
        return
    patterns = [pattern for pattern in VARIANTS if bench.options.only in pattern]
    # The dense variants are those of the tiles, on the same block sizes.
    checked = list(dict.fromkeys("sta" if "dense" in p else p for p in patterns))
    jobs = [(pattern, name) for pattern in checked for name in VARIANTS[pattern]]
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda job: check_apart(*job), jobs))
    for (pattern, name), (right, text) in zip(jobs, results, strict=True):
        print(f"{'ok    ' if right else 'FAILED'} {pattern:6} {name:30} {text}", flush=True)
    passed = {job for job, (right, _) in zip(jobs, results, strict=True) if right}
    for pattern in patterns:
        group = "sta" if "dense" in pattern else pattern
        measure(pattern, [name for name in VARIANTS[pattern] if (group, name) in passed], bench)
