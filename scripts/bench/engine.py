"""The block-sparse engine: its kernels in other shapes, checked first and timed against FA3.

`engine.yaml` lists the shapes: `fast` has a fixed reference, `exact` the online softmax, which is
`lazy` where it keeps its reference while it can.

`forward` variants are checked on small plans against the reference; those of the backward pass
(`dq`, `dkv`, `all` three gradients by two kernels or by one) at full size, against the first one.
Each is tried in a process of its own, so that one that fails or hangs costs only itself; the same
step fills the kernel cache. Those that pass are timed in interleaved rounds; over random lists next
to cuDNN's block-sparse attention, in 16 and 8 bits, and FlashInfer's, where they are installed.

    python3 scripts/bench/run.py engine --commit HASH [--only "sta forward|dq"] [--rounds 7]
    python3 scripts/bench/run.py engine --commit HASH --smoke    # what is checked, on any machine
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from _attention import FA3, Case, fa3_run, random_lists
from _block_sparse_peers import runs_of
from _harness import DEVICE, Bench, Row, relative_error, run_apart, version_of

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, request_for
from multimodal_gen.kernels.block_sparse.call import Backward, Call, CallForm
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.kernels.block_sparse.tuning import GluonTile, TritonTile
from tests.helpers.block_plans import tile_lists

HEADS, HEAD_SIZE = 24, 128
TRIAL_SECONDS, AT_ONCE = 200, 12
BOUND, BACKWARD_BOUND = 4e-3, 1e-2
PEER_BOUND = 0.1  # some have 8 bits; rows tell the errors

Tile = TritonTile | GluonTile | None


def tile_of(sizes: Mapping[str, Any] | None) -> Tile:
    """Return the tile that a line of `engine.yaml` describes."""
    if sizes is None:
        return None
    return TritonTile(**sizes) if "rows" in sizes else GluonTile(**sizes)


# (pattern, kernel) -> the shapes of its programs.
VARIANTS: dict[tuple[str, str], dict[str, Tile]] = {
    tuple(key.rsplit(" ", 1)): {name: tile_of(sizes) for name, sizes in tiles.items()}
    for key, tiles in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
FACTORS = {"forward": 4, "dq": 6, "dkv": 8, "all": 10}
BLOCKS = {"r128": 128, "r64": 64}


def make_case(pattern: str, kernel: str) -> tuple[Case, BlockPlan]:
    """Return the tokens of a pattern, and its plan."""
    if kernel != "forward":
        case = Case(name=pattern, grid=(1, 1, 40_768), heads=16)
    else:
        tokens = 75_600 if pattern == "ragged dense" else 115_200
        case = Case(name=pattern, grid=(1, 1, tokens), heads=HEADS)
    blocks = Blocks.regular(case.tokens, 384)
    if pattern == "sta":
        indices, counts, uniform = tile_lists(((3, 3, 3),), (5, 6, 10), device=DEVICE)
        plan = BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks, uniform=uniform)
        return case, plan
    if "dense" in pattern:
        return case, BlockPlan.dense(blocks, blocks, DEVICE)
    return case, random_lists(case.tokens, case.heads, BLOCKS[pattern], share=0.1)


def forward(tile: Tile, q: Any, k: Any, v: Any, plan: BlockPlan, scale: float) -> torch.Tensor:
    """Run a variant of the forward pass, without the operator around it."""
    if DEVICE == "cpu":  # to try the script
        return block_sparse_attention(q, k, v, plan, scale=scale)
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


def gradients(pattern: str, kernel: str, tile: Tile) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return what launches kernels of the backward pass in a shape."""
    from multimodal_gen.kernels.block_sparse import backward_kernel as portable

    case, plan = make_case(pattern, kernel)
    generator = torch.Generator(DEVICE).manual_seed(1)
    shape = (1, case.tokens, case.heads, case.head_size)
    q, k, v, upstream = (
        torch.randn(shape, device=DEVICE, generator=generator).bfloat16() for _ in range(4)
    )
    scale, results = case.head_size**-0.5, torch.empty((3, *shape), device=DEVICE, dtype=q.dtype)
    # Any level and delta take as long; these keep weights small.
    rows = torch.randn((2, 1, case.heads, case.tokens), device=DEVICE, generator=generator)
    rows[0] += 12.0
    # Of what a call gave only the gradient is read.
    call = Backward(q, k, v, plan, upstream, rows[0], upstream, None, scale)
    wanted = {"dq": results[:1], "dkv": results[1:], "all": results}[kernel]
    if tile is None:
        from multimodal_gen.kernels.block_sparse import gluon_fused_kernel as fused

        return partial(fused.attend_backward, call, rows)

    def run() -> tuple[torch.Tensor, ...]:
        for of_keys in {"dq": (False,), "dkv": (True,), "all": (False, True)}[kernel]:
            out = tuple(results[1:] if of_keys else results[:1])
            if isinstance(tile, TritonTile):
                launch = portable.key_gradients if of_keys else portable.query_gradient
                launch(call, rows, *out, tile=tile, copy_engine=True)
                continue
            from multimodal_gen.kernels.block_sparse import gluon_backward_kernel as own

            sides = ((k, v), (q, upstream)) if of_keys else ((q, upstream), (k, v))
            kept = portable.transposed(plan) if of_keys else plan
            own.launch(*sides, kept, rows, out, scale=scale, tile=tile)
        return tuple(wanted)

    return run


def small_plans(pattern: str) -> dict[str, BlockPlan]:
    """Return plans that take every path a variant has: whole, ragged end, padded, ragged."""
    size = BLOCKS.get(pattern, 384)
    generator = torch.Generator(DEVICE).manual_seed(1)
    draw = partial(torch.rand, device=DEVICE, generator=generator)

    def lists(q: Blocks, kv: Blocks) -> BlockPlan:
        keep = draw(1, 4, q.num, kv.num) < 0.5
        keep[0, 0, 0] = False
        return BlockPlan.from_map(keep, q, kv)

    lengths = torch.randint(0, size + 1, (1, 4, 7), device=DEVICE, generator=generator).int()
    padded = Blocks.padded(lengths, size)
    q, kv = Blocks.regular(6 * size, size), Blocks.regular(8 * size, size)
    some = draw(1, 4, 6, 8).topk(3, dim=-1).indices
    whole = torch.zeros(1, 4, 6, 8, device=DEVICE, dtype=torch.bool).scatter_(-1, some, True)
    short_q, short_kv = Blocks.regular(5 * size - 50, size), Blocks.regular(6 * size - 37, size)
    plans = {
        "whole": replace(BlockPlan.from_map(whole, q, kv), uniform=True),
        "ragged end": lists(short_q, short_kv),
        "padded": lists(padded, padded),
    }
    if pattern == "sta" or "dense" in pattern:
        plans["dense"] = BlockPlan.dense(short_q, short_kv, DEVICE)
    return plans


def check_small(pattern: str, tile: Tile) -> None:
    """Check a variant of the forward pass on the small plans; prints the errors."""
    errors = {}
    for name, plan in small_plans(pattern).items():
        torch.manual_seed(0)
        q = torch.randn(2, plan.q.total, 4, HEAD_SIZE, device=DEVICE).bfloat16()
        shape = (2, plan.kv.total, 2, HEAD_SIZE)
        k, v = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
        for deviation in (1.0, 30.0):
            scale = deviation * HEAD_SIZE**-0.5
            exact = attention_reference(q.double(), k.double(), v.double(), plan, scale=scale)
            error = relative_error(forward(tile, q, k, v, plan, scale), exact[0])
            errors[f"{name} std {deviation:g}"] = error
    print(" ".join(f"{name} {error:.1e};" for name, error in errors.items()))
    if not all(error < BOUND * 2 for error in errors.values()):
        raise SystemExit("wrong")


def alone(pattern: str, kernel: str, name: str) -> None:
    """Try one variant, in a process of its own."""
    tile = VARIANTS[pattern, kernel][name]
    if kernel == "forward":
        check_small(pattern, tile)
    else:
        gradients(pattern, kernel, tile)()
        torch.cuda.synchronize()


def tried(job: tuple[str, str, str]) -> bool:
    """Run `alone` in a process of its own; says how it went."""
    began = time.perf_counter()
    said, failure = run_apart("engine", "--alone", *job, seconds=TRIAL_SECONDS)
    text = f"{time.perf_counter() - began:.0f} s {said}{failure or ''}".strip()
    print(f"{'FAILED' if failure else 'ok    '} {' '.join(job):50} {text}", flush=True)
    return failure is None


def sampled_error(out: torch.Tensor, inputs: Any, plan: BlockPlan, scale: float) -> float:
    """Return the relative error on a few query blocks against the fp32 reference."""
    q, k, v = inputs
    size, heads = plan.q.size, slice(0, 4)
    chosen = [0, plan.q.num // 3, plan.q.num - 2]
    rows = torch.cat([torch.arange(i * size, (i + 1) * size, device=q.device) for i in chosen])
    part = BlockPlan(
        indices=plan.indices[:, heads, chosen],
        counts=plan.counts[:, heads, chosen],
        q=Blocks.regular(len(rows), size),
        kv=plan.kv,
    )
    few = (q[:, rows, heads].float(), k[:, :, heads].float(), v[:, :, heads].float())
    expected, _ = attention_reference(*few, part, scale=scale)
    return relative_error(out[:, rows, heads], expected)


def measure(pattern: str, kernel: str, names: list[str], bench: Bench) -> None:
    """Time the variants of a kernel that passed their trial, and FlashAttention 3 dense."""
    case, plan = make_case(pattern, kernel)
    tiles = {name: VARIANTS[pattern, kernel][name] for name in names}
    pairs = float(plan.pairs().double().mean())
    flop = FACTORS[kernel] * case.heads * case.head_size * pairs
    versions = {FA3: version_of("fa3-fwd")}
    if kernel == "forward":
        qkv, scale = case.draw(torch.bfloat16), case.head_size**-0.5
        runs = {name: partial(forward, tile, *qkv, plan, scale) for name, tile in tiles.items()}

        def error_of(name: str, run: Callable[[], torch.Tensor]) -> float:
            return sampled_error(run(), qkv, plan, scale)

        right, errors = bench.check(runs.items(), error_of, BOUND)
        against = fa3_run(qkv)
        if pattern in BLOCKS:
            peers, found = runs_of(qkv, plan)
            good, of_peers = bench.check(peers.items(), error_of, PEER_BOUND)
            against, errors, versions = {**against, **good}, errors | of_peers, versions | found
    else:
        runs = {name: gradients(pattern, kernel, tile) for name, tile in tiles.items()}
        right, errors = bench.check(runs.items(), from_the_first(), BACKWARD_BOUND)
        against = {}
    times = bench.time({**right, **against}, block_ms=80.0)
    fa3_rate = case.flop / statistics.median(times.get(FA3, [math.nan])) / 1e9

    def show(row: Row) -> str:
        return (
            f"   {row['contender']:36} {row['median_ms']:8.3f} ms {row['tflops']:6.0f} TFLOP/s  "
            f"x{row['tflops'] / fa3_rate:.3f} of fa3  error {row['relative_error']:.1e}"
        )

    bench.write(
        dict(sorted(times.items(), key=lambda item: statistics.median(item[1]))),
        case,
        benchmark="engine" if kernel == "forward" else f"engine: {kernel} alone",
        flop={name: case.flop if name == FA3 else flop for name in times},
        flop_formula=f"{FACTORS[kernel]}*H*D*kept pairs",
        errors=errors,
        versions=versions,
        show=show,
    )


def from_the_first() -> Callable[[str, Callable[[], Any]], float]:
    """Return what tells how far the gradients of a call are from those of the first one."""
    first: list[list[torch.Tensor]] = []

    def error_of(name: str, run: Callable[[], Any]) -> float:
        found = [x.clone() for x in run()]
        if not first:
            first.append(found)
        return max(relative_error(x, y) for x, y in zip(found, first[0], strict=True))

    return error_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.set_defaults(rounds=7)
    parser.add_argument("--alone", nargs=3, default=None, help="try one variant, then stop")
    parser.add_argument("--smoke", action="store_true", help="check small plans, anywhere")


def main(bench: Bench) -> int:
    """Try every variant apart, then time the ones that are right."""
    options = bench.options
    if options.alone:
        alone(*options.alone)
        return 0
    if options.smoke:
        check_small("r64", next(iter(VARIANTS["r64", "forward"].values())))
        return 0
    keys = [key for key in VARIANTS if bench.wants(" ".join(key))]
    jobs = [(*key, name) for key in keys for name in VARIANTS[key]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        passed = dict(zip(jobs, pool.map(tried, jobs), strict=True))
    for key in keys:
        names = [name for name in VARIANTS[key] if passed[(*key, name)]]
        if names:
            measure(*key, names, bench)
    return bench.status()
