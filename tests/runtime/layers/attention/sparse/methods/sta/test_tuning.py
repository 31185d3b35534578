from dataclasses import replace
from itertools import product

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    SearchFile,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    StrategyRecord,
    load_strategy,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.tuning import tune, tune_files
from multimodal_gen.runtime.layers.attention.sparse.windows import tile_density

TILES = (3, 2, 4)
WINDOWS = ((1, 1, 1), (1, 2, 4), (3, 2, 1))


def search(l2: torch.Tensor, windows=WINDOWS, tiles=TILES) -> SearchFile:
    return SearchFile(windows=windows, l2=l2.double(), l1=l2.double(), tiles=tiles)


def losses(steps=2, layers=2, heads=2, candidates=3, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(candidates, steps, layers, heads, generator=generator, dtype=torch.float64)


def test_every_head_takes_the_window_of_least_mean_loss() -> None:
    first, second = losses(seed=1), losses(seed=2)
    tuned, assigned = tune({"a": search(first), "b": search(second)}, skip_time_steps=0)
    mean = (first + second) / 2
    expected = [
        [[WINDOWS[int(mean[:, t, n, h].argmin())] for h in range(2)] for n in range(2)]
        for t in range(2)
    ]
    got = [[list(layer) for layer in step] for step in tuned.windows]
    assert got == expected
    assert assigned.loss == pytest.approx(float(mean.amin(0).sum()))
    assert assigned.bound == assigned.loss


def test_windows_in_another_order_are_the_same_windows() -> None:
    found = losses()
    turned = search(found.flip(0), windows=WINDOWS[::-1])
    one, _ = tune({"a": search(found), "b": turned}, skip_time_steps=0)
    assert one.windows == tune({"a": search(found)}, skip_time_steps=0)[0].windows


def test_first_steps_stay_dense() -> None:
    tuned, _ = tune({"a": search(losses(steps=4))}, skip_time_steps=2)
    dense, sparse = tuned.windows[:2], tuned.windows[2:]
    assert {w for step in dense for layer in step for w in layer} == {TILES}
    assert TILES not in {w for step in sparse for layer in step for w in layer}


def test_a_tuned_strategy_records_the_grid_of_its_searches() -> None:
    searches = {name: replace(search(losses()), tile_size=(1, 2, 2)) for name in "ab"}
    tuned, _ = tune(searches, skip_time_steps=0)
    assert tuned.made_for == StrategyRecord(tiles=TILES, tile_size=(1, 2, 2))
    searches["b"] = replace(searches["b"], tile_size=(1, 2, 1))
    with pytest.raises(ConfigError, match=r"same tile_size, got \(1, 2, 2\) in a and \(1, 2, 1\)"):
        tune(searches, skip_time_steps=0)


def test_a_full_window_among_the_candidates_is_never_the_best() -> None:
    found = torch.cat((losses(), torch.zeros(1, 2, 2, 2, dtype=torch.float64)))
    with_full = search(found, windows=(*WINDOWS, TILES))
    tuned, _ = tune({"a": with_full}, skip_time_steps=0)
    assert tuned.windows == tune({"a": search(losses())}, skip_time_steps=0)[0].windows


def test_ties_go_to_the_sparser_window() -> None:
    tuned, _ = tune(
        {"a": search(torch.ones(3, 1, 1, 1), windows=((3, 2, 1), (1, 1, 1), (1, 2, 4)))},
        skip_time_steps=0,
    )
    assert tuned.windows == ((((1, 1, 1),),),)


@pytest.mark.parametrize("target", [0.3, 0.45, 0.6, 0.75, 0.9, 1.0])
def test_a_target_density_gives_the_least_total_loss(target) -> None:
    found = losses(steps=2, layers=1, heads=3, seed=7)
    tuned, assigned = tune({"a": search(found)}, skip_time_steps=0, target_density=target)
    choices = (*WINDOWS, TILES)
    full = torch.cat((found, torch.zeros(1, 2, 1, 3, dtype=torch.float64))).flatten(1).T
    shares = [tile_density(window, TILES) for window in choices]
    best = min(
        sum(float(full[item, choice]) for item, choice in enumerate(picked))
        for picked in product(range(4), repeat=6)
        if sum(shares[choice] for choice in picked) / 6 <= target + 1e-9
    )
    assert assigned.loss == pytest.approx(best)
    assert tuned.mean_density(TILES) <= target + 1e-9
    assert assigned.bound <= best + 1e-9


def test_the_target_counts_the_dense_steps() -> None:
    tuned, _ = tune({"a": search(losses(steps=4))}, skip_time_steps=2, target_density=0.6)
    assert tuned.mean_density(TILES) <= 0.6
    shares = tuned.density(TILES)
    assert sum(map(sum, shares)) / 8 == pytest.approx(tuned.mean_density(TILES))
    with pytest.raises(
        ConfigError, match=r"at least 0.5208, which .* 2 dense steps of 4 leave, got 0.5"
    ):
        tune({"a": search(losses(steps=4))}, skip_time_steps=2, target_density=0.5)


def test_skipping_every_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="below the 2 steps of the searches, got 15"):
        tune({"a": search(losses())}, skip_time_steps=15)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (search(losses(), tiles=(5, 6, 10)), r"same tiles, got \(3, 2, 4\) in a and \(5, 6, 10\)"),
        (search(losses(), windows=((1, 1, 1), (1, 2, 4), (1, 1, 4))), "same windows, got"),
        (search(losses(steps=3)), r"same steps, layers and heads, got \(2, 2, 2\) in a and \(3, 2"),
    ],
)
def test_searches_that_do_not_fit_each_other_are_named(other, message) -> None:
    with pytest.raises(ConfigError, match=message):
        tune({"a": search(losses()), "b": other}, skip_time_steps=0)


def test_searches_of_full_windows_only_are_refused() -> None:
    with pytest.raises(ConfigError, match="a must have losses of a window that is not full"):
        tune({"a": search(losses(candidates=1), windows=(TILES,))}, skip_time_steps=0)


def test_files_are_tuned_into_a_file_that_reads_back(tmp_path) -> None:
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"mask_search_{number}.json")
        search(losses(seed=number)).write(paths[-1])
    tuned, _ = tune_files(paths, skip_time_steps=1)
    tuned.write(tmp_path / "mask_strategy.json")
    assert load_strategy(tmp_path / "mask_strategy.json").windows == tuned.windows
