"""Which steps are meant, by their noise levels and shares, and ratios that change over them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.config import (
    IndexSelector,
    RatioSchedule,
    SigmaSelector,
    StepSet,
    build_config,
    config_as_dict,
    config_at,
    ratio_now,
    settings_text,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.settings import read_mapping

SCHEDULE = RatioSchedule(((0.0, 0.5), (0.4, 0.9)))
SIGMAS = (1.0, 0.96, 0.9, 0.8, 0.6, 0.3, 0.1)


def steps_of(text, sigmas=SIGMAS):
    selector = SigmaSelector.parse(text)
    return [i for i, sigma in enumerate(sigmas) if sigma in selector]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (">0.9", [0, 1]),
        (">=0.9", [0, 1, 2]),
        ("<0.3", [6]),
        ("<= .3", [5, 6]),
        ("0.3-0.9", [2, 3, 4, 5]),
        (">9e-1, <0.2", [0, 1, 6]),
        ([">0.9", "0.1-0.1"], [0, 1, 6]),
        (">14", []),
    ],
)
def test_noise_levels_are_named_by_ranges(text, steps):
    assert steps_of(text) == steps


def test_a_level_that_float32_rounded_is_still_the_level():
    rounded = (0.8999999761581421, 0.9000000357627869)
    assert steps_of(">=0.9", rounded) == [0, 1]
    assert steps_of(">0.9", rounded) == steps_of("<0.9", rounded) == []


@pytest.mark.parametrize("value", ["0.9", "", ">", "> 1 2", ">-1", "5-", 0.9, [0.9], None, ">nan"])
def test_what_is_no_range_of_levels_is_refused(value):
    with pytest.raises(ConfigError, match=r"dense_sigma must be ranges of sigmas such as .>0.9."):
        SigmaSelector.parse(value, name="dense_sigma")
    with pytest.raises(ConfigError, match=r"ranges that run upwards, got .0.9-0.4."):
        SigmaSelector.parse("0.9-0.4")


LEVELS = st.floats(0.01, 1000).map(lambda level: float(f"{level:.6g}"))
SELECTORS = st.lists(
    st.tuples(st.sampled_from((">", ">=", "<", "<=")), LEVELS).map(lambda it: f"{it[0]}{it[1]}")
    | st.tuples(LEVELS, LEVELS).map(lambda it: f"{min(it)}-{max(it)}"),
    min_size=1,
    max_size=3,
).map(SigmaSelector.parse)


@settings(max_examples=100, deadline=None)
@given(SELECTORS, SELECTORS, LEVELS)
def test_levels_in_both_are_those_in_each_and_text_reads_back(one, other, level):
    both = one & other
    assert (both is not None and level in both) == (level in one and level in other)
    again = SigmaSelector.parse(str(one))
    assert (level in again) == (level in one)


def test_steps_named_in_several_ways_satisfy_all_of_them():
    named = StepSet(indices=IndexSelector.parse("1-9")) & StepSet(
        sigma=SigmaSelector.parse(">=0.8")
    )
    assert named is not None
    named = named & StepSet(first=0.5)
    assert named is not None
    assert str(named) == "first 0.5 of all, of sigma >=0.8, among 1-9"
    assert [i for i in range(7) if named.holds(i, 7, SIGMAS)] == [1, 2]
    assert not named.holds(1, 7, None)
    assert (
        StepSet(indices=IndexSelector.parse("0")) & StepSet(indices=IndexSelector.parse("1"))
        is None
    )
    nothing = StepSet(sigma=SigmaSelector.parse(">1")) & StepSet(sigma=SigmaSelector.parse("<1"))
    assert nothing is None


@pytest.mark.parametrize(
    "text",
    [
        "sparsity={0.0: 0.5, 0.4: 0.9}",
        "VSA_sparsity={0:0.5,.4:0.9}",
        '{"sparsity": {"0.0": 0.5, "0.4": 0.9}}',
        {"sparsity": {0: 0.5, 0.4: 0.9}},
        "schedule.yaml",
        "schedule.json",
    ],
)
def test_a_schedule_of_ratios_is_read_from_every_form(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schedule.yaml").write_text("sparsity: {0.0: 0.5, 0.4: 0.9}\n")
    (tmp_path / "schedule.json").write_text('{"sparsity": {"0": 0.5, "0.4": 0.9}}')
    config = build_config(VideoSparseConfig, read_mapping(text), backend="video_sparse_attn")
    assert config.sparsity == SCHEDULE
    again = json.loads(json.dumps(config_as_dict(config)))
    assert build_config(VideoSparseConfig, again, backend="video_sparse_attn") == config
    assert settings_text(config) == "sparsity={0: 0.5, 0.4: 0.9}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({0.4: 0.9}, r"must say what it is from the first step on, such as .+, got \{0.4: 0.9\}"),
        ({}, "must say what it is from the first step on"),
        ({0: 0.5, 1: 0.9}, "must be a number in .+ or one for each part of the schedule"),
        ({0: 0.5, 0.4: 2}, "must be a number in"),
        ({0: 0.5, "late": 0.9}, "must be a number in"),
        ({0: 0.5, "0.0": 0.9}, "must have one number for each share of the schedule"),
        ({False: 0.5}, "must be a number in"),
    ],
)
def test_a_schedule_that_is_none_is_refused(given, message):
    with pytest.raises(ConfigError, match=f"`sparsity` of video_sparse_attn {message}"):
        build_config(VideoSparseConfig, {"sparsity": given}, backend="video_sparse_attn")


@pytest.mark.parametrize(("total", "late"), [(10, 4), (50, 20), (4, 1), (8, 3), (1, 0), (2, 0)])
def test_each_part_begins_at_its_share_of_the_steps(total, late):
    ratios = [SCHEDULE.at(step, total) for step in range(total)]
    assert ratios == [0.5] * late + [0.9] * (total - late)


def test_the_parameters_of_a_step_are_numbers():
    config = VideoSparseConfig(sparsity=SCHEDULE, tile_size=(4, 8, 8))
    assert config_at(config, 3, 10) == VideoSparseConfig(sparsity=0.5, tile_size=(4, 8, 8))
    assert ratio_now(config_at(config, 4, 10).sparsity) == 0.9
    assert config_at(config, 4, 10) is config_at(config, 4, 10)
    plain = VideoSparseConfig(sparsity=0.5)
    assert config_at(plain, 4, None) is plain
    with pytest.raises(UsageError, match=r"sparsity=.+ must be used in a run whose number"):
        config_at(config, 4, None)
    with pytest.raises(ConfigError, match="`topk` of video_sparse_attn must not be given with"):
        VideoSparseConfig(sparsity=SCHEDULE, topk=3)
