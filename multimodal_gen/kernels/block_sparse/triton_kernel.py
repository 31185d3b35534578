"""Block-sparse attention in Triton.

For a tile of BM query rows, over steps of BN keys, with s = scale * log2(e) * q k^T:

    m' = max(m, rowmax s);  p = 2^(s - m');  l = l 2^(m - m') + rowsum p
    acc = acc 2^(m - m') + p v;   out = acc / l;   lse = ln 2 (m + log2 l)

The main loop has no mask: partial steps come after it, in a loop of their own. Where a step's keys
lie is read one step ahead: read in the step itself, it would take a stage from the pipeline of K
and V, which then no longer overlaps with the products.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import lists_of
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.kernels.shared_kernel import (
    causal_steps,
    interpreted,
    listed_steps,
    locate,
    partial_step,
    query_rows,
)

LOG2E = 1.4426950408889634


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """Multiply. The interpreter has no bfloat16 product, so there both are widened first."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _update(q, k_t, v, acc, total, m, keep, scale_log2, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """One step of the online softmax."""
    s = _dot(q, k_t, UPCAST)
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    reference = m_new
    if MASKED:
        # A row that has seen no key yet has m = -inf, and -inf - -inf is a NaN.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale_log2 - reference[:, None])
    alpha = tl.exp2(m - reference)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + _dot(p.to(v.dtype), v, UPCAST)
    return acc, total, m_new


@triton.jit
def _load_step(
    k, v, k_tile, v_tile, b, kv_h, start, k_s, v_s, k_mask, v_mask,
    BN: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return k^T [DP, BN] and v [BN, DP] of the keys from `start` on.

    Through the copy engine K and V are descriptors, and channels past D arrive as zeros.
    """
    if TMA:
        corner = [b.to(tl.int32), kv_h.to(tl.int32), start.to(tl.int32), 0]
        k_t = tl.trans(k.load(corner).reshape(BN, DP))
        v_rows = v.load(corner).reshape(BN, DP)
        if MASKED:
            # A weight of zero does not keep out what is not finite.
            v_rows = tl.where(v_mask, v_rows, 0.0)
    elif MASKED:
        k_t = tl.load(k + start * k_s + k_tile, mask=k_mask, other=0.0)
        v_rows = tl.load(v + start * v_s + v_tile, mask=v_mask, other=0.0)
    else:
        k_t = tl.load(k + start * k_s + k_tile)
        v_rows = tl.load(v + start * v_s + v_tile)
    return k_t, v_rows


@triton.jit
def _row_choice(bits_ptr, block, row_stride, word_stride, rows, real):
    """Whether each query row keeps `block`: [BM, 1]."""
    words = tl.load(bits_ptr + rows * row_stride + (block // 32) * word_stride, mask=real, other=0)
    return ((words >> (block % 32)) & 1)[:, None] != 0


@triton.jit(
    do_not_specialize=[
        "rows", "rep_h", "num_q", "plan_h", "kv_last", "kv_tail", "q_size", "q_total",
        "list_b", "list_h", "list_q", "count_b", "count_h", "count_q", "room", "tail_room",
    ]
)  # fmt: skip
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    list_ptr, count_ptr, block_ptr, tail_count_ptr, tail_length_ptr,
    q_start_ptr, q_length_ptr, order_ptr, bits_ptr,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    out_b, out_s, out_h, lse_b, lse_h,
    list_b, list_h, list_q, count_b, count_h, count_q,
    q_start_b, q_start_h, q_length_b, q_length_h, bits_b, bits_h, bits_s, bits_w,
    rows, rep_h, num_q, plan_h, group, q_size, q_total, kv_last, kv_tail, room, tail_room,
    scale_log2,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QSUB: tl.constexpr, SUB: tl.constexpr, RAGGED_END: tl.constexpr,
    Q_STARTS: tl.constexpr, Q_LENGTHS: tl.constexpr,
    ORDERED: tl.constexpr, BITS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq * QSUB]; QSUB tiles of BM rows per query block.

    SUB > 0: `list_ptr` holds blocks of SUB steps, the last of all blocks being `kv_tail` keys long.
    SUB = 0: it holds the steps of `make_steps`. CAUSAL: the list holds every block, and the steps
    that cross the diagonal are taken as partial ones.
    """
    b, h, i, sub = locate(order_ptr, rows, rep_h, num_q, plan_h, QSUB, ORDERED)
    list_ptr += b * list_b + h * list_h + i * list_q
    at = b * count_b + h * count_h + i * count_q
    count = tl.load(count_ptr + at)
    begin, length = query_rows(
        q_start_ptr, q_length_ptr, b, h, i, q_start_b, q_start_h, q_length_b, q_length_h,
        q_size, q_total, Q_STARTS, Q_LENGTHS,
    )  # fmt: skip
    inside = sub * BM + tl.arange(0, BM)
    real = inside < length
    if Q_LENGTHS:
        count = tl.where(sub * BM < length, count, 0)

    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    real_d = d < D
    first_row = begin.to(tl.int64) + sub * BM
    in_tile = tl.arange(0, BM)
    kv_h = h // group
    k_tile = n[None, :] * k_s + d[:, None] * k_d
    v_tile = n[:, None] * v_s + d[None, :] * v_d
    if TMA:
        corner = [b.to(tl.int32), h.to(tl.int32), first_row.to(tl.int32), 0]
        q = q_ptr.load(corner).reshape(BM, DP)
        if Q_LENGTHS:
            q = tl.where(real[:, None], q, 0.0)
        k_base = k_ptr
        v_base = v_ptr
    else:
        q_ptrs = q_ptr + b * q_b + h * q_h + first_row * q_s
        q_ptrs += in_tile[:, None] * q_s + d[None, :] * q_d
        q = tl.load(q_ptrs, mask=real[:, None] & real_d[None, :], other=0.0)
        k_base = k_ptr + b * k_b + kv_h * k_h
        v_base = v_ptr + b * v_b + kv_h * v_h
    if BITS:
        bits_ptr += b * bits_b + h * bits_h + first_row * bits_s

    num_full, num_tail = listed_steps(
        list_ptr, tail_count_ptr + at, count, sub * BM < length, kv_last, kv_tail, SUB, BN,
        RAGGED_END,
    )  # fmt: skip
    if CAUSAL:
        num_full, num_tail, last = causal_steps(
            num_full, begin + sub * BM, q_total, kv_last, kv_tail, SUB, BM, BN
        )
        last_key = last + in_tile
    acc = tl.zeros([BM, DP], tl.float32)
    total = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    entry = tl.load(list_ptr, mask=num_full > 0, other=0)
    for step in tl.range(0, num_full, num_stages=STAGES):
        block = entry
        if SUB > 0:
            start = (entry * SUB + step % SUB) * BN
            at_next = (step + 1) // SUB
        else:
            start = entry
            at_next = step + 1
            if BITS:
                block = tl.load(block_ptr + b * list_b + h * list_h + i * list_q + step)
        entry = tl.load(list_ptr + at_next, mask=step + 1 < num_full, other=0)
        keep = True
        if BITS:
            keep = _row_choice(bits_ptr, block, bits_s, bits_w, in_tile, real)
        k_t, v = _load_step(
            k_base, v_base, k_tile, v_tile, b, kv_h, start.to(tl.int64), k_s, v_s,
            real_d[:, None], real_d[None, :], BN, DP, D < DP and not TMA, TMA,
        )  # fmt: skip
        acc, total, m = _update(q, k_t, v, acc, total, m, keep, scale_log2, BITS, UPCAST)

    for tail in tl.range(0, num_tail, num_stages=1):
        start, length_n = partial_step(
            tail, list_ptr, tail_length_ptr + at * tail_room, room, num_full, kv_last, kv_tail,
            SUB, BN, CAUSAL,
        )  # fmt: skip
        start = start.to(tl.int64)
        real_n = n < length_n
        keep = real_n[None, :]
        if CAUSAL:
            keep = keep & (start + n[None, :] <= last_key[:, None])
        if BITS:
            block = kv_last
            if SUB == 0:
                last_place = b * list_b + h * list_h + i * list_q + room - 1
                block = tl.load(block_ptr + last_place - tail)
            keep = keep & _row_choice(bits_ptr, block, bits_s, bits_w, in_tile, real)
        k_t, v = _load_step(
            k_base, v_base, k_tile, v_tile, b, kv_h, start, k_s, v_s,
            real_n[None, :] & real_d[:, None], real_n[:, None] & real_d[None, :], BN, DP, True, TMA,
        )  # fmt: skip
        acc, total, m = _update(q, k_t, v, acc, total, m, keep, scale_log2, True, UPCAST)

    nothing = (total == 0.0) | (inside >= length)
    total = tl.where(nothing, 1.0, total)
    out = acc / total[:, None]
    out = tl.where(nothing[:, None], 0.0, out)
    owned = real
    if Q_LENGTHS and not Q_STARTS:
        owned = inside < q_size  # the padding of a block is its own, and is set to zero
    out_ptrs = out_ptr + b * out_b + h * out_h + first_row * out_s
    out_ptrs += in_tile[:, None] * out_s + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=owned[:, None] & real_d[None, :])
    if LSE:
        lse = tl.where(nothing, float("-inf"), 0.6931471805599453 * (m + tl.log2(total)))
        tl.store(lse_ptr + b * lse_b + h * lse_h + first_row + in_tile, lse, mask=owned)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    tile: TritonTile,
    copy_engine: bool = False,
) -> None:
    """Launch the kernel; writes `out` [B, Sq, H, D] and `lse` [B, H, Sq].

    Args:
        q: [B, Sq, H, D], any strides.
        k: [B, Sk, Hkv, D], any strides.
        v: [B, Sk, Hkv, D], any strides.
        plan: the pairs, on the same device.
        out: contiguous; only rows that belong to a query block are written.
        lse: contiguous fp32, or None.
        scale: factor of the scores.
        tile: shape of a program, as `triton_tile` chooses it.
        copy_engine: load through tensor descriptors, which needs SM90 or later, stride 1 along D
            and all other strides and addresses multiples of 16 bytes.
    """
    batch, _, heads, head_size = q.shape
    direct = plan.kv.is_regular and plan.kv.size % tile.keys == 0
    if plan.causal and not direct:
        raise UsageError(
            f"`plan` must have key blocks of a multiple of {tile.keys} keys to be causal, "
            f"got {plan.kv.size}"
        )
    lists = lists_of(plan, tile.keys, batch, heads, whole=direct)
    absent = plan.counts
    bits = absent.unsqueeze(-1) if plan.row_bits is None else plan.row_bits
    bits = bits.expand(batch, heads, -1, -1)
    tiles_of_block = -(-plan.q.size // tile.rows)
    width = triton.next_power_of_2(max(head_size, 16))
    inputs: tuple[object, ...] = (q, k, v)
    if copy_engine:
        rows = (tile.rows, tile.keys, tile.keys)
        inputs = tuple(map(_describe, (q, k, v), rows, [width] * 3))
    _attention_kernel[(lists.counts.numel() * tiles_of_block,)](
        *inputs, out, out if lse is None else lse,
        lists.entries, lists.counts, lists.blocks, lists.tail_counts, lists.tail_lengths,
        lists.q_starts, lists.q_lengths, absent if lists.order is None else lists.order, bits,
        *q.stride(), *k.stride(), *v.stride(),
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
        *lists.strides, *lists.q_strides, *bits.stride(), *lists.rows_of(k.shape[2]),
        plan.q.size, plan.q.total, lists.kv_last, lists.kv_tail,
        lists.entries.shape[3], lists.tail_room, scale * LOG2E,
        BM=tile.rows, BN=tile.keys, D=head_size, DP=width,
        QSUB=tiles_of_block, SUB=lists.sub, RAGGED_END=direct and lists.kv_tail != plan.kv.size,
        Q_STARTS=plan.q.starts is not None, Q_LENGTHS=plan.q.lengths is not None,
        ORDERED=lists.order is not None, BITS=plan.row_bits is not None, LSE=lse is not None,
        STAGES=tile.stages, UPCAST=interpreted(), TMA=copy_engine, CAUSAL=plan.causal,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _describe(tensor: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describe [B, S, H, D] to the copy engine as [B, H, S, D] in boxes of [1, 1, rows, width]."""
    order = (0, 2, 1, 3)
    # Strides of dimensions of size 1 mean nothing, but must be multiples of 16 bytes as well.
    strides = [tensor.stride(i) if tensor.shape[i] > 1 else 64 for i in order[:3]]
    sizes = [tensor.shape[i] for i in order]
    return TensorDescriptor(tensor, sizes, [*strides, 1], [1, 1, rows, width])
