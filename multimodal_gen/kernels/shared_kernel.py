"""What the Triton kernels of several operations have in common."""

import triton
import triton.language as tl


@triton.jit
def locate(order_ptr, rows, rep_h, num_q, plan_h, QSUB: tl.constexpr, ORDERED: tl.constexpr):
    """Return batch, head, query block and tile within it of this program.

    Rows of the plan run fastest, in `order`; heads and batches that share them slowest, so that
    neighbours read the same keys.
    """
    pid = tl.program_id(0)
    sub = pid % QSUB
    position = pid // QSUB
    outer = position // rows
    row = position % rows
    if ORDERED:
        row = tl.load(order_ptr + row)
    h = row // num_q % plan_h + outer % rep_h
    b = row // num_q // plan_h + outer // rep_h
    return b.to(tl.int64), h.to(tl.int64), (row % num_q).to(tl.int64), sub


@triton.jit
def query_rows(
    start_ptr, length_ptr, b, h, i, start_b, start_h, length_b, length_h, size, total,
    STARTS: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Return the first row of a query block, and how many rows it has."""
    begin = (i * size).to(tl.int32)
    if STARTS:
        begin = tl.load(start_ptr + b * start_b + h * start_h + i)
    length = tl.minimum(total - begin, size)
    if LENGTHS:
        length = tl.load(length_ptr + b * length_b + h * length_h + i)
    return begin, length


@triton.jit
def listed_steps(
    list_ptr, tail_count_ptr, count, wanted, kv_last, kv_tail,
    SUB: tl.constexpr, BN: tl.constexpr, RAGGED_END: tl.constexpr,
):  # fmt: skip
    """Return how many whole and partial steps of BN keys a list of `count` entries stands for.

    SUB > 0: they are blocks of SUB steps, the last of all blocks being `kv_tail` keys long. SUB =
    0: they are steps, and there are partial ones where they are `wanted`.
    """
    if SUB > 0:
        num_full = count * SUB
        num_tail = 0
        if RAGGED_END:
            end = tl.load(list_ptr + (count - 1), mask=count > 0, other=-1)
            if end == kv_last:
                num_full = (count - 1) * SUB + kv_tail // BN
                num_tail = (kv_tail % BN > 0).to(tl.int32)
    else:
        num_full = count
        num_tail = tl.where(wanted, tl.load(tail_count_ptr), 0)
    return num_full, num_tail


@triton.jit
def causal_steps(
    num_full, first_row, q_total, kv_last, kv_tail,
    SUB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return the whole and partial steps that BM rows see of every block, and their last key.

    The steps that cross the diagonal are partial ones; the last key is that of the first row.
    """
    kv_total = kv_last * SUB * BN + kv_tail
    last = first_row + kv_total - q_total
    num_full = tl.minimum(num_full, tl.maximum(last + 1, 0) // BN)
    num_tail = tl.cdiv(tl.minimum(tl.maximum(last + BM, 0), kv_total), BN) - num_full
    return num_full, num_tail, last


@triton.jit
def partial_step(
    tail, list_ptr, tail_length_ptr, room, num_full, kv_last, kv_tail,
    SUB: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return first key and number of keys of a partial step."""
    if CAUSAL:
        start = (num_full + tail) * BN
        length = kv_last * SUB * BN + kv_tail - start
    elif SUB > 0:
        start = (kv_last * SUB + kv_tail // BN) * BN
        length = kv_tail % BN
    else:
        start = tl.load(list_ptr + room - 1 - tail)
        length = tl.load(tail_length_ptr + tail)
    return start, length


@triton.jit
def maximum(a, b):
    """The larger one; for scans."""
    return tl.maximum(a, b)


@triton.jit
def minimum(a, b):
    """The smaller one; for scans."""
    return tl.minimum(a, b)


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU in this process."""
    return not isinstance(locate, triton.runtime.JITFunction)
