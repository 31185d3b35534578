"""Moving tokens in Triton where every head has an order of its own.

A program moves TOKENS rows of one head, D elements each, of up to three tensors. Strides are given
in units of VEC elements, as in the kernels for a common order.
"""

import math

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.tile_order.kernel import strides_in_vectors, vector_of

# 64 rows of 256 bytes: 8 accesses of 16 bytes per thread. Not measured.
_BYTES = 16384
_WARPS = 4


@triton.jit
def _copy(
    src_ptr, out_ptr, src_row, out_row, src_s, src_d, out_s, out_d, real,
    D: tl.constexpr, DP: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, DP)
    mask = real[:, None] & (d < D)[None, :]
    src = src_row.to(tl.int64)[:, None] * src_s * VEC + (d * src_d)[None, :]
    values = tl.load(src_ptr + src, mask=mask, eviction_policy="evict_first")
    out = out_row.to(tl.int64)[:, None] * out_s * VEC + (d * out_d)[None, :]
    tl.store(out_ptr + out, values, mask=mask)


@triton.jit(
    do_not_specialize=[
        "src0_b", "src0_s", "src0_h", "src1_b", "src1_s", "src1_h", "src2_b", "src2_s", "src2_h",
        "out_b", "out_s", "out_h", "index_b", "index_h", "heads", "num", "num_blocks",
    ]
)  # fmt: skip
def _move_kernel(
    src0_ptr, src1_ptr, src2_ptr, out0_ptr, out1_ptr, out2_ptr, index_ptr,
    src0_b, src0_s, src0_h, src0_d, src1_b, src1_s, src1_h, src1_d,
    src2_b, src2_s, src2_h, src2_d, out_b, out_s, out_h, out_d, index_b, index_h,
    heads, num, num_blocks,
    NUM: tl.constexpr, SCATTER: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    VEC: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """out_i[b, h, t] = src_i[b, index[b, h, t], h], or the other way. Grid [B * H * blocks]."""
    pid = tl.program_id(0)
    b = (pid // num_blocks // heads).to(tl.int64)
    h = (pid // num_blocks % heads).to(tl.int64)
    token = pid % num_blocks * TOKENS + tl.arange(0, TOKENS)
    real = token < num
    index = tl.load(index_ptr + b * index_b + h * index_h + token, mask=real, other=0)
    from_row = token if SCATTER else index
    to_row = index if SCATTER else token
    out_at = (b * out_b + h * out_h) * VEC
    _copy(
        src0_ptr + (b * src0_b + h * src0_h) * VEC, out0_ptr + out_at, from_row, to_row,
        src0_s, src0_d, out_s, out_d, real, D, DP, VEC,
    )  # fmt: skip
    if NUM > 1:
        _copy(
            src1_ptr + (b * src1_b + h * src1_h) * VEC, out1_ptr + out_at, from_row, to_row,
            src1_s, src1_d, out_s, out_d, real, D, DP, VEC,
        )  # fmt: skip
    if NUM > 2:
        _copy(
            src2_ptr + (b * src2_b + h * src2_h) * VEC, out2_ptr + out_at, from_row, to_row,
            src2_s, src2_d, out_s, out_d, real, D, DP, VEC,
        )  # fmt: skip


def gather_per_head(
    tensors: tuple[torch.Tensor, ...], index: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Launch the gather; returns new head-major tensors [B, S_out, H, D].

    Args:
        tensors: one to three, [B, S, H, D] with any strides, of one dtype, B, S, H and D.
        index: int32 [B, H, S_out].
    """
    batch, _, heads, size = tensors[0].shape
    shape = (batch, heads, index.shape[2], size)
    outs = tuple(t.new_empty(shape).transpose(1, 2) for t in tensors)
    _launch(tensors, outs, index, scatter=False)
    return outs


def scatter_per_head(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Launch the scatter: `out[b, index[b, h], h] = source[b, :, h]`.

    Args:
        source: [B, S_in, H, D], any strides.
        index: int32 [B, H, S_in], distinct in every head.
        out: [B, S, H, D], any strides.
    """
    _launch((source,), (out,), index, scatter=True)


def _launch(
    tensors: tuple[torch.Tensor, ...],
    outs: tuple[torch.Tensor, ...],
    index: torch.Tensor,
    *,
    scatter: bool,
) -> None:
    batch, heads, num = index.shape
    size = tensors[0].shape[3]
    vector = vector_of((*tensors, *outs))
    width = triton.next_power_of_2(size)
    tokens = max(_BYTES * vector // (16 * width), 1)
    index = index if index.stride(2) == 1 else index.contiguous()
    num_blocks = triton.cdiv(num, tokens)
    grid = (batch * heads * num_blocks,)
    slots = [min(slot, len(tensors) - 1) for slot in range(3)]
    if math.prod(grid):
        with torch.cuda.device_of(tensors[0]):
            _move_kernel[grid](
                *(tensors[slot] for slot in slots), *(outs[slot] for slot in slots), index,
                *(s for slot in slots for s in strides_in_vectors(tensors[slot], vector)),
                *strides_in_vectors(outs[0], vector), *index.stride()[:2],
                heads, num, num_blocks,
                NUM=len(tensors), SCATTER=scatter, D=size, DP=width, VEC=vector, TOKENS=tokens,
                num_warps=_WARPS,
            )  # fmt: skip
