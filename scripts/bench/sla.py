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
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from _harness import (
    DEVICE,
    Row,
    extra_memory,
    interleave,
    relative_error,
    rows_of,
    version_of,
    write_rows,
)
from torch import nn
from torch.nn import functional as F

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import SLAConfig
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

Grid = tuple[int, int, int]

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
class Case:
    """One self-attention, and the share of key blocks that it keeps."""

    name: str
    grid: Grid
    heads: int
    ratio: float
    batch: int = 1
    head_size: int = 128

    @property
    def tokens(self) -> int:
        """S."""
        return math.prod(self.grid)

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        grid = "x".join(map(str, self.grid))
        return (
            f"B{self.batch} H{self.heads} {grid} S{self.tokens} D{self.head_size} bf16 "
            f"ratio {self.ratio}"
        )


CASES = (
    Case(name="sla bench", grid=(21, 30, 52), heads=16, ratio=0.05, batch=2),
    Case(name="sla bench", grid=(21, 30, 52), heads=16, ratio=0.1, batch=2),
    Case(name="hunyuan 30x48x80", grid=(30, 48, 80), heads=24, ratio=0.1),
    Case(name="wan 14B 21x45x80", grid=(21, 45, 80), heads=40, ratio=0.1),
    Case(name="wan 1.3B 21x30x52", grid=(21, 30, 52), heads=12, ratio=0.1),
)
SMOKE = (Case(name="smoke", grid=(5, 9, 13), heads=2, ratio=0.3, batch=2, head_size=32),)


@dataclass(frozen=True, kw_only=True)
class SLARow(Row):
    """One line of `sla.csv`.

    Attributes:
        density: share of the token pairs that are attended to exactly.
        speedup_over_fa3: time of FlashAttention 3, dense on the same tensors, over this one.
        extra_memory_share: peak memory beyond inputs and output, over inputs and output.
    """

    density: float
    speedup_over_fa3: float
    extra_memory_share: float


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is timed; `branch` is its linear branch: all, unselected, none, or dense."""

    branch: str
    run: Callable[[], torch.Tensor]
    version: str
    bound: float = BOUND


class Setting:
    """The tensors of a case: q, k and v [B, S, H, D] with the scales of trained models."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator(DEVICE).manual_seed(0)
        shape = (case.batch, case.tokens, case.heads, case.head_size)
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        draw = partial(torch.randn, device=DEVICE, generator=generator)
        # Blocks have means of their own, as neighbouring tokens do.
        coarse = (case.batch, -(-case.tokens // Q_SIZE), *shape[2:])
        self.qkv = tuple(
            (rms * draw(shape) + near * _stretched(draw(coarse), case.tokens)).to(dtype)
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
        asked = BackendPreference(
            source=Source.SETTINGS, backend=AttentionBackendEnum.SLA_ATTN, config=config
        )
        layer = LocalAttention(
            case.heads,
            case.head_size,
            compute_dtype=self.qkv[0].dtype,
            site=LayerSite(name="blocks.0.attn1", layer=0),
            scope=SelectionScope(default=asked, strict=True),
        )
        if branch != "none":
            layer.set_projection(self.projection)
        return partial(layer, *self.qkv)

    def contenders(self) -> Iterator[tuple[str, Contender]]:
        """Yield what can run here; dense attention first."""
        if DEVICE == "cuda":
            fa3 = importlib.import_module("fa3_fwd_interface").flash_attn_func
            run = partial(_first, fa3, *self.qkv)
            version = version_of("fa3-fwd")
            yield "fa3 dense", Contender(branch="dense", run=run, version=version)
        else:
            run = partial(_sdpa, *self.qkv)
            version = version_of("torch")
            yield "sdpa dense", Contender(branch="dense", run=run, version=version)
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

    def expected(self) -> "Expected":
        """Return sampled rows of the definition."""
        return Expected(self)


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
    blocks = -(-case.tokens // KV_SIZE)
    block = torch.arange(case.tokens, device=q.device) // KV_SIZE
    kept = max(1, int(case.ratio * blocks + 1e-9))
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


def _first(function: Callable[..., object], *inputs: torch.Tensor) -> torch.Tensor:
    out = function(*inputs)
    return out[0] if isinstance(out, tuple) else out


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def measure(case: Case, rounds: int, commit: str) -> tuple[list[SLARow], list[str]]:
    """Check and time a case; returns its rows, and the names of what is wrong."""
    setting = Setting(case)
    expected = setting.expected()
    right: dict[str, Contender] = {}
    errors, wrong = {}, []
    with set_forward_context(0, latent_grid=case.grid), torch.inference_mode():
        for name, contender in setting.contenders():
            errors[name] = expected.error(contender.branch, contender.run())
            if errors[name] < contender.bound:
                right[name] = contender
            else:
                print(f"WRONG {name}: relative error {errors[name]:.2e}", flush=True)
                wrong.append(name)
        runs = {name: contender.run for name, contender in right.items()}
        times = interleave(runs, rounds=rounds, block_ms=80.0 if DEVICE == "cuda" else 0.0)
        memory = {name: extra_memory(run) for name, run in runs.items()}
    dense = statistics.median(times[next(iter(times))])
    blocks = -(-case.tokens // KV_SIZE)
    rows = []
    for name, contender in right.items():
        density = 1.0
        if contender.branch != "dense":
            density = max(1, int(case.ratio * blocks + 1e-9)) / blocks
        (row,) = rows_of(
            {name: times[name]},
            commit=commit,
            benchmark="sla",
            case=f"{case.name} {case.ratio}",
            shape=case.shape,
            flop=4.0 * case.batch * case.heads * case.head_size * case.tokens**2 * density,
            flop_formula=FLOP,
            errors=errors,
            versions={name: contender.version},
        )
        rows.append(
            SLARow(
                **asdict(row),
                density=round(density, 5),
                speedup_over_fa3=round(dense / row.median_ms, 3),
                extra_memory_share=round(memory[name], 4),
            )
        )
    return rows, wrong


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


def measure_backward(case: Case, rounds: int, commit: str) -> tuple[list[SLARow], list[str]]:
    """Time the backward passes of a case; returns its rows, and the names of what is wrong."""
    runs: dict[str, Gradients] = {}
    errors, wrong, versions = {}, [], {}
    first: tuple[torch.Tensor, ...] = ()
    torch.manual_seed(0)
    with set_forward_context(0, latent_grid=case.grid):
        for name, version, run, heads_first in backward_runs(Setting(case)):
            found = run()
            if heads_first:
                found = (*(x.transpose(1, 2) for x in found[:3]), *found[3:])
            first = first or found
            errors[name] = max(relative_error(x, y) for x, y in zip(found, first, strict=True))
            if errors[name] < OWN_SELECTION:
                runs[name], versions[name] = run, version
            else:
                print(f"WRONG {name}: {errors[name]:.2e} from the layer's gradients", flush=True)
                wrong.append(name)
    times = interleave(runs, rounds=rounds, block_ms=80.0 if DEVICE == "cuda" else 0.0)
    blocks = -(-case.tokens // KV_SIZE)
    density = max(1, int(case.ratio * blocks + 1e-9)) / blocks
    rows = rows_of(
        times,
        commit=commit,
        benchmark="sla backward",
        case=f"{case.name} {case.ratio}",
        shape=case.shape,
        flop=10.0 * case.batch * case.heads * case.head_size * case.tokens**2 * density,
        flop_formula=FLOP.replace("4*", "10*"),
        errors=errors,
        versions=versions,
    )
    nothing = {"speedup_over_fa3": math.nan, "extra_memory_share": math.nan}
    return [SLARow(**asdict(row), density=round(density, 5), **nothing) for row in rows], wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--backward", action="store_true", help="time the backward passes")


def main(options: argparse.Namespace) -> int:
    """Run the command line; 1 if anything is wrong."""
    timed = measure_backward if options.backward else measure
    failed = []
    for case in SMOKE if options.smoke else CASES:
        if options.only not in case.name:
            continue
        rows, wrong = timed(case, options.rounds, options.commit)
        write_rows(options.out / "sla.csv", rows)
        failed += [f"{case.name}: {name}" for name in wrong]
    if failed:
        print(f"wrong: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
