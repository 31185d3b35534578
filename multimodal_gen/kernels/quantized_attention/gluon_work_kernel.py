"""What a program of the SM90 kernel works on, and the warp that loads it.

A step has BN keys. They lie together, or in two halves anywhere: pairs, for blocks of BN / 2 keys.
Where key blocks are cut short, whole units come in pairs of their own, and then partial ones do.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from typing_extensions import override

from multimodal_gen.kernels.block_sparse import gluon_work_kernel
from multimodal_gen.kernels.block_sparse.gluon_work_kernel import (
    find_rows,
    find_steps,
    places,
    start_of,
)
from multimodal_gen.kernels.hopper_kernel import fetch, wait_empty
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


class Scales(NamedTuple):
    """Scales of queries (per row, in the units of base-2 exponents), keys and values (per step).

    Queries have `q_slots` rows per query block, `q_rows` per head.
    """

    q: Any
    k: Any
    v: Any
    shift: Any
    q_slots: Any
    q_rows: Any
    kv_steps: Any


class Work(NamedTuple):
    """One tile: what its producer and its consumers agree on.

    `num_full` and `num_tail` count whole and partial units, of which a step has one or, in pairs,
    two; of `steps`, `lead` partial ones come first, then `whole` ones, then other partial ones.
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
class Shape(gluon_work_kernel.Shape):
    """Compile-time shape of the kernel; lists and scales count units.

    Attributes:
        pairs: whether a step has two halves of keys, each anywhere.
        e4m3: whether values, and weights, are e4m3 numbers, else bfloat16.
    """

    pairs: bool
    e4m3: bool

    @property
    def unit(self) -> int:
        """Keys that lie together: what lists and scales count in."""
        return self.keys // 2 if self.pairs else self.keys

    @property
    def words(self) -> bool:
        """Whether weights are carried from step to step as words.

        Of smaller numbers each would get a register of its own; of bfloat16 they do where partial
        steps have a loop of their own. Words must not be made before the wait for the product of
        those before them, or it is serialised; units of 128 keys have no registers for that.
        """
        return self.e4m3 or (self.sub == 0 and self.unit == 64)

    @property
    @override
    def s_depth(self) -> int:
        """Queries and keys have 8 bits."""
        return 32

    @property
    @override
    def o_depth(self) -> int:
        """So do weights and values, if they are e4m3 numbers."""
        return 32 if self.e4m3 else 16


@gluon.jit
def step_counts(num_full, num_tail, C: gl.constexpr):
    """Return how many steps lead, how many have whole units alone, and how many there are."""
    if C.unit < C.keys:
        odd = num_full % 2
        lead = gl.minimum(odd + num_tail, 1)
        whole = num_full // 2
        steps = whole + (odd + num_tail + 1) // 2
    else:
        lead = gl.minimum(num_tail, 1)
        whole = num_full
        steps = num_full + num_tail
    return lead, whole, steps


@gluon.jit
def find_work(W: gl.constexpr, tile, plan, scales, outs, C: gl.constexpr):
    """Return the work of a tile, of consumer `W` where each has a query block of its own."""
    b, h, i, row, real, owned, inside = find_rows(W, tile, plan, C)
    b_64 = b.to(gl.int64)
    h_64 = h.to(gl.int64)
    row_list, num_full, num_tail, tail, tail_keys = find_steps(
        b_64, h_64, i.to(gl.int64), real, plan, C.unit, C
    )
    lead, whole, steps = step_counts(num_full, num_tail, C)
    out, lse = places(outs, b_64, h_64, row)
    kv_h = h // plan.group
    heads = plan.plan_h * plan.rep_h
    head = b_64 * heads + h
    kv_head = b_64 * (heads // plan.group) + kv_h
    slot = i * scales.q_slots + inside
    return Work(
        row_list, num_full, num_tail, lead, whole, steps, tail, tail_keys,
        b, h, kv_h, slot, real, owned, out, outs.out_s, lse,
        scales.q + head * scales.q_rows + slot, scales.shift + head * scales.q_rows + slot,
        scales.k + kv_head * scales.kv_steps, scales.v + kv_head * scales.kv_steps,
    )  # fmt: skip


@gluon.jit
def step_starts(work, step, C: gl.constexpr):
    """Return the first keys of a step's two units, which are one unless there are pairs."""
    whole = step - work.lead
    is_whole = (whole >= 0) & (whole < work.whole)
    tail = gl.maximum(whole - work.whole + 1, 0)
    if C.unit < C.keys:
        # The step ahead has the whole unit that is left over, if any, then come the partial ones.
        tail = 2 * tail - work.num_full % 2
        odd = tail < 0
        full = gl.where(is_whole, 2 * whole, work.num_full - 1)
        first = start_of(work, full, tail, is_whole | odd, C.unit, C)
        last = gl.maximum(work.num_tail - 1, 0)
        second = start_of(work, 2 * whole + 1, gl.minimum(tail + 1, last), is_whole, C.unit, C)
        second = gl.where(is_whole | (tail + 1 < work.num_tail), second, first)
    else:
        first = start_of(work, whole, tail, is_whole, C.unit, C)
        second = first
    return first, second


@gluon.jit
def _unit_keys(work, tail, C: gl.constexpr):
    """Return how many keys of a partial unit are real; all of the one before the first."""
    keys = work.tail_keys
    there = (tail >= 0) & (tail < work.num_tail)
    if C.sub == 0:
        keys = gl.load(keys + tail, mask=there, other=0)
    keys = gl.where(there, keys, 0)
    return gl.where(tail < 0, C.unit, keys)


@gluon.jit
def step_keys(work, step, C: gl.constexpr):
    """Return how many keys of each unit of a partial step are real."""
    tail = gl.maximum(step - work.lead - work.whole + 1, 0)
    if C.unit < C.keys:
        tail = 2 * tail - work.num_full % 2
        keys = (_unit_keys(work, tail, C), _unit_keys(work, tail + 1, C))
    else:
        keys = (_unit_keys(work, tail, C), tail)
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
def produce(fed, W: gl.constexpr, C: gl.constexpr):
    """One warp: loads Q once, and in turn K of every step with V of the step before."""
    dq, dk, dv, work, rings = fed
    K_BYTES: gl.constexpr = C.keys * C.head_size
    V_BYTES: gl.constexpr = K_BYTES if C.e4m3 else 2 * K_BYTES
    SHARERS: gl.constexpr = 1 if C.own else C.consumers
    FIRST: gl.constexpr = W * C.stages if C.own else 0
    steps = work.steps
    if steps > 0:
        starts = step_starts(work, 0, C)
        for c in gl.static_range(SHARERS):
            place = [work.b, work.h, work.slot + c * 64, 0]
            fetch(dq, place, rings.q_full.index(W + c), rings.q.index(W + c))
        mbarrier.expect(rings.full.index(FIRST), K_BYTES)
        _load(dk, work, starts, rings.full.index(FIRST), rings.k.index(FIRST), False, C)
        before = starts
        starts = step_starts(work, gl.minimum(1, steps - 1), C)
        for step in range(1, steps):
            following = step_starts(work, gl.minimum(step + 1, steps - 1), C)
            slot = wait_empty(rings.empty, step, FIRST, C)
            full = rings.full.index(slot)
            mbarrier.expect(full, K_BYTES + V_BYTES)
            _load(dk, work, starts, full, rings.k.index(slot), False, C)
            _load(dv, work, before, full, rings.v.index(slot), C.e4m3, C)
            before = starts
            starts = following
        slot = wait_empty(rings.empty, steps, FIRST, C)
        mbarrier.expect(rings.full.index(slot), V_BYTES)
        _load(dv, work, before, rings.full.index(slot), rings.v.index(slot), C.e4m3, C)
