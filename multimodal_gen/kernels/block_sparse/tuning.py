"""Tile shapes of the Triton provider; what was measured names the GPU and the date."""

from dataclasses import dataclass

__all__ = ["PortableTile", "portable_tile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableTile:
    """Shape of one program of the Triton provider."""

    rows: int
    keys: int
    warps: int
    stages: int

    def shared_memory(self, head_size: int) -> int:
        """Bytes the pipeline takes: query tile, and K and V of every stage, 16-bit."""
        return 2 * head_size * (self.rows + 2 * self.keys * self.stages)


# (largest head size, query rows) -> tile. H200, 2026-11, head size 128, bf16, in TFLOP/s of kept
# pairs, by scripts/bench/engine.py: 64 rows 422; 128 rows 339 on sta, 316 on r128, 300 dense.
# 128x64 with 8 warps reached 353, 386 and 342 there; 128x128 with 8 warps 400 and 407 on the first
# two. The tiles of other head sizes are not measured: registers and shared memory decided.
_SM90 = (
    (64, 64, PortableTile(rows=64, keys=64, warps=4, stages=5)),
    (64, 128, PortableTile(rows=128, keys=64, warps=4, stages=4)),
    (128, 64, PortableTile(rows=64, keys=64, warps=4, stages=5)),
    (128, 128, PortableTile(rows=128, keys=64, warps=4, stages=3)),
    (256, 64, PortableTile(rows=64, keys=64, warps=8, stages=2)),
    (256, 128, PortableTile(rows=128, keys=32, warps=8, stages=3)),
)
# Not measured: chosen by compiling for sm_80, whose accumulators spill with fewer warps.
_OTHER = (
    (64, 64, PortableTile(rows=64, keys=64, warps=4, stages=3)),
    (64, 128, PortableTile(rows=128, keys=64, warps=4, stages=3)),
    (128, 64, PortableTile(rows=64, keys=64, warps=4, stages=3)),
    (128, 128, PortableTile(rows=128, keys=64, warps=8, stages=3)),
    (256, 64, PortableTile(rows=64, keys=32, warps=8, stages=2)),
    (256, 128, PortableTile(rows=128, keys=32, warps=8, stages=2)),
)


def portable_tile(
    *, head_size: int, q_size: int, capability: tuple[int, int] | None, shared_memory: int
) -> PortableTile:
    """Return the tile for query blocks of `q_size` rows, with as many stages as memory allows."""
    rows = 64 if q_size <= 64 else 128
    for largest, tile_rows, tile in _SM90 if capability == (9, 0) else _OTHER:
        if head_size <= largest and rows == tile_rows:
            return _fitted(tile, largest, shared_memory)
    raise AssertionError(f"no tile for head size {head_size}")


def _fitted(tile: PortableTile, head_size: int, shared_memory: int) -> PortableTile:
    stages = tile.stages
    while stages > 1 and tile.shared_memory(head_size) > shared_memory:
        stages -= 1
        tile = PortableTile(rows=tile.rows, keys=tile.keys, warps=tile.warps, stages=stages)
    return tile
