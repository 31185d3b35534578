"""Attention of clusters to clusters on SM90 in Gluon, on lists of whole steps and boxes of keys.

The consumers are those of the block-sparse kernel. Its producer loads steps of keys that adjoin;
here most steps do, and the others are put together from boxes of eight, each copied to its place
in the tile. One producer warp loads K and another V, because many small copies take their time to
start. A tile has the rows of one cluster, so all its consumers work on one list; a consumer
without rows only gives back what it is handed.
"""

import math
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.block_sparse.gluon_kernel import consume
from multimodal_gen.kernels.block_sparse.gluon_work_kernel import Outs, Shape, make_rings
from multimodal_gen.kernels.block_sparse.tuning import GluonTile
from multimodal_gen.kernels.cluster_attention.boxes_kernel import BOX_KEYS, STEP, make_boxes
from multimodal_gen.kernels.cluster_attention.plan import TILE_ROWS, Groups, Pieces
from multimodal_gen.kernels.hopper_kernel import fetch, specialize, wait_full
from multimodal_gen.kernels.launch.compat import async_load
from multimodal_gen.kernels.launch.descriptors import describe_tokens
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import wide_channels

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


class Work(NamedTuple):
    """One tile. `num_full` steps need no mask, of which `num_boxed` consist of boxes.

    `tail_keys` is where the lengths of the boxes of the others stand.
    """

    whole: Any
    boxes: Any
    tail_keys: Any
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
        lists.lengths + of * lists.room + boxed * BOXES,
        gl.where(real > 0, whole + boxed, 0), boxed, gl.where(real > 0, tail, 0),
        b, h, h // pieces.group, row, real, real, out, outs.out_s,
        outs.lse + b.to(gl.int64) * outs.lse_b + h.to(gl.int64) * outs.lse_h + row,
    )  # fmt: skip


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
        fetch(desc, [work.b, work.kv_h, start, 0], full, tile)
    else:
        # The masked step that comes first follows the unmasked ones in the list.
        index = gl.where(i < 0, work.num_boxed, boxed)
        index = gl.where(i >= work.num_full, work.num_boxed + i - work.num_full + 1, index)
        boxes = work.boxes + index * BOXES
        starts = [gl.load(boxes + j) for j in (0, 1, 2, 3, 4, 5, 6, 7)]
        mbarrier.wait(rings_empty.index(slot), phase)
        mbarrier.expect(full, C.keys * C.head_size * 2)
        for j in gl.static_range(BOXES):
            box = tile.slice(j * BOX, BOX, dim=2)
            async_load(box_desc, [work.b, work.kv_h, starts[j], 0], full, box)


@gluon.jit
def _producer(fed, W: gl.constexpr, C: gl.constexpr):
    """One warp: the first loads Q once, and K of every step, the second V of every step."""
    dq, d_step, d_box, work, rings = fed
    CONSUMERS: gl.constexpr = C.consumers
    steps = work.num_full + work.num_tail
    if W == 0:
        if steps > 0:
            for c in gl.static_range(CONSUMERS):
                if c * 64 < work.real:
                    place = [work.b, work.h, work.row + c * 64, 0]
                    fetch(dq, place, rings.q_full.index(c), rings.q.index(c))
            for step in range(steps):
                _load(d_step, d_box, work, step, rings.k_full, rings.k_empty, rings.k, C)
    else:
        for step in range(steps):
            _load(d_step, d_box, work, step, rings.v_full, rings.v_empty, rings.v, C)


@gluon.jit
def _give_back(work, rings, C: gl.constexpr):
    """Stand in for a consumer that has no rows."""
    for step in range(work.num_full + work.num_tail):
        mbarrier.arrive(rings.k_empty.index(wait_full(rings.k_full, step, 0, C)))
        mbarrier.arrive(rings.v_empty.index(wait_full(rings.v_full, step, 0, C)))


@gluon.jit
def _consumer(given, W: gl.constexpr, C: gl.constexpr):
    """One warpgroup: 64 query rows."""
    work, rings, _, _ = given
    if work.real <= W * 64:
        _give_back(work, rings, C)
    else:
        consume(given, W, C)


@gluon.jit
def _run(dq, dk, dv, dk_box, dv_box, pieces, lists, outs, flags, scale_log2, C: gl.constexpr):
    """Allocate the rings and start the partitions of one tile."""
    rings = make_rings(dq, dk, dv, C.stages, C.consumers, C)
    work = _work(pieces, lists, outs, C)
    fed = ((dq, dk, dk_box, work, rings), (dq, dv, dv_box, work, rings))
    specialize(_consumer, ((work, rings, flags, scale_log2),), _producer, fed, C)


@gluon.jit(
    do_not_specialize=["num", "heads", "group", "clusters", "whole_room", "room", "lse_b", "lse_h"]
)
def cluster_kernel(
    dq, dk, dv, dk_box, dv_box, out_ptr, lse_ptr, flag_ptr, start_ptr, length_ptr, cluster_ptr,
    whole_ptr, box_ptr, box_length_ptr, count_ptr,
    num, heads, group, clusters, whole_room, room, out_b, out_s, out_h, lse_b, lse_h, scale_log2,
    C: gl.constexpr,
):  # fmt: skip
    """Grid: one program per tile. A redo does only the tiles whose flag is set."""
    pieces = Tiles(start_ptr, length_ptr, cluster_ptr, num, heads, group, clusters)
    lists = Lists(whole_ptr, box_ptr, box_length_ptr, count_ptr, whole_room, room)
    outs = Outs(out_ptr, lse_ptr, out_b, out_s, out_h, lse_b, lse_h)
    if C.redo:
        flags = flag_ptr + gl.program_id(0)
        if gl.load(flags) > 0:
            _run(dq, dk, dv, dk_box, dv_box, pieces, lists, outs, flags, scale_log2, C)
    else:
        _run(dq, dk, dv, dk_box, dv_box, pieces, lists, outs, flag_ptr, scale_log2, C)


_launcher = Launcher(cluster_kernel)

FAST = GluonTile(
    consumers=3, keys=64, stages=4, q_registers=False, registers=160, producer_registers=32
)
EXACT = replace(FAST, fast=False, lazy=True)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pieces: Pieces,
    keys: Groups,
    cluster_mask: torch.Tensor,
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
        cluster_mask: bool [B, H, Cq, Ck].
        scale: factor of the scores.
        tile: shape of a program.
        return_lse: whether to return the log-sum-exp of the scores as well.

    Returns:
        [B, Sq, H, D] in cluster order, and lse, natural logarithm, fp32 [B, H, Sq], or None. Rows
        without keys give 0 and -inf.
    """
    tile = tile or (FAST if q.dtype == torch.bfloat16 else EXACT)
    batch, _, heads, channels = q.shape
    width = wide_channels(channels)
    assert tile.consumers * 64 == TILE_ROWS, "pieces are cut for these tiles"
    boxes = make_boxes(keys, cluster_mask)
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
        *(x.contiguous() for x in pieces), *boxes,
        num, heads, heads // k.shape[2], cluster_mask.shape[2],
        boxes.whole.shape[3], boxes.starts.shape[3],
        *out.stride()[:3], heads * q.shape[1], q.shape[1],
        scale / math.log(2.0),
    )  # fmt: skip
    shapes = [_shape(tile, channels, redo=redo, lse=return_lse) for redo in range(1 + tile.fast)]
    variants = [{"C": shape, "num_warps": 4} for shape in shapes]
    _launcher.each((total,), *arguments, variants=variants)
    return out, lse


@cache
def _shape(tile: GluonTile, channels: int, *, redo: int, lse: bool) -> Shape:
    """Return the compile-time shape of the kernel, of which the consumers use a part."""
    if redo:
        tile = replace(tile, fast=False, lazy=True)
    return Shape(
        **asdict(tile),
        head_size=wide_channels(channels),
        channels=channels,
        lse=lse,
        box=BOX_KEYS,
        q_starts=True,
        redo=redo,
    )
