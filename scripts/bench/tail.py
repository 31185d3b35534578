"""The pooled tail: the same lists with and without it, and whole layers beside dense attention.

Lists are random blocks and windows of tiles, on inputs that vary over the video as a model's do.
Sampled rows of what the engine computes are checked against float32 by the definition, and layers,
on a small video, against the reference kernel; what is wrong is not timed, and makes the script
fail at the end. The distance of some of a layer's rows from dense attention in float64 is a column.
Of lists that are timed alone, what the tail derives from a plan is made once; layers make it in
every call. `over_without_tail` is the time over that of the same without the tail. Each layer, and
each kind of lists, is compiled, checked, timed and written before the next one.

    python3 scripts/bench/run.py tail --commit HASH [--only wan] [--rounds 7] [--tiles] [--parts]
    python3 scripts/bench/run.py tail --commit HASH --layers "sol, (15|blocks)" --lists "^$"
    python3 scripts/bench/run.py tail --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from _attention import FA3, Case, Grid, Method, fa3_run, layer_on, random_lists
from _harness import DEVICE, Bench, Row, Run, Times, relative_error, version_of

from multimodal_gen.kernels.block_sparse import tail as tail_module
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail import PooledTail, add_tail, kept_map, pool_blocks
from multimodal_gen.kernels.block_sparse.tuning import GluonTile
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.block_plans import tile_lists
from tests.helpers.inputs import QKV

DENSITY = 0.15
ROWS = 128
MEASURED_HEADS = 4
BOUND = 6e-3
LAYER_BOUND = 1e-2  # of nine rows in ten: where scores are alike, another block may be chosen
FLOP = "4*H*D*pairs that are attended to exactly"

# Other kernels of the tail, by what the results call them; None is Triton's.
TILES: dict[str, GluonTile | None] = {
    "triton": None,
    "2 consumers, 3 stages": GluonTile(consumers=2, keys=64, stages=3, registers=240),
    "2 consumers, 4 stages": GluonTile(consumers=2, keys=64, stages=4, registers=240),
    "3 consumers, 3 stages": GluonTile(consumers=3, keys=64, stages=3, registers=160),
    "3 consumers, 4 stages": GluonTile(consumers=3, keys=64, stages=4, registers=160),
}
# Layers, by what the results call them: backend and parameters.
LAYERS: dict[str, Method] = {
    "sol, 15 % of blocks": ("sol_attn", {"topk_ratio": DENSITY}),
    "sol, tau 1": ("sol_attn", {"tau": 1.0}),
    "sol, tiles 4x4x4": ("sol_attn", {"topk_ratio": DENSITY, "tile_size": [4, 4, 4]}),
    "sol, blocks of 128": ("sol_attn", {"topk_ratio": DENSITY, "block_size": 128}),
    "vsa": ("video_sparse_attn", {"sparsity": 1 - DENSITY}),
    "sta 3x3x3": ("sliding_tile_attn", {"window": [3, 3, 3], "skip_time_steps": 0}),
    "sla": ("sla_attn", {"topk_ratio": DENSITY}),
    "subblock": (
        "subblock_sparse_attn",
        {"sparsity": 1 - DENSITY, "skip_first_steps": 0, "min_seq_len": 0},
    ),
    "pisa": ("pisa_attn", {"density": DENSITY}),
}


TILE: Grid = (6, 8, 8)
SMALL_TILE: Grid = (2, 4, 4)
CASES = (
    Case(name="wan 14B 21x45x80", grid=(21, 45, 80), heads=40),
    Case(name="hunyuan 30x48x80", grid=(30, 48, 80), heads=24),
)
# Ends in a cut block as that of 720p does, so that the same compilations serve both.
SMALL = Case(name="small", grid=(6, 24, 41), heads=2)
SMOKE = (Case(name="smoke", grid=(5, 9, 13), heads=2, head_size=32),)


def window_lists(case: Case, tile: Grid) -> BlockPlan:
    """Return windows of 3x3x3 tiles over whole tiles, as many as the video fills."""
    tiles = tuple(max(1, n // edge) for n, edge in zip(case.grid, tile, strict=True))
    size = math.prod(tile)
    indices, counts, uniform = tile_lists(
        ((3, 3, 3),) * case.heads, (tiles[0], tiles[1], tiles[2]), device=DEVICE
    )
    blocks = Blocks.regular(math.prod(tiles) * size, size)
    plan = BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks, uniform=uniform)
    return plan.longest_first()


def expected_rows(qkv: QKV, plan: BlockPlan, rows: torch.Tensor, *, tail: bool) -> torch.Tensor:
    """Return rows of the first head in float32, by the definition: [R, D]."""
    q, k, v = (x[0, : plan.kv.total, 0].float() for x in qkv)
    size, num = plan.kv.size, plan.kv.num
    block = torch.arange(len(k), device=k.device) // size
    counts = torch.bincount(block, minlength=num)[:, None]
    means = [
        (torch.zeros(num, x.shape[1], device=x.device).index_add_(0, block, x) / counts)
        for x in (k, v)
    ]
    kept = kept_map(plan, num)[0, 0][rows // plan.q.size]
    scale = q.shape[1] ** -0.5
    exact = (q[rows] @ k.T * scale).masked_fill(~kept[:, block], -torch.inf)
    if not tail:
        return exact.softmax(-1) @ v
    pooled = q[rows] @ means[0].T * scale + counts[:, 0].log()
    pooled = pooled.masked_fill(kept, -torch.inf)
    weights = torch.cat((exact, pooled), dim=1).softmax(-1)
    return weights @ torch.cat((v, means[1]))


def parts_of(qkv: QKV, plan: BlockPlan) -> dict[str, Callable[[], object]]:
    """Return what a call with a tail consists of: the lists with their lse, the means, the rest."""
    q, k, v = (x[:, : plan.kv.total] for x in qkv)
    out, lse = block_sparse_attention(q, k, v, plan, return_lse=True)
    pooled, kept = pool_blocks(k, v, plan.kv, plan.kv.num), kept_map(plan, plan.kv.num)
    scale = q.shape[3] ** -0.5
    return {
        "lists and lse": partial(block_sparse_attention, q, k, v, plan, return_lse=True),
        "means": partial(pool_blocks, k, v, plan.kv, plan.kv.num),
        # It goes on from its own last result, which costs no other time.
        "tail alone": partial(add_tail, out, lse, q, pooled, kept, plan.q, scale=scale),
    }


def with_tile(attend: Callable[..., torch.Tensor], tile: GluonTile | None) -> torch.Tensor:
    """Run with another kernel of the tail."""
    name, value = "gluon_tail_tile", lambda: tile
    if tile is None:
        name, value = "_LAUNCH", {"gluon": tail_module._launch_triton}
    with mock.patch.object(tail_module, name, value):
        return attend(tail=PooledTail())


def make_layer(case: Case, backend: str, parameters: Mapping[str, object]) -> LocalAttention:
    """Return a layer that runs a method at its first step."""
    given = {"dense_steps": None, "dense_layers": None, "dense_above": 1.0, **parameters}
    return layer_on(case, backend, given)


def run_layer(case: Case, layer: LocalAttention, qkv: QKV) -> torch.Tensor:
    """Call a layer inside a denoiser call."""
    with torch.inference_mode(), set_forward_context(0, latent_grid=case.grid, num_steps=1):
        return layer(*qkv)


def kernel_error(case: Case, qkv: QKV, backend: str, given: Mapping[str, object]) -> float:
    """Return how far a layer's kernel is from the reference: nine rows in ten are nearer."""
    found, wanted = (
        run_layer(case, make_layer(case, backend, {**given, "kernel": kernel}), qkv)
        for kernel in ("auto", "reference")
    )
    found, wanted = found.double(), wanted.double()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).quantile(0.9))


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Some rows of dense attention in float64.

    Attributes:
        rows: int64 [R].
        heads: int64 [h].
        wanted: [R, h, D].
    """

    rows: torch.Tensor
    heads: torch.Tensor
    wanted: torch.Tensor

    def error(self, out: torch.Tensor) -> float:
        """Return the relative L2 distance of `out`, [1, S, H, D], at these rows."""
        found = out[0, self.rows][:, self.heads].double()
        return float((found - self.wanted).norm() / self.wanted.norm())


def sample(qkv: QKV) -> Sample:
    """Return rows and heads, spread evenly, and what they are."""
    q, k, v = (x[0] for x in qkv)
    total, heads = q.shape[:2]
    rows = torch.arange(0, total, max(1, total // ROWS), device=q.device)
    some = torch.arange(0, heads, max(1, heads // MEASURED_HEADS), device=q.device)
    scores = torch.einsum("rhd,shd->hrs", q[rows][:, some].double(), k[:, some].double())
    weights = (scores * q.shape[2] ** -0.5).softmax(-1)
    wanted = torch.einsum("hrs,shd->rhd", weights, v[:, some].double())
    return Sample(rows=rows, heads=some, wanted=wanted)


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is timed in the same rounds: a layer, or lists, with and without a tail.

    Attributes:
        runs: what runs, by name.
        errors: relative errors of kernels; what has none is not checked.
        bound: the largest error that is right.
        densities: share of the token pairs that are attended to exactly; none where data decide.
        to_dense: relative L2 distances of sampled rows from dense attention in float64.
    """

    runs: dict[str, Run]
    errors: dict[str, float]
    bound: float
    densities: dict[str, float]
    to_dense: dict[str, float]


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a case, group by group.

    What compiles late does not hold up what is written, which a script that is ended leaves.
    """
    qkv, options = case.video(), bench.options
    dense, layers = fa3_run(qkv), layer_groups(case, qkv, options)
    for group in itertools.chain(layers, list_groups(case, qkv, options)):
        runs = {**dense, **group.runs}
        for name, error in group.errors.items():
            if not bench.is_right(name, error, group.bound):
                runs.pop(name)
        write(bench, case, bench.time(runs, block_ms=options.block_ms), group)


def layer_groups(case: Case, qkv: QKV, options: argparse.Namespace) -> Iterator[Group]:
    """Yield the layers that are asked for, each with and without its tail."""
    layers = {name: given for name, given in LAYERS.items() if re.search(options.layers, name)}
    if not layers:
        return
    exact, little = sample(qkv), SMOKE[0] if options.smoke else SMALL
    small = little.video()
    for name, (backend, parameters) in layers.items():
        runs, errors, to_dense = {}, {}, {}
        for tail in ("none", "pooled"):
            label = f"{name}, tail" if tail == "pooled" else name
            given = {**parameters, "tail": tail}
            errors[label] = kernel_error(little, small, backend, given)
            runs[label] = partial(run_layer, case, make_layer(case, backend, given), qkv)
            to_dense[label] = exact.error(runs[label]())
        yield Group(runs=runs, errors=errors, bound=LAYER_BOUND, densities={}, to_dense=to_dense)


def list_groups(case: Case, qkv: QKV, options: argparse.Namespace) -> Iterator[Group]:
    """Yield the lists that are asked for, each with and without a tail."""
    lists = {
        "blocks of 64": lambda: random_lists(case.tokens, case.heads, 64, share=DENSITY),
        "blocks of 128": lambda: random_lists(case.tokens, case.heads, 128, share=DENSITY),
        "windows of tiles": lambda: window_lists(case, SMALL_TILE if options.smoke else TILE),
    }
    generator = torch.Generator(DEVICE).manual_seed(1)
    for name, make in lists.items():
        if not re.search(options.lists, name):
            continue
        plan = make()
        inputs = tuple(x[:, : plan.kv.total] for x in qkv)
        attend = partial(block_sparse_attention, *inputs, plan)
        runs: dict[str, Run] = {name: attend, f"{name}, tail": partial(attend, tail=PooledTail())}
        for label, tile in TILES.items() if options.tiles else ():
            runs[f"{name}, tail {label}"] = partial(with_tile, attend, tile)
        errors = {}
        for label, run in runs.items():
            rows = torch.randint(0, plan.q.total, (ROWS,), device=DEVICE, generator=generator)
            wanted = expected_rows(qkv, plan, rows, tail=label != name)
            errors[label] = relative_error(run()[0, rows, 0], wanted)
        densities = dict.fromkeys(runs, float(plan.pairs().double().mean()) / case.tokens**2)
        for part, piece in parts_of(qkv, plan).items() if options.parts else ():
            runs[f"{name}: {part}"] = piece
        yield Group(runs=runs, errors=errors, bound=BOUND, densities=densities, to_dense={})


def write(bench: Bench, case: Case, times: Times, group: Group) -> None:
    """Write the rows of what was timed."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    densities = {FA3: 1.0, **group.densities}
    fa3_ms = medians.get(FA3, math.nan)

    def flop(name: str) -> float:
        # A part of a call with a tail is none that FLOP of pairs could be counted of.
        return 0.0 if ":" in name else case.flop * densities.get(name, DENSITY)

    def more(row: Row) -> Row:
        name = row["contender"]
        plain = name.partition(":")[0].partition(", tail")[0]
        return {
            "density": round(densities.get(name, math.nan), 4),
            "over_without_tail": round(medians[name] / medians.get(plain, math.nan), 4),
            "speedup_over_fa3": round(fa3_ms / medians[name], 3),
            "error_to_dense": float(f"{group.to_dense.get(name, math.nan):.3g}"),
        }

    bench.write(
        times,
        case,
        flop={name: flop(name) for name in times},
        flop_formula=FLOP,
        errors=group.errors,
        versions={FA3: version_of("fa3-fwd")},
        more=more,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--tiles", action="store_true", help="try other shapes of the tail")
    parser.add_argument("--parts", action="store_true", help="also time what a tail consists of")
    parser.add_argument(
        "--lists", default="", help="lists that this expression matches; ^$ for none"
    )
    parser.add_argument(
        "--layers", default="", help="layers that this expression matches; ^$ for none"
    )
    parser.add_argument("--block-ms", type=float, default=80.0, help="length of a timing (80)")
