"""Block-sparse attention in portable Triton.

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
from multimodal_gen.kernels.block_sparse.call import Call
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import PLAN_NUMBERS, WorkList, work_list
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import bounds, dot, interpreted, locate, next_power_of_2

LOG2E = 1.4426950408889634


@triton.jit
def _add(s, highest, v, acc, total, m, scale_log2, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """Add the weights of a step, and their product with V."""
    m_new = tl.maximum(m, highest)
    reference = m_new
    if MASKED:
        # A row that has seen no key yet has m = -inf, and -inf - -inf is a NaN.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale_log2 - reference[:, None])
    alpha = tl.exp2(m - reference)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + dot(p.to(v.dtype), v, UPCAST)
    return acc, total, m_new


@triton.jit
def _update(
    q, k_t, v, acc, total, m, mask, scale_log2, real, below, skipped,
    MASKED: tl.constexpr, UPCAST: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; SKIP: none where all of it lies `below` what was seen."""
    s = dot(q, k_t, UPCAST)
    if MASKED:
        s = tl.where(mask, s, float("-inf"))
    highest = tl.max(s, 1) * scale_log2
    if SKIP:
        seen = real & (highest > float("-inf"))
        gap = tl.where(seen, highest - tl.where(seen, m, 0.0), float("-inf"))
        nearest = tl.max(gap, 0)
        if nearest > -below:
            acc, total, m = _add(s, highest, v, acc, total, m, scale_log2, MASKED, UPCAST)
        else:
            skipped += (nearest > float("-inf")).to(tl.int32)
    else:
        acc, total, m = _add(s, highest, v, acc, total, m, scale_log2, MASKED, UPCAST)
    return acc, total, m, skipped


@triton.jit
def load_rows(
    x, tile, b, h, start, stride, mask,
    ROWS: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, DP] from row `start` on; through the copy engine `x` is a descriptor."""
    if TMA:
        rows = x.load([b.to(tl.int32), h.to(tl.int32), start.to(tl.int32), 0]).reshape(ROWS, DP)
        if MASKED:
            rows = tl.where(mask, rows, 0.0)
    elif MASKED:
        rows = tl.load(x + start * stride + tile, mask=mask, other=0.0)
    else:
        rows = tl.load(x + start * stride + tile)
    return rows


@triton.jit
def _load_step(
    k, v, k_tile, v_tile, b, kv_h, start, k_s, v_s, k_mask, v_mask,
    BN: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return k^T [DP, BN] and v [BN, DP] of the keys from `start` on.

    Through the copy engine K and V are descriptors, and channels past D arrive as zeros.
    """
    k_t = load_rows(k, k_tile, b, kv_h, start, k_s, k_mask, BN, DP, MASKED and not TMA, TMA)
    if TMA:
        k_t = tl.trans(k_t)
    # A weight of zero does not keep out what is not finite.
    return k_t, load_rows(v, v_tile, b, kv_h, start, v_s, v_mask, BN, DP, MASKED, TMA)


@triton.jit
def row_choice(bits_ptr, block, row_stride, word_stride, rows, real):
    """Whether each query row keeps `block`: [BM]."""
    words = tl.load(bits_ptr + rows * row_stride + (block // 32) * word_stride, mask=real, other=0)
    return ((words >> (block % 32)) & 1) != 0


@triton.jit
def number_of_steps(
    list_ptr, count, tail_count_ptr, at, last, tail,
    SUB: tl.constexpr, STEP: tl.constexpr, RAGGED_END: tl.constexpr,
):  # fmt: skip
    """Return how many whole and how many partial steps a list has."""
    num_full = count
    if SUB > 0:
        num_full = count * SUB
        num_tail = 0
        if RAGGED_END:
            end = tl.load(list_ptr + (count - 1), mask=count > 0, other=-1)
            if end == last:
                num_full = (count - 1) * SUB + tail // STEP
                num_tail = (tail % STEP > 0).to(tl.int32)
    else:
        num_tail = tl.load(tail_count_ptr + at)
    return num_full, num_tail


@triton.jit
def causal_steps(
    num_full, first_row, q_total, last, tail,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Return as many for BM rows under causality, and the last key that the first of them sees."""
    kv_total = last * SUB * BN + tail
    last_key = first_row + kv_total - q_total
    num_full = tl.minimum(num_full, tl.maximum(last_key + 1, 0) // BN)
    num_tail = tl.cdiv(tl.minimum(tl.maximum(last_key + BM, 0), kv_total), BN) - num_full
    return num_full, num_tail, last_key


@triton.jit
def whole_step(
    step, entry, list_ptr, block_ptr, num_full,
    SUB: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return first key and block of a whole step, and the entry of the list for the next one."""
    block = entry
    if SUB > 0:
        start = (entry * SUB + step % SUB) * BN
        at_next = (step + 1) // SUB
    else:
        start = entry
        at_next = step + 1
        if BITS:
            block = tl.load(block_ptr + step)
    entry = tl.load(list_ptr + at_next, mask=step + 1 < num_full, other=0)
    return start.to(tl.int64), block, entry


@triton.jit
def partial_step(
    step, list_ptr, block_ptr, tail_length_ptr, room, num_full, last, tail,
    SUB: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return first key, number of keys and block of a partial step."""
    block = last
    if CAUSAL:
        start = (num_full + step) * BN
        length = last * SUB * BN + tail - start
    elif SUB > 0:
        start = (last * SUB + tail // BN) * BN
        length = tail % BN
    else:
        start = tl.load(list_ptr + (room - 1 - step))
        length = tl.load(tail_length_ptr + step)
        if BITS:
            block = tl.load(block_ptr + (room - 1 - step))
    return start, length, block


@triton.jit(do_not_specialize=PLAN_NUMBERS)
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    block_ptr, bits_ptr,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    out_b, out_s, out_h, lse_b, lse_h, bits_b, bits_h, bits_s, bits_w,
    scale_log2, skip_ptr, below,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QSUB: tl.constexpr, SUB: tl.constexpr, RAGGED_END: tl.constexpr,
    Q_STARTS: tl.constexpr, Q_LENGTHS: tl.constexpr,
    ORDERED: tl.constexpr, BITS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq * QSUB]; QSUB tiles of BM rows per query block.

    SUB > 0: `list_ptr` holds blocks of SUB steps, the last of all blocks being `tail` keys long.
    SUB = 0: it holds the steps of `make_steps`. CAUSAL: the list holds every block, and the steps
    that cross the diagonal are taken as partial ones.
    """
    b, h, i, sub = locate(order_ptr, rows, rep_h, num, plan_h, QSUB, ORDERED)
    row_of_list = b * list_b + h * list_h + i * list_n
    list_ptr += row_of_list
    at = b * count_b + h * count_h + i * count_n
    count = tl.load(count_ptr + at)
    begin, length = bounds(
        b, h, i, size, total, start_ptr, length_ptr, start_b, start_h, length_b, length_h,
        Q_STARTS, Q_LENGTHS,
    )  # fmt: skip
    if Q_LENGTHS:
        count = tl.where(sub * BM < length, count, 0)
    inside = sub * BM + tl.arange(0, BM)
    real = inside < length

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

    num_full, num_tail = number_of_steps(
        list_ptr, count, tail_count_ptr, at, last, tail, SUB, BN, RAGGED_END
    )
    if Q_LENGTHS:
        num_tail = tl.where(sub * BM < length, num_tail, 0)
    if CAUSAL:
        num_full, num_tail, last_key = causal_steps(
            num_full, begin + sub * BM, total, last, tail, BM, BN, SUB
        )
    acc = tl.zeros([BM, DP], tl.float32)
    weight = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    skipped = tl.full([], 0, tl.int32)
    entry = tl.load(list_ptr, mask=num_full > 0, other=0)
    for step in tl.range(0, num_full, num_stages=STAGES):
        start, block, entry = whole_step(
            step, entry, list_ptr, block_ptr + row_of_list, num_full, SUB, BN, BITS
        )
        mask = True
        if BITS:
            mask = row_choice(bits_ptr, block, bits_s, bits_w, in_tile, real)[:, None]
        k_t, v = _load_step(
            k_base, v_base, k_tile, v_tile, b, kv_h, start, k_s, v_s,
            real_d[:, None], real_d[None, :], BN, DP, D < DP and not TMA, TMA,
        )  # fmt: skip
        acc, weight, m, skipped = _update(
            q, k_t, v, acc, weight, m, mask, scale_log2, real, below, skipped, BITS, UPCAST, SKIP
        )

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
        k_t, v = _load_step(
            k_base, v_base, k_tile, v_tile, b, kv_h, start, k_s, v_s,
            real_n[None, :] & real_d[:, None], real_n[:, None] & real_d[None, :], BN, DP, True, TMA,
        )  # fmt: skip
        acc, weight, m, skipped = _update(
            q, k_t, v, acc, weight, m, mask, scale_log2, real, below, skipped, True, UPCAST, SKIP
        )

    if SKIP:
        tl.atomic_add(skip_ptr, skipped.to(tl.int64))
        tl.atomic_add(skip_ptr + 1, (num_full + num_tail).to(tl.int64))
    nothing = (weight == 0.0) | (inside >= length)
    weight = tl.where(nothing, 1.0, weight)
    out = acc / weight[:, None]
    out = tl.where(nothing[:, None], 0.0, out)
    owned = real
    if Q_LENGTHS and not Q_STARTS:
        owned = inside < size  # the padding of a block is its own, and is set to zero
    out_ptrs = out_ptr + b * out_b + h * out_h + first_row * out_s
    out_ptrs += in_tile[:, None] * out_s + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=owned[:, None] & real_d[None, :])
    if LSE:
        lse = tl.where(nothing, float("-inf"), 0.6931471805599453 * (m + tl.log2(weight)))
        tl.store(lse_ptr + b * lse_b + h * lse_h + first_row + in_tile, lse, mask=owned)


_launch_attention = Launcher(_attention_kernel)


def attend(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    tile: TritonTile,
    copy_engine: bool = False,
) -> None:
    """Launch the kernel; writes `out` [B, Sq, H, D] and `lse` [B, H, Sq].

    Args:
        call: with tensors of any strides; what is skipped are steps of `tile.keys` keys.
        out: contiguous; only rows that belong to a query block are written.
        lse: contiguous fp32, or None.
        tile: shape of a program, as `triton_tile` chooses it.
        copy_engine: load through tensor descriptors, which needs SM90 or later, stride 1 along D
            and all other strides and addresses multiples of 16 bytes.
    """
    q, k, v, plan = call[:4]
    skip = call.skip
    batch, _, heads, head_size = q.shape
    work = work_list(plan, tile.keys, batch, heads, k.shape[2])
    refuse_cut(plan, work, tile.keys)
    bits = bits_of(plan, batch, heads)
    tiles_of_block = -(-plan.q.size // tile.rows)
    width = next_power_of_2(max(head_size, 16))
    inputs: tuple[object, ...] = (q, k, v)
    if copy_engine:
        rows = (tile.rows, tile.keys, tile.keys)
        inputs = tuple(map(describe, (q, k, v), rows, [width] * 3))
    _launch_attention(
        (work.num * tiles_of_block,),
        *inputs, out, out if lse is None else lse, *work.arguments, work.blocks, bits,
        *q.stride(), *k.stride(), *v.stride(),
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]), *bits.stride(),
        call.scale * LOG2E,
        None if skip is None else skip.counts_on(q.device), None if skip is None else skip.octaves,
        BM=tile.rows, BN=tile.keys, D=head_size, DP=width,
        QSUB=tiles_of_block, SUB=work.sub, RAGGED_END=work.ragged,
        Q_STARTS=plan.q.starts is not None, Q_LENGTHS=plan.q.lengths is not None,
        ORDERED=work.ordered, BITS=plan.row_bits is not None, LSE=lse is not None,
        STAGES=tile.stages, UPCAST=interpreted(), TMA=copy_engine, CAUSAL=plan.causal,
        SKIP=skip is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def refuse_cut(plan: BlockPlan, work: WorkList, keys: int) -> None:
    """Raise `UsageError` where a plan is causal and steps of so many keys are none of its blocks.

    `work` has such steps.
    """
    if plan.causal and not work.sub:
        raise UsageError(
            f"`plan` must have key blocks of a multiple of {keys} keys to be causal, "
            f"got {plan.kv.size}"
        )


def bits_of(plan: BlockPlan, batch: int, heads: int) -> torch.Tensor:
    """Return the blocks that rows choose, [B, H, Sq, words]; something to point at without any."""
    bits = plan.counts.unsqueeze(-1) if plan.row_bits is None else plan.row_bits
    return bits.expand(batch, heads, -1, -1)


def describe(tensor: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describe [B, S, H, D] to the copy engine as [B, H, S, D] in boxes of [1, 1, rows, width]."""
    order = (0, 2, 1, 3)
    # Strides of dimensions of size 1 mean nothing, but must be multiples of 16 bytes as well.
    strides = [tensor.stride(i) if tensor.shape[i] > 1 else 64 for i in order[:3]]
    sizes = [tensor.shape[i] for i in order]
    return TensorDescriptor(tensor, sizes, [*strides, 1], [1, 1, rows, width])
