"""What a program of the SM90 kernel works on, and the warp that loads it.

A step has BN keys. They lie together, or in two halves anywhere: pairs, for blocks of BN / 2 keys.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.launch.compat import async_load


class Rings(NamedTuple):
    """Shared memory: tiles, and barriers that say when they are full and empty."""

    q: Any
    k: Any
    v: Any
    out: Any
    q_full: Any
    full: Any
    empty: Any


class Plan(NamedTuple):
    """The plan as the kernel reads it; `order` and the counts are over rows of the plan."""

    steps: Any
    count: Any
    tail_count: Any
    tail_length: Any
    order: Any
    q_start: Any
    q_length: Any
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
    q_start_b: Any
    q_start_h: Any
    q_length_b: Any
    q_length_h: Any
    q_size: Any
    q_slots: Any
    q_total: Any


class Scales(NamedTuple):
    """Scales of queries (per row, in the units of base-2 exponents), keys and values (per step)."""

    q: Any
    k: Any
    v: Any
    shift: Any
    q_rows: Any
    kv_steps: Any


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

    `num_full` and `num_tail` count whole and partial units, of which a step has one or, in pairs,
    two; of `steps`, `lead` partial ones come first, then `whole` ones, then partial ones of one
    unit.
    `slot` is its first row in the quantised queries, `row` in the tensor that results go to; `real`
    and `owned` say how many rows from there on are attended and written. `tail` is the first key of
    the partial unit of a regular plan or the last place of the list, `tail_keys` its length or
    where that stands.
    """

    row_list: Any
    num_full: Any
    num_tail: Any
    lead: Any
    whole: Any
    steps: Any
    tail: Any
    tail_keys: Any
    b: Any
    h: Any
    kv_h: Any
    slot: Any
    real: Any
    owned: Any
    out: Any
    out_s: Any
    lse: Any
    q_scale: Any
    shift: Any
    k_scale: Any
    v_scale: Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Compile-time shape of the kernel.

    Attributes:
        keys: keys of a step, BN.
        unit: keys that lie together, BN or, in pairs, BN / 2: what lists and scales count in.
        head_size: D, padded to 64 or 128.
        channels: D of the results.
        sub: units per key block; 0 when the list already holds units.
        q_tiles: tiles per query block.
        consumers: consumer warpgroups of 64 rows.
        stages: tiles in a ring.
        ragged: whether any step may be partial.
        ordered: whether `order` is given.
        q_starts: whether query blocks have starts of their own.
        q_lengths: whether query blocks have lengths of their own.
        lse: whether lse is wanted.
        e4m3: whether values, and weights, are e4m3 numbers, else bfloat16.
        fast: whether the first step's maximum stays the reference; bfloat16 only.
        redo: whether only flagged tiles are computed.
        q_registers: whether Q is kept in registers.
        registers: registers of a consumer thread.
        producer_registers: registers of a producer thread.
    """

    keys: int
    unit: int
    head_size: int
    channels: int
    sub: int
    q_tiles: int
    consumers: int
    stages: int
    ragged: bool
    ordered: bool
    q_starts: bool
    q_lengths: bool
    lse: bool
    e4m3: bool
    fast: bool
    redo: bool
    q_registers: bool
    registers: int
    producer_registers: int


@gluon.jit
def find_work(plan, scales, outs, C: gl.constexpr):
    """Return the work of this program."""
    position = gl.program_id(0) // C.q_tiles
    inside = gl.program_id(0) % C.q_tiles * (C.consumers * 64)
    outer = position // plan.rows
    place = position % plan.rows
    if C.ordered:
        place = gl.load(plan.order + place)
    h = place // plan.num_q % plan.plan_h + outer % plan.rep_h
    b = place // plan.num_q // plan.plan_h + outer // plan.rep_h
    i = place % plan.num_q
    begin = i * plan.q_size
    if C.q_starts:
        begin = gl.load(plan.q_start + b * plan.q_start_b + h * plan.q_start_h + i)
    length = gl.minimum(plan.q_total - begin, plan.q_size)
    if C.q_lengths:
        length = gl.load(plan.q_length + b * plan.q_length_b + h * plan.q_length_h + i)
    owned = length
    if C.q_lengths and not C.q_starts:
        owned = plan.q_size  # the padding of a block is its own, and is set to zero
    real = length - inside

    b_64 = b.to(gl.int64)
    h_64 = h.to(gl.int64)
    i_64 = i.to(gl.int64)
    row_list = plan.steps + b_64 * plan.steps_b + h_64 * plan.steps_h + i_64 * plan.steps_q
    at = b_64 * plan.count_b + h_64 * plan.count_h + i_64 * plan.count_q
    count = gl.load(plan.count + at)
    num_tail = count * 0
    if C.sub > 0:
        num_full = count * C.sub
        tail = (plan.kv_last * C.sub + plan.kv_tail // C.unit) * C.unit
        if C.ragged:
            last = gl.load(row_list + count - 1, mask=count > 0, other=-1)
            whole = (count - 1) * C.sub + plan.kv_tail // C.unit
            num_full = gl.where(last == plan.kv_last, whole, num_full)
            num_tail = gl.where((last == plan.kv_last) & (plan.kv_tail % C.unit > 0), 1, 0)
        tail_keys = plan.kv_tail % C.unit
    else:
        num_full = count
        tail = plan.room - 1
        if C.ragged:
            num_tail = gl.load(plan.tail_count + at)
        tail_keys = plan.tail_length + at * plan.tail_room
    num_full = gl.where(real > 0, num_full, 0)
    num_tail = gl.where(real > 0, num_tail, 0)
    if C.unit < C.keys:
        lead = gl.minimum(num_full % 2 + num_tail, 1)
        whole = num_full // 2
    else:
        lead = gl.minimum(num_tail, 1)
        whole = num_full
    steps = lead + whole + gl.maximum(num_tail - 1, 0)
    row = begin + inside
    kv_h = h // plan.group
    heads = plan.plan_h * plan.rep_h
    head = b_64 * heads + h
    kv_head = b_64 * (heads // plan.group) + kv_h
    slot = i * plan.q_slots + inside
    return Work(
        row_list, num_full, num_tail, lead, whole, steps, tail, tail_keys,
        b, h, kv_h, slot, real, owned - inside,
        outs.out + b_64 * outs.out_b + h_64 * outs.out_h + row.to(gl.int64) * outs.out_s,
        outs.out_s, outs.lse + b_64 * outs.lse_b + h_64 * outs.lse_h + row,
        scales.q + head * scales.q_rows + slot, scales.shift + head * scales.q_rows + slot,
        scales.k + kv_head * scales.kv_steps, scales.v + kv_head * scales.kv_steps,
    )  # fmt: skip


@gluon.jit
def _unit_start(work, full, tail, is_full, C: gl.constexpr):
    """Return the first key of whole unit `full`, or of partial unit `tail`."""
    if C.sub > 0:
        block = gl.load(work.row_list + full // C.sub, mask=is_full, other=0)
        start = (block * C.sub + full % C.sub) * C.unit
        if C.ragged:
            start = gl.where(is_full, start, work.tail)
    else:
        start = gl.load(work.row_list + gl.where(is_full, full, work.tail - tail))
    return start


@gluon.jit
def step_starts(work, step, C: gl.constexpr):
    """Return the first keys of a step's two units, which are one unless there are pairs."""
    whole = step - work.lead
    is_whole = (whole >= 0) & (whole < work.whole)
    tail = gl.maximum(whole - work.whole + 1, 0)
    if C.unit < C.keys:
        # The step ahead has the whole unit that is left over, if any, and the first partial one.
        odd = (whole < 0) & (work.num_full % 2 > 0)
        full = gl.where(is_whole, 2 * whole, work.num_full - 1)
        first = _unit_start(work, full, tail, is_whole | odd, C)
        second = _unit_start(work, full + 1, tail, is_whole, C)
        second = gl.where(is_whole | (odd & (work.num_tail > 0)), second, first)
    else:
        first = _unit_start(work, whole, tail, is_whole, C)
        second = first
    return first, second


@gluon.jit
def step_keys(work, step, C: gl.constexpr):
    """Return how many keys of a partial step are real."""
    tail = gl.maximum(step - work.lead - work.whole + 1, 0)
    keys = work.tail_keys
    if C.sub == 0:
        keys = gl.load(keys + tail, mask=work.num_tail > 0, other=0)
    if C.unit < C.keys:
        keys = gl.where(work.num_tail > 0, keys, 0)
        odd = (step < work.lead) & (work.num_full % 2 > 0)
        keys += gl.where(odd, C.unit, 0)
    return keys


@gluon.jit
def _load(descriptor, work, starts, full, tile, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Load K or V of a step; with COLUMNS, tensors are [D, keys]."""
    if COLUMNS:
        async_load(descriptor, [work.b, work.kv_h, 0, starts[0]], full, tile)
    elif C.unit < C.keys:
        for half in gl.static_range(2):
            async_load(
                descriptor, [work.b, work.kv_h, starts[half], 0], full,
                tile.slice(half * C.unit, C.unit, dim=2),
            )  # fmt: skip
    else:
        async_load(descriptor, [work.b, work.kv_h, starts[0], 0], full, tile)


@gluon.jit
def produce(dq, dk, dv, work, rings, C: gl.constexpr):
    """One warp: loads Q once, and in turn K of every step with V of the step before."""
    K_BYTES: gl.constexpr = C.keys * C.head_size
    V_BYTES: gl.constexpr = K_BYTES if C.e4m3 else 2 * K_BYTES
    CONSUMERS: gl.constexpr = C.consumers
    steps = work.steps
    if steps > 0:
        starts = step_starts(work, 0, C)
        for c in gl.static_range(CONSUMERS):
            mbarrier.expect(rings.q_full.index(c), 64 * C.head_size)
            async_load(
                dq, [work.b, work.h, work.slot + c * 64, 0], rings.q_full.index(c),
                rings.q.index(c),
            )  # fmt: skip
        mbarrier.expect(rings.full.index(0), K_BYTES)
        _load(dk, work, starts, rings.full.index(0), rings.k.index(0), False, C)
        before = starts
        starts = step_starts(work, gl.minimum(1, steps - 1), C)
        for step in range(1, steps):
            following = step_starts(work, gl.minimum(step + 1, steps - 1), C)
            slot = step % C.stages
            full = rings.full.index(slot)
            mbarrier.wait(rings.empty.index(slot), ((step // C.stages) & 1) ^ 1)
            mbarrier.expect(full, K_BYTES + V_BYTES)
            _load(dk, work, starts, full, rings.k.index(slot), False, C)
            _load(dv, work, before, full, rings.v.index(slot), C.e4m3, C)
            before = starts
            starts = following
        slot = steps % C.stages
        mbarrier.wait(rings.empty.index(slot), ((steps // C.stages) & 1) ^ 1)
        mbarrier.expect(rings.full.index(slot), V_BYTES)
        _load(dv, work, before, rings.full.index(slot), rings.v.index(slot), C.e4m3, C)
