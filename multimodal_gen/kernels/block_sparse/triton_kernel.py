"""Block-sparse attention in portable Triton.

For a tile of BM query rows, over steps of BN keys, with s = scale * log2(e) * q k^T:

    m' = max(m, rowmax s);  p = 2^(s - m');  l = l 2^(m - m') + rowsum p
    acc = acc 2^(m - m') + p v;   out = acc / l;   lse = ln 2 (m + log2 l)

The main loop has no mask: partial steps come after it, in a loop of their own. Where a step's keys
lie is read one step ahead: read in the step itself, it would take a stage from the pipeline of K
and V, which then no longer overlaps with the products.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.call import Call
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import (
    PLAN_NUMBERS,
    Plan,
    WorkList,
    work_list,
)
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.kernels.launch.launcher import Launcher
from multimodal_gen.kernels.shared_kernel import bounds, dot, interpreted, padded_channels

LOG2E = 1.4426950408889634


@triton.jit
def _add(s, highest, v, acc, total, m, scale_log2, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """Add the weights of a step, and their product with V."""
    m_new = tl.maximum(m, highest)
    reference = m_new
    if MASKED:
        # A row that has seen no key yet has m = -inf, and -inf - -inf is a NaN.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale_log2 - reference[:, None])
    alpha = tl.exp2(m - reference)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + dot(p.to(v.dtype), v, UPCAST)
    return acc, total, m_new


@triton.jit
def _update(
    q, k_t, v, acc, total, m, mask, scale_log2, real, below, skipped,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; with `skip` none where all of it lies `below`."""
    s = dot(q, k_t, C.upcast)
    if MASKED:
        s = tl.where(mask, s, float("-inf"))
    highest = tl.max(s, 1) * scale_log2
    if C.skip:
        seen = real & (highest > float("-inf"))
        gap = tl.where(seen, highest - tl.where(seen, m, 0.0), float("-inf"))
        nearest = tl.max(gap, 0)
        if nearest > -below:
            acc, total, m = _add(s, highest, v, acc, total, m, scale_log2, MASKED, C.upcast)
        else:
            skipped += (nearest > float("-inf")).to(tl.int32)
    else:
        acc, total, m = _add(s, highest, v, acc, total, m, scale_log2, MASKED, C.upcast)
    return acc, total, m, skipped


class Source(NamedTuple):
    """What rows of a head are loaded from: a base or a descriptor, and a tile's places in it."""

    base: Any
    tile: Any
    b: Any
    h: Any
    stride: Any


class Tile(NamedTuple):
    """What a program works on.

    `inside` are its rows in their block, `real` which of them there are, `some` whether there are
    any, and `begin` the first one in the tensor. `list`, `blocks` and `tails` are where its steps,
    their blocks and the lengths of partial ones stand; `bits` the choices of its rows, or of all
    rows of a head where it is one of keys. `last_key` is the last one that the first row sees under
    causality.
    """

    b: Any
    h: Any
    i: Any
    begin: Any
    inside: Any
    real: Any
    some: Any
    list: Any
    blocks: Any
    tails: Any
    bits: Any
    bits_s: Any
    bits_w: Any
    num_full: Any
    num_tail: Any
    last_key: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Compile-time shape of a program, which has a tile of rows, and takes steps of others.

    Attributes:
        rows: rows of a tile.
        step: rows of a step.
        channels: D.
        width: D, padded to a power of two.
        tiles: tiles of a block.
        sub: steps of a listed block; 0 where lists hold steps.
        ragged_end: whether the last of all blocks may end in a partial step.
        starts: whether blocks of tiles have starts of their own.
        lengths: whether they have lengths of their own.
        ordered: whether there is an order.
        bits: whether rows choose among the blocks of their list.
        causal: whether lists hold every block, and the steps that cross the diagonal are taken as
            partial ones.
        of_keys: whether tiles are of keys, and the plan is the transposed one.
        stages: steps that are loaded ahead.
        upcast: whether the interpreter multiplies.
        tma: whether tensors are descriptors.
        lse: whether lse is wanted.
        skip: whether steps are left out.
    """

    rows: int
    step: int
    channels: int
    width: int
    tiles: int
    sub: int
    ragged_end: bool
    starts: bool
    lengths: bool
    ordered: bool
    bits: bool
    causal: bool
    of_keys: bool
    stages: int
    upcast: bool
    tma: bool
    lse: bool = False
    skip: bool = False


@triton.jit
def source(x, strides, b, h, rows, channels, C: tl.constexpr):
    """Return what is loaded of a head, in tiles of these rows and channels, one of them first."""
    if not C.tma:
        x += b * strides[0] + h * strides[2]
    return Source(x, rows * strides[1] + channels * strides[3], b, h, strides[1])


@triton.jit
def load_rows(x, start, mask, ROWS: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """Return [ROWS, width] from row `start` on; through the copy engine `x` has a descriptor."""
    if C.tma:
        corner = [x.b.to(tl.int32), x.h.to(tl.int32), start.to(tl.int32), 0]
        rows = x.base.load(corner).reshape(ROWS, C.width)
        if MASKED:
            rows = tl.where(mask, rows, 0.0)
    elif MASKED:
        rows = tl.load(x.base + start * x.stride + x.tile, mask=mask, other=0.0)
    else:
        rows = tl.load(x.base + start * x.stride + x.tile)
    return rows


@triton.jit
def _load_step(k, v, start, k_mask, v_mask, MASKED: tl.constexpr, C: tl.constexpr):
    """Return k^T [width, step] and v [step, width] of the keys from `start` on.

    Through the copy engine channels past D arrive as zeros.
    """
    k_t = load_rows(k, start, k_mask, C.step, MASKED and not C.tma, C)
    if C.tma:
        k_t = tl.trans(k_t)
    # A weight of zero does not keep out what is not finite.
    return k_t, load_rows(v, start, v_mask, C.step, MASKED, C)


@triton.jit
def row_choice(tile, block, rows, real):
    """Whether each query row keeps `block`."""
    at = tile.bits + rows * tile.bits_s + (block // 32) * tile.bits_w
    words = tl.load(at, mask=real, other=0)
    return ((words >> (block % 32)) & 1) != 0


@triton.jit
def _number_of_steps(list_ptr, at, plan, C: tl.constexpr):
    """Return how many whole and how many partial steps a list has."""
    count = tl.load(plan.count + at)
    num_full = count
    if C.sub > 0:
        num_full = count * C.sub
        num_tail = 0
        if C.ragged_end:
            end = tl.load(list_ptr + (count - 1), mask=count > 0, other=-1)
            if end == plan.last:
                num_full = (count - 1) * C.sub + plan.tail // C.step
                num_tail = (plan.tail % C.step > 0).to(tl.int32)
    else:
        num_tail = tl.load(plan.tail_count + at)
    return num_full, num_tail


@triton.jit
def _causal_steps(num_full, num_tail, first_row, plan, C: tl.constexpr):
    """Return as many for a tile under causality, and the last key that its first row sees."""
    kv_total = plan.last * C.sub * C.step + plan.tail
    last_key = first_row + kv_total - plan.total
    some = num_full + num_tail > 0
    num_full = tl.minimum(num_full, tl.maximum(last_key + 1, 0) // C.step)
    last = tl.minimum(tl.maximum(last_key + C.rows, 0), kv_total)
    num_tail = tl.where(some, tl.cdiv(last, C.step) - num_full, 0)
    return num_full, num_tail, last_key


@triton.jit
def find_tile(plan, block_ptr, bits_ptr, bits_at, C: tl.constexpr):
    """Return the tile of this program.

    Rows of the plan run fastest, in `order`; heads and batches that share them slowest, so that
    neighbours read the same keys.
    """
    pid = tl.program_id(0)
    sub = pid % C.tiles
    position = pid // C.tiles
    outer = position // plan.rows
    row = position % plan.rows
    if C.ordered:
        row = tl.load(plan.order + row)
    h = (row // plan.num % plan.plan_h + outer % plan.rep_h).to(tl.int64)
    b = (row // plan.num // plan.plan_h + outer // plan.rep_h).to(tl.int64)
    i = (row % plan.num).to(tl.int64)
    row_of_list = b * plan.list_b + h * plan.list_h + i * plan.list_n
    list_ptr = plan.list + row_of_list
    at = b * plan.count_b + h * plan.count_h + i * plan.count_n
    begin, length = bounds(
        b, h, i, plan.size, plan.total, plan.start, plan.length,
        plan.start_b, plan.start_h, plan.length_b, plan.length_h, C.starts, C.lengths,
    )  # fmt: skip
    begin += sub * C.rows
    inside = sub * C.rows + tl.arange(0, C.rows)
    num_full, num_tail = _number_of_steps(list_ptr, at, plan, C)
    some = sub * C.rows < length
    num_full = tl.where(some, num_full, 0)
    num_tail = tl.where(some, num_tail, 0)
    last_key = 0
    if C.causal and not C.of_keys:
        num_full, num_tail, last_key = _causal_steps(num_full, num_tail, begin, plan, C)
    if C.bits:
        bits_ptr += b * bits_at[0] + h * bits_at[1]
        if not C.of_keys:
            bits_ptr += begin.to(tl.int64) * bits_at[2]
    return Tile(
        b, h, i, begin, inside, inside < length, some, list_ptr, block_ptr + row_of_list,
        plan.tail_length + at * plan.tail_room, bits_ptr, bits_at[2], bits_at[3],
        num_full, num_tail, last_key,
    )  # fmt: skip


@triton.jit
def whole_step(step, entry, tile, C: tl.constexpr):
    """Return first row and block of a whole step, and the entry of the list for the next one."""
    block = entry
    if C.sub > 0:
        start = (entry * C.sub + step % C.sub) * C.step
        at_next = (step + 1) // C.sub
    else:
        start = entry
        at_next = step + 1
        if C.bits and not C.of_keys:
            block = tl.load(tile.blocks + step)
    entry = tl.load(tile.list + at_next, mask=step + 1 < tile.num_full, other=0)
    return start.to(tl.int64), block, entry


@triton.jit
def whole_mask(tile, block, C: tl.constexpr):
    """Return which rows of a tile of queries see the keys of a whole step."""
    mask = True
    if C.bits:
        mask = row_choice(tile, block, tl.arange(0, C.rows), tile.real)[:, None]
    return mask


@triton.jit
def partial_step(step, tile, plan, C: tl.constexpr):
    """Return the first key of a partial step, which keys there are, and which rows see them."""
    n = tl.arange(0, C.step)
    in_tile = tl.arange(0, C.rows)
    block = plan.last
    if C.causal:
        start = (tile.num_full + step) * C.step
        length = plan.last * C.sub * C.step + plan.tail - start
    elif C.sub > 0:
        start = (plan.last * C.sub + plan.tail // C.step) * C.step
        length = plan.tail % C.step
    else:
        start = tl.load(tile.list + (plan.room - 1 - step))
        length = tl.load(tile.tails + step)
        if C.bits and not C.of_keys:
            block = tl.load(tile.blocks + (plan.room - 1 - step))
    start = start.to(tl.int64)
    real_n = n < length
    mask = real_n[None, :]
    if C.causal:
        mask = mask & (start + n[None, :] <= (tile.last_key + in_tile)[:, None])
    if C.bits and not C.of_keys:
        mask = mask & row_choice(tile, block, in_tile, tile.real)[:, None]
    return start, real_n, mask


@triton.jit
def owned_rows(tile, plan, C: tl.constexpr):
    """Return which rows of a tile are written."""
    owned = tile.real
    if C.lengths and not C.starts:
        owned = tile.inside < plan.size  # the padding of a block is its own, and is set to zero
    return owned


@triton.jit
def store_rows(ptr, strides, values, tile, plan, C: tl.constexpr):
    """Write the rows of a tile to [B, S, H, D]."""
    d = tl.arange(0, C.width)[None, :]
    ptr += tile.b * strides[0] + tile.h * strides[2] + tile.begin.to(tl.int64) * strides[1]
    ptrs = ptr + tl.arange(0, C.rows)[:, None] * strides[1] + d
    mask = owned_rows(tile, plan, C)[:, None] & (d < C.channels)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_lse(ptr, strides, values, tile, plan, C: tl.constexpr):
    """Write the rows of a tile to [B, H, S]."""
    ptr += tile.b * strides[0] + tile.h * strides[1] + tile.begin.to(tl.int64)
    tl.store(ptr + tl.arange(0, C.rows), values, mask=owned_rows(tile, plan, C))


@triton.jit(do_not_specialize=PLAN_NUMBERS)
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
    rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
    list_b, list_h, list_n, count_b, count_h, count_n,
    start_b, start_h, length_b, length_h, size, total,
    block_ptr, bits_ptr, q_at, k_at, v_at, out_at, lse_at, bits_at, scale_log2, skip_ptr, below,
    C: tl.constexpr,
):  # fmt: skip
    """Grid [B * H * Nq * tiles]."""
    plan = Plan(
        list_ptr, count_ptr, tail_count_ptr, tail_length_ptr, order_ptr, start_ptr, length_ptr,
        rows, rep_h, num, plan_h, group, last, tail, room, tail_room,
        list_b, list_h, list_n, count_b, count_h, count_n,
        start_b, start_h, length_b, length_h, size, total, 0, 0,
    )  # fmt: skip
    tile = find_tile(plan, block_ptr, bits_ptr, bits_at, C)
    ROWS: tl.constexpr = C.rows
    WIDTH: tl.constexpr = C.width
    in_tile = tl.arange(0, ROWS)
    n = tl.arange(0, C.step)
    d = tl.arange(0, WIDTH)
    real_d = d < C.channels
    q_source = source(q_ptr, q_at, tile.b, tile.h, in_tile[:, None], d[None, :], C)
    k = source(k_ptr, k_at, tile.b, tile.h // group, n[None, :], d[:, None], C)
    v = source(v_ptr, v_at, tile.b, tile.h // group, n[:, None], d[None, :], C)
    own = tile.real[:, None] & real_d[None, :]
    first_row = tile.begin.to(tl.int64)
    q = load_rows(q_source, first_row, own, C.rows, C.lengths or not C.tma, C)

    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    skipped = tl.full([], 0, tl.int32)
    entry = tl.load(tile.list, mask=tile.num_full > 0, other=0)
    for step in tl.range(0, tile.num_full, num_stages=C.stages):
        start, block, entry = whole_step(step, entry, tile, C)
        mask = whole_mask(tile, block, C)
        k_t, values = _load_step(
            k, v, start, real_d[:, None], real_d[None, :], C.channels < C.width and not C.tma, C
        )
        acc, weight, m, skipped = _update(
            q, k_t, values, acc, weight, m, mask, scale_log2, tile.real, below, skipped, C.bits, C
        )

    for step in tl.range(0, tile.num_tail, num_stages=1):
        start, real_n, mask = partial_step(step, tile, plan, C)
        k_mask = real_n[None, :] & real_d[:, None]
        v_mask = real_n[:, None] & real_d[None, :]
        k_t, values = _load_step(k, v, start, k_mask, v_mask, True, C)
        acc, weight, m, skipped = _update(
            q, k_t, values, acc, weight, m, mask, scale_log2, tile.real, below, skipped, True, C
        )

    if C.skip:
        tl.atomic_add(skip_ptr, skipped.to(tl.int64))
        tl.atomic_add(skip_ptr + 1, (tile.num_full + tile.num_tail).to(tl.int64))
    nothing = (weight == 0.0) | ~tile.real
    weight = tl.where(nothing, 1.0, weight)
    out = acc / weight[:, None]
    store_rows(out_ptr, out_at, tl.where(nothing[:, None], 0.0, out), tile, plan, C)
    if C.lse:
        lse = tl.where(nothing, float("-inf"), 0.6931471805599453 * (m + tl.log2(weight)))
        store_lse(lse_ptr, lse_at, lse, tile, plan, C)


_launch_attention = Launcher(_attention_kernel)


def attend(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    tile: TritonTile,
    copy_engine: bool = False,
) -> None:
    """Launch the kernel; writes `out` [B, Sq, H, D] and `lse` [B, H, Sq].

    Args:
        call: with tensors of any strides; what is skipped are steps of `tile.keys` keys.
        out: contiguous; only rows that belong to a query block are written.
        lse: contiguous fp32, or None.
        tile: shape of a program, as `triton_tile` chooses it.
        copy_engine: load through tensor descriptors, which needs SM90 or later, stride 1 along D
            and all other strides and addresses multiples of 16 bytes.
    """
    q, k, v, plan = call[:4]
    skip = call.skip
    batch, _, heads, head_size = q.shape
    work = work_list(plan, tile.keys, batch, heads, k.shape[2])
    refuse_cut(plan, work, tile.keys)
    bits = bits_of(plan, batch, heads)
    more = {"lse": lse is not None, "skip": skip is not None}
    shape = shape_of(plan, work, tile, head_size, tma=copy_engine, **more)
    inputs: tuple[object, ...] = (q, k, v)
    if copy_engine:
        rows = (tile.rows, tile.keys, tile.keys)
        inputs = tuple(map(describe, (q, k, v), rows, [shape.width] * 3))
    _launch_attention(
        (work.num * shape.tiles,),
        *inputs, out, out if lse is None else lse, *work.arguments, work.blocks, bits,
        q.stride(), k.stride(), v.stride(), out.stride(),
        (0, 0) if lse is None else lse.stride()[:2], bits.stride(), call.scale * LOG2E,
        None if skip is None else skip.counts_on(q.device), None if skip is None else skip.octaves,
        C=shape, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def shape_of(
    plan: BlockPlan,
    work: WorkList,
    tile: TritonTile,
    channels: int,
    *,
    width: int = 0,
    tma: bool = False,
    of_keys: bool = False,
    **more: bool,
) -> TileShape:
    """Return the compile-time shape of programs, made once per plan.

    `work` is that of the transposed plan where they are `of_keys`, and `width` is not 0 where
    channels are padded to more than they need; the rest is in `TileShape`.
    """
    key = ("shape", tile, channels, width, tma, of_keys, *more.items())
    known: TileShape | None = plan.cache.get(key)
    if known is not None:
        return known
    blocks, rows, step = plan.q, tile.rows, tile.keys
    if of_keys:
        blocks, rows, step = plan.kv, tile.keys, tile.rows
    made = TileShape(
        rows=rows, step=step, channels=channels,
        width=width or padded_channels(channels),
        tiles=-(-blocks.size // rows), sub=work.lists.sub, ragged_end=work.ragged,
        starts=blocks.starts is not None, lengths=blocks.lengths is not None,
        # Under causality the first keys, which start first, are seen by the most queries.
        ordered=work.lists.ordered and not (of_keys and plan.causal),
        bits=plan.row_bits is not None, causal=plan.causal, of_keys=of_keys,
        stages=tile.stages, upcast=interpreted(), tma=tma, **more,
    )  # fmt: skip
    return plan.remember(key, made)


def refuse_cut(plan: BlockPlan, work: WorkList, keys: int) -> None:
    """Raise `UsageError` where a plan is causal and steps of so many keys are none of its blocks.

    `work` has such steps.
    """
    if plan.causal and not work.lists.sub:
        raise UsageError(
            f"`plan` must have key blocks of a multiple of {keys} keys to be causal, "
            f"got {plan.kv.size}"
        )


def bits_of(plan: BlockPlan, batch: int, heads: int) -> torch.Tensor:
    """Return the blocks that rows choose, [B, H, Sq, words]; something to point at without any."""
    bits = plan.counts.unsqueeze(-1) if plan.row_bits is None else plan.row_bits
    return bits.expand(batch, heads, -1, -1)


def describe(tensor: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describe [B, S, H, D] to the copy engine as [B, H, S, D] in boxes of [1, 1, rows, width]."""
    order = (0, 2, 1, 3)
    # Strides of dimensions of size 1 mean nothing, but must be multiples of 16 bytes as well.
    strides = [tensor.stride(i) if tensor.shape[i] > 1 else 64 for i in order[:3]]
    sizes = [tensor.shape[i] for i in order]
    return TensorDescriptor(tensor, sizes, [*strides, 1], [1, 1, rows, width])
