"""."""

import json
import logging
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.generator.index import PipelineIndex, import_diffusers
from multimodal_gen.runtime.generator.load import (
    denoisers,
    load_pipeline,
    load_text_models,
    pick_device,
    pick_dtype,
)
from multimodal_gen.runtime.generator.skeleton import without_weights
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
    with pytest.raises(UsageError, match=r"must have .* in tokenizer, which has none; download"):
        _load(folder)


def test_a_tokenizer_without_files_is_refused(folder) -> None:
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match=r"must have .*tokenizer\.json.* in tokenizer, which has"):
        _load(folder)


@pytest.mark.parametrize(
    ("component", "rule"),
    [
        ("transformer", r"component transformer .* no file named config\.json found"),
        ("text_encoder", r"must have config\.json in text_encoder, which has none; down"),
        ("vae", r"component vae .* no file named config\.json found"),
        ("scheduler", r"component scheduler .* no file named scheduler_config\.json found"),
    ],
)
def test_a_component_without_its_config_is_refused(component: str, rule: str, folder) -> None:
    (config,) = (folder / component).glob("*config.json")
    config.unlink()
    with pytest.raises(UsageError, match=rule):
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
    loaded = load_text_models(str(folder), components, dtypes, {})
    assert list(loaded) == ["text_encoder"]
    assert loaded["text_encoder"].dtype is torch.float16
    assert not loaded["text_encoder"].training


def test_the_text_encoder_has_the_values_that_diffusers_loads(folder) -> None:
    from diffusers import DiffusionPipeline

    expected = DiffusionPipeline.from_pretrained(folder).text_encoder.state_dict()
    found = _load(folder).text_encoder.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


CPU = torch.device("cpu")


def test_the_index_tells_class_kind_and_components(tiny_pipeline) -> None:
    index = PipelineIndex.read(str(tiny_pipeline("wan")))
    assert (index.name, index.kind) == ("WanPipeline", "video")
    assert index.components["transformer"] == ("diffusers", "WanTransformer3DModel")
    assert "transformer_2" not in index.components
    assert PipelineIndex.read(str(tiny_pipeline("flux"))).kind == "image"


def test_a_home_folder_is_expanded(tiny_pipeline, monkeypatch) -> None:
    folder = tiny_pipeline("wan")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert PipelineIndex.read(f"~/{folder.name}").model_path == str(folder)


def test_a_missing_diffusers_is_named_with_its_install_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingDependencyError, match=r"needs diffusers .*pip install 'multimodal_"):
        import_diffusers()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_weights_are_loaded_in_the_dtype_asked_for(name: str, tiny_pipeline) -> None:
    path = str(tiny_pipeline("flux"))
    args = ServerArgs(model_path=path, dtype=name)
    pipe = load_pipeline(PipelineIndex.read(path), args, CPU)
    assert pipe.transformer.dtype == pipe.vae.dtype == getattr(torch, name)


def test_auto_is_float32_on_the_cpu_and_half_elsewhere(monkeypatch) -> None:
    assert pick_dtype("auto", CPU) is torch.float32
    assert pick_dtype("auto", torch.device("xpu")) is torch.bfloat16
    for supported, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, s=supported, **k: s)
        assert pick_dtype("auto", torch.device("cuda")) is dtype


def test_an_automatic_dtype_keeps_the_autoencoder_of_wan_precise(
    tiny_pipeline, monkeypatch
) -> None:
    from multimodal_gen.runtime.generator import load

    monkeypatch.setattr(load, "pick_dtype", lambda dtype, device: torch.bfloat16)
    path = str(tiny_pipeline("wan"))
    pipe = load_pipeline(PipelineIndex.read(path), ServerArgs(model_path=path), CPU)
    assert (pipe.transformer.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float32)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--dtype must be one of auto, float32, .* got 'int8'"):
        pick_dtype("int8", CPU)


@pytest.mark.parametrize("device", ["toaster", "cuda:99", "cuda:-1", "meta", "xla", "hpu"])
def test_a_device_this_machine_lacks_is_refused(device: str) -> None:
    rule = rf"^--device must be a torch device of this machine \(cpu.*\), got '{device}'"
    with pytest.raises(UsageError, match=rule) as caught:
        pick_device(device)
    assert len(str(caught.value)) < 200


def test_every_device_of_the_machine_is_named_to_who_picks_another(monkeypatch) -> None:
    from multimodal_gen.runtime.generator import load

    monkeypatch.setattr(load, "current_platform", lambda: SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"\(cpu, cuda:0, cuda:1\), got 'toaster'$"):
        pick_device("toaster")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "[]",
            "model_index.json of .* must be a JSON file that holds an object: this holds a list",
        ),
        (
            '"x"',
            "model_index.json of .* must be a JSON file that holds an object: this holds a str",
        ),
        ("[" * 100000, "must be a JSON file that holds an object: maximum recursion"),
        ('{"_class_name": "UNet2DModel"}', "has, got 'UNet2DModel', which is no pipeline; check"),
        ('{"_class_name": "DiffusionPipeline"}', "got 'DiffusionPipeline', which is no pipeline"),
        ('{"_class_name": ["a", "B"]}', r"has, got \['a', 'B'\], which is no class of it; check"),
        ("{}", "has, got None, which is no class of it; check _class_name in its model_index"),
        ('{"_class_name": "SpectrogramDiffusionPipeline"}', "needs further packages; .* note_seq"),
    ],
)
def test_an_index_that_names_no_pipeline_is_explained(content, message, tmp_path) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        PipelineIndex.read(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 5000, r"a path, got 'x+\.\.\.x+': File name too long$"),
        ("~nobody-lives-here/x", r"a path, got '~nobody-lives-here/x': Could not determine home"),
        ("a\0b", r"an existing .* got 'a\\x00b', which is neither$"),
    ],
)
def test_a_path_that_cannot_be_one_is_explained(path: str, message: str) -> None:
    with pytest.raises(UsageError, match="^--model-path must be " + message):
        PipelineIndex.read(path)


def _half(file) -> None:
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", _half, "Unable to load weights from"),
        ("transformer/config.json", lambda f: f.write_text("{"), "is not a valid JSON file"),
        (
            "scheduler/scheduler_config.json",
            lambda f: f.write_text('{"num_train_timesteps": '),
            "is not a valid JSON file",
        ),
    ],
)
def test_files_that_are_spoilt_are_explained(
    file: str, spoil, message: str, tiny_pipeline, tmp_path
) -> None:
    import shutil

    folder = tmp_path / "flux"
    shutil.copytree(tiny_pipeline("flux"), folder)
    spoil(folder / file)
    rule = f"the pipeline at .* could not be loaded, check its files and options: .*{message}"
    with pytest.raises(UsageError, match=rule):
        load_pipeline(PipelineIndex.read(str(folder)), ServerArgs(model_path=str(folder)), CPU)


def test_full_memory_while_loading_is_left_to_be_explained_as_such(
    tiny_pipeline, monkeypatch
) -> None:
    from diffusers import FluxPipeline

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(FluxPipeline, "from_pretrained", full)
    path = str(tiny_pipeline("flux"))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        load_pipeline(PipelineIndex.read(path), ServerArgs(model_path=path), CPU)


def test_the_default_device_is_the_platforms(monkeypatch) -> None:
    from multimodal_gen.runtime.generator import load

    monkeypatch.setattr(load, "current_platform", lambda: SimpleNamespace(device_type="xpu"))
    assert pick_device(None) == torch.device("xpu")
    assert pick_device("cpu") == CPU


def test_tiling_is_turned_on_where_the_autoencoder_can(tiny_pipeline) -> None:
    path = str(tiny_pipeline("wan"))
    index = PipelineIndex.read(path)
    assert load_pipeline(index, ServerArgs(model_path=path, vae_tiling=True), CPU).vae.use_tiling
    assert not load_pipeline(index, ServerArgs(model_path=path), CPU).vae.use_tiling


def test_tiling_without_support_is_refused(tiny_pipeline, monkeypatch) -> None:
    from diffusers import AutoencoderKL

    monkeypatch.setattr(AutoencoderKL, "enable_tiling", None)
    path = str(tiny_pipeline("flux"))
    args = ServerArgs(model_path=path, vae_tiling=True)
    with pytest.raises(UsageError, match="--vae-tiling must be left out for FluxPipeline"):
        load_pipeline(PipelineIndex.read(path), args, CPU)


@pytest.mark.parametrize(
    ("offload", "method"),
    [
        ("none", "to"),
        ("model", "enable_model_cpu_offload"),
        ("sequential", "enable_sequential_cpu_offload"),
    ],
)
def test_offloading_is_left_to_the_pipeline(
    offload: str, method: str, tiny_pipeline, monkeypatch
) -> None:
    from diffusers import FluxPipeline

    calls = []
    for name in ("to", "enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        monkeypatch.setattr(
            FluxPipeline, name, lambda self, *a, name=name, **k: calls.append((name, a, k))
        )
    path = str(tiny_pipeline("flux"))
    args = ServerArgs(model_path=path, offload=offload, dtype="float32")
    device = torch.device("meta")
    load_pipeline(PipelineIndex.read(path), args, device)
    ((called, positional, keyword),) = calls
    assert called == method
    assert (*positional, *keyword.values()) == (device,)


def test_loading_bars_stay_out_of_logs_and_settings_come_back(tiny_pipeline, capfd) -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    before = [
        library.is_progress_bar_enabled() for library in (diffusers_logging, transformers_logging)
    ]
    path = str(tiny_pipeline("flux"))
    capfd.readouterr()
    load_pipeline(PipelineIndex.read(path), ServerArgs(model_path=path), CPU)
    assert "Loading" not in capfd.readouterr().err
    assert before == [
        library.is_progress_bar_enabled() for library in (diffusers_logging, transformers_logging)
    ]


def test_denoisers_are_the_models_with_attention_that_decode_nothing(tiny_pipeline) -> None:
    path = str(tiny_pipeline("wan22"))
    pipe = load_pipeline(PipelineIndex.read(path), ServerArgs(model_path=path), CPU)
    assert sorted(denoisers(pipe)) == ["transformer", "transformer_2"]


@pytest.mark.parametrize(
    ("unused", "said"),
    [("to_gate_compress", False), ("proj_l", False), ("of_another", True)],
)
def test_layers_that_attaching_reads_are_not_said_to_be_unused(
    unused, said, folder, caplog, monkeypatch
) -> None:
    file = next((folder / "transformer").glob("*.safetensors"))
    weights = load_file(file)
    weights[f"blocks.0.attn1.{unused}.weight"] = torch.zeros(2, 2)
    save_file(weights, file, metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    _load(folder)
    assert ("were not used" in caplog.text) is said


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"sparse_attention_config": {"of": ["it's"]}}, False),
        ({"sparse_attention_config": {}, "of_another": 1}, True),
        ({"of_another": 1}, True),
    ],
)
def test_a_curve_that_attaching_reads_is_not_said_to_be_ignored(
    attributes, said, folder, caplog, monkeypatch
) -> None:
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **attributes}))
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    _load(folder)
    without_weights(PipelineIndex.read(str(folder)))
    assert ("will be ignored" in caplog.text) is said
