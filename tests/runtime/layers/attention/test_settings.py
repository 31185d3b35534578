"""What ranks compare of a backend's parameters."""

import pytest

from multimodal_gen.runtime.layers.attention.backends.sliding_tile_attn import SlidingTileConfig
from multimodal_gen.runtime.layers.attention.settings import settings_text


def test_parameters_at_their_defaults_are_left_out():
    assert settings_text(None) == "defaults"
    assert settings_text(SlidingTileConfig(window=(3, 3, 3))) == "window=(3, 3, 3)"


@pytest.mark.parametrize("same", [True, False])
def test_the_content_of_a_file_counts_and_not_where_it_lies(tmp_path, same):
    told = []
    for name, content in (("a.json", "{}"), ("b.json", "{}" if same else "{ }")):
        (tmp_path / name).write_text(content)
        told.append(settings_text(SlidingTileConfig(mask_strategy_file_path=str(tmp_path / name))))
    assert (told[0] == told[1]) is same


def test_long_texts_stay_short_and_differ():
    long = [SlidingTileConfig(window=(3, 3, 3), dense_layers=f"{i},{'1,' * 200}2") for i in (8, 9)]
    texts = [settings_text(config) for config in long]
    assert [len(text) for text in texts] == [240, 240]
    assert texts[0] != texts[1]
