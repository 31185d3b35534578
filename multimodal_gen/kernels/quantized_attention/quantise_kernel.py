"""Quantises queries, keys and values in one pass over them, into slots; see `slots`.

Queries: rotated, made shorter along what they have in common, then int8, x = round(127 q / max|q|)
of every row. Keys: the mean over the sequence is subtracted, rotated, made as much longer, then
int8, one scale for a tile of keys; `reference.py` has the formulas. Values: e4m3, transposed
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

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, bounds_of
from multimodal_gen.kernels.launch.launcher import Form, Launch, Launcher
from multimodal_gen.kernels.quantized_attention.packed import (
    LEAST_STRETCH,
    MOST_STRETCH,
    SAMPLE,
    Kind,
    Packed,
    Slots,
    rotation,
)
from multimodal_gen.kernels.quantized_attention.tuning import quantise_tile
from multimodal_gen.kernels.shared_kernel import (
    bounds,
    dot,
    interpreted,
    wide_channels,
)

SAMPLE_ROWS = 64
Q_ROWS = 64


@triton.jit
def _rows(slot, first, b, h, blocks, STARTS: tl.constexpr, LENGTHS: tl.constexpr):
    """Return the rows of slots and which are real; `first` are any slots of their blocks."""
    start_ptr, length_ptr, start_b, start_h, length_b, length_h, size, slots, total, num = blocks
    block = tl.minimum(first // slots, num - 1)
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


@triton.jit
def _sampled(first, ROWS: tl.constexpr, slots, samples):
    """Return slots from the `first` sample on: one in each of as many even parts, not its first."""
    i = (first + tl.arange(0, ROWS)).to(tl.int64)
    return (slots * (i * samples + i * 317 % samples) // (samples * samples)).to(tl.int32)


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit(
    do_not_specialize=[
        "heads", "kv_heads", "samples", "q_slots_all", "kv_slots_all",
        "q_size", "q_slots", "q_total", "q_num", "kv_size", "kv_slots", "kv_total", "kv_num",
        "qs_b", "qs_h", "ql_b", "ql_h", "ks_b", "ks_h", "kl_b", "kl_h",
    ]
)  # fmt: skip
def _centre_kernel(
    q_ptr, k_ptr, mean_ptr, out_ptr, matrix_ptr,
    q_start_ptr, q_length_ptr, kv_start_ptr, kv_length_ptr,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    qs_b, qs_h, ql_b, ql_h, ks_b, ks_h, kl_b, kl_h,
    heads, kv_heads, samples, q_slots_all, kv_slots_all,
    q_size, q_slots, q_total, q_num, kv_size, kv_slots, kv_total, kv_num,
    D: tl.constexpr, DP: tl.constexpr, Q_STARTS: tl.constexpr, Q_LENGTHS: tl.constexpr,
    KV_STARTS: tl.constexpr, KV_LENGTHS: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid [B * Hkv]: the mean of a head's keys, found here or given, and p, times the matrix."""
    head = tl.program_id(0)
    b = (head // kv_heads).to(tl.int64)
    kv_head = head % kv_heads
    q_blocks = (
        q_start_ptr, q_length_ptr, qs_b, qs_h, ql_b, ql_h, q_size, q_slots, q_total, q_num
    )  # fmt: skip
    kv_blocks = (
        kv_start_ptr, kv_length_ptr, ks_b, ks_h, kl_b, kl_h, kv_size, kv_slots, kv_total, kv_num
    )  # fmt: skip
    d = tl.arange(0, DP)
    k_ptr += b * k_b + kv_head * k_h
    if OWN:
        mean, num = tl.zeros([DP], tl.float32), 0
        for first in range(0, samples, ROWS):
            slot = _sampled(first, ROWS, kv_slots_all, samples)
            row, real = _rows(slot, slot, b, kv_head, kv_blocks, KV_STARTS, KV_LENGTHS)
            x = _load(k_ptr, row, real, k_s, k_d, D, DP).to(tl.float32)
            mean += tl.sum(x / samples, 0)  # which sums do not exceed
            num += tl.sum(real.to(tl.int32), 0)
        mean *= samples / tl.maximum(num, 1).to(tl.float32)
    else:
        mean = tl.load(mean_ptr + head.to(tl.int64) * D + d, mask=d < D, other=0.0)
    group = heads // kv_heads
    common, whole, num = tl.zeros([DP], tl.float32), 0.0, 0
    for h in range(kv_head * group, kv_head * group + group):
        for first in range(0, samples, ROWS):
            slot = _sampled(first, ROWS, q_slots_all, samples)
            row, real = _rows(slot, slot, b, h, q_blocks, Q_STARTS, Q_LENGTHS)
            x = _load(q_ptr + b * q_b + h * q_h, row, real, q_s, q_d, D, DP).to(tl.float32)
            x = _finite(x)
            common += tl.sum(x, 0)
            whole += tl.sum(tl.sum(x * x, 1), 0)
            num += tl.sum(real.to(tl.int32), 0)
    num = tl.maximum(num, 1).to(tl.float32)
    common /= num
    length = tl.sum(common * common, 0)
    along = common * tl.rsqrt(tl.maximum(length, 1e-30))
    rest = tl.maximum(tl.maximum(whole / num - length, 1e-6 * length), 1e-30)
    spread, whole, furthest = 1e-30, 1e-30, 0.0
    for first in range(0, samples, ROWS):
        slot = _sampled(first, ROWS, kv_slots_all, samples)
        row, real = _rows(slot, slot, b, kv_head, kv_blocks, KV_STARTS, KV_LENGTHS)
        x = _load(k_ptr, row, real, k_s, k_d, D, DP).to(tl.float32)
        x = tl.where(real[:, None], x - mean[None, :], 0.0)
        part = tl.sum(x * along[None, :], 1)
        spread += D * tl.sum(part * part, 0)
        whole += tl.sum(tl.sum(x * x, 1), 0)
        furthest = tl.maximum(furthest, tl.max(part * part, 0))
    spread = tl.maximum(spread, furthest * (D * samples) / 9.0)
    share = whole / spread
    stretch = tl.exp2(3 / 16 * tl.log2((1.0 + D * length / rest) * share * share))
    share = tl.sqrt(tl.maximum(1.0 - 1.0 / tl.minimum(stretch, MOST), 0.0) / DP)
    shrink = tl.where(stretch >= LEAST, along * share, 0.0)  # none where sums are not finite
    out_ptr += head.to(tl.int64) * 2 * DP
    for first in range(0, DP, 32):
        row = first + tl.arange(0, 32)
        # The matrix is symmetric.
        matrix = tl.load(matrix_ptr + row[:, None] * DP + d[None, :])
        tl.store(out_ptr + row, tl.sum(matrix * mean[None, :], 1))
        tl.store(out_ptr + DP + row, tl.sum(matrix * shrink[None, :], 1))


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
    q_ptr, k_ptr, v_ptr, centre_ptr,
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

    Of every head of keys `centre` has the mean and p, rotated already: [B, Hkv, 2, DP].
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
            row, real = _rows(slot, tile * BN, b, h, kv_blocks, KV_STARTS, KV_LENGTHS)
            x = _load(k_ptr + b * k_b + h * k_h, row, real, k_s, k_d, D, DP)
            mean = tl.load(centre_ptr + head * 2 * DP + d)
            shrink = tl.load(centre_ptr + head * 2 * DP + DP + d)
            x = tl.where(real[:, None], dot(x, matrix, UPCAST) - mean[None, :], 0.0)
            part = _finite(tl.sum(x * shrink[None, :], 1))
            shrink /= 1.0 - tl.sum(shrink * shrink, 0)
            x += part[:, None] * shrink[None, :]
            most = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-12)
            place = head * slots + slot
            tl.store(k8_ptr + place[:, None] * DP + d[None, :], _int8(x * (127.0 / most)))
            tl.store(k_scale_ptr + head * kv_tiles + tile, most * (factor / 127.0))
            if E4M3 or COPY:
                key = tl.arange(0, BN)
                if PERMUTED:
                    # Positions 4t to 4t + 3 of 16 hold the keys 2t, 2t + 1, 2t + 8 and 2t + 9.
                    key = key // 16 * 16 + key % 16 // 4 * 2 + key % 2 + key % 4 // 2 * 8
                key += tile * BN
                row, real = _rows(key, tile * BN, b, h, kv_blocks, KV_STARTS, KV_LENGTHS)
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
        centre_ptr += (b * kv_heads + h // (heads // kv_heads)) * 2 * DP
        q_blocks = (
            q_start_ptr, q_length_ptr, qs_b, qs_h, ql_b, ql_h, q_size, q_slots, q_total, q_num
        )  # fmt: skip
        for step in range(STEPS):
            tile = tl.minimum(group * STEPS + step, q_tiles - 1)
            slot = tile * Q_ROWS + tl.arange(0, Q_ROWS)
            row, real = _rows(slot, tile * Q_ROWS, b, h, q_blocks, Q_STARTS, Q_LENGTHS)
            x = _load(q_ptr + b * q_b + h * q_h, row, real, q_s, q_d, D, DP)
            x = dot(x, matrix, UPCAST)
            if SHIFT:
                mean = tl.load(centre_ptr + d)
                shift = factor * factor * scale * tl.sum(x * mean[None, :], 1)
                tl.store(shift_ptr + head * q_tiles * Q_ROWS + slot, shift)
            shrink = tl.load(centre_ptr + DP + d)
            x -= _finite(tl.sum(x * shrink[None, :], 1))[:, None] * shrink[None, :]
            most = tl.maximum(tl.max(tl.abs(x), 1), 1e-12)
            place = head * q_tiles * Q_ROWS + slot
            scaled = _int8(x * (127.0 / most)[:, None])
            tl.store(q8_ptr + place[:, None] * DP + d[None, :], scaled)
            tl.store(q_scale_ptr + place, most * (factor * scale * (1.4426950408889634 / 127.0)))


_centre = Launcher(_centre_kernel)
_quantise = Launcher(_quantise_kernel)


Quantiser: TypeAlias = Callable[..., Packed]
"""Quantises tensors of one form; see `prepare`."""


def prepare_centre(
    of_q: Form, of_k: Form, q_slots: Slots, kv_slots: Slots, *, own_mean: bool
) -> Callable[..., torch.Tensor]:
    """Return what computes the centres of heads of one form, in blocks of one form.

    Args:
        of_q: [B, Sq, H, D], any strides.
        of_k: [B, Sk, Hkv, D], any strides.
        q_slots: slots of the queries; nothing holds their tensors.
        kv_slots: slots of the keys, likewise.
        own_mean: whether the mean of the keys is to be computed, or will be said.
    """
    batch, _, kv_heads, head_size = of_k.shape
    heads, width = of_q.shape[2], wide_channels(head_size)
    matrix = rotation(width, torch.float32, of_k.device)
    fixed = [*of_q.strides, *of_k.strides]
    for slots, num in ((q_slots, heads), (kv_slots, kv_heads)):
        fixed += bounds_of(slots.blocks, batch, num, matrix)[1]
    fixed += [heads, kv_heads, SAMPLE, q_slots.total, kv_slots.total]
    for slots in (q_slots, kv_slots):
        fixed += [slots.blocks.size, slots.size, slots.blocks.total, slots.blocks.num]
    options = {
        "D": head_size, "DP": width,
        "Q_STARTS": q_slots.blocks.starts is not None,
        "Q_LENGTHS": q_slots.blocks.lengths is not None,
        "KV_STARTS": kv_slots.blocks.starts is not None,
        "KV_LENGTHS": kv_slots.blocks.lengths is not None,
        "OWN": own_mean, "ROWS": SAMPLE_ROWS, "LEAST": LEAST_STRETCH, "MOST": MOST_STRETCH,
        "num_warps": 8,
    }  # fmt: skip
    launch = Launch(_centre, (batch * kv_heads,), tuple(fixed), [options])

    def centre(
        q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, mean: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the mean of the keys and p, rotated: fp32 [B, Hkv, 2, n]."""
        out = torch.empty((batch, kv_heads, 2, width), dtype=torch.float32, device=k.device)
        limits = bounds_of(plan.q, batch, heads, matrix)[0]
        kv_limits = bounds_of(plan.kv, batch, kv_heads, matrix)[0]
        launch((q, k, out if mean is None else mean, out, matrix, *limits, *kv_limits))
        return out

    return centre


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
        [B, Hkv, D]. It quantises one call's tensors in two launches.
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
    centre = prepare_centre(of_q, of_k, q_slots, kv_slots, own_mean=kind.own_mean)
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
        limits = bounds_of(plan.q, batch, heads, matrix)[0]
        kv_limits = bounds_of(plan.kv, batch, kv_heads, matrix)[0]
        centres = centre(q, k, plan, mean)
        made_of = (q, k, v, centres, q8, q_scale, shift, k8, k_scale, v8, v_scale, scale)
        launch((*made_of, matrix, *limits, *kv_limits))
        if made is not None:
            v8 = v8.transpose(1, 2)[..., :head_size]
        return Packed(
            q=q8, q_scale=q_scale, shift=shift, k=k8, k_scale=k_scale, v=v8, v_scale=v_scale,
            q_slots=slots, keys=tile_keys,
        )  # fmt: skip

    return quantise
