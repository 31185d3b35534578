"""Moving tokens in Triton, as fast as memory goes.

A token of a tensor is a row of H * D elements. A program copies TOKENS rows, WIDTH elements of
each: in a head-major tensor these are WIDTH / D pieces of TOKENS * D elements, in a token-major one
TOKENS pieces of WIDTH, so that both sides touch memory in pieces of 512 bytes and more.

Strides are passed in units of VEC elements, 16 bytes where the tensors allow it: that is how the
compiler learns that it may use 16-byte accesses, for every head size and without a compilation per
shape. Only offsets within a row's piece are 32-bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launch.launcher import (
    VECTOR_BYTES,
    Form,
    Launch,
    Launcher,
    form_of,
    strides_in_vectors,
    vector_of,
)
from multimodal_gen.kernels.shared_kernel import next_power_of_2
from multimodal_gen.kernels.tensors import unit_stride

_MOST_TENSORS = 4
MAX_TOKENS = 256

Gather: TypeAlias = Callable[[tuple[torch.Tensor, ...], torch.Tensor], tuple[torch.Tensor, ...]]
"""Returns new head-major tensors [B, S_out, H, D] of tensors and an index."""
Scatter: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes `out[:, index] = source` of source, index and out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTile:
    """Shape of one program.

    Attributes:
        tokens: tokens of a program whose rows are at least `row_bytes` long; more where shorter.
        row_bytes: bytes of each row.
        warps: warps of the program.
    """

    tokens: int
    row_bytes: int
    warps: int


# Not measured: from the latency of HBM3e, which needs about 48 KB in flight per multiprocessor.
# 8 accesses of 16 bytes per thread, of which 8 programs or more fit on a multiprocessor.
TILE = CopyTile(tokens=16, row_bytes=1024, warps=4)


@triton.jit
def _head_offsets(at, stride_h, stride_d, D: tl.constexpr, VEC: tl.constexpr):
    """Offsets of a row's elements `at`, which count through its heads."""
    return (at // D).to(tl.int64) * stride_h * VEC + (at % D) * stride_d


@triton.jit
def _gather_piece(
    src_ptr, out_ptr, index_ptr, src_b, src_s, src_h, src_d, heads, num_out, b, first, piece,
    D: tl.constexpr, VEC: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy a piece of the rows `index[first : first + TOKENS]` into a head-major tensor."""
    token = first + tl.arange(0, TOKENS)
    at = piece * WIDTH + tl.arange(0, WIDTH)
    real = token < num_out
    mask = real[:, None] & (at < heads * D)[None, :]
    row = tl.load(index_ptr + token, mask=real, other=0).to(tl.int64)
    src_ptr += b * src_b * VEC
    src = row[:, None] * src_s * VEC + _head_offsets(at, src_h, src_d, D, VEC)[None, :]
    values = tl.load(src_ptr + src, mask=mask, eviction_policy="evict_first")
    out_ptr += (b * heads * num_out + first) * D
    out_h = num_out.to(tl.int64) * D
    out = tl.arange(0, TOKENS)[:, None] * D + ((at // D) * out_h + at % D)[None, :]
    tl.store(out_ptr + out, values, mask=mask)


@triton.jit(
    do_not_specialize=[
        "src0_b", "src0_s", "src0_h", "src1_b", "src1_s", "src1_h",
        "src2_b", "src2_s", "src2_h", "src3_b", "src3_s", "src3_h",
        "heads0", "heads1", "heads2", "heads3", "end0", "end1", "end2", "end3",
        "index_b", "num_out", "num_blocks",
    ]
)  # fmt: skip
def _gather_kernel(
    src0_ptr, src1_ptr, src2_ptr, src3_ptr, out0_ptr, out1_ptr, out2_ptr, out3_ptr, index_ptr,
    src0_b, src0_s, src0_h, src0_d, src1_b, src1_s, src1_h, src1_d,
    src2_b, src2_s, src2_h, src2_d, src3_b, src3_s, src3_h, src3_d,
    heads0, heads1, heads2, heads3, end0, end1, end2, end3,
    index_b, num_out, num_blocks,
    NUM: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out_i[b, :, t] = src_i[b, index[t]] for NUM tensors. Grid [B * blocks of tokens * pieces].

    `end_i` counts the pieces of a row of tensors 0 to i. The pieces of the same tokens run
    fastest, so that neighbours read neighbouring memory.
    """
    pid = tl.program_id(0)
    pieces = end3
    piece = pid % pieces
    outer = pid // pieces
    b = (outer // num_blocks).to(tl.int64)
    first = (outer % num_blocks) * TOKENS
    index_ptr += b * index_b
    tensors = (
        (src0_ptr, out0_ptr, src0_b, src0_s, src0_h, src0_d, heads0, 0, end0),
        (src1_ptr, out1_ptr, src1_b, src1_s, src1_h, src1_d, heads1, end0, end1),
        (src2_ptr, out2_ptr, src2_b, src2_s, src2_h, src2_d, heads2, end1, end2),
        (src3_ptr, out3_ptr, src3_b, src3_s, src3_h, src3_d, heads3, end2, end3),
    )
    for i in tl.static_range(NUM):
        src_ptr, out_ptr, src_b, src_s, src_h, src_d, heads, begin, end = tensors[i]
        if (piece >= begin) & (piece < end):
            _gather_piece(
                src_ptr, out_ptr, index_ptr, src_b, src_s, src_h, src_d, heads,
                num_out, b, first, piece - begin, D, VEC, TOKENS, WIDTH,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "src_b", "src_s", "src_h", "out_b", "out_s", "out_h",
        "heads", "index_b", "num_in", "num_blocks",
    ]
)  # fmt: skip
def _scatter_kernel(
    src_ptr, out_ptr, index_ptr, src_b, src_s, src_h, src_d, out_b, out_s, out_h, out_d,
    heads, index_b, num_in, num_blocks,
    D: tl.constexpr, VEC: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[b, index[t]] = src[b, t]. Grid [B * blocks of tokens * pieces of a row]."""
    pid = tl.program_id(0)
    pieces = tl.cdiv(heads * D, WIDTH)
    outer = pid // pieces
    b = (outer // num_blocks).to(tl.int64)
    token = (outer % num_blocks) * TOKENS + tl.arange(0, TOKENS)
    at = pid % pieces * WIDTH + tl.arange(0, WIDTH)
    real = token < num_in
    mask = real[:, None] & (at < heads * D)[None, :]
    row = tl.load(index_ptr + b * index_b + token, mask=real, other=0).to(tl.int64)
    src = token.to(tl.int64)[:, None] * src_s * VEC
    src += _head_offsets(at, src_h, src_d, D, VEC)[None, :]
    values = tl.load(src_ptr + b * src_b * VEC + src, mask=mask, eviction_policy="evict_first")
    out = row[:, None] * out_s * VEC + _head_offsets(at, out_h, out_d, D, VEC)[None, :]
    tl.store(out_ptr + b * out_b * VEC + out, values, mask=mask)


_gather, _scatter = Launcher(_gather_kernel), Launcher(_scatter_kernel)


def prepare_gather(tensors: tuple[Form, ...], index: Form, *, tile: CopyTile = TILE) -> Gather:
    """Return the gather of tensors of one form, whose index is of one form too.

    Args:
        tensors: one to four, [B, S, H, D] with any strides, of one dtype, B, S and D.
        index: int32 [S_out] or [B, S_out].
        tile: shape of a program.
    """
    (batch, _, _, size), item = tensors[0].shape, tensors[0].dtype.itemsize
    num_out, index_b, copies_index = _along(index)
    vector = vector_of(*tensors)
    row = max(x.shape[2] for x in tensors) * size
    tokens, width = _shape(row, item, vector, tile)
    ends = list(accumulate(-(-(x.shape[2] * size) // width) for x in tensors))
    num_blocks = -(-num_out // tokens)
    slots = [min(slot, len(tensors) - 1) for slot in range(_MOST_TENSORS)]
    grid = (batch * num_blocks * ends[-1],)
    fixed = (
        *(stride for slot in slots for stride in strides_in_vectors(tensors[slot], vector)),
        *(tensors[slot].shape[2] for slot in slots),
        *(ends[slot] for slot in slots), index_b, num_out, num_blocks,
    )  # fmt: skip
    options = {"NUM": len(tensors), "D": size, "VEC": vector, "TOKENS": tokens, "WIDTH": width}
    options["num_warps"] = tile.warps
    launch = Launch(_gather, grid, fixed, (options,)) if math.prod(grid) else None
    head_major = [_head_major(batch, num_out, x.shape[2], size) for x in tensors]
    rest = _MOST_TENSORS - len(tensors)

    def gather(moved: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(moved, head_major, strict=True)
        outs = tuple([tensor.new_empty_strided(*form) for tensor, form in pairs])
        if launch is not None:
            index = index.contiguous() if copies_index else index
            launch((*moved, *moved[-1:] * rest, *outs, *outs[-1:] * rest, index))
        return outs

    return gather


def _head_major(
    batch: int, tokens: int, heads: int, size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of [B, S, H, D] that lies in memory as [B, H, S, D]."""
    return (batch, tokens, heads, size), (heads * tokens * size, size, tokens * size, 1)


def prepare_scatter(source: Form, index: Form, out: Form, *, tile: CopyTile = TILE) -> Scatter:
    """Return the scatter from one form to another.

    Args:
        source: [B, S_in, H, D], any strides.
        index: int32 [S_in] or [B, S_in].
        out: [B, S, H, D], any strides.
        tile: shape of a program.
    """
    batch, _, heads, size = source.shape
    num_in, index_b, copies_index = _along(index)
    vector = vector_of(source, out)
    tokens, width = _shape(heads * size, source.dtype.itemsize, vector, tile)
    num_blocks = -(-num_in // tokens)
    grid = (batch * num_blocks * -(-(heads * size) // width),)
    strides = (stride for x in (source, out) for stride in strides_in_vectors(x, vector))
    fixed = (*strides, heads, index_b, num_in, num_blocks)
    options = {"D": size, "VEC": vector, "TOKENS": tokens, "WIDTH": width}
    options["num_warps"] = tile.warps
    launch = Launch(_scatter, grid, fixed, (options,)) if math.prod(grid) else None

    def scatter(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        if launch is not None:
            launch((source, out, index.contiguous() if copies_index else index))

    return scatter


def _along(index: Form) -> tuple[int, int, bool]:
    """Return how many tokens an index names, its stride over B, and whether it must be copied."""
    num, copies = index.shape[-1], index.strides[-1] != 1
    if len(index.shape) == 1:
        return num, 0, copies
    return num, num if copies else index.strides[0], copies


def _shape(row: int, item: int, vector: int, tile: CopyTile) -> tuple[int, int]:
    """Return tokens and elements per row of a program.

    Args:
        row: elements of the longest row.
        item: bytes of an element.
        vector: elements of an access; the accesses per program are bounded, not the elements.
        tile: what 16-byte accesses and long rows get.
    """
    elements = tile.tokens * tile.row_bytes * vector // VECTOR_BYTES
    width = min(tile.row_bytes // item, next_power_of_2(max(row, 1)), elements)
    return min(elements // width, MAX_TOKENS), width


# 64 rows of 256 bytes: 8 accesses of 16 bytes per thread. Not measured.
_BYTES = 16384
_WARPS = 4


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
    d = tl.arange(0, DP)
    mask = real[:, None] & (d < D)[None, :]
    to = to_row.to(tl.int64)[:, None] * out_s * VEC + (d * out_d)[None, :]
    tensors = (
        (src0_ptr, out0_ptr, src0_b, src0_s, src0_h, src0_d),
        (src1_ptr, out1_ptr, src1_b, src1_s, src1_h, src1_d),
        (src2_ptr, out2_ptr, src2_b, src2_s, src2_h, src2_d),
    )
    for i in tl.static_range(NUM):
        src_ptr, out_ptr, src_b, src_s, src_h, src_d = tensors[i]
        src_ptr += (b * src_b + h * src_h) * VEC
        src = from_row.to(tl.int64)[:, None] * src_s * VEC + (d * src_d)[None, :]
        values = tl.load(src_ptr + src, mask=mask, eviction_policy="evict_first")
        tl.store(out_ptr + out_at + to, values, mask=mask)


_move = Launcher(_move_kernel)


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
    forms, moved = tuple(map(form_of, tensors)), tuple(map(form_of, outs))
    vector = vector_of(*forms, *moved)
    width = next_power_of_2(size)
    tokens = max(_BYTES * vector // (16 * width), 1)
    index = unit_stride(index)
    num_blocks = -(-num // tokens)
    grid = (batch * heads * num_blocks,)
    slots = [min(slot, len(tensors) - 1) for slot in range(3)]
    if math.prod(grid):
        _move(
            grid,
            *(tensors[slot] for slot in slots), *(outs[slot] for slot in slots), index,
            *(s for slot in slots for s in strides_in_vectors(forms[slot], vector)),
            *strides_in_vectors(moved[0], vector), *index.stride()[:2],
            heads, num, num_blocks,
            NUM=len(tensors), SCATTER=scatter, D=size, DP=width, VEC=vector, TOKENS=tokens,
            num_warps=_WARPS,
        )  # fmt: skip
