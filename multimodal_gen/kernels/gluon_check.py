"""The self-checks of the Gluon kernels and of cuDNN's: small calls, compared with a reference.

Each covers the kernels that are compiled from different code: one step of keys or several, query
blocks shared by consumers or one each, an exact softmax or a fixed reference, whole and cut blocks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeAlias

import torch

from multimodal_gen.kernels.block_sparse.api import RUN as BLOCK_SPARSE_KERNELS
from multimodal_gen.kernels.block_sparse.api import request_for
from multimodal_gen.kernels.block_sparse.call import Backward, Call, CallForm, TailCall
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks, empty_results
from multimodal_gen.kernels.block_sparse.reference import (
    attention_reference,
    attention_reference_backward,
)
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.tail import kept_map, pool_blocks
from multimodal_gen.kernels.block_sparse.tuning import (
    gluon_tail_tile,
    gluon_tile,
)
from multimodal_gen.kernels.cluster_attention.plan import TILE_ROWS, Groups, cluster_plan, cut
from multimodal_gen.kernels.quantized_attention.api import RUN as QUANTIZED_KERNELS
from multimodal_gen.kernels.quantized_attention.api import Call as QuantizedCall

# Yields what is wrong, or None, call by call.
_Check: TypeAlias = Callable[[torch.device], Iterator[str | None]]

HEADS, HEAD_SIZE = 2, 128
# Relative errors in the Frobenius norm. Roundings to 16 bits give 2e-3 to 3e-3, int8 scores about
# 3e-2 where keys have a direction in common, and e4m3 values about 4e-2; a kernel that is wrong is
# off by a multiple of each.
ROUNDED, INT8, E4M3 = 1e-2, 6e-2, 1.2e-1


def block_sparse(device: torch.device) -> str | None:
    """Return what the kernels of block-sparse attention, and of clusters, get wrong, or None."""
    return _first_fault(device, _blocks, _clusters)


def gradients(device: torch.device) -> str | None:
    """Return what the backward pass of block-sparse attention gets wrong, or None."""
    return _first_fault(device, _gradients)


def pooled_tail(device: torch.device) -> str | None:
    """Return what the kernel of the pooled tail gets wrong, or None."""
    return _first_fault(device, _means)


def quantized(device: torch.device) -> str | None:
    """Return what the kernels of 8-bit attention get wrong, or None."""
    return _first_fault(device, _eight_bits)


def cudnn(device: torch.device) -> str | None:
    """Return what cuDNN's kernels of block-sparse attention get wrong, or None."""
    with torch.cuda.device(device):
        return next(filter(None, _cudnn(device)), None)


def _first_fault(device: torch.device, *checks: _Check) -> str | None:
    """Return what the installed Gluon lacks, or the first thing that a check finds wrong."""
    from multimodal_gen.kernels.launch.compat import lacking

    names = list(lacking())
    if names:
        return f"its Gluon lacks {', '.join(names)}"
    with torch.cuda.device(device):
        return next((fault for check in checks for fault in check(device) if fault), None)


class _Case(NamedTuple):
    """A call that one of the tiles of `gluon_tile` serves."""

    q_size: int
    kv_size: int
    fast: bool
    head_size: int = HEAD_SIZE
    regular: bool = True
    row_bits: bool = False
    skips: bool = False

    def __str__(self) -> str:
        return f"blocks of {self.q_size} and {self.kv_size}, {'fast' if self.fast else 'exact'}"


# One for every tile, and one for every form of keys.
_CASES = (
    _Case(384, 384, True),
    _Case(384, 384, False),
    _Case(192, 64, True, row_bits=True),
    _Case(128, 128, True),
    _Case(128, 128, False),
    _Case(128, 64, True, head_size=64),
    _Case(128, 64, False, regular=False),
    _Case(64, 64, True),
    _Case(64, 64, False, skips=True),
)
# Steps whose weights are below a millionth change nothing that is seen.
_SKIPPED_BELOW = 60.0


def _blocks(device: torch.device) -> Iterator[str | None]:
    from multimodal_gen.kernels.block_sparse.gluon_kernel import prepare

    for case in _CASES:
        plan = _plan(case.q_size, case.kv_size, device, regular=case.regular)
        if case.row_bits:
            bits = (1, HEADS, plan.q.total, 1)
            generator = torch.Generator(device).manual_seed(1)
            drawn = torch.randint(0, 2**31 - 1, bits, generator=generator, device=device)
            plan = replace(plan, row_bits=drawn.int())
        q, k, v = _inputs(
            plan, torch.bfloat16 if case.fast else torch.float16, head_size=case.head_size
        )
        # Far above what the fast variant takes for its reference, so that it computes some anew.
        k[:, case.kv_size : 2 * case.kv_size, 1] *= 40
        tile = gluon_tile(
            q_size=case.q_size,
            kv_size=case.kv_size,
            regular=case.regular,
            fast=case.fast,
            deterministic=False,
            row_bits=case.row_bits,
            skips=case.skips,
        )
        skip = Skip(below=_SKIPPED_BELOW) if case.skips else None
        call = _call(q, k, v, plan)._replace(skip=skip)
        out, _ = empty_results(q, plan, False)
        prepare(call, out, None, tile=tile)(call, out, None)
        yield _fault(str(case), out, (q, k, v), plan, ROUNDED)


def _cudnn(device: torch.device) -> Iterator[str | None]:
    for size, dtype, head_size in (
        (64, torch.bfloat16, 128),
        (128, torch.bfloat16, 128),
        (128, torch.float16, 96),
        (128, torch.bfloat16, 64),
    ):
        plan = _plan(size, size, device)
        plan.counts[..., 1].fill_(0)
        q, k, v = _inputs(plan, dtype, head_size=head_size)
        call = _call(q, k, v, plan)
        out, lse = BLOCK_SPARSE_KERNELS["cudnn"](call)
        assert lse is not None, "it was asked for"
        q, k, v = (x.double() for x in (q, k, v))
        exact, exact_lse = attention_reference(q, k, v, plan, scale=call.scale)
        name = f"blocks of {size} with heads of {head_size}"
        yield _off(name, out, exact, ROUNDED)
        # Rows without keys are to be told from others, far below these.
        sums, exact_sums = (x.nan_to_num(neginf=-10.0) for x in (lse, exact_lse))
        yield _off(f"log-sum-exp of {name}", sums, exact_sums, ROUNDED)


def _gradients(device: torch.device) -> Iterator[str | None]:
    from multimodal_gen.kernels.block_sparse import gluon_backward_kernel, gluon_fused_kernel

    for size in (384, 128, 64):
        plan, scale = _plan(size, size, device), HEAD_SIZE**-0.5
        q, k, v = _inputs(plan)
        out, lse = BLOCK_SPARSE_KERNELS["gluon"](_call(q, k, v, plan, backward=True))
        assert lse is not None, "it was asked for"
        grad_out = out.flip(1).contiguous()  # as good as any
        call = Backward(q, k, v, plan, out, lse, grad_out, None, scale)
        found = [gluon_backward_kernel.attend_backward(call)]
        if size % 128 == 0:  # it takes whole blocks
            found.append(gluon_fused_kernel.attend_backward(call))
        q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
        exact_out, exact_lse = attention_reference(q, k, v, plan, scale=scale)
        of_exact = Backward(q, k, v, plan, exact_out, exact_lse, grad_out, None, scale)
        exact = attention_reference_backward(of_exact)
        for of_kernel in found:
            for name, x, wanted in zip("qkv", of_kernel, exact, strict=True):
                yield _off(f"gradients of {name} over blocks of {size}", x, wanted, ROUNDED)


def _eight_bits(device: torch.device) -> Iterator[str | None]:
    blocks = ((128, 128), (128, 64), (64, 128), (64, 64))
    for (size, keys), e4m3 in product(blocks, (False, True)):
        plan = _plan(size, keys, device)
        q, k, v = _inputs(plan)
        _share(q[:, :, 1], k[:, 2 * keys : 3 * keys, 1])
        form = _call(q, k, v, plan).form
        call = QuantizedCall(q, k, v, plan, HEAD_SIZE**-0.5, False, e4m3, None, form)
        out, _ = QUANTIZED_KERNELS["gluon"](call)
        name = f"blocks of {size} and {keys} with values in {'e4m3' if e4m3 else '16 bits'}"
        yield _fault(name, out, (q, k, v), plan, E4M3 if e4m3 else INT8)


def _share(q: torch.Tensor, k: torch.Tensor) -> None:
    """Let scores be some 80 bits above those of other keys, so that a fast variant redoes rows.

    A direction that rows and keys share costs int8 little, where larger keys would cost it much.
    """
    generator = torch.Generator(k.device).manual_seed(2)
    shared = torch.randn(k.shape[-1], generator=generator, device=k.device).sign()
    q += (2.2 * shared).to(q.dtype)
    k += (2.2 * shared).to(k.dtype)


def _clusters(device: torch.device) -> Iterator[str | None]:
    from multimodal_gen.kernels.cluster_attention.cluster_attention_kernel import attend

    counts = torch.tensor([200, 3, 120, 77], dtype=torch.int32, device=device)
    counts = counts.expand(1, HEADS, -1).contiguous()
    total = 400
    order = torch.arange(total, dtype=torch.int32, device=device).expand(1, HEADS, -1)
    starts = counts.cumsum(2, dtype=torch.int32) - counts
    side = Groups(order=order, starts=starts, counts=counts)
    mask = torch.ones(1, HEADS, 4, 4, dtype=torch.bool, device=device).tril(1)
    plan = cluster_plan(side, side, mask)
    q, k, v = _inputs(plan)
    pieces = cut(side, TILE_ROWS, multiple=TILE_ROWS // 3)
    out, _ = attend(q, k, v, pieces, side, mask, scale=HEAD_SIZE**-0.5)
    yield _fault("clusters", out, (q, k, v), plan, ROUNDED)


def _means(device: torch.device) -> Iterator[str | None]:
    """Check blocks of equal tokens, which their means stand for exactly."""
    from multimodal_gen.kernels.block_sparse import gluon_tail_kernel

    # More means than the ring of the kernel holds.
    rows, keys = Blocks.regular(232, 64), Blocks.regular(250 * 64 + 40, 64)
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, HEADS, rows.num, keys.num)
    mask = torch.rand(shape, generator=generator, device=device) < 0.1
    plan = BlockPlan.from_map(mask, rows, keys)
    q, k, v = _inputs(plan)
    block = torch.arange(plan.kv.total, device=device) // 64
    k, v = k[:, block], v[:, block]
    out, lse = BLOCK_SPARSE_KERNELS["gluon"](_call(q, k, v, plan))
    assert lse is not None, "it was asked for"
    pooled, kept = pool_blocks(k, v, plan.kv, plan.kv.num), kept_map(plan, plan.kv.num)
    call = TailCall(out, lse, q, pooled, kept, plan.q, HEAD_SIZE**-0.5)
    gluon_tail_kernel.add_tail(call, tile=gluon_tail_tile())
    every = BlockPlan.dense(plan.q, plan.kv, device)
    yield _fault("means of blocks of 64", out, (q, k, v), every, ROUNDED)


def _plan(size: int, keys: int, device: torch.device, *, regular: bool = True) -> BlockPlan:
    """Return a plan of a few blocks, the last one cut, of which a row keeps from one to all."""
    total = 3 * max(size, keys) + 40
    q, kv = Blocks.regular(total, size), Blocks.regular(total, keys)
    if not regular:
        lengths = torch.tensor([keys, keys // 2, 3, keys - 1] * kv.num, device=device)[: kv.num]
        starts = lengths.cumsum(0) - lengths
        kv = Blocks.ragged(starts.int(), lengths.int(), total=int(lengths.sum()), size=keys)
    mask = torch.ones(1, HEADS, q.num, kv.num, dtype=torch.bool, device=device).tril(kv.num - 4)
    return BlockPlan.from_map(mask, q, kv)


def _inputs(
    plan: BlockPlan, dtype: torch.dtype = torch.bfloat16, *, head_size: int = HEAD_SIZE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = plan.device
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, total, HEADS, head_size, generator=generator, device=device).to(dtype)
        for total in (plan.q.total, plan.kv.total, plan.kv.total)
    )
    return q, k, v


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, *, backward: bool = False
) -> Call:
    form = CallForm(request_for(q, k, v, plan, backward=backward))
    return Call(q, k, v, plan, q.shape[3] ** -0.5, True, False, form)


def _fault(
    name: str,
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    plan: BlockPlan,
    most: float,
) -> str | None:
    q, k, v = (x.double() for x in inputs)
    exact, _ = attention_reference(q, k, v, plan, scale=q.shape[3] ** -0.5)
    return _off(name, out, exact, most)


def _off(name: str, out: torch.Tensor, exact: torch.Tensor, most: float) -> str | None:
    error = float((out.double() - exact).norm() / exact.norm())
    # A comparison with what is not a number is false.
    if error <= most:
        return None
    said = f"{error:.3g}" if math.isfinite(error) else "not finite"
    return f"relative error {said} at {name}, {most} at most is expected"
