"""Model folders that others wrote: no code of theirs runs, what is wrong is one line."""

import dataclasses
import json
import os
import shutil
import sys
from contextlib import suppress

import pytest
import torch

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.generator import load_skeleton
from multimodal_gen.runtime.generator.component_config import check_config, check_scheduler_config
from multimodal_gen.runtime.generator.index import PipelineIndex, import_diffusers
from multimodal_gen.runtime.generator.load import check_loading, load_pipeline
from multimodal_gen.runtime.generator.signatures import arguments_of
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
        ({"transformer": None}, r"must name library and class .* missing transformer"),
        ({"transformer": "REMOVE"}, r"missing transformer"),
        ({"vae": "REMOVE", "scheduler": None}, r"missing .*vae"),
        (
            {"transformer": ["diffusers", "FluxTransformer2DModel"]},
            r"transformer .* must be a WanTransformer3DModel, as WanPipeline has it, got a Flux",
        ),
        ({"transformer": ["diffusers", "a b"]}, r"must name a class of diffusers, got 'a b'"),
        (
            {"text_encoder": ["diffusers", "utils"]},
            r"text_encoder .* must name a class of diffusers, got 'utils', which .* as no class",
        ),
        ({"scheduler": ["diffusers", "NoScheduler"]}, r"scheduler .* has no such class, a newer"),
        ({"../up": ["diffusers", "X"]}, r"must have a name of letters"),
        ({"_class_name": ["helper", "Evil"]}, r"pipeline class .* must be one that diffusers"),
    ],
)
def test_an_index_that_does_not_fit_its_pipeline_is_explained(folder, values, message) -> None:
    change(folder / "model_index.json", **values)
    with pytest.raises(UsageError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("family", "pipeline", "channels", "message"),
    [
        ("wan", "WanImageToVideoPipeline", 16, r"36 in_channels \(2 x 16 .* \+ 4\) .* WanPipeline"),
        ("wan", "LucyEditPipeline", 16, r"must have 32 in_channels .* got 16; .* as many: WanPip"),
        ("wan", None, 36, r"16 in_channels .* for WanPipeline, got 36; .* WanImageToVideoPipeline"),
        ("flux", "FluxFillPipeline", 64, r"384 in_channels .* got 64; .* FluxImg2ImgPipeline"),
        ("cogvideox", "CogVideoXImageToVideoPipeline", 16, r"must have 32 in_channels"),
    ],
)
def test_a_pipeline_of_other_channels_than_the_weights_is_refused_before_they_are_read(
    family, pipeline, channels, message, tiny_pipeline, tmp_path
) -> None:
    without = shutil.ignore_patterns("*.safetensors")
    folder = shutil.copytree(tiny_pipeline(family), tmp_path / family, ignore=without)
    change(folder / "transformer" / "config.json", in_channels=channels)
    with pytest.raises(UsageError, match=f"component transformer of .* {message}"):
        load(folder, pipeline)


def test_the_configs_of_a_hub_id_are_checked_before_its_weights_are_fetched(
    tiny_pipeline, monkeypatch
) -> None:
    asked = []
    index = PipelineIndex.read(str(tiny_pipeline("wan")), "WanImageToVideoPipeline")

    def fetch(repository, *, allow_patterns):
        asked.append((repository, allow_patterns))
        return str(tiny_pipeline("wan"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    index = dataclasses.replace(index, model_path="some/model")
    with pytest.raises(UsageError, match=r"transformer of 'some/model' must have 36 in_channels"):
        load_pipeline(index, ServerArgs(model_path="some/model"), torch.device("cpu"))
    assert asked == [("some/model", ["*/*config.json"])]


def test_a_model_that_starts_from_an_image_by_timesteps_has_the_channels_of_a_latent(
    folder,
) -> None:
    change(folder / "model_index.json", expand_timesteps=True)
    index = PipelineIndex.read(str(folder), "WanImageToVideoPipeline")
    check_loading(index, ServerArgs(model_path=str(folder)), torch.device("cpu"))


def test_models_of_other_pipelines_are_refused_where_types_are_spelled_as_text(
    folder, tiny_pipeline
) -> None:
    with pytest.raises(UsageError, match=r"must be a HunyuanImageTransformer2DModel, as Hunyuan"):
        load(folder, "HunyuanImagePipeline")
    with pytest.raises(UsageError, match=r"text_encoder .* must be a Mistral3For.* got a Qwen3For"):
        load(tiny_pipeline("flux2_klein"), "Flux2Pipeline")


@pytest.mark.parametrize("make", [load, skeleton], ids=["weights", "skeleton"])
@pytest.mark.parametrize(
    ("component", "key", "value"),
    [
        ("transformer", "num_layers", 10**9),
        ("text_encoder", "num_layers", 10**9),
        ("transformer", "num_attention_heads", 10**30),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_it_is_built(
    folder, make, component, key, value
) -> None:
    change(folder / component / "config.json", **{key: value})
    with pytest.raises(UsageError, match=f"`{key}` of component {component} .* at most .* got"):
        make(folder)


@pytest.mark.parametrize(
    ("component", "key", "value", "least"),
    [
        ("transformer", "num_layers", "two", 0),
        ("transformer", "num_layers", -1, 0),
        ("transformer", "attention_head_dim", 2.5, 1),
        ("transformer", "num_attention_heads", 0, 1),
    ],
)
def test_what_is_no_size_is_refused_by_name(folder, component, key, value, least) -> None:
    change(folder / component / "config.json", **{key: value})
    wanted = f"`{key}` of component {component} of .* be a whole number of at least {least}, got"
    for make in (skeleton, load):
        with pytest.raises(UsageError, match=wanted):
            make(folder)


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
    ("component", "key", "value", "rule"),
    [
        (S, "num_train_timesteps", 2 * 10**9, "at most 1048576, got 2000000000"),
        (S, "num_train_timesteps", -1, "a whole number of at least 1, got -1"),
        (S, "flow_shift", "x", "of type float, got 'x'"),
        (S, "flow_shift", float("nan"), "finite, got nan"),
        (S, "flow_shift", None, r"one that UniPCMultistepScheduler makes steps with \(.* got None"),
        (
            S,
            "beta_schedule",
            "x",
            r"one that .* makes steps with \(x is not implemented .* got 'x'",
        ),
        (S, "disable_corrector", 3, r"of type list\[int\], got 3"),
        (V, "latents_mean", [], r"a list with a number for each of 16 channels, got \[\]"),
        (V, "latents_std", None, "a list with a number for each of 16 channels, got None"),
        (V, "z_dim", 10**9, "at most 262144, got 1000000000"),
        (V, "dim_mult", ["x"], r"of type list\[int\], got \['x'\]"),
        (T, "eps", "x", "of type float, got 'x'"),
        (T, "rope_max_seq_len", 2 * 10**9, "at most 262144, got 2000000000"),
        (E, "layer_norm_epsilon", float("nan"), "finite, got nan"),
        (E, "vocab_size", 10**9, "at most 1048576, got 1000000000"),
        ("tokenizer", "extra_ids", 10**9, "at most 1048576, got 1000000000"),
    ],
)
def test_odd_values_of_a_config_are_refused_by_name_before_weights_are_read(
    folder, component, key, value, rule
) -> None:
    files = {S: "scheduler_config.json", "tokenizer": "tokenizer_config.json"}
    change(folder / component / files.get(component, "config.json"), **{key: value})
    for weights in folder.rglob("*.safetensors"):
        weights.write_bytes(b"")
    with pytest.raises(UsageError, match=f"`{key}` of component {component} of .* must be {rule}"):
        load(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_classes_of_diffusers_have_by_default_is_taken() -> None:
    import diffusers

    tried = 0
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        is_config = isinstance(cls, type) and issubclass(cls, diffusers.ConfigMixin)
        if not is_config or issubclass(cls, diffusers.DiffusionPipeline):
            continue
        defaults = {
            key: list(parameter.default)
            if isinstance(parameter.default, tuple)
            else parameter.default
            for key, parameter in arguments_of(cls.__init__).items()
            if parameter.default is not parameter.empty
        }
        check_config(name, cls, defaults, "m")
        check_scheduler_config(name, cls, defaults, "m")
        tried += 1
    assert tried > 200


def test_the_value_that_a_model_cannot_be_built_with_is_named(tiny_pipeline, tmp_path) -> None:
    folder = shutil.copytree(tiny_pipeline("flux"), tmp_path / "flux")
    change(folder / "vae" / "config.json", act_fn="x")
    with pytest.raises(
        UsageError, match=r"component vae .* failed with `act_fn` of 'x': activatio"
    ):
        skeleton(folder)
    change(folder / "transformer" / "config.json", axes_dims_rope=[8])
    with pytest.raises(UsageError, match=r"`axes_dims_rope` .* add up to .* of 32, got \[8\]"):
        load(folder)


def test_a_text_encoder_that_does_not_fit_its_weights_is_named(folder) -> None:
    config = folder / "text_encoder" / "config.json"
    change(config, vocab_size=3)
    with pytest.raises(UsageError, match=r"shared.weight of component text_encoder .* \(3, 64\)"):
        load(folder)
    change(config, vocab_size=551, dropout_rate="x")
    with pytest.raises(UsageError, match=r"component text_encoder .* field 'dropout_rate': Type"):
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
