"""Quantises queries, keys and values in one pass over them, into slots; see `slots`.

Queries: rotated, then int8, x = round(127 q / max|q|) of every row. Keys: the mean over the
sequence is subtracted, rotated, then int8, one scale for a tile of keys. Values: e4m3, transposed
to [D, keys], one scale for a tile of keys; or, for 16-bit products, copied into slots.

The rotation is a product with 1 and -1, which 16 bits hold, on the tensor cores: exact but for the
order of its fp32 sums. Keys and mean are rotated one by one, as their difference would not fit into
16 bits; its factor 1 / sqrt(n) goes into the scales.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks, bounds_of
from multimodal_gen.kernels.launch.launcher import Form, Launch, Launcher
from multimodal_gen.kernels.quantized_attention.packed import Kind, Packed, Slots, rotation
from multimodal_gen.kernels.quantized_attention.tuning import quantise_tile
from multimodal_gen.kernels.shared_kernel import (
    bounds,
    dot,
    interpreted,
    next_power_of_2,
    wide_channels,
)

MEAN_CHUNKS = 64
MEAN_ROWS = 64
MEAN_LENGTHS = 256
Q_ROWS = 64


@triton.jit
def _rows(slot, b, h, blocks, STARTS: tl.constexpr, LENGTHS: tl.constexpr):
    """Return the rows of slots, which all belong to one block, and which of them are real."""
    start_ptr, length_ptr, start_b, start_h, length_b, length_h, size, slots, total, num = blocks
    block = tl.minimum(tl.min(slot, 0) // slots, num - 1)
    inside = slot - block * slots
    start, length = bounds(
        b, h, block, size, total, start_ptr, length_ptr, start_b, start_h, length_b, length_h,
        STARTS, LENGTHS,
    )  # fmt: skip
    real = inside < length
    return tl.where(real, start + inside, 0).to(tl.int64), real


@triton.jit
def _load(ptr, row, real, stride_s, stride_d, D: tl.constexpr, DP: tl.constexpr):
    """Return rows [.., DP] of [S, D], with zeros for what is not there."""
    d = tl.arange(0, DP)
    mask = real[:, None] & (d < D)[None, :]
    return tl.load(ptr + row[:, None] * stride_s + d[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=[
        "heads", "tiles", "size", "slots", "total", "num", "s_b", "s_h", "l_b", "l_h",
    ]
)  # fmt: skip
def _mean_kernel(
    k_ptr, sum_ptr, start_ptr, length_ptr, k_b, k_s, k_h, k_d, s_b, s_h, l_b, l_h,
    heads, tiles, size, slots, total, num,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    STARTS: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Grid [chunks, B * Hkv]: sums over the rows of every chunk-th tile, [B * Hkv, chunks, D]."""
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = head % heads
    d = tl.arange(0, DP)
    k_ptr += b * k_b + h * k_h
    blocks = (start_ptr, length_ptr, s_b, s_h, l_b, l_h, size, slots, total, num)
    sums = tl.zeros([ROWS, DP], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, real = _rows(tile * ROWS + tl.arange(0, ROWS), b, h, blocks, STARTS, LENGTHS)
        sums += _load(k_ptr, row, real, k_s, k_d, D, DP).to(tl.float32)
    out = sum_ptr + (head * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * D + d
    tl.store(out, tl.sum(sums, 0), mask=d < D)


@triton.jit(do_not_specialize=["l_b", "l_h", "heads", "chunks", "total", "num"])
def _rotated_mean_kernel(
    sum_ptr, out_ptr, matrix_ptr, length_ptr, l_b, l_h, heads, chunks, total, num,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LENGTHS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid [B * Hkv]: the mean of a head's keys, from the sums of its chunks, times the matrix."""
    head = tl.program_id(0)
    c, d = tl.arange(0, C), tl.arange(0, DP)
    mask = (c < chunks)[:, None] & (d < D)[None, :]
    ptrs = sum_ptr + head.to(tl.int64) * chunks * D + c[:, None] * D + d[None, :]
    sums = tl.sum(tl.load(ptrs, mask=mask, other=0.0), 0)
    rows = total
    if LENGTHS:
        length_ptr += head // heads * l_b + head % heads * l_h
        lengths = tl.zeros([N], tl.int32)
        for start in range(0, num, N):
            n = start + tl.arange(0, N)
            lengths += tl.load(length_ptr + n, mask=n < num, other=0)
        rows = tl.sum(lengths)
    mean = sums / tl.maximum(rows, 1).to(tl.float32)
    # The matrix is symmetric.
    matrix = tl.load(matrix_ptr + d[:, None] * DP + d[None, :])
    tl.store(out_ptr + head.to(tl.int64) * DP + d, tl.sum(matrix * mean[None, :], 1))


@triton.jit
def _int8(x):
    """Round to the nearest, half to even; added to 1.5 * 2^23 it is the lowest byte of the sum."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_e4m3(x, UPCAST: tl.constexpr):
    """Round to e4m3. The interpreter's own cast truncates, so there x is rounded first."""
    if UPCAST:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        tiny = tl.floor(x * 512.0 + 0.5) / 512.0
        x = tl.where(tl.abs(x) < 0.015625, tiny, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit(
    do_not_specialize=[
        "heads", "kv_heads", "batch", "q_tiles", "kv_tiles", "q_size", "q_slots", "q_total",
        "q_num", "kv_size", "kv_slots", "kv_total", "kv_num",
        "qs_b", "qs_h", "ql_b", "ql_h", "ks_b", "ks_h", "kl_b", "kl_h",
    ]
)  # fmt: skip
def _quantise_kernel(
    q_ptr, k_ptr, v_ptr, mean_ptr,
    q8_ptr, q_scale_ptr, shift_ptr, k8_ptr, k_scale_ptr, v8_ptr, v_scale_ptr, scale,
    matrix_ptr, q_start_ptr, q_length_ptr, kv_start_ptr, kv_length_ptr,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    qs_b, qs_h, ql_b, ql_h, ks_b, ks_h, kl_b, kl_h,
    batch, heads, kv_heads, q_tiles, kv_tiles,
    q_size, q_slots, q_total, q_num, kv_size, kv_slots, kv_total, kv_num,
    factor,
    Q_ROWS: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    Q_STARTS: tl.constexpr, Q_LENGTHS: tl.constexpr,
    KV_STARTS: tl.constexpr, KV_LENGTHS: tl.constexpr,
    SHIFT: tl.constexpr, E4M3: tl.constexpr, PERMUTED: tl.constexpr, COPY: tl.constexpr,
    STEPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: groups of STEPS tiles of one head; those of keys and values first, then of queries.

    The means of keys, [B, Hkv, DP], are rotated already.
    """
    pid = tl.program_id(0)
    kv_groups, q_groups = tl.cdiv(kv_tiles, STEPS), tl.cdiv(q_tiles, STEPS)
    kv_programs = batch * kv_heads * kv_groups
    d = tl.arange(0, DP)
    # Every program reads it: it stays in the cache nearest to the cores.
    matrix = tl.load(matrix_ptr + d[:, None] * DP + d[None, :], eviction_policy="evict_last")
    if pid < kv_programs:
        group = pid % kv_groups
        h = pid // kv_groups % kv_heads
        b = (pid // kv_groups // kv_heads).to(tl.int64)
        head = b * kv_heads + h
        kv_blocks = (
            kv_start_ptr, kv_length_ptr, ks_b, ks_h, kl_b, kl_h, kv_size, kv_slots, kv_total, kv_num
        )  # fmt: skip
        slots = kv_tiles * BN
        for step in range(STEPS):
            # The last group may do the last tile again.
            tile = tl.minimum(group * STEPS + step, kv_tiles - 1)
            slot = tile * BN + tl.arange(0, BN)
            row, real = _rows(slot, b, h, kv_blocks, KV_STARTS, KV_LENGTHS)
            x = _load(k_ptr + b * k_b + h * k_h, row, real, k_s, k_d, D, DP)
            x = dot(x, matrix, UPCAST) - tl.load(mean_ptr + head * DP + d)[None, :]
            x = tl.where(real[:, None], x, 0.0)
            most = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-12)
            place = head * slots + slot
            tl.store(k8_ptr + place[:, None] * DP + d[None, :], _int8(x * (127.0 / most)))
            tl.store(k_scale_ptr + head * kv_tiles + tile, most * (factor / 127.0))
            if E4M3 or COPY:
                key = tl.arange(0, BN)
                if PERMUTED:
                    # Positions 4t to 4t + 3 of 16 hold the keys 2t, 2t + 1, 2t + 8 and 2t + 9.
                    key = key // 16 * 16 + key % 16 // 4 * 2 + key % 2 + key % 4 // 2 * 8
                row, real = _rows(tile * BN + key, b, h, kv_blocks, KV_STARTS, KV_LENGTHS)
                v = _load(v_ptr + b * v_b + h * v_h, row, real, v_s, v_d, D, DP)
                out_ptr = v8_ptr + head * DP * slots
                if COPY:
                    tl.store(out_ptr + slot.to(tl.int64)[:, None] * DP + d[None, :], v)
                else:
                    v = v.to(tl.float32)
                    most = tl.maximum(tl.max(tl.max(tl.abs(v), 1), 0), 1e-12)
                    v = to_e4m3(v * (448.0 / most), UPCAST)
                    transposed = out_ptr + d.to(tl.int64)[:, None] * slots + slot[None, :]
                    tl.store(transposed, tl.trans(v))
                    tl.store(v_scale_ptr + head * kv_tiles + tile, most / 448.0)
    else:
        pid -= kv_programs
        group = pid % q_groups
        h = pid // q_groups % heads
        b = (pid // q_groups // heads).to(tl.int64)
        head = b * heads + h
        mean_ptr += (b * kv_heads + h // (heads // kv_heads)) * DP
        q_blocks = (
            q_start_ptr, q_length_ptr, qs_b, qs_h, ql_b, ql_h, q_size, q_slots, q_total, q_num
        )  # fmt: skip
        for step in range(STEPS):
            tile = tl.minimum(group * STEPS + step, q_tiles - 1)
            slot = tile * Q_ROWS + tl.arange(0, Q_ROWS)
            row, real = _rows(slot, b, h, q_blocks, Q_STARTS, Q_LENGTHS)
            x = _load(q_ptr + b * q_b + h * q_h, row, real, q_s, q_d, D, DP)
            x = dot(x, matrix, UPCAST)
            most = tl.maximum(tl.max(tl.abs(x), 1), 1e-12)
            place = head * q_tiles * Q_ROWS + slot
            scaled = _int8(x * (127.0 / most)[:, None])
            tl.store(q8_ptr + place[:, None] * DP + d[None, :], scaled)
            tl.store(q_scale_ptr + place, most * (factor * scale * (1.4426950408889634 / 127.0)))
            if SHIFT:
                mean = tl.load(mean_ptr + d)
                tl.store(shift_ptr + place, factor * factor * scale * tl.sum(x * mean[None, :], 1))


_mean, _rotated_mean = Launcher(_mean_kernel), Launcher(_rotated_mean_kernel)
_quantise = Launcher(_quantise_kernel)


Quantiser: TypeAlias = Callable[..., Packed]
"""Quantises tensors of one form; see `prepare`."""


def prepare_mean(k: Form, slots: Slots) -> Callable[[torch.Tensor, Blocks], torch.Tensor]:
    """Return what computes the means of keys of one form, in blocks of one form.

    Args:
        k: [B, Sk, Hkv, D], any strides.
        slots: slots of the keys, in tiles of a multiple of 64; nothing holds their tensors.
    """
    batch, _, heads, head_size = k.shape
    blocks, width = slots.blocks, wide_channels(head_size)
    tiles = slots.total // MEAN_ROWS
    chunks = min(MEAN_CHUNKS, tiles)
    matrix = rotation(width, torch.float32, k.device)
    strides = bounds_of(blocks, batch, heads, matrix)[1]
    add = Launch(
        _mean,
        (chunks, batch * heads),
        (*k.strides, *strides, heads, tiles, blocks.size, slots.size, blocks.total,
         blocks.num),
        [{
            "ROWS": MEAN_ROWS, "D": head_size, "DP": width, "STARTS": blocks.starts is not None,
            "LENGTHS": blocks.lengths is not None, "num_warps": 4,
        }],
    )  # fmt: skip
    finish = Launch(
        _rotated_mean,
        (batch * heads,),
        (*strides[2:], heads, chunks, blocks.total, blocks.num),
        [{
            "C": next_power_of_2(chunks), "D": head_size, "DP": width,
            "LENGTHS": blocks.lengths is not None, "N": MEAN_LENGTHS, "num_warps": 8,
        }],
    )  # fmt: skip

    def mean(k: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Return the mean of the keys that lie in blocks, rotated: fp32 [B, Hkv, padded D]."""
        fp32, device = torch.float32, k.device
        sums = torch.empty((batch, heads, chunks, head_size), dtype=fp32, device=device)
        out = torch.empty((batch, heads, width), dtype=fp32, device=device)
        limits = bounds_of(blocks, batch, heads, matrix)[0]
        add((k, sums, *limits))
        finish((sums, out, matrix, limits[1]))
        return out

    return mean


def prepare(forms: tuple[Form, ...], q_slots: Slots, kv_slots: Slots, kind: Kind) -> Quantiser:
    """Return what quantises tensors of one form on plans of one form; only a first call waits.

    Args:
        forms: of q [B, Sq, H, D], and of k and v [B, Sk, Hkv, D], any strides.
        q_slots: slots of the queries; nothing holds their tensors.
        kv_slots: slots of keys and values, likewise; their tile is the tile of the scales.
        kind: what is made of them.

    Returns:
        A function of q, k and v, of their plan, of the factor of the scores, `scale`, and, where
        `kind` has no mean of their own, of what is subtracted from the keys, `mean`: fp32
        [B, Hkv, D]. It quantises one call's tensors in three launches.
    """
    of_q, of_k, of_v = forms
    batch, _, heads, head_size = of_q.shape
    kv_heads, width = of_k.shape[2], wide_channels(head_size)
    tile = quantise_tile(kv_slots.tile)
    q_tiles, kv_tiles = q_slots.total // Q_ROWS, kv_slots.total // kv_slots.tile
    copy = not kind.e4m3 and (kind.copied is not None or not kv_slots.in_place)
    matrix = rotation(width, of_q.dtype, of_q.device)
    strides = bounds_of(q_slots.blocks, batch, heads, matrix)[1]
    kv_strides = bounds_of(kv_slots.blocks, batch, kv_heads, matrix)[1]
    groups = kv_heads * -(-kv_tiles // tile.steps) + heads * -(-q_tiles // tile.steps)
    fixed = (
        *of_q.strides, *of_k.strides, *of_v.strides, *strides, *kv_strides,
        batch, heads, kv_heads, q_tiles, kv_tiles,
        q_slots.blocks.size, q_slots.size, q_slots.blocks.total, q_slots.blocks.num,
        kv_slots.blocks.size, kv_slots.size, kv_slots.blocks.total, kv_slots.blocks.num,
        width**-0.5,
    )  # fmt: skip
    options = {
        "Q_ROWS": Q_ROWS, "BN": kv_slots.tile, "D": head_size, "DP": width,
        "Q_STARTS": q_slots.blocks.starts is not None,
        "Q_LENGTHS": q_slots.blocks.lengths is not None,
        "KV_STARTS": kv_slots.blocks.starts is not None,
        "KV_LENGTHS": kv_slots.blocks.lengths is not None,
        "SHIFT": kind.shift, "E4M3": kind.e4m3, "PERMUTED": kind.permuted and kind.e4m3,
        "COPY": copy, "STEPS": tile.steps, "UPCAST": interpreted(), "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip
    launch = Launch(_quantise, (batch * groups,), fixed, [options])
    # Of the values that are made; None for those that are left as they are.
    made = (kind.copied or of_v.dtype) if copy else None
    own_mean = prepare_mean(of_k, kv_slots) if kind.own_mean else None
    turned = rotation(width, torch.float32, of_q.device)[:head_size]
    rows, keys, slots, tile_keys = q_slots.total, kv_slots.total, q_slots.size, kv_slots.tile

    def quantise(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: BlockPlan,
        *,
        scale: float,
        mean: torch.Tensor | None = None,
    ) -> Packed:
        device, fp32 = q.device, torch.float32
        q8 = torch.empty((batch, heads, rows, width), dtype=torch.int8, device=device)
        k8 = torch.empty((batch, kv_heads, keys, width), dtype=torch.int8, device=device)
        q_scale = torch.empty((batch, heads, rows), dtype=fp32, device=device)
        shift = torch.empty_like(q_scale) if kind.shift else q_scale
        k_scale = torch.empty((batch, kv_heads, kv_tiles), dtype=fp32, device=device)
        v8, v_scale = v, k_scale
        if kind.e4m3:
            e4m3 = torch.float8_e4m3fn
            v8 = torch.empty((batch, kv_heads, width, keys), dtype=e4m3, device=device)
            v_scale = torch.empty_like(k_scale)
        elif made is not None:
            v8 = torch.empty((batch, kv_heads, keys, width), dtype=made, device=device)
        if own_mean is not None:
            rotated = own_mean(k, plan.kv)
        else:
            assert mean is not None, "it is said where it was not prepared for"
            # Any precision will do: what is subtracted is also what is added to lse.
            rotated = mean @ turned
        limits = bounds_of(plan.q, batch, heads, matrix)[0]
        kv_limits = bounds_of(plan.kv, batch, kv_heads, matrix)[0]
        made_of = (q, k, v, rotated, q8, q_scale, shift, k8, k_scale, v8, v_scale, scale)
        launch((*made_of, matrix, *limits, *kv_limits))
        if made is not None:
            v8 = v8.transpose(1, 2)[..., :head_size]
        return Packed(
            q=q8, q_scale=q_scale, shift=shift, k=k8, k_scale=k_scale, v=v8, v_scale=v_scale,
            q_slots=slots, keys=tile_keys,
        )  # fmt: skip

    return quantise
