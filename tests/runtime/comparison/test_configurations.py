import dataclasses
from pathlib import Path

import pytest

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.comparison.configurations import (
    EXACT_KERNELS,
    Plan,
    cache_of,
    read_configurations,
)

TWICE = "sliding_tile_attn:window=[3,3,3];video_sparse_attn:sparsity=0.9; sliding-tile-attn : " + (
    'window=[1,1,1],dense_steps="0,2"'
)


def test_configurations_stand_between_semicolons_and_get_names_of_their_own() -> None:
    found = read_configurations(TWICE, taken=["torch_sdpa"])
    assert [each.name for each in found] == [
        "sliding_tile_attn",
        "video_sparse_attn",
        "sliding_tile_attn-2",
    ]
    assert found[0].parameters["window"] == [3, 3, 3]
    assert found[2].text == 'sliding-tile-attn : window=[1,1,1],dense_steps="0,2"'
    assert [each.backend for each in found] == [str(each.scope.default.backend) for each in found]
    assert found[0].settings != found[2].settings


def test_semicolons_and_colons_inside_quotes_and_brackets_are_part_of_a_value() -> None:
    text = 'sliding_tile_attn:{"mask_strategy_file_path": "a;b:\\"c.json"};torch_sdpa'
    first, second = read_configurations(text)
    assert first.parameters["mask_strategy_file_path"] == 'a;b:"c.json'
    assert second.backend == "torch_sdpa"


def test_a_cache_may_stand_behind_a_plus() -> None:
    text = "fa;fa + first-block:threshold=0.1;fa+mag:mag_ratios=[1e+0]"
    plain, first, mag = read_configurations(text)
    assert cache_of("fa+cross-attention") == "cross-attention"
    assert [each.name for each in (plain, first, mag)] == ["fa", "fa+first_block", "fa+mag"]
    assert {each.backend for each in (plain, first, mag)} == {"fa"}
    assert first.cache is not None
    assert (first.cache.name, dict(first.cache.parameters)) == ("first_block", {"threshold": 0.1})
    assert plain.cache is None
    assert len({each.settings for each in (plain, first, mag)}) == 3
    assert cache_of(first.text) == "first-block:threshold=0.1"
    (path,) = read_configurations("sliding_tile_attn:mask_strategy_file_path=a+b.json")
    assert path.cache is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "--backends must name at least one backend, got none"),
        (" ; ", "--backends must name at least one backend"),
        ("auto", "--backends must name backends, got 'auto', which is an automatic choice"),
        ("best", "--backends must be one of .*, got 'best'"),
        ("sage_attn;sage_attn", "must name each configuration once, got 'sage_attn' twice"),
        ("sliding_tile_attn:window=[3,3", "must close every bracket and quote"),
        ("video_sparse_attn:sparsity=2", "`sparsity` of video_sparse_attn must be"),
        ("fa + second_block", "--backends must be one of first_block, .*, got 'second_block'"),
        ("fa + mag:ratio=1", "--backends mag must have keys among threshold, .*, got 'ratio'"),
        ("video_sparse_attn:sparsity", "--backends: parameters of video_sparse_attn must be"),
    ],
)
def test_what_cannot_be_read_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_configurations(given)


def test_every_exact_kernel_is_a_configuration() -> None:
    assert len(read_configurations(list(EXACT_KERNELS))) == len(EXACT_KERNELS)


def test_one_of_each_prompt_is_replayed_first() -> None:
    (reference,) = read_configurations("torch_sdpa")
    plan = Plan(
        prompts=("a", "b"),
        seeds=(3, 4),
        reference=reference,
        candidates=(),
        folder=Path("out"),
        layers_for=3,
    )
    assert plan.clips == ((0, 3), (0, 4), (1, 3), (1, 4))
    assert plan.replayed_clips == ((0, 3), (1, 3), (0, 4))
    assert dataclasses.replace(plan, layers_for=None).replayed_clips[3:] == ((1, 4),)
    assert dataclasses.replace(plan, replayed_steps=0).replayed_clips == ()
