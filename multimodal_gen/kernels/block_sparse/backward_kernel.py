"""The backward pass of block-sparse attention in portable Triton, without atomics.

With p = exp(scale * q k^T - lse) and delta = rowsum(dO o O) - dL, over the kept pairs:

    ds = p (dO v^T - delta);   dq = scale ds k;   dk = scale ds^T q;   dv = p^T dO

One kernel computes dq from the lists of a plan, another dk and dv from those of the plan that is
transposed: for every key block, the query blocks that attend to it. No program adds to what another
writes, so two runs agree bit by bit.

As in the forward pass, main loops have no mask, and where a step lies is read one step ahead.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.block_sparse.call import Backward
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import (
    CHUNK,
    PLAN_NUMBERS,
    Plan,
    make_lists,
    work_list,
)
from multimodal_gen.kernels.block_sparse.triton_kernel import (
    bits_of,
    describe,
    find_tile,
    load_rows,
    partial_step,
    refuse_cut,
    row_choice,
    shape_of,
    source,
    store_rows,
    whole_mask,
    whole_step,
)
from multimodal_gen.kernels.block_sparse.tuning import BackwardTiles, TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import dot, padded_channels

PREPARED = 64  # rows that a program prepares


@triton.jit(do_not_specialize=["num_q", "heads", "num_kv"])
def _transpose_kernel(
    index_ptr, count_ptr, map_ptr, index_at, count_at, num_q, heads, num_kv, CHUNK: tl.constexpr
):
    """Grid [B|1 * H|1 * Nq]: mark query block i in the rows of the key blocks that it lists."""
    row = tl.program_id(0)
    i = (row % num_q).to(tl.int64)
    h = (row // num_q % heads).to(tl.int64)
    b = (row // num_q // heads).to(tl.int64)
    index_ptr += b * index_at[0] + h * index_at[1] + i * index_at[2]
    map_ptr += (b * heads + h) * num_kv * num_q + i
    count = tl.load(count_ptr + b * count_at[0] + h * count_at[1] + i * count_at[2])
    for first in range(0, count, CHUNK):
        e = first + tl.arange(0, CHUNK)
        block = tl.load(index_ptr + e * index_at[3], mask=e < count, other=0)
        one = tl.full([CHUNK], 1, tl.uint8)
        tl.store(map_ptr + block.to(tl.int64) * num_q, one, mask=e < count)


@triton.jit(do_not_specialize=["total", "heads"])
def _prepare_kernel(
    out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, level_ptr, delta_ptr,
    out_at, grad_at, lse_at, grad_lse_at, total, heads,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """Grid [ceil(Sq / BM), B * H]: write delta, and the level log2(e) lse that scores fall below.

    Rows without keys get the level inf, so that all their weights are 0.
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    real = row < total
    both = real[:, None] & (d < D)[None, :]
    out_ptr += b * out_at[0] + h * out_at[2]
    grad_ptr += b * grad_at[0] + h * grad_at[2]
    out_ptrs = out_ptr + row[:, None] * out_at[1] + d[None, :] * out_at[3]
    grad_ptrs = grad_ptr + row[:, None] * grad_at[1] + d[None, :] * grad_at[3]
    out = tl.load(out_ptrs, mask=both, other=0.0)
    grad = tl.load(grad_ptrs, mask=both, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse_ptr += b * lse_at[0] + h * lse_at[1]
    lse = tl.load(lse_ptr + row * lse_at[2], mask=real, other=0.0)
    if GRAD_LSE:
        grad_lse_ptr += b * grad_lse_at[0] + h * grad_lse_at[1]
        delta -= tl.load(grad_lse_ptr + row * grad_lse_at[2], mask=real, other=0.0)
    nothing = lse == float("-inf")
    level = tl.where(nothing, float("inf"), lse * 1.4426950408889634)
    at = (b * heads + h) * total + row
    tl.store(level_ptr + at, level, mask=real)
    tl.store(delta_ptr + at, tl.where(nothing, 0.0, delta), mask=real)


@triton.jit
def _query_step(
    q, grad, k, v, level, delta, dq, mask, scale_log2, MASKED: tl.constexpr, UPCAST: tl.constexpr
):
    """Add what a step of keys gives to dq of a tile of queries, but for the scale."""
    s = dot(q, tl.trans(k), UPCAST)
    p = tl.exp2(s * scale_log2 - level[:, None])
    ds = p * (dot(grad, tl.trans(v), UPCAST) - delta[:, None])
    if MASKED:
        ds = tl.where(mask, ds, 0.0)
    return dq + dot(ds.to(k.dtype), k, UPCAST)


@triton.jit
def _key_step(
    q, grad, k, v, level, delta, dk, dv, mask, scale_log2,
    MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add what a step of queries gives to dk, but for the scale, and dv of a tile of keys."""
    s = dot(k, tl.trans(q), UPCAST)
    p = tl.exp2(s * scale_log2 - level[None, :])
    if MASKED:
        p = tl.where(mask, p, 0.0)
    dp = dot(v, tl.trans(grad), UPCAST)
    dv += dot(p.to(q.dtype), grad, UPCAST)
    ds = p * (dp - delta[None, :])
    dk += dot(ds.to(q.dtype), q, UPCAST)
    return dk, dv


@triton.jit(do_not_specialize=PLAN_NUMBERS)
def _query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, level_ptr, delta_ptr, dq_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    block_ptr, bits_ptr, q_at, k_at, v_at, grad_at, dq_at, level_at, bits_at, scale,
    C: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq * tiles]; tiles and lists are those of the forward kernel."""
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total, 0, 0,
    )  # fmt: skip
    tile = find_tile(plan, block_ptr, bits_ptr, bits_at, C)
    b = tile.b
    h = tile.h
    d = tl.arange(0, C.width)[None, :]
    n = tl.arange(0, C.step)[:, None]
    in_tile = tl.arange(0, C.rows)
    real_d = d < C.channels
    first_row = tile.begin.to(tl.int64)
    own = tile.real[:, None] & real_d
    q_source = source(q_ptr, q_at, b, h, in_tile[:, None], d, C)
    grad_source = source(grad_ptr, grad_at, b, h, in_tile[:, None], d, C)
    k_source = source(k_ptr, k_at, b, h // group, n, d, C)
    v_source = source(v_ptr, v_at, b, h // group, n, d, C)
    q = load_rows(q_source, first_row, own, C.rows, not C.tma, C)
    grad = load_rows(grad_source, first_row, own, C.rows, not C.tma, C)
    at_rows = b * level_at[0] + h * level_at[1] + first_row + in_tile
    level = tl.load(level_ptr + at_rows, mask=tile.real, other=float("inf"))
    delta = tl.load(delta_ptr + at_rows, mask=tile.real, other=0.0)

    scale_log2 = scale * 1.4426950408889634
    ROWS: tl.constexpr = C.rows
    WIDTH: tl.constexpr = C.width
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    PADDED: tl.constexpr = C.channels < C.width and not C.tma
    entry = tl.load(tile.list, mask=tile.num_full > 0, other=0)
    for step in tl.range(0, tile.num_full, num_stages=C.stages):
        start, block, entry = whole_step(step, entry, tile, C)
        mask = whole_mask(tile, block, C)
        k = load_rows(k_source, start, real_d, C.step, PADDED, C)
        v = load_rows(v_source, start, real_d, C.step, PADDED, C)
        dq = _query_step(q, grad, k, v, level, delta, dq, mask, scale_log2, C.bits, C.upcast)

    for step in tl.range(0, tile.num_tail, num_stages=1):
        start, real_n, mask = partial_step(step, tile, plan, C)
        both = real_n[:, None] & real_d
        k = load_rows(k_source, start, both, C.step, True, C)
        v = load_rows(v_source, start, both, C.step, True, C)
        dq = _query_step(q, grad, k, v, level, delta, dq, mask, scale_log2, True, C.upcast)

    store_rows(dq_ptr, dq_at, tl.where(tile.real[:, None], dq * scale, 0.0), tile, plan, C)


@triton.jit(do_not_specialize=[*PLAN_NUMBERS, "q_total"])
def _key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, level_ptr, delta_ptr, dk_ptr, dv_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    bits_ptr, q_at, k_at, v_at, grad_at, dk_at, level_at, bits_at, q_total, scale,
    C: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nk * tiles] of keys, in steps of queries.

    The plan is the transposed one: its rows are keys, and what it lists are blocks of queries. dk
    and dv are of query heads. Under causality steps are counted, and no list is read.
    """
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total, 0, 0,
    )  # fmt: skip
    tile = find_tile(plan, list_ptr, bits_ptr, bits_at, C)
    STEP: tl.constexpr = C.step
    ROWS: tl.constexpr = C.rows
    WIDTH: tl.constexpr = C.width
    b = tile.b
    h = tile.h
    first = 0
    num_full = tile.num_full
    num_tail = tile.num_tail
    first_tail = num_full
    if C.causal:
        earliest = tile.begin + q_total - total  # the first query that sees the first key
        num_full = tl.where(tile.some, q_total // STEP, 0)
        first_tail = tl.minimum(tl.maximum(earliest, 0) // STEP, num_full)
        first = tl.minimum(tl.cdiv(tl.maximum(earliest + C.rows - 1, 0), STEP), num_full)
        num_tail = first - first_tail + (q_total % STEP > 0).to(tl.int32)
        num_tail = tl.where(tile.some, num_tail, 0)

    d = tl.arange(0, C.width)[None, :]
    m = tl.arange(0, STEP)
    in_tile = tl.arange(0, C.rows)
    real_d = d < C.channels
    first_row = tile.begin.to(tl.int64)
    own = tile.real[:, None] & real_d
    q_source = source(q_ptr, q_at, b, h, m[:, None], d, C)
    grad_source = source(grad_ptr, grad_at, b, h, m[:, None], d, C)
    k_source = source(k_ptr, k_at, b, h // group, in_tile[:, None], d, C)
    v_source = source(v_ptr, v_at, b, h // group, in_tile[:, None], d, C)
    k = load_rows(k_source, first_row, own, C.rows, not C.tma, C)
    v = load_rows(v_source, first_row, own, C.rows, not C.tma, C)
    level_ptr += b * level_at[0] + h * level_at[1]
    delta_ptr += b * level_at[0] + h * level_at[1]

    scale_log2 = scale * 1.4426950408889634
    dk = tl.zeros([ROWS, WIDTH], tl.float32)
    dv = tl.zeros([ROWS, WIDTH], tl.float32)
    PADDED: tl.constexpr = C.channels < C.width and not C.tma
    entry = tl.load(tile.list, mask=num_full > 0, other=0)
    for step in tl.range(first, num_full, num_stages=C.stages):
        if C.causal:
            start = tl.full([], STEP, tl.int64) * step
        else:
            start, _, entry = whole_step(step, entry, tile, C)
        mask = True
        if C.bits:
            mask = row_choice(tile, tile.i, start + m, m < STEP)[None, :]
        level = tl.load(level_ptr + start + m)
        delta = tl.load(delta_ptr + start + m)
        q = load_rows(q_source, start, real_d, STEP, PADDED, C)
        grad = load_rows(grad_source, start, real_d, STEP, PADDED, C)
        dk, dv = _key_step(
            q, grad, k, v, level, delta, dk, dv, mask, scale_log2, C.bits, C.upcast
        )  # fmt: skip

    for step in tl.range(0, num_tail, num_stages=1):
        if C.causal:
            at_step = tl.where(first_tail + step < first, first_tail + step, q_total // STEP)
            start = at_step.to(tl.int64) * STEP
            real_m = m < tl.minimum(q_total - start, STEP)
        else:
            start, real_m, _ = partial_step(step, tile, plan, C)
        mask = real_m[None, :]
        if C.causal:
            last_key = start + m + total - q_total
            mask = mask & (first_row + in_tile[:, None] <= last_key[None, :])
        if C.bits:
            mask = mask & row_choice(tile, tile.i, start + m, real_m)[None, :]
        level = tl.load(level_ptr + start + m, mask=real_m, other=float("inf"))
        delta = tl.load(delta_ptr + start + m, mask=real_m, other=0.0)
        both = (real_m & (level < float("inf")))[:, None] & real_d
        q = load_rows(q_source, start, both, STEP, True, C)
        grad = load_rows(grad_source, start, both, STEP, True, C)
        dk, dv = _key_step(q, grad, k, v, level, delta, dk, dv, mask, scale_log2, True, C.upcast)

    store_rows(dk_ptr, dk_at, tl.where(tile.real[:, None], dk * scale, 0.0), tile, plan, C)
    store_rows(dv_ptr, dk_at, tl.where(tile.real[:, None], dv, 0.0), tile, plan, C)


_launch_transpose = Launcher(_transpose_kernel)
_launch_prepare = Launcher(_prepare_kernel)
_launch_query_gradient = Launcher(_query_gradient_kernel)
_launch_key_gradients = Launcher(_key_gradients_kernel)


def transposed(plan: BlockPlan) -> BlockPlan:
    """Return the plan in which keys attend to the queries that attend to them.

    Made once per plan, on the device, without waiting for it. It has no row bits and no causality:
    both are of rows of queries. Its order is `BlockPlan.head_by_head`: all lists of a head go over
    the same queries, so a random few of every head at once find little of theirs in the cache.
    """
    return plan.derive("transposed", _transposed, plan)


def _transposed(plan: BlockPlan) -> BlockPlan:
    indices, counts = plan.indices, plan.counts
    batch, heads, num_q = counts.shape
    marks = torch.zeros(
        (batch, heads, plan.kv.num, num_q), dtype=torch.uint8, device=indices.device
    )
    _launch_transpose(
        (counts.numel(),), indices, counts, marks, indices.stride(), counts.stride(),
        num_q, heads, plan.kv.num, CHUNK=CHUNK, num_warps=1,
    )  # fmt: skip
    by_key, numbers = make_lists(marks.view(torch.bool))
    return BlockPlan(indices=by_key, counts=numbers, q=plan.kv, kv=plan.q).head_by_head()


def attend_backward(
    call: Backward, *, tiles: BackwardTiles, copy_engine: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v.

    Args:
        call: the call and its results.
        tiles: shapes of the programs.
        copy_engine: load through tensor descriptors, see the forward kernel.

    Raises:
        UsageError: the plan is causal, and its key blocks are not whole steps.
    """
    q, k, plan = call.q, call.k, call.plan
    batch, _, heads, head_size = q.shape
    rows = levels(call)
    make = torch.empty if plan.q.starts is None else torch.zeros
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    group = heads // k.shape[2]
    # Key blocks are of query heads: those that share keys may cut them differently.
    make = torch.empty if plan.kv.starts is None else torch.zeros
    shape = (batch, k.shape[1], heads, head_size)
    dtype = k.dtype if group == 1 else torch.float32
    dk, dv = (make(shape, dtype=dtype, device=k.device) for _ in range(2))
    query_gradient(call, rows, dq, tile=tiles.queries, copy_engine=copy_engine)
    key_gradients(call, rows, dk, dv, tile=tiles.keys, copy_engine=copy_engine)
    if group > 1:
        dk, dv = (x.unflatten(2, (-1, group)).sum(3).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


def levels(call: Backward) -> torch.Tensor:
    """Return level and delta of every query, fp32 [2, B, H, Sq]."""
    out, grad_out, lse = call.out, call.grad_out, call.lse
    batch, total, heads, head_size = out.shape
    found = torch.empty((2, batch, heads, total), dtype=torch.float32, device=out.device)
    given = lse if call.grad_lse is None else call.grad_lse
    _launch_prepare(
        (-(-total // PREPARED), batch * heads), out, grad_out, lse, given, found[0], found[1],
        out.stride(), grad_out.stride(), lse.stride(), given.stride(), total, heads,
        BM=PREPARED, D=head_size, DP=padded_channels(head_size),
        GRAD_LSE=call.grad_lse is not None, num_warps=4,
    )  # fmt: skip
    return found


def query_gradient(
    call: Backward, rows: torch.Tensor, dq: torch.Tensor, *, tile: TritonTile, copy_engine: bool
) -> None:
    """Write dq; `rows` are level and delta."""
    plan = call.plan
    batch, _, heads, head_size = call.q.shape
    work = work_list(plan, tile.keys, batch, heads, call.k.shape[2])
    refuse_cut(plan, work, tile.keys)
    bits = bits_of(plan, batch, heads)
    shape = shape_of(plan, work, tile, head_size, tma=copy_engine)
    _launch_query_gradient(
        (work.num * shape.tiles,), *_loaded(call, tile, copy_engine), rows[0], rows[1], dq,
        *work.arguments, work.blocks, bits, *_strides(call), dq.stride(), rows.stride()[1:3],
        bits.stride(), call.scale, C=shape, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def key_gradients(
    call: Backward,
    rows: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    tile: TritonTile,
    copy_engine: bool,
) -> None:
    """Write dk and dv, [B, Sk, H, D] of query heads; `rows` are level and delta."""
    plan = call.plan
    batch, _, heads, head_size = call.q.shape
    work = work_list(transposed(plan), tile.rows, batch, heads, call.k.shape[2])
    bits = bits_of(plan, batch, heads)
    shape = shape_of(plan, work, tile, head_size, tma=copy_engine, of_keys=True)
    _launch_key_gradients(
        (work.num * shape.tiles,), *_loaded(call, tile, copy_engine), rows[0], rows[1], dk, dv,
        *work.arguments, bits, *_strides(call), dk.stride(), rows.stride()[1:3], bits.stride(),
        plan.q.total, call.scale, C=shape, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _loaded(call: Backward, tile: TritonTile, copy_engine: bool) -> tuple[object, ...]:
    """Return what kernels load q, k, v and the gradient from: tensors, or their descriptors."""
    inputs = (call.q, call.k, call.v, call.grad_out)
    if not copy_engine:
        return inputs
    width = padded_channels(call.q.shape[3])
    rows = (tile.rows, tile.keys, tile.keys, tile.rows)
    return tuple(describe(x, n, width) for x, n in zip(inputs, rows, strict=True))


def _strides(call: Backward) -> tuple[tuple[int, ...], ...]:
    """Return the strides of the same tensors."""
    return call.q.stride(), call.k.stride(), call.v.stride(), call.grad_out.stride()
