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
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.linear_attention.reference import (
    EPSILON,
    FEATURE_MAPS,
    KeyState,
    Target,
)
from multimodal_gen.kernels.shared_kernel import add_product, interpreted, padded_channels
from multimodal_gen.kernels.tensors import unit_stride


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
def _bounds(block, start_ptr, length_ptr, total, SIZE: tl.constexpr, GIVEN: tl.constexpr):
    """First token and length of a block."""
    if GIVEN:
        start = tl.load(start_ptr + block)
        length = tl.load(length_ptr + block)
    else:
        start = block * SIZE
        length = tl.minimum(total - start, SIZE)
    return start, length


@triton.jit
def _at(ptr, first, t, columns, stride):
    """Return where the columns of rows [T, D] from the first one on lie."""
    return ptr + first * stride + (t[:, None] * stride + columns[None, :])


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
        mask = real[:, None] & real_d[None, :]
        k = tl.load(_at(k_ptr, token, t, d, k_s), mask=mask, other=0.0)
        x = k.to(tl.float32)
        if MEANS:
            mean += tl.sum(x, 0)
            if piece % PIECES == PIECES - 1:
                share = mean / tl.maximum(length, 1).to(tl.float32)
                tl.store(mean_ptr + block * D + d, share, mask=alone)
                mean = tl.zeros([DP], tl.float32)
        if STATE:
            mask = real[:, None] & (e < D)[None, :]
            v = tl.load(_at(v_ptr, token, t, e, v_s), mask=mask, other=0.0)
            phi = _phi(x, real, real_d, MAP, D < DP).to(k.dtype)
            # Rows that one thread holds: the others are added up at the end.
            sums += tl.sum(tl.reshape(phi.to(tl.float32), [T // LANES, LANES, DP]), 0)
            moments = add_product(tl.trans(v), phi, moments, UPCAST)
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
            moments = add_product(weight, moments.to(weight.dtype), zero, UPCAST)
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
        mask = real[:, None] & real_d[None, :]
        q = tl.load(_at(q_ptr, row, t, d, q_s), mask=mask, other=0.0)
        outs = _at(out_ptr, row, t, e, out_s)
        mask = real[:, None] & real_e[None, :]
        out = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            out += tl.load(bias_ptr + e, mask=real_e, other=0.0).to(tl.float32)[None, :]
        out = add_product(_weights(q, sums, real, real_d, MAP, EPS, D < DP), folded, out, UPCAST)
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
        out = add_product(weights, tl.trans(means), out, UPCAST)
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)


# H200, 2026-11, [2, 32760, 16, 128]: over the keys, 4 warps that spill a few registers take 0.35 ms
# and 8 that spill none 0.45; over the queries, 64 at once take 0.37 ms, other shapes up to 0.69.
PIECE = 64  # tokens that are read at once
KEY_WARPS = 4
KEY_STAGES = 3
WAVE = 264  # programs of a pass over the keys: two for every multiprocessor of a large GPU
ROWS = 64  # queries that are read at once
ROW_TILES = 1  # as many times per program
ROW_WARPS = 4
# States of blocks are computed for as many heads as fit into this, or into this share of q, k, v
# and the output.
STATE_BYTES = 2**25
STATE_SHARE = 0.04


_launch_keys, _launch_add = Launcher(key_kernel), Launcher(add_kernel)
_launch_add_blocks = Launcher(add_blocks_kernel)


def _columns(padded: int) -> int:
    """Return how many channels of the values a program works on: registers are few."""
    return padded if padded <= 128 else 64


def _bounds_of(
    blocks: Blocks, absent: torch.Tensor
) -> tuple[bool, torch.Tensor, torch.Tensor, int]:
    """Return whether bounds are given, start and length [B|1, N] of every block, and a stride.

    Any tensor, `absent`, stands for those that are not given.
    """
    if blocks.is_regular:
        return False, absent, absent, 0
    starts, lengths = (x[:, 0] for x in blocks.bounds(absent.device))
    batch = max(starts.shape[0], lengths.shape[0])
    starts, lengths = (x.expand(batch, -1).contiguous() for x in (starts, lengths))
    return True, starts, lengths, blocks.num if batch > 1 else 0


def key_means(key: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Launch the means of the blocks alone; see `api.key_means`."""
    batch, _, heads, head_size = key.shape
    means = key.new_empty((batch, heads, blocks.num, head_size), dtype=torch.float32)
    _summarise(key, key, blocks, FEATURE_MAPS[0], means, None)
    return means


def key_state(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    feature_map: str,
    *,
    splits: int | None = None,
) -> tuple[torch.Tensor, KeyState]:
    """Launch the pass over keys and values; see `api.key_state`.

    Args:
        key: [B, S, Hkv, D], stride 1 along D.
        value: as `key`.
        blocks: how they are cut.
        feature_map: of the state.
        splits: programs that share a head; by default as many as keep a GPU busy.
    """
    batch, _, heads, head_size = key.shape
    splits = min(splits or max(1, WAVE // (batch * heads)), blocks.num)
    splits = -(-blocks.num // -(-blocks.num // splits))  # none of them without a block
    means = key.new_empty((batch, heads, blocks.num, head_size), dtype=torch.float32)
    shape = (batch, heads, splits, head_size + 1, head_size)
    states = key.new_empty(shape, dtype=torch.float32)
    _summarise(key, value, blocks, feature_map, means, states)
    total = states.sum(2)
    return means, KeyState(moments=total[:, :, :-1].mT, sums=total[:, :, -1])


def _summarise(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    feature_map: str,
    means: torch.Tensor | None,
    states: torch.Tensor | None,
    share: float = 1.0,
    weight: torch.Tensor | None = None,
) -> None:
    """Launch the kernel, which writes means [B, Hkv, N, D] and states [B, Hkv, splits, D + 1, D].

    States are taken times `share`, and go through the projection of `weight`.
    """
    batch, _, heads, head_size = key.shape
    padded = padded_channels(head_size)
    columns = _columns(padded)
    piece = min(PIECE if padded <= 128 else PIECE // 2, blocks.size)
    given, starts, lengths, bound_b = _bounds_of(blocks, key)
    splits = blocks.num if states is None else states.shape[2]
    _launch_keys(
        (batch * splits * heads, 1 if states is None else -(-head_size // columns)),
        key, value, key if means is None else means,
        key if states is None else states, key if weight is None else weight, starts, lengths,
        *key.stride()[:3], *value.stride()[:3], bound_b,
        heads, splits, -(-blocks.num // splits), blocks.num, blocks.total,
        D=head_size, DP=padded, DV=columns, T=piece, SIZE=blocks.size, MAP=feature_map,
        SHARE=share, STATE=states is not None, MEANS=means is not None, FOLD=weight is not None,
        GIVEN=given, UPCAST=interpreted(), num_warps=KEY_WARPS,
        num_stages=KEY_STAGES if padded <= 128 else 2,
    )  # fmt: skip


def add_linear(target: Target, state: KeyState, rows: slice) -> None:
    """Launch the pass over the queries, which changes `out`; see `api.add_linear`."""
    out, query, projection, feature_map = target
    query = unit_stride(query)
    batch, _, heads, head_size = query.shape
    padded = padded_channels(head_size)
    columns = _columns(padded)
    tile = ROWS if padded <= 128 else 32
    tiles = -(-(rows.stop - rows.start) // (tile * ROW_TILES))
    bias, sums = projection.bias, state.sums.unsqueeze(-1)
    # (H / z) W^T per head, [B, Hkv, D, D]: the projection of what H / z stands for.
    folded = torch.where(sums > 0, state.moments / sums, 0.0) @ projection.weight.float().mT
    _launch_add(
        (batch * tiles * heads, -(-head_size // columns)),
        out, query, folded.to(query.dtype), state.sums.contiguous(),
        state.sums if bias is None else bias, *out.stride()[:3], *query.stride()[:3],
        heads, heads // state.sums.shape[1], tiles, rows.start, rows.stop,
        D=head_size, DP=padded, DV=columns, T=tile, TILES=ROW_TILES, MAP=feature_map,
        EPS=EPSILON, BIAS=bias is not None, UPCAST=interpreted(), num_warps=ROW_WARPS, num_stages=2,
    )  # fmt: skip


def add_unselected(target: Target, key: torch.Tensor, value: torch.Tensor, plan: BlockPlan) -> None:
    """Add up the states of the blocks that `plan` leaves out, for some heads at a time.

    Which blocks a row leaves out is a matrix of zeros and ones, so the sums are one product on the
    tensor cores. Changes `out`; D is at most 128. See `api.add_unselected`.
    """
    out, query, projection, feature_map = target
    query = unit_stride(query)
    batch, _, heads, head_size = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    held = batch * (plan.kv.num + group * plan.q.num)
    bytes_per_head = held * (head_size + 1) * head_size * query.element_size()
    inputs = (query.numel() + key.numel()) * 2 * query.element_size()
    at_once = max(1, int(max(STATE_BYTES, STATE_SHARE * inputs)) // bytes_per_head)
    weight, bias = projection.weight.to(query.dtype).contiguous(), projection.bias
    left = _left_out(plan, batch, heads, query.dtype)
    given, starts, lengths, _ = _bounds_of(plan.q, query)
    for first in range(0, kv_heads, at_once):
        num = min(first + at_once, kv_heads) - first
        kv, q = slice(first, first + num), slice(first * group, (first + num) * group)
        # Scaled to means over as many tokens as there are, so that 16 bits do not overflow.
        states = key.new_empty((batch, num, plan.kv.num, head_size + 1, head_size))
        share = 1 / plan.kv.size
        _summarise(
            key[:, :, kv], value[:, :, kv], plan.kv, feature_map, None, states, share, weight
        )
        # Query heads that share a key head share its states.
        pairs = batch * num
        states = torch.baddbmm(
            states.new_zeros(()),
            left[:, q].reshape(pairs, -1, plan.kv.num),
            states.view(pairs, plan.kv.num, -1),
            beta=0,
            alpha=1 / plan.kv.num,
        )
        added, queries = out[:, :, q], query[:, :, q]
        _launch_add_blocks(
            (batch * num * group * plan.q.num,),
            added, queries, states, states if bias is None else bias, starts, lengths,
            *added.stride()[:3], *queries.stride()[:3], num * group, plan.q.num, plan.q.total,
            EPSILON / (plan.kv.size * plan.kv.num),
            D=head_size, DP=padded_channels(head_size), T=PIECE, SIZE=plan.q.size, MAP=feature_map,
            BIAS=bias is not None, GIVEN=given, UPCAST=interpreted(), num_warps=8, num_stages=2,
        )  # fmt: skip


def _left_out(plan: BlockPlan, batch: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 for the blocks that a row leaves out, else 0: [B, H, Nq, Nk]."""
    num = plan.kv.num
    every = torch.ones((*plan.indices.shape[:3], num), dtype=dtype, device=plan.device)
    # What is past the count repeats the first entry; of an empty row, nothing is taken out.
    first = plan.indices[..., :1].clamp(0, num - 1)
    chosen = torch.where(plan.valid_slots(), plan.indices, first).long()
    kept = torch.where(plan.counts.unsqueeze(-1) > 0, 0.0, 1.0).to(dtype)
    left = every.scatter_(-1, chosen, kept.expand(chosen.shape))
    return left.expand(batch, heads, -1, -1)
