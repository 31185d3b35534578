"""Means of tiles, of their cells and of long chunks, and the gated sum, in Triton."""

from functools import lru_cache
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from multimodal_gen.kernels.launch.launcher import Form, Launch, Launcher, form_of
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.shared_kernel import next_power_of_2, padded_channels

READ_BYTES = 2**13  # of a tile, that a warp reads at once
FEW_TOKENS = 128  # of a tile, for which one warp is enough
SPAN = 512  # keys of a chunk that one program adds up
KEYS = 64  # of it, that are read at once


@triton.jit
def _owner(pid, heads, num_tiles, HEADS_FIRST: tl.constexpr):
    """Return batch, head and tile of a program; those that are close in memory run together."""
    if HEADS_FIRST:
        h = pid % heads
        tile = pid // heads % num_tiles
    else:
        tile = pid % num_tiles
        h = pid // num_tiles % heads
    b = pid // heads // num_tiles
    return b.to(tl.int64), h.to(tl.int64), tile.to(tl.int64)


@triton.jit
def _tokens(start, length, index_ptr, first, INDEXED: tl.constexpr, T: tl.constexpr):
    """Return the positions of T tokens of a tile, and which of them exist."""
    i = first + tl.arange(0, T)
    real = i < length
    position = (start + i).to(tl.int64)
    if INDEXED:
        position = tl.load(index_ptr + position, mask=real, other=0).to(tl.int64)
    return position, real


@triton.jit
def _add_tokens(
    total, count, x_ptr, index_ptr, mask_ptr, x_s, x_d, mask_s, start, length, first, d,
    D: tl.constexpr, T: tl.constexpr, INDEXED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add T tokens of a tile to `total`, and take those that do not count from `count`."""
    position, real = _tokens(start, length, index_ptr, first, INDEXED, T)
    if MASKED:
        kept = tl.load(mask_ptr + position * mask_s, mask=real, other=0) != 0
        count -= tl.sum((real & (kept == 0)).to(tl.int32), 0)
        real = real & kept
    mask = real[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + position[:, None] * x_s + d[None, :] * x_d, mask=mask, other=0.0)
    return total + tl.sum(x.to(tl.float32), 0), count


@triton.jit(do_not_specialize=["heads", "num_tiles"])
def _pool_kernel(
    x_ptr, y_ptr, out_ptr, y_out_ptr, start_ptr, length_ptr, index_ptr, mask_ptr,
    x_b, x_s, x_h, x_d, mask_b, mask_s, heads, num_tiles,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, CELLS: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr, INDEXED: tl.constexpr, MASKED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * N, spans, tensors]: [B, H, N, CELLS, D] means, or [B, H, N, spans, D] sums.

    Of x and, of a PAIR, of y, which has its strides. Cells have WIDTH tokens each, whose loads
    overlap; 0 for a tile that is not cut. Spans have SPAN tokens, and are added up; 0 for means.
    """
    b, h, tile = _owner(tl.program_id(0), heads, num_tiles, HEADS_FIRST)
    start = tl.load(start_ptr + tile)
    length = tl.load(length_ptr + tile)
    which = 0
    if PAIR:
        which = tl.program_id(2)
    if which == 1:
        x_ptr = y_ptr
        out_ptr = y_out_ptr
    begin = 0
    if SPAN:
        begin = tl.program_id(1) * SPAN
        length = tl.minimum(length, begin + SPAN)
    d = tl.arange(0, DP).to(tl.int64)
    x_ptr += b * x_b + h * x_h
    mask_ptr += b * mask_b
    for cell in tl.static_range(CELLS):
        total = tl.zeros([DP], tl.float32)
        count = length
        if WIDTH:
            held = tl.minimum(tl.maximum(length - cell * WIDTH, 0), WIDTH)
            count = held
            for first in tl.static_range(0, WIDTH, T):
                total, count = _add_tokens(
                    total, count, x_ptr, index_ptr, mask_ptr, x_s, x_d, mask_s,
                    start + cell * WIDTH, held, first, d, D, T, INDEXED, MASKED,
                )  # fmt: skip
        else:
            for first in range(begin, length, T):
                total, count = _add_tokens(
                    total, count, x_ptr, index_ptr, mask_ptr, x_s, x_d, mask_s,
                    start, length, first, d, D, T, INDEXED, MASKED,
                )  # fmt: skip
        part = ((b * heads + h) * num_tiles + tile) * CELLS + cell
        if SPAN:
            part = part * tl.num_programs(1) + tl.program_id(1)
        else:
            total /= tl.maximum(count, 1).to(tl.float32)
        tl.store(out_ptr + part * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["heads", "num_tiles"])
def _add_gated_kernel(
    out_ptr, gate_ptr, coarse_ptr, start_ptr, length_ptr, index_ptr,
    out_b, out_s, out_h, out_d, gate_b, gate_s, gate_h, gate_d, coarse_b, coarse_h, coarse_n,
    coarse_d, heads, num_tiles,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, INDEXED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * N]; `out` is changed in place."""
    b, h, tile = _owner(tl.program_id(0), heads, num_tiles, HEADS_FIRST)
    start = tl.load(start_ptr + tile)
    length = tl.load(length_ptr + tile)
    d = tl.arange(0, DP).to(tl.int64)
    at = coarse_ptr + b * coarse_b + h * coarse_h + tile * coarse_n
    value = tl.load(at + d * coarse_d, mask=d < D, other=0.0).to(tl.float32)
    out_ptr += b * out_b + h * out_h
    gate_ptr += b * gate_b + h * gate_h
    for first in range(0, length, T):
        position, real = _tokens(start, length, index_ptr, first, INDEXED, T)
        mask = real[:, None] & (d < D)[None, :]
        gate = tl.load(
            gate_ptr + position[:, None] * gate_s + d[None, :] * gate_d, mask=mask, other=0.0
        )
        outs = out_ptr + position[:, None] * out_s + d[None, :] * out_d
        out = tl.load(outs, mask=mask, other=0.0).to(tl.float32)
        out += gate.to(tl.float32) * value[None, :]
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)


_launch_pool, _launch_add_gated = Launcher(_pool_kernel), Launcher(_add_gated_kernel)
_WHOLE = MappingProxyType({"CELLS": 1, "WIDTH": 0, "SPAN": 0})


def pool_tiles(
    tensors: tuple[torch.Tensor, ...],
    tiles: Tiles,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Launch the means over tiles, [B, H, N, D]; see `api.pool_tiles`."""
    warps = 1 if tensors[0].shape[1] <= FEW_TOKENS * len(tiles.starts) else 4
    at_once = _tokens_at_once(tensors[0], READ_BYTES * warps)
    options = {"T": at_once, "num_warps": warps}
    if len(tensors) == 2 and form_of(tensors[0]) == form_of(tensors[1]):
        return _pool(tensors, tiles, mask, dtype, **options)
    return tuple([_pool((x,), tiles, mask, dtype, **options)[0] for x in tensors])


def pool_cells(
    tensor: torch.Tensor, tiles: Tiles, cells: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Launch the means of the cells of tiles, [B, H, N * cells, D]; see `api.pool_cells`."""
    width = -(-tiles.size // cells)
    at_once = min(next_power_of_2(width), _tokens_at_once(tensor, READ_BYTES))
    return _pool((tensor,), tiles, mask, CELLS=cells, WIDTH=width, T=at_once, num_warps=1)[0]


def sum_chunks(key: torch.Tensor, tiles: Tiles, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Launch the sums of long tiles, fp32 [B, H, N, D]."""
    spans = -(-tiles.size // SPAN)
    options = {"SPAN": SPAN, "T": KEYS, "HEADS_FIRST": True, "num_warps": 4}
    (sums,) = _pool((key,), tiles, mask, torch.float32, spans, **options)
    return sums if spans == 1 else sums.unflatten(2, (-1, spans)).sum(3)


def _pool(
    tensors: tuple[torch.Tensor, ...],
    tiles: Tiles,
    mask: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    spans: int = 1,
    **options: int,
) -> tuple[torch.Tensor, ...]:
    """Launch the kernel for one tensor, or two of one form: [B, H, N * cells or spans, D]."""
    starts, lengths, _, index = tiles
    of_tiles = (starts, lengths, starts if index is None else index)
    kept = starts if mask is None else mask.view(torch.uint8)
    aligned = tuple([x.data_ptr() % 16 for x in (*of_tiles, kept)])
    masked = None if mask is None else mask.stride()
    first, num, indexed = tensors[0], len(tensors), index is not None
    every = form_of(first), num, starts.shape[0], indexed, masked, aligned, dtype, spans
    shape, launch = _prepared(*every, *options.items())
    outs = tuple([x.new_empty(shape, dtype=dtype) for x in tensors])
    launch((first, tensors[-1], outs[0], outs[-1], *of_tiles, kept))
    return outs


@lru_cache(maxsize=1024)
def _prepared(
    tensor: Form,
    num: int,
    num_tiles: int,
    indexed: bool,
    masked: tuple[int, ...] | None,
    aligned: tuple[int, ...],
    dtype: torch.dtype | None,
    spans: int,
    *options: tuple[str, int],
) -> tuple[tuple[int, ...], Launch]:
    """Return the shape of what `_pool` makes of tensors of one form, and what launches it."""
    batch, _, heads, head_size = tensor.shape
    given = {**_WHOLE, "HEADS_FIRST": tensor.strides[2] < tensor.strides[1], **dict(options)}
    given.update(D=head_size, DP=padded_channels(head_size))
    given.update(INDEXED=indexed, MASKED=masked is not None, PAIR=num == 2)
    fixed = (*tensor.strides, *(masked or (0, 0)), heads, num_tiles)
    launch = Launch(_launch_pool, (batch * heads * num_tiles, spans, num), fixed, [given])
    return (batch, heads, num_tiles * given["CELLS"] * spans, head_size), launch


def add_gated(
    out: torch.Tensor, gate: torch.Tensor, coarse: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    """Launch the gated sum, which changes `out`; see `api.add_gated`."""
    batch, _, heads, head_size = out.shape
    num_tiles, index = len(tiles.starts), tiles.tokens
    _launch_add_gated(
        (batch * heads * num_tiles,),
        out, gate, coarse, tiles.starts, tiles.lengths, tiles.starts if index is None else index,
        *out.stride(), *gate.stride(), *coarse.stride(), heads, num_tiles,
        D=head_size, DP=padded_channels(head_size), T=_tokens_at_once(out, READ_BYTES),
        INDEXED=index is not None, HEADS_FIRST=out.stride(2) < out.stride(1), num_warps=4,
    )  # fmt: skip
    return out


def _tokens_at_once(tensor: torch.Tensor, limit: int) -> int:
    """Return the tokens of one head of [B, S, H, D] that `limit` bytes hold."""
    return min(max(limit // (padded_channels(tensor.shape[3]) * tensor.element_size()), 8), 64)
