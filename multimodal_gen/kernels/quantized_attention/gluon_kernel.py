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

OWN: every consumer has its own query block, ring and producer warp, and puts results where V was;
else all consumers share one ring.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.block_sparse.gluon_work_kernel import (
    Outs,
    launch_with_redo,
    store_lse,
    store_values,
)
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import (
    PLAN_NUMBERS,
    Plan,
    lists_of,
    work_list,
)
from multimodal_gen.kernels.hopper_kernel import (
    OVERFLOW,
    barriers,
    partial_sums,
    specialize,
    wait_full,
)
from multimodal_gen.kernels.launch.descriptors import describe, describe_tokens
from multimodal_gen.kernels.launch.launcher import Launch, Launcher
from multimodal_gen.kernels.quantized_attention.gluon_work_kernel import (
    Rings,
    Scales,
    Shape,
    find_work,
    produce,
    step_keys,
    step_starts,
)
from multimodal_gen.kernels.quantized_attention.packed import Packed, Results, in_slots
from multimodal_gen.kernels.quantized_attention.tuning import GluonTile

MAGIC = gl.constexpr(0x4B400000)
MAGIC_VALUE = gl.constexpr(12582912.0)
# Weights are e4m3 times 2^LIFT = 448, the largest e4m3 number: the largest weight is exact.
LIFT = gl.constexpr(8.807354922057604)

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
    """Return weights [64, BN] as bfloat16 operand, or as words of two of them or of four e4m3.

    The keys that a thread holds become neighbours, which is the order of the quantised V.
    """
    BN: gl.constexpr = C.keys
    if C.e4m3:
        p = gl.reshape(p, [64, BN // 16, 2, 4, 2])
        p = gl.reshape(gl.permute(p, [0, 1, 3, 2, 4]), [64, BN // 4, 2, 2])
        even, odd = gl.split(p)
        p_0, p_2 = gl.split(even)
        p_1, p_3 = gl.split(odd)
        words = gl.inline_asm_elementwise(
            PACK, "=r,r,r,r,r", [p_0, p_1, p_2, p_3], dtype=gl.int32, is_pure=True, pack=1
        )
    elif C.words:
        even, odd = gl.split(gl.reshape(p, [64, BN // 2, 2]))
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        words = gl.convert_layout(p.to(gl.bfloat16), C.p_layout, assert_trivial=True)
    return words


@gluon.jit
def _operand(words, C: gl.constexpr):
    """Return packed weights as operand of P V, [64, BN]; takes no instruction."""
    weights = words
    if C.e4m3:
        pair = gl.join(words, words)
        four = gl.reshape(gl.join(pair, pair), [64, C.keys])
        four = gl.convert_layout(four, C.p_layout, assert_trivial=True)
        weights = gl.inline_asm_elementwise(
            "", "=r,0,r,r,r", [four], dtype=gl.float8e4nv, is_pure=False, pack=4
        )
    elif C.words:
        pair = gl.reshape(gl.join(words, words), [64, C.keys])
        pair = gl.convert_layout(pair, C.p_layout, assert_trivial=True)
        weights = gl.inline_asm_elementwise(
            "", "=r,0,r", [pair], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    return weights


@gluon.jit
def _mask(weights):
    """Use weights after the wait for their product, or their registers are reused in flight.

    The wait itself takes no 8-bit tensors.
    """
    gl.inline_asm_elementwise("", "=r,0", [weights], dtype=gl.float8e4nv, is_pure=False, pack=4)


@gluon.jit
def _scores(q, k_t, C: gl.constexpr):
    """Start Q K^T, with sums that read as fp32 are 12582912 too large."""
    start = gl.full([64, C.keys], MAGIC, gl.int32, C.s_layout)
    # Opaque, or the registers would be set after the fence that the product begins with.
    start = gl.inline_asm_elementwise("", "=r,0", [start], dtype=gl.int32, is_pure=False, pack=1)
    return hopper.warpgroup_mma(q, k_t, start, is_async=True)


@gluon.jit
def _weights(
    s, q_scale, k_scales, m, keys, MASKED: gl.constexpr, FIXED: gl.constexpr, C: gl.constexpr
):
    """Return weights, times 2^LIFT where they are e4m3, and the new reference."""
    BN: gl.constexpr = C.keys
    x = s.to(gl.float32, bitcast=True)
    if MASKED:
        columns = gl.arange(0, BN, C.columns)
        real = keys[0]
        if C.unit < C.keys:
            real = gl.where(columns < C.unit, keys[0], C.unit + keys[1])
        x = gl.where(gl.expand_dims(columns < real, 0), x, float("-inf"))
    m_new = m
    if C.unit < C.keys:
        x = gl.reshape(x, [64, 2, BN // 2])
        halves: gl.constexpr = gl.SliceLayout(2, x.type.layout)
        factor = gl.convert_layout(gl.join(q_scale * k_scales[0], q_scale * k_scales[1]), halves)
        bias = factor * (-MAGIC_VALUE)
        if not FIXED:
            top = gl.max(gl.fma(gl.max(x, 2), factor, bias), 1)
            m_new = gl.maximum(m, gl.convert_layout(top, C.rows_s))
        inner: gl.constexpr = gl.SliceLayout(1, halves)
        bias -= gl.expand_dims(gl.convert_layout(m_new, inner), 1)
        p = gl.exp2(gl.fma(x, gl.expand_dims(factor, 2), gl.expand_dims(bias, 2)))
        p = gl.convert_layout(gl.reshape(p, [64, BN]), C.s_layout, assert_trivial=True)
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
    q, rings, state, q_scale, k_scales, v_ratio, keys, step, FIRST: gl.constexpr,
    MASKED: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Scores of `step` while P V of the step before is in flight; then its softmax."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    slot = FIRST + step % C.stages
    weights = _operand(state.words, C)
    s_token = _scores(q, rings.k.index(slot).reshape([BN, D]).permute((1, 0)), C)
    acc = gl.fma(state.acc, gl.expand_dims(state.part_rescale, 1), state.part)
    v_tile = rings.v.index(slot).reshape([D, BN]).permute((1, 0))
    zero = gl.zeros([64, D], gl.float32, C.o_layout)
    o_token = hopper.warpgroup_mma(weights, v_tile, zero, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    p, m = _weights(s, q_scale, k_scales, state.m, keys, MASKED, False, C)
    alpha = gl.exp2(state.m - m)
    sums = state.sums * alpha + gl.sum(p, 1)
    # The sums' shuffles keep the softmax ahead of this wait, which keeps it ahead of that for P V:
    # the compiler would wait for P V first.
    wait_full(rings.full, step + 1, FIRST, C)
    part = hopper.warpgroup_mma_wait(0, deps=[o_token])
    _mask(weights)
    mbarrier.arrive(rings.empty.index(slot))
    words = _pack(p, C)
    rescale = gl.convert_layout(alpha * v_ratio, C.rows_o)
    return State(acc, part, state.rescale, rescale, words, sums, m)


@gluon.jit
def _advance_bfloat16(
    q, rings, state, q_scale, k_scales, keys, step, FIRST: gl.constexpr, MASKED: gl.constexpr,
    C: gl.constexpr
):  # fmt: skip
    """The same with bfloat16 weights and values, whose product sums into `acc` itself."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    slot = FIRST + step % C.stages
    weights = _operand(state.words, C)
    s_token = _scores(q, rings.k.index(slot).reshape([BN, D]).permute((1, 0)), C)
    v_tile = rings.v.index(slot).reshape([BN, D])
    o_token = hopper.warpgroup_mma(weights, v_tile, state.acc, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    p, m = _weights(s, q_scale, k_scales, state.m, keys, MASKED, C.fast, C)
    sums = state.sums
    if C.fast:
        sums += partial_sums(p, C)
        if not C.words:
            words = _pack(p, C)
    else:
        alpha = gl.exp2(state.m - m)
        sums = sums * alpha + gl.sum(p, 1)
    wait_full(rings.full, step + 1, FIRST, C)
    # The weights in flight must pass through the wait, or their registers are reused early.
    acc, _ = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
    mbarrier.arrive(rings.empty.index(slot))
    if C.words or not C.fast:
        words = _pack(p, C)
    if not C.fast:
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, C.rows_o), 1)
    return State(acc, state.part, state.part_rescale, state.rescale, words, sums, m)


@gluon.jit
def _advance(
    q, rings, state, q_scale, k_scales, v_ratio, keys, step, FIRST: gl.constexpr,
    MASKED: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """One step."""
    if C.e4m3:
        state = _advance_e4m3(
            q, rings, state, q_scale, k_scales, v_ratio, keys, step, FIRST, MASKED, C
        )
    else:
        state = _advance_bfloat16(q, rings, state, q_scale, k_scales, keys, step, FIRST, MASKED, C)
    return state


@gluon.jit
def _last_product(rings, state, slot, C: gl.constexpr):
    """Add P V of the last step to the others."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    if C.e4m3:
        acc = gl.fma(state.acc, gl.expand_dims(state.part_rescale, 1), state.part)
        v_tile = rings.v.index(slot).reshape([D, BN]).permute((1, 0))
        weights = _operand(state.words, C)
        zero = gl.zeros([64, D], gl.float32, C.o_layout)
        o_token = hopper.warpgroup_mma(weights, v_tile, zero, use_acc=False, is_async=True)
        part = hopper.warpgroup_mma_wait(0, deps=[o_token])
        _mask(weights)
        acc = gl.fma(acc, gl.expand_dims(state.rescale, 1), part)
    else:
        v_tile = rings.v.index(slot).reshape([BN, D])
        weights = _operand(state.words, C)
        o_token = hopper.warpgroup_mma(weights, v_tile, state.acc, is_async=True)
        acc, _ = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
    return acc


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
def _store(values, lse, work, first_row, C: gl.constexpr):
    """Write 64 rows of out and lse, those that the query block owns."""
    store_values(work.out, values, work, work.owned, first_row, C)
    if C.lse:
        rows = first_row + gl.arange(0, 64, lse.type.layout)
        lse += gl.load(work.shift + rows, mask=rows < work.real, other=0.0)
    store_lse(lse, work, work.owned, first_row, C)


@gluon.jit
def _consumer(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup: 64 query rows."""
    work, rings, flag = given
    dtype: gl.constexpr = work.out.dtype.element_ty
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    ROW: gl.constexpr = 0 if C.own else W * 64
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    steps = work.steps
    if steps == 0:
        nothing = gl.zeros([64, D], dtype, C.store_layout)
        unseen = gl.full([64], float("-inf"), gl.float32, C.rows_s)
        _store(nothing, unseen, work, ROW, C)
    else:
        # Scales are read one step ahead, and where they stand two steps ahead.
        one = gl.to_tensor(1.0)
        k_scales, v_scale = _scales(work, step_starts(work, 0, C), one, C)
        k_next, v_next = _scales(work, step_starts(work, gl.minimum(1, steps - 1), C), one, C)
        starts = step_starts(work, gl.minimum(2, steps - 1), C)
        row = ROW + gl.arange(0, 64, C.rows_s)
        q_scale = gl.load(work.q_scale + row, mask=row < work.real, other=0.0)
        q = rings.q.index(W).reshape([64, D])
        mbarrier.wait(rings.q_full.index(W), 0)
        if C.q_registers:
            q = q.load(C.q_layout)
        wait_full(rings.full, 0, FIRST, C)
        s_token = _scores(q, rings.k.index(FIRST).reshape([BN, D]).permute((1, 0)), C)
        s = hopper.warpgroup_mma_wait(0, deps=[s_token])
        whole = gl.to_tensor(C.unit)
        keys = (whole, whole)
        CUT: gl.constexpr = C.ragged or C.unit < BN
        if CUT and work.lead > 0:
            keys = step_keys(work, 0, C)
        m = gl.full([64], float("-inf"), gl.float32, C.rows_s)
        p, m = _weights(s, q_scale, k_scales, m, keys, CUT, False, C)
        none = gl.zeros([64, D], gl.float32, C.o_layout)
        no_row = gl.zeros([64], gl.float32, C.rows_o)
        sums = partial_sums(p, C) if C.fast else gl.sum(p, 1)
        state = State(none, none, no_row, no_row, _pack(p, C), sums, m)
        mbarrier.arrive(rings.empty.index(FIRST))
        wait_full(rings.full, 1, FIRST, C)
        last = work.lead + work.whole
        for step in range(1, last):
            k_scales = k_next
            v_ratio = v_scale / v_next
            v_scale = v_next
            k_next, v_next = _scales(work, starts, one, C)
            starts = step_starts(work, gl.minimum(step + 2, steps - 1), C)
            state = _advance(q, rings, state, q_scale, k_scales, v_ratio, BN, step, FIRST, False, C)
        if C.sub == 0:  # a regular plan has one partial unit at most
            for step in range(last, steps):
                k_scales = k_next
                v_ratio = v_scale / v_next
                v_scale = v_next
                k_next, v_next = _scales(work, starts, one, C)
                starts = step_starts(work, gl.minimum(step + 2, steps - 1), C)
                keys = step_keys(work, step, C)
                state = _advance(
                    q, rings, state, q_scale, k_scales, v_ratio, keys, step, FIRST, True, C
                )
        m = state.m
        acc = _last_product(rings, state, FIRST + steps % C.stages, C)
        if C.fast:
            sums = gl.convert_layout(gl.sum(state.sums, 1), C.rows_s)
            real = ROW + gl.arange(0, 64, C.rows_s) < work.real
            ones = gl.full([64], 1, gl.int32, C.rows_s)
            gl.store(flag + gl.zeros_like(ones), ones, mask=real & ~(sums < OVERFLOW))
        else:
            sums = state.sums
        o = acc * gl.expand_dims(gl.convert_layout(v_scale / sums, C.rows_o), 1)
        if C.own:
            # Not over the last values: other warps may still multiply them.
            free = FIRST + (steps + 1) % C.stages
            out_tile = rings.v.index(free).reshape([BN, D]).slice(0, 64, dim=0)
            out_tile.store(o.to(dtype).to(gl.bfloat16, bitcast=True))
            out = out_tile.load(C.store_layout).to(dtype, bitcast=True)
        else:
            out_tile = rings.out.index(W)
            out_tile.store(o.to(dtype))
            out = out_tile.load(C.store_layout)
        lift: gl.constexpr = LIFT if C.e4m3 else 0.0
        lse = 0.6931471805599453 * (m + gl.log2(sums) - lift)
        _store(out, lse, work, ROW, C)


@gluon.jit
def _run(dq, dk, dv, tile, plan, scales, outs, flag, C: gl.constexpr):
    """Allocate the rings and start the partitions of one tile."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    CONSUMERS: gl.constexpr = C.consumers
    SLOTS: gl.constexpr = C.consumers * C.stages if C.own else C.stages
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    V_TILE: gl.constexpr = [SLOTS, 1, 1, D, BN] if C.e4m3 else [SLOTS, 1, 1, BN, D]
    dtype: gl.constexpr = outs.out.dtype.element_ty
    out_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q = gl.allocate_shared_memory(gl.int8, [CONSUMERS, 1, 1, 64, D], dq.layout)
    k = gl.allocate_shared_memory(gl.int8, [SLOTS, 1, 1, BN, D], dk.layout)
    v = gl.allocate_shared_memory(dv.dtype, V_TILE, dv.layout)
    out = v
    if not C.own:
        out = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], out_layout)
    q_full, full, empty = barriers(CONSUMERS, 1), barriers(SLOTS, 1), barriers(SLOTS, SHARERS)
    rings = Rings(q, k, v, out, q_full, full, empty)
    hopper.fence_async_shared()
    work = find_work(0, tile, plan, scales, outs, C)
    given = (work, rings, flag)
    fed = (dq, dk, dv, work, rings)
    if C.own:
        other = find_work(1, tile, plan, scales, outs, C)
        other_given = (other, rings, flag)
        other_fed = (dq, dk, dv, other, rings)
        specialize(_consumer, (given, other_given), produce, (fed, other_fed), C)
    else:
        specialize(_consumer, (given,), produce, (fed,), C)
    if C.redo:
        for w in gl.static_range(CONSUMERS):
            mbarrier.invalidate(q_full.index(w))
        for slot in gl.static_range(SLOTS):
            mbarrier.invalidate(full.index(slot))
            mbarrier.invalidate(empty.index(slot))


@gluon.jit(do_not_specialize=[*PLAN_NUMBERS, "group", "lists", "q_slots", "q_rows", "kv_steps"])
def attention_kernel(
    dq, dk, dv, out_ptr, lse_ptr, flag_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    lists, q_slots, q_rows, kv_steps, out_b, out_s, out_h, lse_b, lse_h, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per tile; a redo does only those whose flag is set."""
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total, lists, 0,
    )  # fmt: skip
    scales = Scales(q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr, q_slots, q_rows, kv_steps)
    outs = Outs(out_ptr, lse_ptr, out_b, out_s, out_h, lse_b, lse_h)
    if C.redo:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        first = gl.program_id(0) * C.redo
        marks = gl.load(flag_ptr + first + gl.arange(0, C.redo, layout))
        if gl.max(marks, 0) > 0:
            for tile in range(first, first + C.redo):
                if gl.load(flag_ptr + tile) > 0:
                    _run(dq, dk, dv, tile, plan, scales, outs, flag_ptr + tile, C)
    else:
        tile = gl.program_id(0)
        _run(dq, dk, dv, tile, plan, scales, outs, flag_ptr + tile, C)


def attend(
    packed: Packed,
    plan: BlockPlan,
    results: Results,
    tile: GluonTile,
    known: dict[Hashable, Any],
) -> Results:
    """Launch the kernel, and the redo of the tiles it flags; returns the results, which it writes.

    Args:
        packed: quantised tensors, made for tiles of `tile.rows` rows and `tile.unit` keys: V in 8
            bits with its keys permuted, or in bfloat16, as the tile says.
        plan: the pairs, without row bits and not causal, on the same device.
        results: out, of which only rows that belong to a query block are written, and lse.
        tile: shape of a program, as `gluon_tile` chooses it.
        known: what was prepared for calls of the form, on plans of one form.
    """
    out, lse = results
    prepared = known.get(lse is None)
    if prepared is None:
        prepared = known[lse is None] = _prepare(packed, plan, results, tile)
    launch, num_flags = prepared
    size, flags = packed.q.shape[3], plan.counts  # where nothing is flagged
    if num_flags:
        flags = plan.counts.new_zeros(num_flags)
    if tile.e4m3:
        values = describe(packed.v, size, tile.keys)
    else:
        values = describe_tokens(packed.v, tile.unit, size)
    launch(
        (
            describe(packed.q, 64, size), describe(packed.k, tile.unit, size), values,
            out, out if lse is None else lse, flags,
            packed.q_scale, packed.k_scale, packed.v_scale, packed.shift,
            *lists_of(in_slots(plan, tile.unit), tile.unit).tensors,
        ),
    )  # fmt: skip
    return results


_launcher = Launcher(attention_kernel)


def _prepare(
    packed: Packed, plan: BlockPlan, results: Results, tile: GluonTile
) -> tuple[Launch, int]:
    """Return launches on plans of one form, and how many flags they may set."""
    out, lse = results
    batch, _, heads, channels = out.shape
    slotted = in_slots(plan, tile.unit)
    work = work_list(slotted, tile.unit, batch, heads, packed.k.shape[1])
    shape = Shape.of_work(
        plan,
        work,
        channels,
        **dataclasses.asdict(tile),
        q_tiles=packed.q_slots // tile.rows,
        lse=lse is not None,
    )
    arguments = (
        *work.numbers, work.num, packed.q_slots, packed.q.shape[2], packed.k_scale.shape[2],
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
    )  # fmt: skip
    exact: dict[str, Any] = {}
    if tile.pairs:  # which exact steps have no registers for
        exact = {"keys": tile.unit, "pairs": False, "stages": 2 * tile.stages}
    return launch_with_redo(_launcher, shape, work, arguments, **exact)
