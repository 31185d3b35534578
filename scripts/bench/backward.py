"""Forward and backward of the engine, dense and over random lists, against torch and others.

Peers that are not installed, flash-attn-4, fastvideo-kernel and nvidia-cudnn-frontend with CuTe
DSL, are left out with a word.

Gradients of one head are checked first, against float64 by the definition: they may err at most
twice as much as plain PyTorch code in bfloat16 does. What is wrong is not timed, and makes the
script fail at the end. `engine` times the kernels of the backward pass alone, in other shapes.

    python3 scripts/bench/run.py backward --commit HASH [--only wan] [--quick]
    python3 scripts/bench/run.py backward --commit HASH --against CHECKOUT    # see _against.py
    python3 scripts/bench/run.py backward --commit HASH --smoke    # a tiny case, on any machine
"""

import argparse
import importlib
from dataclasses import dataclass
from functools import partial

import _block_sparse_peers as sparse_peers
import torch
from _attention import Attend, Case, first_of, random_lists, sdpa
from _block_sparse_peers import kept_blocks
from _harness import DEVICE, Bench, Run, relative_error, version_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks

DENSITY = 0.1
CHUNK = 1024


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
        version: of the package it comes from.
        heads_first: whether it takes and returns [B, H, S, D].
    """

    attend: Attend
    version: str = ""
    heads_first: bool = False


def lists_of(case: Case, blocks: str) -> BlockPlan:
    """Return the plan that contenders call "dense", as the backend makes it, "128x128", "64x64"."""
    if blocks == "dense":
        whole = Blocks.regular(case.tokens, 384)
        return BlockPlan.dense(whole, whole, DEVICE)
    return random_lists(case.tokens, case.heads, int(blocks.split("x")[0]), share=DENSITY)


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
    return Contender(attend=lambda q, k, v: block_sparse_attention(q, k, v, plan))


def torchs_own(backend: SDPBackend, plan: BlockPlan) -> Contender:
    """Return one of the kernels of `scaled_dot_product_attention`, which is dense."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return Contender(attend=attend, version=version_of("torch"))


def flash_attention_4(plan: BlockPlan) -> Contender:
    """Return flash-attn-4's attention, dense or over lists, with their transposes for its back.

    Its last tiles may be short, which it calls masked.
    """
    from multimodal_gen.kernels.block_sparse.backward_kernel import transposed
    from multimodal_gen.kernels.block_sparse.fa4 import make_lists

    function = importlib.import_module("flash_attn.cute").flash_attn_func
    options = {}
    if plan.q.size == 128:
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
        options = {
            "pack_gqa": False,
            "block_sparse_tensors": by_query,
            "block_sparse_tensors_bwd": by_key,
        }
    return Contender(
        attend=lambda q, k, v: first_of(function(q, k, v, **options)),
        version=version_of("flash-attn-4"),
    )


def fastvideo(plan: BlockPlan) -> Contender:
    """Return fastvideo-kernel's attention over a map of blocks of 64."""
    function = importlib.import_module("fastvideo_kernel.block_sparse_attn").block_sparse_attn
    keep = kept_blocks(plan)
    sizes = torch.full((plan.kv.num,), plan.kv.size, dtype=torch.int32, device=DEVICE)
    if plan.kv.total % plan.kv.size:
        raise ValueError(f"it takes whole blocks of {plan.kv.size}, got {plan.kv.total} tokens")
    return Contender(
        attend=lambda q, k, v: function(q, k, v, keep, sizes)[0],
        version=version_of("fastvideo-kernel"),
        heads_first=True,
    )


def cudnn(plan: BlockPlan) -> Contender:
    """Return cuDNN's block-sparse attention."""
    return Contender(
        attend=sparse_peers.cudnn(plan),
        version=version_of("nvidia-cudnn-frontend"),
        heads_first=True,
    )


def flex(plan: BlockPlan) -> Contender:
    """Return FlexAttention over the lists of a plan."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    keep = kept_blocks(plan)
    counts = keep.sum(-1, dtype=torch.int32)
    indices = keep.byte().argsort(dim=-1, descending=True, stable=True).int()
    size = plan.q.size
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        indices,
        counts,
        indices,
        BLOCK_SIZE=size,
        mask_mod=lambda b, h, i, j: keep[0, h, i // size, j // size],
        seq_lengths=(plan.q.total, plan.kv.total),
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads_first, block_mask=mask).transpose(1, 2)

    return Contender(attend=attend, version=version_of("torch"))


# Name, whose end is the pairs that are kept -> what makes it.
OURS = {f"engine {blocks}": engine for blocks in ("dense", "128x128", "64x64")}
ON_CPU = {**OURS, "sdpa dense": partial(torchs_own, SDPBackend.MATH)}
ON_GPU = {
    **OURS,
    "cudnn dense": partial(torchs_own, SDPBackend.CUDNN_ATTENTION),
    "flash dense": partial(torchs_own, SDPBackend.FLASH_ATTENTION),
    "fa4 dense": flash_attention_4,
    "fa4 128x128": flash_attention_4,
    "cudnn 128x128": cudnn,
    "cudnn 64x64": cudnn,
    "fastvideo 64x64": fastvideo,
}
SLOW = {"flex 128x128": flex, "flex 64x64": flex}  # compile for long


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
    makers = ON_CPU if DEVICE == "cpu" else ON_GPU | ({} if bench.options.quick else SLOW)
    plans = {blocks: lists_of(case, blocks) for blocks in ("dense", "128x128", "64x64")}
    runs: dict[str, dict[str, Run]] = {"forward": {}, "backward": {}}
    errors, flops, versions = {}, {}, {}
    for name, make in makers.items():
        plan = plans[name.rpartition(" ")[2]]
        try:
            contender = make(plan)
        except Exception as error:  # a broken package fails in many ways
            print(f"left out of {case.name}: {name}, {type(error).__name__}: {error}", flush=True)
            continue
        try:
            taken, above = (heads_first, turned[3]) if contender.heads_first else (inputs, upstream)
            out = contender.attend(*taken)
            run = partial(torch.autograd.grad, out, taken, above, retain_graph=True)
            found = run()
            if contender.heads_first:
                found = tuple(x.transpose(1, 2) for x in found)
            errors[name], excess = errors_of(found, inputs, upstream, plan)
        except Exception as error:  # one contender must not end the others
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            bench.wrong += [name] if name in OURS else []
            continue
        if not excess <= 1:
            print(f"WRONG {name}: error {errors[name]:.2e}, {excess:.2f} of what is allowed")
            bench.wrong.append(name)
            continue
        runs["forward"][name], runs["backward"][name] = partial(contender.attend, *taken), run
        pairs = plan.pairs().double().mean()
        flops[name], versions[name] = float(pairs) * case.heads * case.head_size, contender.version
    for kind, factor in (("forward", 4), ("backward", 10)):
        print(f"-- {case.name}, {kind}")
        bench.write(
            bench.time(runs[kind], block_ms=80.0),
            case,
            benchmark=f"backward: {kind}",
            flop={name: factor * flop for name, flop in flops.items()},
            flop_formula=f"{factor}*H*D*kept pairs",
            errors=errors,
            versions=versions,
            # Contenders differ in what they compute, by the end of their names.
            group=lambda name: name.rpartition(" ")[2],
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--quick", action="store_true", help="leave out what compiles for long")
