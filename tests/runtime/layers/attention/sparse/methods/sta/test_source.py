import logging

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    BranchLosses,
    SearchFile,
    branch_folder,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    Strategy,
    StrategyRecord,
    WindowSource,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.tuning import tuned_strategy

TILES = (3, 2, 4)
FULL, CUBE, ROW = TILES, (1, 1, 1), (1, 1, 4)


def strategy(steps: int = 2) -> Strategy:
    """Two layers of two heads: dense at first, then a window per layer and head."""
    later = ((CUBE, ROW), (ROW, CUBE))
    record = StrategyRecord(tiles=TILES)
    return Strategy(windows=(((FULL, FULL),) * 2, *[later] * (steps - 1)), made_for=record)


def windows(source: WindowSource, **changes):
    call = {"step": 1, "num_steps": 2, "first_head": 0, "num_heads": 2} | changes
    return source.windows(changes.pop("tiles", TILES), **{k: call[k] for k in call if k != "tiles"})


def test_windows_are_those_of_the_step_and_the_layer() -> None:
    source = WindowSource(strategy=strategy(), layer=1, num_heads=2)
    assert windows(source, step=0) == (FULL, FULL)
    assert windows(source) == (ROW, CUBE)


def test_a_process_takes_the_windows_of_its_own_heads() -> None:
    source = WindowSource(strategy=strategy(), layer=0, num_heads=2)
    assert windows(source, first_head=1, num_heads=1) == (ROW,)


def test_one_window_serves_every_head_of_any_layer() -> None:
    source = WindowSource(strategy=None, window=(3, 3, 3), num_heads=4)
    assert windows(source, step=99, num_steps=None, num_heads=4) == ((3, 3, 3),) * 4


def test_a_strategy_is_refused_where_it_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="it is for 2 heads per layer, the run has 12"):
        WindowSource(strategy=strategy(), layer=0, num_heads=12)
    with pytest.raises(ConfigError, match="it is for 2 layers, the run has at least 6"):
        WindowSource(strategy=strategy(), layer=5, num_heads=2)
    with pytest.raises(ConfigError, match="it is for 2 layers, the run has 7"):
        WindowSource(strategy=strategy(), layer=1, num_layers=7, num_heads=2)
    with pytest.raises(UsageError, match="must know the layer's index, got a layer without one"):
        WindowSource(strategy=strategy(), layer=None, num_heads=2)
    source = WindowSource(strategy=strategy(), layer=0, num_heads=2)
    with pytest.raises(ConfigError, match="it is for 2 steps, the run has 30"):
        windows(source, num_steps=30)
    with pytest.raises(ConfigError, match="it is for 3x2x4 tiles, the run has 3x2x5"):
        windows(source, tiles=(3, 2, 5))


def test_a_step_past_the_file_is_refused_where_the_run_tells_no_number() -> None:
    source = WindowSource(strategy=strategy(), layer=0, num_heads=2)
    with pytest.raises(UsageError, match="it has 2 and this is step 2"):
        windows(source, step=2, num_steps=None)


def test_retargeting_rescales_and_says_so_once(caplog) -> None:
    found = strategy()
    with caplog.at_level(logging.WARNING):
        for layer in (0, 1):
            source = WindowSource(strategy=found, retarget=True, layer=layer, num_heads=2)
            assert windows(source, step=1, num_steps=4) == (FULL, FULL)
            assert FULL not in windows(source, step=2, num_steps=4)
    (record,) = caplog.records
    assert "is for 2 steps and was rescaled to 4 by relative position" in record.getMessage()


def _searches(folder, branch, best: int, steps: int = 3) -> None:
    l2 = torch.ones(2, steps, 1, 2, dtype=torch.float64)
    l2[best] = 0.25
    losses = BranchLosses(windows=(CUBE, ROW), l2=l2, l1=l2)
    path = branch_folder(folder, branch, width=8, height=8) / "mask_search_a.json"
    SearchFile(losses=losses, tiles=TILES, settings={}).write(path)


def test_a_tuning_run_writes_the_file_that_it_goes_on_with(tmp_path) -> None:
    path = tmp_path / "out" / "mask_strategy.json"
    arguments = {"skip_time_steps": 1, "target_density": None}
    _searches(tmp_path, POSITIVE, best=1)
    found = tuned_strategy(str(tmp_path), str(path), both=False, **arguments)
    assert found.windows == (((FULL, FULL),), ((ROW, ROW),), ((ROW, ROW),))
    assert Strategy.parse(path.read_text()).windows == found.windows

    with pytest.raises(ConfigError, match="must be a folder with files"):
        tuned_strategy(str(tmp_path), str(path), both=True, **arguments)
    _searches(tmp_path, NEGATIVE, best=0)
    both = tuned_strategy(str(tmp_path), str(path), both=True, **arguments)
    assert both.windows[1] == ((CUBE, CUBE),)  # a tie, which the sparser window wins
