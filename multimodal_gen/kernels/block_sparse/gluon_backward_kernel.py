"""The backward pass of block-sparse attention on SM90 in Gluon, for plans without row bits.

One kernel serves both sides. A consumer warpgroup owns 64 rows of two tensors A and B; steps of
STEP rows of two others, X and Y, travel through a ring in shared memory. With s = scale a x^T, the
level of a query row its log-sum-exp, and delta as in `backward_kernel`:

    p = exp(s - level);  ds = p (b y^T - delta)

* queries: A and B are q and dO, X and Y are k and v; dq = scale ds x. The product of a step runs
  while the scores of the next one are computed.
* keys: A and B are k and v, X and Y are q and dO, so s and p are transposed, and level and delta
  are those of the step's columns; dk = scale ds x, dv = p y.

Lists are those of the plan for queries, and of the transposed plan for keys. OWN: every consumer
has its own block, ring and producer warp. Rows of a tensor that belong to no block must be finite.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from typing_extensions import override

from multimodal_gen.kernels.block_sparse.backward_kernel import levels, transposed
from multimodal_gen.kernels.block_sparse.call import Backward
from multimodal_gen.kernels.block_sparse.gluon_work_kernel import (
    More,
    Outs,
    Shape,
    find_work,
    step_start,
    store_values,
    tail_keys,
)
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import PLAN_NUMBERS, Plan, work_list
from multimodal_gen.kernels.block_sparse.tuning import GluonTile, gluon_backward_tile
from multimodal_gen.kernels.hopper_kernel import (
    barriers,
    scores,
    specialize,
    wait_empty,
    wait_full,
)
from multimodal_gen.kernels.launch.compat import async_load
from multimodal_gen.kernels.launch.descriptors import describe_tokens
from multimodal_gen.kernels.launch.launcher import Launcher


class Rings(NamedTuple):
    """Shared memory: tiles, and barriers that say when they are full and empty."""

    a: Any
    b: Any
    x: Any
    y: Any
    own_full: Any
    full: Any
    empty: Any


class Rows(NamedTuple):
    """Levels of query rows, deltas `plane` entries behind them, and where dv goes."""

    level: Any
    plane: Any
    dv: Any
    dv_b: Any
    dv_h: Any


@dataclass(frozen=True, kw_only=True)
class GradientShape(Shape):
    """Compile-time shape of a kernel.

    Attributes:
        of_keys: whether keys are owned, and dk and dv computed.
    """

    of_keys: bool = True

    @property
    @override
    def tail_first(self) -> bool:
        return False


@gluon.jit
def _rows_of(work, step, C: gl.constexpr):
    """Return how many rows of a step are real."""
    rows = gl.to_tensor(C.keys)
    if C.ragged:
        tail = tail_keys(work, gl.maximum(step - work.num_full, 0), C)
        rows = gl.where(step < work.num_full, rows, tail)
    return rows


@gluon.jit
def _producer(fed, W: gl.constexpr, C: gl.constexpr):
    """One warp: loads a tile's own rows, and both tensors of every step."""
    da, db, dx, dy, work, rings = fed
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    steps = work.num_full + work.num_tail
    if steps > 0:
        for c in gl.static_range(SHARERS):
            row = work.row + c * 64
            mbarrier.expect(rings.own_full.index(W + c), 2 * 64 * C.head_size * 2)
            full = rings.own_full.index(W + c)
            async_load(da, [work.b, work.h, row, 0], full, rings.a.index(W + c))
            async_load(db, [work.b, work.h, row, 0], full, rings.b.index(W + c))
        start = step_start(work, 0, 0, C)
        for step in range(steps):
            following = step_start(work, gl.minimum(step + 1, steps - 1), 0, C)
            slot = wait_empty(rings.empty, step, FIRST, C)
            mbarrier.expect(rings.full.index(slot), 2 * C.keys * C.head_size * 2)
            full = rings.full.index(slot)
            async_load(dx, [work.b, work.h, start, 0], full, rings.x.index(slot))
            async_load(dy, [work.b, work.h, start, 0], full, rings.y.index(slot))
            start = following


@gluon.jit
def store_through(acc, tile, ptr, work, ROW: gl.constexpr, C: gl.constexpr):
    """Write 64 rows of a gradient, those that the block owns, through a tile."""
    tile.store(acc.to(tile.dtype))
    store_values(ptr, tile.load(C.store_layout), work, work.owned, ROW, C)


@gluon.jit
def _query_step(
    a, b, rings, acc, pending, level, delta, rows, step, scale_log2, FIRST: gl.constexpr,
    MASKED: gl.constexpr, C: gl.constexpr, PENDING: gl.constexpr = True,
):  # fmt: skip
    """Return ds of a step of keys; if PENDING, that of the step before is multiplied meanwhile."""
    slot = wait_full(rings.full, step, FIRST, C)
    s_token = scores(a, rings.x.index(slot), C)
    p_token = scores(b, rings.y.index(slot), C)
    if PENDING:
        before = FIRST + (step - 1) % C.stages
        x = rings.x.index(before).reshape([C.keys, C.head_size])
        o_token = hopper.warpgroup_mma(pending, x, acc, is_async=True)
        s = hopper.warpgroup_mma_wait(2, deps=[s_token])
    else:
        s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    p = gl.exp2(s * scale_log2 - gl.expand_dims(level, 1))
    dp = hopper.warpgroup_mma_wait(1 if PENDING else 0, deps=[p_token])
    ds = p * (dp - gl.expand_dims(delta, 1))
    if MASKED:
        columns = gl.arange(0, C.keys, C.columns)
        ds = gl.where(gl.expand_dims(columns < rows, 0), ds, 0.0)
    if PENDING:
        acc, pending = hopper.warpgroup_mma_wait(0, deps=[o_token, pending])
        mbarrier.arrive(rings.empty.index(before))
    return acc, gl.convert_layout(ds.to(rings.a.dtype), C.p_layout)


@gluon.jit
def _queries(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup: dq of 64 queries."""
    work, rings, rows_in, scale, scale_log2 = given
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    ROW: gl.constexpr = 0 if C.own else W * 64
    N: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    a = rings.a.index(W).reshape([64, D])
    b = rings.b.index(W).reshape([64, D])
    acc = gl.zeros([64, D], gl.float32, C.o_layout)
    steps = work.num_full + work.num_tail
    if steps > 0:
        inside = ROW + gl.arange(0, 64, C.rows_s)
        real = inside < work.real
        level = gl.load(work.lse + inside, mask=real, other=float("inf"))
        delta = gl.load(work.lse + rows_in.plane + inside, mask=real, other=0.0)
        mbarrier.wait(rings.own_full.index(W), 0)
        rows = _rows_of(work, 0, C)
        acc, pending = _query_step(
            a, b, rings, acc, None, level, delta, rows, 0, scale_log2, FIRST, C.ragged, C, False
        )
        for step in range(1, work.num_full):
            acc, pending = _query_step(
                a, b, rings, acc, pending, level, delta, N, step, scale_log2, FIRST, False, C
            )
        if C.ragged:
            for step in range(gl.maximum(work.num_full, 1), steps):
                rows = _rows_of(work, step, C)
                acc, pending = _query_step(
                    a, b, rings, acc, pending, level, delta, rows, step, scale_log2, FIRST, True, C
                )
        x = rings.x.index(FIRST + (steps - 1) % C.stages).reshape([N, D])
        o_token = hopper.warpgroup_mma(pending, x, acc, is_async=True)
        acc, pending = hopper.warpgroup_mma_wait(0, deps=[o_token, pending])
    store_through(acc * scale, a, work.out, work, ROW, C)


@gluon.jit
def _begin(zero, columns):
    """Return `columns` in all rows, in registers of its own."""
    values, _ = gl.broadcast(gl.expand_dims(columns, 0), zero)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _keys(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup: dk and dv of 64 keys."""
    work, rings, rows_in, scale, scale_log2 = given
    dtype: gl.constexpr = rings.a.dtype
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    ROW: gl.constexpr = 0 if C.own else W * 64
    N: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    a = rings.a.index(W).reshape([64, D])
    b = rings.b.index(W).reshape([64, D])
    dk = gl.zeros([64, D], gl.float32, C.o_layout)
    dv = gl.zeros([64, D], gl.float32, C.o_layout)
    steps = work.num_full + work.num_tail
    if steps > 0:
        column = gl.arange(0, N, one_each)
        base = work.lse - work.row + column
        # Scores begin at minus their level, and dO v^T at minus delta, which costs no register more
        # than the sums themselves. What a step begins with is read a step ahead, one value per
        # thread; where it lies, two steps ahead.
        start = step_start(work, 0, 0, C)
        real = column < _rows_of(work, 0, C)
        level_next = gl.load(base + start, mask=real, other=float("inf"))
        delta_next = gl.load(base + rows_in.plane + start, mask=real, other=0.0)
        start = step_start(work, gl.minimum(1, steps - 1), 0, C)
        level = gl.convert_layout(level_next / -scale_log2, C.columns)
        delta = gl.convert_layout(-delta_next, C.columns)
        real = column < _rows_of(work, gl.minimum(1, steps - 1), C)
        level_next = gl.load(base + start, mask=real, other=float("inf"))
        delta_next = gl.load(base + rows_in.plane + start, mask=real, other=0.0)
        start = step_start(work, gl.minimum(2, steps - 1), 0, C)
        mbarrier.wait(rings.own_full.index(W), 0)
        for step in range(steps):
            slot = wait_full(rings.full, step, FIRST, C)
            x = rings.x.index(slot).reshape([N, D])
            y = rings.y.index(slot).reshape([N, D])
            zero = gl.zeros([64, N], gl.float32, C.s_layout)
            s_first = _begin(zero, level)
            p_first = _begin(zero, delta)
            s_token = hopper.warpgroup_mma(a, x.permute((1, 0)), s_first, is_async=True)
            p_token = hopper.warpgroup_mma(b, y.permute((1, 0)), p_first, is_async=True)
            s = hopper.warpgroup_mma_wait(1, deps=[s_token])
            p = gl.exp2(s * scale_log2)
            weights = gl.convert_layout(p.to(dtype), C.p_layout)
            dp = hopper.warpgroup_mma_wait(0, deps=[p_token])
            v_token = hopper.warpgroup_mma(weights, y, dv, is_async=True)
            scores = gl.convert_layout((p * dp).to(dtype), C.p_layout)
            k_token = hopper.warpgroup_mma(scores, x, dk, is_async=True)
            level = gl.convert_layout(level_next / -scale_log2, C.columns)
            delta = gl.convert_layout(-delta_next, C.columns)
            real = column < _rows_of(work, gl.minimum(step + 2, steps - 1), C)
            level_next = gl.load(base + start, mask=real, other=float("inf"))
            delta_next = gl.load(base + rows_in.plane + start, mask=real, other=0.0)
            start = step_start(work, gl.minimum(step + 3, steps - 1), 0, C)
            dv, dk, weights, scores = hopper.warpgroup_mma_wait(
                0, deps=[v_token, k_token, weights, scores]
            )
            mbarrier.arrive(rings.empty.index(slot))
    store_through(dk * scale, a, work.out, work, ROW, C)
    place = work.b.to(gl.int64) * rows_in.dv_b + work.h.to(gl.int64) * rows_in.dv_h
    place += work.row.to(gl.int64) * work.out_s
    store_through(dv, b, rows_in.dv + place, work, ROW, C)


@gluon.jit
def _consumer(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup."""
    if C.of_keys:
        _keys(given, W, C)
    else:
        _queries(given, W, C)


@gluon.jit(do_not_specialize=[*PLAN_NUMBERS, "group", "lists"])
def backward_kernel(
    da, db, dx, dy, out_ptr, second_ptr, level_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total, lists,
    out_b, out_s, out_h, level_b, level_h, plane, scale, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per tile. dq, or dk, goes to `out_ptr`, and dv to `second_ptr`."""
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total,
        lists, More(list_ptr, 0, list_ptr, list_ptr, 0, 0, 0),
    )  # fmt: skip
    outs = Outs(out_ptr, level_ptr, out_b, out_s, out_h, level_b, level_h)
    rows_in = Rows(level_ptr, plane, second_ptr, out_b, out_h)
    dtype: gl.constexpr = da.dtype
    D: gl.constexpr = C.head_size
    CONSUMERS: gl.constexpr = C.consumers
    SLOTS: gl.constexpr = C.consumers * C.stages if C.own else C.stages
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    rings = Rings(
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], da.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], db.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C.keys, D], dx.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C.keys, D], dy.layout),
        barriers(CONSUMERS, 1),
        barriers(SLOTS, 1),
        barriers(SLOTS, SHARERS),
    )
    hopper.fence_async_shared()
    scale_log2 = scale * 1.4426950408889634
    work = find_work(0, gl.program_id(0), plan, outs, C)
    given = (work, rings, rows_in, scale, scale_log2)
    fed = (da, db, dx, dy, work, rings)
    if C.own:
        other = find_work(1, gl.program_id(0), plan, outs, C)
        other_given = (other, rings, rows_in, scale, scale_log2)
        other_fed = (da, db, dx, dy, other, rings)
        specialize(_consumer, (given, other_given), _producer, (fed, other_fed), C)
    else:
        specialize(_consumer, (given,), _producer, (fed,), C)


_launcher = Launcher(backward_kernel)


def attend_backward(call: Backward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; see `backward_kernel.attend_backward`.

    Args:
        call: whose tensors all have as many heads, stride 1 along D and other strides that are
            multiples of 16 bytes; its plan is neither causal nor has row bits.
    """
    q, k, v, plan, _, _, grad_out, _, scale = call
    rows = levels(call)
    make = torch.empty if plan.q.starts is None else torch.zeros
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    make = torch.empty if plan.kv.starts is None else torch.zeros
    dk, dv = (make(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    for_dq, for_dkv = (gluon_backward_tile(block=x.size) for x in (plan.q, plan.kv))
    launch((q, grad_out), (k, v), plan, rows, (dq,), scale=scale, tile=for_dq)
    launch((k, v), (q, grad_out), transposed(plan), rows, (dk, dv), scale=scale, tile=for_dkv)
    return dq, dk, dv


def launch(
    own: tuple[torch.Tensor, torch.Tensor],
    steps_of: tuple[torch.Tensor, torch.Tensor],
    plan: BlockPlan,
    rows: torch.Tensor,
    outs: tuple[torch.Tensor, ...],
    *,
    scale: float,
    tile: GluonTile,
) -> None:
    """Write dq, or dk and dv.

    Args:
        own: q and the gradient of out, or k and v, [B, S, H, D]; all four tensors have stride 1
            along D, other strides that are multiples of 16 bytes, and as many heads.
        steps_of: the other two.
        plan: the plan, or for keys the transposed one.
        rows: level and delta of the queries, fp32 [2, B, H, Sq], contiguous.
        outs: dq [B, Sq, H, D], or dk and dv [B, Sk, H, D], contiguous: two say that `own` are k
            and v.
        scale: factor of the scores.
        tile: shape of a program.
    """
    batch, _, heads, channels = own[0].shape
    work = work_list(plan, tile.keys, batch, heads, heads)
    shape = GradientShape.of_work(
        plan, work, channels, of_keys=len(outs) == 2, keys=tile.keys,
        q_tiles=1 if tile.own else -(-plan.q.size // (64 * tile.consumers)),
        consumers=tile.consumers, stages=tile.stages, own=tile.own, registers=tile.registers,
    )  # fmt: skip
    _launcher(
        (shape.num_tiles(work),),
        *(describe_tokens(x, 64, shape.head_size) for x in own),
        *(describe_tokens(x, tile.keys, shape.head_size) for x in steps_of),
        outs[0], outs[-1], rows, *work.arguments, work.num,
        *outs[0].stride()[:3], *rows.stride()[1:3], rows.stride(0), scale,
        C=shape, num_warps=4,
    )  # fmt: skip
