"""The self-checks of the Gluon kernels: small calls, compared with what they should give.

Each covers the kernels that are compiled from different code: one step of keys or several, query
blocks shared by consumers or one each, an exact softmax or a fixed reference, whole and cut blocks.
"""

import math

import torch

from multimodal_gen.kernels.block_sparse.api import RUN as BLOCK_SPARSE_KERNELS
from multimodal_gen.kernels.block_sparse.api import Call, CallForm, request_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.reference import (
    attention_reference,
    attention_reference_backward,
)
from multimodal_gen.kernels.block_sparse.tail import kept_map, pool_blocks
from multimodal_gen.kernels.block_sparse.tuning import gluon_backward_tile, gluon_tail_tile
from multimodal_gen.kernels.cluster_attention.plan import TILE_ROWS, Groups, cluster_plan, cut
from multimodal_gen.kernels.quantized_attention.api import RUN as QUANTIZED_KERNELS
from multimodal_gen.kernels.quantized_attention.api import Call as QuantizedCall

__all__ = ["block_sparse", "gradients", "pooled_tail", "quantized"]

HEADS, HEAD_SIZE = 2, 128
# Relative errors in the Frobenius norm. Roundings to 16 bits give 2e-3 to 3e-3, int8 scores about
# 1.5e-2 and e4m3 values about 4e-2; a kernel that is wrong is off by a multiple of each.
ROUNDED, INT8, E4M3 = 1e-2, 4e-2, 1e-1


def block_sparse(device: torch.device) -> str | None:
    """Return what the kernels of block-sparse attention, and of clusters, get wrong, or None."""
    lacks = _lacking()
    if lacks is not None:
        return lacks
    with torch.cuda.device(device):
        return _regular_blocks(device) or _clusters(device)


def gradients(device: torch.device) -> str | None:
    """Return what the backward pass of block-sparse attention gets wrong, or None."""
    lacks = _lacking()
    if lacks is not None:
        return lacks
    with torch.cuda.device(device):
        return _gradients(device)


def pooled_tail(device: torch.device) -> str | None:
    """Return what the kernel of the pooled tail gets wrong, or None."""
    lacks = _lacking()
    if lacks is not None:
        return lacks
    with torch.cuda.device(device):
        return _means(device)


def quantized(device: torch.device) -> str | None:
    """Return what the kernels of 8-bit attention get wrong, or None."""
    lacks = _lacking()
    if lacks is not None:
        return lacks
    with torch.cuda.device(device):
        return _eight_bits(device)


def _lacking() -> str | None:
    from multimodal_gen.kernels.gluon_compat import lacking

    names = lacking()
    return f"its Gluon lacks {', '.join(names)}" if names else None


def _regular_blocks(device: torch.device) -> str | None:
    for size, keys, dtype in (
        (384, 384, torch.bfloat16),
        (128, 128, torch.bfloat16),
        (128, 128, torch.float16),
        (64, 64, torch.bfloat16),
        (64, 64, torch.float16),
    ):
        plan = _plan(size, keys, device)
        q, k, v = _inputs(plan.q.total, dtype, device)
        form = CallForm(request_for(q, k, v, plan, backward=False))
        call = Call(q, k, v, plan, HEAD_SIZE**-0.5, False, False, form)
        out, _ = BLOCK_SPARSE_KERNELS["gluon"](call)
        fault = _fault(f"blocks of {size} in {dtype}", out, (q, k, v), plan, ROUNDED)
        if fault is not None:
            return fault
    return None


def _gradients(device: torch.device) -> str | None:
    from multimodal_gen.kernels.block_sparse import gluon_backward_kernel, gluon_fused_kernel

    for size in (384, 128, 64):
        plan, scale = _plan(size, size, device), HEAD_SIZE**-0.5
        q, k, v = _inputs(plan.q.total, torch.bfloat16, device)
        form = CallForm(request_for(q, k, v, plan, backward=True))
        out, lse = BLOCK_SPARSE_KERNELS["gluon"](Call(q, k, v, plan, scale, True, False, form))
        assert lse is not None, "it was asked for"
        grad_out = out.flip(1).contiguous()  # as good as any
        tiles = (gluon_backward_tile(block=plan.q.size), gluon_backward_tile(block=plan.kv.size))
        given = (q, k, v, plan, out, lse, grad_out, None)
        found = [gluon_backward_kernel.attend_backward(*given, scale=scale, tiles=tiles)]
        if gluon_fused_kernel.serves(plan, HEAD_SIZE):
            found.append(gluon_fused_kernel.attend_backward(*given, scale=scale))
        q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
        exact_out, exact_lse = attention_reference(q, k, v, plan, scale=scale)
        exact = attention_reference_backward(
            grad_out, None, q, k, v, exact_out, exact_lse, plan, scale=scale
        )
        for of_kernel in found:
            for name, x, wanted in zip("qkv", of_kernel, exact, strict=True):
                fault = _off(f"gradients of {name} over blocks of {size}", x, wanted, ROUNDED)
                if fault is not None:
                    return fault
    return None


def _eight_bits(device: torch.device) -> str | None:
    for size, keys, e4m3 in ((128, 128, False), (128, 128, True), (64, 64, False)):
        plan = _plan(size, keys, device)
        q, k, v = _inputs(plan.q.total, torch.bfloat16, device)
        call = QuantizedCall(q, k, v, plan, HEAD_SIZE**-0.5, False, e4m3, None)
        out, _ = QUANTIZED_KERNELS["gluon"](call)
        name = f"blocks of {size} with values in {'e4m3' if e4m3 else '16 bits'}"
        fault = _fault(name, out, (q, k, v), plan, E4M3 if e4m3 else INT8)
        if fault is not None:
            return fault
    return None


def _clusters(device: torch.device) -> str | None:
    from multimodal_gen.kernels.cluster_attention.cluster_attention_kernel import attend

    counts = torch.tensor([200, 3, 120, 77], dtype=torch.int32, device=device)
    counts = counts.expand(1, HEADS, -1).contiguous()
    total = 400
    order = torch.arange(total, dtype=torch.int32, device=device).expand(1, HEADS, -1)
    starts = counts.cumsum(2, dtype=torch.int32) - counts
    side = Groups(order=order, starts=starts, counts=counts)
    keep = torch.ones(1, HEADS, 4, 4, dtype=torch.bool, device=device).tril(1)
    q, k, v = _inputs(total, torch.bfloat16, device)
    pieces = cut(side, TILE_ROWS, multiple=TILE_ROWS // 3)
    out, _ = attend(q, k, v, pieces, side, keep, scale=HEAD_SIZE**-0.5)
    return _fault("clusters", out, (q, k, v), cluster_plan(side, side, keep), ROUNDED)


def _means(device: torch.device) -> str | None:
    """Check blocks of equal tokens, which their means stand for exactly."""
    from multimodal_gen.kernels.block_sparse import gluon_tail_kernel

    plan = _plan(64, 64, device)
    q, k, v = _inputs(plan.q.total, torch.bfloat16, device)
    block = torch.arange(plan.kv.total, device=device) // 64
    k, v = k[:, block], v[:, block]
    form = CallForm(request_for(q, k, v, plan, backward=False))
    given = Call(q, k, v, plan, HEAD_SIZE**-0.5, True, False, form)
    out, lse = BLOCK_SPARSE_KERNELS["gluon"](given)
    assert lse is not None, "it was asked for"
    pooled, kept = pool_blocks(k, v, plan.kv, plan.kv.num), kept_map(plan, plan.kv.num)
    gluon_tail_kernel.add_tail(
        out, lse, q, pooled.keys, pooled.values, pooled.counts, kept, plan.q,
        scale=HEAD_SIZE**-0.5, tile=gluon_tail_tile(),
    )  # fmt: skip
    every = BlockPlan.dense(plan.q, plan.kv, device)
    return _fault("means of blocks of 64", out, (q, k, v), every, ROUNDED)


def _plan(size: int, keys: int, device: torch.device) -> BlockPlan:
    """Return a plan of four blocks, the last one cut, of which a row keeps from one to four."""
    total = 3 * max(size, keys) + 40
    q, kv = Blocks.regular(total, size), Blocks.regular(total, keys)
    keep = torch.ones(1, HEADS, q.num, kv.num, dtype=torch.bool, device=device).tril(kv.num - 4)
    return BlockPlan.from_map(keep, q, kv)


def _inputs(total: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, total, HEADS, HEAD_SIZE)
    return tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))


def _fault(
    name: str,
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    plan: BlockPlan,
    most: float,
) -> str | None:
    q, k, v = (x.double() for x in inputs)
    exact, _ = attention_reference(q, k, v, plan, scale=HEAD_SIZE**-0.5)
    return _off(name, out, exact, most)


def _off(name: str, out: torch.Tensor, exact: torch.Tensor, most: float) -> str | None:
    error = float((out.double() - exact).norm() / exact.norm())
    # A comparison with what is not a number is false.
    if error <= most:
        return None
    said = f"{error:.3g}" if math.isfinite(error) else "not finite"
    return f"relative error {said} at {name}, {most} at most is expected"
