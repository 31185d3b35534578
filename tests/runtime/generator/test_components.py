import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.components import load_text_models
from multimodal_gen.runtime.generator.loading import PipelineIndex, load_pipeline
from multimodal_gen.runtime.server_args import ServerArgs


@pytest.fixture
def folder(tiny_pipeline, tmp_path):
    """A copy of the tiny Wan pipeline to spoil."""
    return shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")


def _load(folder):
    path = str(folder)
    return load_pipeline(PipelineIndex.read(path), ServerArgs(model_path=path), torch.device("cpu"))


def _drop(file, names) -> None:
    weights = load_file(file)
    save_file(
        {name: value for name, value in weights.items() if not name.startswith(names)},
        file,
        metadata={"format": "pt"},
    )


def test_a_folder_that_lacks_a_component_is_refused(folder) -> None:
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(UsageError, match=r"every component .*missing tokenizer; download it again"):
        _load(folder)


def test_a_tokenizer_without_files_is_refused(folder) -> None:
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match=r"must have .*tokenizer\.json.* in tokenizer, which has"):
        _load(folder)


@pytest.mark.parametrize(
    ("component", "file"),
    [
        ("transformer", "config.json"),
        ("text_encoder", "config.json"),
        ("vae", "config.json"),
        ("scheduler", "scheduler_config.json"),
    ],
)
def test_a_component_without_its_config_is_refused(component: str, file: str, folder) -> None:
    (folder / component / file).unlink()
    with pytest.raises(UsageError, match=rf"must have {file} in {component}, which has none; down"):
        _load(folder)


def test_a_text_encoder_whose_weights_lack_parameters_is_refused(folder) -> None:
    _drop(folder / "text_encoder" / "model.safetensors", "encoder.block.0.layer.0")
    rule = (
        r"weights of text_encoder at .* missing encoder\.block\.0\.layer\.0\..* and \d+ more; dow"
    )
    with pytest.raises(UsageError, match=rule):
        _load(folder)


def test_a_denoiser_whose_weights_lack_a_parameter_is_refused(folder) -> None:
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    _drop(file, "proj_out.bias")
    with pytest.raises(UsageError, match=r"weights of transformer .* missing proj_out\.bias; down"):
        _load(folder)


def test_a_denoiser_with_more_layers_than_its_weights_is_refused(folder) -> None:
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text())
    layers = config["num_layers"]
    file.write_text(json.dumps({**config, "num_layers": layers + 1}))
    rule = rf"weights of transformer at .* missing blocks\.{layers}\..* and \d+ more; download"
    with pytest.raises(UsageError, match=rule):
        _load(folder)


def test_text_models_are_loaded_in_their_dtype_and_for_inference(folder) -> None:
    components = PipelineIndex.read(str(folder)).components
    dtypes = {"default": torch.float16, "vae": torch.float32}
    loaded = load_text_models(str(folder), components, dtypes)
    assert list(loaded) == ["text_encoder"]
    assert loaded["text_encoder"].dtype is torch.float16
    assert not loaded["text_encoder"].training


def test_the_text_encoder_has_the_values_that_diffusers_loads(folder) -> None:
    from diffusers import DiffusionPipeline

    expected = DiffusionPipeline.from_pretrained(folder).text_encoder.state_dict()
    found = _load(folder).text_encoder.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
