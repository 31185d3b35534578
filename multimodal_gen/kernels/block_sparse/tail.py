"""The pooled tail: blocks that a row does not keep count through the means of their tokens.

`block_sparse_attention(..., tail=PooledTail())` computes both parts. Where they are computed apart,
as in a ring, `pool_blocks` makes the means and `add_tail` goes on with the softmax of what was
attended to exactly. tail_reference.py has the definition.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size, Nq and N blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.call import PooledBlocks, TailCall
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tail_reference import (
    add_tail_reference,
    pool_blocks_reference,
    slope_of,
)
from multimodal_gen.kernels.block_sparse.tuning import gluon_tail_tile, tail_tile
from multimodal_gen.kernels.engine import (
    AUTO,
    MAP_LISTS,
    POOLED_TAIL,
    KernelChoice,
    Request,
    choose,
    choose_for,
    kernel_name,
    records_gradient,
    serves,
)
from multimodal_gen.kernels.select.api import pool_tiles
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.tensors import loadable, place_of, unit_stride


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PooledTail:
    """Let the blocks that a row does not keep take part in its softmax by their means.

    Attributes:
        num_blocks: the first so many key blocks of the plan do; those behind them, such as text,
            are kept or dropped by the lists alone. None for all.
        first_order: whether values follow keys inside of blocks, by one matrix per head.
        pooled: the means, where they are known; of `num_blocks` blocks.
    """

    num_blocks: int | None = None
    first_order: bool = False
    pooled: PooledBlocks | None = None

    def blocks_of(self, plan: BlockPlan) -> int:
        """Return how many blocks of a plan are pooled.

        Raises:
            UsageError: the plan has fewer, is causal or has row bits.
        """
        if plan.causal or plan.row_bits is not None:
            what = "is causal" if plan.causal else "has row bits"
            raise UsageError(
                f"`tail` must be given with lists of whole blocks, got a plan that {what}; use "
                f"add_tail for choices per row"
            )
        num = plan.kv.num if self.num_blocks is None else self.num_blocks
        if not 0 <= num <= plan.kv.num:
            raise UsageError(f"`num_blocks` must lie in [0, {plan.kv.num}], got {num}")
        if self.pooled is not None and self.pooled.keys.shape[2] != num:
            raise UsageError(
                f"`pooled` must hold the means of {num} blocks, got {self.pooled.keys.shape[2]}"
            )
        return num


def pool_blocks(
    k: torch.Tensor, v: torch.Tensor, blocks: Blocks, num: int, *, first_order: bool = False
) -> PooledBlocks:
    """Return the means of the first `num` key blocks, in the dtype of k; does not wait.

    Args:
        k: [B, Sk, Hkv, D], any strides.
        v: [B, Sk, Hkv, D], any strides.
        blocks: how they are cut; bounds per head are those of query heads, or of key heads.
        num: how many blocks.
        first_order: whether to return the slope as well.
    """
    leading = [x.shape[1] for x in blocks.tensors() if x.shape[1] not in (1, k.shape[2])]
    if leading:  # heads that share keys may cut them in other ways
        k, v = (x.repeat_interleave(leading[0] // k.shape[2], dim=2) for x in (k, v))
    starts, lengths = blocks.bounds(k.device)
    starts, lengths = starts[..., :num], lengths[..., :num]
    if starts.shape[:2] == lengths.shape[:2] == (1, 1):
        tiles = Tiles(starts[0, 0].contiguous(), lengths[0, 0].contiguous(), blocks.size)
        keys, values = pool_tiles((k, v), tiles)
    elif not torch.compiler.is_compiling() and _kernel(k, AUTO, (k, v)) != "reference":
        from multimodal_gen.kernels.block_sparse import tail_kernel

        keys, values = (tail_kernel.pool_blocks(x, starts, lengths) for x in (k, v))
    else:
        keys, values = (pool_blocks_reference(x, blocks, num).to(x.dtype) for x in (k, v))
    slope = slope_of(k, v, blocks, keys, values) if first_order else None
    return PooledBlocks(keys=keys, values=values, counts=lengths, slope=slope)


def kept_map(plan: BlockPlan, num: int) -> torch.Tensor:
    """Return which of the first `num` blocks are on a plan's lists, bool [B|1, H|1, Nq, num].

    Made once per plan; does not wait for the device.
    """
    if torch.compiler.is_compiling():
        return plan.block_mask(num)
    return plan.derive(("kept map", num), plan.block_mask, num)


def plan_of_map(block_mask: torch.Tensor, q: Blocks, kv: Blocks, num: int) -> BlockPlan:
    """Return the plan of a map, which knows its `kept_map` already; does not wait for the device.

    Args:
        block_mask: bool [B, H, Nq, Nk], the blocks that are kept.
        q: how the queries are cut.
        kv: how the keys are cut.
        num: of so many of the first blocks, those that are not kept are to be pooled.
    """
    if not torch.compiler.is_compiling() and choose_for(MAP_LISTS, block_mask) == "triton":
        from multimodal_gen.kernels.block_sparse.steps_kernel import make_lists

        indices, counts = make_lists(unit_stride(block_mask))
        plan = BlockPlan(indices=indices, counts=counts, q=q, kv=kv)
    else:
        plan = BlockPlan.from_map(block_mask, q, kv)
    # Also while a CUDA graph is captured: this plan belongs to it.
    plan.cache["kept map", num] = block_mask[..., :num]
    return plan


def add_tail(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    pooled: PooledBlocks,
    kept: torch.Tensor,
    queries: Blocks | None,
    *,
    scale: float,
    kernel: KernelChoice = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention that also sees the means of the blocks that rows do not keep.

    Does not wait for the device.

    Args:
        out: attention to what rows keep, [B, Sq, H, D]; is written to, unless gradients are
            recorded.
        lse: its natural log-sum-exp, fp32 (fp64) [B, H, Sq]; likewise.
        q: [B, Sq, H, D], any strides.
        pooled: the means of N blocks.
        kept: which blocks rows keep: bool [B|1, H|1, Nq, N] by query block; or, without `queries`,
            int32 [B|1, H|1, Sq, ceil(N / 32)], bit j % 32 of word j // 32 of each row.
        queries: the query blocks; rows in none of them have no tail.
        scale: factor of the scores.
        kernel: "gluon", "triton", "reference", or anything else for the fastest that can.

    Returns:
        Output and log-sum-exp over both.

    Raises:
        UsageError: shapes do not fit each other.
    """
    call = TailCall(out, lse, q, pooled, kept, queries, scale)
    _check(call)
    if not pooled.keys.shape[2] or not q.numel():
        return out, lse
    inputs = (out, lse, q, pooled.keys, pooled.values)
    if torch.compiler.is_compiling():
        chosen = "reference" if records_gradient(*inputs) else ""
    else:
        plain = queries is not None and pooled.slope is None
        chosen = _kernel(q, kernel, inputs, queries=queries if plain else None)
    if not chosen:  # what a call is like is known when the graph runs
        starts, lengths = (None, None) if queries is None else (queries.starts, queries.lengths)
        num, size = (0, 0) if queries is None else (queries.num, queries.size)
        return add_tail_op(
            out, lse, q, pooled.keys, pooled.values, pooled.counts, pooled.slope, kept,
            starts, lengths, num, size, scale=scale,
        )  # fmt: skip
    if chosen == "reference":
        return add_tail_reference(call)
    _LAUNCH[chosen](call)
    return out, lse


def add_tail_of(
    tail: PooledTail,
    out: torch.Tensor,
    lse: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    plan: BlockPlan,
    *,
    scale: float,
    kernel: KernelChoice = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `add_tail` makes of the attention of a plan, whose other blocks it pools."""
    num = tail.blocks_of(plan)
    if not num:
        return out, lse
    q, k, v = qkv
    pooled = tail.pooled or pool_blocks(k, v, plan.kv, num, first_order=tail.first_order)
    kept = kept_map(plan, num)
    return add_tail(out, lse, q, pooled, kept, plan.q, scale=scale, kernel=kernel)


def _launch_gluon(call: TailCall) -> None:
    from multimodal_gen.kernels.block_sparse import gluon_tail_kernel

    gluon_tail_kernel.add_tail(call, tile=gluon_tail_tile())


def _launch_triton(call: TailCall) -> None:
    from multimodal_gen.kernels.block_sparse import tail_kernel

    queries, pooled = call.queries, call.pooled
    platform, capability = place_of(call.q.device)
    capability = (9, 0) if platform == "cpu" else capability  # the interpreter's path is measured
    engine = capability is not None and capability >= (9, 0)
    tile = tail_tile(
        head_size=call.q.shape[3],
        # Choices per row take registers.
        q_size=1 if queries is None else queries.size,
        regular=queries is not None and queries.lengths is None,
        capability=capability,
    )
    engine = engine and loadable(pooled.keys, pooled.values)
    tail_kernel.add_tail(call, tile=tile, copy_engine=engine)


_LAUNCH: MappingProxyType[str, Callable[[TailCall], None]] = MappingProxyType(
    {"gluon": _launch_gluon, "triton": _launch_triton}
)


def _kernel(
    q: torch.Tensor,
    kernel: KernelChoice,
    inputs: tuple[torch.Tensor, ...],
    *,
    queries: Blocks | None = None,
) -> str:
    """Return which kernel runs; `queries` are the blocks of a tail of nothing but means."""
    ragged = True
    if queries is not None:  # blocks that may be much smaller than what they count as
        ragged = queries.size <= 32 or (queries.lengths is not None and queries.size > 64)
    request = Request(
        *place_of(q.device),
        q.dtype,
        q.shape[3],
        ragged=ragged,
        unaligned=not loadable(*(x for x in inputs if x.ndim == 4)),
        backward=records_gradient(*inputs),
        device=q.device.index,
    )
    name = kernel_name(kernel)
    return name if serves(POOLED_TAIL, name, request) else choose(POOLED_TAIL, AUTO, request)


def _check(call: TailCall) -> None:
    out, lse, q, pooled, kept, queries, _ = call
    batch, total, heads, size = q.shape
    keys = pooled.keys
    if out.shape != q.shape or tuple(lse.shape) != (batch, heads, total):
        raise UsageError(
            f"`out` must be {list(q.shape)} and `lse` {[batch, heads, total]}, got "
            f"{list(out.shape)} and {list(lse.shape)}"
        )
    shared = keys.ndim == 4 and keys.shape[0] == batch and heads % max(keys.shape[1], 1) == 0
    if not shared or keys.shape[3] != size or pooled.values.shape != keys.shape:
        raise UsageError(
            f"`pooled` must hold keys and values [{batch}, Hp, N, {size}] with Hp a divisor of "
            f"{heads}, got {list(keys.shape)} and {list(pooled.values.shape)}"
        )
    if queries is None:
        wanted, dtype = (total, -(-keys.shape[2] // 32)), torch.int32
    else:
        wanted, dtype = (queries.num, keys.shape[2]), torch.bool
        if queries.total != total:
            raise UsageError(f"`queries` must be of {total} rows, got {queries.total}")
    if kept.dtype != dtype or tuple(kept.shape[2:]) != wanted:
        raise UsageError(
            f"`kept` must be {dtype} [B|1, H|1, {wanted[0]}, {wanted[1]}], got {kept.dtype} "
            f"{list(kept.shape)}"
        )


@torch.library.custom_op("multimodal_gen::add_pooled_tail", mutates_args=())
def add_tail_op(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    slope: torch.Tensor | None,
    kept: torch.Tensor,
    q_starts: torch.Tensor | None,
    q_lengths: torch.Tensor | None,
    q_num: int,
    q_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `add_tail` on copies of `out` and `lse`."""
    queries = None
    if q_num:
        queries = Blocks(
            num=q_num, size=q_size, total=q.shape[1], starts=q_starts, lengths=q_lengths
        )
    pooled = PooledBlocks(keys=keys, values=values, counts=counts, slope=slope)
    return add_tail(out.clone(), lse.clone(), q, pooled, kept, queries, scale=scale)


@add_tail_op.register_fake
def _(out: torch.Tensor, lse: torch.Tensor, *rest: object, **options: object) -> object:
    del rest, options
    return torch.empty_like(out), torch.empty_like(lse)
