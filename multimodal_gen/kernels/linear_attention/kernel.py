"""Linear attention in Triton: SM80 and later, ROCm, and Triton's interpreter.

One pass over keys and values gives the means of key blocks and the state; one pass over queries
and outputs adds the branch. Both are bound by memory. In them H / z stands for H: rows of it are
weighted means of values, which fit any dtype, and phi(q) z / (eps + phi(q) . z), its factors, sum
up to at most 1. A projection of the result is applied to H / z instead, once per head.
"""

import triton
import triton.language as tl


@triton.jit
def _phi(x, real_t, real_d, MAP: tl.constexpr, PADDED: tl.constexpr):
    """Features of [T, D] in fp32; tokens, and with PADDED channels, that are not real give 0."""
    if MAP == "softmax":
        if PADDED:
            x = tl.where(real_d[None, :], x, float("-inf"))
        e = tl.exp2((x - tl.max(x, 1)[:, None]) * 1.4426950408889634)
        return e * tl.where(real_t, 1.0 / tl.sum(e, 1), 0.0)[:, None]
    if MAP == "elu":
        phi = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
        phi = tl.where(real_t[:, None], phi, 0.0)
        if PADDED:
            phi = tl.where(real_d[None, :], phi, 0.0)
        return phi
    return tl.maximum(x, 0.0)


@triton.jit
def _product(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b; the interpreter knows no products of bfloat16."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _bounds(block, start_ptr, length_ptr, total, SIZE: tl.constexpr, GIVEN: tl.constexpr):
    """First token and length of a block."""
    if GIVEN:
        start = tl.load(start_ptr + block)
        length = tl.load(length_ptr + block)
    else:
        start = block * SIZE
        length = tl.minimum(total - start, SIZE)
    return start, length


@triton.jit(do_not_specialize=["bound_b", "heads", "splits", "per_split", "num_blocks", "total"])
def key_kernel(
    k_ptr, v_ptr, mean_ptr, state_ptr, weight_ptr, start_ptr, length_ptr,
    k_b, k_s, k_h, v_b, v_s, v_h, bound_b, heads, splits, per_split, num_blocks, total,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr,
    MAP: tl.constexpr, SHARE: tl.constexpr, STATE: tl.constexpr, MEANS: tl.constexpr,
    FOLD: tl.constexpr, GIVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [B * splits * H, parts of DV channels]; heads run together, close in memory.

    A state is written as [D + 1, D], times SHARE: v^T phi(k), projected with FOLD, which needs one
    part, and below it the sum of phi(k). That product takes v as it lies in memory.
    """
    pid = tl.program_id(0)
    part = tl.program_id(1)
    h = (pid % heads).to(tl.int64)
    split = pid // heads % splits
    b = (pid // heads // splits).to(tl.int64)
    PIECES: tl.constexpr = SIZE // T
    t = tl.arange(0, T)
    d = tl.arange(0, DP)
    e = part * DV + tl.arange(0, DV)
    real_d = d < D
    alone = d < tl.where(part == 0, D, 0)  # what every part has is written by the first
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    start_ptr += b * bound_b
    length_ptr += b * bound_b
    mean_ptr += (b * heads + h) * num_blocks * D
    LANES: tl.constexpr = min(T, 16)
    moments = tl.zeros([DV, DP], tl.float32)
    sums = tl.zeros([LANES, DP], tl.float32)
    mean = tl.zeros([DP], tl.float32)
    first = split * per_split
    last = tl.minimum(first + per_split, num_blocks)
    for piece in range(first * PIECES, last * PIECES):
        block = piece // PIECES
        start, length = _bounds(block, start_ptr, length_ptr, total, SIZE, GIVEN)
        skipped = piece % PIECES * T
        real = t < length - skipped
        token = (start + skipped).to(tl.int64)
        k = tl.load(
            k_ptr + token * k_s + (t[:, None] * k_s + d[None, :]),
            mask=real[:, None] & real_d[None, :], other=0.0,
        )  # fmt: skip
        x = k.to(tl.float32)
        if MEANS:
            mean += tl.sum(x, 0)
            if piece % PIECES == PIECES - 1:
                share = mean / tl.maximum(length, 1).to(tl.float32)
                tl.store(mean_ptr + block * D + d, share, mask=alone)
                mean = tl.zeros([DP], tl.float32)
        if STATE:
            v = tl.load(
                v_ptr + token * v_s + (t[:, None] * v_s + e[None, :]),
                mask=real[:, None] & (e < D)[None, :], other=0.0,
            )  # fmt: skip
            phi = _phi(x, real, real_d, MAP, D < DP).to(k.dtype)
            # Rows that one thread holds: the others are added up at the end.
            sums += tl.sum(tl.reshape(phi.to(tl.float32), [T // LANES, LANES, DP]), 0)
            moments = _product(tl.trans(v), phi, moments, UPCAST)
    if STATE:
        at = (b * heads + h) * splits + split
        state_ptr += at * (D + 1) * D
        mask = (e < D)[:, None] & real_d[None, :]
        moments *= SHARE
        if FOLD:
            o = tl.arange(0, DV)
            real_w = (o < D)[:, None] & (e < D)[None, :]
            weight = tl.load(weight_ptr + o[:, None] * D + e[None, :], mask=real_w, other=0.0)
            zero = tl.zeros([DV, DP], tl.float32)
            moments = _product(weight, moments.to(weight.dtype), zero, UPCAST)
        dtype = state_ptr.dtype.element_ty
        tl.store(state_ptr + e[:, None] * D + d[None, :], moments.to(dtype), mask=mask)
        tl.store(state_ptr + D * D + d, (tl.sum(sums, 0) * SHARE).to(dtype), mask=alone)


@triton.jit
def _weights(q, sums, real_t, real_d, MAP: tl.constexpr, epsilon, PADDED: tl.constexpr):
    """Return phi(q) z / (eps + phi(q) . z) for [T, D] queries, in the dtype of `q`."""
    x = q.to(tl.float32)
    if MAP == "softmax":
        # The sum that the softmax divides by cancels but for the epsilon.
        if PADDED:
            x = tl.where(real_d[None, :], x, float("-inf"))
        e = tl.exp2((x - tl.max(x, 1)[:, None]) * 1.4426950408889634)
        weights = e * sums[None, :]
        total = epsilon * tl.sum(e, 1) + tl.sum(weights, 1)
    else:
        weights = _phi(x, real_t, real_d, MAP, PADDED) * sums[None, :]
        total = epsilon + tl.sum(weights, 1)
    return (weights * (1.0 / total)[:, None]).to(q.dtype)


@triton.jit(do_not_specialize=["heads", "group", "tiles", "first_row", "last_row"])
def add_kernel(
    out_ptr, q_ptr, folded_ptr, sum_ptr, bias_ptr,
    out_b, out_s, out_h, q_b, q_s, q_h, heads, group, tiles, first_row, last_row,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr,
    MAP: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [B * tiles * H, parts of DV channels]; `out` is changed in place."""
    pid = tl.program_id(0)
    h = (pid % heads).to(tl.int64)
    tile = pid // heads % tiles
    b = (pid // heads // tiles).to(tl.int64)
    d = tl.arange(0, DP)
    e = tl.program_id(1) * DV + tl.arange(0, DV)
    real_d = d < D
    real_e = e < D
    state = b * (heads // group) + h // group
    folded = tl.load(
        folded_ptr + state * D * D + d[:, None] * D + e[None, :],
        mask=real_d[:, None] & real_e[None, :], other=0.0,
    )  # fmt: skip
    sums = tl.load(sum_ptr + state * D + d, mask=real_d, other=0.0)
    q_ptr += b * q_b + h * q_h
    out_ptr += b * out_b + h * out_h
    t = tl.arange(0, T)
    for i in range(TILES):
        start = first_row + (tile * TILES + i) * T
        real = t < last_row - start
        row = start.to(tl.int64)
        q = tl.load(
            q_ptr + row * q_s + (t[:, None] * q_s + d[None, :]),
            mask=real[:, None] & real_d[None, :], other=0.0,
        )  # fmt: skip
        outs = out_ptr + row * out_s + (t[:, None] * out_s + e[None, :])
        mask = real[:, None] & real_e[None, :]
        out = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            out += tl.load(bias_ptr + e, mask=real_e, other=0.0).to(tl.float32)[None, :]
        out = _product(_weights(q, sums, real, real_d, MAP, EPS, D < DP), folded, out, UPCAST)
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["heads", "num_q", "q_total"])
def add_blocks_kernel(
    out_ptr, q_ptr, state_ptr, bias_ptr, start_ptr, length_ptr,
    out_b, out_s, out_h, q_b, q_s, q_h, heads, num_q, q_total, epsilon,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr, MAP: tl.constexpr,
    BIAS: tl.constexpr, GIVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq]: a state of its own for every query block; `out` is changed in place."""
    pid = tl.program_id(0)
    i = pid % num_q
    h = (pid // num_q % heads).to(tl.int64)
    b = (pid // num_q // heads).to(tl.int64)
    d = tl.arange(0, DP)
    real_d = d < D
    state_ptr += pid.to(tl.int64) * (D + 1) * D
    square = d[:, None] * D + d[None, :]
    real_dd = real_d[:, None] & real_d[None, :]
    sums = tl.load(state_ptr + D * D + d, mask=real_d, other=0.0).to(tl.float32)
    moments = tl.load(state_ptr + square, mask=real_dd, other=0.0)
    factor = tl.where(sums > 0.0, 1.0 / tl.where(sums > 0.0, sums, 1.0), 0.0)
    means = (moments.to(tl.float32) * factor[None, :]).to(moments.dtype)
    start, length = _bounds(i, start_ptr, length_ptr, q_total, SIZE, GIVEN)
    q_ptr += b * q_b + h * q_h + start.to(tl.int64) * q_s
    out_ptr += b * out_b + h * out_h + start.to(tl.int64) * out_s
    for first in range(0, length, T):
        t = first + tl.arange(0, T)
        real = t < length
        mask = real[:, None] & real_d[None, :]
        q = tl.load(q_ptr + (t[:, None] * q_s + d[None, :]), mask=mask, other=0.0)
        outs = out_ptr + (t[:, None] * out_s + d[None, :])
        out = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            out += tl.load(bias_ptr + d, mask=real_d, other=0.0).to(tl.float32)[None, :]
        weights = _weights(q, sums, real, real_d, MAP, epsilon, D < DP)
        out = _product(weights, tl.trans(means), out, UPCAST)
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU in this process."""
    return not isinstance(key_kernel, triton.runtime.JITFunction)
