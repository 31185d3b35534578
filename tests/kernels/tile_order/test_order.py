"""The tile order against loops written from its description."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.kernels.tile_order.api import tile_order

Grid = tuple[int, int, int]
CASES = [
    ((1, 1, 1), (4, 4, 4)),
    ((5, 7, 9), (4, 4, 4)),
    ((8, 8, 8), (4, 4, 4)),
    ((21, 45, 80), (6, 8, 8)),
    ((3, 5, 7), (6, 8, 8)),
    ((4, 2, 9), (1, 3, 20)),
    ((6, 5, 4), (1, 1, 1)),
]
SIZES = st.tuples(*[st.integers(1, 9)] * 3)


def tiles_by_loops(grid: Grid, tile: Grid) -> list[list[int]]:
    """Return the raster tokens of every tile, by walking over tiles and the tokens inside."""
    frames, rows, columns = grid
    found = []
    for t0 in range(0, frames, tile[0]):
        for h0 in range(0, rows, tile[1]):
            for w0 in range(0, columns, tile[2]):
                inside = []
                for t in range(t0, min(t0 + tile[0], frames)):
                    for h in range(h0, min(h0 + tile[1], rows)):
                        for w in range(w0, min(w0 + tile[2], columns)):
                            inside.append((t * rows + h) * columns + w)
                found.append(inside)
    return found


def check(grid: Grid, tile: Grid) -> None:
    expected = tiles_by_loops(grid, tile)
    found = tile_order(grid, tile, "cpu")
    assert (found.grid, found.tile) == (grid, tile)
    assert found.num_tokens == grid[0] * grid[1] * grid[2]
    assert found.tiles[0] * found.tiles[1] * found.tiles[2] == len(expected)
    assert found.largest == tile[0] * tile[1] * tile[2]
    assert found.uniform == all(len(inside) == found.largest for inside in expected)
    assert found.lengths.tolist() == [len(inside) for inside in expected]
    assert found.order.tolist() == [token for inside in expected for token in inside]
    starts = [sum(map(len, expected[:i])) for i in range(len(expected))]
    assert found.starts.tolist() == starts
    positions = torch.arange(found.num_tokens, dtype=torch.int32)
    assert torch.equal(found.inverse[found.order.long()], positions)
    for tensor in (found.order, found.inverse, found.starts, found.lengths):
        assert tensor.dtype == torch.int32


@pytest.mark.parametrize(("grid", "tile"), CASES, ids=str)
def test_tokens_come_tile_by_tile_and_in_raster_order_inside(grid: Grid, tile: Grid) -> None:
    check(grid, tile)


@given(SIZES, SIZES)
@settings(max_examples=40, deadline=None)
def test_any_grid_and_tile_agree_with_the_loops(grid: Grid, tile: Grid) -> None:
    check(grid, tile)


def test_the_tiles_per_axis_are_rounded_up() -> None:
    assert tile_order((21, 45, 80), (6, 8, 8)).tiles == (4, 6, 10)


def test_the_tiles_are_blocks_of_the_engine() -> None:
    found = tile_order((5, 7, 9), (4, 4, 4))
    blocks = Blocks.ragged(found.starts, found.lengths, total=found.num_tokens, size=found.largest)
    assert blocks.num == 12
    assert int((blocks.starts + blocks.lengths).max()) == found.num_tokens


def test_an_order_is_computed_once_per_grid_tile_and_device() -> None:
    first = tile_order((3, 4, 5), (2, 2, 2), "cpu")
    assert tile_order([3, 4, 5], [2, 2, 2], torch.device("cpu")) is first
    assert tile_order((3, 5, 4), (2, 2, 2), "cpu") is not first


def test_an_order_first_asked_for_under_inference_mode_serves_training() -> None:
    with torch.inference_mode():
        found = tile_order((2, 3, 11), (2, 2, 2))
    assert not found.order.is_inference()


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        found = tile_order((2, 3, 13), (2, 2, 2), "cpu")
    assert sorted(found.order.tolist()) == list(range(78))


def test_the_tensors_lie_on_the_device_asked_for() -> None:
    assert tile_order((2, 2, 2), (2, 2, 2), "meta").order.device.type == "meta"


@pytest.mark.parametrize("bad", [(0, 4, 4), (4, 4), (4, 4, -1), (4, 4, 2.0)], ids=str)
def test_sizes_that_are_no_sizes_are_refused_by_name(bad: Grid) -> None:
    with pytest.raises(
        UsageError,
        match=r"`grid` must be three ints of at least 1, .* got \(4"
        if bad[0]
        else r"`grid` must be three ints of at least 1, .* got \(0",
    ):
        tile_order(bad, (4, 4, 4))
    with pytest.raises(UsageError, match=r"`tile` must be three ints of at least 1"):
        tile_order((4, 4, 4), bad)


def test_a_grid_too_large_for_32_bit_positions_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`grid` must have at most 2147483647 tokens, got \(2048"):
        tile_order((2048, 1024, 1024), (4, 4, 4))
