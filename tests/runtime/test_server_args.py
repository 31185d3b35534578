"""The arguments of a run: normalised once, each error naming its flag."""

import copy
import importlib.metadata
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.backend_names import parse_component_backends, parse_component_key
from multimodal_gen.runtime.layers.attention.backends.registry import ENTRY_POINT_GROUP
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.runtime.server_args import SETTINGS, ServerArgs
from multimodal_gen.settings import as_flag

FA = AttentionBackendEnum.FA
SDPA = AttentionBackendEnum.TORCH_SDPA


def args(**given_):
    return ServerArgs(model_path="m", **given_)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("fa3", FA),
        ("FA4", FA),
        (" Torch-SDPA ", SDPA),
        (FA, FA),
        ("auto", None),
        (None, None),
    ],
)
def test_a_backend_is_known_by_all_its_spellings(name, backend):
    assert args(attention_backend=name).attention_backend is backend


def test_a_diffusers_backend_keeps_the_name_that_diffusers_gives_it():
    given_ = args(backend="Diffusers", attention_backend=" _flash_3_hub ")
    assert given_.backend == "diffusers"
    assert given_.attention_backend == "_flash_3_hub"


@pytest.mark.parametrize(
    "form",
    [
        {"text-encoder": "torch_sdpa", "transformer.cross": "fa3", "vae": "auto"},
        {"text_encoder": SDPA, "transformer.cross": FA, "vae": None},
        '{"text_encoder": "sdpa", "transformer.cross": "fa", "vae": "auto"}',
        " text-encoder = torch_sdpa , transformer.cross=FA,vae=auto",
    ],
    ids=str,
)
def test_component_overrides_take_every_form(form):
    expected = {"text_encoder": SDPA, "transformer.cross": FA, "vae": None}
    assert args(component_attention_backends=form).component_attention_backends == expected


@pytest.mark.parametrize("nothing", [None, "", {}, "{}"])
def test_no_component_overrides_are_an_empty_mapping(nothing):
    assert args(component_attention_backends=nothing).component_attention_backends == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text_encoder", "must be component=backend pairs, .*: 'text_encoder' is not a pair k=v"),
        ("a=fa,", "must be component=backend pairs, .*: '' is not a pair k=v"),
        ("a=", "must be component=backend pairs, .*: there is no value at the end of 'a='"),
        ("=fa", "must be component=backend pairs, .*: there is no name before '=fa'"),
        (".cross=fa", "must name a component or component.role, got '.cross'"),
        ("a=fa,a=fa", "'a' must be given once, got it twice"),
        ("text-encoder=fa,text_encoder=fa", "must name 'text_encoder' once, got it twice"),
        ('{"a": "fa", "a": "fa"}', "'a' must be given once, got it twice"),
        ("a.b=fa", "must name one of the roles self, cross, encoder after the dot, got 'a.b'"),
        ("a.corss=fa", "got 'a.corss', did you mean 'cross'"),
        ("a=fb", "--component-attention-backends: a must be one of fa"),
        ('{"a": 1}', "must give 'a' a backend's name, got 1"),
        ('{"a": {"b": "fa"}}', "must give 'a' a backend's name, got "),
        ('{"a": ', "pairs, a JSON object or a mapping, got .*: .*Expecting"),
        ('{"a":' * 100_000, "must be component=backend pairs, .*: values must nest at most 32"),
        ({1: "fa"}, "must have component names as keys, got 1"),
        (["a=fa"], "must be component=backend pairs, a JSON object or a mapping, got \\["),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_component_override_is_quoted(value, message):
    with pytest.raises(ConfigError, match=message):
        args(component_attention_backends=value)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"backend": "diffuser"}, "--backend must be one of auto, .* did you mean 'diffusers'"),
        ({"backend": None}, "--backend must be one of auto, sglang, diffusers, got None"),
        ({"dtype": "fp16"}, "--dtype must be one of auto, float32, float16, bfloat16, got 'fp16'"),
        (
            {"offload": "cpu"},
            "--offload must be one of none, model, block, leaf, sequential, got 'cpu'",
        ),
        (
            {"attention_backend": "native"},
            "must be one of fa, .* 'native'.* own backends need `sglang generate --backend diff",
        ),
        ({"attention_backend": 3}, "--attention-backend must be the name of an attention backend"),
        (
            {"backend": "diffusers", "attention_backend": " "},
            "--attention-backend must be the name of a diffusers attention backend, got ' '",
        ),
        (
            {"backend": "diffusers", "attention_backend_config": "a=1"},
            "--attention-backend-config must not be given with --backend diffusers",
        ),
        (
            {"backend": "diffusers", "component_attention_backends": "vae=fa"},
            "--component-attention-backends must not be given with --backend diffusers",
        ),
        (
            {"backend": "diffusers", "attention_config": "backend=fa"},
            "--attention-config must not be given with --backend diffusers",
        ),
        (
            {"backend": "diffusers", "compile_ahead": True},
            "--compile-ahead must not be given with --backend diffusers",
        ),
        (
            {"attention_backend": "fa", "attention_config": "backend=fa"},
            "--attention-config must not be given with --attention-backend; ",
        ),
        ({"attention_backend_config": "a=1"}, "--attention-backend-config needs --attention-ba"),
        ({"attention_config": 3}, "--attention-config must be a path, a JSON object, k=v,k=v or"),
        ({"height": 0}, "--height must be an integer >= 1, got 0"),
        ({"width": 1.5}, "--width must be an integer >= 1, got 1.5"),
        ({"num_frames": True}, "--num-frames must be an integer >= 1, got True"),
        ({"num_inference_steps": "4"}, "--num-inference-steps must be an integer >= 1, got '4'"),
        ({"num_outputs": None}, "--num-outputs must be an integer >= 1, got None"),
        ({"num_gpus": 0}, "--num-gpus must be an integer >= 1, got 0"),
        ({"rank_timeout": 0}, "--rank-timeout must be an integer >= 1, got 0"),
        ({"rank_timeout": 10**6 + 1}, "--rank-timeout must be at most 1000000, got 1000001"),
        ({"rank_timeout": float("nan")}, "--rank-timeout must be an integer >= 1, got nan"),
        ({"rank_timeout": None}, "--rank-timeout must be an integer >= 1, got None"),
        ({"cfg_parallel": 2}, "--cfg-parallel must be true or false, got 2"),
        ({"seed": -1}, "--seed must be an integer >= 0, got -1"),
        ({"seed": 2**63}, f"--seed must be at most {2**63 - 1}, got {2**63}"),
        ({"fps": 241}, "--fps must be at most 240, got 241"),
        ({"fps": 0}, "--fps must be an integer >= 1, got 0"),
        ({"guidance_scale": -0.5}, "--guidance-scale must be a number >= 0, got -0.5"),
        ({"guidance_scale": float("nan")}, "--guidance-scale must be a number >= 0, got nan"),
        ({"true_cfg_scale": True}, "--true-cfg-scale must be a number >= 0, got True"),
        ({"enable_torch_compile": 1}, "--enable-torch-compile must be true or false, got 1"),
        ({"prompt": 5}, "--prompt must be text, got 5"),
        ({"device": ""}, "--device must be text that is not empty, got ''"),
        ({"output_path": ""}, "--output-path must be a file or folder, got ''"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_flag(given_, message):
    with pytest.raises(ConfigError, match=message):
        args(**given_)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("height", 10**9, "--height must be at most 65536, got 1000000000"),
        ("width", 65537, "--width must be at most 65536, got 65537"),
        ("num_frames", 10**12, "--num-frames must be at most 65536, got 1000000000000"),
        ("num_inference_steps", 10**9, "--num-inference-steps must be at most 10000, got"),
        ("num_outputs", 10**9, "--num-outputs must be at most 1000, got"),
        ("guidance_scale", 1e39, r"--guidance-scale must be at most 1000000, got 1e\+39"),
        ("true_cfg_scale", 1e308, r"--true-cfg-scale must be at most 1000000, got 1e\+308"),
    ],
)
def test_a_number_beyond_all_use_is_refused(option: str, value, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        args(**{option: value})


@pytest.mark.parametrize("option", ["prompt", "negative_prompt"])
def test_a_text_that_is_no_unicode_is_refused(option: str) -> None:
    flag = option.replace("_", "-")
    rule = (
        rf"--{flag} must be Unicode text, got bytes that are not UTF-8: 'a\\udcff'; check the enc"
    )
    with pytest.raises(ConfigError, match=rule):
        args(**{option: "a\udcff"})
    assert getattr(args(**{option: "\U0001f98a fox"}), option) == "\U0001f98a fox"


def test_a_setting_is_declared_with_all_that_is_known_of_it() -> None:
    assert [*SETTINGS] == [field.name for field in fields(ServerArgs)]
    for name, setting in SETTINGS.items():
        assert setting.flag == f"--{name.replace('_', '-')}"
        assert setting.help.endswith(".")
        assert (setting.metavar is None) == (setting.kind is bool or bool(setting.choices))
        if not setting.check and setting.kind in (int, float):
            assert setting.ge is not None


def test_a_model_path_must_not_be_empty():
    with pytest.raises(ConfigError, match="--model-path must be text that is not empty, got ' '"):
        ServerArgs(model_path=" ")


def test_several_gpus_can_be_asked_for_and_none_need_be():
    degrees = {"num_gpus": 8, "sp_degree": 4, "ulysses_degree": 2, "ring_degree": 2}
    given_ = args(**degrees, cfg_parallel=True, rank_timeout=60)
    assert {name: getattr(given_, name) for name in degrees} == degrees
    assert (given_.cfg_parallel, given_.rank_timeout) == (True, 60)
    assert args().num_gpus is None


@pytest.mark.parametrize("nothing", ["", " ", {}])
def test_an_empty_configuration_is_none_at_all(nothing):
    given_ = args(attention_backend_config=nothing, attention_config=nothing)
    assert (given_.attention_backend_config, given_.attention_config) == (None, None)


def test_an_output_path_becomes_a_path():
    assert args(output_path="out/video.mp4").output_path == Path("out/video.mp4")


def test_arguments_are_frozen_and_can_be_sent_to_another_process():
    given_ = args(component_attention_backends="vae=fa", attention_backend="fa")
    assert pickle.loads(pickle.dumps(given_)) == given_
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'seed'"):
        given_.seed = 3


def test_arguments_are_keys_that_nothing_changes():
    components, config = {"vae": "fa"}, {"rules": [{"backend": "fa", "layers": "0"}]}
    given_ = args(component_attention_backends=components, attention_config=config)
    same = args(component_attention_backends="vae=fa", attention_config=copy.deepcopy(config))
    assert {given_: "found"}[same] == "found"
    assert {given_: "found"}[pickle.loads(pickle.dumps(given_))] == "found"
    config["rules"][0]["layers"] = "1"
    assert given_ == same
    with pytest.raises(TypeError, match="does not support item assignment"):
        given_.component_attention_backends["vae"] = SDPA


@pytest.mark.parametrize(
    "key", ["Transformer.Cross", " transformer . cross ", "TRANSFORMER.cross", "transformer.cross"]
)
def test_case_and_blanks_of_component_keys_make_no_difference(key):
    assert parse_component_backends({key: "fa"}) == {"transformer.cross": FA}
    assert parse_component_key(" Text-Encoder ", name="x", roles=False) == "text_encoder"


def test_keys_that_mean_the_same_are_refused():
    with pytest.raises(ConfigError, match=r"must name 'transformer\.cross' once, got it twice"):
        parse_component_backends({"transformer.cross": "fa", "Transformer.Cross": "fa"})


def test_the_roles_of_keys_are_the_roles_of_layers():
    keys = ",".join(f"transformer.{role}=fa" for role in AttentionRole)
    assert len(parse_component_backends(keys)) == len(AttentionRole)


def test_the_name_of_an_installed_plugin_is_accepted_without_loading_it(monkeypatch):
    entry = EntryPoint("plugged_attn", "does.not.exist:Backend", ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [entry] if group == ENTRY_POINT_GROUP else [],
    )
    monkeypatch.setattr("multimodal_gen.runtime.backend_names._PLUGINS", {})
    assert str(args(attention_backend="Plugged-Attn").attention_backend) == "plugged_attn"


def test_importing_the_arguments_loads_neither_torch_nor_diffusers():
    code = (
        "import sys, multimodal_gen.runtime.server_args; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'diffusers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30) | st.text('{}[]":,=.- afx_', max_size=30))
def test_arbitrary_component_text_is_read_or_refused(text):
    try:
        found = parse_component_backends(text)
    except ConfigError:
        return
    assert all("-" not in key and key for key in found)


def test_frames_of_more_pixels_than_a_model_could_make_are_refused() -> None:
    assert ServerArgs(model_path="m", height=16384, width=16384).width == 16384
    with pytest.raises(ConfigError, match=r"--height times --width must be at most 268435456"):
        ServerArgs(model_path="m", height=65536, width=65536)


@pytest.mark.parametrize(
    "other",
    [
        {"cache": "cross_attention"},
        {"attention_guard": 0.05},
        {"check_attention": 1, "record_attention": "x.json"},
        {"offload": "model"},
        {"stream": True},
        {"backend": "diffusers"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_graphs_of_whole_calls_are_not_made_of_calls_that_decide(other):
    flag = as_flag(next(iter(other)))
    with pytest.raises(ConfigError, match="--cuda-graph") as refused:
        args(cuda_graph=True, **other)
    assert flag in str(refused.value)
    assert args(cuda_graph=True, enable_torch_compile=True).cuda_graph


def test_no_guard_is_also_false() -> None:
    assert ServerArgs(model_path="m", attention_guard=False).attention_guard is None
