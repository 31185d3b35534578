"""What the kernels in Gluon for SM90 have in common.

A program has consumer warpgroups of 64 rows each and producer warps of one warp that feed them
through rings of tiles in shared memory. Every tile of a ring has a barrier that says that it is
full, and most have one that says that it is empty again.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multimodal_gen.kernels.launch.compat import async_load

# Sums past this may have lost a weight to infinity; values below 2^63 then still stay finite.
OVERFLOW = gl.constexpr(2.0**64)


@dataclass(frozen=True, kw_only=True)
class ProgramShape:
    """Compile-time shape of a program, and where its consumer warpgroups hold tensors.

    Attributes:
        keys: keys of a step, BN: columns of scores.
        head_size: D, padded to 64 or 128: columns of results.
        channels: D of the tensors; the copy engine fills the rest with zeros.
        consumers: consumer warpgroups of 64 rows.
        stages: tiles in a ring.
        registers: registers of a consumer thread.
        producer_registers: registers of a producer thread.
        q_tiles: tiles per query block.
        q_starts: whether query blocks have starts of their own.
        q_lengths: whether query blocks have lengths of their own.
    """

    keys: int
    head_size: int
    channels: int
    consumers: int
    stages: int
    registers: int
    producer_registers: int = 24
    q_tiles: int = 1
    q_starts: bool = False
    q_lengths: bool = False

    @property
    def s_depth(self) -> int:
        """Channels that one instruction multiplies for scores: 32 bytes."""
        return 16

    @property
    def o_depth(self) -> int:
        """Keys that one instruction multiplies for results, likewise."""
        return 16

    @property
    def s_layout(self) -> gl.constexpr:
        """Scores, [64, BN]."""
        return gl.constexpr(_accumulator(self.keys, self.s_depth))

    @property
    def o_layout(self) -> gl.constexpr:
        """Results, [64, D]."""
        return gl.constexpr(_accumulator(self.head_size, self.o_depth))

    @property
    def q_layout(self) -> gl.constexpr:
        """What is multiplied into scores, in registers."""
        return _operand(self.s_layout, self.s_depth)

    @property
    def p_layout(self) -> gl.constexpr:
        """Weights, which are multiplied into results, [64, BN]."""
        return _operand(self.o_layout, self.o_depth)

    @property
    def rows_s(self) -> gl.constexpr:
        """A number for every row of scores."""
        return _slice(1, self.s_layout)

    @property
    def columns(self) -> gl.constexpr:
        """A number for every column of scores."""
        return _slice(0, self.s_layout)

    @property
    def rows_o(self) -> gl.constexpr:
        """A number for every row of results."""
        return _slice(1, self.o_layout)

    @property
    def store_layout(self) -> gl.constexpr:
        """Results on their way to memory, 16 bytes of a row at a time."""
        size = self.head_size
        return gl.constexpr(gl.BlockedLayout([1, 8], [256 // size, size // 8], [4, 1], [1, 0]))


def _accumulator(columns: int, depth: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth]
    )


def _operand(accumulator: gl.constexpr, depth: int) -> gl.constexpr:
    width = depth // 8
    return gl.constexpr(gl.DotOperandLayout(0, parent=accumulator.value, k_width=width))


def _slice(dim: int, layout: gl.constexpr) -> gl.constexpr:
    return gl.constexpr(gl.SliceLayout(dim, layout.value))


@builtin
def specialize(consumer, given, producer, fed, C, _semantic=None, _generator=None):
    """Start consumer(given, W, C) for every consumer W, and producer(fed, W, C) for every producer.

    Args:
        consumer: runs in a warpgroup.
        given: a tuple of what each consumer gets, or of one for all.
        producer: runs in a warp.
        fed: a tuple of what each producer gets.
        C: compile-time shape.
    """
    shape, producers = C.value, len(fed)
    number = gl.constexpr
    consumers = [(consumer, (given[w % len(given)], number(w), C)) for w in range(shape.consumers)]
    others = shape.consumers - 1  # the first consumer has the warps that the program began with
    gl.warp_specialize(
        [*consumers, *((producer, (fed[w], number(w), C)) for w in range(producers))],
        [4] * others + [1] * producers,
        [shape.registers] * others + [shape.producer_registers] * producers,
        _semantic=_semantic,
        _generator=_generator,
    )


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """Return barriers that so many arrivals complete."""
    found = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(found.index(i), count=count)
    return found


@gluon.jit
def fetch(descriptor, place, full, tile):
    """Load a tile, which fills what the barrier stands for."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    async_load(descriptor, place, full, tile)


@gluon.jit
def wait_full(full, at, FIRST: gl.constexpr, C: gl.constexpr):
    """Wait for entry `at` of the ring whose first slot is FIRST; return its slot."""
    slot = FIRST + at % C.stages
    mbarrier.wait(full.index(slot), (at // C.stages) & 1)
    return slot


@gluon.jit
def wait_empty(empty, at, FIRST: gl.constexpr, C: gl.constexpr):
    """Wait until there is room for such an entry; return its slot."""
    slot = FIRST + at % C.stages
    mbarrier.wait(empty.index(slot), ((at // C.stages) & 1) ^ 1)
    return slot


@gluon.jit
def scores(a, tile, C: gl.constexpr):
    """Start the product of 64 rows with those of a tile [.., BN, D]: [64, BN]."""
    BN: gl.constexpr = C.keys
    zero = gl.zeros([64, BN], gl.float32, C.s_layout)
    columns = tile.reshape([BN, C.head_size]).permute((1, 0))
    return hopper.warpgroup_mma(a, columns, zero, use_acc=False, is_async=True)


@gluon.jit
def partial_sums(p, C: gl.constexpr):
    """Row sums as four partial sums per row, which needs no shuffle: [64, 4]."""
    return gl.sum(gl.sum(gl.reshape(p, [64, C.keys // 8, 4, 2]), 3), 1)
