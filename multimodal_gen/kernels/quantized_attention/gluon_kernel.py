"""8-bit attention on SM90 in Gluon: int8 Q K^T and e4m3 P V, producer warp and consumer warpgroups.

A consumer warpgroup owns 64 query rows. K and V travel through a ring of STAGES pairs of tiles of
BN keys, K of a step with V of the step before, so that the product P V of a step runs while the
scores of the next one are computed. Three things differ from 16 bits:

* The int32 accumulator of Q K^T starts at 0x4B400000. Read as fp32 a sum x is then 12582912 + x
  exactly, so that no conversion is needed, and the constant folds into the one multiply-add that
  scales the score.
* P stays in registers. A thread holds the scores of the keys 2t, 2t+1, 2t+8 and 2t+9 of 16 where
  the e4m3 operand wants four neighbours; the quantiser stores the keys of V in that order.
* Tensor cores keep about 14 bits of an e4m3 sum, so every step sums into registers of its own and
  is then added in fp32. The scale of V, one per BN keys, is undone by the factor that the online
  softmax multiplies the old sum with anyway.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, launch_order
from multimodal_gen.kernels.block_sparse.steps_kernel import make_steps
from multimodal_gen.kernels.launch.descriptors import describe, describe_tokens
from multimodal_gen.kernels.launch.launcher import Launch, Launcher
from multimodal_gen.kernels.quantized_attention.gluon_work_kernel import (
    Outs,
    Plan,
    Rings,
    Scales,
    Shape,
    find_work,
    produce,
    step_keys,
    step_starts,
)
from multimodal_gen.kernels.quantized_attention.packed import Packed, bounds_of, in_slots
from multimodal_gen.kernels.quantized_attention.tuning import GluonTile

MAGIC = gl.constexpr(0x4B400000)
MAGIC_VALUE = gl.constexpr(12582912.0)
# Weights are e4m3 times 2^LIFT = 448, the largest e4m3 number: the largest weight is exact.
LIFT = gl.constexpr(8.807354922057604)
# Sums past this may have lost a weight to infinity; values below 2^63 then still stay finite.
OVERFLOW = gl.constexpr(2.0**64)

# Four numbers to one register; a cast packs them in another order and shuffles bytes afterwards.
PACK = gl.constexpr(
    """
    {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }
    """
)


class State(NamedTuple):
    """What a consumer carries from step to step.

    `part` is P V of the step before the last, not in `acc` yet, which is to be multiplied by
    `part_rescale` first; `words` are the last step's weights, and `rescale` is for their product.
    """

    acc: Any
    part: Any
    part_rescale: Any
    rescale: Any
    words: Any
    sums: Any
    m: Any


@gluon.jit
def _pack(p, C: gl.constexpr):
    """Return weights [64, BN] as bfloat16 operand, or as e4m3, four to a word of [64, BN / 4].

    The keys that a thread holds become neighbours, which is the order of the quantised V. Loops
    carry words: of bytes, each would get a register of its own.
    """
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    if C.e4m3:
        p = gl.reshape(p, [64, BN // 16, 2, 4, 2])
        p = gl.reshape(gl.permute(p, [0, 1, 3, 2, 4]), [64, BN // 4, 2, 2])
        even, odd = gl.split(p)
        p_0, p_2 = gl.split(even)
        p_1, p_3 = gl.split(odd)
        words = gl.inline_asm_elementwise(
            PACK, "=r,r,r,r,r", [p_0, p_1, p_2, p_3], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        o_layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
        )
        p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
        words = gl.convert_layout(p.to(gl.bfloat16), p_layout, assert_trivial=True)
    return words


@gluon.jit
def _operand(words, C: gl.constexpr):
    """Return packed weights as operand of P V, [64, BN]; takes no instruction."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=4)
    pair = gl.join(words, words)
    four = gl.reshape(gl.join(pair, pair), [64, BN])
    four = gl.convert_layout(four, p_layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "", "=r,0,r,r,r", [four], dtype=gl.float8e4nv, is_pure=False, pack=4
    )


@gluon.jit
def _keep(weights):
    """Use weights after the wait for their product, or their registers are reused in flight.

    The wait itself takes no 8-bit tensors.
    """
    gl.inline_asm_elementwise("", "=r,0", [weights], dtype=gl.float8e4nv, is_pure=False, pack=4)


@gluon.jit
def _scores(q, k_t, C: gl.constexpr):
    """Start Q K^T, with sums that read as fp32 are 12582912 too large."""
    BN: gl.constexpr = C.keys
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32]
    )
    start = gl.full([64, BN], MAGIC, gl.int32, s_layout)
    # Opaque, or the registers would be set after the fence that the product begins with.
    start = gl.inline_asm_elementwise("", "=r,0", [start], dtype=gl.int32, is_pure=False, pack=1)
    return hopper.warpgroup_mma(q, k_t, start, is_async=True)


@gluon.jit
def _wait_full(rings, entry, C: gl.constexpr):
    """Wait for an entry of the ring."""
    mbarrier.wait(rings.full.index(entry % C.stages), (entry // C.stages) & 1)


@gluon.jit
def _partial_sums(p, C: gl.constexpr):
    """Row sums as four partial sums per row, which needs no shuffle: [64, 4]."""
    BN: gl.constexpr = C.keys
    return gl.sum(gl.sum(gl.reshape(p, [64, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def _weights(
    s, q_scale, k_scales, m, keys, MASKED: gl.constexpr, FIXED: gl.constexpr, C: gl.constexpr
):
    """Return weights, times 2^LIFT where they are e4m3, and the new reference."""
    BN: gl.constexpr = C.keys
    s_layout: gl.constexpr = s.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    x = s.to(gl.float32, bitcast=True)
    if MASKED:
        columns = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
        x = gl.where(gl.expand_dims(columns < keys, 0), x, float("-inf"))
    m_new = m
    if C.unit < C.keys:
        x = gl.reshape(x, [64, 2, BN // 2])
        halves: gl.constexpr = gl.SliceLayout(2, x.type.layout)
        factor = gl.convert_layout(gl.join(q_scale * k_scales[0], q_scale * k_scales[1]), halves)
        bias = factor * (-MAGIC_VALUE)
        if not FIXED:
            top = gl.max(gl.fma(gl.max(x, 2), factor, bias), 1)
            m_new = gl.maximum(m, gl.convert_layout(top, rows))
        inner: gl.constexpr = gl.SliceLayout(1, halves)
        bias -= gl.expand_dims(gl.convert_layout(m_new, inner), 1)
        p = gl.exp2(gl.fma(x, gl.expand_dims(factor, 2), gl.expand_dims(bias, 2)))
        p = gl.convert_layout(gl.reshape(p, [64, BN]), s_layout, assert_trivial=True)
    else:
        factor = q_scale * k_scales[0]
        bias = factor * (-MAGIC_VALUE)
        if not FIXED:
            # Positive floats are ordered as their bits.
            top = gl.max(x, 1) if MASKED else gl.max(s, 1).to(gl.float32, bitcast=True)
            m_new = gl.maximum(m, gl.fma(top, factor, bias))
        bias -= m_new
        if C.e4m3:
            bias += LIFT
        p = gl.exp2(gl.fma(x, gl.expand_dims(factor, 1), gl.expand_dims(bias, 1)))
    return p, m_new


@gluon.jit
def _advance_e4m3(
    q, rings, state, q_scale, k_scales, v_ratio, keys, step, MASKED: gl.constexpr, C: gl.constexpr
):
    """Scores of `step` while P V of the step before is in flight; then its softmax."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    o_layout: gl.constexpr = state.acc.type.layout
    slot = step % C.stages
    weights = _operand(state.words, C)
    s_token = _scores(q, rings.k.index(slot).reshape([BN, D]).permute((1, 0)), C)
    acc = gl.fma(state.acc, gl.expand_dims(state.part_rescale, 1), state.part)
    v_tile = rings.v.index(slot).reshape([D, BN]).permute((1, 0))
    zero = gl.zeros([64, D], gl.float32, o_layout)
    o_token = hopper.warpgroup_mma(weights, v_tile, zero, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    p, m = _weights(s, q_scale, k_scales, state.m, keys, MASKED, False, C)
    alpha = gl.exp2(state.m - m)
    sums = state.sums * alpha + gl.sum(p, 1)
    # The sums' shuffles keep the softmax ahead of this wait, which keeps it ahead of that for P V:
    # the compiler would wait for P V first.
    _wait_full(rings, step + 1, C)
    part = hopper.warpgroup_mma_wait(0, deps=[o_token])
    _keep(weights)
    mbarrier.arrive(rings.empty.index(slot))
    # Words of the product in flight must not be made before its wait, or it is serialised.
    words = _pack(p, C)
    rescale = gl.convert_layout(alpha * v_ratio, gl.SliceLayout(1, o_layout))
    return State(acc, part, state.rescale, rescale, words, sums, m)


@gluon.jit
def _advance_bfloat16(
    q, rings, state, q_scale, k_scales, keys, step, MASKED: gl.constexpr, C: gl.constexpr
):
    """The same with bfloat16 weights and values, whose product sums into `acc` itself."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    rows_o: gl.constexpr = gl.SliceLayout(1, state.acc.type.layout)
    slot = step % C.stages
    s_token = _scores(q, rings.k.index(slot).reshape([BN, D]).permute((1, 0)), C)
    v_tile = rings.v.index(slot).reshape([BN, D])
    o_token = hopper.warpgroup_mma(state.words, v_tile, state.acc, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    p, m = _weights(s, q_scale, k_scales, state.m, keys, MASKED, C.fast, C)
    sums = state.sums
    if C.fast:
        sums += _partial_sums(p, C)
        words = _pack(p, C)
    else:
        alpha = gl.exp2(state.m - m)
        sums = sums * alpha + gl.sum(p, 1)
    _wait_full(rings, step + 1, C)
    # The weights in flight must pass through the wait, or their registers are reused early.
    acc, _ = hopper.warpgroup_mma_wait(0, deps=[o_token, state.words])
    mbarrier.arrive(rings.empty.index(slot))
    if not C.fast:
        words = _pack(p, C)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, rows_o), 1)
    return State(acc, state.part, state.part_rescale, state.rescale, words, sums, m)


@gluon.jit
def _advance(
    q, rings, state, q_scale, k_scales, v_ratio, keys, step, MASKED: gl.constexpr, C: gl.constexpr
):
    """One step."""
    if C.e4m3:
        state = _advance_e4m3(q, rings, state, q_scale, k_scales, v_ratio, keys, step, MASKED, C)
    else:
        state = _advance_bfloat16(q, rings, state, q_scale, k_scales, keys, step, MASKED, C)
    return state


@gluon.jit
def _last_product(rings, state, slot, C: gl.constexpr):
    """Add P V of the last step to the others."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    o_layout: gl.constexpr = state.acc.type.layout
    if C.e4m3:
        acc = gl.fma(state.acc, gl.expand_dims(state.part_rescale, 1), state.part)
        v_tile = rings.v.index(slot).reshape([D, BN]).permute((1, 0))
        weights = _operand(state.words, C)
        zero = gl.zeros([64, D], gl.float32, o_layout)
        o_token = hopper.warpgroup_mma(weights, v_tile, zero, use_acc=False, is_async=True)
        part = hopper.warpgroup_mma_wait(0, deps=[o_token])
        _keep(weights)
        acc = gl.fma(acc, gl.expand_dims(state.rescale, 1), part)
    else:
        v_tile = rings.v.index(slot).reshape([BN, D])
        o_token = hopper.warpgroup_mma(state.words, v_tile, state.acc, is_async=True)
        acc, _ = hopper.warpgroup_mma_wait(0, deps=[o_token, state.words])
    return acc


@gluon.jit
def _store(values, lse, work, first_row, C: gl.constexpr):
    """Write 64 rows of out and lse, those that the query block owns."""
    layout: gl.constexpr = values.type.layout
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C.head_size, gl.SliceLayout(0, layout))
    ptrs = work.out + (gl.expand_dims(rows * work.out_s, 1) + gl.expand_dims(channel, 0))
    if C.q_lengths:
        values = gl.where(gl.expand_dims(rows < work.real, 1), values, gl.zeros_like(values))
    mask = gl.expand_dims(rows < work.owned, 1)
    if C.channels < C.head_size:
        mask = mask & gl.expand_dims(channel < C.channels, 0)
    gl.store(ptrs, values, mask=mask)
    if C.lse:
        rows = first_row + gl.arange(0, 64, lse.type.layout)
        lse += gl.load(work.shift + rows, mask=rows < work.real, other=0.0)
        lse = gl.where(rows < work.real, lse, float("-inf"))
        gl.store(work.lse + rows, lse, mask=rows < work.owned)


@gluon.jit
def _scales(work, starts, v_scale, C: gl.constexpr):
    """Return the scales of K of a step's units, and that of V."""
    first = gl.load(work.k_scale + starts[0] // C.unit)
    second = first
    if C.unit < C.keys:
        second = gl.load(work.k_scale + starts[1] // C.unit)
    if C.e4m3:
        v_scale = gl.load(work.v_scale + starts[0] // C.unit)
    return (first, second), v_scale


@gluon.jit
def _consumer(work, rings, flag, W: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr):
    """One warpgroup: 64 query rows."""
    ROW: gl.constexpr = W * 64
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32 if C.e4m3 else 16]
    )
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    steps = work.steps
    if steps == 0:
        nothing = gl.zeros([64, D], dtype, store_layout)
        _store(nothing, gl.full([64], float("-inf"), gl.float32, rows_s), work, ROW, C)
    else:
        # Scales are read one step ahead, and where they stand two steps ahead.
        one = gl.to_tensor(1.0)
        k_scales, v_scale = _scales(work, step_starts(work, 0, C), one, C)
        k_next, v_next = _scales(work, step_starts(work, gl.minimum(1, steps - 1), C), one, C)
        starts = step_starts(work, gl.minimum(2, steps - 1), C)
        row = ROW + gl.arange(0, 64, rows_s)
        q_scale = gl.load(work.q_scale + row, mask=row < work.real, other=0.0)
        q = rings.q.index(W).reshape([64, D])
        mbarrier.wait(rings.q_full.index(W), 0)
        if C.q_registers:
            q_layout: gl.constexpr = gl.DotOperandLayout(
                operand_index=0, parent=s_layout, k_width=4
            )
            q = q.load(q_layout)
        _wait_full(rings, 0, C)
        s_token = _scores(q, rings.k.index(0).reshape([BN, D]).permute((1, 0)), C)
        s = hopper.warpgroup_mma_wait(0, deps=[s_token])
        keys = gl.to_tensor(BN)
        CUT: gl.constexpr = C.ragged or C.unit < BN
        if CUT and work.lead > 0:
            keys = step_keys(work, 0, C)
        m = gl.full([64], float("-inf"), gl.float32, rows_s)
        p, m = _weights(s, q_scale, k_scales, m, keys, CUT, False, C)
        none = gl.zeros([64, D], gl.float32, o_layout)
        no_row = gl.zeros([64], gl.float32, rows_o)
        sums = _partial_sums(p, C) if C.fast else gl.sum(p, 1)
        state = State(none, none, no_row, no_row, _pack(p, C), sums, m)
        mbarrier.arrive(rings.empty.index(0))
        _wait_full(rings, 1, C)
        last = work.lead + work.whole
        for step in range(1, last):
            k_scales = k_next
            v_ratio = v_scale / v_next
            v_scale = v_next
            k_next, v_next = _scales(work, starts, one, C)
            starts = step_starts(work, gl.minimum(step + 2, steps - 1), C)
            state = _advance(q, rings, state, q_scale, k_scales, v_ratio, BN, step, False, C)
        if C.sub == 0:  # a regular plan has one partial unit at most
            for step in range(last, steps):
                k_scales = k_next
                v_ratio = v_scale / v_next
                v_scale = v_next
                k_next, v_next = _scales(work, starts, one, C)
                starts = step_starts(work, gl.minimum(step + 2, steps - 1), C)
                keys = step_keys(work, step, C)
                state = _advance(q, rings, state, q_scale, k_scales, v_ratio, keys, step, True, C)
        m = state.m
        acc = _last_product(rings, state, steps % C.stages, C)
        if C.fast:
            sums = gl.convert_layout(gl.sum(state.sums, 1), rows_s)
            real = ROW + gl.arange(0, 64, rows_s) < work.real
            wrong = gl.max((real & ~(sums < OVERFLOW)).to(gl.int32), 0)
            if wrong > 0:
                gl.store(flag, wrong)
        else:
            sums = state.sums
        o = acc * gl.expand_dims(gl.convert_layout(v_scale / sums, rows_o), 1)
        out_tile = rings.out.index(W)
        out_tile.store(o.to(dtype))
        lift: gl.constexpr = LIFT if C.e4m3 else 0.0
        lse = 0.6931471805599453 * (m + gl.log2(sums) - lift)
        _store(out_tile.load(store_layout), lse, work, ROW, C)


@gluon.jit
def _run(dq, dk, dv, plan, scales, outs, flag, dtype: gl.constexpr, C: gl.constexpr):
    """Allocate the ring and start the partitions of one tile."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    CONSUMERS: gl.constexpr = C.consumers
    STAGES: gl.constexpr = C.stages
    V_TILE: gl.constexpr = [STAGES, 1, 1, D, BN] if C.e4m3 else [STAGES, 1, 1, BN, D]
    one: gl.constexpr = mbarrier.MBarrierLayout()
    out_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    rings = Rings(
        gl.allocate_shared_memory(gl.int8, [CONSUMERS, 1, 1, 64, D], dq.layout),
        gl.allocate_shared_memory(gl.int8, [STAGES, 1, 1, BN, D], dk.layout),
        gl.allocate_shared_memory(dv.dtype, V_TILE, dv.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], out_layout),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
    )
    for w in gl.static_range(CONSUMERS):
        mbarrier.init(rings.q_full.index(w), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(rings.full.index(slot), count=1)
        mbarrier.init(rings.empty.index(slot), count=CONSUMERS)
    hopper.fence_async_shared()
    work = find_work(plan, scales, outs, C)
    # warp_specialize takes literal lists of partitions only.
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (_consumer, (work, rings, flag, 0, dtype, C)),
                (produce, (dq, dk, dv, work, rings, C)),
            ],
            [1],
            [C.producer_registers],
        )
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (_consumer, (work, rings, flag, 0, dtype, C)),
                (_consumer, (work, rings, flag, 1, dtype, C)),
                (produce, (dq, dk, dv, work, rings, C)),
            ],
            [4, 1],
            [C.registers, C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (work, rings, flag, 0, dtype, C)),
                (_consumer, (work, rings, flag, 1, dtype, C)),
                (_consumer, (work, rings, flag, 2, dtype, C)),
                (produce, (dq, dk, dv, work, rings, C)),
            ],
            [4, 4, 1],
            [C.registers, C.registers, C.producer_registers],
        )


@gluon.jit(
    do_not_specialize=[
        "rows", "rep_h", "num_q", "plan_h", "group", "kv_last", "kv_tail", "room", "tail_room",
        "steps_b", "steps_h", "steps_q", "count_b", "count_h", "count_q",
        "q_start_b", "q_start_h", "q_length_b", "q_length_h", "q_size", "q_slots", "q_total",
        "q_rows", "kv_steps",
    ]
)  # fmt: skip
def attention_kernel(
    dq, dk, dv, out_ptr, lse_ptr, flag_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr,
    step_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, q_start_ptr, q_length_ptr,
    rows, rep_h, num_q, plan_h, group, kv_last, kv_tail, room, tail_room,
    steps_b, steps_h, steps_q, count_b, count_h, count_q,
    q_start_b, q_start_h, q_length_b, q_length_h, q_size, q_slots, q_total, q_rows, kv_steps,
    out_b, out_s, out_h, lse_b, lse_h, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per tile. A redo does only the tiles whose flag is set."""
    plan = Plan(
        step_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, q_start_ptr, q_length_ptr,
        rows, rep_h, num_q, plan_h, group, kv_last, kv_tail, room, tail_room,
        steps_b, steps_h, steps_q, count_b, count_h, count_q,
        q_start_b, q_start_h, q_length_b, q_length_h, q_size, q_slots, q_total,
    )  # fmt: skip
    scales = Scales(q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr, q_rows, kv_steps)
    outs = Outs(out_ptr, lse_ptr, out_b, out_s, out_h, lse_b, lse_h)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    flag = flag_ptr + gl.program_id(0)
    if C.redo:
        if gl.load(flag) > 0:
            _run(dq, dk, dv, plan, scales, outs, flag, dtype, C)
    else:
        _run(dq, dk, dv, plan, scales, outs, flag, dtype, C)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """What launches on one plan have in common, whatever the tensors.

    Attributes:
        launch: the kernel, and the one that redoes flagged tiles, if any.
        head_size: D, padded.
        counts: a tensor of the plan.
        num_flags: int32 flags to make room for; 0 where no tile is flagged.
    """

    launch: Launch
    head_size: int
    counts: torch.Tensor
    num_flags: int


def attend(
    packed: Packed,
    plan: BlockPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    tile: GluonTile,
) -> None:
    """Launch the kernel, and the redo of the tiles it flags; writes `out` and `lse`.

    Args:
        packed: quantised tensors, made for tiles of 64 * `tile.consumers` rows and `tile.unit`
            keys: V in 8 bits with its keys permuted, or in bfloat16, as the tile says.
        plan: the pairs, without row bits and not causal, on the same device.
        out: contiguous [B, Sq, H, D]; only rows that belong to a query block are written.
        lse: contiguous fp32 [B, H, Sq], or None.
        tile: shape of a program, as `hopper_tile` chooses it.
    """
    key = ("8-bit hopper", tile, out.shape, packed.k.shape[1], out.dtype, lse is None)
    prepared = plan.cache.get(key)
    if prepared is None:
        prepared = plan.remember(key, _prepare(packed, plan, out, lse, tile))
    size, flags = prepared.head_size, prepared.counts  # where nothing is flagged
    if prepared.num_flags:
        flags = prepared.counts.new_zeros(prepared.num_flags)
    if tile.e4m3:
        values = describe(packed.v, size, tile.keys)
    else:
        values = describe_tokens(packed.v, tile.unit, size)
    prepared.launch(
        (
            describe(packed.q, 64, size), describe(packed.k, tile.unit, size), values,
            out, out if lse is None else lse, flags,
            packed.q_scale, packed.k_scale, packed.v_scale, packed.shift,
        ),
    )  # fmt: skip


@cache
def _launcher() -> Launcher:
    return Launcher(attention_kernel)


def _prepare(
    packed: Packed,
    plan: BlockPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tile: GluonTile,
) -> _Prepared:
    batch, _, heads, channels = out.shape
    slotted = in_slots(plan, tile.unit)
    kv = slotted.kv
    sub = kv.size // tile.unit if kv.is_regular else 0
    steps = None if sub else make_steps(slotted, tile.unit)
    lists = plan.indices if steps is None else steps.starts
    if lists.stride(3) != 1:
        lists = lists.contiguous()
    counts = plan.counts if steps is None else steps.num_full
    tail_counts = counts if steps is None else steps.num_tail
    tail_lengths = counts if steps is None else steps.tail_lengths
    order = launch_order(plan, counts)
    _, plan_h, num_q = counts.shape
    kv_tail = kv.total - (kv.num - 1) * kv.size
    q_tiles = packed.q_slots // (64 * tile.consumers)
    shape = _shape(plan, tile, channels=channels, head_size=packed.q.shape[3], sub=sub)
    shape = dataclasses.replace(
        shape,
        q_tiles=q_tiles,
        ragged=sub == 0 or kv_tail != kv.size,
        ordered=order is not None,
        lse=lse is not None,
    )
    q_bounds, q_strides = bounds_of(plan.q, batch, heads, counts)
    every_list, every_count = lists.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    arguments = (
        every_list, every_count, tail_counts, tail_lengths, counts if order is None else order,
        *q_bounds, counts.numel(), heads // plan_h, num_q, plan_h, heads // packed.k.shape[1],
        kv.num - 1, kv_tail, lists.shape[3], plan.indices.shape[3],
        *every_list.stride()[:3], *every_count.stride(),
        *q_strides,
        plan.q.size, packed.q_slots, plan.q.total, packed.q.shape[2], packed.k_scale.shape[2],
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
    )  # fmt: skip
    redo = dataclasses.replace(shape, fast=False, redo=True)
    num_tiles = batch * heads * num_q * q_tiles
    variants = [{"C": c, "num_warps": 4} for c in ((shape, redo) if tile.fast else (shape,))]
    return _Prepared(
        launch=Launch(_launcher(), (num_tiles,), arguments, variants),
        head_size=shape.head_size,
        counts=counts,
        num_flags=num_tiles if tile.fast else 0,
    )


def _shape(plan: BlockPlan, tile: GluonTile, *, channels: int, head_size: int, sub: int) -> Shape:
    """Return the compile-time shape of the kernel, as far as it does not follow from a call."""
    return Shape(
        keys=tile.keys,
        unit=tile.unit,
        head_size=head_size,
        channels=channels,
        sub=sub,
        q_tiles=1,
        consumers=tile.consumers,
        stages=tile.stages,
        ragged=True,
        ordered=False,
        q_starts=plan.q.starts is not None,
        q_lengths=plan.q.lengths is not None,
        lse=True,
        e4m3=tile.e4m3,
        fast=tile.fast,
        redo=False,
        q_registers=tile.q_registers,
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
