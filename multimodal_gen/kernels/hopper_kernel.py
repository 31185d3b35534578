"""What the kernels in Gluon for SM90 have in common.

A program has consumer warpgroups of 64 rows each and producer warps of one warp that feed them
through rings of tiles in shared memory. Every tile of a ring has a barrier that says that it is
full, and most have one that says that it is empty again.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


class WarpgroupLayouts:
    """Where a consumer warpgroup holds tensors, by what a compile-time shape says of it.

    Attributes:
        keys: columns of its scores, BN.
        head_size: columns of its results, D.
        s_depth: channels that one instruction multiplies for scores: 32 bytes.
        o_depth: keys that one multiplies for results, likewise.
    """

    keys: int
    head_size: int
    s_depth: int = 16
    o_depth: int = 16

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

    @property
    def store_rows(self) -> gl.constexpr:
        """A number for every row of these."""
        return _slice(1, self.store_layout)

    @property
    def store_columns(self) -> gl.constexpr:
        """A number for every channel of these."""
        return _slice(0, self.store_layout)


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
