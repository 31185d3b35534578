import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sta.candidates import (
    default_candidates,
    distinct_candidates,
)
from multimodal_gen.runtime.layers.attention.sta.windows import effective_window, tile_count


def test_the_patterns_scaled_to_the_published_grid_are_the_published_windows() -> None:
    assert set(default_candidates((5, 6, 10))) == {
        (5, 3, 3),
        (3, 3, 5),
        (1, 6, 10),
        (5, 6, 1),
        (5, 1, 10),
    }


def test_the_windows_published_for_a_grid_are_among_its_candidates() -> None:
    published = {(3, 1, 10), (1, 5, 7), (3, 3, 3), (1, 6, 5), (1, 3, 10), (3, 6, 1)}
    assert published <= set(default_candidates((3, 6, 10)))


@given(tiles=st.tuples(*[st.integers(1, 12)] * 3).filter(lambda tiles: max(tiles) > 1))
def test_candidates_of_any_grid_are_distinct_sparse_and_sorted(tiles) -> None:
    found = default_candidates(tiles)
    kept = [effective_window(window, tiles) for window in found]
    assert found
    assert len(set(kept)) == len(kept)
    assert tiles not in kept
    work = [tile_count(window, tiles) for window in found]
    assert work == sorted(work)
    assert all(1 <= size <= n for window in found for size, n in zip(window, tiles, strict=True))


def test_windows_that_keep_the_same_tiles_count_once_as_what_they_keep() -> None:
    assert distinct_candidates([(3, 1, 1), (2, 1, 1), (9, 1, 1)], (5, 2, 1)) == (
        (3, 1, 1),
        (5, 1, 1),
    )


def test_a_grid_of_one_tile_has_nothing_to_search() -> None:
    with pytest.raises(UsageError, match="smaller than the grid, which has 1x1x1 tiles; use a"):
        default_candidates((1, 1, 1))
