"""The script that runs diffusers' own tests with `apply` on."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "diffusers_tests.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("diffusers_tests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plugin(script):
    plugin = script.AppliedEverywhere()
    plugin.begin()
    yield plugin
    plugin.end()


def wan():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=1,
    )


def call(model):
    with torch.no_grad():
        return model(torch.ones(1, 4, 1, 4, 4), torch.ones(1), torch.ones(1, 3, 12))[0]


def test_without_tests_of_diffusers_it_says_so(script, tmp_path, capsys):
    assert script.main(["--source", str(tmp_path)]) == 2
    assert "the installed diffusers has no tests" in capsys.readouterr().out


def test_models_are_attached_at_their_first_call_and_stay_so(script, plugin):
    model = wan()
    for _ in range(2):
        call(model)
        assert script.is_attached(model)
    assert plugin.attached == {"WanTransformer3DModel": 2}


def test_what_cannot_be_attached_runs_and_is_named(script, plugin):
    from diffusers import AutoencoderTiny

    model = AutoencoderTiny(
        encoder_block_out_channels=(4,) * 4, decoder_block_out_channels=(4,) * 4
    )
    with torch.no_grad():
        assert model(torch.ones(1, 3, 8, 8)).sample.shape == (1, 3, 8, 8)
    assert "found none that it can" in plugin.left["AutoencoderTiny"]
    assert not plugin.attached


def test_pipelines_are_attached_while_they_are_called(script, plugin):
    from diffusers import DiffusionPipeline

    class Pipeline(DiffusionPipeline):
        def __init__(self, transformer):
            super().__init__()
            self.register_modules(transformer=transformer)

        def __call__(self):
            assert script.is_attached(self.transformer)
            return call(self.transformer)

    pipeline = Pipeline(wan())
    pipeline()
    assert not script.is_attached(pipeline.transformer)
    assert plugin.attached == {"Pipeline": 1, "WanTransformer3DModel": 1}


def test_everything_is_as_it_was_after_the_end(script):
    from diffusers import DiffusionPipeline, ModelMixin

    plugin = script.AppliedEverywhere()
    plugin.begin()
    plugin.end()
    assert "__call__" not in vars(ModelMixin)
    assert "__init_subclass__" not in vars(DiffusionPipeline)
    model = wan()
    call(model)
    assert not script.is_attached(model)
