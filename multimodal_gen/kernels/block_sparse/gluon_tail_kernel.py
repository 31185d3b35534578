"""The pooled tail on SM90 in Gluon: goes on where the softmax over the lists has ended.

Programs stay and take one tile after another. Of a tile, a producer warp loads queries, what the
lists gave, and pooled keys and values step by step; every consumer warpgroup owns up to 64 rows of
one query block. With s = scale * log2(e) * q kc^T and bias = log2(n), minus infinity for blocks
that the rows keep, as bits say, over steps of BN pooled keys:

    m = log2(e) lse;  p = 2^(s + bias - m);  new = new + rowsum p;  acc = acc + p vc
    out = (o + acc) / (1 + new);  lse = ln 2 (m + log2(1 + new))

What the rows keep is the reference of all weights, so that none is ever rescaled. That is sound
unless a row keeps nothing, or means outweigh what it keeps by far: such pieces are flagged and left
as they are, for the kernel in tail_kernel.py to do.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.block_sparse import tail_kernel
from multimodal_gen.kernels.block_sparse.call import TailCall
from multimodal_gen.kernels.block_sparse.gluon_work_kernel import Outs, places, store_values
from multimodal_gen.kernels.block_sparse.plan import WORD_BITS, bounds_of
from multimodal_gen.kernels.block_sparse.tuning import GluonTile, TritonTile
from multimodal_gen.kernels.hopper_kernel import (
    OVERFLOW,
    ProgramShape,
    barriers,
    fetch,
    partial_sums,
    scores,
    specialize,
    wait_empty,
    wait_full,
)
from multimodal_gen.kernels.launch.descriptors import describe, describe_tokens
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import wide_channels

_ROWS = 64  # of a consumer
_KEYS = 64  # of a step; their bits are one word


class Rings(NamedTuple):
    """Shared memory: tiles, and barriers that say when they are full and empty."""

    q: Any
    o: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    o_full: Any
    o_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Task(NamedTuple):
    """What all tiles have in common.

    `bits` has a word of 64 bits per step in every row, and `sizes` log2 of the tokens of each key;
    their strides count rows. `flags` begins with how many are set.
    """

    bits: Any
    bits_b: Any
    bits_h: Any
    sizes: Any
    sizes_b: Any
    sizes_h: Any
    steps: Any
    outs: Any
    flags: Any
    q_start: Any
    q_length: Any
    q_start_b: Any
    q_start_h: Any
    q_length_b: Any
    q_length_h: Any
    num_q: Any
    q_size: Any
    q_total: Any
    heads: Any
    group: Any
    tiles: Any
    total: Any
    scale_log2: Any


@gluon.jit
def _piece(tile, W: gl.constexpr, task, C: gl.constexpr):
    """Return batch, head, piece, block, first row and how many rows of a consumer's piece."""
    h = tile // task.tiles % task.heads
    b = tile // task.tiles // task.heads
    given = tile % task.tiles * C.consumers + W
    piece = gl.minimum(given, task.num_q * C.q_tiles - 1)
    block = piece // C.q_tiles
    inside = piece % C.q_tiles * 64
    begin = block * task.q_size
    length = gl.minimum(task.q_total - begin, task.q_size)
    if C.q_starts:
        begin = gl.load(task.q_start + b * task.q_start_b + h * task.q_start_h + block)
    if C.q_lengths:
        length = gl.load(task.q_length + b * task.q_length_b + h * task.q_length_h + block)
    real = gl.where(given == piece, length - inside, 0)
    return b, h, piece, block, begin + inside, real


@gluon.jit
def _load_v(dv, b, kv_h, step, at, rings, C: gl.constexpr):
    slot = wait_empty(rings.v_empty, at, 0, C)
    fetch(dv, [b, kv_h, step * C.keys, 0], rings.v_full.index(slot), rings.v.index(slot))


@gluon.jit
def _producer(fed, W: gl.constexpr, C: gl.constexpr):
    """One warp: loads a tile's rows, and K and V of every step, V one step late."""
    dq, do, dk, dv, task, rings = fed
    CONSUMERS: gl.constexpr = C.consumers
    first = gl.program_id(0)
    for tile in range(first, task.total, gl.num_programs(0)):
        turn = (tile - first) // gl.num_programs(0)
        before = turn * task.steps
        h = tile // task.tiles % task.heads
        b = tile // task.tiles // task.heads
        kv_h = h // task.group
        for w in gl.static_range(CONSUMERS):
            _, _, _, _, row, _ = _piece(tile, w, task, C)
            mbarrier.wait(rings.q_empty.index(w), (turn & 1) ^ 1)
            fetch(dq, [b, h, row, 0], rings.q_full.index(w), rings.q.index(w))
        for step in range(task.steps):
            at = before + step
            slot = wait_empty(rings.k_empty, at, 0, C)
            fetch(dk, [b, kv_h, step * C.keys, 0], rings.k_full.index(slot), rings.k.index(slot))
            if step > 0:
                _load_v(dv, b, kv_h, step - 1, at - 1, rings, C)
        # Late: until the tile before is written there is no room for it.
        for w in gl.static_range(CONSUMERS):
            _, _, _, _, row, _ = _piece(tile, w, task, C)
            mbarrier.wait(rings.o_empty.index(w), (turn & 1) ^ 1)
            fetch(do, [b, h, row, 0], rings.o_full.index(w), rings.o.index(w))
        _load_v(dv, b, kv_h, task.steps - 1, before + task.steps - 1, rings, C)


@gluon.jit
def _bias(sizes, word, n):
    """Return `sizes` of blocks, minus infinity for those whose bit of a word of 64 is set."""
    low = word.to(gl.int32)
    high = (word >> 32).to(gl.int32)
    bits = gl.where(n < 32, low + gl.zeros_like(n), high + gl.zeros_like(n)) >> (n % 32)
    return gl.where(bits & 1 == 0, sizes, float("-inf"))


@gluon.jit
def _weights(s, bias, m, scale_log2, dtype: gl.constexpr, C: gl.constexpr):
    """Return the weights of a step in 16 bits, and the sums of rows in four parts: [64, 4]."""
    whole, _ = gl.broadcast(gl.expand_dims(bias, 0), s)
    p = gl.exp2(gl.fma(s, scale_log2, whole) - gl.expand_dims(m, 1))
    return gl.convert_layout(p.to(dtype), C.p_layout), partial_sums(p, C)


@gluon.jit
def _consumer(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup: up to 64 rows of one query block of every tile."""
    task, rings = given
    dtype: gl.constexpr = rings.q.dtype
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    q_tile = rings.q.index(W).reshape([64, D])
    o_tile = rings.o.index(W).reshape([64, D])
    n = gl.arange(0, BN, C.columns)
    first = gl.program_id(0)
    for tile in range(first, task.total, gl.num_programs(0)):
        turn = (tile - first) // gl.num_programs(0)
        before = turn * task.steps
        b, h, piece, block, row, real = _piece(tile, W, task, C)
        b_64 = b.to(gl.int64)
        h_64 = h.to(gl.int64)
        # A step takes one word of bits.
        word_row = b_64 * task.bits_b + h_64 * task.bits_h + block
        word_ptr = task.bits + word_row * task.steps
        size_row = b_64 * task.sizes_b + (h // task.group) * task.sizes_h
        size_ptr = task.sizes + size_row * (task.steps * BN) + n
        _, lse_ptr = places(task.outs, b_64, h_64, row)
        rows = gl.arange(0, 64, C.rows_s)
        lse = gl.load(lse_ptr + rows, mask=rows < real, other=0.0)
        nothing = lse == float("-inf")
        m = gl.where(nothing, 0.0, lse * 1.4426950408889634)
        sizes = gl.load(size_ptr)
        word = gl.load(word_ptr)
        mbarrier.wait(rings.q_full.index(W), turn & 1)
        slot = wait_full(rings.k_full, before, 0, C)
        s_token = scores(q_tile, rings.k.index(slot), C)
        # Looked up a step ahead, so that no product waits for it.
        ahead = gl.load(word_ptr + gl.minimum(1, task.steps - 1))
        s = hopper.warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(rings.k_empty.index(slot))
        weights, sums = _weights(s, _bias(sizes, word, n), m, task.scale_log2, dtype, C)
        acc = gl.zeros([64, D], gl.float32, C.o_layout)
        for step in range(1, task.steps):
            at = before + step
            word = ahead
            ahead = gl.load(word_ptr + gl.minimum(step + 1, task.steps - 1))
            sizes = gl.load(size_ptr + step * BN)
            slot = wait_full(rings.k_full, at, 0, C)
            s_token = scores(q_tile, rings.k.index(slot), C)
            slot_v = wait_full(rings.v_full, at - 1, 0, C)
            v_tile = rings.v.index(slot_v).reshape([BN, D])
            o_token = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
            s = hopper.warpgroup_mma_wait(1, deps=[s_token])
            mbarrier.arrive(rings.k_empty.index(slot))
            following, added = _weights(s, _bias(sizes, word, n), m, task.scale_log2, dtype, C)
            sums += added
            # The weights in flight must pass through the wait, or their registers are reused early.
            acc, weights = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
            mbarrier.arrive(rings.v_empty.index(slot_v))
            weights = following
        mbarrier.arrive(rings.q_empty.index(W))
        slot_v = wait_full(rings.v_full, before + task.steps - 1, 0, C)
        v_tile = rings.v.index(slot_v).reshape([BN, D])
        o_token = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
        new = gl.convert_layout(gl.sum(sums, 1), C.rows_s)
        sound = (new < OVERFLOW) & ~nothing
        wrong = gl.max(((rows < real) & ~sound).to(gl.int32), 0)
        acc, weights = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
        mbarrier.arrive(rings.v_empty.index(slot_v))

        mbarrier.wait(rings.o_full.index(W), turn & 1)
        exact = o_tile.load(C.o_layout).to(gl.float32)
        inverse = gl.convert_layout(1.0 / (1.0 + new), C.rows_o)
        o_tile.store(((acc + exact) * gl.expand_dims(inverse, 1)).to(dtype))
        staged = o_tile.load(C.store_layout)
        hopper.fence_async_shared()
        mbarrier.arrive(rings.o_empty.index(W))
        kept = gl.where(wrong > 0, 0, real)
        gl.store(lse_ptr + rows, 0.6931471805599453 * (m + gl.log2(1.0 + new)), mask=rows < kept)
        out_ptr, _ = places(task.outs, b_64, h_64, row)
        store_values(out_ptr, staged, task.outs, kept, 0, C, False)
        if wrong > 0:
            place = (b * task.heads + h) * task.num_q * C.q_tiles + piece
            gl.store(task.flags + 1 + place, wrong)
            gl.atomic_add(task.flags, 1)


@gluon.jit(
    do_not_specialize=[
        "bits_b", "bits_h", "sizes_b", "sizes_h", "steps",
        "q_start_b", "q_start_h", "q_length_b", "q_length_h", "num_q", "q_size", "q_total", "heads",
        "group", "tiles", "total", "lse_b", "lse_h",
    ]
)  # fmt: skip
def gluon_tail_kernel(
    dq, do, dk, dv, out_ptr, lse_ptr, bits_ptr, size_ptr, flag_ptr, q_start_ptr, q_length_ptr,
    out_b, out_s, out_h, lse_b, lse_h, bits_b, bits_h, sizes_b, sizes_h, steps,
    q_start_b, q_start_h, q_length_b, q_length_h,
    num_q, q_size, q_total, heads, group, tiles, total, scale_log2, C: gl.constexpr,
):  # fmt: skip
    """Grid: programs that share `total` tiles."""
    task = Task(
        bits_ptr, bits_b, bits_h, size_ptr, sizes_b, sizes_h, steps,
        Outs(out_ptr, lse_ptr, out_b, out_s, out_h, lse_b, lse_h), flag_ptr,
        q_start_ptr, q_length_ptr, q_start_b, q_start_h, q_length_b, q_length_h,
        num_q, q_size, q_total, heads, group, tiles, total, scale_log2,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = C.consumers
    STAGES: gl.constexpr = C.stages
    dtype: gl.constexpr = dq.dtype
    rings = Rings(
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, C.head_size], dq.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, C.head_size], do.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C.keys, C.head_size], dk.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C.keys, C.head_size], dv.layout),
        barriers(CONSUMERS, 1),
        barriers(CONSUMERS, 1),
        barriers(CONSUMERS, 1),
        barriers(CONSUMERS, 1),
        barriers(STAGES, 1),
        barriers(STAGES, CONSUMERS),
        barriers(STAGES, 1),
        barriers(STAGES, CONSUMERS),
    )
    hopper.fence_async_shared()
    specialize(_consumer, ((task, rings),), _producer, ((dq, do, dk, dv, task, rings),), C)


_launcher = Launcher(gluon_tail_kernel)


@cache
def _programs(index: int) -> int:
    """Return how many programs run at once; index -1 is a GPU that is not there."""
    return 132 if index < 0 else int(torch.cuda.get_device_properties(index).multi_processor_count)


def add_tail(call: TailCall, *, tile: GluonTile) -> None:
    """Launch the kernel, and the other one for what it flags; see `tail.add_tail`.

    What the copy engine reads, `out`, `q`, `keys` and `values`, must be readable to it.
    """
    bits = tail_kernel.pack_bits(call.kept, _KEYS)
    sizes = call.pooled.counts.float().log2().contiguous()
    flags = _add(call, bits, sizes, tile)
    programs = 2 * _programs(call.q.get_device())
    portable = TritonTile(rows=_ROWS, keys=32, warps=4, stages=2)
    tail_kernel.launch(call, sizes, bits, portable, flags=flags, programs=programs)


def _add(call: TailCall, bits: torch.Tensor, sizes: torch.Tensor, tile: GluonTile) -> torch.Tensor:
    """Launch the kernel; return how many pieces were left out, and which are not 0: int32."""
    out, lse, q, pooled, _, queries, scale = call
    assert queries is not None, "others are refused"
    batch, total, heads, channels = q.shape
    size = wide_channels(channels)
    per_block = -(-queries.size // _ROWS)
    pieces = queries.num * per_block
    tiles = -(-pieces // tile.consumers)
    every = batch * heads * tiles
    flags = torch.zeros(1 + batch * heads * pieces, dtype=torch.int32, device=q.device)
    bounds, strides = bounds_of(queries, batch, heads, sizes)
    steps = bits.shape[3] // (_KEYS // WORD_BITS)
    sizes = torch.nn.functional.pad(sizes, (0, steps * _KEYS - sizes.shape[2]), value=-math.inf)
    shape = ProgramShape(
        keys=_KEYS,
        head_size=size,
        channels=channels,
        consumers=tile.consumers,
        stages=tile.stages,
        q_tiles=per_block,
        q_starts=queries.starts is not None,
        q_lengths=queries.lengths is not None,
        registers=tile.registers,
    )
    _launcher(
        (min(every, _programs(q.get_device())),),
        describe_tokens(q, _ROWS, size), describe_tokens(out, _ROWS, size),
        describe(pooled.keys, _KEYS, size), describe(pooled.values, _KEYS, size),
        out, lse, bits.view(torch.int64), sizes, flags, *bounds, *out.stride()[:3],
        *lse.stride()[:2], *_rows_apart(bits), *_rows_apart(sizes.unsqueeze(2)), steps,
        *strides, queries.num, queries.size, total, heads, heads // pooled.keys.shape[1], tiles,
        every, scale / math.log(2.0), C=shape, num_warps=4,
    )  # fmt: skip
    return flags


def _rows_apart(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the strides of B and H of contiguous [B|1, H|1, N, M] in rows, 0 to broadcast."""
    batch, heads, rows, _ = tensor.shape
    return rows * heads if batch > 1 else 0, rows if heads > 1 else 0
