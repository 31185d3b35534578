import logging

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import LayerSite
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import (
    SlidingTileConfig,
    SlidingTileRouter,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    SearchFile,
    branch_folder,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    Strategy,
    StrategyRecord,
)
from multimodal_gen.runtime.layers.attention.sparse.router import SparseLayer
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce
from multimodal_gen.runtime.managers.forward_context import set_forward_context

TILES = (3, 2, 4)
FULL, CUBE, ROW = TILES, (1, 1, 1), (1, 1, 4)


def strategy(steps: int = 2) -> Strategy:
    """Two layers of two heads: dense at first, then a window per layer and head."""
    later = ((CUBE, ROW), (ROW, CUBE))
    record = StrategyRecord(tiles=TILES)
    return Strategy(windows=(((FULL, FULL),) * 2, *[later] * (steps - 1)), made_for=record)


class Source:
    """The windows of a layer by a strategy file, on tiles of a single token."""

    def __init__(self, folder, found=None, *, layer=0, num_layers=None, num_heads=2, **options):
        if found is not None:
            options["mask_strategy_file_path"] = str(folder / "s.json")
            found.write(folder / "s.json")
        self.config = SlidingTileConfig(tile_size=(1, 1, 1), **options)
        self.warnings = WarnOnce()
        site = LayerSite(layer=layer, num_layers=num_layers)
        known = SparseLayer(num_heads=num_heads, site=site, warnings=self.warnings)
        self.router = SlidingTileRouter(known)
        self.router.prepare(self.config)

    def windows(self, *, tiles=TILES, step=1, num_steps=2, heads=slice(0, 2)):
        with set_forward_context(step, num_steps=num_steps, latent_grid=tiles) as context:
            patterns = self.router.pattern(self.config, tiles, heads, context)
        return tuple(pattern.window for pattern in patterns)


def test_windows_are_those_of_the_step_and_the_layer(tmp_path) -> None:
    source = Source(tmp_path, strategy(), layer=1)
    assert source.windows(step=0) == (FULL, FULL)
    assert source.windows() == (ROW, CUBE)


def test_a_process_takes_the_windows_of_its_own_heads(tmp_path) -> None:
    source = Source(tmp_path, strategy(), layer=0)
    assert source.windows(heads=slice(1, 2)) == (ROW,)


def test_one_window_serves_every_head_of_any_layer(tmp_path) -> None:
    source = Source(tmp_path, window=(3, 1, 3), layer=None, num_heads=4)
    assert source.windows(step=99, num_steps=None, heads=slice(0, 4)) == ((3, 1, 3),) * 4


def test_a_strategy_is_refused_where_it_does_not_fit(tmp_path) -> None:
    with pytest.raises(ConfigError, match="it is for 2 heads per layer, the run has 12"):
        Source(tmp_path, strategy(), layer=0, num_heads=12)
    with pytest.raises(ConfigError, match="it is for 2 layers, the run has at least 6"):
        Source(tmp_path, strategy(), layer=5)
    with pytest.raises(ConfigError, match="it is for 2 layers, the run has 7"):
        Source(tmp_path, strategy(), layer=1, num_layers=7)
    with pytest.raises(UsageError, match="must know the layer's index, got a layer without one"):
        Source(tmp_path, strategy(), layer=None)
    source = Source(tmp_path, strategy(), layer=0)
    with pytest.raises(ConfigError, match="it is for 2 steps, the run has 30"):
        source.windows(num_steps=30)
    with pytest.raises(ConfigError, match="it is for 3x2x4 tiles, the run has 3x2x5"):
        source.windows(tiles=(3, 2, 5))


def test_a_step_past_the_file_is_refused_where_the_run_tells_no_number(tmp_path) -> None:
    source = Source(tmp_path, strategy(), layer=0)
    with pytest.raises(UsageError, match="it has 2 and this is step 2"):
        source.windows(step=2, num_steps=None)


def test_retargeting_rescales_and_says_so_once(tmp_path, caplog) -> None:
    source = Source(tmp_path, strategy(), retarget=True)
    with caplog.at_level(logging.WARNING):
        for step in (0, 1):
            assert source.windows(step=step, num_steps=4) == (FULL, FULL)
            assert FULL not in source.windows(step=step + 2, num_steps=4)
    (record,) = caplog.records
    assert "is for 2 steps and was rescaled to 4 by relative position" in record.getMessage()


def _searches(folder, branch, best: int, steps: int = 3) -> None:
    l2 = torch.ones(2, steps, 1, 2, dtype=torch.float64)
    l2[best] = 0.25
    path = branch_folder(folder, branch, width=8, height=8) / "mask_search_a.json"
    SearchFile(windows=(CUBE, ROW), l2=l2, l1=l2, tiles=TILES).write(path)


def test_a_tuning_run_writes_the_file_that_it_goes_on_with(tmp_path) -> None:
    path = tmp_path / "out" / "mask_strategy.json"
    run = {"mask_strategy_file_path": str(path), "search_path": str(tmp_path), "skip_time_steps": 1}

    def tuned(mode: str) -> tuple:
        source = Source(tmp_path, sta_mode=mode, **run)
        found = tuple((source.windows(step=step, num_steps=3),) for step in range(3))
        assert Strategy.parse(path.read_text()).windows == found
        return found

    _searches(tmp_path, POSITIVE, best=1)
    assert tuned("STA_tuning") == (((FULL, FULL),), ((ROW, ROW),), ((ROW, ROW),))
    with pytest.raises(ConfigError, match="must be a folder with files"):
        tuned("STA_tuning_cfg")
    _searches(tmp_path, NEGATIVE, best=0)
    assert tuned("STA_tuning_cfg")[1] == ((CUBE, CUBE),)  # a tie, which the sparser window wins
