"""From arguments to the scope that layers select by."""

import copy
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    LayerSite,
    SelectionScope,
    Source,
    decide,
    scope_from,
    scope_from_args,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.runtime.server_args import ServerArgs

SDPA = AttentionBackendEnum.TORCH_SDPA
VSA = AttentionBackendEnum.VIDEO_SPARSE_ATTN

STRUCTURED = {
    "backend": "FA3",
    "strict": True,
    "rules": [
        {"component": "text-encoder", "backend": "auto"},
        {
            "role": "self",
            "layers": "0-3,38",
            "steps": "0-9",
            "backend": "video_sparse_attn",
            "config": {"sparsity": 0.9},
        },
        {"role": "cross", "backend": "sdpa"},
    ],
}


def site(component="transformer", role=AttentionRole.SELF, layer=0):
    return LayerSite(name="x", component=component, role=role, layer=layer)


@pytest.mark.parametrize("nothing", [None, "auto", " AUTO "])
def test_nothing_asked_gives_an_empty_scope(nothing):
    assert scope_from(attention_backend=nothing) == SelectionScope()


@pytest.mark.parametrize("nothing", [None, "", {}])
def test_an_empty_configuration_asks_for_nothing(nothing):
    empty = scope_from(attention_backend_config=nothing, attention_config=nothing)
    assert empty == SelectionScope()


def test_a_backend_is_the_default_of_the_scope():
    asked = scope_from(attention_backend="sdpa", strict=True)
    assert asked.strict
    assert asked.default.backend is SDPA
    assert asked.default.source is Source.SETTINGS


@pytest.mark.parametrize(
    "config",
    ["VSA_sparsity=.9", '{"sparsity": 0.9}', {"sparsity": 0.9}, VideoSparseConfig(sparsity=0.9)],
    ids=str,
)
def test_every_form_of_a_configuration_gives_the_same_object(config):
    scope = scope_from(attention_backend="video-sparse-attn", attention_backend_config=config)
    assert scope.default.backend is VSA
    assert scope.default.config == VideoSparseConfig(sparsity=0.9)


def test_a_file_gives_the_configuration(tmp_path):
    path = tmp_path / "vsa.yaml"
    path.write_text("sparsity: 0.9\n", encoding="utf-8")
    for form in (str(path), path):
        scope = scope_from(attention_backend="video_sparse_attn", attention_backend_config=form)
        assert scope.default.config == VideoSparseConfig(sparsity=0.9)


def test_the_arguments_of_a_run_give_its_scope():
    args = ServerArgs(
        model_path="m",
        attention_backend="video_sparse_attn",
        attention_backend_config="sparsity=0.9",
        component_attention_backends="text-encoder=torch_sdpa,transformer.cross=auto",
        strict_attention=True,
    )
    scope = scope_from_args(args)
    assert scope.strict
    assert scope.default.config == VideoSparseConfig(sparsity=0.9)
    assert scope.components["text_encoder"].backend is SDPA
    assert scope.components["text_encoder"].detail == "text_encoder"
    assert scope.components["transformer.cross"].backend is None
    assert {asked.source for asked in scope.components.values()} == {Source.COMPONENT}


def test_a_diffusers_run_selects_nothing_here():
    args = ServerArgs(model_path="m", backend="diffusers", attention_backend="_native_cudnn")
    assert scope_from_args(args) == SelectionScope()


def test_rules_reach_the_layers_and_steps_they_name():
    scope = scope_from(attention_config=STRUCTURED)
    assert scope.strict
    ((_, encoder),) = decide(site("text_encoder_2", AttentionRole.ENCODER), scope)
    assert (encoder.backend, encoder.source) == (None, Source.AUTO)
    (steps, sparse), (rest, default) = decide(site(layer=38), scope)
    assert (str(steps), sparse.backend, sparse.detail) == ("0-9", VSA, "rule 2")
    assert sparse.config == VideoSparseConfig(sparsity=0.9)
    assert (rest, default.backend) == (None, AttentionBackendEnum.FA)
    ((_, late),) = decide(site(layer=20), scope)
    assert late.backend is AttentionBackendEnum.FA
    ((_, cross),) = decide(site(role=AttentionRole.CROSS), scope)
    assert (cross.backend, cross.detail) == (SDPA, "rule 3")


def test_the_structured_configuration_is_read_from_a_file_and_from_json(tmp_path):
    path = tmp_path / "attention.json"
    path.write_text(json.dumps(STRUCTURED), encoding="utf-8")
    expected = scope_from(attention_config=STRUCTURED)
    assert scope_from(attention_config=str(path)) == expected
    assert scope_from(attention_config=json.dumps(STRUCTURED)) == expected
    args = ServerArgs(model_path="m", attention_config=json.dumps(STRUCTURED))
    assert scope_from_args(args) == expected


def test_component_overrides_go_with_a_structured_configuration():
    scope = scope_from(
        attention_config=STRUCTURED, component_attention_backends={"transformer": "torch_sdpa"}
    )
    ((_, asked),) = decide(site(), scope)
    assert (asked.backend, asked.source) == (SDPA, Source.COMPONENT)


def test_a_scope_can_be_copied_and_pickled():
    scope = scope_from(
        attention_config=STRUCTURED, component_attention_backends={"transformer": "torch_sdpa"}
    )
    assert copy.deepcopy(scope) == scope
    assert pickle.loads(pickle.dumps(scope)) == scope


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"attention_backend": "fa", "attention_config": "backend=fa"},
            "attention_config must not be given with attention_backend; ",
        ),
        (
            {"attention_backend_config": "a=1", "attention_config": "backend=fa"},
            "attention_config must not be given with attention_backend_config",
        ),
        ({"attention_backend_config": "a=1"}, "attention_backend_config needs attention_back"),
        (
            {"attention_backend": "auto", "attention_backend_config": "a=1"},
            "attention_backend_config needs attention_backend",
        ),
        (
            {"attention_backend": "torch_sdpa", "attention_backend_config": "sparsity=0.5"},
            "torch_sdpa takes no parameters, got 'sparsity'",
        ),
        (
            {"attention_backend": "video_sparse_attn", "attention_backend_config": "sparsty=0.5"},
            "parameters of video_sparse_attn must be among .*did you mean 'sparsity'",
        ),
        (
            {
                "attention_backend": "sla_attn",
                "attention_backend_config": VideoSparseConfig(),
            },
            r"must be a SLAConfig for sla_attn, got VideoSparseConfig\(",
        ),
        ({"attention_backend": "fb"}, "attention_backend must be one of fa, "),
        ({"attention_backend": 5}, "attention_backend must be the name of an attention backend"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_that_do_not_fit_together_are_refused(settings_, message):
    with pytest.raises(ConfigError, match=message):
        scope_from(**settings_)


def test_errors_name_the_argument_or_the_flag_it_came_from():
    settings = {"attention_backend": "sla_attn", "attention_backend_config": "[1]"}
    with pytest.raises(ConfigError, match=r"^attention_backend_config must be a mapping"):
        scope_from(**settings)
    with pytest.raises(ConfigError, match=r"^--attention-backend-config must be a mapping"):
        scope_from_args(ServerArgs(model_path="m", **settings))
    with pytest.raises(ConfigError, match=r"^attention_backend_config must be .*, got 3$"):
        scope_from(**{**settings, "attention_backend_config": 3})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backnd": "fa"}, "attention_config must have keys among backend, .* mean 'backend'"),
        ({"backend": "fb"}, "attention_config: backend must be one of"),
        ({"strict": "yes"}, "attention_config: strict must be true or false, got 'yes'"),
        ({"rules": "fa"}, "attention_config: rules must be a list of mappings, got 'fa'"),
        ({"rules": ["fa"]}, r"attention_config: rules\[0\] must be a mapping, got 'fa'"),
        ({"rules": [{}]}, r"attention_config: rules\[0\].backend must be given"),
        (
            {"rules": [{"backend": "fa"}, {"backend": "fa", "layer": 1}]},
            r"attention_config: rules\[1\] must have keys among .* did you mean 'layers'",
        ),
        (
            {"rules": [{"backend": "fa", "layers": "3-1"}]},
            r"attention_config: rules\[0\].layers must have ranges that run upwards",
        ),
        (
            {"rules": [{"backend": "fa", "steps": "x"}]},
            r"attention_config: rules\[0\].steps must be indices from 0",
        ),
        (
            {"rules": [{"backend": "fa", "role": "slef"}]},
            r"rules\[0\].role must be one of self, cross, encoder, got 'slef', did you mean 'self'",
        ),
        (
            {"rules": [{"backend": "fa", "component": "transformer.cross"}]},
            r"rules\[0\].component must name a component, without a role, got 'transformer.cross'",
        ),
        (
            {"rules": [{"backend": "auto", "config": {"a": 1}}]},
            r"rules\[0\].config needs attention_config: rules\[0\].backend",
        ),
        (
            {"rules": [{"backend": "sla_attn", "config": [1]}]},
            r"rules\[0\].config must be a mapping, got \[1\]",
        ),
        (
            {"backend": "video_sparse_attn", "config": {"sparsity": 2}},
            r"`sparsity` of video_sparse_attn must be a number in \[0, 1\] or .+, got 2",
        ),
        ("[1]", r"attention_config must be a mapping of names to values, got the list \[1\]"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_structured_configuration_names_the_place_that_is_wrong(config, message):
    with pytest.raises(ConfigError, match=message):
        scope_from(attention_config=config)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["fa", "auto"]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["backend", "config", "rules", "steps", "layers", "role", "component"]),
            children,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["backend", "config", "strict", "rules"]), ANYTHING))
def test_an_arbitrary_structured_configuration_is_read_or_refused(config):
    try:
        scope = scope_from(attention_config=config)
    except ConfigError:
        return
    assert isinstance(scope, SelectionScope)
    assert len(scope.rules) == len(config.get("rules") or ())
