import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file

from multimodal_gen import __version__
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.helpers.flags import changed

FLAGS = {
    "height": "--height",
    "width": "--width",
    "num_frames": "--num-frames",
    "num_inference_steps": "--num-inference-steps",
    "guidance_scale": "--guidance-scale",
    "true_cfg_scale": "--guidance-scale",
    "prompt": "--prompt",
    "negative_prompt": "--negative-prompt",
}
SMALL = ("--prompt", "a fox", "--num-inference-steps", "1")
WAN_SIZE = ("--height", "32", "--width", "48", "--num-frames", "5")


# The others run without the command line in tests/integrations/test_diffusers.py.
QUICK = ("wan", "flux", "qwen_image")


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in FAMILIES],
)
def stock(request, tiny_pipeline):
    """A family's folder, its flags, and the last latents of the untouched diffusers pipeline."""
    from diffusers import DiffusionPipeline

    family = FAMILIES[request.param]
    folder = tiny_pipeline(request.param)
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    kwargs = family.generate_kwargs
    generator = torch.Generator().manual_seed(0)
    held = []

    def hold(pipe, step, timestep, tensors):
        held.append(tensors["latents"])
        return tensors

    # FLUX.2 returns its latents unpacked and in another scale than the one it steps them in.
    watch = {"callback_on_step_end": hold} if family.name == "flux2_klein" else {}
    latents = pipe(generator=generator, output_type="latent", **watch, **kwargs)[0]
    latents = held[-1] if held else latents
    flags = [text for name, value in kwargs.items() for text in (FLAGS[name], value)]
    return family, folder, flags, torch.as_tensor(latents)


def _generate(sglang, folder, out, *flags):
    outcome = sglang(
        *("generate", "--model-path", folder, "--output-path", out, "--save-latents"),
        *("--seed", 0, *flags),
    )
    assert outcome.code == 0, outcome.err
    (record,) = out.glob("*.json")
    return outcome, json.loads(record.read_text())


def _latents(out: Path) -> torch.Tensor:
    (file,) = out.glob("*.safetensors")
    return load_file(file)["latents"]


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.slow_cases("flux", "wan")
def test_our_layers_give_the_latents_of_the_stock_pipeline(stock, sglang, tmp_path) -> None:
    family, folder, flags, expected = stock
    outcome, record = _generate(
        sglang, folder, tmp_path, "--backend", "sglang", "--attention-backend", "torch_sdpa", *flags
    )
    torch.testing.assert_close(_latents(tmp_path), expected, atol=1e-5, rtol=0)

    layers = record["attention"]["layers"]
    steps = family.num_inference_steps
    assert {entry["backend"] for layer in layers for entry in layer["entries"]} == {"torch_sdpa"}
    assert {layer["component"] for layer in layers} >= {"transformer", "text_encoder"}
    # Once per step, or twice under classifier-free guidance; two experts share the steps.
    first = [
        sum(entry["calls"] for entry in layer["entries"] + layer["detours"])
        for layer in layers
        if layer["component"].startswith("transformer")
        and (layer["role"], layer["layer"]) == ("self", 0)
    ]
    assert all(first)
    assert sum(first) in (steps, 2 * steps)
    suffix = ".mp4" if family.output == "video" else ".png"
    assert record["outputs"] == [f"{folder.name}-seed0{suffix}"]
    assert f"{folder.name}-seed0{suffix}" in outcome.out
    assert "torch_sdpa" in outcome.out
    assert "transformer.self" in outcome.out


@pytest.mark.slow_cases("flux", "wan")
def test_diffusers_native_is_the_stock_pipeline(stock, sglang, tmp_path) -> None:
    family, folder, flags, expected = stock
    # CogVideoX does not go through diffusers' backends, so that naming one is refused.
    named = () if family.name == "cogvideox" else ("--attention-backend", "native")
    _, record = _generate(sglang, folder, tmp_path, "--backend", "diffusers", *named, *flags)
    assert torch.equal(_latents(tmp_path), expected)
    assert record["attention"]["diffusers_backend"] == "native"
    components = set(record["attention"]["layers"])
    assert components == (
        {"transformer", "transformer_2"} if family.name == "wan22" else {"transformer"}
    )


def test_the_record_holds_what_is_needed_to_repeat_the_run(tiny_pipeline, sglang, tmp_path) -> None:
    folder = tiny_pipeline("wan")
    outcome = sglang(
        *("generate", "--model-path", folder, "--output-path", tmp_path / "fox.mp4"),
        *("--fps", "12", *SMALL, *WAN_SIZE),
    )
    assert outcome.code == 0, outcome.err
    assert _files(tmp_path) == ["fox.json", "fox.mp4"]
    record = json.loads((tmp_path / "fox.json").read_text())
    assert record["multimodal_gen"] == __version__
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "diffusers", "transformers", "device"} <= set(record["versions"])
    assert record["pipeline"] == "WanPipeline"
    assert (record["backend"], record["fps"]) == ("sglang", 12)
    assert record["backend_reason"] == "the default of --backend auto"
    assert record["arguments"]["prompt"] == "a fox"
    assert f"seed: {record['arguments']['seed']}\n" in outcome.out
    assert re.search(r"^time: \d+\.\d s in all$", outcome.out, re.MULTILINE)
    timings = record["timings_s"]
    assert len(timings.pop("steps")) == 1
    assert set(timings) == {"load", "attach", "prepare", "decode", "save"}
    assert all(seconds >= 0 for seconds in timings.values())


def test_the_seed_on_record_repeats_the_result(tiny_pipeline, sglang, tmp_path) -> None:
    command = ("generate", "--model-path", tiny_pipeline("flux"), "--save-latents", *SMALL)
    size = ("--height", "32", "--width", "32")
    assert sglang(*command, *size, "--output-path", tmp_path / "a.png").code == 0
    seed = json.loads((tmp_path / "a.json").read_text())["arguments"]["seed"]
    again = sglang(*command, *size, "--output-path", tmp_path / "b.png", "--seed", seed)
    assert again.code == 0
    first, second = (load_file(tmp_path / f"{name}.safetensors")["latents"] for name in "ab")
    assert torch.equal(first, second)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_step_cache_is_set_and_reported_and_a_wrong_one_refused(
    tiny_pipeline, sglang, tmp_path
) -> None:
    command = ("generate", "--model-path", tiny_pipeline("flux"), "--prompt", "a fox")
    size = ("--height", "32", "--width", "32", "--num-inference-steps", "3", "--seed", "0")
    cache = ("--cache", "first_block:threshold=10", "--output-path", tmp_path)
    outcome = sglang(*command, *size, *cache)
    assert outcome.code == 0, outcome.err
    assert "note: transformer: FirstBlockCacheConfig(threshold=10.0) was enabled" in outcome.out
    assert re.search(
        r"note: the cache first_block:threshold=10 skipped \d+% of \d+ calls", outcome.err
    )
    assert "did not run: transformer.self, layers 1" in outcome.out
    assert "in 2 of 3 calls of the model, in steps 1-2" in outcome.out
    record = json.loads((tmp_path / "flux-seed0.json").read_text())
    assert record["arguments"]["cache"] == "first_block:threshold=10"
    layers = [each for each in record["attention"]["layers"] if "not_run" in each]
    assert {json.dumps(each["not_run"]["by_step"]) for each in layers} == {'{"1": 1, "2": 1}'}
    wrong = sglang(*command, *size, "--cache", "first_block:treshold=1", "--output-path", "x.png")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "must have keys among threshold, got 'treshold', did you mean 'threshold'?" in wrong.err


def test_several_images_are_numbered(tiny_pipeline, sglang, tmp_path) -> None:
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--num-outputs", "2"),
        *("--height", "32", "--width", "32", "--seed", "1", "--output-path", tmp_path, *SMALL),
    )
    assert outcome.code == 0, outcome.err
    assert _files(tmp_path) == ["flux-seed1.json", "flux-seed1_1.png", "flux-seed1_2.png"]


def test_a_folder_never_loses_a_file_to_the_next_run(tiny_pipeline, sglang, tmp_path) -> None:
    command = (
        *("generate", "--model-path", tiny_pipeline("flux"), "--height", "32", "--width", "32"),
        *("--seed", "1", "--output-path", tmp_path, *SMALL),
    )
    assert sglang(*command).code == 0
    before = (tmp_path / "flux-seed1.json").read_text()
    assert sglang(*command).code == 0
    assert _files(tmp_path) == [
        *("flux-seed1-2.json", "flux-seed1-2.png", "flux-seed1.json", "flux-seed1.png")
    ]
    assert (tmp_path / "flux-seed1.json").read_text() == before


def test_an_existing_file_is_refused_before_loading_and_replaced_on_request(
    tiny_pipeline, sglang, tmp_path
) -> None:
    out = tmp_path / "fox.png"
    out.write_text("mine")
    command = (
        *("generate", "--model-path", tiny_pipeline("flux"), "--height", "32", "--width", "32"),
        *("--output-path", out, *SMALL),
    )
    refused = sglang(*command)
    assert refused.code == 2
    assert refused.err.startswith("error: --output-path must not exist yet, got ")
    assert "pass --overwrite" in refused.err
    assert out.read_text() == "mine"
    assert sglang(*command, "--overwrite").code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def rival(monkeypatch):
    """Makes another program write the first image's final name while it is encoded."""
    from multimodal_gen.runtime.generator import output

    write_image = output.write_image

    def write_with_rival(pixels, path):
        write_image(pixels, path)
        if rival.final is not None and not rival.final.exists():
            rival.final.write_text("theirs")

    def rival(final):
        rival.final = final

    rival.final = None
    monkeypatch.setattr(output, "write_image", write_with_rival)
    return rival


def test_a_file_written_meanwhile_is_never_replaced(tiny_pipeline, sglang, tmp_path, rival) -> None:
    rival(tmp_path / "fox.png")
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--height", "32", "--width", "32"),
        *("--output-path", tmp_path / "fox.png", *SMALL),
    )
    assert outcome.code == 2
    assert "fox.png', which another program wrote meanwhile; run again with" in outcome.err
    assert _files(tmp_path) == ["fox.png"]
    assert (tmp_path / "fox.png").read_text() == "theirs"


def test_a_name_taken_meanwhile_in_a_folder_moves_the_result_to_the_next(
    tiny_pipeline, sglang, tmp_path, rival
) -> None:
    rival(tmp_path / "flux-seed1.png")
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--height", "32", "--width", "32"),
        *("--seed", "1", "--output-path", tmp_path, *SMALL),
    )
    assert outcome.code == 0, outcome.err
    assert _files(tmp_path) == ["flux-seed1-2.json", "flux-seed1-2.png", "flux-seed1.png"]
    assert (tmp_path / "flux-seed1.png").read_text() == "theirs"
    record = json.loads((tmp_path / "flux-seed1-2.json").read_text())
    assert record["outputs"] == ["flux-seed1-2.png"]


@pytest.mark.slow_cases(
    "wan-flags20-must be one that diffusers can run here, got _native_cudnn, which failed: "
)
@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        (
            "flux",
            ("--num-frames", "9"),
            "--num-frames must be left out for FluxPipeline, which has no such argument, got 9",
        ),
        ("flux", ("--fps", "9"), "--fps must be left out for FluxPipeline"),
        ("wan", ("--true-cfg-scale", "2"), "--true-cfg-scale must be left out for WanPipeline"),
        ("flux", ("--output-path", "x.mp4"), "--output-path must end in .png or be a folder"),
        ("wan", ("--output-path", "x.png"), "--output-path must end in .mp4 or be a folder"),
        ("wan", ("--device", "cuda:99"), "--device must be a torch device of this machine"),
        ("wan", ("--device", "toaster"), "--device must be a torch device of this machine"),
        ("wan", ("--offload", "model", "--device", "cpu"), "--offload must be none on the CPU"),
        (
            "flux",
            ("--output-path", "x" * 300),
            "--output-path must be a file or folder that can be made, got 'xxx",
        ),
        (
            "flux",
            ("--output-path", "~nobody-lives-here/x.png"),
            "--output-path must be a file or folder that can be made, got '~nobody-lives-here/x",
        ),
        ("wan", ("--device", "meta"), "--device must be a torch device of this machine"),
        ("flux", ("--height", "8"), "--height must be at least 16 for FluxPipeline, got 8: "),
        ("cogvideox", ("--width", "24"), "--width must be a multiple of 16 for CogVideoXPipeline"),
        ("ltx", (), "--num-inference-steps must be at least 2 for this LTXPipeline, got 1: "),
        ("qwen_image", (), "--num-inference-steps must be at least 2 for this QwenImagePipeline"),
        ("cogvideox", ("--num-outputs", "2"), "--num-outputs must be 1 for CogVideoXPipeline"),
        ("hunyuan_video_15", ("--num-outputs", "2"), "must be 1 for HunyuanVideo15Pipeline"),
        ("flux", ("--num-outputs", "1000000000"), "--num-outputs must be at most 1000, got"),
        ("flux", ("--negative-prompt", "\udcff"), "--negative-prompt must be Unicode text, got"),
        (
            "cogvideox",
            ("--num-inference-steps", "1001"),
            "the pipeline refuses its arguments, change ",
        ),
        (
            "wan",
            (*WAN_SIZE, "--attention-backend", "_native_cudnn", "--device", "cpu"),
            "must be one that diffusers can run here, got _native_cudnn, which failed: ",
        ),
        (
            "wan",
            ("--height", "33", "--width", "48"),
            "got 33: one token of the transformer stands for 16 pixels; try 32 or 48",
        ),
        (
            "cogvideox",
            ("--height", "36", "--width", "48"),
            "--height must be a multiple of 16 for CogVideoXPipeline, got 36: one token of the",
        ),
        ("wan", ("--attention-backend", "tourch_sdpa"), "did you mean 'torch_sdpa'?"),
        (
            "wan",
            ("--attention-backend", "native", "--backend", "sglang"),
            "native is an attention backend of diffusers, use it with --backend diffusers",
        ),
        (
            "wan",
            ("--attention-backend", "sliding_tile_attn", "--backend", "diffusers"),
            "sliding_tile_attn is an attention backend of this package, use it with "
            "--backend sglang",
        ),
        (
            "wan",
            ("--attention-backend", "fa3", "--backend", "diffusers"),
            "must be one of flash, flash_hub",
        ),
        (
            "wan",
            ("--attention-backend", "flash", "--backend", "diffusers"),
            "diffusers cannot use attention backend flash here: Flash Attention backend 'flash' "
            "is not usable",
        ),
        (
            "cogvideox",
            ("--attention-backend", "native", "--backend", "diffusers"),
            "--attention-backend native changes nothing in CogVideoXPipeline",
        ),
        (
            "wan",
            ("--component-attention-backends", "transformer=fa", "--backend", "diffusers"),
            "--component-attention-backends must not be given with --backend diffusers",
        ),
        (
            "wan",
            ("--attention-config.backend", "fa", "--backend", "diffusers"),
            "--attention-config must not be given with --backend diffusers",
        ),
        ("wan", ("--cuda-graph",), "it is on cpu, and graphs are of CUDA"),
        ("wan", ("--cuda-graph", "--offload", "block"), "--offload must be none with --cuda-graph"),
        (
            "wan",
            ("--attention-config.backend", "fa", "--attention-backend", "fa"),
            "--attention-config must not be given with --attention-backend",
        ),
        (
            "wan",
            ("--component-attention-backends", "unet=torch_sdpa", "--backend", "sglang"),
            "unet",
        ),
        (
            "wan",
            ("--attention-backend", "fa", "--strict-attention", "--device", "cpu"),
            "attention backend fa (settings) cannot serve",
        ),
        (
            "wan",
            ("--attention-backend", "torch_sdpa", "--attention-backend-config", "a=1"),
            "a",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_and_leaves_no_file(
    family: str, flags: tuple[str, ...], message: str, tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sglang("generate", "--model-path", tiny_pipeline(family), *changed(SMALL, flags))
    assert outcome.code == 2, outcome.err
    (line,) = [text for text in outcome.err.splitlines() if text.startswith("error: ")]
    assert message in line
    assert "Traceback" not in outcome.err
    assert _files(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/at/all", "which is neither"),
        ("./nowhere", "which is neither"),
        ("file.safetensors", "got the file 'file.safetensors'"),
        ("empty", "must be a pipeline folder with model_index.json, got 'empty' without one"),
        ("part", "this looks like one component, name the folder above it"),
        ("broken", "model_index.json of 'broken' must be a JSON file"),
        ("alien", "must be one that diffusers"),
        (
            "hollow",
            "component transformer of the pipeline at 'hollow' could not be loaded, check",
        ),
    ],
)
def test_a_model_path_that_is_no_pipeline_is_explained(
    path: str, message: str, sglang, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "part", "broken", "alien", "hollow"):
        (tmp_path / name).mkdir()
    (tmp_path / "file.safetensors").touch()
    (tmp_path / "part" / "config.json").write_text("{}")
    (tmp_path / "broken" / "model_index.json").write_text("{")
    (tmp_path / "alien" / "model_index.json").write_text('{"_class_name": "AlienPipeline"}')
    hollow = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
    }
    (tmp_path / "hollow" / "model_index.json").write_text(json.dumps(hollow))
    outcome = sglang("generate", "--model-path", path, *SMALL)
    assert outcome.code == 2
    assert message in outcome.err


def _offline(error: Exception):
    def download(*args, **kwargs):
        raise error from OSError(-2, "Name or service not known")

    return download


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("Repository not found.\nMore text."), "OSError: Repository not found"),
        (
            LocalEntryNotFoundError("no such entry"),
            "this machine does not reach the Hub: [Errno -2] Name or service not known",
        ),
    ],
    ids=["a missing file", "a missing network"],
)
def test_an_unreachable_hub_is_explained(error, reason, sglang, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _offline(error))
    outcome = sglang("generate", "--model-path", "some/model", *SMALL)
    assert outcome.code == 2
    assert outcome.err == (
        "error: --model-path must be an existing pipeline folder or a reachable hub id, got "
        "'some/model': there is no such folder, it is not in the cache, and the Hugging Face Hub "
        "did not give its model_index.json; check the spelling, the network and for gated models "
        f"`hf auth login` ({reason})\n"
    )


@pytest.mark.slow_cases(
    "flags2-sglang-the default of --backend auto",
    "flags3-diffusers---backend auto: _native_math is an attention backend of diffusers only",
    "flags4-diffusers-asked for with --backend diffusers",
)
@pytest.mark.parametrize(
    ("flags", "picked", "reason"),
    [
        ((), "sglang", "the default of --backend auto"),
        (("--attention-backend", "auto"), "sglang", "the default of --backend auto"),
        (("--attention-backend", "Torch-SDPA"), "sglang", "the default of --backend auto"),
        (
            ("--attention-backend", "_native_math"),
            "diffusers",
            "--backend auto: _native_math is an attention backend of diffusers only",
        ),
        (("--backend", "diffusers"), "diffusers", "asked for with --backend diffusers"),
    ],
)
def test_the_choice_of_the_backend_is_reported_with_its_reason(
    flags, picked: str, reason: str, tiny_pipeline, sglang, tmp_path
) -> None:
    out = tmp_path / "out.mp4"
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("wan"), "--output-path", out),
        *(*flags, *SMALL, *WAN_SIZE),
    )
    assert outcome.code == 0, outcome.err
    assert f"attention: {picked} ({reason})\n" in outcome.out
    record = json.loads(out.with_suffix(".json").read_text())
    assert (record["backend"], record["backend_reason"]) == (picked, reason)


def test_a_pipeline_without_known_attention_runs_as_it_is_unless_more_was_asked(
    tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    from multimodal_gen.errors import NothingAppliedError
    from multimodal_gen.integrations import generator

    def nothing(pipe, **options):
        raise NothingAppliedError("no attention was found")

    monkeypatch.setattr(generator, "apply", nothing)
    command = (
        *("generate", "--model-path", tiny_pipeline("wan"), "--output-path", tmp_path / "a.mp4"),
        *(*SMALL, *WAN_SIZE),
    )
    for flags in (("--backend", "sglang"), ("--attention-backend", "torch_sdpa")):
        refused = sglang(*command, *flags)
        assert (refused.code, refused.err) == (2, "error: no attention was found\n")
    ran = sglang(*command)
    assert ran.code == 0
    assert "note: runs as diffusers ships it: no attention was found\n" in ran.out
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["attention"]["diffusers_backend"] == "native"


def _raise_in_step(monkeypatch, error: BaseException) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    def step(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(FlowMatchEulerDiscreteScheduler, "step", step)


def test_a_result_that_is_not_finite_is_refused_and_leaves_no_file(
    tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    command = (
        *("generate", "--model-path", tiny_pipeline("flux"), "--output-path", tmp_path / "a.png"),
        *("--height", "32", "--width", "32", *SMALL),
    )
    spoilt = {
        "the denoised latents must be finite, got ": (FlowMatchEulerDiscreteScheduler, "step"),
        "the decoded pixels must be finite, got nothing but nan": (AutoencoderKL, "decode"),
    }
    for message, (cls, name) in spoilt.items():
        with monkeypatch.context() as patch:
            method = getattr(cls, name)
            patch.setattr(
                cls, name, lambda *a, m=method, **k: tuple(x * float("nan") for x in m(*a, **k))
            )
            outcome = sglang(*command)
        assert outcome.code == 2
        (line,) = [text for text in outcome.err.splitlines() if text.startswith("error: ")]
        assert message in line
        assert _files(tmp_path) == []


def test_what_was_made_is_on_record_and_a_rounded_size_is_said(
    tiny_pipeline, sglang, tmp_path
) -> None:
    flags = ("--height", "40", "--width", "32")
    outcome, record = _generate(sglang, tiny_pipeline("flux"), tmp_path, *SMALL, *flags)
    assert (record["arguments"]["height"], record["arguments"]["width"]) == (40, 32)
    assert record["produced"] == {
        "num_outputs": 1,
        "num_frames": None,
        "height": 32,
        "width": 32,
        "non_finite_values": 0,
    }
    note = "--height 40 was asked for, the pipeline made 32"
    assert record["notes"] == [note]
    assert f"note: {note}\n" in outcome.err
    assert note not in outcome.out


def test_rounded_frames_are_on_record(tiny_pipeline, sglang, tmp_path) -> None:
    flags = ("--height", "32", "--width", "32", "--num-frames", "7")
    _, record = _generate(sglang, tiny_pipeline("wan"), tmp_path, *SMALL, *flags)
    assert record["produced"]["num_frames"] == 5
    assert "--num-frames 7 was asked for, the pipeline made 5" in record["notes"]


def test_the_home_folder_in_the_output_path_is_expanded(
    tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--output-path", "~/fox.png"),
        *("--height", "32", "--width", "32", *SMALL),
    )
    assert outcome.code == 0, outcome.err
    assert _files(tmp_path) == ["fox.json", "fox.png"]


def test_ctrl_c_while_denoising_leaves_no_file(
    tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    _raise_in_step(monkeypatch, KeyboardInterrupt())
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--output-path", tmp_path / "out"),
        *("--height", "32", "--width", "32", *SMALL),
    )
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "interrupted; no file was written"
    assert _files(tmp_path) == []


def test_ctrl_c_while_saving_leaves_no_file(tiny_pipeline, sglang, tmp_path, monkeypatch) -> None:
    from multimodal_gen.runtime.generator import output

    def interrupted(latents, path):
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "write_latents", interrupted)
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("wan"), "--output-path", tmp_path / "a.mp4"),
        *("--save-latents", *SMALL, *WAN_SIZE),
    )
    assert outcome.code == 130
    assert _files(tmp_path) == []


@pytest.mark.slow_cases("accelerator")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
    ids=["accelerator", "cpu"],
)
def test_running_out_of_memory_says_what_to_try(
    error, tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    _raise_in_step(monkeypatch, error)
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--output-path", tmp_path / "a.png"),
        *("--height", "32", "--width", "32", *SMALL),
    )
    assert outcome.code == 2
    (line,) = [text for text in outcome.err.splitlines() if text.startswith("error: ")]
    assert "the device ran out of memory" in line
    for remedy in ("--height", "--dtype bfloat16", "--offload model", "--vae-tiling"):
        assert remedy in line
    assert _files(tmp_path) == []


def test_a_full_disk_is_explained_and_leaves_nothing(
    tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    from multimodal_gen.runtime.generator import output

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "write_image", full)
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--output-path", tmp_path / "a.png"),
        *("--height", "32", "--width", "32", *SMALL),
    )
    assert outcome.code == 2
    (line,) = [text for text in outcome.err.splitlines() if text.startswith("error: ")]
    assert "the output could not be written to" in line
    assert "No space left on device" in line
    assert _files(tmp_path) == []


@pytest.mark.parametrize("flags", [(), ("--traceback",)], ids=["a line", "all of it"])
def test_what_a_library_raises_in_the_run_is_one_line_and_all_of_it_on_demand(
    flags, tiny_pipeline, sglang, tmp_path
) -> None:
    folder = shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"latents_mean": [0.0] * 3}))
    video = tmp_path / "a.mp4"
    outcome = sglang(
        *("generate", "--model-path", folder, "--output-path", video, "--num-frames", "5"),
        *("--height", "32", "--width", "32", *SMALL, *flags),
    )
    assert outcome.code == 2
    (line,) = [text for text in outcome.err.splitlines() if text.startswith("error: ")]
    assert "WanPipeline fails in the run, check its files and the options: RuntimeError" in line
    assert ("Traceback (most recent call last)" in outcome.err) == bool(flags)
    assert not video.exists()


@pytest.mark.slow_cases("error1")
@pytest.mark.parametrize("error", [RuntimeError("a defect"), NotImplementedError("a defect")])
def test_a_defect_while_denoising_keeps_its_traceback_and_leaves_no_file(
    error, tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    _raise_in_step(monkeypatch, error)
    with pytest.raises(type(error), match="a defect"):
        sglang(
            *("generate", "--model-path", tiny_pipeline("flux")),
            *("--output-path", tmp_path / "a.png", "--height", "32", "--width", "32", *SMALL),
        )
    assert _files(tmp_path) == []


def test_blocks_are_compiled_where_the_model_names_them(
    tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    from diffusers import CogVideoXTransformer3DModel, FluxTransformer2DModel

    compiled = []

    def compile_blocks(self, **kwargs):
        compiled.append((type(self).__name__, kwargs))

    for cls in (CogVideoXTransformer3DModel, FluxTransformer2DModel):
        monkeypatch.setattr(cls, "compile_repeated_blocks", compile_blocks)
    size = ("--height", "32", "--width", "32", "--enable-torch-compile")
    flux = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), *SMALL, *size),
        *("--output-path", tmp_path),
    )
    cogvideox = sglang(
        *("generate", "--model-path", tiny_pipeline("cogvideox"), *SMALL, *size),
        *("--num-frames", "9", "--output-path", tmp_path),
    )
    assert (flux.code, cogvideox.code) == (0, 0), flux.err + cogvideox.err
    assert compiled == [("FluxTransformer2DModel", {"fullgraph": True})]
    note = "note: transformer was not compiled: CogVideoXTransformer3DModel names no repeated"
    assert note not in flux.err
    assert note in cogvideox.err


@pytest.mark.slow
def test_the_installed_program_writes_a_video(tiny_pipeline, tmp_path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "multimodal_gen", "generate"),
            *("--model-path", tiny_pipeline("wan"), "--output-path", tmp_path / "fox.mp4"),
            *(*SMALL, *WAN_SIZE),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(tmp_path / "fox.mp4")
    assert _files(tmp_path) == ["fox.json", "fox.mp4"]
    assert "\x1b" not in done.stdout


def test_a_rule_that_matches_no_layer_is_one_line_and_leaves_no_file(
    tiny_pipeline, sglang, tmp_path
) -> None:
    rules = {"rules": [{"component": "transfomer", "backend": "torch_sdpa"}]}
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--output-path", tmp_path),
        *("--attention-config", json.dumps(rules), "--height", "32", "--width", "32", *SMALL),
    )
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert "rules[0] must match at least one attention layer" in line
    assert "transformer" in line
    assert _files(tmp_path) == []


def test_sizes_are_refused_before_weights_are_loaded(tiny_pipeline, sglang, monkeypatch) -> None:
    from multimodal_gen.runtime.generator import run

    monkeypatch.setattr(run, "load_pipeline", None)
    folder = tiny_pipeline("ltx")
    outcome = sglang("generate", "--model-path", folder, "--prompt", "a", "--width", "100")
    assert outcome.code == 2
    message = (
        "--width must be a multiple of 32 for LTXPipeline, got 100: one token of the transformer "
    )
    message += "stands for 32 pixels; try 96 or 128"
    assert outcome.err.splitlines()[-1] == f"error: {message}"
