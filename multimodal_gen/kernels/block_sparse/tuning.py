"""Tuned constants, one table per provider; each names the GPU and the date it was measured on."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch

# Rows of a query block that suit these kernels, with these dtypes, best where rows choose.
CHOICE_ROWS = 192
WIDE_CHOICES = frozenset({("gluon", torch.bfloat16)})
# Products of a query's and a key's channels from which on the Gluon provider's fast variant, which
# launches twice, takes less time than the exact one: H200, 2026-11, between 1,024 and 2,048 tokens
# of 24 heads of 128.
REDO_PAYS = 6e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonTile:
    """Shape of one program of the Triton provider."""

    rows: int
    keys: int
    warps: int
    stages: int


# (largest head size, query rows, multiple of the key blocks) -> tile, the first that fits. H200,
# 2026-11, head size 128: sta 527, r128 524, r64 430 TFLOP/s; the other head sizes follow from the
# registers and the shared memory.
_SM90 = (
    (64, 64, 1, TritonTile(rows=64, keys=64, warps=4, stages=4)),
    (64, 128, 128, TritonTile(rows=128, keys=128, warps=8, stages=3)),
    (64, 128, 1, TritonTile(rows=128, keys=64, warps=8, stages=3)),
    (128, 64, 1, TritonTile(rows=64, keys=64, warps=4, stages=3)),
    (128, 128, 128, TritonTile(rows=128, keys=128, warps=8, stages=3)),
    (128, 128, 1, TritonTile(rows=128, keys=64, warps=8, stages=3)),
    (256, 64, 1, TritonTile(rows=64, keys=64, warps=8, stages=2)),
    (256, 128, 1, TritonTile(rows=128, keys=32, warps=8, stages=3)),
)
# Not measured: chosen by compiling for sm_80, whose accumulators spill with fewer warps.
_OTHER = (
    (64, 64, 1, TritonTile(rows=64, keys=64, warps=4, stages=3)),
    (64, 128, 1, TritonTile(rows=128, keys=64, warps=4, stages=3)),
    (128, 64, 1, TritonTile(rows=64, keys=64, warps=4, stages=3)),
    (128, 128, 1, TritonTile(rows=128, keys=64, warps=8, stages=3)),
    (256, 64, 1, TritonTile(rows=64, keys=32, warps=8, stages=2)),
    (256, 128, 1, TritonTile(rows=128, keys=32, warps=8, stages=2)),
)


def triton_tile(
    *,
    head_size: int,
    q_size: int,
    kv_size: int,
    capability: tuple[int, int] | None,
    shared_memory: int,
) -> TritonTile:
    """Return the tile for a plan's block sizes, with as many stages as memory allows.

    Args:
        head_size: D.
        q_size: rows of a query block.
        kv_size: keys of a key block; 1 where blocks begin and end anywhere.
        capability: compute capability of the GPU, or None where it has none.
        shared_memory: bytes a program may use.
    """
    rows = 64 if q_size <= 64 else 128
    for largest, tile_rows, multiple, tile in _SM90 if capability == (9, 0) else _OTHER:
        if head_size <= largest and rows == tile_rows and kv_size % multiple == 0:
            # Besides the query tile, 16-bit K and V of every stage.
            fitted = _fitted(tile, 2 * largest * tile.rows, 4 * largest * tile.keys, shared_memory)
            if multiple == 1 or fitted.stages > 1:
                return fitted
    raise AssertionError(f"no tile for head size {head_size}")


def _fitted(tile: TritonTile, fixed: int, per_stage: int, shared_memory: int) -> TritonTile:
    """Return the tile with at most the stages that fit, of so many bytes each, and `fixed` ones."""
    stages = max(min(tile.stages, (shared_memory - fixed) // per_stage), 1)
    return dataclasses.replace(tile, stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GluonTile:
    """Shape of one program of the Gluon provider.

    The backward pass and the pooled tail have one softmax: `q_registers` to `sync` say nothing
    there.

    Attributes:
        consumers: consumer warpgroups of 64 rows.
        keys: keys of a step; rows of one in the backward pass, means of one in the pooled tail.
        stages: steps in each ring.
        own: whether each consumer has a block of its own.
        q_registers: whether Q is kept in registers.
        fast: whether the first step's maximum stays the reference; needs bfloat16.
        lazy: whether the exact variant keeps its reference while scores lie little above it.
        sync: how often, in steps, a program publishes its place in the keys for its neighbours to
            start from; makes the order of summation vary from run to run; 0 never.
        registers: registers of a consumer thread.
        producer_registers: registers of a producer thread.
    """

    consumers: int
    keys: int
    stages: int
    own: bool = False
    q_registers: bool = True
    fast: bool = True
    lazy: bool = False
    sync: int = 0
    registers: int = 240
    producer_registers: int = 24


@cache
def gluon_backward_tile(*, block: int) -> GluonTile:
    """Return the tile of programs that own blocks of so many rows at most.

    H200, 2026-11, torch 2.11, triton 3.6.0, head size 128, 40,768 tokens: dq 790, 692 and 640
    TFLOP/s dense and on a tenth of blocks of 128 and 64, dk and dv 763, 676 and 604.

    Args:
        block: rows of a block: of queries for dq, of keys for dk and dv.
    """
    if block <= 64:
        return GluonTile(consumers=2, keys=64, stages=2, own=True)
    return GluonTile(consumers=2, keys=64, stages=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTiles:
    """Shapes of the programs of the backward pass.

    Attributes:
        queries: of the kernel for dq: a tile of `rows` queries in steps of `keys` keys.
        keys: of the kernel for dk and dv: a tile of `keys` keys in steps of `rows` queries.
    """

    queries: TritonTile
    keys: TritonTile


# (gradients, SM90, largest head size, rows of the tile) -> tile.
_BACKWARD = MappingProxyType(
    {
        # H200, 2026-11, torch 2.11, triton 3.6.0, head size 128, 40,768 tokens: dq 688, 621 and 585
        # TFLOP/s dense and on a tenth of blocks of 128 and 64, dk and dv 621, 580 and 566. The
        # other head sizes were chosen by compiling, so that little spills.
        ("dq", True, 64, 64): TritonTile(rows=64, keys=64, warps=4, stages=3),
        ("dq", True, 64, 128): TritonTile(rows=128, keys=64, warps=8, stages=3),
        ("dq", True, 128, 64): TritonTile(rows=64, keys=64, warps=4, stages=2),
        ("dq", True, 128, 128): TritonTile(rows=128, keys=64, warps=8, stages=3),
        ("dq", True, 256, 64): TritonTile(rows=64, keys=32, warps=8, stages=2),
        ("dq", True, 256, 128): TritonTile(rows=64, keys=32, warps=8, stages=2),
        ("dkv", True, 64, 64): TritonTile(rows=64, keys=64, warps=4, stages=3),
        ("dkv", True, 64, 128): TritonTile(rows=64, keys=128, warps=8, stages=3),
        ("dkv", True, 128, 64): TritonTile(rows=32, keys=64, warps=4, stages=3),
        ("dkv", True, 128, 128): TritonTile(rows=64, keys=128, warps=8, stages=3),
        ("dkv", True, 256, 64): TritonTile(rows=32, keys=64, warps=8, stages=2),
        ("dkv", True, 256, 128): TritonTile(rows=32, keys=64, warps=8, stages=2),
        # Not measured: chosen by compiling for sm_80.
        ("dq", False, 64, 64): TritonTile(rows=64, keys=64, warps=4, stages=2),
        ("dq", False, 64, 128): TritonTile(rows=128, keys=64, warps=8, stages=2),
        ("dq", False, 128, 64): TritonTile(rows=64, keys=32, warps=4, stages=2),
        ("dq", False, 128, 128): TritonTile(rows=128, keys=32, warps=8, stages=2),
        ("dq", False, 256, 64): TritonTile(rows=64, keys=32, warps=8, stages=1),
        ("dq", False, 256, 128): TritonTile(rows=64, keys=32, warps=8, stages=1),
        ("dkv", False, 64, 64): TritonTile(rows=64, keys=64, warps=4, stages=2),
        ("dkv", False, 64, 128): TritonTile(rows=64, keys=128, warps=8, stages=2),
        ("dkv", False, 128, 64): TritonTile(rows=32, keys=64, warps=8, stages=2),
        ("dkv", False, 128, 128): TritonTile(rows=32, keys=64, warps=8, stages=2),
        ("dkv", False, 256, 64): TritonTile(rows=32, keys=64, warps=8, stages=1),
        ("dkv", False, 256, 128): TritonTile(rows=32, keys=64, warps=8, stages=1),
    }
)


@cache
def backward_tiles(
    *,
    head_size: int,
    q_size: int,
    kv_size: int,
    whole: bool,
    capability: tuple[int, int] | None,
    shared_memory: int,
) -> BackwardTiles:
    """Return the tiles for a plan's block sizes, with as many stages as memory allows.

    Args:
        head_size: D, at most 256.
        q_size: rows of a query block.
        kv_size: keys of a key block.
        whole: whether all query blocks but the last are full, and rows choose nothing: masks
            take registers.
        capability: compute capability of the GPU, or None where it has none.
        shared_memory: bytes a program may use.
    """
    sm90 = capability is not None and capability >= (9, 0)
    largest = next(size for size in (64, 128, 256) if head_size <= size)
    dq = _BACKWARD["dq", sm90, largest, 64 if q_size <= 64 else 128]
    dkv = _BACKWARD["dkv", sm90, largest, 64 if kv_size <= 64 else 128]
    if sm90 and not whole and largest <= 128:
        dkv = dataclasses.replace(dkv, rows=32)
    row = 4 * largest  # of two 16-bit tensors
    return BackwardTiles(
        queries=_fitted(dq, row * dq.rows, row * dq.keys, shared_memory),
        keys=_fitted(dkv, row * dkv.keys, row * dkv.rows, shared_memory),
    )


# (SM90, largest head size, narrow) -> tile of the pooled tail. That of 128 channels and whole
# blocks is the fastest of six on an H200, tail.csv at 45e4ef6; the others were chosen by compiling,
# so that no accumulator spills.
_TAIL = MappingProxyType(
    {
        (True, 64, False): TritonTile(rows=128, keys=64, warps=8, stages=3),
        (True, 64, True): TritonTile(rows=64, keys=64, warps=4, stages=3),
        (True, 128, False): TritonTile(rows=64, keys=64, warps=4, stages=3),
        (True, 128, True): TritonTile(rows=64, keys=64, warps=4, stages=2),
        (True, 256, False): TritonTile(rows=128, keys=32, warps=8, stages=2),
        (True, 256, True): TritonTile(rows=64, keys=32, warps=8, stages=2),
        (False, 64, False): TritonTile(rows=128, keys=32, warps=8, stages=3),
        (False, 64, True): TritonTile(rows=64, keys=32, warps=4, stages=3),
        (False, 128, False): TritonTile(rows=128, keys=32, warps=8, stages=3),
        (False, 128, True): TritonTile(rows=64, keys=32, warps=4, stages=3),
        (False, 256, False): TritonTile(rows=64, keys=32, warps=8, stages=2),
        (False, 256, True): TritonTile(rows=64, keys=32, warps=8, stages=2),
    }
)


@cache
def tail_tile(
    *, head_size: int, q_size: int, regular: bool, capability: tuple[int, int] | None
) -> TritonTile:
    """Return the tile of the pooled tail; one of 128 rows may hold two blocks of 64.

    Args:
        head_size: D, at most 256.
        q_size: rows of a query block.
        regular: whether query blocks follow each other without gaps.
        capability: compute capability of the GPU, or None where it has none.
    """
    sm90 = capability is not None and capability >= (9, 0)
    largest = next(size for size in (64, 128, 256) if head_size <= size)
    return _TAIL[sm90, largest, q_size < 64 or (q_size == 64 and not regular)]


def gluon_tail_tile() -> GluonTile:
    """Return the tile of the pooled tail in Gluon, the fastest of four on an H200: tail.csv."""
    return GluonTile(consumers=3, keys=64, stages=3, registers=160)


# Pattern -> tile. H200, 2026-11, torch 2.11, triton 3.6.0, head size 128.
_HOPPER = MappingProxyType(
    {
        # Also where rows choose; lists are short then. The measurements are in vmoba.csv.
        "wide fast": GluonTile(consumers=3, keys=64, stages=4, q_registers=False, registers=160),
        "wide exact": GluonTile(
            consumers=3, keys=64, stages=4, q_registers=False, registers=160, fast=False, lazy=True
        ),
        "fast": GluonTile(consumers=2, keys=128, stages=3, sync=4),
        "exact": GluonTile(consumers=2, keys=128, stages=2, fast=False, sync=4),
        "short keys fast": GluonTile(consumers=2, keys=64, stages=4),
        "short keys exact": GluonTile(consumers=2, keys=64, stages=4, fast=False),
        "narrow fast": GluonTile(consumers=2, keys=64, stages=3, own=True, sync=8),
        "narrow exact": GluonTile(
            consumers=2, keys=64, stages=3, own=True, fast=False, lazy=True, sync=8
        ),
    }
)


@cache
def gluon_tile(
    *,
    q_size: int,
    kv_size: int,
    regular: bool,
    fast: bool,
    deterministic: bool,
    row_bits: bool = False,
    skips: bool = False,
) -> GluonTile:
    """Return the tile for a plan's block sizes.

    Args:
        q_size: rows of a query block.
        kv_size: keys of a key block.
        regular: whether the key blocks are regular.
        fast: whether the fast variant may run.
        deterministic: whether the order of summation must be fixed.
        row_bits: whether rows choose, and so need to know the block of every step and where it
            lies in the list.
        skips: whether steps are left out, which three consumers have no registers for; not `fast`.
    """
    regular = regular and not row_bits
    deterministic = deterministic or row_bits
    if q_size <= 64:
        pattern = "narrow"
    elif q_size % 192 == 0 and not skips and (kv_size % 64 == 0 if regular else fast):
        pattern = "wide"
    elif not regular or kv_size % 128:
        # Also because partial steps of 128 keys do not fit into the registers.
        pattern = "short keys"
    else:
        pattern = ""
    tile = _HOPPER[f"{pattern} {'fast' if fast else 'exact'}".strip()]
    return dataclasses.replace(tile, sync=0) if deterministic else tile


# From how many tiles on a program of the redo looks at the flags of how many: a program that has
# nothing to do takes about a microsecond of its multiprocessor. H200, 2026-11.
_REDONE_TOGETHER = ((8192, 32), (1024, 8), (0, 1))


def redone_together(tiles: int) -> int:
    """Return how many of a call's tiles a program of the redo looks at."""
    return next(together for least, together in _REDONE_TOGETHER if tiles >= least)
