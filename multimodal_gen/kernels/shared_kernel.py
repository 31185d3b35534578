"""What the Triton kernels of several operations have in common."""

import triton
import triton.language as tl


@triton.jit
def bounds(
    b, h, i, size, total, start_ptr, length_ptr, start_b, start_h, length_b, length_h,
    STARTS: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Return the first row and the number of rows of a block; see `plan.bounds_of`."""
    begin = (i * size).to(tl.int32)
    if STARTS:
        begin = tl.load(start_ptr + b * start_b + h * start_h + i)
    length = tl.minimum(total - begin, size)
    if LENGTHS:
        length = tl.load(length_ptr + b * length_b + h * length_h + i)
    return begin, length


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Multiply. The interpreter has no bfloat16 product, so there both are widened first."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def add_product(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b; the interpreter knows no products of bfloat16."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def scan_counts(
    count_ptr, total_ptr, rows, bins, BINS: tl.constexpr, B: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Turn counts [rows, BINS] of B bins into those of the rows before, and write their sums."""
    before = tl.zeros([B], tl.int32)
    for first in range(0, rows, N):
        row = first + tl.arange(0, N)
        at = row[:, None] * BINS + bins[None, :]
        count = tl.load(count_ptr + at, mask=(row < rows)[:, None], other=0)
        end = before[None, :] + tl.cumsum(count, 0)
        tl.store(count_ptr + at, end - count, mask=(row < rows)[:, None])
        before += tl.sum(count, 0)
    tl.store(total_ptr + bins, before)


@triton.jit
def maximum(a, b):
    """The larger one; for scans."""
    return tl.maximum(a, b)


@triton.jit
def minimum(a, b):
    """The smaller one; for scans."""
    return tl.minimum(a, b)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is no less than a number of at least 1.

    Triton's own is a function of its language, and takes as long as a small launch.
    """
    return 1 << (number - 1).bit_length()


def padded_channels(head_size: int) -> int:
    """Return the least power of two channels that tensor cores take, and that hold so many."""
    return next_power_of_2(max(head_size, 16))


def wide_channels(head_size: int) -> int:
    """Return the channels of a head, with those that pad it, of kernels with two widths."""
    return 64 if head_size <= 64 else 128


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU in this process."""
    return not isinstance(bounds, triton.runtime.JITFunction)
