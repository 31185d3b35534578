"""Model folders that others wrote: no code of theirs runs, what is wrong is one line."""

import json
import os
import shutil
import sys
from contextlib import suppress

import pytest
import torch

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.generator import load_skeleton
from multimodal_gen.runtime.generator.index import PipelineIndex, import_diffusers
from multimodal_gen.runtime.generator.load import load_pipeline
from multimodal_gen.runtime.server_args import ServerArgs


@pytest.fixture
def folder(tiny_pipeline, tmp_path):
    """A copy of the tiny Wan pipeline to spoil."""
    return shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")


def change(file, **values):
    """Change keys of a JSON file; None removes one."""
    content = json.loads(file.read_text())
    content.update(values)
    file.write_text(json.dumps({key: v for key, v in content.items() if v != "REMOVE"}))


def load(folder, pipeline=None):
    args = ServerArgs(model_path=str(folder))
    return load_pipeline(PipelineIndex.read(str(folder), pipeline), args, torch.device("cpu"))


def skeleton(folder):
    return load_skeleton(PipelineIndex.read(str(folder)), "float32", torch.device("cpu"))


EVIL = "import pathlib\npathlib.Path({!r}).touch()\nclass Evil: pass\n"


@pytest.mark.parametrize("library", ["helper", "this", "os", "helper.inner", "__main__", ""])
@pytest.mark.parametrize("key", ["transformer", "extra", "_hidden"])
def test_no_library_but_the_known_ones_is_imported(folder, tmp_path, library, key) -> None:
    ran = tmp_path / "ran"
    for place in (folder, folder / "transformer"):
        (place / "helper.py").write_text(EVIL.format(str(ran)))
    change(folder / "model_index.json", **{key: [library, "Evil"]})
    before = set(sys.modules)
    with pytest.raises(UsageError, match=r"must be of diffusers, transformers or a module of"):
        PipelineIndex.read(str(folder))
    assert not ran.exists()
    assert not {"helper", "this"} & (set(sys.modules) - before)


def test_a_folder_with_code_beside_a_known_library_is_refused(folder, tmp_path) -> None:
    (folder / "transformer" / "diffusers.py").write_text(EVIL.format(str(tmp_path / "ran")))
    with pytest.raises(UsageError, match=r"must have no code of its own, got 'diffusers\.py'"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_components_of_the_modules_of_diffusers_pipelines_are_taken(folder) -> None:
    change(folder / "model_index.json", extra=["stable_diffusion", "StableDiffusionSafetyChecker"])
    assert "extra" in PipelineIndex.read(str(folder)).components


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_encoder": "REMOVE"}, r"could not be loaded, check its files .*text_encoder"),
        (
            {"vae": "REMOVE", "scheduler": None},
            r"the pipeline at .* could not be loaded, check its files",
        ),
        (
            {"transformer": ["diffusers", "FluxTransformer2DModel"]},
            r"transformer .* must be a WanTransformer3DModel, as WanPipeline has it, got a Flux",
        ),
        ({"transformer": ["diffusers", "a b"]}, r"must name a class of diffusers, got 'a b'"),
        (
            {"text_encoder": ["diffusers", "utils"]},
            r"text_encoder .* a class of diffusers, got 'utils', which is none of diffusers",
        ),
        (
            {"scheduler": ["diffusers", "NoScheduler"]},
            r"scheduler .* got 'NoScheduler', which diffusers .* lacks; a newer one may",
        ),
        ({"../up": ["diffusers", "X"]}, r"must have a name of letters"),
        ({"_class_name": ["helper", "Evil"]}, r"pipeline class .* must be one that diffusers"),
    ],
)
def test_an_index_that_does_not_fit_its_pipeline_is_explained(folder, values, message) -> None:
    change(folder / "model_index.json", **values)
    with pytest.raises(UsageError, match=message):
        load(folder)


def test_models_of_other_pipelines_are_refused_where_types_are_spelled_as_text(
    folder,
) -> None:
    with pytest.raises(UsageError, match=r"must be a HunyuanImageTransformer2DModel, as Hunyuan"):
        load(folder, "HunyuanImagePipeline")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", None),
        ("patch_size", [0, 0, 0]),
        ("patch_size", "abc"),
        ("rope_max_seq_len", "x"),
    ],
)
def test_values_that_make_libraries_raise_name_the_component(folder, key, value) -> None:
    change(folder / "transformer" / "config.json", **{key: value})
    for make in (skeleton, load):
        with suppress(UsageError):  # nothing else; some values are harmless to build
            make(folder)


S, T, V, E = "scheduler", "transformer", "vae", "text_encoder"


@pytest.mark.parametrize(
    ("component", "key", "value", "message"),
    [
        ("vae", "dim_mult", ["x"], "could not be loaded, check its files and options: .*"),
        ("scheduler", "beta_schedule", "x", "could not be loaded, .*: .*x is not implemented"),
        ("transformer", "num_attention_heads", "two", "could not be loaded, check its files"),
    ],
)
def test_what_libraries_raise_while_loading_is_one_line_that_names_the_component(
    folder, component, key, value, message
) -> None:
    files = {"scheduler": "scheduler_config.json"}
    change(folder / component / files.get(component, "config.json"), **{key: value})
    with pytest.raises(UsageError, match=f"^component {component} of the pipeline at .* {message}"):
        load(folder)


def test_a_text_encoder_that_does_not_fit_its_weights_is_named(folder) -> None:
    config = folder / "text_encoder" / "config.json"
    change(config, vocab_size=3)
    with pytest.raises(UsageError, match=r"shared.weight of component text_encoder .* \(3, 64\)"):
        load(folder)
    change(config, vocab_size=551, dropout_rate="x")
    with pytest.raises(UsageError, match=r"component text_encoder .* field 'dropout_rate': Type"):
        load(folder)


def test_a_link_that_leads_to_itself_is_refused(folder) -> None:
    config = folder / "vae" / "config.json"
    config.unlink()
    config.symlink_to(config)
    with pytest.raises(UsageError, match=r"config.json of component vae .* must be a regular file"):
        load(folder)


@pytest.mark.parametrize("file", ["vae/config.json", "transformer/x.safetensors", "tokenizer/a"])
def test_files_of_a_folder_that_never_end_are_refused(folder, file) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    name = file.partition("/")[2]
    with pytest.raises(UsageError, match=f"{name} of component .* must be a regular file"):
        load(folder)


@pytest.mark.parametrize("name", ["WanPipeline", "DiffusionPipeline"])
@pytest.mark.parametrize(
    ("module", "statement", "told"),
    [
        (
            "diffusers.pipelines.wan",
            "from torch import of_another_release",
            r"it failed: .*; reinstall what is broken, .*\[video\]'$",
        ),
        # transformers, which every pipeline imports, imports torchao where it finds one.
        (
            "torchao.quantization",
            "from torch import of_another_release",
            "it failed in the package torchao: .*, or remove torchao$",
        ),
        # torch and the standard library say what is wrong with those that call them.
        (
            "torchvision._meta_registrations",
            "import torch; torch.library.register_fake('torchvision::of_another')(int)",
            "it failed in the package torchvision: .*, or remove torchvision$",
        ),
        (
            "bitsandbytes.cextension",
            "import ctypes; ctypes.CDLL('/of/another/release.so')",
            "it failed in the package bitsandbytes: .*, or remove bitsandbytes$",
        ),
    ],
    ids=["of diffusers", "of torchao", "within torch", "within the standard library"],
)
def test_a_broken_dependency_inside_diffusers_is_one_line(
    name, module, statement, told, folder, monkeypatch
) -> None:
    diffusers = import_diffusers()

    def broken(self, name):
        try:
            exec(statement, {"__name__": module})
        except (ImportError, OSError, RuntimeError) as error:
            raise RuntimeError("Failed to import diffusers.pipelines.wan") from error

    monkeypatch.delattr(diffusers, name, raising=False)
    monkeypatch.setattr(type(diffusers), "__getattr__", broken)
    with pytest.raises(MissingDependencyError, match=f"^{name} of diffusers must import, {told}"):
        PipelineIndex.read(str(folder))
