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
from multimodal_gen.kernels.block_sparse.steps_kernel import PLAN_NUMBERS, Plan, work_list
from multimodal_gen.kernels.block_sparse.triton_kernel import (
    find_tile,
    partial_step,
    refuse_cut,
    shape_of,
    store_lse,
    store_rows,
    whole_step,
)
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.quantized_attention.packed import Packed, Results, in_slots
from multimodal_gen.kernels.quantized_attention.quantise_kernel import to_e4m3
from multimodal_gen.kernels.shared_kernel import dot


@triton.jit
def _step(
    state, given, start, real_n, visible, MASKED: tl.constexpr, E4M3: tl.constexpr, C: tl.constexpr
):
    """One step of the online softmax: over the keys from `start` on, of which `real_n` are real.

    K and e4m3 V are zero past the last key; 16-bit V may end there, and has D channels.
    """
    acc, total, m, v_scale = state
    q, q_scale, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, v_at = given
    k_scale = tl.load(k_scale_ptr + start // C.step)
    v_ratio = 1.0
    if E4M3:
        v_new = tl.load(v_scale_ptr + start // C.step)
        v_ratio = v_scale / v_new
        v_scale = v_new
    d = tl.arange(0, C.width)
    row = start + tl.arange(0, C.step)
    k_t = tl.load(k_ptr + row[None, :] * C.width + d[:, None])
    ptrs = v_ptr + row[:, None] * v_at[2] + d[None, :] * v_at[3]
    if not E4M3 and MASKED:
        v = tl.load(ptrs, mask=real_n[:, None] & (d < C.channels)[None, :], other=0.0)
    elif not E4M3 and C.channels < C.width:
        v = tl.load(ptrs, mask=(d < C.channels)[None, :], other=0.0)
    else:
        v = tl.load(ptrs)
    # The interpreter's own products of 8 bits overflow, or are not there.
    s = dot(q, k_t, C.upcast).to(tl.float32)
    s = s * (q_scale * k_scale)[:, None]
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    reference = m_new
    if MASKED:
        # A row that has seen no key yet has m = -inf, and -inf - -inf is a NaN.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    lift = 8.807354922057604 if E4M3 else 0.0
    p = tl.exp2(s - (reference - lift)[:, None])
    alpha = tl.exp2(m - reference)
    total = total * alpha + tl.sum(p, 1)
    p = to_e4m3(p, C.upcast) if E4M3 else p.to(v.dtype)
    acc = acc * (alpha * v_ratio)[:, None] + dot(p, v, C.upcast)
    return acc, total, m_new, v_scale


@triton.jit(do_not_specialize=[*PLAN_NUMBERS, "q_slots", "q_rows", "kv_rows"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    v_at, out_at, lse_at, q_slots, q_rows, kv_rows, E4M3: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq * tiles]; see the kernel of block-sparse attention."""
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total, 0, 0,
    )  # fmt: skip
    tile = find_tile(plan, list_ptr, list_ptr, v_at, C)
    b = tile.b
    h = tile.h
    BM: tl.constexpr = C.rows
    BN: tl.constexpr = C.step
    DP: tl.constexpr = C.width
    heads = plan_h * rep_h
    kv_head = b * (heads // group) + h // group
    d = tl.arange(0, DP)
    q_row = (b * heads + h) * q_rows + tile.i * q_slots + tile.inside
    q = tl.load(q_ptr + q_row[:, None] * DP + d[None, :], mask=tile.real[:, None], other=0)
    q_scale = tl.load(q_scale_ptr + q_row, mask=tile.real, other=0.0)
    k_ptr += kv_head * kv_rows * DP
    v_ptr += b * v_at[0] + (h // group) * v_at[1]
    k_scale_ptr += kv_head * (kv_rows // BN)
    v_scale_ptr += kv_head * (kv_rows // BN)
    given = (q, q_scale, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, v_at)

    acc = tl.zeros([BM, DP], tl.float32)
    weight = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    v_scale = 1.0
    entry = tl.load(tile.list, mask=tile.num_full > 0, other=0)
    for step in tl.range(0, tile.num_full, num_stages=C.stages):
        start, _, entry = whole_step(step, entry, tile, C)
        acc, weight, m, v_scale = _step(
            (acc, weight, m, v_scale), given, start, True, True, False, E4M3, C
        )

    for step in tl.range(0, tile.num_tail, num_stages=1):
        start, real_n, visible = partial_step(step, tile, plan, C)
        acc, weight, m, v_scale = _step(
            (acc, weight, m, v_scale), given, start, real_n, visible, True, E4M3, C
        )

    nothing = (weight == 0.0) | ~tile.real
    weight = tl.where(nothing, 1.0, weight)
    out = tl.where(nothing[:, None], 0.0, acc * (v_scale / weight)[:, None])
    store_rows(out_ptr, out_at, out, tile, plan, C)
    if C.lse:
        lift = 8.807354922057604 if E4M3 else 0.0
        lse = 0.6931471805599453 * (m + tl.log2(weight) - lift)
        lse += tl.load(shift_ptr + q_row, mask=tile.real, other=0.0)
        store_lse(lse_ptr, lse_at, tl.where(nothing, float("-inf"), lse), tile, plan, C)


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
    e4m3 = packed.v.dtype == torch.float8_e4m3fn
    width = packed.q.shape[3]
    shape = shape_of(plan, work, tile, head_size, width=width, lse=lse is not None)
    v = packed.v.permute(0, 1, 3, 2) if e4m3 else packed.v.permute(0, 2, 1, 3)
    _launch_attention(
        (work.num * shape.tiles,),
        packed.q, packed.k, v, out, out if lse is None else lse,
        packed.q_scale, packed.k_scale, packed.v_scale, packed.shift, *work.arguments,
        v.stride(), out.stride(), (0, 0) if lse is None else lse.stride()[:2],
        packed.q_slots, packed.q.shape[2], packed.k.shape[2],
        E4M3=e4m3, C=shape, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return results
