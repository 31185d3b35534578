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
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, launch_order, unit_stride
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.steps_kernel import Steps, make_steps
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import interpreted, locate, next_power_of_2

LOG2E = 1.4426950408889634


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Multiply. The interpreter has no bfloat16 product, so there both are widened first."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


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
    q, k_t, v, acc, total, m, keep, scale_log2, real, below, skipped,
    MASKED: tl.constexpr, UPCAST: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; SKIP: none where all of it lies `below` what was seen."""
    s = dot(q, k_t, UPCAST)
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
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
def row_choice(bits_ptr, block, row_stride, word_stride, rows, real):
    """Whether each query row keeps `block`: [BM]."""
    words = tl.load(bits_ptr + rows * row_stride + (block // 32) * word_stride, mask=real, other=0)
    return ((words >> (block % 32)) & 1) != 0


@triton.jit
def partial_step(
    tail, list_ptr, block_ptr, tail_length_ptr, block_row, length_row, room, num_full,
    kv_last, kv_tail,
    SUB: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return first key, number of keys and block of a partial step."""
    block = kv_last
    if CAUSAL:
        start = (num_full + tail) * BN
        length = kv_last * SUB * BN + kv_tail - start
    elif SUB > 0:
        start = (kv_last * SUB + kv_tail // BN) * BN
        length = kv_tail % BN
    else:
        start = tl.load(list_ptr + room - 1 - tail)
        length = tl.load(tail_length_ptr + length_row + tail)
        if BITS:
            block = tl.load(block_ptr + block_row + room - 1 - tail)
    return start.to(tl.int64), length, block


@triton.jit
def _num_steps(
    list_ptr, list_j, count, tail_count_ptr, has_rows, kv_last, kv_tail,
    BN: tl.constexpr, SUB: tl.constexpr, RAGGED_END: tl.constexpr, Q_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Return how many whole and how many partial steps a list has."""
    if SUB > 0:
        num_full = count * SUB
        num_tail = 0
        if RAGGED_END:
            end = tl.load(list_ptr + (count - 1) * list_j, mask=count > 0, other=-1)
            if end == kv_last:
                num_full = (count - 1) * SUB + kv_tail // BN
                num_tail = (kv_tail % BN > 0).to(tl.int32)
    else:
        num_full = count
        num_tail = tl.load(tail_count_ptr)
        num_tail = tl.where(count >= 0, num_tail, 0)
        if Q_LENGTHS:
            num_tail = tl.where(has_rows, num_tail, 0)
    return num_full, num_tail


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
    list_b, list_h, list_q, list_j, count_b, count_h, count_q,
    q_start_b, q_start_h, q_length_b, q_length_h, bits_b, bits_h, bits_s, bits_w,
    rows, rep_h, num_q, plan_h, group, q_size, q_total, kv_last, kv_tail, room, tail_room,
    scale_log2, skip_ptr, below,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QSUB: tl.constexpr, SUB: tl.constexpr, RAGGED_END: tl.constexpr,
    Q_STARTS: tl.constexpr, Q_LENGTHS: tl.constexpr,
    ORDERED: tl.constexpr, BITS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr, CAUSAL: tl.constexpr, SKIP: tl.constexpr,
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
    begin = (i * q_size).to(tl.int32)
    if Q_STARTS:
        begin = tl.load(q_start_ptr + b * q_start_b + h * q_start_h + i)
    length = tl.minimum(q_total - begin, q_size)
    if Q_LENGTHS:
        length = tl.load(q_length_ptr + b * q_length_b + h * q_length_h + i)
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

    num_full, num_tail = _num_steps(
        list_ptr, list_j, count, tail_count_ptr + at, sub * BM < length, kv_last, kv_tail,
        BN, SUB, RAGGED_END, Q_LENGTHS,
    )  # fmt: skip
    if CAUSAL:
        kv_total = kv_last * SUB * BN + kv_tail
        last = begin + sub * BM + kv_total - q_total  # the last key that the first row sees
        last_key = last + in_tile
        num_full = tl.minimum(num_full, tl.maximum(last + 1, 0) // BN)
        num_tail = tl.cdiv(tl.minimum(tl.maximum(last + BM, 0), kv_total), BN) - num_full
    acc = tl.zeros([BM, DP], tl.float32)
    total = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    skipped = tl.full([], 0, tl.int32)
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
        entry = tl.load(list_ptr + at_next * list_j, mask=step + 1 < num_full, other=0)
        keep = True
        if BITS:
            keep = row_choice(bits_ptr, block, bits_s, bits_w, in_tile, real)[:, None]
        k_t, v = _load_step(
            k_base, v_base, k_tile, v_tile, b, kv_h, start.to(tl.int64), k_s, v_s,
            real_d[:, None], real_d[None, :], BN, DP, D < DP and not TMA, TMA,
        )  # fmt: skip
        acc, total, m, skipped = _update(
            q, k_t, v, acc, total, m, keep, scale_log2, real, below, skipped, BITS, UPCAST, SKIP
        )

    for tail in tl.range(0, num_tail, num_stages=1):
        start, length_n, block = partial_step(
            tail, list_ptr, block_ptr, tail_length_ptr, b * list_b + h * list_h + i * list_q,
            at * tail_room, room, num_full, kv_last, kv_tail, SUB, BN, BITS, CAUSAL,
        )  # fmt: skip
        real_n = n < length_n
        keep = real_n[None, :]
        if CAUSAL:
            keep = keep & (start + n[None, :] <= last_key[:, None])
        if BITS:
            keep = keep & row_choice(bits_ptr, block, bits_s, bits_w, in_tile, real)[:, None]
        k_t, v = _load_step(
            k_base, v_base, k_tile, v_tile, b, kv_h, start, k_s, v_s,
            real_n[None, :] & real_d[:, None], real_n[:, None] & real_d[None, :], BN, DP, True, TMA,
        )  # fmt: skip
        acc, total, m, skipped = _update(
            q, k_t, v, acc, total, m, keep, scale_log2, real, below, skipped, True, UPCAST, SKIP
        )

    if SKIP:
        tl.atomic_add(skip_ptr, skipped.to(tl.int64))
        tl.atomic_add(skip_ptr + 1, (num_full + num_tail).to(tl.int64))
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


_launch_attention = Launcher(_attention_kernel)


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
    skip: Skip | None = None,
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
        tile: shape of a program, as `portable_tile` chooses it.
        copy_engine: load through tensor descriptors, which needs SM90 or later, stride 1 along D
            and all other strides and addresses multiples of 16 bytes.
        skip: leaves out steps of `tile.keys` keys; see `Skip`.
    """
    batch, _, heads, head_size = q.shape
    direct = plan.kv.is_regular and plan.kv.size % tile.keys == 0
    if plan.causal and not direct:
        raise UsageError(
            f"`plan` must have key blocks of a multiple of {tile.keys} keys to be causal, "
            f"got {plan.kv.size}"
        )
    steps = None if direct else make_steps(plan, tile.keys)
    lists, counts, blocks = lists_of(plan, steps)
    _, plan_h, num_q = counts.shape
    order = launch_order(plan, counts)
    lists, blocks = lists.expand(batch, heads, -1, -1), blocks.expand(batch, heads, -1, -1)
    every_count = counts.expand(batch, heads, -1)
    absent = plan.counts
    bits = absent.unsqueeze(-1) if plan.row_bits is None else plan.row_bits
    bits = bits.expand(batch, heads, -1, -1)
    q_bounds = [
        absent if t is None else unit_stride(t).expand(batch, heads, -1)
        for t in (plan.q.starts, plan.q.lengths)
    ]
    tiles_of_block = -(-plan.q.size // tile.rows)
    kv_last = plan.kv.num - 1
    kv_tail = plan.kv.total - kv_last * plan.kv.size
    grid = (batch * heads * num_q * tiles_of_block,)
    width = next_power_of_2(max(head_size, 16))
    inputs: tuple[object, ...] = (q, k, v)
    if copy_engine:
        rows = (tile.rows, tile.keys, tile.keys)
        inputs = tuple(map(describe, (q, k, v), rows, [width] * 3))
    _launch_attention(
        grid,
        *inputs, out, out if lse is None else lse,
        lists, every_count, blocks,
        counts if steps is None else steps.num_tail,
        counts if steps is None else steps.tail_lengths,
        *q_bounds, counts if order is None else order, bits,
        *q.stride(), *k.stride(), *v.stride(),
        *out.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]),
        *lists.stride(), *every_count.stride(),
        *q_bounds[0].stride()[:2], *q_bounds[1].stride()[:2], *bits.stride(),
        counts.numel(), heads // plan_h, num_q, plan_h, heads // k.shape[2],
        plan.q.size, plan.q.total, kv_last, kv_tail, lists.shape[3], plan.indices.shape[3],
        scale * LOG2E,
        None if skip is None else skip.counts_on(q.device), None if skip is None else skip.octaves,
        BM=tile.rows, BN=tile.keys, D=head_size, DP=width,
        QSUB=tiles_of_block, SUB=plan.kv.size // tile.keys if direct else 0,
        RAGGED_END=direct and kv_tail != plan.kv.size,
        Q_STARTS=plan.q.starts is not None, Q_LENGTHS=plan.q.lengths is not None,
        ORDERED=order is not None, BITS=plan.row_bits is not None, LSE=lse is not None,
        STAGES=tile.stages, UPCAST=interpreted(), TMA=copy_engine, CAUSAL=plan.causal,
        SKIP=skip is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def describe(tensor: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describe [B, S, H, D] to the copy engine as [B, H, S, D] in boxes of [1, 1, rows, width]."""
    order = (0, 2, 1, 3)
    # Strides of dimensions of size 1 mean nothing, but must be multiples of 16 bytes as well.
    strides = [tensor.stride(i) if tensor.shape[i] > 1 else 64 for i in order[:3]]
    sizes = [tensor.shape[i] for i in order]
    return TensorDescriptor(tensor, sizes, [*strides, 1], [1, 1, rows, width])


def lists_of(
    plan: BlockPlan, steps: Steps | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the lists, the counts and the blocks of the steps, [B|1, H|1, ...]."""
    if steps is None:
        return plan.indices, plan.counts, plan.indices
    return steps.starts, steps.num_full, steps.starts if steps.blocks is None else steps.blocks
