"""Dense steps and layers of a sparse backend."""

import pytest

from multimodal_gen.runtime.layers.attention.config import IndexSelector, StepSet
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    AUTO,
    BackendPreference,
    LayerSite,
    Source,
    with_dense_parts,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba import VMoBAConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa_h3 import VideoSparseH3Config
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum


def asked(**parameters: object) -> BackendPreference:
    return BackendPreference(
        source=Source.SETTINGS,
        backend=AttentionBackendEnum.VIDEO_SPARSE_ATTN,
        config=VideoSparseConfig(**parameters),
    )


def parts(
    ask: BackendPreference,
    *,
    steps: str | None = None,
    layer: int = 0,
    role: AttentionRole = AttentionRole.SELF,
) -> list[tuple[str | None, str]]:
    selector = None if steps is None else StepSet(indices=IndexSelector.parse(steps))
    site = LayerSite(layer=layer, role=role)
    found = with_dense_parts(((selector, ask),), site, PlatformEnum.CPU)
    return [(None if s is None else str(s), a.dense_reason) for s, a in found]


def test_dense_steps_come_before_the_others() -> None:
    assert parts(asked(dense_steps="0-3,38")) == [
        ("0-3,38", "steps 0-3,38 are dense (`dense_steps=0-3,38`)"),
        (None, ""),
    ]


def test_a_rule_for_some_steps_keeps_to_them() -> None:
    assert parts(asked(dense_steps="0-3,38"), steps="2-9") == [
        ("2-3", "steps 2-3 are dense (`dense_steps=0-3,38`)"),
        ("2-9", ""),
    ]
    assert parts(asked(dense_steps="0-3"), steps="4-") == [("4-", "")]


def test_dense_steps_may_be_named_by_their_noise_levels() -> None:
    because = "steps of sigma >0.9 are dense (`dense_sigma=>0.9`)"
    assert parts(asked(dense_sigma=">0.9")) == [("of sigma >0.9", because), (None, "")]
    both = parts(asked(dense_steps="0-1", dense_sigma=">0.9"), steps="1-9")
    assert [steps for steps, _ in both] == ["1", "of sigma >0.9, among 1-9", "1-9"]


def test_dense_layers_are_dense_in_every_step() -> None:
    ask = asked(dense_layers="1-2", dense_steps="0")
    because = "layers 1-2 are dense (`dense_layers=1-2`)"
    assert parts(ask, layer=2) == [(None, because)]
    assert parts(ask, layer=3)[-1] == (None, "")


@pytest.mark.parametrize(
    ("backend", "config", "given"),
    [
        (
            AttentionBackendEnum.VMOBA_ATTN,
            VMoBAConfig(temporal_chunk_size=1, spatial_layer=0, st_layer=0, first_full_layer=100),
            ["first_full_layer=100"],
        ),
        (
            AttentionBackendEnum.VIDEO_SPARSE_ATTN,
            VideoSparseConfig(dense_layers="0-"),
            ["dense_layers=0-"],
        ),
        (AttentionBackendEnum.VIDEO_SPARSE_ATTN, VideoSparseConfig(dense_layers="0-2"), []),
    ],
)
def test_the_pipeline_is_told_where_every_layer_is_dense(backend, config, given) -> None:
    told = WarnOnce()
    ask = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    for layer in range(4):
        site = LayerSite(layer=layer, num_layers=4)
        with_dense_parts(((None, ask),), site, PlatformEnum.CPU, told)
    assert list(told.given) == [
        f"{backend} is sparse in no layer: {name} keep all 4 layers of this model dense; "
        f"give fewer, such as {name.partition('=')[0]}=0"
        for name in given
    ]


@pytest.mark.parametrize(
    ("given", "number", "is_told"),
    [
        ("0-1,38", 4, True),
        ("2-4", 4, True),
        ("4-", 4, True),
        ("3-", 4, False),
        ("0,2-3", 4, False),
        ("38", None, False),
    ],
)
def test_the_pipeline_is_told_of_dense_layers_that_it_lacks(given, number, is_told) -> None:
    told, ask = WarnOnce(), asked(dense_layers=given)
    for layer in range(4):
        site = LayerSite(layer=layer, num_layers=number)
        with_dense_parts(((None, ask),), site, PlatformEnum.CPU, told)
    said = (
        f"{ask.backend} is to keep layers dense that this model lacks: dense_layers={given}, of "
        f"layers 0-3; give layers that it has"
    )
    assert told.given == ((said,) if is_told else ())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vsa_dense_layers": "0,4"}, ["vsa_dense_layers=0,4"]),
        (
            {"dense_layers": "4-", "vsa_dense_layers": [0, 9]},
            ["dense_layers=4- and vsa_dense_layers=0,9"],
        ),
        ({"dense_layers": "0", "vsa_dense_layers": "2-"}, []),
    ],
)
def test_a_methods_own_layers_that_the_model_lacks_are_told_too(given, said) -> None:
    told, backend = WarnOnce(), AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3
    config = VideoSparseH3Config(**given)
    ask = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    with_dense_parts(((None, ask),), LayerSite(num_layers=4), PlatformEnum.CPU, told)
    assert list(told.given) == [
        f"{backend} is to keep layers dense that this model lacks: {text}, of layers 0-3; give "
        f"layers that it has"
        for text in said
    ]


@pytest.mark.parametrize("role", [AttentionRole.CROSS, AttentionRole.ENCODER])
def test_other_roles_have_no_dense_parts(role: AttentionRole) -> None:
    assert parts(asked(dense_steps="0-3"), role=role) == [(None, "")]


def test_dense_backends_are_left_alone() -> None:
    assert parts(AUTO) == [(None, "")]
    sdpa = BackendPreference(source=Source.SETTINGS, backend=AttentionBackendEnum.TORCH_SDPA)
    assert parts(sdpa) == [(None, "")]


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [("0-3", "2-", "2-3"), ("5-", "7-", "7-"), ("0-3", "4-", None), ("0-3,8-9", "3-8", "3,8")],
)
def test_selectors_intersect(first: str, second: str, both: str | None) -> None:
    shared = IndexSelector.parse(first) & IndexSelector.parse(second)
    assert (None if shared is None else str(shared)) == both
