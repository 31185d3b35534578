"""Attention of clusters to clusters on SM90 in Gluon, on lists of whole steps and boxes of keys.

The consumers are those of the block-sparse kernel. Its producer loads steps of keys that adjoin;
here most steps do, and the others are put together from boxes of eight, each copied to its place
in the tile. One producer warp loads K and another V, because many small copies take their time to
start. A tile has the rows of one cluster, so all its consumers work on one list; a consumer
without rows only gives back what it is handed.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.block_sparse.gluon_kernel import OVERFLOW
from multimodal_gen.kernels.block_sparse.gluon_step_kernel import advance, partial_sums
from multimodal_gen.kernels.block_sparse.gluon_work_kernel import Rings, Shape, store_rows
from multimodal_gen.kernels.block_sparse.tuning import GluonTile
from multimodal_gen.kernels.cluster_attention.boxes_kernel import BOX_KEYS, STEP, make_boxes
from multimodal_gen.kernels.cluster_attention.plan import TILE_ROWS, Groups, Pieces
from multimodal_gen.kernels.launch.compat import async_load
from multimodal_gen.kernels.launch.descriptors import describe_tokens
from multimodal_gen.kernels.launch.launcher import Launcher

BOX = gl.constexpr(BOX_KEYS)
BOXES = gl.constexpr(STEP // BOX_KEYS)


class Lists(NamedTuple):
    """Where the lists lie, and how large their rows are."""

    whole: Any
    boxes: Any
    lengths: Any
    counts: Any
    whole_room: Any
    room: Any


class Tiles(NamedTuple):
    """The rows of every tile: [B * H * num], and the cluster they are of."""

    start: Any
    length: Any
    cluster: Any
    num: Any
    heads: Any
    group: Any
    clusters: Any


class Outs(NamedTuple):
    """Where results go."""

    out: Any
    out_b: Any
    out_s: Any
    out_h: Any
    lse: Any
    lse_h: Any


class Work(NamedTuple):
    """One tile. `num_full` steps need no mask, of which `num_boxed` consist of boxes."""

    whole: Any
    boxes: Any
    lengths: Any
    num_full: Any
    num_boxed: Any
    num_tail: Any
    b: Any
    h: Any
    kv_h: Any
    row: Any
    real: Any
    owned: Any
    out: Any
    out_s: Any
    lse: Any


@gluon.jit
def _work(pieces, lists, outs, C: gl.constexpr):
    """Return the work of this program."""
    at = gl.program_id(0)
    b = at // pieces.num // pieces.heads
    h = at // pieces.num % pieces.heads
    row = gl.load(pieces.start + at)
    real = gl.load(pieces.length + at)
    cluster = gl.load(pieces.cluster + at)
    of = (at // pieces.num).to(gl.int64) * pieces.clusters + cluster
    whole = gl.load(lists.counts + of * 3)
    full = gl.load(lists.counts + of * 3 + 1)
    partial = gl.load(lists.counts + of * 3 + 2)
    boxed = full // BOXES
    tail = (full + partial + BOXES - 1) // BOXES - boxed
    out = outs.out + b.to(gl.int64) * outs.out_b + h.to(gl.int64) * outs.out_h
    out += row.to(gl.int64) * outs.out_s
    return Work(
        lists.whole + of * lists.whole_room, lists.boxes + of * lists.room,
        lists.lengths + of * lists.room,
        gl.where(real > 0, whole + boxed, 0), boxed, gl.where(real > 0, tail, 0),
        b, h, h // pieces.group, row, real, real, out, outs.out_s,
        outs.lse + (at // pieces.num).to(gl.int64) * outs.lse_h + row,
    )  # fmt: skip


@gluon.jit
def _box(desc, work, start, full, tile, J: gl.constexpr):
    async_load(desc, [work.b, work.kv_h, start, 0], full, tile.slice(J * BOX, BOX, dim=2))


@gluon.jit
def _load(desc, box_desc, work, step, rings_full, rings_empty, tiles, C: gl.constexpr):
    """Load a step once its slot is empty: a masked one first, then those without, then the rest.

    Steps of boxes are spread evenly among the whole ones, because they take longer to start.
    """
    slot = step % C.stages
    phase = ((step // C.stages) & 1) ^ 1
    full = rings_full.index(slot)
    tile = tiles.index(slot)
    i = step - gl.minimum(work.num_tail, 1)
    # The number of steps of boxes among the first i, and whether the next is one.
    clamped = gl.minimum(gl.maximum(i, 0), work.num_full)
    boxed = clamped * work.num_boxed // gl.maximum(work.num_full, 1)
    following = (clamped + 1) * work.num_boxed // gl.maximum(work.num_full, 1)
    is_whole = (i >= 0) & (i < work.num_full) & (following == boxed)
    if is_whole:
        start = gl.load(work.whole + i - boxed)
        mbarrier.wait(rings_empty.index(slot), phase)
        mbarrier.expect(full, C.keys * C.head_size * 2)
        async_load(desc, [work.b, work.kv_h, start, 0], full, tile)
    else:
        # The masked step that comes first follows the unmasked ones in the list.
        index = gl.where(i < 0, work.num_boxed, boxed)
        index = gl.where(i >= work.num_full, work.num_boxed + i - work.num_full + 1, index)
        boxes = work.boxes + index * BOXES
        s0 = gl.load(boxes)
        s1 = gl.load(boxes + 1)
        s2 = gl.load(boxes + 2)
        s3 = gl.load(boxes + 3)
        s4 = gl.load(boxes + 4)
        s5 = gl.load(boxes + 5)
        s6 = gl.load(boxes + 6)
        s7 = gl.load(boxes + 7)
        mbarrier.wait(rings_empty.index(slot), phase)
        mbarrier.expect(full, C.keys * C.head_size * 2)
        _box(box_desc, work, s0, full, tile, 0)
        _box(box_desc, work, s1, full, tile, 1)
        _box(box_desc, work, s2, full, tile, 2)
        _box(box_desc, work, s3, full, tile, 3)
        _box(box_desc, work, s4, full, tile, 4)
        _box(box_desc, work, s5, full, tile, 5)
        _box(box_desc, work, s6, full, tile, 6)
        _box(box_desc, work, s7, full, tile, 7)


@gluon.jit
def _k_producer(dq, dk, dk_box, work, rings, C: gl.constexpr):
    """One warp: loads Q once, and K of every step."""
    CONSUMERS: gl.constexpr = C.consumers
    steps = work.num_full + work.num_tail
    if steps > 0:
        for c in gl.static_range(CONSUMERS):
            if c * 64 < work.real:
                mbarrier.expect(rings.q_full.index(c), 64 * C.head_size * 2)
                async_load(
                    dq, [work.b, work.h, work.row + c * 64, 0], rings.q_full.index(c),
                    rings.q.index(c),
                )  # fmt: skip
        for step in range(steps):
            _load(dk, dk_box, work, step, rings.k_full, rings.k_empty, rings.k, C)


@gluon.jit
def _v_producer(dv, dv_box, work, rings, C: gl.constexpr):
    """One warp: loads V of every step."""
    steps = work.num_full + work.num_tail
    for step in range(steps):
        _load(dv, dv_box, work, step, rings.v_full, rings.v_empty, rings.v, C)


@gluon.jit
def _limits(work, tail, layout: gl.constexpr, C: gl.constexpr):
    """Return, for every key of a masked step, a bound that its place is below if it is real."""
    column = gl.arange(0, C.keys, layout)
    length = gl.load(work.lengths + (work.num_boxed + tail) * BOXES + column // BOX)
    return gl.where(column % BOX < length, C.keys, 0)


@gluon.jit
def _give_back(work, rings, C: gl.constexpr):
    """Stand in for a consumer that has no rows."""
    for step in range(work.num_full + work.num_tail):
        slot = step % C.stages
        phase = (step // C.stages) & 1
        mbarrier.wait(rings.k_full.index(slot), phase)
        mbarrier.arrive(rings.k_empty.index(slot))
        mbarrier.wait(rings.v_full.index(slot), phase)
        mbarrier.arrive(rings.v_empty.index(slot))


@gluon.jit
def _attend(work, rings, flag, scale_log2, W: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr):
    """Attend with 64 query rows over at least one step."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    steps = work.num_full + work.num_tail
    q_tile = rings.q.index(W).reshape([64, D])
    mbarrier.wait(rings.q_full.index(W), 0)
    q = q_tile
    if C.q_registers:
        q = q_tile.load(C.q_layout)
    mbarrier.wait(rings.k_full.index(0), 0)
    k_t = rings.k.index(0).reshape([BN, D]).permute((1, 0))
    zero = gl.zeros([64, BN], gl.float32, C.s_layout)
    s_token = hopper.warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(rings.k_empty.index(0))
    column = gl.arange(0, BN, C.columns)
    limits = gl.full([BN], BN, gl.int32, C.columns)
    if work.num_tail > 0:
        limits = _limits(work, 0, C.columns, C)
    s = gl.where(gl.expand_dims(column < limits, 0), s, float("-inf"))
    m = gl.max(s, 1) * scale_log2
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m, 1))
    sums = partial_sums(p, C) if C.fast or C.lazy else gl.sum(p, 1)
    weights = gl.convert_layout(p.to(dtype), C.p_layout)
    acc = gl.zeros([64, D], gl.float32, C.o_layout)
    last = work.num_full + gl.minimum(work.num_tail, 1)
    for step in range(1, last):
        acc, sums, m, weights, _ = advance(
            q, rings, acc, sums, m, weights, BN, step, work, scale_log2, 0, 0, False, dtype, C
        )
    for step in range(last, steps):
        limits = _limits(work, step - work.num_full, C.columns, C)
        acc, sums, m, weights, _ = advance(
            q, rings, acc, sums, m, weights, limits, step, work, scale_log2, 0, 0, True, dtype, C
        )
    slot = (steps - 1) % C.stages
    mbarrier.wait(rings.v_full.index(slot), ((steps - 1) // C.stages) & 1)
    v_tile = rings.v.index(slot).reshape([BN, D])
    o_token = hopper.warpgroup_mma(weights, v_tile, acc, is_async=True)
    acc, weights = hopper.warpgroup_mma_wait(0, deps=[o_token, weights])
    row_sum = sums
    if C.fast or C.lazy:
        row_sum = gl.convert_layout(gl.sum(sums, 1), C.rows_s)
    if C.fast:
        real = W * 64 + gl.arange(0, 64, C.rows_s) < work.real
        wrong = gl.max((real & ~(row_sum < OVERFLOW)).to(gl.int32), 0)
        if wrong > 0:
            gl.store(flag, wrong)
    o = acc * gl.expand_dims(gl.convert_layout(1.0 / row_sum, C.rows_o), 1)
    q_tile.store(o.to(dtype))
    lse = m
    if C.lse:
        lse = 0.6931471805599453 * (m + gl.log2(row_sum))
    store_rows(q_tile.load(C.store_layout), lse, work, work.owned, W * 64, C)


@gluon.jit
def _consumer(work, rings, flag, scale_log2, W: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr):
    """One warpgroup: 64 query rows."""
    D: gl.constexpr = C.head_size
    if work.real <= W * 64:
        _give_back(work, rings, C)
    elif work.num_full + work.num_tail == 0:
        nothing = gl.zeros([64, D], dtype, C.store_layout)
        rows: gl.constexpr = C.store_rows
        store_rows(
            nothing, gl.full([64], float("-inf"), gl.float32, rows), work, work.owned, W * 64, C
        )
    else:
        _attend(work, rings, flag, scale_log2, W, dtype, C)


@gluon.jit
def _run(
    dq, dk, dv, dk_box, dv_box, pieces, lists, outs, flag, scale_log2, dtype: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Allocate the rings and start the partitions of one tile."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    CONSUMERS: gl.constexpr = C.consumers
    SLOTS: gl.constexpr = C.stages
    one: gl.constexpr = mbarrier.MBarrierLayout()
    rings = Rings(
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], dq.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BN, D], dk.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BN, D], dv.layout),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one),
    )
    for w in gl.static_range(CONSUMERS):
        mbarrier.init(rings.q_full.index(w), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(rings.k_full.index(slot), count=1)
        mbarrier.init(rings.v_full.index(slot), count=1)
        mbarrier.init(rings.k_empty.index(slot), count=CONSUMERS)
        mbarrier.init(rings.v_empty.index(slot), count=CONSUMERS)
    hopper.fence_async_shared()
    work = _work(pieces, lists, outs, C)
    gl.warp_specialize(
        [
            (_consumer, (work, rings, flag, scale_log2, 0, dtype, C)),
            (_consumer, (work, rings, flag, scale_log2, 1, dtype, C)),
            (_consumer, (work, rings, flag, scale_log2, 2, dtype, C)),
            (_k_producer, (dq, dk, dk_box, work, rings, C)),
            (_v_producer, (dv, dv_box, work, rings, C)),
        ],
        [4, 4, 1, 1],
        [C.registers, C.registers, C.producer_registers, C.producer_registers],
    )


@gluon.jit(do_not_specialize=["num", "heads", "group", "clusters", "whole_room", "room", "lse_h"])
def cluster_kernel(
    dq, dk, dv, dk_box, dv_box, out_ptr, lse_ptr, flag_ptr, start_ptr, length_ptr, cluster_ptr,
    whole_ptr, box_ptr, box_length_ptr, count_ptr,
    num, heads, group, clusters, whole_room, room, out_b, out_s, out_h, lse_h, scale_log2,
    C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per tile. A redo does only the tiles whose flag is set."""
    pieces = Tiles(start_ptr, length_ptr, cluster_ptr, num, heads, group, clusters)
    lists = Lists(whole_ptr, box_ptr, box_length_ptr, count_ptr, whole_room, room)
    outs = Outs(out_ptr, out_b, out_s, out_h, lse_ptr, lse_h)
    flag = flag_ptr + gl.program_id(0)
    dtype: gl.constexpr = dq.dtype
    if C.redo:
        if gl.load(flag) > 0:
            _run(dq, dk, dv, dk_box, dv_box, pieces, lists, outs, flag, scale_log2, dtype, C)
    else:
        _run(dq, dk, dv, dk_box, dv_box, pieces, lists, outs, flag, scale_log2, dtype, C)


FAST = GluonTile(
    consumers=3, keys=64, stages=4, q_registers=False, registers=160, producer_registers=32
)
EXACT = GluonTile(
    consumers=3,
    keys=64,
    stages=4,
    q_registers=False,
    fast=False,
    lazy=True,
    registers=160,
    producer_registers=32,
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pieces: Pieces,
    keys: Groups,
    keep: torch.Tensor,
    *,
    scale: float,
    tile: GluonTile | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the attention of clusters; does not wait for the device.

    Args:
        q: [B, Sq, H, D] in cluster order, stride 1 along D, other strides multiples of 16 bytes.
        k: [B, Sk, Hkv, D], as q.
        v: [B, Sk, Hkv, D], as q.
        pieces: of clusters of queries, at most `TILE_ROWS` each; they cover all rows of q.
        keys: clusters of keys, whose `starts` ascend.
        keep: bool [B, H, Cq, Ck].
        scale: factor of the scores.
        tile: shape of a program.
        return_lse: whether to return the log-sum-exp of the scores as well.

    Returns:
        [B, Sq, H, D] in cluster order, and lse, natural logarithm, fp32 [B, H, Sq], or None. Rows
        without keys give 0 and -inf.
    """
    tile = tile or (FAST if q.dtype == torch.bfloat16 else EXACT)
    batch, _, heads, channels = q.shape
    width = 64 if channels <= 64 else 128
    assert tile.consumers * 64 == TILE_ROWS, "pieces are cut for these tiles"
    boxes = make_boxes(keys, keep)
    starts, lengths, cluster = (
        x.contiguous() for x in (pieces.starts, pieces.lengths, pieces.cluster)
    )
    num = pieces.starts.shape[2]
    total = batch * heads * num
    out, lse = torch.empty_like(q), None
    if return_lse:
        lse = q.new_empty((batch, heads, q.shape[1]), dtype=torch.float32)
    flags = boxes.counts.new_zeros(total if tile.fast else 1)
    arguments = (
        describe_tokens(q, 64, width),
        *(describe_tokens(x, rows, width) for rows in (tile.keys, BOX_KEYS) for x in (k, v)),
        out, out if lse is None else lse, flags,
        starts, lengths, cluster,
        boxes.whole, boxes.starts, boxes.lengths, boxes.counts,
        num, heads, heads // k.shape[2], keep.shape[2],
        boxes.whole.shape[3], boxes.starts.shape[3], *out.stride()[:3], q.shape[1],
        scale / math.log(2.0),
    )  # fmt: skip
    redone = (False, True) if tile.fast else (False,)
    variants = [
        {"C": _shape(tile, channels, redo=redo, lse=return_lse), "num_warps": 4} for redo in redone
    ]
    _launcher().each((total,), *arguments, variants=variants)
    return out, lse


@cache
def _launcher() -> Launcher:
    return Launcher(cluster_kernel)


@cache
def _shape(tile: GluonTile, channels: int, *, redo: bool, lse: bool) -> Shape:
    """Return the compile-time shape of the kernel, of which the consumers use a part."""
    return Shape(
        keys=tile.keys,
        head_size=64 if channels <= 64 else 128,
        channels=channels,
        sub=0,
        q_tiles=1,
        consumers=tile.consumers,
        stages=tile.stages,
        own=False,
        q_registers=tile.q_registers,
        fast=tile.fast and not redo,
        lazy=tile.lazy or redo,
        sync=0,
        ragged=True,
        ordered=False,
        q_starts=True,
        q_lengths=False,
        bits=False,
        one_word=False,
        lse=lse,
        skip=0.0,
        passes=False,
        redo=int(redo),
        registers=tile.registers,
        producer_registers=tile.producer_registers,
    )
