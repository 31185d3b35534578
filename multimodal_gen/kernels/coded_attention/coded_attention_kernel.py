"""Attention to codes in portable Triton.

For a tile of ROWS queries, over the slots and their steps of STEP keys, with s = scale * log2(e) *
q k^T, the online softmax of `block_sparse.triton_kernel`. A step is a group of keys, and begins
with one: its keys share the middles and steps [D], and are made of their codes with one product
and sum per entry; so are values, whose groups are 64 channels of a token. Both go from registers to
the shared memory that tensor cores read, in 16 bits.
"""

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.coded_attention.codes import GROUP, Coded
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import dot, interpreted, padded_channels
from multimodal_gen.kernels.tensors import unit_stride

LOG2E = 1.4426950408889634

# Not measured: those of the block-sparse kernel for 16 bits, with steps as long as a group.
ROWS, WARPS, STAGES = 128, 8, 2


@triton.jit
def _unpack(x, BITS: tl.constexpr):
    """Return the codes of bytes [rows, width], [rows, width * 8 / BITS], in fp32."""
    if BITS == 4:
        codes = tl.interleave(x & 15, x >> 4)
    else:
        even = tl.interleave(x & 3, (x >> 4) & 3)
        codes = tl.interleave(even, tl.interleave((x >> 2) & 3, x >> 6))
    return codes.to(tl.float32)


@triton.jit
def _load_scales(ptr, mask):
    """Return middles and steps, in fp32, of two numbers in bf16 that are loaded as one of 32 bits.

    Those of keys are loaded by the thousand, and one by one they would take most of the loads.
    """
    both = tl.load(ptr, mask=mask, other=0)
    middle = (both << 16).to(tl.float32, bitcast=True)
    return middle, (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(codes_ptr, scale_ptr, codes_s, real, D: tl.constexpr, DP: tl.constexpr,
               BITS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Return [STEP, DP], 0 in channels from D on, of one group of keys."""
    WIDTH: tl.constexpr = DP * BITS // 8
    n = tl.arange(0, STEP)
    byte = tl.arange(0, WIDTH)
    d = tl.arange(0, DP)
    mask = real[:, None] & (byte < D * BITS // 8)[None, :]
    codes = _unpack(
        tl.load(codes_ptr + n[:, None] * codes_s + byte[None, :], mask=mask, other=0), BITS
    )
    middle, step = _load_scales(scale_ptr + d, d < D)
    return middle[None, :] + (codes - (2**BITS - 1) / 2) * step[None, :]


@triton.jit
def _load_values(codes_ptr, scale_ptr, codes_s, scale_s, real, D: tl.constexpr, DP: tl.constexpr,
                 BITS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Return [STEP, DP], 0 in channels from D on and in rows that are not real."""
    WIDTH: tl.constexpr = DP * BITS // 8
    SIZE: tl.constexpr = min(GROUP, DP)
    PARTS: tl.constexpr = DP // SIZE
    n = tl.arange(0, STEP)
    byte = tl.arange(0, WIDTH)
    part = tl.arange(0, PARTS)
    mask = real[:, None] & (byte < D * BITS // 8)[None, :]
    codes = _unpack(
        tl.load(codes_ptr + n[:, None] * codes_s + byte[None, :], mask=mask, other=0), BITS
    )
    there = real[:, None] & (part * GROUP < D)[None, :]
    middle, step = _load_scales(scale_ptr + n[:, None] * scale_s + part[None, :], there)
    codes = tl.reshape(codes - (2**BITS - 1) / 2, [STEP, PARTS, SIZE])
    values = tl.reshape(middle[:, :, None] + codes * step[:, :, None], [STEP, DP])
    if D < DP:
        values = tl.where((tl.arange(0, DP) < D)[None, :], values, 0.0)
    return values


@triton.jit(do_not_specialize=["queries", "slots", "rows", "groups"])
def _coded_kernel(
    q_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, length_ptr, out_ptr, lse_ptr,
    q_at, k_at, k_scale_at, v_at, v_scale_at, out_at,
    queries, heads, group, slots, rows, groups, scale_log2,
    D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * tiles]; tiles run fastest, so that neighbours read the same codes."""
    tiles = tl.cdiv(queries, ROWS)
    pid = tl.program_id(0)
    h = (pid // tiles % heads).to(tl.int64)
    b = (pid // tiles // heads).to(tl.int64)
    row = (pid % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    own = (row < queries)[:, None] & (d < D)[None, :]
    q_ptr += b * q_at[0] + h * q_at[2]
    q = tl.load(q_ptr + row[:, None] * q_at[1] + d[None, :], mask=own, other=0.0)
    kv = h // group
    k_ptr += b * k_at[0] + kv * k_at[2]
    v_ptr += b * v_at[0] + kv * v_at[2]
    k_scale_ptr += b * k_scale_at[0] + kv * k_scale_at[2]
    v_scale_ptr += b * v_scale_at[0] + kv * v_scale_at[2]

    rows = rows.to(tl.int64)
    groups = groups.to(tl.int64)
    acc = tl.zeros([ROWS, DP], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for slot in range(slots):
        length = tl.load(length_ptr + slot)
        for first in range(0, length, STEP):
            real = first + tl.arange(0, STEP) < length
            at = slot * rows + first
            place = slot * groups + first // STEP
            k = _load_keys(
                k_ptr + at * k_at[1], k_scale_ptr + place * k_scale_at[1], k_at[1], real,
                D, DP, BITS, STEP,
            ).to(q.dtype)  # fmt: skip
            s = dot(q, tl.trans(k), UPCAST)
            s = tl.where(real[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            total = total * alpha + tl.sum(p, 1)
            v = _load_values(
                v_ptr + at * v_at[1], v_scale_ptr + at * v_scale_at[1], v_at[1], v_scale_at[1],
                real, D, DP, BITS, STEP, STEP,
            ).to(q.dtype)  # fmt: skip
            acc = acc * alpha[:, None] + dot(p.to(q.dtype), v, UPCAST)
            m = m_new

    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    out = acc / total[:, None]
    out_ptr += b * out_at[0] + h * out_at[2]
    tl.store(
        out_ptr + row[:, None] * out_at[1] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=own
    )
    lse = tl.where(nothing, float("-inf"), 0.6931471805599453 * (m + tl.log2(total)))
    tl.store(lse_ptr + (b * heads + h) * queries + row, lse, mask=row < queries)


_launch = Launcher(_coded_kernel)


def attend(
    q: torch.Tensor,
    keys: Coded,
    values: Coded,
    lengths: torch.Tensor,
    *,
    bits: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `api.coded_attention`."""
    batch, queries, heads, size = q.shape
    q = unit_stride(q)
    keys, values = (_readable(coded) for coded in (keys, values))
    out = q.new_empty(q.shape)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    slots = len(lengths)
    _launch(
        (batch * heads * -(-queries // ROWS),),
        q, *keys, *values, lengths, out, lse,
        *(x.stride()[:3] for x in (q, *keys, *values, out)),
        queries, heads, heads // keys.codes.shape[2], slots, keys.codes.shape[1] // slots,
        keys.scales.shape[1] // slots, scale * LOG2E,
        D=size, DP=padded_channels(size), BITS=bits, ROWS=ROWS, STEP=GROUP,
        UPCAST=interpreted(), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out, lse


def _readable(coded: Coded) -> Coded:
    """Return codes and scales that follow one another for a token and head, the latter in pairs."""
    codes, scales = (x if x[:1, :1, :1].is_contiguous() else x.contiguous() for x in coded)
    return Coded(codes, scales.view(torch.int32))
