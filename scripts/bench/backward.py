"""Forward and backward of the engine, dense and over random lists, beside torch and others.

Peers that are not installed, flash-attn-4 and fastvideo-kernel, are left out with a word.

Gradients of one head are checked first, against float64 by the definition: they may err at most
twice as much as plain PyTorch code in bfloat16 does. What is wrong is not timed, and makes the
script fail at the end. With `--tiles`, the two kernels of the backward pass are timed alone, in
other shapes of their programs, which processes of their own compile first.

    python3 scripts/bench/run.py backward --commit HASH [--only wan] [--quick] [--tiles]
    python3 scripts/bench/run.py backward --commit HASH --against CHECKOUT    # see _against.py
    python3 scripts/bench/run.py backward --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from _attention import Attend, Case, first_of, random_lists, sdpa, triton_tiles
from _harness import DEVICE, Bench, Run, Times, relative_error, run_apart, version_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.call import Backward
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tuning import (
    GluonTile,
    TritonTile,
    gluon_backward_tile,
)

DENSITY = 0.1
CHUNK = 1024
COMPILE_SECONDS, AT_ONCE = 70, 3


CASES = (
    Case(name="vsa training 1034", grid=(1, 1, 40_768), heads=16),
    Case(name="wan 1.3B 480p 81f", grid=(21, 30, 52), heads=12),
)
SMOKE = (Case(name="smoke", grid=(1, 1, 300), heads=2, head_size=32),)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An attention under test.

    Attributes:
        attend: the attention.
        plan: the pairs it keeps.
        version: of the package it comes from.
        heads_first: whether it takes and returns [B, H, S, D].
    """

    attend: Attend
    plan: BlockPlan
    version: str = ""
    heads_first: bool = False


def lists_of(case: Case, blocks: str) -> BlockPlan:
    """Return the plan that contenders call "dense", as the backend makes it, "128x128", "64x64"."""
    if blocks == "dense":
        whole = Blocks.regular(case.tokens, 384)
        return BlockPlan.dense(whole, whole, DEVICE)
    return random_lists(case.tokens, case.heads, int(blocks.split("x")[0]), share=DENSITY)


def kept_blocks(plan: BlockPlan) -> torch.Tensor:
    """Return which blocks a plan of equal counts keeps: bool [1, H, Nq, Nk]."""
    shape = (*plan.indices.shape[:3], plan.kv.num)
    keep = torch.zeros(shape, dtype=torch.bool, device=plan.device)
    return keep.scatter_(-1, plan.indices.long(), True)


def head_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upstream: torch.Tensor, plan: BlockPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of one head, [S, D] each, in the dtype of the inputs, by chunks of rows.

    Sums over chunks are taken in float32 or better.
    """
    scale = q.shape[1] ** -0.5
    keep = kept_blocks(plan)[0, 0]
    columns = torch.arange(len(k), device=k.device) // plan.kv.size
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(k, dtype=wide) for _ in range(2))
    for first in range(0, len(q), CHUNK):
        rows = slice(first, first + CHUNK)
        blocks = torch.arange(len(q), device=q.device)[rows] // plan.q.size
        scores = (q[rows] @ k.T * scale).masked_fill_(~keep[blocks][:, columns], -torch.inf)
        weights = scores.softmax(-1)
        dp = upstream[rows] @ v.T
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) * scale
        dq[rows] = ds @ k
        dk += ds.T @ q[rows]
        dv += weights.T @ upstream[rows]
    return dq, dk, dv


def engine(plan: BlockPlan) -> Contender:
    """Return this package's kernels."""
    return Contender(attend=lambda q, k, v: block_sparse_attention(q, k, v, plan), plan=plan)


def torchs_own(backend: SDPBackend, plan: BlockPlan) -> Contender:
    """Return one of the kernels of `scaled_dot_product_attention`."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return Contender(attend=attend, plan=plan, version=version_of("torch"))


def flash_attention_4(plan: BlockPlan) -> Contender:
    """Return flash-attn-4's dense attention."""
    function = importlib.import_module("flash_attn.cute").flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return first_of(function(q, k, v))

    return Contender(attend=attend, plan=plan, version=version_of("flash-attn-4"))


def flash_attention_4_lists(plan: BlockPlan) -> Contender:
    """Return flash-attn-4's attention over the lists of a plan, and their transposes for its back.

    Its last tiles may be short, which it calls masked.
    """
    from multimodal_gen.kernels.block_sparse.backward_kernel import transposed
    from multimodal_gen.kernels.block_sparse.fa4 import make_lists

    function = importlib.import_module("flash_attn.cute").flash_attn_func
    tensors = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    by_query, by_key = (
        tensors(
            mask_block_cnt=lists.mask_counts.expand(lists.full_counts.shape).contiguous(),
            mask_block_idx=lists.mask_indices.expand(*lists.full_counts.shape, 1).contiguous(),
            full_block_cnt=lists.full_counts,
            full_block_idx=lists.full_indices.contiguous(),
            block_size=(plan.q.size, plan.kv.size),
        )
        for lists in (make_lists(x, plan.kv.size) for x in (plan, transposed(plan)))
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(
            q, k, v, pack_gqa=False, block_sparse_tensors=by_query, block_sparse_tensors_bwd=by_key
        )
        return first_of(out)

    return Contender(attend=attend, plan=plan, version=version_of("flash-attn-4"))


def fastvideo(plan: BlockPlan) -> Contender:
    """Return fastvideo-kernel's attention over a map of blocks of 64."""
    function = importlib.import_module("fastvideo_kernel.block_sparse_attn").block_sparse_attn
    keep = kept_blocks(plan)
    sizes = torch.full((plan.kv.num,), plan.kv.size, dtype=torch.int32, device=DEVICE)
    sizes[-1] = plan.kv.total - (plan.kv.num - 1) * plan.kv.size
    if plan.kv.total % plan.kv.size:
        raise ValueError(f"it takes whole blocks of {plan.kv.size}, got {plan.kv.total} tokens")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, _ = function(q, k, v, keep, sizes)
        return out

    version = version_of("fastvideo-kernel")
    return Contender(attend=attend, plan=plan, version=version, heads_first=True)


def flex(plan: BlockPlan) -> Contender:
    """Return FlexAttention over the lists of a plan."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    keep = kept_blocks(plan)
    counts = keep.sum(-1, dtype=torch.int32)
    indices = keep.byte().argsort(dim=-1, descending=True, stable=True).int()
    size = plan.q.size

    def kept(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return keep[0, h, i // size, j // size]

    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        indices,
        counts,
        indices,
        BLOCK_SIZE=size,
        mask_mod=kept,
        seq_lengths=(plan.q.total, plan.kv.total),
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads_first, block_mask=mask).transpose(1, 2)

    return Contender(attend=attend, plan=plan, version=version_of("torch"))


def contenders_of(case: Case, *, quick: bool) -> dict[str, Contender]:
    """Return what is measured of a case, by name; says what is left out."""
    dense, r128, r64 = (lists_of(case, blocks) for blocks in ("dense", "128x128", "64x64"))
    makers: dict[str, Callable[[], Contender]] = {
        "engine dense": partial(engine, dense),
        "engine 128x128": partial(engine, r128),
        "engine 64x64": partial(engine, r64),
    }
    if DEVICE == "cpu":
        makers["sdpa dense"] = partial(torchs_own, SDPBackend.MATH, dense)
    else:
        makers["cudnn dense"] = partial(torchs_own, SDPBackend.CUDNN_ATTENTION, dense)
        makers["flash dense"] = partial(torchs_own, SDPBackend.FLASH_ATTENTION, dense)
        makers["fa4 dense"] = partial(flash_attention_4, dense)
        makers["fa4 128x128"] = partial(flash_attention_4_lists, r128)
        makers["fastvideo 64x64"] = partial(fastvideo, r64)
        if not quick:
            makers["flex 128x128"] = partial(flex, r128)
            makers["flex 64x64"] = partial(flex, r64)
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:  # a broken package fails in many ways
            print(f"left out of {case.name}: {name}, {type(error).__name__}: {error}", flush=True)
    return found


def gradients_of(
    contender: Contender, inputs: tuple[torch.Tensor, ...], upstream: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return what runs the backward pass alone, again and again.

    Args:
        contender: what is measured.
        inputs: q, k and v, in its layout.
        upstream: gradient of out, in its layout.
    """
    out = contender.attend(*inputs)
    return partial(torch.autograd.grad, out, inputs, upstream, retain_graph=True)


def errors_of(
    found: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...],
    upstream: torch.Tensor,
    plan: BlockPlan,
) -> tuple[float, float]:
    """Return the largest error of the three gradients of the first head, and the largest excess.

    The excess is the error as a share of what is allowed.
    """
    head = [x[0, :, 0].detach() for x in (*inputs, upstream)]
    exact = head_gradients(*(x.double() for x in head), plan)
    plain = head_gradients(*head, plan)
    errors = [relative_error(x[0, :, 0], y) for x, y in zip(found, exact, strict=True)]
    allowed = [2 * relative_error(x, y) for x, y in zip(plain, exact, strict=True)]
    return max(errors), max(e / a for e, a in zip(errors, allowed, strict=True))


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a case."""
    torch.manual_seed(0)
    shape = (1, case.tokens, case.heads, case.head_size)
    *given, upstream = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in given)
    turned = [x.detach().transpose(1, 2).contiguous() for x in (*inputs, upstream)]
    heads_first = tuple(x.requires_grad_() for x in turned[:3])
    forward: dict[str, Run] = {}
    backward: dict[str, Run] = {}
    errors, flops, versions = {}, {}, {}
    for name, contender in contenders_of(case, quick=bench.options.quick).items():
        try:
            taken, above = (heads_first, turned[3]) if contender.heads_first else (inputs, upstream)
            run = gradients_of(contender, taken, above)
            found = run()
            if contender.heads_first:
                found = tuple(x.transpose(1, 2) for x in found)
            errors[name], excess = errors_of(found, inputs, upstream, contender.plan)
        except Exception as error:  # one contender must not end the others
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            bench.wrong += [name] if name.startswith("engine") else []
            continue
        if not excess <= 1:
            print(f"WRONG {name}: error {errors[name]:.2e}, {excess:.2f} of what is allowed")
            bench.wrong.append(name)
            continue
        forward[name], backward[name] = partial(contender.attend, *taken), run
        pairs = contender.plan.pairs()
        flops[name] = float(pairs.sum()) * case.heads / pairs.numel() * case.head_size
        versions[name] = contender.version
    for kind, runs, factor in (("forward", forward, 4), ("backward", backward, 10)):
        times = bench.time(runs, block_ms=80.0)
        work = {name: factor * flop for name, flop in flops.items()}
        write(bench, case, kind, times, work, factor, errors, versions)


def write(
    bench: Bench,
    case: Case,
    kind: str,
    times: Times,
    flops: dict[str, float],
    factor: int,
    errors: dict[str, float],
    versions: Mapping[str, str],
) -> None:
    """Write rows whose contenders differ in what they compute, by the end of their names."""
    print(f"-- {case.name}, {kind}")
    bench.write(
        times,
        case,
        benchmark=f"backward: {kind}",
        flop=flops,
        flop_formula=f"{factor}*H*D*kept pairs",
        errors=errors,
        versions=versions,
        group=lambda name: name.rpartition(" ")[2],
    )


Tile = TritonTile | GluonTile


def _sm90(*shapes: tuple[int, int, int], own: bool = False) -> dict[str, Tile]:
    return {
        f"sm90 {consumers}x64x{keys} s{stages}": GluonTile(
            consumers=consumers, keys=keys, stages=stages, own=own
        )
        for consumers, keys, stages in shapes
    }


# Other shapes of the programs: (blocks, kernel) -> tiles of rows x keys, by name.
WIDE_DQ = {**triton_tiles("", (128, 64, 8, 3)), **_sm90((2, 64, 4), (2, 64, 3))}
WIDE_DKV = {**triton_tiles("", (64, 128, 8, 3)), **_sm90((2, 64, 4))}
NARROW_DQ = {
    **triton_tiles("", (64, 64, 4, 2)),
    **_sm90((2, 64, 2), (2, 32, 4), (2, 32, 3), own=True),
}
NARROW_DKV = {**triton_tiles("", (32, 64, 4, 3)), **_sm90((2, 64, 2), own=True)}
# All three gradients: by two kernels, and by one.
ALL: dict[str, Tile | None] = {
    "sm90 two": gluon_backward_tile(block=128),
    "sm90 one": None,
}
TILES: dict[tuple[str, str], Mapping[str, Tile | None]] = {
    ("dense", "all"): ALL,
    ("128x128", "all"): ALL,
    ("dense", "dq"): WIDE_DQ,
    ("dense", "dkv"): WIDE_DKV,
    ("128x128", "dq"): WIDE_DQ,
    ("128x128", "dkv"): WIDE_DKV,
    ("64x64", "dq"): NARROW_DQ,
    ("64x64", "dkv"): NARROW_DKV,
}


def tile_run(
    case: Case, blocks: str, kernel: str, tile: Tile | None
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return what launches one kernel of the backward pass in a shape."""
    from multimodal_gen.kernels.block_sparse import backward_kernel as portable

    plan = lists_of(case, blocks)
    generator = torch.Generator(DEVICE).manual_seed(1)
    shape = (1, case.tokens, case.heads, case.head_size)
    inputs = tuple(
        torch.randn(shape, device=DEVICE, generator=generator).bfloat16() for _ in range(4)
    )
    of_keys, scale = kernel == "dkv", case.head_size**-0.5
    count = {"dq": 1, "dkv": 2, "all": 3}[kernel]
    results = torch.empty((count, *shape), device=DEVICE, dtype=torch.bfloat16)
    # Any level and delta take as long; these keep weights small.
    rows = torch.randn((2, 1, case.heads, case.tokens), device=DEVICE, generator=generator)
    rows[0] += 12.0
    if isinstance(tile, TritonTile):
        launch = portable.key_gradients if of_keys else portable.query_gradient
        # Of what a call gave only the gradient is read.
        call = Backward(*inputs[:3], plan, inputs[3], rows[0], inputs[3], None, scale)
        run = partial(launch, call, rows, *results, tile=tile, copy_engine=True)
    elif tile is None:
        from multimodal_gen.kernels.block_sparse import gluon_fused_kernel as fused

        call = Backward(*inputs[:3], plan, inputs[3], rows[0], inputs[3], None, scale)
        return partial(fused.attend_backward, call, rows)
    elif kernel == "all":
        from multimodal_gen.kernels.block_sparse import gluon_backward_kernel as sm90

        q, k, v, upstream = inputs
        pairs, turned = ((q, upstream), (k, v)), portable.transposed(plan)

        def run() -> None:
            sm90.launch(*pairs, plan, rows, (results[0],), scale=scale, tile=tile)
            sm90.launch(*pairs[::-1], turned, rows, tuple(results[1:]), scale=scale, tile=tile)

    else:
        from multimodal_gen.kernels.block_sparse import gluon_backward_kernel as sm90

        q, k, v, upstream = inputs
        own, others = ((k, v), (q, upstream)) if of_keys else ((q, upstream), (k, v))
        lists = portable.transposed(plan) if of_keys else plan
        run = partial(sm90.launch, own, others, lists, rows, tuple(results), scale=scale, tile=tile)

    def launched() -> tuple[torch.Tensor, ...]:
        run()
        return tuple(results)

    return launched


def compile_apart(blocks: str, kernel: str, names: list[str]) -> set[str]:
    """Fill Triton's cache in a process of its own; returns what ran in it."""
    said, failure = run_apart(
        "backward", "--compile", blocks, kernel, *names, seconds=COMPILE_SECONDS
    )
    ran = {line.removeprefix("ran ") for line in said.splitlines() if line.startswith("ran ")}
    if len(ran) < len(names):
        failed = ", ".join(name for name in names if name not in ran)
        print(f"FAILED {blocks} {kernel} {failed}: {(failure or '')[-300:]}", flush=True)
    return ran


def from_the_first() -> Callable[[str, Run], float]:
    """Return what tells how far the gradients of a call are from those of the first one."""
    first: list[list[torch.Tensor]] = []

    def error_of(name: str, run: Run) -> float:
        found = [x.clone() for x in run()]
        if not first:
            first.append(found)
        return max(relative_error(x, y) for x, y in zip(found, first[0], strict=True))

    return error_of


def measure_tiles(case: Case, bench: Bench) -> None:
    """Time the two kernels in other shapes."""
    jobs = [
        (*key, list(tiles)[first : first + AT_ONCE])
        for key, tiles in TILES.items()
        if bench.options.tiles in ("", *key)
        for first in range(0, len(tiles), AT_ONCE)
    ]
    ran: dict[tuple[str, str], set[str]] = {key: set() for key in TILES}
    with ThreadPoolExecutor(14) as pool:
        for job, names in zip(jobs, pool.map(lambda job: compile_apart(*job), jobs), strict=True):
            ran[job[:2]] |= names
    for (blocks, kernel), tiles in TILES.items():
        if not ran[blocks, kernel]:
            continue
        made = (
            (f"{kernel} {name} {blocks}", tile_run(case, blocks, kernel, tile))
            for name, tile in tiles.items()
            if name in ran[blocks, kernel]
        )
        runs, errors = bench.check(made, from_the_first(), 1e-2)
        pairs = lists_of(case, blocks).pairs().double().mean()
        factor = {"dq": 6, "dkv": 8, "all": 10}[kernel]
        flop = float(pairs) * case.heads * case.head_size * factor
        times = bench.time(runs, block_ms=40.0)
        write(bench, case, f"{kernel} alone", times, dict.fromkeys(runs, flop), factor, errors, {})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--quick", action="store_true", help="leave out what compiles for long")
    parser.add_argument(
        "--tiles", nargs="?", const="", help="try other shapes too, of dq, dkv or all"
    )
    parser.add_argument("--compile", nargs="+", default=None, help="compile shapes, then stop")


def main(bench: Bench) -> int:
    """Measure the cases, and other shapes where they are asked for."""
    options = bench.options
    if options.compile:
        blocks, kernel, *names = options.compile
        for name in names:
            tile_run(CASES[0], blocks, kernel, TILES[blocks, kernel][name])()
            torch.cuda.synchronize()
            print(f"ran {name}", flush=True)
        return 0
    for case in SMOKE if options.smoke else CASES:
        if options.only in case.name:
            measure(case, bench)
    failed = 1 if bench.wrong else 0
    if options.tiles is not None and not options.smoke:
        measure_tiles(CASES[0], bench)
    return failed
