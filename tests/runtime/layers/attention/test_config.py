"""Configuration dataclasses: types, ranges, aliases, and what holds between parameters."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.declaration import SAGE
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    IndexSelector,
    StepSet,
    build_config,
    config_as_dict,
    first_of,
    option,
    parameters_of,
    settings_text,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import SageSLAConfig, SLAConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import SlidingTileConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.subblock import SubblockConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import SVG2Config
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba import VMoBAConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.settings import read_mapping

CONFIGS = Path(__file__).parents[4] / "configs" / "attention"
SPARSE = [member for member in AttentionBackendEnum if member.is_sparse]
CONFIGURABLE = [
    member for member in AttentionBackendEnum if parameters_of(backends_of(member)[0].config_cls)
]
# The documented parameters, and the aliases under which others know them.
DOCUMENTED = {
    SlidingTileConfig: {
        "mask_strategy_file_path": None,
        "sta_mode": "STA_inference",
        "skip_time_steps": 15,
    },
    VideoSparseConfig: {"sparsity": 0.0},
    VMoBAConfig: {
        "temporal_chunk_size": None,
        "temporal_topk": None,
        "spatial_chunk_size": None,
        "spatial_topk": None,
        "st_chunk_size": None,
        "st_topk": None,
        "moba_select_mode": "threshold",
        "moba_threshold": 0.25,
        "moba_threshold_type": "query_head",
        "first_full_step": 12,
        "first_full_layer": 0,
        "temporal_layer": 1,
        "spatial_layer": 1,
        "st_layer": 1,
    },
    SLAConfig: {
        "topk_ratio": 0.1,
        "feature_map": "softmax",
        "BLKQ": 128,
        "BLKK": 64,
        "use_bf16": True,
    },
    SageSLAConfig: {"topk_ratio": 0.5, "feature_map": "softmax", "use_bf16": True},
    SolConfig: {
        "tau": 1.0,
        "thresh_type": "diag",
        "kv_splits": "auto",
        "sink_tokens": 0,
        "sink_start": 0,
        "dense_steps": 10,
    },
    SubblockConfig: {
        "sparsity": 0.75,
        "n_k": 4,
        "n_q": 4,
        "skip_first_steps": 10,
        "skip_first_layers": 0,
        "min_seq_len": 4096,
    },
    SVG2Config: {
        "svg2_num_q_centroids": 300,
        "svg2_num_k_centroids": 1000,
        "svg2_top_p_kmeans": 0.9,
        "svg2_min_kc_ratio": 0.1,
        "svg2_kmeans_iter_init": 50,
        "svg2_kmeans_iter_step": 2,
        "svg2_zero_step_kmeans_init": False,
        "svg2_first_layers_fp": 0.03,
        "svg2_first_times_fp": 0.2,
    },
}
CHUNKS = {"temporal_chunk_size": 3, "spatial_chunk_size": [5, 13], "st_chunk_size": [7, 5, 13]}


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryTypeConfig(BackendConfig):
    """One parameter of every type."""

    needed: int = option(help="a number the kernel cannot guess")
    flag: bool = option(False)
    count: int = option(1, ge=1)
    share: float = option(0.5, ge=0, le=1, aliases=("old_share",))
    name: str = option("")
    mode: Literal["Fast", "Exact"] = option("Fast")
    size: Literal[64, 128] = option(64)
    version: Literal["auto", "2", "3"] = option("auto")
    sizes: tuple[int, ...] = option((), ge=1)
    pair: tuple[float, ...] | None = option(None, length=2)
    limit: int | Literal["auto"] = option("auto", ge=0)
    steps: IndexSelector | None = option(None)


def every(**raw):
    return build_config(EveryTypeConfig, {"needed": 1, **raw}, backend="every_attn")


@pytest.mark.parametrize("config_cls", DOCUMENTED, ids=lambda cls: cls.__name__)
def test_documented_parameters_have_their_documented_names_and_defaults(config_cls):
    parameters = parameters_of(config_cls)
    for name, default in DOCUMENTED[config_cls].items():
        assert parameters[name].default == default
        assert type(parameters[name].default) is type(default)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"flag": True}, True),
        ({"count": 7}, 7),
        ({"share": 1}, 1.0),
        ({"old_share": 0.25}, 0.25),
        ({"name": "x"}, "x"),
        ({"mode": " exact "}, "Exact"),
        ({"size": 128}, 128),
        ({"version": 3}, "3"),
        ({"sizes": [3, 4]}, (3, 4)),
        ({"pair": None}, None),
        ({"pair": [1, 0.5]}, (1.0, 0.5)),
        ({"limit": 5}, 5),
        ({"limit": "AUTO"}, "auto"),
        ({"steps": "0-3,38"}, IndexSelector.parse("0-3,38")),
        ({"steps": [1, 2]}, IndexSelector.parse("1,2")),
        ({"steps": 4}, IndexSelector.parse("4")),
    ],
    ids=str,
)
def test_a_value_is_converted_to_the_declared_type(raw, expected):
    (name,) = raw
    value = getattr(every(**raw), name.removeprefix("old_"))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"flag": 1}, "`flag` of every_attn must be true or false, got 1"),
        ({"flag": "true"}, "`flag` of every_attn must be true or false, got 'true'"),
        ({"count": True}, "`count` of every_attn must be an integer >= 1, got True"),
        ({"count": 1.0}, "`count` of every_attn must be an integer >= 1, got 1.0"),
        ({"count": 0}, "`count` of every_attn must be an integer >= 1, got 0"),
        ({"share": 1.5}, r"`share` of every_attn must be a number in \[0, 1\], got 1.5"),
        ({"share": float("nan")}, r"`share` of every_attn must be a number in \[0, 1\], got nan"),
        ({"share": 10**400}, "`share` of every_attn must be a number in"),
        ({"share": None}, r"`share` of every_attn must be a number in \[0, 1\], got None"),
        ({"name": 5}, "`name` of every_attn must be text, got 5"),
        (
            {"mode": "Fasst"},
            "`mode` of every_attn must be one of Fast, Exact, got 'Fasst', did you mean 'Fast'",
        ),
        ({"size": 96}, "`size` of every_attn must be one of 64, 128, got 96"),
        ({"size": 64.0}, "`size` of every_attn must be one of 64, 128, got 64.0"),
        ({"sizes": 3}, "`sizes` of every_attn must be a list of integers >= 1, got 3"),
        ({"sizes": [0]}, r"`sizes` of every_attn must be a list of integers >= 1, got \[0\]"),
        ({"sizes": "3,4"}, "`sizes` of every_attn must be a list of integers >= 1, got '3,4'"),
        ({"pair": [1]}, "`pair` of every_attn must be a list of 2 numbers or null, got"),
        ({"limit": -1}, "`limit` of every_attn must be an integer >= 0 or one of auto, got -1"),
        ({"steps": "3-1"}, "`steps` of every_attn must have ranges that run upwards"),
        ({"steps": 1.5}, "`steps` of every_attn must be indices from 0"),
        ({"steps": [0, -1]}, r"`steps` of every_attn must be indices from 0 .* got \[0, -1\]"),
        ({"steps": "9" * 5000}, "`steps` of every_attn must be indices from 0"),
        ({"shar": 1}, "parameters of every_attn must be among .* 'shar', did you mean 'share'"),
        ({3: 1}, "parameters of every_attn must be among needed, flag, .* got 3"),
        (
            {"share": 0.1, "old_share": 0.2},
            "`share` of every_attn must be given once, got it as 'share' and as 'old_share'",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_named_with_its_rule(raw, message):
    with pytest.raises(ConfigError, match=message):
        build_config(EveryTypeConfig, {"needed": 1, **raw}, backend="every_attn")


def test_a_missing_required_parameter_is_named_with_its_meaning():
    with pytest.raises(
        ConfigError, match=r"`needed` of every_attn must be given: a number the kernel cannot guess"
    ):
        build_config(EveryTypeConfig, {}, backend="every_attn")


def test_a_backend_without_parameters_says_so():
    with pytest.raises(ConfigError, match=r"torch_sdpa takes no parameters, got 'sparsity'"):
        build_config(BackendConfig, {"sparsity": 0.5}, backend="torch_sdpa")


def test_an_object_made_in_python_is_checked_too():
    assert VideoSparseConfig(sparsity=1).sparsity == 1.0
    with pytest.raises(
        ConfigError, match=r"`sparsity` of VideoSparseConfig must be a number in .+, got 1.5"
    ):
        VideoSparseConfig(sparsity=1.5)


def test_an_unsupported_annotation_is_the_programmers_error():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class OddConfig(BackendConfig):
        path: Path = option(Path("x"))

    with pytest.raises(TypeError, match=r"annotation that is not supported"):
        OddConfig()


def test_every_configuration_is_hashable_and_survives_a_round_trip():
    config = every(pair=[1, 2], steps="0-3,38", sizes=[1])
    assert hash(config) == hash(every(pair=[1, 2], steps="0-3,38", sizes=[1]))
    raw = config_as_dict(config)
    assert raw["steps"] == "0-3,38"
    assert raw["pair"] == [1.0, 2.0]
    assert build_config(EveryTypeConfig, raw, backend="every_attn") == config


def test_sparse_backends_share_dense_steps_and_dense_layers():
    for member in AttentionBackendEnum:
        names = parameters_of(backends_of(member)[0].config_cls)
        assert ({"dense_steps", "dense_layers"} <= set(names)) == member.is_sparse


def test_dense_steps_and_layers_name_their_parameter():
    raw = {"dense_steps": "0-3", "dense_layers": [1, 5]}
    config = build_config(VideoSparseConfig, raw, backend="video_sparse_attn")
    for axis, spelled, indices in (
        ("steps", "dense_steps=0-3", "0-3"),
        ("layers", "dense_layers=1,5", "1,5"),
    ):
        (part,) = config.dense_parts(axis)
        assert (part.given, str(part.indices)) == (spelled, indices)
        assert VideoSparseConfig().dense_parts(axis) == ()


@pytest.mark.parametrize("alias", ["sta_mode", "STA_mode"])
def test_sliding_tile_takes_its_mode_under_both_names(alias):
    raw = {alias: "sta_searching", "search_path": "searches"}
    config = build_config(SlidingTileConfig, raw, backend="sliding_tile_attn")
    assert config.sta_mode == "STA_searching"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, r"must name a strategy file, or `window` must give one window such as \[3, 3, 3\];"),
        (
            {"mask_strategy_file_path": "m.json", "window": [3, 3, 3]},
            "`window` of sliding_tile_attn must not be given with `mask_strategy_file_path`",
        ),
        (
            {"window": [3, 3, 3], "target_density": 0.4},
            "`target_density` of sliding_tile_attn must be given only with sta_mode STA_tuning",
        ),
        ({"window": [3, 3]}, "`window` of sliding_tile_attn must be a list of 3 integers >= 1"),
    ],
    ids=str,
)
def test_sliding_tile_refuses_parameters_that_contradict_each_other(raw, message):
    with pytest.raises(ConfigError, match=message):
        build_config(SlidingTileConfig, raw, backend="sliding_tile_attn")


def test_video_sparse_takes_the_other_name_of_sparsity():
    config = build_config(VideoSparseConfig, {"VSA_sparsity": 0.9}, backend="video_sparse_attn")
    assert config.sparsity == 0.9


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"topk": 4, "sparsity": 0.5}, "`topk` of video_sparse_attn must not be given with"),
        (
            {"tile_size": [4, 4, 8]},
            r"`tile_size` of video_sparse_attn must be one of \[4, 4, 4\], .* got \[4, 4, 8\]",
        ),
    ],
    ids=str,
)
def test_video_sparse_refuses_parameters_that_contradict_each_other(raw, message):
    with pytest.raises(ConfigError, match=message):
        build_config(VideoSparseConfig, raw, backend="video_sparse_attn")


def test_vmoba_reads_its_parameters_from_a_nested_mapping():
    nested = build_config(VMoBAConfig, {"moba_config": CHUNKS, "st_layer": 2}, backend="vmoba_attn")
    flat = build_config(VMoBAConfig, {**CHUNKS, "st_layer": 2}, backend="vmoba_attn")
    assert nested == flat


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "`temporal_chunk_size` of vmoba_attn must be given because `temporal_layer` is 1"),
        (
            {**CHUNKS, "moba_select_mode": "topk", "temporal_topk": 2},
            "`spatial_topk` of vmoba_attn must be given .* and `moba_select_mode` is topk",
        ),
        ({"temporal_layer": 0, "spatial_layer": 0, "st_layer": 0}, "must be >= 1, got 0 for all"),
        (
            {"moba_select_mode": "topk", "moba_threshold_type": "block"},
            "`moba_threshold_type` of vmoba_attn must be query_head, head_global or overall with",
        ),
        ({"moba_config": 3}, "`moba_config` of vmoba_attn must be a mapping, got 3"),
        (
            {"moba_config": CHUNKS, "st_chunk_size": [1, 1, 1]},
            "`st_chunk_size` of vmoba_attn must be given once, got it as "
            "'moba_config.st_chunk_size' and as 'st_chunk_size'; remove one",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_vmoba_refuses_parameters_that_contradict_each_other(raw, message):
    with pytest.raises(ConfigError, match=message):
        build_config(VMoBAConfig, raw, backend="vmoba_attn")


def test_vmoba_needs_no_sizes_for_chunks_no_layer_uses():
    raw = {"temporal_chunk_size": 3, "spatial_layer": 0, "st_layer": 0}
    assert build_config(VMoBAConfig, raw, backend="vmoba_attn").st_chunk_size is None


@pytest.mark.parametrize("member", SPARSE, ids=str)
def test_every_sparse_backend_has_landed(member):
    (cls,) = backends_of(member)
    assert cls.backend is member
    assert issubclass(cls.get_impl_cls(), AttentionImpl)


@pytest.mark.parametrize("member", SPARSE, ids=str)
def test_every_kernel_a_configuration_offers_is_a_variant(member):
    (cls,) = backends_of(member)
    kernel = {field.name: field for field in fields(cls.config_cls)}.get("kernel")
    if kernel is None:
        assert not member.is_sparse
        return
    offered = get_args(parameters_of(cls.config_cls)["kernel"].annotation)
    names = {variant.name.removesuffix(SAGE) for variant in cls.variants}
    assert set(offered) == {"auto", *names}


@pytest.mark.parametrize("member", CONFIGURABLE, ids=str)
def test_a_configurable_backend_has_a_worked_example_that_builds(member):
    config_cls = backends_of(member)[0].config_cls
    raw = read_mapping(CONFIGS / f"{member}.yaml")
    config = build_config(config_cls, raw, backend=str(member))
    given = {name: value for name, value in config_as_dict(config).items() if name in raw}
    assert given == raw


def test_every_worked_example_belongs_to_a_configurable_backend():
    assert {path.stem for path in CONFIGS.iterdir()} == {str(member) for member in CONFIGURABLE}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow_cases(
    "EveryTypeConfig", "SLAConfig", "SVG2Config", "SageSLAConfig", "SolConfig", "SubblockConfig"
)
@pytest.mark.parametrize("config_cls", [*DOCUMENTED, EveryTypeConfig], ids=lambda c: c.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_arbitrary_mapping_builds_or_is_refused_and_nothing_else(config_cls, data):
    names = st.sampled_from([*parameters_of(config_cls), "moba_config", "other"])
    raw = data.draw(st.dictionaries(names, PLAIN, max_size=4))
    try:
        config = build_config(config_cls, raw, backend="any_attn")
    except ConfigError:
        return
    assert build_config(config_cls, config_as_dict(config), backend="any_attn") == config


@pytest.mark.parametrize("value", [-1, -5, [0, -5]])
def test_a_negative_number_is_no_index_and_no_range(value):
    with pytest.raises(ConfigError, match=r"dense_steps. of video_sparse_attn must be indices"):
        build_config(VideoSparseConfig, {"dense_steps": value}, backend="video_sparse_attn")


@pytest.mark.parametrize(
    ("value", "members", "others"),
    [
        ("0-3,38", (0, 3, 38), (4, 37, 39)),
        ("10-", (10, 10_000), (9,)),
        ("-5", (0, 5), (6,)),
        (" 1 , 4 - 5 ", (1, 4, 5), (2, 3, 6)),
        ("7", (7,), (6, 8)),
        (7, (7,), (6, 8)),
        ([0, 1, 38], (0, 1, 38), (2, 37)),
        ((2, "4-5"), (2, 4, 5), (3,)),
    ],
)
def test_a_selector_holds_what_is_written(value, members, others):
    selector = IndexSelector.parse(value)
    assert all(index in selector for index in members)
    assert not any(index in selector for index in others)
    assert "1" not in selector


@pytest.mark.parametrize(
    "value", ["", " ", "a", "1,,2", "1-2-3", "-", "--5", True, None, 1.5, {}, []]
)
def test_anything_else_is_refused(value):
    with pytest.raises(ConfigError, match=r"dense_steps must be indices from 0 such as '0-3,38'"):
        IndexSelector.parse(value, name="dense_steps")


def test_a_backward_range_is_refused():
    with pytest.raises(ConfigError, match=r"selector must have ranges that run upwards, got '5-3'"):
        IndexSelector.parse("1,5-3")


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20), st.booleans()), min_size=1, max_size=5
    )
)
def test_a_selector_is_the_union_of_its_ranges_and_reads_back_as_written(parts):
    ranges = tuple((first, None if open_ else first + more) for first, more, open_ in parts)
    selector = IndexSelector(ranges)
    assert IndexSelector.parse(str(selector)) == selector
    for index in range(100):
        expected = any(low <= index and (high is None or index <= high) for low, high in ranges)
        assert (index in selector) is expected


@pytest.mark.parametrize(
    ("share", "total", "first"),
    [(0.2, 50, 10), (0.03, 40, 1), (0.03, 30, 0), (0.29, 100, 29), (1.0, 7, 7), (0.5, 3, 1)],
)
def test_a_share_is_read_in_decimals_and_rounded_down(share, total, first):
    assert first_of(share, total) == first
    steps = StepSet(first=share)
    assert [step for step in range(total) if steps.holds(step, total)] == list(range(first))


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
