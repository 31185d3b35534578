"""Where a loaded model's files are, however it was loaded; what happens where nobody knows."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from multimodal_gen.integrations.checkpoint_files import find_checkpoint, weight_files
from multimodal_gen.integrations.diffusers import apply

FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tiny_pipeline, tmp_path):
    """A pipeline folder of one's own, with a second expert whose weights differ."""
    folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    path = folder / "transformer_2" / FILE
    tensors = {name: tensor + 0.5 for name, tensor in load_file(path).items()}
    for name in ("transformer", "transformer_2"):
        own = load_file(folder / name / FILE) if name == "transformer" else tensors
        width = own["blocks.0.attn1.to_q.weight"].shape[0]
        own["blocks.0.to_gate_compress.weight"] = torch.eye(width) * (1 + len(name))
        save_file(own, folder / name / FILE, metadata={"format": "pt"})
    return folder


def model(source, **options):
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel.from_pretrained(source, **options)


def gate_of(transformer):
    with apply(transformer, attention_backend="video_sparse_attn"):
        gate = transformer.blocks[0].attn1.to_gate_compress
        return float(gate.weight[0, 0])


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", ["transformer", "transformer_2"])
def test_trained_layers_are_found_by_folder_and_by_subfolder(folder, kind, name):
    wanted = 1.0 + len(name)
    assert gate_of(model(kind(folder / name))) == wanted
    assert gate_of(model(kind(folder), subfolder=name)) == wanted
    half = model(kind(folder), subfolder=name, torch_dtype=torch.bfloat16)
    assert find_checkpoint(half).folder == folder / name


def test_a_model_of_the_hub_is_found_in_its_cache(folder, monkeypatch):
    import huggingface_hub

    loaded = model(str(folder), subfolder="transformer_2")
    loaded.register_to_config(_name_or_path="org/wan")
    asked = []

    def snapshot_download(repo, *, local_files_only):
        asked.append((repo, local_files_only))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_checkpoint(loaded).folder == folder / "transformer_2"
    assert asked == [("org/wan", True)]


def test_what_cannot_be_found_is_said(folder):
    loaded = model(str(folder), subfolder="transformer")
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(3)  # as if a LoRA were fused
    with apply(loaded, attention_backend="video_sparse_attn") as handle:
        (said,) = [note for note in handle.report().notes if "to_gate_compress" in note]
    assert "transformer: trained layers that its checkpoint may have" in said
    assert "by class and parameters; load it from its own" in said


def test_pipes_beside_a_checkpoint_are_passed_over(folder):
    loaded = model(folder, subfolder="transformer")
    other = folder / "other"
    other.mkdir()
    os.mkfifo(other / "config.json")
    os.mkfifo(folder / "transformer" / "more.safetensors")
    files = find_checkpoint(loaded)
    assert files.folder == folder / "transformer"
    assert weight_files(files.folder) == [
        folder / "transformer" / "diffusion_pytorch_model.safetensors"
    ]


def test_a_model_that_was_not_loaded_has_no_files(folder):
    from diffusers import WanTransformer3DModel

    built = WanTransformer3DModel.from_config(
        WanTransformer3DModel.load_config(folder / "transformer")
    )
    assert find_checkpoint(nn.Linear(2, 2)).folder is None
    assert "not loaded by from_pretrained" in find_checkpoint(nn.Linear(2, 2)).reason
    with apply(built, attention_backend="sla_attn") as handle:
        notes = handle.report().notes
    assert any("(proj_l) are not used, its files are unknown" in note for note in notes)
