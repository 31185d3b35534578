"""."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    Strategy,
    StrategyRecord,
    fitted,
    load_strategy,
    record_path,
)

SMALL = '{"0_0_0": [5, 6, 10], "0_0_1": [5, 6, 10], "1_0_0": [3, 3, 3], "1_0_1": [1, 6, 10]}'
TILES = (5, 6, 10)


def by_step(*windows, made_for=None, tile_size=None) -> Strategy:
    """One layer and one head, a window per step."""
    record = StrategyRecord(tiles=made_for, tile_size=tile_size)
    return Strategy(windows=tuple(((window,),) for window in windows), made_for=record)


def test_a_file_holds_a_window_per_step_layer_and_head() -> None:
    strategy = Strategy.parse(SMALL)
    assert (strategy.num_steps, strategy.num_layers, strategy.num_heads) == (2, 1, 2)
    assert strategy.windows[0][0] == ((5, 6, 10), (5, 6, 10))
    assert strategy.windows[1][0] == ((3, 3, 3), (1, 6, 10))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_written_strategy_reads_back(data, tmp_path_factory) -> None:
    sizes = data.draw(st.tuples(*[st.integers(1, 3)] * 3))
    window = st.tuples(*[st.integers(1, 12)] * 3)
    strategy = Strategy(
        windows=tuple(
            tuple(tuple(data.draw(window) for _ in range(sizes[2])) for _ in range(sizes[1]))
            for _ in range(sizes[0])
        )
    )
    path = tmp_path_factory.mktemp("strategies") / "new" / "mask_strategy.json"
    strategy.write(path)
    assert load_strategy(path).windows == strategy.windows
    assert set(json.loads(path.read_text())) == {
        f"{t}_{n}_{h}" for t in range(sizes[0]) for n in range(sizes[1]) for h in range(sizes[2])
    }
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_rewritten_file_is_read_again(tmp_path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"0_0_0": [1, 1, 1]}')
    assert load_strategy(path).windows[0][0] == ((1, 1, 1),)
    path.write_text('{"0_0_0": [3, 3, 11]}')
    assert load_strategy(path).windows[0][0] == ((3, 3, 11),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m must be JSON; cannot read JSON near '': Expecting value"),
        ("[[3, 3, 3]]", r"m must be a JSON object such as .*, got \[\[3, 3, 3\]\]"),
        ("{}", "m must have an entry per step, layer and head, got none"),
        ('{"0_0": [3, 3, 3]}', r"three indices such as \"0_12_3\", got '0_0'"),
        ('{"00_0_0": [3, 3, 3]}', "three indices .*, got '00_0_0'"),
        ('{"-1_0_0": [3, 3, 3]}', "three indices .*, got '-1_0_0'"),
        ('{"0_0_0 ": [3, 3, 3]}', "three indices .*, got '0_0_0 '"),
        ('{"grid": [3, 3, 3]}', "three indices .*, got 'grid'"),
        (
            '{"0_0_0": [3, 3, 3], "0_0_0": [3, 3, 3]}',
            "must be JSON; '0_0_0' must be given once, got it twice",
        ),
        ('{"0_0_0": [3, 3]}', r"three integers >= 1, got \[3, 3\] for '0_0_0'"),
        ('{"0_0_0": [3, 3, 0]}', r"three integers >= 1, got \[3, 3, 0\]"),
        ('{"0_0_0": [3, 3, 1.0]}', r"three integers >= 1, got \[3, 3, 1.0\]"),
        ('{"0_0_0": [3, 3, true]}', r"three integers >= 1, got \[3, 3, True\]"),
        ('{"0_0_0": [3, 3, NaN]}', "must be JSON; numbers must be finite, got NaN"),
        ('{"0_0_0": "333"}', "three integers >= 1, got '333'"),
        ('{"0_0_0": null}', "three integers >= 1, got None"),
        ('{"0_0_0": {"a": 1, "b": 2, "c": 3}}', "three integers >= 1, got {'a': 1"),
        (
            '{"0_0_0": [1, 1, 1], "1_0_1": [1, 1, 1]}',
            "got 2 of 2 x 1 x 2; missing: 0_0_1, 1_0_0$",
        ),
        (
            '{"999999_0_0": [1, 1, 1]}',
            r"got 1 of 1000000 x 1 x 1; missing: 0_0_0, 1_0_0, 2_0_0, \.\.\.",
        ),
        ("[" * 100_000, "m must be JSON"),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Strategy.parse(text, name="m")


def test_a_missing_file_and_a_folder_are_named(tmp_path) -> None:
    absent = tmp_path / "absent.json"
    named = f"readable file, got {str(absent)!r}: the file cannot be read: No such file"
    with pytest.raises(ConfigError, match=named):
        load_strategy(absent)
    with pytest.raises(ConfigError, match=r"readable file, .*: this is a folder"):
        load_strategy(tmp_path)
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="the file is not UTF-8 text"):
        load_strategy(tmp_path / "latin.json")


def test_a_folder_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"mask strategy must be written to a file, got .*"):
        by_step((1, 1, 1)).write(tmp_path / "file" / "s.json")


def test_a_fitting_strategy_stays_as_it_is() -> None:
    strategy = Strategy.parse(SMALL)
    assert fitted(strategy, tiles=TILES, num_steps=2) == (strategy, ())
    strategy.check_sizes(num_heads=2, num_layers=1)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"num_heads": 12}, "it is for 2 heads per layer, the run has 12"),
        ({"num_heads": 2, "num_layers": 40}, "it is for 1 layers, the run has 40"),
        ({"num_heads": 2, "layer": 3}, "it is for 1 layers, the run has at least 4"),
    ],
)
def test_other_heads_or_layers_are_refused_with_both_numbers(run, message) -> None:
    with pytest.raises(ConfigError, match=f"{message}; make one .*`sglang attention sta search`"):
        Strategy.parse(SMALL).check_sizes(**run)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"tiles": TILES, "num_steps": 30}, "it is for 2 steps, the run has 30"),
        (
            {"tiles": (4, 6, 10), "num_steps": 2},
            "it has windows of up to 5x6x10 tiles, the run has 4x6x10",
        ),
    ],
)
def test_other_steps_or_another_grid_are_refused_with_both_numbers(run, message) -> None:
    with pytest.raises(
        ConfigError, match=f"{re.escape(message)}; give retarget=true .* sta search"
    ):
        fitted(Strategy.parse(SMALL), **run)


def test_a_uniform_window_fits_every_grid_that_holds_it() -> None:
    strategy = Strategy(windows=((((3, 3, 3),) * 2,),) * 2)
    assert fitted(strategy, tiles=(3, 6, 10), num_steps=2) == (strategy, ())
    with pytest.raises(ConfigError, match="windows of up to 3x3x3 tiles, the run has 2x6x10"):
        fitted(strategy, tiles=(2, 6, 10))


def test_steps_are_rescaled_by_relative_position() -> None:
    dense, late = (5, 6, 10), (3, 3, 3)
    strategy = by_step(*[dense] * 15, *[late] * 35)
    found, notes = fitted(strategy, tiles=TILES, num_steps=30, retarget=True)
    assert [step[0][0] for step in found.windows] == [dense] * 9 + [late] * 21
    assert notes == ("mask strategy is for 50 steps and was rescaled to 30 by relative position",)
    longer, _ = fitted(strategy, tiles=TILES, num_steps=100, retarget=True)
    assert [step[0][0] for step in longer.windows] == [dense] * 30 + [late] * 70


def test_one_step_takes_the_middle_of_many() -> None:
    strategy = by_step((5, 6, 10), (3, 3, 3), (1, 1, 1))
    found, _ = fitted(strategy, tiles=TILES, num_steps=1, retarget=True)
    assert found.windows == ((((3, 3, 3),),),)


def test_windows_are_rescaled_by_grid_and_full_axes_stay_full() -> None:
    strategy = by_step((5, 6, 10), (5, 3, 3), (1, 6, 10), (3, 3, 5), made_for=TILES)
    found, notes = fitted(strategy, tiles=(10, 6, 20), num_steps=4, retarget=True)
    assert [step[0][0] for step in found.windows] == [
        (10, 6, 20),
        (10, 3, 7),
        (3, 6, 20),
        (7, 3, 11),
    ]
    assert notes == (
        "mask strategy is for 5x6x10 tiles, the run has 10x6x20; its windows were rescaled",
    )
    smaller, _ = fitted(strategy, tiles=(1, 3, 5), retarget=True)
    assert [step[0][0] for step in smaller.windows] == [
        (1, 3, 5),
        (1, 1, 1),
        (1, 3, 5),
        (1, 1, 3),
    ]


@settings(max_examples=60, deadline=None)
@given(
    old=st.tuples(*[st.integers(1, 9)] * 3),
    new=st.tuples(*[st.integers(1, 9)] * 3),
    sizes=st.tuples(*[st.integers(1, 9)] * 3),
)
def test_rescaled_windows_are_odd_or_full_and_within_the_grid(old, new, sizes) -> None:
    window = tuple(min(pair) for pair in zip(sizes, old, strict=True))
    found, _ = fitted(by_step(old, window, made_for=old), tiles=new, retarget=True)
    rescaled = found.windows[1][0][0]
    if old == new:
        assert rescaled == window
        return
    for size, axis, was, grid in zip(rescaled, new, window, old, strict=True):
        assert 1 <= size <= axis
        assert size % 2 == 1 or size == axis
        if was == grid:
            assert size == axis


def test_density_is_by_step_and_layer() -> None:
    strategy = Strategy.parse(SMALL)
    assert strategy.density(TILES) == ((1.0,), (pytest.approx((27 / 300 + 0.2) / 2),))


def test_no_grid_is_made_out_of_windows_that_fit_the_run(tmp_path) -> None:
    path = tmp_path / "s.json"
    windows = [(1, 1, 3), (1, 1, 1), (1, 1, 1)]
    by_step(*windows).write(path)
    strategy = load_strategy(path)
    for retarget in (False, True):
        found, notes = fitted(
            strategy, tiles=(3, 2, 3), tile_size=(1, 2, 2), num_steps=3, retarget=retarget
        )
        assert found.windows == strategy.windows
        (note,) = notes
        assert "does not say which grid it is for; its first step has windows of 1x1x3" in note
        assert 'with .meta.json appended, {"tiles": [1, 1, 3]}, says so' in note


def test_a_recorded_grid_is_refused_with_numbers_unless_retargeted(tmp_path) -> None:
    path = tmp_path / "s.json"
    by_step((3, 2, 3), (1, 1, 1), made_for=(3, 2, 3), tile_size=(1, 2, 2)).write(path)
    strategy = load_strategy(path)
    run = {"tiles": (3, 2, 6), "tile_size": (1, 2, 1), "num_steps": 2}
    message = "it is for 3x2x3 tiles of 1x2x2 tokens, the run has 3x2x6 of 1x2x1; give retarget"
    with pytest.raises(ConfigError, match=message):
        fitted(strategy, **run)
    found, notes = fitted(strategy, **run, retarget=True)
    assert [step[0][0] for step in found.windows] == [(3, 2, 6), (1, 1, 3)]
    assert len(notes) == 1
    assert fitted(strategy, tiles=(3, 2, 3), tile_size=(1, 2, 2)) == (strategy, ())


def test_as_many_tiles_of_another_size_are_another_grid() -> None:
    strategy = by_step((3, 3, 1), made_for=(3, 3, 3), tile_size=(2, 2, 2))
    with pytest.raises(ConfigError, match="3x3x3 tiles of 2x2x2 tokens, the run has 3x3x3 of 2x2x"):
        fitted(strategy, tiles=(3, 3, 3), tile_size=(2, 2, 4))
    found, _ = fitted(strategy, tiles=(3, 3, 3), tile_size=(2, 2, 4), retarget=True)
    assert found.windows == strategy.windows


def test_the_size_of_a_tile_that_spans_its_axis_does_not_matter() -> None:
    strategy = by_step((1, 3, 1), made_for=(1, 3, 3), tile_size=(6, 8, 8))
    assert fitted(strategy, tiles=(1, 3, 3), tile_size=(1, 8, 8)) == (strategy, ())


def test_retargeted_steps_do_not_hide_the_grid_of_windows_left_out() -> None:
    strategy = by_step((3, 2, 6), (1, 1, 3), (1, 1, 3))
    found, notes = fitted(strategy, tiles=(3, 2, 3), num_steps=1, retarget=True)
    assert found.windows == ((((1, 1, 1),),),)
    assert len(notes) == 2


def test_a_record_is_written_beside_the_file_and_read_back(tmp_path) -> None:
    path = tmp_path / "s.json"
    written = by_step((1, 1, 1), made_for=(3, 2, 3), tile_size=(1, 2, 2))
    written.write(path)
    assert json.loads(path.read_text()) == {"0_0_0": [1, 1, 1]}
    assert {file.name for file in tmp_path.iterdir()} == {"s.json", "s.json.meta.json"}
    assert load_strategy(path).made_for == written.made_for
    by_step((1, 1, 3)).write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["s.json"]
    assert load_strategy(path).made_for == StrategyRecord()


def test_a_record_by_hand_needs_the_tiles_only(tmp_path) -> None:
    path = tmp_path / "s.json"
    path.write_text(SMALL)
    assert load_strategy(path).made_for.tiles is None
    record_path(path).write_text('{"tiles": [5, 6, 10]}')
    with pytest.raises(ConfigError, match="it is for 5x6x10 tiles, the run has 5x6x12"):
        fitted(load_strategy(path), tiles=(5, 6, 12), tile_size=(6, 8, 8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a readable JSON file: cannot read JSON near '{': Expecting"),
        ("[1]", r"must be an object with the fields tiles, tile_size, sha256, got \[1\]"),
        ('{"tile": [1, 1, 1]}', r"have no fields but tiles, tile_size, sha256, got \['tile'\]"),
        ('{"tiles": [1, 1]}', r"tiles must be a list of 3, got \[1, 1\]"),
        ('{"tile_size": [1, 1, 0]}', r"tile_size\[2\] must be an integer >= 1, got 0"),
        ('{"sha256": "00"}', "must belong to 's.json', got that of another strategy"),
    ],
)
def test_a_malformed_or_foreign_record_is_refused_with_the_remedy(
    tmp_path, content, message
) -> None:
    path = tmp_path / "s.json"
    path.write_text(SMALL)
    record_path(path).write_text(content)
    with pytest.raises(
        ConfigError, match=rf"record of .*s\.json\.meta\.json'.*{message}.*; delete it"
    ):
        load_strategy(path)
