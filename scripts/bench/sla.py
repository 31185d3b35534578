"""Sparse-Linear Attention: whole layers beside dense attention and the authors' operator.

With `--backward`, the backward passes alone are timed instead; the authors' operator may choose
other blocks there too, so gradients are compared loosely.

Sampled rows of every output are checked against float32 first; what is wrong is not timed, and
makes the script fail at the end.

    python3 scripts/bench/run.py sla --commit HASH [--only "sla bench"] [--rounds 7] [--backward]
    python3 scripts/bench/run.py sla --commit HASH --smoke    # tiny cases, on any machine
"""

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from _attention import DTYPE, FA3, Case, dense_run, layer_on
from _harness import DEVICE, Bench, Row, Run, extra_memory, relative_error, version_of
from torch import nn

from multimodal_gen.runtime.layers.attention.sparse.methods.sla import SLAConfig
from multimodal_gen.runtime.managers.forward_context import set_forward_context

BOUND = 8e-3
# Whole operators that centre the keys in another precision choose some blocks differently.
OWN_SELECTION = 0.5
Q_SIZE, KV_SIZE = 128, 64
SAMPLED_BLOCKS = 6
SAMPLED_HEADS = 2
# Blocks whose score is this close, in standard deviations, to the last one kept may be chosen
# either way, depending on the order of a sum.
MARGIN = 1e-3
FLOP = "4*H*D*kept pairs; blocks as of mean size"


@dataclass(frozen=True, kw_only=True)
class SLACase(Case):
    """One self-attention, and the share of key blocks that it keeps."""

    ratio: float

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        grid = "x".join(map(str, self.grid))
        return (
            f"B{self.batch} H{self.heads} {grid} S{self.tokens} D{self.head_size} bf16 "
            f"ratio {self.ratio}"
        )

    @property
    def blocks(self) -> int:
        """Key blocks."""
        return -(-self.tokens // KV_SIZE)

    @property
    def kept(self) -> int:
        """Key blocks that are kept."""
        return max(1, int(self.ratio * self.blocks + 1e-9))


CASES = (
    SLACase(name="sla bench", grid=(21, 30, 52), heads=16, ratio=0.05, batch=2),
    SLACase(name="sla bench", grid=(21, 30, 52), heads=16, ratio=0.1, batch=2),
    SLACase(name="hunyuan 30x48x80", grid=(30, 48, 80), heads=24, ratio=0.1),
    SLACase(name="wan 14B 21x45x80", grid=(21, 45, 80), heads=40, ratio=0.1),
    SLACase(name="wan 1.3B 21x30x52", grid=(21, 30, 52), heads=12, ratio=0.1),
)
SMOKE = (SLACase(name="smoke", grid=(5, 9, 13), heads=2, ratio=0.3, batch=2, head_size=32),)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is timed; `branch` is its linear branch: all, unselected, none, or dense."""

    branch: str
    run: Run
    version: str
    bound: float = BOUND


class Setting:
    """The tensors of a case: q, k and v [B, S, H, D] with the scales of trained models."""

    def __init__(self, case: SLACase) -> None:
        self.case = case
        generator = torch.Generator(DEVICE).manual_seed(0)
        shape = (case.batch, case.tokens, case.heads, case.head_size)
        draw = partial(torch.randn, device=DEVICE, generator=generator)
        # Blocks have means of their own, as neighbouring tokens do.
        coarse = (case.batch, -(-case.tokens // Q_SIZE), *shape[2:])
        self.qkv = tuple(
            (rms * draw(shape) + near * _stretched(draw(coarse), case.tokens)).to(DTYPE)
            for rms, near in ((1.0, 0.6), (1.0, 0.7), (1.5, 0.5))
        )
        self.projection = nn.Linear(case.head_size, case.head_size, device=DEVICE)
        nn.init.normal_(self.projection.weight, std=case.head_size**-0.5)
        self.projection.requires_grad_(False)

    def layer(self, branch: str) -> Callable[[], torch.Tensor]:
        """Return a call of a layer with a linear branch, or with none."""
        case = self.case
        config = SLAConfig(
            topk_ratio=case.ratio, linear_branch="unselected" if branch == "unselected" else "all"
        )
        layer = layer_on(case, "sla_attn", config, dtype=DTYPE)
        if branch != "none":
            layer.set_projection(self.projection)
        return partial(layer, *self.qkv)

    def contenders(self) -> Iterator[tuple[str, Contender]]:
        """Yield what can run here; dense attention first."""
        name, run, version = dense_run(self.qkv)
        yield name, Contender(branch="dense", run=run, version=version)
        for branch, name in (("all", "sla layer"), ("none", "sla layer, no projection"),
                             ("unselected", "sla layer, unselected")):  # fmt: skip
            version = version_of("triton")
            yield name, Contender(branch=branch, run=self.layer(branch), version=version)
        yield from self._upstream()

    def operator(self) -> nn.Module | None:
        """Return the authors' operator, which takes [B, H, S, D], where it can be imported."""
        try:
            package = importlib.import_module("sparse_linear_attention")
        except ImportError as error:
            print(f"left out: thu-ml/SLA, {error}", flush=True)
            return None
        module = package.SparseLinearAttention(
            self.case.head_size, topk=self.case.ratio, BLKQ=Q_SIZE, BLKK=KV_SIZE
        )
        module.proj_l = self.projection
        return module

    def _upstream(self) -> Iterator[tuple[str, Contender]]:
        """Yield the authors' operator, on tensors in its own layout."""
        module = self.operator()
        if module is None:
            return
        heads_first = [x.transpose(1, 2).contiguous() for x in self.qkv]
        yield (
            "thu-ml/SLA",
            Contender(
                branch="all",
                run=lambda: module(*heads_first).transpose(1, 2),
                version="git",
                bound=OWN_SELECTION,
            ),
        )


class Expected:
    """Rows of the definition in float32, of some query blocks of some heads of the first sample.

    Rows whose selection hangs on a rounding are left out.
    """

    def __init__(self, setting: Setting) -> None:
        case = setting.case
        blocks = -(-case.tokens // Q_SIZE)
        self.heads = slice(0, min(SAMPLED_HEADS, case.heads))
        self.rows: list[slice] = []
        self._outputs: dict[str, list[torch.Tensor]] = {}
        for i in range(0, blocks, max(1, blocks // SAMPLED_BLOCKS)):
            rows = slice(i * Q_SIZE, min((i + 1) * Q_SIZE, case.tokens))
            self.rows.append(rows)
            for branch, out in _definition(setting, rows, self.heads).items():
                self._outputs.setdefault(branch, []).append(out)

    def error(self, branch: str, out: torch.Tensor) -> float:
        """Return the relative error of an output [B, S, H, D] on the sampled rows."""
        found = torch.cat([out[0, rows, self.heads] for rows in self.rows])
        wanted = torch.cat(self._outputs[branch])
        known = wanted.isfinite().all(-1)
        return relative_error(found[known], wanted[known])


def _definition(setting: Setting, rows: slice, heads: slice) -> dict[str, torch.Tensor]:
    """Return the rows [R, H, D] of every kind of output; NaN where the selection is too close."""
    case = setting.case
    q, k, v = (x[0, :, heads].float().transpose(0, 1) for x in setting.qkv)
    dtype = setting.qkv[0].dtype
    blocks, kept = case.blocks, case.kept
    block = torch.arange(case.tokens, device=q.device) // KV_SIZE
    sums = torch.zeros(q.shape[0], blocks, case.head_size, device=q.device)
    sums.index_add_(1, block, k)
    means = sums / block.bincount(minlength=blocks).view(1, -1, 1) - k.mean(1, keepdim=True)
    pooled = q[:, rows].mean(1, keepdim=True).to(dtype).float()
    scores = (pooled @ means.to(dtype).float().mT)[:, 0]
    ordered, order = scores.sort(dim=-1, descending=True)
    close = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    if kept < blocks:
        close = ordered[:, kept - 1] - ordered[:, kept] <= MARGIN * scores.std(-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :kept], True)
    seen = chosen[:, block].unsqueeze(1)
    logits = q[:, rows] @ k.mT * case.head_size**-0.5
    sparse = logits.masked_fill(~seen, -math.inf).softmax(-1) @ v
    pairs = q[:, rows].softmax(-1) @ k.softmax(-1).mT
    outs = {"dense": logits.softmax(-1) @ v, "none": sparse}
    for branch, counted in (("all", torch.ones_like(seen)), ("unselected", ~seen)):
        weights = pairs * counted
        linear = weights @ v / (1e-5 + weights.sum(-1, keepdim=True))
        outs[branch] = sparse + setting.projection(linear)
    for branch in ("none", "all", "unselected"):
        outs[branch] = outs[branch].masked_fill(close.view(-1, 1, 1), math.nan)
    return {branch: out.transpose(0, 1) for branch, out in outs.items()}


def _stretched(coarse: torch.Tensor, tokens: int) -> torch.Tensor:
    """Repeat every entry for the tokens of its block."""
    return coarse.repeat_interleave(Q_SIZE, dim=1)[:, :tokens]


def measure(case: SLACase, bench: Bench) -> None:
    """Check, time and write a case, or its backward passes."""
    if bench.options.backward:
        measure_backward(case, bench)
        return
    setting = Setting(case)
    expected = Expected(setting)
    with set_forward_context(0, latent_grid=case.grid), torch.inference_mode():
        right, errors = bench.check(
            setting.contenders(),
            lambda name, contender: expected.error(contender.branch, contender.run()),
            lambda contender: contender.bound,
        )
        runs = {name: contender.run for name, contender in right.items()}
        times = bench.time(runs, block_ms=80.0)
        memory = {name: extra_memory(run) for name, run in runs.items()}
    fa3_ms = statistics.median(times.get(FA3, [math.nan]))
    densities = {
        name: 1.0 if contender.branch == "dense" else case.kept / case.blocks
        for name, contender in right.items()
    }

    def more(row: Row) -> Row:
        name = row["contender"]
        return {
            "density": round(densities[name], 5),
            "speedup_over_fa3": round(fa3_ms / row["median_ms"], 3),
            "extra_memory_share": round(memory[name], 4),
        }

    bench.write(
        times,
        case,
        case=f"{case.name} {case.ratio}",
        flop={name: case.flop * density for name, density in densities.items()},
        flop_formula=FLOP,
        errors=errors,
        versions={name: contender.version for name, contender in right.items()},
        group=lambda name: name,
        more=more,
    )


Gradients = Callable[[], tuple[torch.Tensor, ...]]


def backward_runs(setting: Setting) -> Iterator[tuple[str, str, Gradients, bool]]:
    """Yield name, version, what runs a backward pass alone, and whether it has heads first."""
    upstream = torch.randn_like(setting.qkv[0])
    weights = list(setting.projection.parameters())
    inputs = [*setting.qkv, *weights]
    for tensor in inputs:
        tensor.requires_grad_()
    out = setting.layer("all")()
    run = partial(torch.autograd.grad, out, inputs, upstream, retain_graph=True)
    yield "sla layer", version_of("triton"), run, False
    module = setting.operator()
    if module is not None:
        turned = [x.detach().transpose(1, 2).contiguous() for x in (*setting.qkv, upstream)]
        inputs = [*(x.requires_grad_() for x in turned[:3]), *weights]
        out = module(*turned[:3])
        run = partial(torch.autograd.grad, out, inputs, turned[3], retain_graph=True)
        yield "thu-ml/SLA", "git", run, True


def measure_backward(case: SLACase, bench: Bench) -> None:
    """Check, time and write the backward passes of a case."""
    first: list[tuple[torch.Tensor, ...]] = []

    def error_of(name: str, given: tuple[str, Gradients, bool]) -> float:
        _, run, heads_first = given
        found = run()
        if heads_first:
            found = (*(x.transpose(1, 2) for x in found[:3]), *found[3:])
        if not first:
            first.append(found)
        return max(relative_error(x, y) for x, y in zip(found, first[0], strict=True))

    torch.manual_seed(0)
    with set_forward_context(0, latent_grid=case.grid):
        contenders = ((name, given) for name, *given in backward_runs(Setting(case)))
        right, errors = bench.check(contenders, error_of, OWN_SELECTION)
    density = case.kept / case.blocks
    bench.write(
        bench.time({name: run for name, (_, run, _) in right.items()}, block_ms=80.0),
        benchmark="sla backward",
        case=f"{case.name} {case.ratio}",
        shape=case.shape,
        flop=2.5 * case.flop * density,
        flop_formula=FLOP.replace("4*", "10*"),
        errors=errors,
        versions={name: version for name, (version, *_) in right.items()},
        more=lambda row: {
            "density": round(density, 5),
            "speedup_over_fa3": math.nan,
            "extra_memory_share": math.nan,
        },
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--backward", action="store_true", help="time the backward passes")
