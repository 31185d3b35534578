"""8-bit attention in portable Triton: int8 Q K^T, and P V in e4m3 or in 16 bits.

For a tile of BM query rows, over steps of BN keys, with x = q8 k8^T in int32:

    s = q_scale k_scale x (base 2);  m' = max(m, rowmax s);  p = 2^(s - m' + LIFT)
    l = l 2^(m - m') + rowsum p;     acc = acc 2^(m - m') v_scale' / v_scale + p v8
    out = acc v_scale / l;           lse = ln 2 (m + log2 l - LIFT) + shift

2^LIFT = 448 is the largest e4m3 number; LIFT is 0 for 16-bit values, whose scales are 1.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import PLAN_NUMBERS, work_list
from multimodal_gen.kernels.block_sparse.triton_kernel import (
    causal_steps,
    number_of_steps,
    partial_step,
    refuse_cut,
)
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.quantized_attention.packed import Packed, Results, in_slots
from multimodal_gen.kernels.quantized_attention.quantise_kernel import to_e4m3
from multimodal_gen.kernels.shared_kernel import bounds, dot, interpreted, locate


@triton.jit
def _step(
    state, given, start, keys, keep, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, E4M3: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: over BN keys from `start` on, of which `keys` are real.

    K and e4m3 V are zero past the last key; 16-bit V may end there, and has D channels.
    """
    acc, total, m, v_scale = state
    q, q_scale, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, v_s, v_d = given
    k_scale = tl.load(k_scale_ptr + start // BN)
    v_ratio = 1.0
    if E4M3:
        v_new = tl.load(v_scale_ptr + start // BN)
        v_ratio = v_scale / v_new
        v_scale = v_new
    n = tl.arange(0, BN)
    d = tl.arange(0, DP)
    row = start.to(tl.int64) + n
    k_t = tl.load(k_ptr + row[None, :] * DP + d[:, None])
    ptrs = v_ptr + row[:, None] * v_s + d[None, :] * v_d
    if not E4M3 and (MASKED or D < DP):
        v = tl.load(ptrs, mask=(n < keys)[:, None] & (d < D)[None, :], other=0.0)
    else:
        v = tl.load(ptrs)
    # The interpreter's own products of 8 bits overflow, or are not there.
    s = dot(q, k_t, UPCAST).to(tl.float32)
    s = s * (q_scale * k_scale)[:, None]
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    reference = m_new
    if MASKED:
        # A row that has seen no key yet has m = -inf, and -inf - -inf is a NaN.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    lift = 8.807354922057604 if E4M3 else 0.0
    p = tl.exp2(s - (reference - lift)[:, None])
    alpha = tl.exp2(m - reference)
    total = total * alpha + tl.sum(p, 1)
    p = to_e4m3(p, UPCAST) if E4M3 else p.to(v.dtype)
    acc = acc * (alpha * v_ratio)[:, None] + dot(p, v, UPCAST)
    return acc, total, m_new, v_scale


@triton.jit(do_not_specialize=[*PLAN_NUMBERS, "q_slots", "q_rows", "kv_rows"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    v_b, v_h, v_s, v_d, out_b, out_s, out_h, lse_b, lse_h, q_slots, q_rows, kv_rows,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QSUB: tl.constexpr, SUB: tl.constexpr, RAGGED_END: tl.constexpr,
    Q_STARTS: tl.constexpr, Q_LENGTHS: tl.constexpr,
    ORDERED: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr, CAUSAL: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq * QSUB]; QSUB tiles of BM rows per query block.

    SUB > 0: `list_ptr` holds blocks of SUB steps, the last of all blocks being `tail` keys long.
    SUB = 0: it holds the steps of `make_steps`. CAUSAL: the list holds every block, and the steps
    that cross the diagonal are taken as partial ones.
    """
    b, h, i, sub = locate(order_ptr, rows, rep_h, num, plan_h, QSUB, ORDERED)
    list_ptr += b * list_b + h * list_h + i * list_n
    at = b * count_b + h * count_h + i * count_n
    count = tl.load(count_ptr + at)
    begin, length = bounds(
        b, h, i, size, total, start_ptr, length_ptr, start_b, start_h, length_b, length_h,
        Q_STARTS, Q_LENGTHS,
    )  # fmt: skip
    count = tl.where(sub * BM < length, count, 0)
    in_tile = tl.arange(0, BM)
    inside = sub * BM + in_tile
    real = inside < length

    heads = plan_h * rep_h
    kv_head = b * (heads // group) + h // group
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    q_row = (b * heads + h) * q_rows + i * q_slots + inside
    q = tl.load(q_ptr + q_row[:, None] * DP + d[None, :], mask=real[:, None], other=0)
    q_scale = tl.load(q_scale_ptr + q_row, mask=real, other=0.0)
    k_ptr += kv_head * kv_rows * DP
    v_ptr += b * v_b + (h // group) * v_h
    k_scale_ptr += kv_head * (kv_rows // BN)
    v_scale_ptr += kv_head * (kv_rows // BN)
    given = (q, q_scale, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, v_s, v_d)

    num_full, num_tail = number_of_steps(
        list_ptr, count, tail_count_ptr, at, last, tail, SUB, BN, RAGGED_END
    )
    num_tail = tl.where(sub * BM < length, num_tail, 0)
    if CAUSAL:
        num_full, num_tail, last_key = causal_steps(
            num_full, begin + sub * BM, total, last, tail, BM, BN, SUB
        )
    acc = tl.zeros([BM, DP], tl.float32)
    weight = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    v_scale = 1.0
    entry = tl.load(list_ptr, mask=num_full > 0, other=0)
    for step in tl.range(0, num_full, num_stages=STAGES):
        if SUB > 0:
            start = (entry * SUB + step % SUB) * BN
            at_next = (step + 1) // SUB
        else:
            start = entry
            at_next = step + 1
        entry = tl.load(list_ptr + at_next, mask=step + 1 < num_full, other=0)
        acc, weight, m, v_scale = _step(
            (acc, weight, m, v_scale), given, start, BN, True, D, DP, BN, False, E4M3, UPCAST
        )

    for step in tl.range(0, num_tail, num_stages=1):
        start, keys, _ = partial_step(
            step, list_ptr, list_ptr, tail_length_ptr + at * tail_room, room, num_full, last, tail,
            SUB, BN, False, CAUSAL,
        )  # fmt: skip
        keep = (n < keys)[None, :]
        if CAUSAL:
            keep = keep & (start + n[None, :] <= (last_key + in_tile)[:, None])
        acc, weight, m, v_scale = _step(
            (acc, weight, m, v_scale), given, start, keys, keep, D, DP, BN, True, E4M3, UPCAST
        )

    nothing = (weight == 0.0) | (inside >= length)
    weight = tl.where(nothing, 1.0, weight)
    out = tl.where(nothing[:, None], 0.0, acc * (v_scale / weight)[:, None])
    owned = real
    if Q_LENGTHS and not Q_STARTS:
        owned = inside < size  # the padding of a block is its own, and is set to zero
    first_row = begin.to(tl.int64) + sub * BM
    out_ptrs = out_ptr + b * out_b + h * out_h + first_row * out_s
    out_ptrs += in_tile[:, None] * out_s + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=owned[:, None] & (d < D)[None, :])
    if LSE:
        lift = 8.807354922057604 if E4M3 else 0.0
        lse = 0.6931471805599453 * (m + tl.log2(weight) - lift)
        lse += tl.load(shift_ptr + q_row, mask=real, other=0.0)
        lse = tl.where(nothing, float("-inf"), lse)
        tl.store(lse_ptr + b * lse_b + h * lse_h + first_row + in_tile, lse, mask=owned)


_launch_attention = Launcher(_attention_kernel)


def attend(packed: Packed, plan: BlockPlan, results: Results, tile: TritonTile) -> Results:
    """Launch the kernel; returns the results, which it writes.

    Args:
        packed: quantised tensors, made for tiles of `tile.rows` and `tile.keys`; keys of V in
            their own order.
        plan: the pairs, without row bits, on the same device.
        results: out, of which only rows that belong to a query block are written, and lse.
        tile: shape of a program, as `triton_tile` chooses it.
    """
    out, lse = results
    batch, _, heads, head_size = out.shape
    slotted = in_slots(plan, tile.keys)
    work = work_list(slotted, tile.keys, batch, heads, packed.k.shape[1])
    refuse_cut(plan, work, tile.keys)
    q_sub = -(-plan.q.size // tile.rows)
    e4m3 = packed.v.dtype == torch.float8_e4m3fn
    v = packed.v.permute(0, 1, 3, 2) if e4m3 else packed.v.permute(0, 2, 1, 3)
    _launch_attention(
        (work.num * q_sub,),
        packed.q, packed.k, v, out, out if lse is None else lse,
        packed.q_scale, packed.k_scale, packed.v_scale, packed.shift, *work.arguments,
        *v.stride(), *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
        packed.q_slots, packed.q.shape[2], packed.k.shape[2],
        BM=tile.rows, BN=tile.keys, D=head_size, DP=packed.q.shape[3],
        QSUB=q_sub, SUB=work.sub, RAGGED_END=work.ragged,
        Q_STARTS=plan.q.starts is not None, Q_LENGTHS=plan.q.lengths is not None,
        ORDERED=work.ordered, LSE=lse is not None, STAGES=tile.stages,
        UPCAST=interpreted(), CAUSAL=plan.causal, E4M3=e4m3,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return results
