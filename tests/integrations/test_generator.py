"""A generator against the same pipeline driven by hand, to the bit."""

import gc
import struct
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import get_type_hints

import multimodal_gen
from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.integrations.generator import (
    DiffGenerator,
    GenerationSettings,
    LoadingSettings,
)
from multimodal_gen.runtime.server_args import LOADING_SETTINGS, SETTINGS, ServerArgs

CALL = {"height": 32, "width": 48, "num_inference_steps": 2}
VIDEO = {**CALL, "num_frames": 5}


def by_hand(pipe, **arguments) -> torch.Tensor:
    """Return the latents of a pipeline of diffusers with our attention, driven by its own call."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    with multimodal_gen.apply(pipe):
        return torch.as_tensor(
            pipe(prompt="a fox", generator=generator, output_type="latent", **arguments)[0]
        )


@pytest.fixture(scope="module")
def wan(tiny_pipeline):
    with DiffGenerator.from_pretrained(tiny_pipeline("wan")) as generator:
        yield generator


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    """A folder with a.png, b.png, mask.png and clip.mp4."""
    import imageio.v2 as imageio
    from PIL import Image

    folder = tmp_path_factory.mktemp("media")
    rng = np.random.default_rng(0)
    for name in ("a", "b", "mask"):
        pixels = rng.integers(0, 255, (40, 56, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    with imageio.get_writer(folder / "clip.mp4", fps=8) as writer:
        for _ in range(5):
            writer.append_data(rng.integers(0, 255, (32, 48, 3), dtype=np.uint8))
    return folder


@pytest.fixture(scope="module")
def image_to_video(tiny_pipeline, tmp_path_factory) -> Path:
    """A tiny Wan 2.2 pipeline from first and last image to video."""
    from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel

    folder = tmp_path_factory.mktemp("wan-i2v")
    parts = WanPipeline.from_pretrained(tiny_pipeline("wan")).components
    torch.manual_seed(0)
    config = {**parts["transformer"].config, "in_channels": 36}
    parts = {name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    pipe = WanImageToVideoPipeline(
        **parts,
        transformer=WanTransformer3DModel.from_config(config),
        transformer_2=None,
        image_encoder=None,
        image_processor=None,
    )
    pipe.save_pretrained(folder)
    return folder


def test_image_to_video_is_the_pipeline_driven_by_hand(image_to_video, media) -> None:
    from diffusers import WanImageToVideoPipeline
    from diffusers.utils import load_image

    first, last = media / "a.png", media / "b.png"
    pipe = WanImageToVideoPipeline.from_pretrained(image_to_video)
    images = {"image": load_image(str(first)), "last_image": load_image(str(last))}
    expected = by_hand(pipe, **images, **VIDEO)
    with DiffGenerator.from_pretrained(image_to_video) as generator:
        made = generator.generate(
            prompt="a fox", image_path=first, last_image_path=last, seed=0, **VIDEO
        )
        with pytest.raises(
            UsageError, match=r"WanImageToVideoPipeline needs image, got none; give"
        ):
            generator.generate(prompt="a fox", seed=0, **VIDEO)
    assert torch.equal(made.latents, expected)
    assert len(repr(made)) < 500


def test_files_of_another_kind_or_number_end_in_one_line(tiny_pipeline, tmp_path) -> None:
    from PIL import Image

    colours = [Image.new("RGB", (32, 32), (9 * each, 0, 0)) for each in range(5)]
    colours[0].save(tmp_path / "still.gif")
    colours[0].save(tmp_path / "moving.gif", save_all=True, append_images=colours[1:])
    still, moving = tmp_path / "still.gif", tmp_path / "moving.gif"
    with DiffGenerator.from_pretrained(
        tiny_pipeline("flux"), pipeline_class_name="FluxImg2ImgPipeline"
    ) as flux:
        with pytest.raises(UsageError, match=r"^image_path must be an image, got the video '.*mo"):
            flux.generate(prompt="a fox", image_path=moving, **CALL)
        with pytest.raises(UsageError, match=r"fails with image_path .*gif, image_path .*gif: "):
            flux.generate(prompt="a fox", image_path=[still, still], **CALL)
        assert flux.generate(prompt="a fox", image_path=still, **CALL).pixels
    with DiffGenerator.from_pretrained(
        tiny_pipeline("wan"), pipeline_class_name="WanVideoToVideoPipeline"
    ) as wan_to_video:
        Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
        with pytest.raises(UsageError, match=r"^video_path must be a video \(.mp4.* the image '"):
            wan_to_video.generate(prompt="a fox", video_path=tmp_path / "a.png", **CALL)
        with pytest.raises(UsageError) as caught:
            wan_to_video.generate(prompt="a fox", video_path="x/" * 2000 + "a.mp4", **CALL)
        assert len(str(caught.value)) < 400
        assert wan_to_video.generate(prompt="a fox", video_path=moving, **CALL).pixels


# imageio leaves the pipes of ffmpeg to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_video_to_video_and_inpainting_are_the_pipelines_driven_by_hand(
    tiny_pipeline, media
) -> None:
    from diffusers import FluxInpaintPipeline, WanVideoToVideoPipeline
    from diffusers.utils import load_image, load_video

    pipe = WanVideoToVideoPipeline.from_pretrained(tiny_pipeline("wan"))
    clip = media / "clip.mp4"
    expected = by_hand(pipe, video=load_video(str(clip)), strength=0.6, **CALL)
    made = multimodal_gen.generate(
        tiny_pipeline("wan"),
        pipeline_class_name="WanVideoToVideoPipeline",
        prompt="a fox",
        video_path=clip,
        pipeline_arg={"strength": 0.6},
        seed=0,
        **CALL,
    )
    assert torch.equal(made.latents, expected)
    assert made.pixels[0].shape == (5, 32, 48, 3)
    gc.collect()

    pipe = FluxInpaintPipeline.from_pretrained(tiny_pipeline("flux"))
    files = {"image": media / "a.png", "mask_image": media / "mask.png"}
    expected = by_hand(pipe, **{name: load_image(str(f)) for name, f in files.items()}, **CALL)
    made = multimodal_gen.generate(
        tiny_pipeline("flux"),
        pipeline_class_name="FluxInpaintPipeline",
        prompt="a fox",
        image_path=files["image"],
        pipeline_arg=f"mask_image=@{files['mask_image']}",
        seed=0,
        **CALL,
    )
    assert torch.equal(made.latents, expected)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_loras_are_the_pipeline_driven_by_hand(tiny_pipeline, tmp_path, wan) -> None:
    pytest.importorskip("peft")
    from diffusers import WanPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    folder = tiny_pipeline("wan")
    trained = WanPipeline.from_pretrained(folder)
    torch.manual_seed(0)
    targets = ["to_q", "to_out.0"]
    trained.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=targets)
    )
    state = get_peft_model_state_dict(trained.transformer)
    WanPipeline.save_lora_weights(tmp_path, transformer_lora_layers=state)
    file = tmp_path / "pytorch_lora_weights.safetensors"

    pipe = WanPipeline.from_pretrained(folder)
    for name in "ab":
        pipe.load_lora_weights(str(file), adapter_name=name)
    pipe.set_adapters(["a", "b"], [0.5, 1.0])
    expected = by_hand(pipe, **VIDEO)
    made = multimodal_gen.generate(
        folder, lora_path=[f"{file}:0.5", str(file)], prompt="a fox", seed=0, **VIDEO
    )
    assert torch.equal(made.latents, expected)
    plain = wan.generate(prompt="a fox", seed=0, **VIDEO)
    assert not torch.equal(made.latents, plain.latents)

    state["blocks.7.attn1.to_q.lora_A.weight"] = torch.zeros(2, 128)
    state["blocks.7.attn1.to_q.lora_B.weight"] = torch.zeros(128, 2)
    WanPipeline.save_lora_weights(tmp_path / "other", transformer_lora_layers=state)
    with pytest.raises(UsageError, match=r"2 of 18 tensors have no place .*blocks\.7\.attn1"):
        DiffGenerator.from_pretrained(folder, lora_path=str(tmp_path / "other"))


@pytest.fixture(scope="module")
def original_lora(tmp_path_factory) -> dict[str, torch.Tensor]:
    """A LoRA of the tiny Wan by the names of Wan's own code, with all that its converter wants."""
    rng = torch.Generator().manual_seed(0)
    sizes = {f"{kind}_attn.{x}": (128, 128) for kind in ("self", "cross") for x in "qkvo"}
    sizes |= {"ffn.0": (128, 256), "ffn.2": (256, 128)}
    return {
        f"diffusion_model.blocks.{block}.{name}.lora_{half}.weight": torch.randn(
            shape, generator=rng
        )
        for block in range(2)
        for name, (wide, high) in sizes.items()
        for half, shape in (("A", (2, wide)), ("B", (high, 2)))
    }


@pytest.mark.parametrize(
    "name",
    ["blocks.0.norm3.diff", "blocks.1.modulation.diff", "blocks.0.attn1.to_q.dora_scale"],
)
def test_what_diffusers_leaves_out_of_a_lora_is_refused(
    name: str, original_lora, tiny_pipeline, tmp_path
) -> None:
    from diffusers import WanPipeline
    from safetensors.torch import save_file

    pytest.importorskip("peft")
    file = tmp_path / "lora.safetensors"
    tensors, prefix = dict(original_lora), "diffusion_model."
    if name.endswith("dora_scale"):  # of files with diffusers' names
        tensors, prefix = WanPipeline.lora_state_dict(dict(tensors)), "transformer."
    save_file({**tensors, prefix + name: torch.ones(128)}, file)
    with pytest.raises(UsageError, match=f"1 of 41 tensors have no place in the model: .*{name}"):
        DiffGenerator.from_pretrained(tiny_pipeline("wan"), lora_path=str(file))


def test_a_lora_that_is_not_finite_is_refused(original_lora, tiny_pipeline, tmp_path) -> None:
    from safetensors.torch import save_file

    pytest.importorskip("peft")
    file = tmp_path / "lora.safetensors"
    name, value = next(iter(original_lora.items()))
    save_file({**original_lora, name: torch.full_like(value, torch.nan)}, file)
    with pytest.raises(UsageError, match="must have finite weights, got NaN or infinity in "):
        DiffGenerator.from_pretrained(tiny_pipeline("wan"), lora_path=str(file))


def test_a_lora_may_have_a_bias_in_one_layer_and_changes_of_zero(
    original_lora, tiny_pipeline, tmp_path, wan
) -> None:
    from safetensors.torch import save_file

    pytest.importorskip("peft")
    file, prefix = tmp_path / "lora.safetensors", "diffusion_model.blocks.0."
    more = {f"{prefix}norm3.diff": torch.zeros(128), f"{prefix}self_attn.q.diff_b": torch.ones(128)}
    save_file({**original_lora, **more}, file)
    made = multimodal_gen.generate(
        tiny_pipeline("wan"), lora_path=f"{file}", prompt="a fox", seed=0, **VIDEO
    )
    plain = wan.generate(prompt="a fox", seed=0, **VIDEO)
    assert not torch.equal(made.latents, plain.latents)


@pytest.fixture(scope="module")
def lora_file(original_lora, tmp_path_factory) -> Path:
    from safetensors.torch import save_file

    file = tmp_path_factory.mktemp("loras") / "fox@2x.safetensors"
    save_file(original_lora, file)
    return file


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(
    ("given", "first", "second"),
    [
        ("", 1.0, None),
        (":0.5", 0.5, None),
        (":0.5@transformer", 0.5, None),
        ("@transformer_2", None, 1.0),
        (":0.5@transformer_2", None, 0.5),
        (":0.5@both", 0.5, 0.5),
    ],
)
def test_the_expert_that_a_lora_is_added_to_is_chosen(
    lora_file, tiny_pipeline, caplog, given, first, second
) -> None:
    pytest.importorskip("peft")
    from diffusers import WanPipeline

    folder = tiny_pipeline("wan22")
    pipe = WanPipeline.from_pretrained(folder)
    for scale, options in ((first, {}), (second, {"load_into_transformer_2": True})):
        if scale is not None:
            pipe.load_lora_weights(str(lora_file), adapter_name="a", **options)
            pipe.set_adapters(["a"], [scale])
    expected = by_hand(pipe, **VIDEO)
    caplog.clear()
    path = f"{lora_file}{given}"
    made = multimodal_gen.generate(folder, lora_path=path, prompt="a fox", seed=0, **VIDEO)
    assert torch.equal(made.latents, expected)
    said = (
        f"the LoRA {lora_file} reached transformer alone, not transformer_2; choose with "
        f"--lora-path FILE:SCALE@transformer_2, or @both"
    )
    warned = [said] if "@" not in given else []
    assert [r.message for r in caplog.records if r.message.startswith("the LoRA")] == warned
    assert [note for note in made.notes if note.startswith("the LoRA")] == warned
    if warned:
        assert said in made.record["notes"]


def test_loras_of_both_experts_go_to_their_own(
    original_lora, lora_file, tiny_pipeline, tmp_path, caplog
) -> None:
    pytest.importorskip("peft")
    from diffusers import WanPipeline
    from safetensors.torch import save_file

    other = tmp_path / "other.safetensors"
    save_file({name: 2 * x for name, x in original_lora.items()}, other)
    folder = tiny_pipeline("wan22")
    pipe = WanPipeline.from_pretrained(folder)
    pipe.load_lora_weights(str(lora_file), adapter_name="a")
    pipe.load_lora_weights(str(other), adapter_name="b", load_into_transformer_2=True)
    pipe.set_adapters(["a", "b"], [0.5, 0.25])
    expected = by_hand(pipe, **VIDEO)
    given = [f"{lora_file}:0.5@transformer", f"{other}:0.25@transformer_2"]
    made = multimodal_gen.generate(folder, lora_path=given, prompt="a fox", seed=0, **VIDEO)
    assert torch.equal(made.latents, expected)
    assert not any("LoRA" in note for note in made.notes)


@pytest.mark.parametrize(
    ("family", "target", "choices"),
    [
        ("wan22", "transformer_3", "transformer or transformer_2 or both"),
        ("wan22", "vae", "transformer or transformer_2 or both"),
        ("wan", "transformer_2", "transformer"),
        ("wan", "both", "transformer"),
    ],
)
def test_a_lora_for_a_component_that_is_not_there_is_refused(
    lora_file, tiny_pipeline, family, target, choices
) -> None:
    pytest.importorskip("peft")
    with pytest.raises(UsageError) as error:
        DiffGenerator.from_pretrained(tiny_pipeline(family), lora_path=f"{lora_file}:0.5@{target}")
    assert str(error.value) == (
        f"lora_path must name a component of WanPipeline that takes a LoRA behind the @, "
        f"{choices}, got {target!r} for {str(lora_file)!r}"
    )


def test_a_lora_that_cannot_be_told_is_refused(original_lora, tiny_pipeline, tmp_path) -> None:
    from safetensors.torch import save_file

    pytest.importorskip("peft")
    folder = tiny_pipeline("wan")
    file = tmp_path / "a.safetensors"
    save_file(original_lora, file)
    with pytest.raises(UsageError, match=r"lora_path must have a finite scale, got .*:1e999'"):
        DiffGenerator.from_pretrained(folder, lora_path=f"{file}:1e999")
    with pytest.raises(UsageError, match=r"must be an existing file .*'loras/a.safetensors'"):
        DiffGenerator.from_pretrained(folder, lora_path="loras/a.safetensors")
    save_file({}, tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match=r"must name one file, .* a.safetensors, b.safetensors"):
        DiffGenerator.from_pretrained(folder, lora_path=str(tmp_path))
    file.unlink()
    with pytest.raises(UsageError, match="which has no tensors of one"):
        DiffGenerator.from_pretrained(folder, lora_path=str(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UsageError, match=r"must be a folder with a file in \.safetensors"):
        DiffGenerator.from_pretrained(folder, lora_path=str(tmp_path))


def write_gguf(model, file: Path) -> None:
    """Write a model's weights, 8-bit where their rows are whole blocks."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "wan")
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, value in model.state_dict().items():
        array = value.numpy()
        if array.ndim == 2 and array.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_pipeline_driven_by_hand(tiny_pipeline, tmp_path, wan) -> None:
    pytest.importorskip("gguf")
    from diffusers import GGUFQuantizationConfig, WanPipeline, WanTransformer3DModel

    folder, file = tiny_pipeline("wan"), tmp_path / "wan.gguf"
    write_gguf(WanTransformer3DModel.from_pretrained(folder, subfolder="transformer"), file)
    transformer = WanTransformer3DModel.from_single_file(
        str(file),
        config=str(folder),
        subfolder="transformer",
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        dtype=torch.float32,
    )
    expected = by_hand(WanPipeline.from_pretrained(folder, transformer=transformer), **VIDEO)
    made = multimodal_gen.generate(
        folder, quantize={"transformer": str(file)}, prompt="a fox", seed=0, **VIDEO
    )
    assert torch.equal(made.latents, expected)
    plain = wan.generate(prompt="a fox", seed=0, **VIDEO)
    assert not torch.equal(made.latents, plain.latents)
    torch.testing.assert_close(made.latents, plain.latents, atol=0.1, rtol=0)


@pytest.mark.parametrize(("config", "times"), [(None, 2), ({"sparsity": 0.5}, 0)])
def test_a_sparse_backend_that_skips_nothing_says_so_once_a_run(
    tiny_pipeline, caplog, config, times
) -> None:
    with DiffGenerator.from_pretrained(tiny_pipeline("wan")) as generator:
        for _ in range(2):
            generator.generate(
                prompt="a fox",
                seed=0,
                attention_backend="video_sparse_attn",
                attention_backend_config=config,
                **VIDEO,
            )
    assert caplog.text.count("video_sparse_attn leaves nothing out in any step") == times


@pytest.mark.parametrize(
    ("entry", "tensor", "problem"),
    [
        (struct.pack("<IIQ", 9, 4, 1 << 40), b"", "its header goes on behind the end"),
        (struct.pack("<IIQ", 9, 9, 1), b"", "its header goes on behind the end"),
        (struct.pack("<IIQ", 8, 1 << 24, 0), b"", "its header goes on behind the end"),
        (struct.pack("<I", 99), b"", r"99\)? is not a valid GGUFValueType"),
        (struct.pack("<II", 4, 1), struct.pack("<QB", 1, 97), "must name a file in GGUF"),
        (
            struct.pack("<II", 4, 1),
            struct.pack("<Q1sIQQIQ", 1, b"w", 2, 20, 4, 8, 0),
            r"row size \(20\) is not a multiple of Q8_0 block size \(32\)",
        ),
    ],
    ids=["long", "nested", "text", "unknown", "short", "blocks"],
)
def test_a_header_of_gguf_that_cannot_be_is_refused_at_once(
    entry, tensor, problem, tiny_pipeline, tmp_path
) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "bad.gguf"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1 if tensor else 0, 1)
    file.write_bytes(head + struct.pack("<Q1s", 1, b"k") + entry + tensor)
    with pytest.raises(UsageError, match=problem):
        DiffGenerator.from_pretrained(tiny_pipeline("wan"), quantize={"transformer": str(file)})


def test_arguments_that_only_the_pipeline_can_check_are_named_where_it_fails(
    wan, monkeypatch
) -> None:
    from diffusers import WanTransformer3DModel

    def refuse(self, *args, attention_kwargs, **kwargs):
        return attention_kwargs["of its own"]

    monkeypatch.setattr(WanTransformer3DModel, "forward", refuse)
    failed = r"fails with pipeline_arg attention_kwargs=.*'scale': 1.*: KeyError: 'of its own'"
    with pytest.raises(UsageError, match=failed):
        wan.generate(prompt="a fox", pipeline_arg={"attention_kwargs": {"scale": 1}}, **VIDEO)


@pytest.fixture(scope="module")
def quantization() -> Any:
    """torchao's module, from the packages or from where scripts/test puts it, apart from them.

    It stays on the path of this process: peft, for one, asks for its release once it is imported.
    """
    folders = sorted(Path(sys.prefix, "apart").glob("torchao-*"))
    if find_spec("torchao") is None and not folders:
        pytest.skip("needs torchao, which scripts/test installs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.path += map(str, folders)
        try:
            module = import_module("torchao.quantization")
        except ImportError as error:
            pytest.skip(f"this torchao is not made for torch {torch.__version__}: {error}")
        # Both asked whether it is there when they were imported: let them ask again.
        known = import_module("diffusers.utils.import_utils")
        known._torchao_available, known._torchao_version = known._is_package_available("torchao")
        import_module("transformers.utils.import_utils").is_torchao_available.cache_clear()
        reload(import_module("diffusers.quantizers.torchao.torchao_quantizer"))
        reload(import_module("transformers.quantizers.quantizer_torchao"))
    return module


@pytest.mark.slow_cases("torchao-fp8-Float8WeightOnlyConfig")
@pytest.mark.parametrize(
    ("way", "setting"),
    [("torchao-int8", "Int8WeightOnlyConfig"), ("torchao-fp8", "Float8WeightOnlyConfig")],
)
def test_eight_bits_are_the_pipeline_driven_by_hand(
    way, setting, tiny_pipeline, quantization, wan
) -> None:
    import diffusers
    import transformers

    folder = tiny_pipeline("wan")
    config = getattr(quantization, setting)
    both = {
        "transformer": diffusers.TorchAoConfig(config()),
        "text_encoder": transformers.TorchAoConfig(config()),
    }
    pipe = diffusers.WanPipeline.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=diffusers.PipelineQuantizationConfig(quant_mapping=both),
    )
    expected = by_hand(pipe, **VIDEO)
    made = multimodal_gen.generate(
        folder, quantize=f"transformer={way},text_encoder={way}", prompt="a fox", seed=0, **VIDEO
    )
    assert torch.equal(made.latents, expected)
    assert not torch.equal(made.latents, wan.generate(prompt="a fox", seed=0, **VIDEO).latents)


def test_a_scheduler_by_name_and_noise_levels_are_the_pipeline_driven_by_hand(
    tiny_pipeline,
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, WanPipeline

    folder = tiny_pipeline("wan")
    pipe = WanPipeline.from_pretrained(folder)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=pipe.scheduler.config.flow_shift)
    expected = by_hand(pipe, **VIDEO)
    with DiffGenerator.from_pretrained(folder, scheduler="flow-match-euler") as generator:
        made = generator.generate(prompt="a fox", seed=0, **VIDEO)
        size = {key: value for key, value in VIDEO.items() if key != "num_inference_steps"}
        levels = generator.generate(prompt="a fox", seed=0, sigmas=[0.9, 0.4, 0.1], **size)
        again = generator.generate(prompt="a fox", seed=0, **VIDEO)
    assert torch.equal(made.latents, expected)
    assert len(levels.record["timings_s"]["steps"]) == 3
    assert torch.equal(again.latents, expected)

    sigmas = [0.9, 0.4]
    pipe = FluxPipeline.from_pretrained(tiny_pipeline("flux"))
    expected = by_hand(pipe, sigmas=sigmas, **CALL)
    made = multimodal_gen.generate(
        tiny_pipeline("flux"), sigmas=sigmas, prompt="a fox", seed=0, **CALL
    )
    assert torch.equal(made.latents, expected)


def test_generations_of_one_model_do_not_change_each_other(wan) -> None:
    first = wan.generate(prompt="a fox", seed=0, **VIDEO)
    other = wan.generate(
        prompt="a cat",
        seed=1,
        attention_backend="sliding_tile_attn",
        attention_backend_config={"window": [1, 1, 1]},
        **VIDEO,
    )
    again = wan.generate(prompt="a fox", seed=0, **VIDEO)
    assert torch.equal(first.latents, again.latents)
    assert first.report.summary() == again.report.summary()
    assert "sliding_tile_attn" in other.report.summary()
    assert (first.media, first.record_path) == ((), None)
    assert first.pixels[0].shape == (5, 32, 48, 3)
    assert first.record["arguments"]["prompt"] == "a fox"


def test_results_go_to_disk_where_a_path_is_given(wan, tmp_path) -> None:
    made = wan.generate(
        prompt="a fox", output_path=tmp_path / "fox.mp4", save_latents=True, seed=0, **VIDEO
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("fox.json", "fox.mp4", "fox.safetensors")
    ]
    assert made.media == (tmp_path / "fox.mp4",)
    assert made.latents_path == tmp_path / "fox.safetensors"


def test_settings_are_those_of_the_flags_with_their_types() -> None:
    loading = tuple(name for name in LOADING_SETTINGS if name != "model_path")
    assert tuple(LoadingSettings.__annotations__) == loading
    others = tuple(name for name in SETTINGS if name not in LOADING_SETTINGS)
    assert set(GenerationSettings.__annotations__) == set(others)
    fields = get_type_hints(ServerArgs)
    for typed in (LoadingSettings, GenerationSettings):
        for name, kind in get_type_hints(typed).items():
            # Without a path nothing is written, which the command line does not have.
            wanted = fields[name] | None if name == "output_path" else fields[name]
            assert kind == wanted, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"higth": 32}, r"DiffGenerator.generate must be given .* got 'higth', did you mean 'hei"),
        ({"dtype": "float32"}, r"got 'dtype', which DiffGenerator.from_pretrained takes"),
        ({"height": "32"}, r"^height must be an integer >= 1, got '32'"),
        ({"num_inference_steps": -1}, r"^num_inference_steps must be an integer >= 1, got -1"),
        ({"save_latents": True}, r"save_latents needs output_path, got True alone"),
        ({"image_path": "a.png"}, r"^image_path must be left out for WanPipeline, .* text alone"),
    ],
)
def test_wrong_settings_are_refused(settings, message, wan) -> None:
    with pytest.raises(UsageError, match=message):
        wan.generate(prompt="a fox", **{**VIDEO, **settings})


def test_generations_run_with_the_attention_that_was_given_when_loading(tiny_pipeline) -> None:
    window = {"window": [1, 1, 1], "skip_time_steps": 0}
    with DiffGenerator.from_pretrained(
        tiny_pipeline("wan"),
        attention_backend="sliding_tile_attn",
        attention_backend_config=window,
        strict_attention=True,
    ) as model:
        for given, ran in (
            ({}, "sliding_tile_attn (reference) [settings]"),
            ({"attention_backend": "torch_sdpa"}, "torch_sdpa [settings]"),
            ({"attention_backend": None}, "torch_sdpa [auto]"),
        ):
            made = model.generate(prompt="a fox", seed=0, **given, **VIDEO)
            assert f"transformer.self, layers 0-1: {ran}" in made.report.summary()
        with pytest.raises(UsageError, match="sage_attn_3"):  # strict is left as it was
            model.generate(prompt="a fox", attention_backend="sage_attn_3", **VIDEO)
    with pytest.raises(ConfigError, match="attention_backend_config needs attention_backend"):
        DiffGenerator.from_pretrained(tiny_pipeline("wan"), attention_backend_config=window)


def test_generations_of_threads_wait_for_each_other(wan) -> None:
    expected = wan.generate(prompt="a fox", seed=0, **VIDEO).latents
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(wan.generate, prompt="a fox", seed=0, **VIDEO) for _ in range(2)]
        assert all(torch.equal(each.result().latents, expected) for each in made)


def test_loading_refuses_what_it_cannot_do(tiny_pipeline) -> None:
    load = DiffGenerator.from_pretrained
    with pytest.raises(UsageError, match=r"got 'prompt', which DiffGenerator.generate takes"):
        load(tiny_pipeline("wan"), prompt="a fox")
    with pytest.raises(UsageError, match="num_gpus must be 1 for a generator of one process"):
        load(tiny_pipeline("wan"), num_gpus=2, device="cpu")
    with pytest.raises(ConfigError, match="quantize must give transformer one of bnb-nf4"):
        load(tiny_pipeline("wan"), quantize="transformer=int3")


def test_a_closed_generator_says_so(tiny_pipeline) -> None:
    with DiffGenerator.from_pretrained(tiny_pipeline("flux")) as generator:
        pass
    generator.close()
    with pytest.raises(UsageError, match="must not be used once it is closed"):
        generator.generate(prompt="a fox", **CALL)


class CancelledError(Exception):
    """What a caller raises to end a generation."""


def test_steps_are_told_and_what_is_raised_there_ends_the_generation(
    tiny_pipeline, tmp_path
) -> None:
    call = {**CALL, "num_inference_steps": 3}
    seen: list[tuple[int, torch.Size]] = []

    def cancel(step: int, latents: torch.Tensor) -> None:
        if step == 1:
            raise CancelledError

    with DiffGenerator.from_pretrained(tiny_pipeline("flux")) as model:
        whole = model.generate(prompt="a fox", seed=0, **call)
        target = tmp_path / "a.png"
        with pytest.raises(CancelledError):
            model.generate(prompt="a fox", on_step=cancel, output_path=target, **call)
        assert list(tmp_path.iterdir()) == []
        again = model.generate(
            prompt="a fox", seed=0, on_step=lambda i, x: seen.append((i, x.shape)), **call
        )
        assert torch.equal(again.latents, whole.latents)
        assert seen == [(step, whole.latents.shape) for step in range(3)]
        with pytest.raises(UsageError, match="on_step must be a function of a step and latents"):
            model.generate(prompt="a fox", on_step=3, **call)
        with pytest.raises(UsageError, match="on_step must be left out with stream=True"):
            model.generate(prompt="a fox", stream=True, on_chunk=print, on_step=cancel, **call)


@pytest.mark.parametrize("given", [None, 3, {}])
def test_a_generator_says_what_it_is_made_of(given: Any) -> None:
    with pytest.raises(UsageError, match=r"args must be ServerArgs, got .*; from_pretrained takes"):
        DiffGenerator(given)
    with pytest.raises(UsageError, match=r"model_path must be a folder or a hub id, got"):
        DiffGenerator.from_pretrained(given)
