"""Folding dotted flags into one value per flag."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.cli.dotted import fold_dotted
from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.backend_names import parse_component_backends
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.platforms import AttentionBackendEnum

CONFIG = "--attention-config"
COMPONENTS = "--component-attention-backends"


def folded(*argv):
    """Return the folded arguments with JSON values parsed."""
    return [json.loads(arg) if arg[:1] == "{" else arg for arg in fold_dotted(argv)]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["generate", "--prompt", "a.b", "--model-path=x/y.z", "-h"],
        [CONFIG, "rules.yaml"],
        [COMPONENTS, "vae=fa"],
        ["--", "-ac.backend", "fa"],
        [CONFIG],
        [COMPONENTS, "--prompt", "p"],
    ],
    ids=str,
)
def test_arguments_without_dotted_flags_stay_as_they_are(argv):
    assert fold_dotted(argv) == argv


def test_dotted_flags_become_one_mapping_where_the_first_one_stood():
    argv = [
        "generate",
        "-ac.backend",
        "fa",
        "--prompt",
        "p",
        "--attention-config.rules.1.backend=torch_sdpa",
        "--attention-config.rules.0.steps",
        "0-3",
        "-ac.rules.0.backend",
        "auto",
        "--seed",
        "1",
    ]
    rules = [{"steps": "0-3", "backend": "auto"}, {"backend": "torch_sdpa"}]
    config = {"backend": "fa", "rules": rules}
    assert folded(*argv) == ["generate", CONFIG, config, "--prompt", "p", "--seed", "1"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0-3", "0-3"),
        ("-5", -5),
        ("0.9", 0.9),
        (".5", 0.5),
        ("1e-3", 1e-3),
        ("TRUE", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('"5"', "5"),
        ('{"a": 1}', {"a": 1}),
        ("a=b,c", "a=b,c"),
        ("", ""),
    ],
)
def test_a_dotted_value_has_the_type_it_spells(text, value):
    (_, config) = folded(f"-ac.config.some-name={text}")
    assert config == {"config": {"some_name": value}}
    assert type(config["config"]["some_name"]) is type(value)


def test_component_flags_merge_with_each_other_and_with_plain_ones():
    argv = [
        f"{COMPONENTS}.text-encoder",
        "torch_sdpa",
        COMPONENTS,
        "vae=fa,image_encoder=auto",
        f"{COMPONENTS}.transformer.cross=fa",
        f'{COMPONENTS}={{"transformer_2": "fa"}}',
    ]
    flag, merged = folded(*argv)
    assert flag == COMPONENTS
    assert merged == {
        "text-encoder": "torch_sdpa",
        "vae": "fa",
        "image_encoder": "auto",
        "transformer.cross": "fa",
        "transformer_2": "fa",
    }
    assert parse_component_backends(json.dumps(merged))["text_encoder"] is (
        AttentionBackendEnum.TORCH_SDPA
    )


def test_a_component_given_twice_is_refused_by_the_reader_of_the_merged_value():
    (_, merged) = fold_dotted([COMPONENTS, "text_encoder=fa", f"{COMPONENTS}.text-encoder=fa"])
    with pytest.raises(ConfigError, match="must name 'text_encoder' once, got it twice"):
        parse_component_backends(merged)


def test_the_folded_configuration_is_one_that_selection_reads():
    argv = [
        "-ac.backend",
        "video_sparse_attn",
        "-ac.config.sparsity",
        ".9",
        "-ac.rules.0.role",
        "cross",
    ]
    (_, text) = fold_dotted([*argv, "-ac.rules.0.backend", "sdpa", "-ac.strict", "true"])
    scope = scope_from(attention_config=text)
    assert scope.strict
    assert scope.default.config.sparsity == 0.9
    assert scope.rules[0].backend is AttentionBackendEnum.TORCH_SDPA


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-ac.backend"], "-ac.backend must have a value, got none"),
        (["-ac.backend", "--seed"], "-ac.backend must have a value, got none"),
        (["-ac.", "x"], "-ac. must have a name after every dot"),
        (["-ac.rules..steps", "x"], "-ac.rules..steps must have a name after every dot"),
        (["-ac.a", "1", "-ac.a", "1"], "-ac.a must be given once, but it is given twice"),
        (["-ac.a.b", "1", "-ac.a", "1"], "-ac.a must be given once, but it has dotted flags below"),
        (["-ac.a", "1", "-ac.a.b", "1"], "-ac.a.b must not go below 'a', which has a value"),
        (["-ac.rules.1.a", "1"], "--attention-config.rules must be numbered 0 to 0 without gaps"),
        (["-ac.rules.0.a", "1", "-ac.rules.2.a", "1"], "must be numbered 0 to 1 .* got 0, 2"),
        (["-ac", "x", "-ac.a", "1"], "-ac must be given once and without dotted flags, got -ac.a"),
        (["-ac", "x", CONFIG, "y"], "-ac must be given once .* got --attention-config too"),
        (["-ac.a", "[1"], r"-ac.a must be text or JSON, got '\[1'"),
        (["-ac.a", '{"b": 1, "b": 2}'], "-ac.a must be text or JSON, .*'b' must be given once"),
        (["-ac.a", "[" * 100_000], "-ac.a must be text or JSON"),
        (["-ac.a", "9" * 5000], "-ac.a must be text or JSON"),
        ([f"{COMPONENTS}.", "fa"], "must have a component's name after the dot"),
        (
            [COMPONENTS, "vae", f"{COMPONENTS}.a", "fa"],
            "must be component=backend .*: 'vae' is not a",
        ),
        ([COMPONENTS, "{", f"{COMPONENTS}.a", "fa"], "must be component=backend .* near '{': Exp"),
        ([f"{COMPONENTS}.a", "fa", f"{COMPONENTS}.a", "fa"], "once; 'a' must be given once, got"),
        (["-ac.a", "nan"], "-ac.a must be text or JSON, got 'nan': numbers must be finite"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_dotted_flags_that_contradict_each_other_are_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        fold_dotted(argv)


NAMES = st.sampled_from(["backend", "config", "rules", "a", "b_c"])
NODES = st.recursive(
    st.booleans() | st.integers(-99, 99) | st.sampled_from(["fa", "0-3", "10-", ""]),
    lambda children: (
        st.lists(children, min_size=1, max_size=3)
        | st.dictionaries(NAMES, children, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


def flags(node, path):
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        return [arg for key, child in node.items() for arg in flags(child, f"{path}.{key}")]
    return [path, json.dumps(node)]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, NODES, min_size=1, max_size=3))
def test_dotted_flags_spell_any_mapping(mapping):
    assert folded(*flags(mapping, "-ac")) == [CONFIG, mapping]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.text(max_size=6)
        | st.sampled_from([CONFIG, "-ac", "-ac.a", "-ac.a.0", "-ac.a.b", COMPONENTS, "--", "-"])
        | st.sampled_from(
            [f"{COMPONENTS}.vae", f"{COMPONENTS}.", "-ac.=1", "-ac.b=1", "[1", "a=b"]
        ),
        max_size=6,
    )
)
def test_arbitrary_arguments_are_folded_or_refused(argv):
    try:
        result = fold_dotted(argv)
    except ConfigError:
        return
    assert fold_dotted(result) == result


def test_folding_needs_the_standard_library_only():
    code = (
        "import sys, multimodal_gen.cli.dotted; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'yaml', 'diffusers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
