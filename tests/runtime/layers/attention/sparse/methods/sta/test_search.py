"""."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    SearchFile,
    branch_folder,
    candidates,
    find_searches,
    search_name,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    effective_window,
    tile_count,
)


def test_the_patterns_scaled_to_the_published_grid_are_the_published_windows() -> None:
    assert set(candidates((5, 6, 10))) == {
        (5, 3, 3),
        (3, 3, 5),
        (1, 6, 10),
        (5, 6, 1),
        (5, 1, 10),
    }


def test_the_windows_published_for_a_grid_are_among_its_candidates() -> None:
    published = {(3, 1, 10), (1, 5, 7), (3, 3, 3), (1, 6, 5), (1, 3, 10), (3, 6, 1)}
    assert published <= set(candidates((3, 6, 10)))


@given(tiles=st.tuples(*[st.integers(1, 12)] * 3).filter(lambda tiles: max(tiles) > 1))
def test_candidates_of_any_grid_are_distinct_sparse_and_sorted(tiles) -> None:
    found = candidates(tiles)
    kept = [effective_window(window, tiles) for window in found]
    assert found
    assert len(set(kept)) == len(kept)
    assert tiles not in kept
    work = [tile_count(window, tiles) for window in found]
    assert work == sorted(work)
    assert all(1 <= size <= n for window in found for size, n in zip(window, tiles, strict=True))


def test_windows_that_keep_the_same_tiles_count_once_as_what_they_keep() -> None:
    assert candidates((5, 2, 1), [(3, 1, 1), (2, 1, 1), (9, 1, 1)]) == (
        (3, 1, 1),
        (5, 1, 1),
    )


def test_a_grid_of_one_tile_has_nothing_to_search() -> None:
    with pytest.raises(UsageError, match="smaller than the grid, which has 1x1x1 tiles; use a"):
        candidates((1, 1, 1))


GOOD = {"[3, 1, 10]": [[[0.5, 0.25]]], "[1, 6, 5]": [[[0.125, 1]]]}


def test_a_written_search_reads_back(tmp_path) -> None:
    torch.manual_seed(0)
    written = SearchFile(
        windows=((3, 1, 2), (1, 1, 5)),
        l2=torch.rand(2, 3, 4, 5, dtype=torch.float64),
        l1=torch.rand(2, 3, 4, 5, dtype=torch.float64),
        tiles=(5, 6, 10),
        settings={"prompt": "a fox"},
    )
    path = branch_folder(tmp_path, POSITIVE, width=96, height=64) / search_name("a fox")
    written.write(path)
    assert path.parent.name == "mask_search_result_pos_96x64"
    content = json.loads(path.read_text())
    assert content["L2_loss"]["[3, 1, 2]"] == written.l2[0].tolist()

    read = SearchFile.read(path)
    assert torch.equal(read.l2, written.l2)
    assert torch.equal(read.l1, written.l1)
    assert (read.windows, read.tiles) == (written.windows, (5, 6, 10))
    assert read.settings["prompt"] == "a fox"


def test_a_search_of_another_program_tells_its_grid_by_its_windows(tmp_path) -> None:
    path = tmp_path / "mask_search_a.json"
    path.write_text(json.dumps({"L2_loss": GOOD, "L1_loss": GOOD}))
    found = SearchFile.read(path)
    assert found.tiles == (3, 6, 10)
    assert found.l2[:, 0, 0, 1].tolist() == [0.25, 1.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"search file '/.*/s\.json' must be a readable JSON"),
        ([], r"must be a JSON object, got \[\]"),
        ({"L2_loss": GOOD}, "must have losses by window under 'L1_loss', got None"),
        ({"L2_loss": {}, "L1_loss": GOOD}, "must have losses by window under 'L2_loss', got {}"),
        ({"L2_loss": {"3, 1": [[[1]]]}, "L1_loss": GOOD}, "must have windows such as"),
        ({"L2_loss": {"[0, 1, 1]": [[[1]]]}, "L1_loss": GOOD}, r"got '\[0, 1, 1\]'"),
        ({"L2_loss": {"[3, 1, 1]": [[1]]}, "L1_loss": GOOD}, "numbers by step, layer and head"),
        (
            {"L2_loss": {"[3, 1, 1]": [[[1], [1, 2]]]}, "L1_loss": GOOD},
            "numbers by step, layer and head",
        ),
        ({"L2_loss": {"[3, 1, 1]": [[["a"]]]}, "L1_loss": GOOD}, "numbers by step, layer and head"),
        ({"L2_loss": {"[3, 1, 1]": [[[-1]]]}, "L1_loss": GOOD}, "must have finite losses >= 0"),
        ('{"L2_loss": {"[3, 1, 1]": [[[NaN]]]}}', "JSON file: numbers must be finite"),
        (
            {"L2_loss": {"[3, 1, 1]": [[[1]]], "[3,1,1]": [[[1]]]}, "L1_loss": GOOD},
            "every window once under 'L2_loss'",
        ),
        (
            {"L2_loss": GOOD, "L1_loss": {"[3, 1, 1]": [[[1]]]}},
            "the same windows and sizes in L1_loss and L2_loss",
        ),
        (
            {"search": {"tiles": [1]}, "L2_loss": GOOD, "L1_loss": GOOD},
            r"must have tiles .*\[1\]",
        ),
        (
            {"search": {"tile_size": [2.0, 2, 2]}, "L2_loss": GOOD, "L1_loss": GOOD},
            r"must have a tile_size such as .*, got \[2.0, 2, 2\]",
        ),
    ],
)
def test_a_malformed_search_is_refused_with_the_reason(tmp_path, content, message) -> None:
    path = tmp_path / "s.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        SearchFile.read(path)


def test_names_are_readable_and_differ_with_the_prompt() -> None:
    assert search_name("A fox / in snow").startswith("mask_search_A-fox-in-snow-")
    long = "word " * 100
    assert len({search_name(p) for p in ("a b", "a-b", "a  b", long, long + "x", "\u96ea")}) == 6
    assert all(len(search_name(p)) < 100 and search_name(p).isascii() for p in (long, "\u96ea"))


def test_searches_are_found_in_their_folder_and_above_it(tmp_path) -> None:
    for branch in (POSITIVE, NEGATIVE):
        folder = branch_folder(tmp_path, branch, width=96, height=64)
        folder.mkdir()
        (folder / f"mask_search_{branch}.json").write_text("{}")
        (folder / ".mask_search_x.json.1.partial").write_text("{}")
        (file,) = find_searches(tmp_path, branch)
        assert file == folder / f"mask_search_{branch}.json"
        assert find_searches(folder, POSITIVE) == (file,)


def test_a_folder_without_searches_names_the_command(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"files mask_search_\*.json, got .* sta search` makes"):
        find_searches(tmp_path / "absent")


def test_several_sizes_are_not_mixed(tmp_path) -> None:
    for width in (96, 128):
        branch_folder(tmp_path, POSITIVE, width=width, height=64).mkdir()
    with pytest.raises(ConfigError, match=r"one size of output, got .*_pos_128x64, .*_pos_96x64"):
        find_searches(tmp_path)
