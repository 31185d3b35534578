"""What a program of the SM90 kernel works on: its tile, its steps, and where results go."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from typing_extensions import Self

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.steps_kernel import WorkList
from multimodal_gen.kernels.block_sparse.tuning import redone_together
from multimodal_gen.kernels.hopper_kernel import ProgramShape, barriers
from multimodal_gen.kernels.launch.launcher import Launch, Launcher
from multimodal_gen.kernels.shared_kernel import wide_channels

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


class More(NamedTuple):
    """Positions of key sweeps, the blocks of steps, and the blocks that rows choose."""

    sweep: Any
    sweep_b: Any
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
class Shape(ProgramShape):
    """Compile-time shape of a kernel that reads a plan; see `ProgramShape` for the rest.

    Attributes:
        q_registers: whether Q is kept in registers.
        fast: fixed reference and flags instead of the online softmax.
        lazy: whether the online softmax keeps its reference while it can.
        lse: whether lse is wanted.
        sub: steps per key block; 0 when the list already holds steps.
        box: keys that lie together in steps that are put together, of which each may have fewer;
            0 where the keys of a step adjoin.
        own: whether each consumer has its own query block.
        sync: publish the position in the key sweep every so many steps; 0 never.
        ragged: whether any step may be partial.
        ordered: whether `order` is given.
        bits: whether rows choose among the blocks of their list; the list then holds steps.
        one_word: whether the choice of a row is a single word.
        skip: how many powers of two below the reference a step is left out; 0 for none.
        passes: whether a consumer leaves out steps of blocks that none of its rows keeps.
        redo: tiles of which a program computes those that are flagged; 0 where all are computed.
    """

    q_registers: bool = False
    fast: bool = False
    lazy: bool = False
    lse: bool = False
    sub: int = 0
    box: int = 0
    own: bool = False
    sync: int = 0
    ragged: bool = True
    ordered: bool = False
    bits: bool = False
    one_word: bool = False
    skip: float = 0.0
    passes: bool = False
    redo: int = 0

    @classmethod
    def of_work(cls, plan: BlockPlan, work: WorkList, channels: int, **more: Any) -> Self:
        """Return the shape of programs that read a plan, of whose fields `more` are the others."""
        return cls(
            head_size=wide_channels(channels),
            channels=channels,
            sub=work.lists.sub,
            ragged=work.ragged,
            ordered=work.lists.ordered,
            q_starts=plan.q.starts is not None,
            q_lengths=plan.q.lengths is not None,
            **more,
        )

    def num_tiles(self, work: WorkList) -> int:
        """Return how many programs there are."""
        return -(-work.num // self.consumers) if self.own else work.num * self.q_tiles

    @property
    def tail_first(self) -> bool:
        """Whether the first step is a partial one, if there is any."""
        return self.ragged and not self.passes


def launch_with_redo(
    launcher: Launcher, shape: Shape, work: WorkList, arguments: tuple[Any, ...], **exact: Any
) -> tuple[Launch, int]:
    """Return launches of a kernel, and, where it is fast, of one that redoes the tiles it flags.

    Args:
        launcher: of the kernel.
        shape: of its programs.
        work: what they read.
        arguments: those that are the same every time.
        **exact: fields of the shape that differ in the redo.

    Returns:
        The launches, and how many int32 flags to make room for: a multiple of what any program
        looks at, and 0 where no tile is flagged.
    """
    num_tiles, shapes = shape.num_tiles(work), [shape]
    grids: list[tuple[int, ...]] = [(num_tiles,)]
    if shape.fast:
        together = redone_together(num_tiles)
        grids.append((-(-num_tiles // together),))
        shapes.append(replace(shape, fast=False, redo=together, **exact))
    launch = Launch(launcher, grids, arguments, [{"C": c, "num_warps": 4} for c in shapes])
    return launch, -(-num_tiles // 32) * 32 if shape.fast else 0


@gluon.jit
def find_rows(W: gl.constexpr, tile, plan, C: gl.constexpr):
    """Return batch, head, query block, first row and rows of a tile: attended to, and written.

    Also how many rows of the block come before. Where each consumer has a query block of its own,
    that of consumer `W`.
    """
    if C.own:
        position = tile * C.consumers + W
        inside = position * 0
    else:
        position = tile // C.q_tiles
        inside = tile % C.q_tiles * (C.consumers * 64)
    valid = True
    if C.own:  # the last consumers may have none
        valid = position < plan.lists
        position = gl.minimum(position, plan.lists - 1)
    outer = position // plan.rows
    place = position % plan.rows
    if C.ordered:
        place = gl.load(plan.order + place)
    h = place // plan.num % plan.plan_h + outer % plan.rep_h
    b = place // plan.num // plan.plan_h + outer // plan.rep_h
    i = place % plan.num
    begin = i * plan.size
    if C.q_starts:
        begin = gl.load(plan.start + b * plan.start_b + h * plan.start_h + i)
    length = gl.minimum(plan.total - begin, plan.size)
    if C.q_lengths:
        length = gl.load(plan.length + b * plan.length_b + h * plan.length_h + i)
    owned = length
    if C.q_lengths and not C.q_starts:
        owned = plan.size  # the padding of a block is its own, and is set to zero
    owned -= inside
    real = length - inside
    if C.own:
        owned = gl.where(valid, owned, 0)
        real = gl.where(valid, real, 0)
    return b, h, i, begin + inside, real, owned, inside


@gluon.jit
def find_steps(b, h, i, real, plan, UNIT: gl.constexpr, C: gl.constexpr):
    """Return a list, the numbers of its whole and partial steps of UNIT keys, and where these are.

    That is the first key of the partial step of a regular plan or the last place of the list, and
    its length or where the lengths stand.
    """
    row_list = plan.list + b * plan.list_b + h * plan.list_h + i * plan.list_n
    place = b * plan.count_b + h * plan.count_h + i * plan.count_n
    count = gl.load(plan.count + place)
    num_tail = count * 0
    if C.sub > 0:
        num_full = count * C.sub
        tail = (plan.last * C.sub + plan.tail // UNIT) * UNIT
        if C.ragged:
            last = gl.load(row_list + count - 1, mask=count > 0, other=-1)
            whole = (count - 1) * C.sub + plan.tail // UNIT
            num_full = gl.where(last == plan.last, whole, num_full)
            num_tail = gl.where((last == plan.last) & (plan.tail % UNIT > 0), 1, 0)
        tail_keys = plan.tail % UNIT
    else:
        num_full = count
        tail = plan.room - 1
        if C.ragged:
            num_tail = gl.load(plan.tail_count + place)
        tail_keys = plan.tail_length + place * plan.tail_room
    num_full = gl.where(real > 0, num_full, 0)
    num_tail = gl.where(real > 0, num_tail, 0)
    return row_list, num_full, num_tail, tail, tail_keys


@gluon.jit
def places(outs, b, h, row):
    """Return where the results of the rows from `row` on go."""
    out = outs.out + b * outs.out_b + h * outs.out_h + row.to(gl.int64) * outs.out_s
    return out, outs.lse + b * outs.lse_b + h * outs.lse_h + row


@gluon.jit
def find_work(W: gl.constexpr, tile, plan, outs, C: gl.constexpr):
    """Return the work of a tile, of consumer `W` where each has a query block of its own."""
    b, h, i, row, real, owned, _ = find_rows(W, tile, plan, C)
    b_64 = b.to(gl.int64)
    h_64 = h.to(gl.int64)
    i_64 = i.to(gl.int64)
    row_list, num_full, num_tail, tail, tail_keys = find_steps(
        b_64, h_64, i_64, real, plan, C.keys, C
    )
    out, lse = places(outs, b_64, h_64, row)
    kv_h = h // plan.group
    more = plan.more
    bits = more.bits + b_64 * more.bits_b + h_64 * more.bits_h + row.to(gl.int64) * more.words
    return Work(
        row_list, num_full, num_tail, tail, tail_keys, b, h, kv_h, row, real, owned,
        out, outs.out_s, lse, more.sweep + b * more.sweep_b + kv_h,
        more.blocks + b_64 * plan.list_b + h_64 * plan.list_h + i_64 * plan.list_n,
        bits, more.words,
    )  # fmt: skip


@gluon.jit
def whole_keys(C: gl.constexpr):
    """Return what `tail_keys` returns of a whole step."""
    keys = gl.to_tensor(C.keys)
    if C.box > 0:
        keys = gl.full([C.keys], C.keys, gl.int32, C.columns)
    return keys


@gluon.jit
def tail_keys(work, tail, C: gl.constexpr):
    """Return how many keys of a partial step are real; of boxes, a bound for the place of each."""
    keys = work.tail_keys
    if C.box > 0:
        place = gl.arange(0, C.keys, C.columns)
        length = gl.load(keys + tail * (C.keys // C.box) + place // C.box)
        keys = gl.where(place % C.box < length, C.keys, 0)
    elif C.sub == 0:
        keys = gl.load(keys + tail)
    return keys


@gluon.jit
def make_rings(dq, dk, dv, SLOTS: gl.constexpr, SHARERS: gl.constexpr, C: gl.constexpr):
    """Return rings of so many slots, each of which is read by SHARERS consumers."""
    BN: gl.constexpr = C.keys
    D: gl.constexpr = C.head_size
    CONSUMERS: gl.constexpr = C.consumers
    rings = Rings(
        gl.allocate_shared_memory(dq.dtype, [CONSUMERS, 1, 1, 64, D], dq.layout),
        gl.allocate_shared_memory(dq.dtype, [SLOTS, 1, 1, BN, D], dk.layout),
        gl.allocate_shared_memory(dq.dtype, [SLOTS, 1, 1, BN, D], dv.layout),
        barriers(CONSUMERS, 1),
        barriers(SLOTS, 1),
        barriers(SLOTS, SHARERS),
        barriers(SLOTS, 1),
        barriers(SLOTS, SHARERS),
    )
    hopper.fence_async_shared()
    return rings


@gluon.jit
def _whole_step(work, step, C: gl.constexpr):
    """Return which whole step one is, and whether it is any; see `step_start`."""
    whole = step
    is_whole = step < work.num_full
    if C.tail_first:
        whole = step - gl.minimum(work.num_tail, 1)
        is_whole = (whole >= 0) & (whole < work.num_full)
    return whole, is_whole


@gluon.jit
def block_of(work, step, C: gl.constexpr):
    """Return the block of a step."""
    whole, is_whole = _whole_step(work, step, C)
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
def start_of(work, whole, tail, is_whole, UNIT: gl.constexpr, C: gl.constexpr):
    """Return the first key of a whole step of UNIT keys, or else of a partial one."""
    if C.sub > 0:
        block = gl.load(work.row_list + whole // C.sub, mask=is_whole, other=0)
        start = (block * C.sub + whole % C.sub) * UNIT
        if C.ragged:
            start = gl.where(is_whole, start, work.tail)
    else:
        start = gl.load(work.row_list + gl.where(is_whole, whole, work.tail - tail))
    return start


@gluon.jit
def step_start(work, step, turn, C: gl.constexpr):
    """Return the first key of a step: a partial step if any, the whole ones, other partial ones.

    Where consumers pass over steps, all whole ones come first.
    The whole steps are taken from `turn` on.
    """
    whole, is_whole = _whole_step(work, step, C)
    if C.sync > 0:
        whole += turn
        whole = gl.where(whole >= work.num_full, whole - work.num_full, whole)
    tail = gl.maximum(step - work.num_full, 0)
    return start_of(work, whole, tail, is_whole, C.keys, C)


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
def store_values(ptr, values, work, owned, first_row, C: gl.constexpr, PADS: gl.constexpr = True):
    """Write 64 rows of a tile to `ptr`, those of its first `owned` ones.

    PADS: where blocks have lengths of their own, what is not real in them is set to zero.
    """
    layout: gl.constexpr = values.type.layout
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C.head_size, gl.SliceLayout(0, layout))
    ptrs = ptr + (gl.expand_dims(rows * work.out_s, 1) + gl.expand_dims(channel, 0))
    if C.q_lengths and PADS:
        values = gl.where(gl.expand_dims(rows < work.real, 1), values, gl.zeros_like(values))
    mask = gl.expand_dims(rows < owned, 1)
    if C.channels < C.head_size:
        mask = mask & gl.expand_dims(channel < C.channels, 0)
    gl.store(ptrs, values, mask=mask)


@gluon.jit
def store_lse(lse, work, owned, first_row, C: gl.constexpr):
    """Write lse of these rows, if it is wanted."""
    if C.lse:
        rows = first_row + gl.arange(0, 64, lse.type.layout)
        lse = gl.where(rows < work.real, lse, float("-inf"))
        gl.store(work.lse + rows, lse, mask=rows < owned)
