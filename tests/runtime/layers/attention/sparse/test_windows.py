from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.runtime.layers.attention.sparse.windows import (
    effective_window,
    is_full,
    kept_indices,
    pair_density,
    tile_count,
    tile_density,
    tiles_of,
)
from tests.helpers.block_plans import tile_lists
from tests.helpers.sparse import kept_map

SIZES = st.tuples(*[st.integers(1, 6)] * 3)
WINDOWS = st.tuples(*[st.integers(1, 8)] * 3)


def keeps(window: int, tiles: int, query: int, key: int) -> bool:
    """One axis, in the words of the definition."""
    if window >= tiles:
        return True
    half = window // 2
    centre = query
    if centre < half:
        centre = half
    if centre > tiles - 1 - half:
        centre = tiles - 1 - half
    return abs(centre - key) <= half


def naive_map(window, tiles) -> torch.Tensor:
    t, h, w = (
        torch.tensor([[keeps(width, n, query, key) for key in range(n)] for query in range(n)])
        for width, n in zip(window, tiles, strict=True)
    )
    every = torch.einsum("aA,bB,cC->abcABC", t.int(), h.int(), w.int()).bool()
    return every.flatten(3).flatten(0, 2)


@settings(max_examples=60, deadline=None)
@given(window=WINDOWS, tiles=SIZES)
def test_a_map_is_the_one_of_the_definition(window, tiles) -> None:
    assert torch.equal(kept_map(window, tiles), naive_map(window, tiles))


@settings(max_examples=30, deadline=None)
@given(window=WINDOWS, tiles=SIZES)
def test_lists_are_the_map_in_strictly_increasing_order(window, tiles) -> None:
    indices = kept_indices(window, tiles)
    assert indices.dtype is torch.int32
    assert indices.shape[1] == 1 or bool((indices.diff(dim=1) > 0).all())
    rows = [row.nonzero().flatten().tolist() for row in naive_map(window, tiles)]
    assert indices.tolist() == rows


def test_an_odd_window_is_shifted_inside_at_the_border() -> None:
    rows = kept_indices((3, 1, 1), (6, 1, 1)).tolist()
    assert rows == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [3, 4, 5]]


def test_an_even_window_keeps_one_tile_more() -> None:
    assert torch.equal(kept_map((2, 4, 1), (6, 6, 2)), kept_map((3, 5, 1), (6, 6, 2)))
    assert kept_indices((4, 1, 1), (6, 1, 1)).tolist()[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("window", "tiles"), [(6, 6), (7, 6), (100, 6), (4, 5), (5, 5)])
def test_a_window_of_the_axis_or_more_is_full(window, tiles) -> None:
    assert is_full((window, 1, 1), (tiles, 1, 1))
    assert bool(kept_map((window, 1, 1), (tiles, 1, 1)).all())


def test_an_even_window_of_the_whole_axis_is_not_one_more() -> None:
    assert effective_window((6, 2, 10), (6, 6, 10)) == (6, 3, 10)


@settings(max_examples=60, deadline=None)
@given(window=WINDOWS, tiles=SIZES)
def test_every_query_tile_has_the_same_work(window, tiles) -> None:
    per_row = naive_map(window, tiles).sum(1)
    assert per_row.unique().tolist() == [tile_count(window, tiles)]
    assert tile_density(window, tiles) == pytest.approx(
        float(naive_map(window, tiles).float().mean())
    )


@settings(max_examples=40, deadline=None)
@given(
    window=WINDOWS,
    grid=st.tuples(*[st.integers(1, 7)] * 3),
    tile=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_the_density_of_pairs_counts_tokens_of_ragged_tiles(window, grid, tile) -> None:
    tiles = tiles_of(grid, tile)
    lengths = torch.tensor(
        [
            torch.Size(
                min(step, size - place * step)
                for step, size, place in zip(tile, grid, where, strict=True)
            ).numel()
            for where in product(*map(range, tiles))
        ],
        dtype=torch.float64,
    )
    pairs = lengths @ naive_map(window, tiles).double() @ lengths
    assert pair_density(window, grid, tile) == pytest.approx(float(pairs / lengths.sum() ** 2))


def test_published_windows_have_the_published_densities() -> None:
    wan, hunyuan = (3, 6, 10), (5, 6, 10)
    assert tile_density((3, 1, 10), wan) == pytest.approx(1 / 6)
    assert tile_density((1, 5, 7), wan) == pytest.approx(35 / 180)
    assert tile_density((3, 3, 3), wan) == pytest.approx(0.15)
    assert tile_density((3, 3, 3), hunyuan) == pytest.approx(1 - 0.91)
    assert tile_density((5, 5, 5), hunyuan) == pytest.approx(1 - 0.5833, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(WINDOWS, min_size=1, max_size=4),
    tiles=SIZES,
    query_text=st.integers(0, 3),
    key_text=st.integers(0, 3),
)
def test_lists_keep_text_and_let_text_attend_to_everything(
    windows, tiles, query_text, key_text
) -> None:
    indices, counts, uniform = tile_lists(windows, tiles, query_text=query_text, key_text=key_text)
    num = tiles[0] * tiles[1] * tiles[2]
    assert indices.shape[:3] == counts.shape
    assert uniform == (len(counts.unique()) == 1)
    heads = counts.shape[1]
    assert heads == (1 if len({effective_window(w, tiles) for w in windows}) == 1 else len(windows))
    for head in range(heads):
        expected = torch.ones(num + query_text, num + key_text, dtype=torch.bool)
        expected[:num, :num] = naive_map(windows[head], tiles)
        for row in range(num + query_text):
            listed = indices[0, head, row, : counts[0, head, row]].tolist()
            assert listed == expected[row].nonzero().flatten().tolist()
