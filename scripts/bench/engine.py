"""The block-sparse engine: its variants, checked on small plans and timed beside FA3.

Variants are checked first, each in a process of its own, so that one that fails or hangs costs only
itself; the same step fills the kernel cache. Those that pass are timed in interleaved rounds.

    python3 scripts/bench/run.py engine --commit HASH [--only sta] [--rounds 7]
"""

import argparse
import contextlib
import dataclasses
import io
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from _harness import RUN, interleave, relative_error, rows_of, version_of, write_rows

from multimodal_gen.kernels.block_sparse.api import request_for
from multimodal_gen.kernels.block_sparse.call import Call, CallForm
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.kernels.block_sparse.tuning import GluonTile, TritonTile

HEADS, TOKENS, HEAD_SIZE = 24, 115_200, 128
CHECK_SECONDS = 200
BOUND = 4e-3

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockPlan, float], torch.Tensor]

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


TRITON = {
    f"triton {t.rows}x{t.keys} w{t.warps} s{t.stages}": t
    for t in (
        TritonTile(rows=128, keys=64, warps=4, stages=3),
        TritonTile(rows=128, keys=64, warps=8, stages=3),
        TritonTile(rows=128, keys=128, warps=8, stages=2),
        TritonTile(rows=128, keys=128, warps=8, stages=3),
    )
}
TRITON_64 = {
    f"triton {t.rows}x{t.keys} w{t.warps} s{t.stages}": t
    for t in (
        TritonTile(rows=64, keys=64, warps=4, stages=4),
        TritonTile(rows=64, keys=64, warps=4, stages=3),
        TritonTile(rows=64, keys=64, warps=4, stages=2),
        TritonTile(rows=64, keys=64, warps=8, stages=3),
    )
}
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
class Case:
    """One plan at full size."""

    name: str
    tokens: int
    plan: BlockPlan

    @property
    def flop(self) -> float:
        """Operations on the kept pairs, all heads."""
        pairs = self.plan.pairs()
        return 4.0 * HEAD_SIZE * float(pairs.sum()) * HEADS / pairs.numel()


def make_case(name: str, device: str) -> Case:
    """Return the case of a pattern."""
    if name == "sta":
        blocks = Blocks.regular(TOKENS, 384)
        plan = BlockPlan.from_map(sta_map((5, 6, 10), (3, 3, 3)).to(device), blocks, blocks)
        plan = dataclasses.replace(plan, uniform=True, indices=plan.indices[..., :27].contiguous())
        return Case(name=name, tokens=TOKENS, plan=plan)
    if name in ("dense", "ragged dense"):
        tokens = TOKENS if name == "dense" else 75_600
        blocks = Blocks.regular(tokens, 384)
        return Case(name=name, tokens=tokens, plan=BlockPlan.dense(blocks, blocks, device))
    size = int(name[1:])
    blocks = Blocks.regular(TOKENS, size)
    kept = blocks.num // 10
    generator = torch.Generator(device).manual_seed(0)
    draws = torch.rand(1, HEADS, blocks.num, blocks.num, device=device, generator=generator)
    indices = draws.topk(kept, dim=-1).indices.sort(dim=-1).values.int()
    counts = torch.full((1, HEADS, blocks.num), kept, dtype=torch.int32, device=device)
    plan = BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks, uniform=True)
    return Case(name=name, tokens=TOKENS, plan=plan)


def sta_map(grid: tuple[int, int, int], window: tuple[int, int, int]) -> torch.Tensor:
    """Return which tiles attend to which, [1, 1, N, N]: the window is shifted inside at borders."""
    keep = torch.ones(1, 1, dtype=torch.bool)
    for size, width in zip(grid, window, strict=True):
        tiles = torch.arange(size)
        centre = tiles.clamp(width // 2, size - 1 - width // 2)
        axis = (centre.view(-1, 1) - tiles).abs() <= width // 2
        keep = torch.kron(keep, axis)
    return keep.view(1, 1, *keep.shape)


def runner(tile: GluonTile | TritonTile) -> Run:
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
    command = [sys.executable, str(RUN), "engine", "--commit", "-", "--check", pattern, variant]
    began = time.perf_counter()
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"hangs or compiles for more than {CHECK_SECONDS} s"
    seconds = time.perf_counter() - began
    text = (result.stdout + ("" if result.returncode == 0 else result.stderr[-600:])).strip()
    return result.returncode == 0, f"{seconds:.0f} s {text}"


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


def measure(pattern: str, passed: list[str], arguments: argparse.Namespace) -> None:
    """Time the variants of a pattern that passed their check, and FlashAttention 3 dense."""
    case = make_case(pattern, "cuda")
    torch.manual_seed(0)
    shape = (1, case.tokens, HEADS, HEAD_SIZE)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    scale = HEAD_SIZE**-0.5
    runs: dict[str, Callable[[], object]] = {}
    errors = {}
    for name in passed:
        run = partial(runner(VARIANTS[pattern][name]), q, k, v, case.plan, scale)
        try:
            errors[name] = sampled_error(run(), (q, k, v), case.plan, scale)
            torch.cuda.synchronize()
        except Exception:  # one variant must not end the others
            print(f"{pattern}: {name} failed: {traceback.format_exc()[-600:]}")
            continue
        if errors[name] < BOUND:
            runs[name] = run
        else:
            print(f"{pattern}: {name} is wrong, relative error {errors[name]:.2e}")
    dense_flop = 4.0 * HEAD_SIZE * HEADS * case.tokens**2
    try:
        from fa3_fwd_interface import flash_attn_func

        runs["fa3 dense"] = lambda: flash_attn_func(q, k, v)
    except ImportError as error:
        print(f"left out: FlashAttention 3, {error}")
    times = interleave(runs, rounds=arguments.rounds)
    baseline = times.pop("fa3 dense", None)
    fa3 = dense_flop / statistics.median(baseline) / 1e9 if baseline else math.nan
    print(f"-- {pattern}: {case.flop / 1e12:.2f} TFLOP; fa3 dense {fa3:.0f} TFLOP/s")
    for name in sorted(times, key=lambda name: statistics.median(times[name])):
        median = statistics.median(times[name])
        rate = case.flop / median / 1e9
        print(
            f"   {name:30} {median:8.3f} ms {rate:6.0f} TFLOP/s  x{rate / fa3:.3f} of fa3  "
            f"error {errors[name]:.1e}",
            flush=True,
        )
    groups = [(times, case.flop, "4*H*D*kept pairs")]
    if baseline:
        groups.append(({"fa3 dense": baseline}, dense_flop, "4*H*S*S*D"))
    for group, flop, formula in groups:
        rows = rows_of(
            group,
            commit=arguments.commit,
            benchmark="engine",
            case=pattern,
            shape=f"B1 H{HEADS} S{case.tokens} D{HEAD_SIZE} bf16",
            flop=flop,
            flop_formula=formula,
            errors=errors,
            versions={"fa3 dense": version_of("fa3-fwd")},
        )
        with contextlib.redirect_stdout(io.StringIO()):
            write_rows(arguments.out / "engine.csv", rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.set_defaults(rounds=7)
    parser.add_argument("--check", nargs=2, default=None, help="check one variant, then stop")


def main(arguments: argparse.Namespace) -> None:
    """Check every variant apart, then time the ones that are right."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.check:
        check(*arguments.check)
        return
    patterns = [pattern for pattern in VARIANTS if arguments.only in pattern]
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
        measure(pattern, [name for name in VARIANTS[pattern] if (group, name) in passed], arguments)
