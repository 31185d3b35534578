"""What a program of the SM90 kernel works on: its tile, its steps, and where results go."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multimodal_gen.kernels.hopper_kernel import WarpgroupLayouts

SEARCH = gl.constexpr(256)


class Rings(NamedTuple):
    """Shared memory: tiles, and barriers that say when they are full and empty."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Plan(NamedTuple):
    """The plan as the kernel reads it; `order` and the counts are over rows of the plan."""

    steps: Any
    count: Any
    tail_count: Any
    tail_length: Any
    order: Any
    sweep: Any
    rows: Any
    rep_h: Any
    num_q: Any
    plan_h: Any
    group: Any
    kv_last: Any
    kv_tail: Any
    room: Any
    tail_room: Any
    steps_b: Any
    steps_h: Any
    steps_q: Any
    count_b: Any
    count_h: Any
    count_q: Any
    sweep_b: Any
    q_start: Any
    q_length: Any
    q_start_b: Any
    q_start_h: Any
    q_length_b: Any
    q_length_h: Any
    q_size: Any
    q_total: Any
    total: Any
    blocks: Any
    bits: Any
    bits_b: Any
    bits_h: Any
    words: Any


class Outs(NamedTuple):
    """Where results go."""

    out: Any
    lse: Any
    out_b: Any
    out_s: Any
    out_h: Any
    lse_b: Any
    lse_h: Any


class Work(NamedTuple):
    """One tile: what its producer and its consumers agree on.

    `row` is its first query row in the tensor, `real` and `owned` how many rows from there on are
    attended and written, `tail` the first key of the partial step of a regular plan or the last
    place of the list, `tail_keys` its length or None, `blocks` the block of every step and `bits`
    the words of the first row.
    """

    row_list: Any
    num_full: Any
    num_tail: Any
    tail: Any
    tail_keys: Any
    b: Any
    h: Any
    kv_h: Any
    row: Any
    real: Any
    owned: Any
    out: Any
    out_s: Any
    lse: Any
    sweep: Any
    blocks: Any
    bits: Any
    words: Any


@dataclass(frozen=True, kw_only=True)
class Shape(WarpgroupLayouts):
    """Compile-time shape of the kernel.

    Attributes:
        keys: keys of a step, BN.
        head_size: D, padded to 64 or 128.
        channels: D of the tensors; the copy engine fills the rest with zeros.
        sub: steps per key block; 0 when the list already holds steps.
        q_tiles: tiles per query block.
        consumers: consumer warpgroups of 64 rows.
        stages: tiles in a ring.
        own: whether each consumer has its own query block.
        q_registers: whether Q is kept in registers.
        fast: fixed reference and flags instead of the online softmax.
        lazy: whether the online softmax keeps its reference while it can.
        sync: publish the position in the key sweep every so many steps; 0 never.
        ragged: whether any step may be partial.
        ordered: whether `order` is given.
        q_starts: whether query blocks have starts of their own.
        q_lengths: whether query blocks have lengths of their own.
        bits: whether rows choose among the blocks of their list; the list then holds steps.
        one_word: whether the choice of a row is a single word.
        lse: whether lse is wanted.
        skip: how many powers of two below the reference a step is left out; 0 for none.
        passes: whether a consumer leaves out steps of blocks that none of its rows keeps.
        redo: tiles of which a program computes those that are flagged; 0 where all are computed.
        registers: registers of a consumer thread.
        producer_registers: registers of a producer thread.
    """

    keys: int
    head_size: int
    channels: int
    sub: int
    q_tiles: int
    consumers: int
    stages: int
    own: bool
    q_registers: bool
    fast: bool
    lazy: bool
    sync: int
    ragged: bool
    ordered: bool
    q_starts: bool
    q_lengths: bool
    bits: bool
    one_word: bool
    lse: bool
    skip: float
    passes: bool
    redo: int
    registers: int
    producer_registers: int


@gluon.jit
def locate(position, plan, C: gl.constexpr):
    """Return batch, head and query block of a position in the launch order."""
    outer = position // plan.rows
    row = position % plan.rows
    if C.ordered:
        row = gl.load(plan.order + row)
    h = row // plan.num_q % plan.plan_h + outer % plan.rep_h
    b = row // plan.num_q // plan.plan_h + outer // plan.rep_h
    return b, h, row % plan.num_q


@gluon.jit
def find_work(W: gl.constexpr, tile, plan, outs, C: gl.constexpr):
    """Return the work of a tile, of consumer `W` where each has a query block of its own."""
    if C.own:
        position = tile * C.consumers + W
        inside = position * 0
    else:
        position = tile // C.q_tiles
        inside = tile % C.q_tiles * (C.consumers * 64)
    valid = position < plan.total
    b, h, i = locate(gl.minimum(position, plan.total - 1), plan, C)
    begin = i * plan.q_size
    if C.q_starts:
        begin = gl.load(plan.q_start + b * plan.q_start_b + h * plan.q_start_h + i)
    length = gl.minimum(plan.q_total - begin, plan.q_size)
    if C.q_lengths:
        length = gl.load(plan.q_length + b * plan.q_length_b + h * plan.q_length_h + i)
    owned = length
    if C.q_lengths and not C.q_starts:
        owned = plan.q_size  # the padding of a block is its own, and is set to zero
    owned = gl.where(valid, owned - inside, 0)
    real = gl.where(valid, length - inside, 0)

    b_64 = b.to(gl.int64)
    h_64 = h.to(gl.int64)
    i_64 = i.to(gl.int64)
    row_list = plan.steps + b_64 * plan.steps_b + h_64 * plan.steps_h + i_64 * plan.steps_q
    place = b_64 * plan.count_b + h_64 * plan.count_h + i_64 * plan.count_q
    count = gl.load(plan.count + place)
    num_tail = count * 0
    if C.sub > 0:
        num_full = count * C.sub
        tail = (plan.kv_last * C.sub + plan.kv_tail // C.keys) * C.keys
        if C.ragged:
            last = gl.load(row_list + count - 1, mask=count > 0, other=-1)
            whole = (count - 1) * C.sub + plan.kv_tail // C.keys
            num_full = gl.where(last == plan.kv_last, whole, num_full)
            num_tail = gl.where((last == plan.kv_last) & (plan.kv_tail % C.keys > 0), 1, 0)
        tail_keys = plan.kv_tail % C.keys
    else:
        num_full = count
        tail = plan.room - 1
        if C.ragged:
            num_tail = gl.load(plan.tail_count + place)
        tail_keys = plan.tail_length + place * plan.tail_room
    row = begin + inside
    out = outs.out + b_64 * outs.out_b + h_64 * outs.out_h + row.to(gl.int64) * outs.out_s
    lse = outs.lse + b_64 * outs.lse_b + h_64 * outs.lse_h + row
    kv_h = h // plan.group
    return Work(
        row_list, gl.where(real > 0, num_full, 0), gl.where(real > 0, num_tail, 0), tail,
        tail_keys, b, h, kv_h, row, real, owned, out, outs.out_s, lse,
        plan.sweep + b * plan.sweep_b + kv_h,
        plan.blocks + b_64 * plan.steps_b + h_64 * plan.steps_h + i_64 * plan.steps_q,
        plan.bits + b_64 * plan.bits_b + h_64 * plan.bits_h + row.to(gl.int64) * plan.words,
        plan.words,
    )  # fmt: skip


@gluon.jit
def tail_keys(work, tail, C: gl.constexpr):
    """Return how many keys of a partial step are real."""
    keys = work.tail_keys
    if C.sub == 0:
        keys = gl.load(keys + tail)
    return keys


@gluon.jit
def block_of(work, step, C: gl.constexpr):
    """Return the block of a step."""
    whole = step
    if C.ragged and not C.passes:
        whole = step - gl.minimum(work.num_tail, 1)
    is_whole = (whole >= 0) & (whole < work.num_full)
    tail = gl.maximum(step - work.num_full, 0)
    return gl.load(work.blocks + gl.where(is_whole, whole, work.tail - tail))


@gluon.jit
def block_ahead(work, step, C: gl.constexpr):
    """Return the block of the step after `step`, or of the last one, where rows choose."""
    block = step
    if C.bits:
        block = block_of(work, gl.minimum(step + 1, work.num_full + work.num_tail - 1), C)
    return block


@gluon.jit
def choices(work, first_row, block, layout: gl.constexpr, C: gl.constexpr):
    """Return the words of 64 rows that hold their choice of a block."""
    rows = first_row + gl.arange(0, 64, layout)
    return gl.load(work.bits + rows * work.words + block // 32, mask=rows < work.real, other=0)


@gluon.jit
def lost(words, block):
    """Return 0 for rows that keep a block, -1 for others."""
    return ((words >> (block % 32)) & 1) - 1


@gluon.jit
def infinity(words, block):
    """Return 0 for rows that keep a block, infinity for others; the predicates are needed."""
    return (lost(words, block) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def step_start(work, step, turn, C: gl.constexpr):
    """Return the first key of a step: a partial step if any, the whole ones, other partial ones.

    Where consumers pass over steps, all whole ones come first.
    The whole steps are taken from `turn` on.
    """
    whole = step
    if C.ragged and not C.passes:
        whole = step - gl.minimum(work.num_tail, 1)
    is_whole = (whole >= 0) & (whole < work.num_full)
    if C.sync > 0:
        whole += turn
        whole = gl.where(whole >= work.num_full, whole - work.num_full, whole)
    if C.sub > 0:
        block = gl.load(work.row_list + whole // C.sub, mask=is_whole, other=0)
        start = (block * C.sub + whole % C.sub) * C.keys
        if C.ragged:
            start = gl.where(is_whole, start, work.tail)
    else:
        tail = gl.maximum(step - work.num_full, 0)
        start = gl.load(work.row_list + gl.where(is_whole, whole, work.tail - tail))
    return start


@gluon.jit
def first_turn(work, key, C: gl.constexpr):
    """Return the whole step at which the row's sorted list reaches `key`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    UNIT: gl.constexpr = C.sub if C.sub > 0 else 1
    KEYS: gl.constexpr = C.sub * C.keys if C.sub > 0 else 1
    entries = work.num_full // UNIT
    before = entries * 0
    for first in range(0, entries, SEARCH):
        e = first + gl.arange(0, SEARCH, layout)
        value = gl.load(work.row_list + e, mask=e < entries, other=0) * KEYS
        before += gl.sum(((value < key) & (e < entries)).to(gl.int32), 0)
    return gl.where(before < entries, before * UNIT, 0)


@gluon.jit
def store_rows(values, lse, work, owned, first_row, C: gl.constexpr):
    """Write 64 rows of out and lse, those of the first `owned` ones of the tile."""
    layout: gl.constexpr = values.type.layout
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C.head_size, gl.SliceLayout(0, layout))
    ptrs = work.out + (gl.expand_dims(rows * work.out_s, 1) + gl.expand_dims(channel, 0))
    if C.q_lengths:
        values = gl.where(gl.expand_dims(rows < work.real, 1), values, gl.zeros_like(values))
    mask = gl.expand_dims(rows < owned, 1)
    if C.channels < C.head_size:
        mask = mask & gl.expand_dims(channel < C.channels, 0)
    gl.store(ptrs, values, mask=mask)
    if C.lse:
        rows = first_row + gl.arange(0, 64, lse.type.layout)
        lse = gl.where(rows < work.real, lse, float("-inf"))
        gl.store(work.lse + rows, lse, mask=rows < owned)
