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


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU in this process."""
    return not isinstance(locate, triton.runtime.JITFunction)
