"""Block-sparse attention on SM90 in Gluon: producer warps feed consumer warpgroups.

A consumer warpgroup owns 64 query rows. K and V travel through rings of STAGES shared-memory tiles
of BN keys, with a full and an empty barrier each; V lags K by one step, and the product P V of a
step runs while the scores of the next one are computed. With s = scale * log2(e) * q k^T:

* exact: the online softmax, m' = max(m, rowmax s), acc = acc 2^(m - m') + 2^(s - m') v;
* lazy: the same, with m' = m unless rowmax s > m + SLACK. Weights then reach 2^SLACK, which costs
  no bits, and hardly any step rescales: each warp of 16 rows jumps over it when it may;
* fast: the row maximum of the first step stays the reference, so nothing is rescaled. bfloat16
  weights have the exponents of fp32, so only a row whose later scores are far above the reference
  can go wrong. Such tiles are flagged, and the exact kernel redoes them.

Where rows choose among the blocks of their list, a step of a block that a row does not keep has the
reference infinity in that row, which makes its weights 0.

OWN: every consumer has its own query block, ring and producer warp; else all consumers share one.

SKIP: where the scores of a step lie so many powers of two below m in all 64 rows of a consumer, its
weights are not added, and its product P V does not run. It takes the exact or the lazy kernel; the
lazy one's m may be up to SLACK below the largest score, which then skips less.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multimodal_gen.kernels.block_sparse.gluon_work_kernel import (
    Outs,
    Plan,
    Rings,
    Shape,
    block_ahead,
    block_of,
    choices,
    find_work,
    first_turn,
    infinity,
    lost,
    step_start,
    store_rows,
    tail_keys,
)
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, launch_order, unit_stride
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.steps_kernel import make_steps
from multimodal_gen.kernels.block_sparse.tuning import GluonTile
from multimodal_gen.kernels.gluon_compat import async_load
from multimodal_gen.kernels.gluon_descriptors import TOKENS_BY_HEAD, described_at
from multimodal_gen.kernels.launcher import Launch, Launcher

# Sums past this may have lost a weight to infinity; values below 2^63 then still stay finite.
OVERFLOW = gl.constexpr(2.0**64)
# Rows that choose may not see the keys of the reference: below this, weights may have been lost.
UNDERFLOW = gl.constexpr(2.0**-64)
# How far, in powers of two, scores may lie above a lazy reference.
SLACK = gl.constexpr(8.0)
# Lower than any score, and finite: the maximum of nothing.
LOWEST = gl.constexpr(-3.0e38)


@gluon.jit
def _load_v(dv, work, start, step, rings, FIRST: gl.constexpr, C: gl.constexpr):
    """Load V of a step, once its slot is empty."""
    slot = FIRST + step % C.stages
    mbarrier.wait(rings.v_empty.index(slot), ((step // C.stages) & 1) ^ 1)
    mbarrier.expect(rings.v_full.index(slot), C.keys * C.head_size * 2)
    async_load(dv, [work.b, work.kv_h, start, 0], rings.v_full.index(slot), rings.v.index(slot))


@gluon.jit
def _producer(dq, dk, dv, work, rings, W: gl.constexpr, C: gl.constexpr):
    """One warp: loads a tile's Q, and K and V of every step, V one step late."""
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    steps = work.num_full + work.num_tail
    if steps > 0:
        turn = steps * 0
        if C.sync > 0:
            turn = first_turn(work, gl.load(work.sweep, volatile=True), C)
        start = step_start(work, 0, turn, C)
        for c in gl.static_range(SHARERS):
            mbarrier.expect(rings.q_full.index(W + c), 64 * C.head_size * 2)
            async_load(
                dq, [work.b, work.h, work.row + c * 64, 0], rings.q_full.index(W + c),
                rings.q.index(W + c),
            )  # fmt: skip
        # Not `start`: the compiler takes loop variables that begin with one value for the same.
        before = steps * 0
        for step in range(steps):
            following = step_start(work, gl.minimum(step + 1, steps - 1), turn, C)
            if C.sync > 0:
                gl.store(work.sweep, start, mask=step % C.sync == C.sync - 1)
            slot = FIRST + step % C.stages
            mbarrier.wait(rings.k_empty.index(slot), ((step // C.stages) & 1) ^ 1)
            mbarrier.expect(rings.k_full.index(slot), C.keys * C.head_size * 2)
            async_load(
                dk, [work.b, work.kv_h, start, 0], rings.k_full.index(slot), rings.k.index(slot)
            )
            if step > 0:
                _load_v(dv, work, before, step - 1, rings, FIRST, C)
            before = start
            start = following
        _load_v(dv, work, before, steps - 1, rings, FIRST, C)


@gluon.jit
def _partial_sums(p, C: gl.constexpr):
    """Row sums as four partial sums per row, which needs no shuffle: [64, 4]."""
    BN: gl.constexpr = C.keys
    return gl.sum(gl.sum(gl.reshape(p, [64, BN // 8, 4, 2]), 3), 1)


def _rescale_assembly(count: int) -> str:
    """Return PTX that multiplies `count` values $count.. by factors, unless all of a warp's are 1.

    A thread of an MMA accumulator holds pairs of two rows in turns, so factors 0 and 2 are those
    of its rows.
    """
    factor = 2 * count
    moves = "".join(f"mov.f32 ${i}, ${count + i};" for i in range(count))
    products = "".join(f"mul.f32 ${i}, ${i}, ${factor + i};" for i in range(count))
    return (
        "{ .reg .pred any;"
        f"setp.neu.f32 any, ${factor}, 0f3F800000;"
        f"setp.neu.or.f32 any, ${factor + 2}, 0f3F800000, any;"
        "vote.sync.any.pred any, any, 0xffffffff;"
        f"{moves}"
        "@!any bra.uni SKIP_${:uid};"
        f"{products}"
        "SKIP_${:uid}: }"
    )


RESCALE = gl.constexpr(_rescale_assembly(32))
RESCALE_WIDE = gl.constexpr(_rescale_assembly(64))
OPERANDS = gl.constexpr(",".join(["=f"] * 32 + ["f"] * 64))
OPERANDS_WIDE = gl.constexpr(",".join(["=f"] * 64 + ["f"] * 128))


@gluon.jit
def _rescale(acc, alpha, C: gl.constexpr):
    """Return `acc` times `alpha`, both [64, D]; jumps over it where all factors of a warp are 1."""
    if C.head_size == 128:
        acc = gl.inline_asm_elementwise(
            RESCALE_WIDE, OPERANDS_WIDE, [acc, alpha], dtype=gl.float32, is_pure=True, pack=64
        )
    else:
        acc = gl.inline_asm_elementwise(
            RESCALE, OPERANDS, [acc, alpha], dtype=gl.float32, is_pure=True, pack=32
        )
    return acc


@gluon.jit
def _nearest(m_step, m, words, block, work, ROW: gl.constexpr, C: gl.constexpr):
    """Return how far above its reference the highest score of a step lies, of all rows; []."""
    seen = ROW + gl.arange(0, 64, m.type.layout) < work.real
    if C.bits:
        seen = seen & (lost(words, block) == 0)
    return gl.max(gl.where(seen, m_step - m, LOWEST), 0)


@gluon.jit
def _advance(
    q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST: gl.constexpr,
    ROW: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr, block=None,
    words=None, nearest=0.0, PENDING: gl.constexpr = True,
):  # fmt: skip
    """Scores of `step` while P V of the step before is in flight, if PENDING; then its softmax.

    Where rows choose, `block` is that of the step, and `words` their choices if one word holds
    each. Where steps are skipped, `nearest` is made that of the step.
    """
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    rows_o: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    slot = FIRST + step % C.stages
    slot_v = FIRST + (step - 1) % C.stages
    if C.bits and not C.one_word:
        words = choices(work, ROW, block, gl.SliceLayout(1, s_layout), C)
    mbarrier.wait(rings.k_full.index(slot), (step // C.stages) & 1)
    k_t = rings.k.index(slot).reshape([BN, D]).permute((1, 0))
    s_token = hopper.warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
    mbarrier.wait(rings.v_full.index(slot_v), ((step - 1) // C.stages) & 1)
    if PENDING:
        v_tile = rings.v.index(slot_v).reshape([BN, D])
        o_token = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    else:
        s = hopper.warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(rings.k_empty.index(slot))
    if MASKED:
        columns = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
        s = gl.where(gl.expand_dims(columns < keys, 0), s, float("-inf"))
    m_new = m
    if not C.fast:
        m_step = gl.max(s, 1) * scale_log2
        if C.bits:
            m_step = gl.where(lost(words, block) == 0, m_step, LOWEST)
        if C.skip > 0:
            nearest = _nearest(m_step, m, words, block, work, ROW, C)
        m_new = gl.where(m_step > m + SLACK, m_step, m) if C.lazy else gl.maximum(m, m_step)
    reference = m_new
    if C.bits:
        reference = m_new + infinity(words, block)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(reference, 1))
    following = weights
    if not C.fast:
        alpha = gl.exp2(m - m_new)
    if C.lazy:
        sums_rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
        sums = sums * gl.expand_dims(gl.convert_layout(alpha, sums_rows), 1)
    if C.skip > 0:
        added = _partial_sums(p, C) if C.lazy else gl.sum(p, 1)
        added = gl.where(nearest > -C.skip, added, gl.zeros_like(added))
        sums = sums + added if C.lazy else sums * alpha + added
    elif C.fast or C.lazy:
        sums += _partial_sums(p, C)
    else:
        sums = sums * alpha + gl.sum(p, 1)
    if C.fast:
        # Before the wait, unlike below: that is what keeps the exact variant's registers down.
        following = gl.convert_layout(p.to(dtype), weights.type.layout)
    # The weights in flight must pass through the wait, or their registers are reused early.
    if C.fast and C.bits:
        # And so must the next ones, to be ready before it where that pays.
        acc, weights, following = hopper.warpgroup_mma_wait(0, deps=[o_token, weights, following])
    elif PENDING:
        acc, weights = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
    mbarrier.arrive(rings.v_empty.index(slot_v))
    if not C.fast:
        following = gl.convert_layout(p.to(dtype), weights.type.layout)
        factor, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(alpha, rows_o), 1), acc)
        acc = _rescale(acc, factor, C) if C.lazy else acc * factor
    return acc, sums, m_new, following, nearest


@gluon.jit
def _advance_or_skip(
    q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST: gl.constexpr,
    ROW: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr, block, words,
    nearest, skipped,
):  # fmt: skip
    """`_advance`, without P V of the step before where that one was skipped; counts those."""
    if C.skip > 0:
        if nearest > -C.skip:
            acc, sums, m, weights, nearest = _advance(
                q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, MASKED,
                dtype, C, block, words, nearest, True,
            )  # fmt: skip
        else:
            skipped += (nearest > LOWEST).to(gl.int32)
            acc, sums, m, weights, nearest = _advance(
                q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, MASKED,
                dtype, C, block, words, nearest, False,
            )  # fmt: skip
    else:
        acc, sums, m, weights, nearest = _advance(
            q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, MASKED,
            dtype, C, block, words, nearest,
        )  # fmt: skip
    return acc, sums, m, weights, nearest, skipped


@gluon.jit
def _last_product(acc, weights, rings, slot, C: gl.constexpr):
    """Return `acc` with P V of the last step."""
    v_tile = rings.v.index(slot).reshape([C.keys, C.head_size])
    o_token = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
    acc, weights = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
    return acc


@gluon.jit
def _consumer(
    work, rings, flags, scale_log2, W: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr
):
    """One warpgroup: attends with 64 query rows of a tile."""
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    ROW: gl.constexpr = 0 if C.own else W * 64
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    steps = work.num_full + work.num_tail
    if steps == 0:
        nothing = gl.zeros([64, D], dtype, store_layout)
        store_rows(nothing, gl.full([64], float("-inf"), gl.float32, rows_s), work, ROW, C)
    else:
        q_tile = rings.q.index(W).reshape([64, D])
        mbarrier.wait(rings.q_full.index(W), 0)
        q = q_tile
        if C.q_registers:
            q = q_tile.load(q_layout)
        words = None
        if C.bits:
            block = block_of(work, 0, C)
            words = choices(work, ROW, block, rows_s, C)
        mbarrier.wait(rings.k_full.index(FIRST), 0)
        k_t = rings.k.index(FIRST).reshape([BN, D]).permute((1, 0))
        zero = gl.zeros([64, BN], gl.float32, s_layout)
        s_token = hopper.warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(rings.k_empty.index(FIRST))
        if C.ragged:
            keys = gl.to_tensor(BN)
            if work.num_tail > 0:
                keys = tail_keys(work, 0, C)
            columns = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
            s = gl.where(gl.expand_dims(columns < keys, 0), s, float("-inf"))
        m = gl.max(s, 1) * scale_log2
        reference = m
        if C.bits:
            reference = m + infinity(words, block)
            if not C.fast:
                m = gl.where(lost(words, block) == 0, m, LOWEST)
        p = gl.exp2(s * scale_log2 - gl.expand_dims(reference, 1))
        sums = _partial_sums(p, C) if C.fast or C.lazy else gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), p_layout)
        acc = gl.zeros([64, D], gl.float32, o_layout)
        nearest = scale_log2 * 0  # of the first step, which counts
        skipped = steps * 0
        last = work.num_full
        if C.ragged:
            last += gl.minimum(work.num_tail, 1)
        # Blocks are looked up a step ahead, so that no product waits for them.
        ahead = block_ahead(work, 0, C)
        for step in range(1, last):
            block = ahead
            ahead = block_ahead(work, step, C)
            acc, sums, m, weights, nearest, skipped = _advance_or_skip(
                q, rings, acc, sums, m, weights, BN, step, work, scale_log2, FIRST, ROW, False,
                dtype, C, block, words, nearest, skipped,
            )  # fmt: skip
        if C.sub == 0:  # a regular plan has one partial step at most
            for step in range(last, steps):
                keys = tail_keys(work, step - work.num_full, C)
                block = ahead
                ahead = block_ahead(work, step, C)
                acc, sums, m, weights, nearest, skipped = _advance_or_skip(
                    q, rings, acc, sums, m, weights, keys, step, work, scale_log2, FIRST, ROW, True,
                    dtype, C, block, words, nearest, skipped,
                )  # fmt: skip
        slot = FIRST + (steps - 1) % C.stages
        mbarrier.wait(rings.v_full.index(slot), ((steps - 1) // C.stages) & 1)
        if C.skip > 0:
            if nearest > -C.skip:
                acc = _last_product(acc, weights, rings, slot, C)
            else:
                skipped += (nearest > LOWEST).to(gl.int32)
            if work.real > ROW:
                gl.atomic_add(flags, skipped.to(gl.int64))
                gl.atomic_add(flags + 1, steps.to(gl.int64))
        else:
            acc = _last_product(acc, weights, rings, slot, C)

        row_sum = sums
        if C.fast or C.lazy:
            row_sum = gl.convert_layout(gl.sum(sums, 1), rows_s)
        if C.fast:
            real = ROW + gl.arange(0, 64, rows_s) < work.real
            sound = row_sum < OVERFLOW
            if C.bits:
                sound = sound & (row_sum > UNDERFLOW)
            wrong = gl.max((real & ~sound).to(gl.int32), 0)
            if wrong > 0:
                gl.store(flags + gl.program_id(0), wrong)
        inverse = 1.0 / row_sum
        lse = 0.6931471805599453 * (m + gl.log2(row_sum))
        if C.bits:
            inverse = gl.where(row_sum > 0.0, inverse, 0.0)
            lse = gl.where(row_sum > 0.0, lse, float("-inf"))
        o = acc * gl.expand_dims(gl.convert_layout(inverse, rows_o), 1)
        q_tile.store(o.to(dtype))
        staged = q_tile.load(store_layout)
        store_rows(staged, lse, work, ROW, C)


@gluon.jit
def _run(dq, dk, dv, plan, outs, flags, scale_log2, dtype: gl.constexpr, C: gl.constexpr):
    """Allocate the rings and start the partitions of one tile."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    CONSUMERS: gl.constexpr = C.consumers
    SLOTS: gl.constexpr = C.consumers * C.stages if C.own else C.stages
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    one: gl.constexpr = mbarrier.MBarrierLayout()
    rings = Rings(
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], dq.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BN, D], dk.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BN, D], dv.layout),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
    )
    for w in gl.static_range(CONSUMERS):
        mbarrier.init(rings.q_full.index(w), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(rings.k_full.index(slot), count=1)
        mbarrier.init(rings.v_full.index(slot), count=1)
        mbarrier.init(rings.k_empty.index(slot), count=SHARERS)
        mbarrier.init(rings.v_empty.index(slot), count=SHARERS)
    hopper.fence_async_shared()
    work = find_work(0, plan, outs, C)
    # warp_specialize takes literal lists of partitions only.
    if C.own:
        other = find_work(1, plan, outs, C)
        gl.warp_specialize(
            [
                (_consumer, (work, rings, flags, scale_log2, 0, dtype, C)),
                (_consumer, (other, rings, flags, scale_log2, 1, dtype, C)),
                (_producer, (dq, dk, dv, work, rings, 0, C)),
                (_producer, (dq, dk, dv, other, rings, 1, C)),
            ],
            [4, 1, 1],
            [C.registers, C.producer_registers, C.producer_registers],
        )
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (_consumer, (work, rings, flags, scale_log2, 0, dtype, C)),
                (_consumer, (work, rings, flags, scale_log2, 1, dtype, C)),
                (_producer, (dq, dk, dv, work, rings, 0, C)),
            ],
            [4, 1],
            [C.registers, C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (work, rings, flags, scale_log2, 0, dtype, C)),
                (_consumer, (work, rings, flags, scale_log2, 1, dtype, C)),
                (_consumer, (work, rings, flags, scale_log2, 2, dtype, C)),
                (_producer, (dq, dk, dv, work, rings, 0, C)),
            ],
            [4, 4, 1],
            [C.registers, C.registers, C.producer_registers],
        )


@gluon.jit(
    do_not_specialize=[
        "rows", "rep_h", "num_q", "plan_h", "group", "kv_last", "kv_tail", "room", "tail_room",
        "steps_b", "steps_h", "steps_q", "count_b", "count_h", "count_q", "sweep_b",
        "q_start_b", "q_start_h", "q_length_b", "q_length_h", "q_size", "q_total", "total",
        "bits_b", "bits_h", "words",
    ]
)  # fmt: skip
def attention_kernel(
    dq, dk, dv, out_ptr, lse_ptr, flag_ptr, sweep_ptr,
    step_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr,
    q_start_ptr, q_length_ptr,
    rows, rep_h, num_q, plan_h, group, kv_last, kv_tail, room, tail_room,
    steps_b, steps_h, steps_q, count_b, count_h, count_q, sweep_b,
    q_start_b, q_start_h, q_length_b, q_length_h, q_size, q_total, total,
    block_ptr, bits_ptr, bits_b, bits_h, words,
    out_b, out_s, out_h, lse_b, lse_h, scale_log2, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per tile; a redo does only those whose flag is set."""
    plan = Plan(
        step_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, sweep_ptr,
        rows, rep_h, num_q, plan_h, group, kv_last, kv_tail, room, tail_room,
        steps_b, steps_h, steps_q, count_b, count_h, count_q, sweep_b, q_start_ptr, q_length_ptr,
        q_start_b, q_start_h, q_length_b, q_length_h, q_size, q_total, total,
        block_ptr, bits_ptr, bits_b, bits_h, words,
    )  # fmt: skip
    outs = Outs(out_ptr, lse_ptr, out_b, out_s, out_h, lse_b, lse_h)
    dtype: gl.constexpr = dq.dtype
    if C.redo:
        if gl.load(flag_ptr + gl.program_id(0)) > 0:
            _run(dq, dk, dv, plan, outs, flag_ptr, scale_log2, dtype, C)
    else:
        _run(dq, dk, dv, plan, outs, flag_ptr, scale_log2, dtype, C)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    tile: GluonTile,
    skip: Skip | None = None,
) -> None:
    """Launch the kernel, and the redo of the tiles it flags; writes `out` and `lse`.

    Args:
        q: [B, Sq, H, D], stride 1 along D, all other strides multiples of 16 bytes.
        k: [B, Sk, Hkv, D], as q.
        v: [B, Sk, Hkv, D], as q.
        plan: the pairs, on the same device.
        out: contiguous [B, Sq, H, D]; only rows that belong to a query block are written.
        lse: contiguous fp32 [B, H, Sq], or None.
        scale: factor of the scores.
        tile: shape of a program, as `gluon_tile` chooses it; not `fast` where steps are skipped.
        skip: leaves out steps of `tile.keys` keys; see `Skip`.
    """
    below = 0.0 if skip is None else skip.octaves
    key = ("hopper", tile, q.shape, k.shape[2], q.dtype, lse is None, below)
    prepared = plan.cache.get(key)
    if prepared is None:
        prepared = plan.remember(key, _prepare(q, k, plan, tile, out, lse, below))
    rows = prepared.num_flags
    marks = sweep = prepared.counts  # where nothing is marked
    if rows or prepared.num_sweeps:
        # One allocation, whose second part begins at a multiple of 16 bytes like the first.
        marks = prepared.counts.new_zeros(rows + prepared.num_sweeps)
        sweep = marks[rows:] if prepared.num_sweeps else marks
    # Where steps are skipped nothing is flagged, and they are counted in that place.
    flags = marks if skip is None else skip.counts_on(q.device)
    inputs = prepared.inputs(
        (q.data_ptr(), k.data_ptr(), v.data_ptr()), (q.stride(), k.stride(), v.stride())
    )
    launched = (*inputs, out, out if lse is None else lse, flags, sweep)
    prepared.launch(launched, scale / math.log(2.0))


@cache
def _launcher() -> Launcher:
    return Launcher(attention_kernel)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """What launches on one plan have in common, whatever the tensors.

    Attributes:
        launch: the kernel, and the one that redoes flagged tiles, if any.
        counts: a tensor of the plan.
        num_flags: int32 flags to make room for, a multiple of four; 0 where no tile is flagged.
        num_sweeps: positions of key sweeps to make room for.
        inputs: returns the descriptors of q, k and v at three addresses, with three strides.
    """

    launch: Launch
    counts: torch.Tensor
    num_flags: int
    num_sweeps: int
    inputs: Callable[..., tuple[TensorDescriptor, ...]]


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: BlockPlan,
    tile: GluonTile,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    below: float,
) -> _Prepared:
    """Return what launches on a plan have in common; `below` as octaves, 0 to skip nothing."""
    assert not (tile.fast and below), "the fast kernel knows no maxima"
    batch, _, heads, channels = q.shape
    kv = plan.kv
    whole = kv.is_regular and kv.size % tile.keys == 0 and plan.row_bits is None
    sub = kv.size // tile.keys if whole else 0
    steps = None if sub else make_steps(plan, tile.keys)
    lists = plan.indices if steps is None else steps.starts
    lists = unit_stride(lists)
    counts = plan.counts if steps is None else steps.num_full
    tail_counts = counts if steps is None else steps.num_tail
    tail_lengths = counts if steps is None else steps.tail_lengths
    # A plan with row bits is always cut in steps, none of which are merged.
    blocks = lists if steps is None or steps.blocks is None else steps.blocks
    bits = counts.unsqueeze(3) if plan.row_bits is None else plan.row_bits.contiguous()
    order = launch_order(plan, counts)
    _, plan_h, num_q = counts.shape
    total = batch * heads * num_q
    num_tiles = -(-total // tile.consumers) if tile.own else total * _q_tiles(plan, tile)
    kv_tail = kv.total - (kv.num - 1) * kv.size
    shape = _shape(
        plan, tile, channels, sub, ordered=order is not None, lse=lse is not None, below=below
    )
    q_bounds = [
        counts if t is None else unit_stride(t).expand(batch, heads, -1)
        for t in (plan.q.starts, plan.q.lengths)
    ]
    every_list, every_count = lists.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    arguments = (
        every_list, every_count, tail_counts, tail_lengths, counts if order is None else order,
        *q_bounds, counts.numel(), heads // plan_h, num_q, plan_h, heads // k.shape[2],
        kv.num - 1, kv_tail, lists.shape[3], plan.indices.shape[3],
        *every_list.stride()[:3], *every_count.stride(), k.shape[2],
        *q_bounds[0].stride()[:2], *q_bounds[1].stride()[:2], plan.q.size, plan.q.total, total,
        blocks, bits, *bits.expand(batch, heads, -1, -1).stride()[:2], bits.shape[3],
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
    )  # fmt: skip
    redo = dataclasses.replace(shape, fast=False, redo=True, sync=0)
    variants = [{"C": c, "num_warps": 4} for c in ((shape, redo) if tile.fast else (shape,))]
    return _Prepared(
        launch=Launch(_launcher(), (num_tiles,), arguments, variants),
        counts=counts,
        num_flags=-(-num_tiles // 4) * 4 if tile.fast else 0,
        num_sweeps=batch * k.shape[2] if tile.sync else 0,
        inputs=lru_cache(maxsize=1024)(
            partial(
                _inputs_at,
                shapes=(q.shape, k.shape, k.shape),
                dtype=q.dtype,
                rows=(64, tile.keys, tile.keys),
                head_size=shape.head_size,
            )
        ),
    )


def _inputs_at(
    addresses: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    *,
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype,
    rows: tuple[int, ...],
    head_size: int,
) -> tuple[TensorDescriptor, ...]:
    """Return the descriptors of several tensors [B, S, H, D]; see `described_at`."""
    every = zip(addresses, shapes, strides, rows, strict=True)
    return tuple(
        described_at(at, *form, dtype, n, head_size, TOKENS_BY_HEAD) for at, *form, n in every
    )


def _q_tiles(plan: BlockPlan, tile: GluonTile) -> int:
    """Return how many tiles a query block takes."""
    return 1 if tile.own else -(-plan.q.size // (64 * tile.consumers))


def _shape(
    plan: BlockPlan,
    tile: GluonTile,
    channels: int,
    sub: int,
    *,
    ordered: bool,
    lse: bool,
    below: float,
) -> Shape:
    """Return the compile-time shape of the kernel."""
    kv_tail = plan.kv.total - (plan.kv.num - 1) * plan.kv.size
    return Shape(
        keys=tile.keys,
        head_size=64 if channels <= 64 else 128,
        channels=channels,
        sub=sub,
        q_tiles=_q_tiles(plan, tile),
        consumers=tile.consumers,
        stages=tile.stages,
        own=tile.own,
        q_registers=tile.q_registers,
        fast=tile.fast,
        lazy=tile.lazy,
        sync=tile.sync,
        ragged=sub == 0 or kv_tail != plan.kv.size,
        ordered=ordered,
        q_starts=plan.q.starts is not None,
        q_lengths=plan.q.lengths is not None,
        bits=plan.row_bits is not None,
        one_word=plan.row_bits is not None and plan.row_bits.shape[3] == 1,
        lse=lse,
        skip=below,
        redo=False,
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
