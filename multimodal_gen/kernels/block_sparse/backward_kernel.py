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
    make_lists,
    work_list,
)
from multimodal_gen.kernels.block_sparse.triton_kernel import (
    bits_of,
    causal_steps,
    describe,
    load_rows,
    number_of_steps,
    partial_step,
    refuse_cut,
    row_choice,
    whole_step,
)
from multimodal_gen.kernels.block_sparse.tuning import BackwardTiles, TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import bounds, dot, interpreted, locate, next_power_of_2

PREPARED = 64  # rows that a program prepares


@triton.jit(do_not_specialize=["num_q", "heads", "num_kv"])
def _transpose_kernel(
    index_ptr, count_ptr, map_ptr,
    index_b, index_h, index_q, index_j, count_b, count_h, count_q, num_q, heads, num_kv,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid [B|1 * H|1 * Nq]: mark query block i in the rows of the key blocks that it lists."""
    row = tl.program_id(0)
    i = (row % num_q).to(tl.int64)
    h = (row // num_q % heads).to(tl.int64)
    b = (row // num_q // heads).to(tl.int64)
    index_ptr += b * index_b + h * index_h + i * index_q
    map_ptr += (b * heads + h) * num_kv * num_q + i
    count = tl.load(count_ptr + b * count_b + h * count_h + i * count_q)
    for first in range(0, count, CHUNK):
        e = first + tl.arange(0, CHUNK)
        block = tl.load(index_ptr + e * index_j, mask=e < count, other=0)
        one = tl.full([CHUNK], 1, tl.uint8)
        tl.store(map_ptr + block.to(tl.int64) * num_q, one, mask=e < count)


@triton.jit(do_not_specialize=["total", "heads"])
def _prepare_kernel(
    out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, level_ptr, delta_ptr,
    out_b, out_s, out_h, out_d, grad_b, grad_s, grad_h, grad_d,
    lse_b, lse_h, lse_s, grad_lse_b, grad_lse_h, grad_lse_s, total, heads,
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
    out_ptr += b * out_b + h * out_h
    grad_ptr += b * grad_b + h * grad_h
    out = tl.load(out_ptr + row[:, None] * out_s + d[None, :] * out_d, mask=both, other=0.0)
    grad = tl.load(grad_ptr + row[:, None] * grad_s + d[None, :] * grad_d, mask=both, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(lse_ptr + b * lse_b + h * lse_h + row * lse_s, mask=real, other=0.0)
    if GRAD_LSE:
        grad_lse_ptr += b * grad_lse_b + h * grad_lse_h
        delta -= tl.load(grad_lse_ptr + row * grad_lse_s, mask=real, other=0.0)
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
    block_ptr, bits_ptr,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, grad_b, grad_s, grad_h, grad_d,
    dq_b, dq_s, dq_h, level_b, level_h, bits_b, bits_h, bits_s, bits_w, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QSUB: tl.constexpr, SUB: tl.constexpr, RAGGED_END: tl.constexpr,
    Q_STARTS: tl.constexpr, Q_LENGTHS: tl.constexpr, ORDERED: tl.constexpr, BITS: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq * QSUB]; tiles and lists are those of the forward kernel."""
    b, h, i, sub = locate(order_ptr, rows, rep_h, num, plan_h, QSUB, ORDERED)
    row_of_list = b * list_b + h * list_h + i * list_n
    list_ptr += row_of_list
    at = b * count_b + h * count_h + i * count_n
    count = tl.load(count_ptr + at)
    begin, length = bounds(
        b, h, i, size, total, start_ptr, length_ptr, start_b, start_h, length_b, length_h,
        Q_STARTS, Q_LENGTHS,
    )  # fmt: skip
    num_full, num_tail = number_of_steps(
        list_ptr, count, tail_count_ptr, at, last, tail, SUB, BN, RAGGED_END
    )
    if Q_LENGTHS:
        num_full = tl.where(sub * BM < length, num_full, 0)
        num_tail = tl.where(sub * BM < length, num_tail, 0)

    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    in_tile = tl.arange(0, BM)
    inside = sub * BM + in_tile
    real = inside < length
    real_d = (d < D)[None, :]
    first_row = begin.to(tl.int64) + sub * BM
    kv_h = h // group
    if TMA:
        q_base, grad_base, k_base, v_base = q_ptr, grad_ptr, k_ptr, v_ptr
    else:
        q_base = q_ptr + b * q_b + h * q_h
        grad_base = grad_ptr + b * grad_b + h * grad_h
        k_base = k_ptr + b * k_b + kv_h * k_h
        v_base = v_ptr + b * v_b + kv_h * v_h
    q_tile = in_tile[:, None] * q_s + d[None, :] * q_d
    grad_tile = in_tile[:, None] * grad_s + d[None, :] * grad_d
    k_tile = n[:, None] * k_s + d[None, :] * k_d
    v_tile = n[:, None] * v_s + d[None, :] * v_d
    own = real[:, None] & real_d
    q = load_rows(q_base, q_tile, b, h, first_row, q_s, own, BM, DP, not TMA, TMA)
    grad = load_rows(grad_base, grad_tile, b, h, first_row, grad_s, own, BM, DP, not TMA, TMA)
    at_rows = b * level_b + h * level_h + first_row + in_tile
    level = tl.load(level_ptr + at_rows, mask=real, other=float("inf"))
    delta = tl.load(delta_ptr + at_rows, mask=real, other=0.0)
    if BITS:
        bits_ptr += b * bits_b + h * bits_h + first_row * bits_s
    if CAUSAL:
        num_full, num_tail, last_key = causal_steps(
            num_full, begin + sub * BM, total, last, tail, BM, BN, SUB
        )

    scale_log2 = scale * 1.4426950408889634
    dq = tl.zeros([BM, DP], tl.float32)
    entry = tl.load(list_ptr, mask=num_full > 0, other=0)
    for step in tl.range(0, num_full, num_stages=STAGES):
        start, block, entry = whole_step(
            step, entry, list_ptr, block_ptr + row_of_list, num_full, SUB, BN, BITS
        )
        mask = True
        if BITS:
            mask = row_choice(bits_ptr, block, bits_s, bits_w, in_tile, real)[:, None]
        k = load_rows(k_base, k_tile, b, kv_h, start, k_s, real_d, BN, DP, D < DP and not TMA, TMA)
        v = load_rows(v_base, v_tile, b, kv_h, start, v_s, real_d, BN, DP, D < DP and not TMA, TMA)
        dq = _query_step(q, grad, k, v, level, delta, dq, mask, scale_log2, BITS, UPCAST)

    for step in tl.range(0, num_tail, num_stages=1):
        start, length_n, block = partial_step(
            step, list_ptr, block_ptr + row_of_list, tail_length_ptr + at * tail_room, room,
            num_full, last, tail, SUB, BN, BITS, CAUSAL,
        )  # fmt: skip
        start = start.to(tl.int64)
        real_n = n < length_n
        mask = real_n[None, :]
        if CAUSAL:
            mask = mask & (start + n[None, :] <= (last_key + in_tile)[:, None])
        if BITS:
            mask = mask & row_choice(bits_ptr, block, bits_s, bits_w, in_tile, real)[:, None]
        both = real_n[:, None] & real_d
        k = load_rows(k_base, k_tile, b, kv_h, start, k_s, both, BN, DP, True, TMA)
        v = load_rows(v_base, v_tile, b, kv_h, start, v_s, both, BN, DP, True, TMA)
        dq = _query_step(q, grad, k, v, level, delta, dq, mask, scale_log2, True, UPCAST)

    owned = real
    if Q_LENGTHS and not Q_STARTS:
        owned = inside < size  # the padding of a block is its own, and is set to zero
    dq = tl.where(real[:, None], dq * scale, 0.0)
    dq_ptrs = dq_ptr + b * dq_b + h * dq_h + (first_row + in_tile[:, None]) * dq_s + d[None, :]
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=owned[:, None] & real_d)


@triton.jit(do_not_specialize=[*PLAN_NUMBERS, "q_total"])
def _key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, level_ptr, delta_ptr, dk_ptr, dv_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    bits_ptr,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, grad_b, grad_s, grad_h, grad_d,
    dk_b, dk_s, dk_h, level_b, level_h, bits_b, bits_h, bits_s, bits_w, q_total, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KSUB: tl.constexpr, SUB: tl.constexpr, RAGGED_END: tl.constexpr,
    KV_STARTS: tl.constexpr, KV_LENGTHS: tl.constexpr, ORDERED: tl.constexpr, BITS: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nk * KSUB]; KSUB tiles of BN keys per key block, steps of BM queries.

    The plan is the transposed one: its rows are keys, and what it lists are blocks of queries. dk
    and dv are of query heads. CAUSAL: every query block is listed, and steps are counted instead.
    """
    b, h, j, sub = locate(order_ptr, rows, rep_h, num, plan_h, KSUB, ORDERED)
    list_ptr += b * list_b + h * list_h + j * list_n
    at = b * count_b + h * count_h + j * count_n
    count = tl.load(count_ptr + at)
    begin, length = bounds(
        b, h, j, size, total, start_ptr, length_ptr, start_b, start_h, length_b, length_h,
        KV_STARTS, KV_LENGTHS,
    )  # fmt: skip
    first = 0
    num_full, num_tail = number_of_steps(
        list_ptr, count, tail_count_ptr, at, last, tail, SUB, BM, RAGGED_END
    )
    first_tail = num_full
    if CAUSAL:
        first_key = begin + sub * BN
        earliest = first_key + q_total - total  # the first query that sees the first key
        num_full = q_total // BM
        first_tail = tl.minimum(tl.maximum(earliest, 0) // BM, num_full)
        first = tl.minimum(tl.cdiv(tl.maximum(earliest + BN - 1, 0), BM), num_full)
        num_tail = first - first_tail + (q_total % BM > 0).to(tl.int32)
    num_full = tl.where(sub * BN < length, num_full, 0)
    num_tail = tl.where(sub * BN < length, num_tail, 0)

    d = tl.arange(0, DP)
    m = tl.arange(0, BM)
    in_tile = tl.arange(0, BN)
    inside = sub * BN + in_tile
    real = inside < length
    real_d = (d < D)[None, :]
    first_row = begin.to(tl.int64) + sub * BN
    kv_h = h // group
    if TMA:
        q_base, grad_base, k_base, v_base = q_ptr, grad_ptr, k_ptr, v_ptr
    else:
        q_base = q_ptr + b * q_b + h * q_h
        grad_base = grad_ptr + b * grad_b + h * grad_h
        k_base = k_ptr + b * k_b + kv_h * k_h
        v_base = v_ptr + b * v_b + kv_h * v_h
    q_tile = m[:, None] * q_s + d[None, :] * q_d
    grad_tile = m[:, None] * grad_s + d[None, :] * grad_d
    k_tile = in_tile[:, None] * k_s + d[None, :] * k_d
    v_tile = in_tile[:, None] * v_s + d[None, :] * v_d
    own = real[:, None] & real_d
    k = load_rows(k_base, k_tile, b, kv_h, first_row, k_s, own, BN, DP, not TMA, TMA)
    v = load_rows(v_base, v_tile, b, kv_h, first_row, v_s, own, BN, DP, not TMA, TMA)
    level_ptr += b * level_b + h * level_h
    delta_ptr += b * level_b + h * level_h
    if BITS:
        bits_ptr += b * bits_b + h * bits_h

    scale_log2 = scale * 1.4426950408889634
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    entry = tl.load(list_ptr, mask=num_full > 0, other=0)
    for step in tl.range(first, num_full, num_stages=STAGES):
        if CAUSAL:
            start = tl.full([], BM, tl.int64) * step
        else:
            start = entry.to(tl.int64)
            at_next = step + 1
            if SUB > 0:
                start = (start * SUB + step % SUB) * BM
                at_next = (step + 1) // SUB
            entry = tl.load(list_ptr + at_next, mask=step + 1 < num_full, other=0)
        mask = True
        if BITS:
            mask = row_choice(bits_ptr, j, bits_s, bits_w, start + m, m < BM)[None, :]
        level = tl.load(level_ptr + start + m)
        delta = tl.load(delta_ptr + start + m)
        q = load_rows(q_base, q_tile, b, h, start, q_s, real_d, BM, DP, D < DP and not TMA, TMA)
        grad = load_rows(
            grad_base, grad_tile, b, h, start, grad_s, real_d, BM, DP, D < DP and not TMA, TMA
        )
        dk, dv = _key_step(
            q, grad, k, v, level, delta, dk, dv, mask, scale_log2, BITS, UPCAST
        )  # fmt: skip

    for step in tl.range(0, num_tail, num_stages=1):
        if CAUSAL:
            at_step = tl.where(first_tail + step < first, first_tail + step, q_total // BM)
            start = at_step.to(tl.int64) * BM
            length_m = tl.minimum(q_total - start, BM)
        elif SUB > 0:
            start = (last * SUB + tail // BM).to(tl.int64) * BM
            length_m = tail % BM
        else:
            start = tl.load(list_ptr + room - 1 - step).to(tl.int64)
            length_m = tl.load(tail_length_ptr + at * tail_room + step)
        real_m = m < length_m
        mask = real_m[None, :]
        if CAUSAL:
            last_key = start + m + total - q_total
            mask = mask & (first_row + in_tile[:, None] <= last_key[None, :])
        if BITS:
            mask = mask & row_choice(bits_ptr, j, bits_s, bits_w, start + m, real_m)[None, :]
        level = tl.load(level_ptr + start + m, mask=real_m, other=float("inf"))
        delta = tl.load(delta_ptr + start + m, mask=real_m, other=0.0)
        both = (real_m & (level < float("inf")))[:, None] & real_d
        q = load_rows(q_base, q_tile, b, h, start, q_s, both, BM, DP, True, TMA)
        grad = load_rows(grad_base, grad_tile, b, h, start, grad_s, both, BM, DP, True, TMA)
        dk, dv = _key_step(q, grad, k, v, level, delta, dk, dv, mask, scale_log2, True, UPCAST)

    owned = real
    if KV_LENGTHS and not KV_STARTS:
        owned = inside < size  # the padding of a block is its own, and is set to zero
    dk = tl.where(real[:, None], dk * scale, 0.0)
    dv = tl.where(real[:, None], dv, 0.0)
    at_out = b * dk_b + h * dk_h + (first_row + in_tile[:, None]) * dk_s + d[None, :]
    tl.store(dk_ptr + at_out, dk.to(dk_ptr.dtype.element_ty), mask=owned[:, None] & real_d)
    tl.store(dv_ptr + at_out, dv.to(dv_ptr.dtype.element_ty), mask=owned[:, None] & real_d)


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
        (counts.numel(),), indices, counts, marks, *indices.stride(), *counts.stride(),
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
        *out.stride(), *grad_out.stride(), *lse.stride(), *given.stride(), total, heads,
        BM=PREPARED, D=head_size, DP=next_power_of_2(max(head_size, 16)),
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
    tiles_of_block = -(-plan.q.size // tile.rows)
    _launch_query_gradient(
        (work.num * tiles_of_block,), *_loaded(call, tile, copy_engine), rows[0], rows[1], dq,
        *work.arguments, work.blocks, bits, *_strides(call), *dq.stride()[:3],
        *rows.stride()[1:3], *bits.stride(), call.scale,
        BM=tile.rows, BN=tile.keys, D=head_size, DP=next_power_of_2(max(head_size, 16)),
        QSUB=tiles_of_block, SUB=work.sub, RAGGED_END=work.ragged,
        Q_STARTS=plan.q.starts is not None, Q_LENGTHS=plan.q.lengths is not None,
        ORDERED=work.ordered, BITS=plan.row_bits is not None,
        STAGES=tile.stages, UPCAST=interpreted(), TMA=copy_engine, CAUSAL=plan.causal,
        num_warps=tile.warps, num_stages=tile.stages,
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
    tiles_of_block = -(-plan.kv.size // tile.keys)
    _launch_key_gradients(
        (work.num * tiles_of_block,), *_loaded(call, tile, copy_engine), rows[0], rows[1], dk, dv,
        *work.arguments, bits, *_strides(call), *dk.stride()[:3],
        *rows.stride()[1:3], *bits.stride(), plan.q.total, call.scale,
        BM=tile.rows, BN=tile.keys, D=head_size, DP=next_power_of_2(max(head_size, 16)),
        KSUB=tiles_of_block, SUB=work.sub, RAGGED_END=work.ragged,
        KV_STARTS=plan.kv.starts is not None, KV_LENGTHS=plan.kv.lengths is not None,
        # Under causality the first keys, which start first, are seen by the most queries.
        ORDERED=work.ordered and not plan.causal, BITS=plan.row_bits is not None,
        STAGES=tile.stages, UPCAST=interpreted(), TMA=copy_engine, CAUSAL=plan.causal,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _loaded(call: Backward, tile: TritonTile, copy_engine: bool) -> tuple[object, ...]:
    """Return what kernels load q, k, v and the gradient from: tensors, or their descriptors."""
    inputs = (call.q, call.k, call.v, call.grad_out)
    if not copy_engine:
        return inputs
    width = next_power_of_2(max(call.q.shape[3], 16))
    rows = (tile.rows, tile.keys, tile.keys, tile.rows)
    return tuple(describe(x, n, width) for x, n in zip(inputs, rows, strict=True))


def _strides(call: Backward) -> tuple[int, ...]:
    """Return the strides of the same tensors."""
    tensors = (call.q, call.k, call.v, call.grad_out)
    return tuple(stride for tensor in tensors for stride in tensor.stride())
