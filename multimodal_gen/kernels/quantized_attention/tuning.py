"""Tuned constants, one table per provider; each names the GPU and the date it was measured on."""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from multimodal_gen.kernels.block_sparse.tuning import TritonTile


@dataclass(frozen=True, slots=True, kw_only=True)
class GluonTile:
    """Shape of one program of the Gluon provider.

    Attributes:
        consumers: consumer warpgroups of 64 query rows.
        keys: keys of a step.
        stages: pairs of tiles in each ring of K and V.
        pairs: whether a step has two halves of keys, each anywhere; bfloat16 only.
        e4m3: whether values, and weights, are e4m3 numbers, else bfloat16.
        own: whether each of two consumers has a query block of its own; bfloat16 only.
        fast: whether the first step's maximum stays the reference; bfloat16 only.
        q_registers: whether Q is kept in registers.
        registers: registers of a consumer thread.
        producer_registers: registers of a producer thread.
    """

    consumers: int
    keys: int
    stages: int
    pairs: bool = False
    e4m3: bool = True
    own: bool = False
    fast: bool = False
    q_registers: bool = False
    registers: int = 240
    producer_registers: int = 24

    @property
    def unit(self) -> int:
        """Keys of a step that lie together."""
        return self.keys // 2 if self.pairs else self.keys

    @property
    def rows(self) -> int:
        """Rows of a query block that a program attends with."""
        return 64 if self.own else 64 * self.consumers


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseTile:
    """Shape of one program that quantises.

    Attributes:
        steps: tiles that one program does after another.
        stages: tiles that are loaded at once.
        warps: warps of a program.
    """

    steps: int
    stages: int
    warps: int = 4


# Of 64 keys that share a scale, and of 128. H200, 2026-11, triton 3.6.0, one run, D 128, S 32,760.
# 64 keys, B 2, H 16: 0.33 ms; 0.40 with one step, 0.41 with two stages, 0.44 with 8 warps.
# 128 keys, B 1, H 40: 0.44 ms; 0.67 with one step, 0.49 with one stage.
_QUANTISE = (QuantiseTile(steps=4, stages=1), QuantiseTile(steps=8, stages=2))


def quantise_tile(keys: int) -> QuantiseTile:
    """Return the tile of the quantising kernel, for so many keys that share a scale."""
    return _QUANTISE[keys > 64]


# Not measured: the steps of the 16-bit engine, whose registers these take at most. Programs of 64
# rows have 8 warps because 4 would spill on SM80 and SM89.
_PORTABLE = tuple(TritonTile(rows=rows, keys=64, warps=8, stages=3) for rows in (64, 128))


def triton_tile(*, q_size: int) -> TritonTile:
    """Return the tile of the Triton provider for query blocks of `q_size` rows."""
    return _PORTABLE[q_size > 64]


_bfloat16 = partial(GluonTile, e4m3=False, fast=True, q_registers=True)

# Pattern -> tile. H200, 2026-11, triton 3.6.0, D 128. H 40, S 32,760, all blocks kept: bfloat16
# values 861 TFLOP/s, e4m3 values 782 (677 with Q in registers), FlashAttention 3 693. Half of the
# blocks of 64 keys, B 2, H 16: pairs 813, steps of one block 700.
_HOPPER = MappingProxyType(
    {
        "": _bfloat16(consumers=2, keys=128, stages=3),
        "short keys": _bfloat16(consumers=2, keys=128, stages=3, pairs=True),
        "narrow": _bfloat16(consumers=1, keys=128, stages=3),
        # A tenth of the blocks, B 1, H 40, S 75,600: 24.5 ms cut short, 16.4 regular; with pairs,
        # which spill with triton 3.9, 28.7 and 16.4; with one consumer 42.3 and 27.2.
        "narrow short keys": _bfloat16(consumers=2, keys=64, stages=4, own=True),
        "e4m3": GluonTile(consumers=2, keys=128, stages=4),
        "short keys e4m3": GluonTile(consumers=2, keys=64, stages=4),
        "narrow e4m3": GluonTile(consumers=1, keys=128, stages=2),
        "narrow short keys e4m3": GluonTile(consumers=1, keys=64, stages=3),
    }
)


def gluon_tile(*, q_size: int, kv_size: int, regular: bool, e4m3: bool) -> GluonTile:
    """Return the tile of the Gluon provider for a plan's block sizes.

    Args:
        q_size: rows of a query block.
        kv_size: keys of a key block.
        regular: whether the key blocks are regular.
        e4m3: whether values are e4m3 numbers, else bfloat16.
    """
    # Partial steps of 128 keys do not fit into the registers next to e4m3 products.
    short = kv_size % 128 > 0 or (e4m3 and not regular)
    words = ["narrow"] * (q_size <= 64) + ["short keys"] * short + ["e4m3"] * e4m3
    return _HOPPER[" ".join(words)]
