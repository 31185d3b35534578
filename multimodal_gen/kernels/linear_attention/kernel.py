"""Linear attention in Triton: SM80 and later, ROCm, and Triton's interpreter.

One pass over keys and values gives the means of key blocks and the state; one pass over queries
and outputs adds the branch. Both are bound by memory. In them H / z stands for H: rows of it are
weighted means of values, which fit any dtype, and phi(q) z / (eps + phi(q) . z), its factors, sum
up to at most 1. A projection of the result is applied to H / z instead, once per head.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.reference import EPSILON, KeyState, Projection

PIECE = 64  # tokens that are read at once
KEY_WARPS = 8
KEY_STAGES = 3
WAVE = 264  # programs of a pass over the keys: two for every multiprocessor of a large GPU
ROWS = 128  # queries that are read at once
ROW_TILES = 4  # as many times per program
ROW_WARPS = 8
# What is left of a sum in fp32 after almost all of it was subtracted is rounding below this share.
_ROUNDING = tl.constexpr(2.0**-19)


@triton.jit
def _phi(x, real, MAP: tl.constexpr):
    """Features of [T, D] in fp32; channels that are not `real` give 0."""
    if MAP == "softmax":
        x = tl.where(real[None, :], x, float("-inf"))
        e = tl.exp(x - tl.max(x, 1)[:, None])
        phi = e / tl.sum(e, 1)[:, None]
    elif MAP == "elu":
        phi = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        phi = tl.maximum(x, 0.0)
    return tl.where(real[None, :], phi, 0.0)


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
def _key_kernel(
    k_ptr, v_ptr, mean_ptr, moment_ptr, sum_ptr, start_ptr, length_ptr,
    k_b, k_s, k_h, v_b, v_s, v_h, bound_b, heads, splits, per_split, num_blocks, total,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr,
    MAP: tl.constexpr, STATE: tl.constexpr, MEANS: tl.constexpr, GIVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [B * splits * H, parts of DV channels]; heads run together, close in memory."""
    pid = tl.program_id(0)
    part = tl.program_id(1)
    h = (pid % heads).to(tl.int64)
    split = pid // heads % splits
    b = (pid // heads // splits).to(tl.int64)
    PIECES: tl.constexpr = SIZE // T
    d = tl.arange(0, DP)
    e = part * DV + tl.arange(0, DV)
    real_d = d < D
    alone = d < tl.where(part == 0, D, 0)  # what every part has is written by the first
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    start_ptr += b * bound_b
    length_ptr += b * bound_b
    mean_ptr += (b * heads + h) * num_blocks * D
    moments = tl.zeros([DP, DV], tl.float32)
    sums = tl.zeros([DP], tl.float32)
    mean = tl.zeros([DP], tl.float32)
    first = split * per_split
    last = tl.minimum(first + per_split, num_blocks)
    for piece in range(first * PIECES, last * PIECES):
        block = piece // PIECES
        start, length = _bounds(block, start_ptr, length_ptr, total, SIZE, GIVEN)
        t = piece % PIECES * T + tl.arange(0, T)
        real = t < length
        token = (start + t).to(tl.int64)
        k = tl.load(
            k_ptr + token[:, None] * k_s + d[None, :], mask=real[:, None] & real_d[None, :],
            other=0.0,
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
                v_ptr + token[:, None] * v_s + e[None, :], mask=real[:, None] & (e < D)[None, :],
                other=0.0,
            )  # fmt: skip
            phi = tl.where(real[:, None], _phi(x, real_d, MAP), 0.0).to(k.dtype)
            sums += tl.sum(phi.to(tl.float32), 0)
            moments = _product(tl.trans(phi), v, moments, UPCAST)
    if STATE:
        at = (b * splits + split) * heads + h
        moment_ptr += at * D * D
        mask = real_d[:, None] & (e < D)[None, :]
        tl.store(moment_ptr + d[:, None] * D + e[None, :], moments, mask=mask)
        tl.store(sum_ptr + at * D + d, sums, mask=alone)


@triton.jit
def _weights(q, sums, real_d, MAP: tl.constexpr, EPS: tl.constexpr):
    """phi(q) z / (eps + phi(q) . z) for [T, D] queries, in the dtype of `q`."""
    phi = _phi(q.to(tl.float32), real_d, MAP).to(q.dtype).to(tl.float32)
    weights = phi * sums[None, :]
    return (weights / (EPS + tl.sum(weights, 1))[:, None]).to(q.dtype)


@triton.jit(do_not_specialize=["heads", "group", "tiles", "first_row", "last_row"])
def _add_kernel(
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
    for i in range(TILES):
        row = first_row + (tile * TILES + i) * T + tl.arange(0, T)
        real = row < last_row
        row = row.to(tl.int64)
        q = tl.load(
            q_ptr + row[:, None] * q_s + d[None, :], mask=real[:, None] & real_d[None, :],
            other=0.0,
        )  # fmt: skip
        outs = out_ptr + row[:, None] * out_s + e[None, :]
        mask = real[:, None] & real_e[None, :]
        out = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            out += tl.load(bias_ptr + e, mask=real_e, other=0.0).to(tl.float32)[None, :]
        out = _product(_weights(q, sums, real_d, MAP, EPS), folded, out, UPCAST)
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "kv_bound_b", "index_b", "index_h", "count_b", "count_h", "heads", "group",
        "num_q", "q_total", "kv_total",
    ]
)  # fmt: skip
def _unselected_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, moment_ptr, sum_ptr, weight_ptr, bias_ptr, index_ptr, count_ptr,
    q_start_ptr, q_length_ptr, kv_start_ptr, kv_length_ptr,
    out_b, out_s, out_h, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    index_b, index_h, index_q, count_b, count_h, count_q, kv_bound_b,
    heads, group, num_q, q_total, kv_total,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, Q_SIZE: tl.constexpr,
    KV_SIZE: tl.constexpr, MAP: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr,
    Q_GIVEN: tl.constexpr, KV_GIVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq]: the state without the selected blocks, then the queries of the block."""
    pid = tl.program_id(0)
    i = pid % num_q
    h = (pid // num_q % heads).to(tl.int64)
    b = (pid // num_q // heads).to(tl.int64)
    kv_h = h // group
    PIECES: tl.constexpr = KV_SIZE // T
    d = tl.arange(0, DP)
    real_d = d < D
    k_ptr += b * k_b + kv_h * k_h
    v_ptr += b * v_b + kv_h * v_h
    kv_start_ptr += b * kv_bound_b
    kv_length_ptr += b * kv_bound_b
    index_ptr += b * index_b + h * index_h + i.to(tl.int64) * index_q
    count = tl.load(count_ptr + b * count_b + h * count_h + i.to(tl.int64) * count_q)
    moments = tl.zeros([DP, DP], tl.float32)
    sums = tl.zeros([DP], tl.float32)
    for piece in range(count * PIECES):
        block = tl.load(index_ptr + piece // PIECES)
        start, length = _bounds(block, kv_start_ptr, kv_length_ptr, kv_total, KV_SIZE, KV_GIVEN)
        t = piece % PIECES * T + tl.arange(0, T)
        token = (start + t).to(tl.int64)
        mask = (t < length)[:, None] & real_d[None, :]
        k = tl.load(k_ptr + token[:, None] * k_s + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + token[:, None] * v_s + d[None, :], mask=mask, other=0.0)
        phi = tl.where((t < length)[:, None], _phi(k.to(tl.float32), real_d, MAP), 0.0)
        phi = phi.to(k.dtype)
        sums += tl.sum(phi.to(tl.float32), 0)
        moments = _product(tl.trans(phi), v, moments, UPCAST)
    state = b * (heads // group) + kv_h
    square = d[:, None] * D + d[None, :]
    real_dd = real_d[:, None] & real_d[None, :]
    all_sums = tl.load(sum_ptr + state * D + d, mask=real_d, other=0.0)
    sums = all_sums - sums
    sums = tl.where(sums > _ROUNDING * all_sums, sums, 0.0)
    moments = tl.load(moment_ptr + state * D * D + square, mask=real_dd, other=0.0) - moments
    means = moments / tl.where(sums > 0.0, sums, 1.0)[:, None]
    means = tl.where((sums > 0.0)[:, None], means, 0.0).to(q_ptr.dtype.element_ty)
    # Output by input channels: this reads the transpose.
    weight = tl.load(weight_ptr + d[None, :] * D + d[:, None], mask=real_dd, other=0.0)
    start, length = _bounds(i, q_start_ptr, q_length_ptr, q_total, Q_SIZE, Q_GIVEN)
    q_ptr += b * q_b + h * q_h
    out_ptr += b * out_b + h * out_h
    for first in range(0, length, T):
        t = first + tl.arange(0, T)
        row = (start + t).to(tl.int64)
        mask = (t < length)[:, None] & real_d[None, :]
        q = tl.load(q_ptr + row[:, None] * q_s + d[None, :], mask=mask, other=0.0)
        zero = tl.zeros([T, DP], tl.float32)
        linear = _product(_weights(q, sums, real_d, MAP, EPS), means, zero, UPCAST)
        outs = out_ptr + row[:, None] * out_s + d[None, :]
        out = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            out += tl.load(bias_ptr + d, mask=real_d, other=0.0).to(tl.float32)[None, :]
        out = _product(linear.to(q.dtype), weight, out, UPCAST)
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU in this process."""
    return not isinstance(_key_kernel, triton.runtime.JITFunction)


def _channels(head_size: int) -> int:
    return triton.next_power_of_2(max(head_size, 16))


def _columns(padded: int) -> int:
    """Return how many channels of the values a program works on: registers are few."""
    return padded if padded <= 128 else 64


def _bounds_of(
    blocks: Blocks, device: torch.device
) -> tuple[bool, torch.Tensor, torch.Tensor, int]:
    """Return whether bounds are given, start and length [B|1, N] of every block, and a stride."""
    if blocks.is_regular:
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        return False, nothing, nothing, 0
    starts, lengths = (x[:, 0] for x in blocks.bounds(device))
    batch = max(starts.shape[0], lengths.shape[0])
    starts, lengths = (x.expand(batch, -1).contiguous() for x in (starts, lengths))
    return True, starts, lengths, blocks.num if batch > 1 else 0


def summarise_keys(
    key: torch.Tensor,
    value: torch.Tensor | None,
    blocks: Blocks,
    feature_map: str,
    *,
    means: bool = True,
    splits: int | None = None,
) -> tuple[torch.Tensor | None, KeyState | None]:
    """Launch the pass over the keys; see `api.key_means` and `api.key_state`.

    Args:
        key: [B, S, Hkv, D], stride 1 along D.
        value: as `key`, or None where no state is wanted.
        blocks: how the keys are cut, in sizes that are multiples of 64 or up to it.
        feature_map: of the state.
        means: whether the means of the blocks are wanted.
        splits: programs that share a head; by default as many as keep a GPU busy.
    """
    batch, _, heads, head_size = key.shape
    padded = _channels(head_size)
    columns = _columns(padded)
    piece = min(PIECE if padded <= 128 else PIECE // 2, blocks.size)
    splits = min(splits or max(1, WAVE // (batch * heads)), blocks.num)
    per_split = -(-blocks.num // splits)
    splits = -(-blocks.num // per_split)
    given, starts, lengths, bound_b = _bounds_of(blocks, key.device)
    state = value is not None
    v = key if value is None else value
    kept = blocks.num if means else 0
    mean = key.new_empty((batch, heads, kept, head_size), dtype=torch.float32)
    parts = (batch, splits if state else 0, heads, head_size)
    moments = key.new_empty((*parts, head_size), dtype=torch.float32)
    sums = key.new_empty(parts, dtype=torch.float32)
    _key_kernel[(batch * splits * heads, -(-head_size // columns) if state else 1)](
        key, v, mean, moments, sums, starts, lengths, *key.stride()[:3], *v.stride()[:3], bound_b,
        heads, splits, per_split, blocks.num, blocks.total,
        D=head_size, DP=padded, DV=columns, T=piece, SIZE=blocks.size, MAP=feature_map,
        STATE=state, MEANS=means, GIVEN=given, UPCAST=interpreted(),
        num_warps=KEY_WARPS, num_stages=KEY_STAGES if padded <= 128 else 2,
    )  # fmt: skip
    found = KeyState(moments=moments.sum(1), sums=sums.sum(1)) if state else None
    return (mean if means else None), found


def _fold(state: KeyState, projection: Projection, dtype: torch.dtype) -> torch.Tensor:
    """Return (H / z) W^T per head, [B, Hkv, D, D]: the projection of what H / z stands for."""
    sums = state.sums.unsqueeze(-1)
    means = torch.where(sums > 0, state.moments / sums, 0.0)
    return (means @ projection.weight.float().mT).to(dtype)


def add_linear(
    out: torch.Tensor,
    query: torch.Tensor,
    state: KeyState,
    projection: Projection,
    rows: slice,
    feature_map: str,
) -> None:
    """Launch the pass over the queries, which changes `out`; see `api.add_linear`."""
    batch, _, heads, head_size = query.shape
    padded = _channels(head_size)
    columns = _columns(padded)
    tile = ROWS if padded <= 128 else 32
    tiles = -(-(rows.stop - rows.start) // (tile * ROW_TILES))
    bias = projection.bias
    _add_kernel[(batch * tiles * heads, -(-head_size // columns))](
        out, query, _fold(state, projection, query.dtype), state.sums,
        state.sums if bias is None else bias, *out.stride()[:3], *query.stride()[:3],
        heads, heads // state.sums.shape[1], tiles, rows.start, rows.stop,
        D=head_size, DP=padded, DV=columns, T=tile, TILES=ROW_TILES, MAP=feature_map,
        EPS=EPSILON, BIAS=bias is not None, UPCAST=interpreted(), num_warps=ROW_WARPS, num_stages=2,
    )  # fmt: skip


def add_unselected(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: KeyState,
    plan: BlockPlan,
    projection: Projection,
    feature_map: str,
) -> None:
    """Launch the pass over what `plan` leaves out, which changes `out`; D is at most 128."""
    batch, _, heads, head_size = query.shape
    indices, counts = (x.expand(batch, heads, *x.shape[2:]) for x in (plan.indices, plan.counts))
    q_given, q_starts, q_lengths, _ = _bounds_of(plan.q, query.device)
    kv_given, kv_starts, kv_lengths, kv_bound_b = _bounds_of(plan.kv, query.device)
    bias = projection.bias
    _unselected_kernel[(batch * heads * plan.q.num,)](
        out, query, key, value, state.moments, state.sums,
        projection.weight.to(query.dtype).contiguous(), state.sums if bias is None else bias,
        indices, counts, q_starts, q_lengths, kv_starts, kv_lengths,
        *out.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *indices.stride()[:3], *counts.stride(), kv_bound_b,
        heads, heads // key.shape[2], plan.q.num, plan.q.total, plan.kv.total,
        D=head_size, DP=_channels(head_size), T=min(PIECE, plan.kv.size), Q_SIZE=plan.q.size,
        KV_SIZE=plan.kv.size, MAP=feature_map, EPS=EPSILON, BIAS=bias is not None,
        Q_GIVEN=q_given, KV_GIVEN=kv_given, UPCAST=interpreted(), num_warps=8, num_stages=3,
    )  # fmt: skip
