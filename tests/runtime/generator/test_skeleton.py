import json
import os
import shutil

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.generator.run import find_done
from multimodal_gen.runtime.generator.skeleton import load_skeleton
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.testing.tiny_models import FAMILIES

CPU = torch.device("cpu")


def _shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    # Weights that a loaded model shares are separate on the meta device.
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: parameter.shape for name, parameter in parameters}


# `sglang attention explain` is tested with the others, which it makes skeletons of.
QUICK = ("wan", "flux", "hunyuan_video_15")


@pytest.mark.slow_cases("flux", "hunyuan_video_15")
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in FAMILIES],
)
def test_a_skeleton_has_the_modules_of_the_pipeline_and_no_weights(
    family: str, tiny_pipeline
) -> None:
    from diffusers import DiffusionPipeline

    folder = tiny_pipeline(family)
    skeleton = load_skeleton(PipelineIndex.read(str(folder)), "bfloat16", CPU)
    loaded = DiffusionPipeline.from_pretrained(folder)
    assert type(skeleton) is type(loaded)
    assert set(skeleton.components) == set(loaded.components)
    for name, model in loaded.components.items():
        if isinstance(model, torch.nn.Module):
            bare = skeleton.components[name]
            assert type(bare) is type(model)
            assert not bare.training
            assert _shapes(bare) == _shapes(model)
            assert {value.device.type for value in bare.parameters()} == {"meta"}
            assert {value.dtype for value in bare.parameters()} == {torch.bfloat16}
    assert set(denoisers(skeleton)) == set(denoisers(loaded))


def test_a_model_of_many_gigabytes_takes_no_memory(tiny_pipeline, tmp_path) -> None:
    source = tiny_pipeline("wan")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    config = json.loads((source / "transformer" / "config.json").read_text())
    config |= {
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "ffn_dim": 13824,
        "num_layers": 40,
    }
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    pipe = load_skeleton(PipelineIndex.read(str(tmp_path)), "auto", CPU)
    assert sum(p.numel() for p in pipe.transformer.parameters()) > 13e9
    assert pipe.vae is None


def test_a_config_that_does_not_fit_is_named(tmp_path) -> None:
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"component transformer of .* must have a config for Wan"):
        load_skeleton(PipelineIndex.read(str(tmp_path)), "auto", CPU)


def test_more_layers_than_can_be_built_are_refused(tiny_pipeline, tmp_path) -> None:
    folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 10**19}))
    with pytest.raises(UsageError, match=r"component transformer of .* num_layers must be at most"):
        load_skeleton(PipelineIndex.read(str(folder)), "auto", CPU)


@pytest.mark.parametrize("named", [0, {"a": 1}])
def test_a_scheduler_whose_config_names_no_class_is_named(tiny_pipeline, tmp_path, named) -> None:
    folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": named}))
    with pytest.raises(UsageError, match=r"component scheduler of .* must have a config for "):
        load_skeleton(PipelineIndex.read(str(folder)), "auto", CPU)


def test_a_scheduler_whose_config_is_cut_is_named(tiny_pipeline, tmp_path) -> None:
    folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text()[:100])
    with pytest.raises(UsageError, match=r"component scheduler of .* must have a config for "):
        load_skeleton(PipelineIndex.read(str(folder)), "auto", CPU)
    config.unlink()
    assert load_skeleton(PipelineIndex.read(str(folder)), "auto", CPU).scheduler is None


def test_a_pipe_in_place_of_an_index_is_none(tmp_path) -> None:
    os.mkfifo(tmp_path / "model_index.json")
    with pytest.raises(UsageError, match=r"with model_index\.json, got .* without one"):
        PipelineIndex.read(str(tmp_path))


def test_a_pipe_in_a_folder_of_outputs_is_no_record_to_go_on_from(tmp_path) -> None:
    os.mkfifo(tmp_path / "wan.json")
    asked = ServerArgs(model_path="wan", prompt="a", output_path=str(tmp_path))
    assert find_done([asked]) == (None,)
