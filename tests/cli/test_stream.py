"""`sglang generate --stream` and its generator, against the same pipelines called as a whole."""

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from diffusers import (
    HeliosPipeline,
    HunyuanVideoFramepackPipeline,
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
)
from PIL import Image

from multimodal_gen.cli.generate import _show
from multimodal_gen.cli.main import main
from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.integrations.generator import DiffGenerator
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.generator import output, stream
from multimodal_gen.runtime.generator import streamed as pipelines
from multimodal_gen.runtime.generator.output import GrowingVideo, OutputTarget
from multimodal_gen.runtime.generator.stream import Streaming
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.testing.tiny_models.streaming import (
    ANYFLOW_FAR,
    FRAMEPACK,
    HELIOS,
    HELIOS_PYRAMID,
    SKYREELS,
)

pytestmark = [
    # The scheduler of Helios gives numpy tensors; FlexAttention is slow where it is not compiled.
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

HELIOS_CALL = {
    "height": 32,
    "width": 64,
    "num_frames": 18,
    "num_inference_steps": 1,
    "guidance_scale": 1.0,
    "pipeline_arg": dict(HELIOS.extra_kwargs),
}
FLAGS = (
    *("--prompt", "a fox", "--height", 32, "--width", 64, "--num-frames", 18, "--seed", 0),
    *("--num-inference-steps", 1, "--guidance-scale", 1, "--stream"),
    *(f"--pipeline-arg={name}={json.dumps(value)}" for name, value in HELIOS.extra_kwargs.items()),
)


@pytest.fixture(scope="module")
def helios(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("helios")
    HELIOS.build(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def generator(helios):
    with DiffGenerator.from_pretrained(helios) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def whole(generator):
    """The video that is streamed, made in one call."""
    return generator.generate(prompt="a fox", seed=0, **HELIOS_CALL)


def num_frames(path: Path) -> int:
    return imageio_ffmpeg.count_frames_and_secs(str(path))[0]


def counted_calls(pipeline: type, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the frames of every call of a pipeline from now on."""
    frames, own = [], pipeline.__call__

    @functools.wraps(own)
    def call(self, **arguments):
        frames.append(arguments["num_frames"])
        return own(self, **arguments)

    monkeypatch.setattr(pipeline, "__call__", call)
    return frames


def frames_so_far(path: Path) -> int:
    """Return the frames of a video that may not have begun."""
    try:
        return num_frames(path)
    except RuntimeError:
        return 0


def decoded(path: Path, height: int, width: int) -> np.ndarray:
    """Return the frames of a video, [T, H, W, 3] in [0, 1]."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path]
    raw = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], stdout=subprocess.PIPE, check=True
    ).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3) / 255


def streamed(generator: DiffGenerator, **settings):
    """Return what was generated, and its chunks."""
    chunks = []
    made = generator.generate(
        prompt="a fox", seed=0, stream=True, on_chunk=chunks.append, **HELIOS_CALL, **settings
    )
    return made, chunks


def test_chunks_are_the_frames_of_the_whole_video(generator, whole) -> None:
    made, chunks = streamed(generator)
    assert [(chunk.first_frame, chunk.num_frames) for chunk in chunks] == [(0, 9), (9, 8)]
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])
    assert (made.pixels, made.media, made.interrupted) == ((), (), False)
    assert made.latents.shape[2] == 6
    assert made.record["produced"] == whole.record["produced"]
    assert made.report.summary() == whole.report.summary()


def test_a_stream_keeps_its_first_record_where_another_file_is_taken(generator, tmp_path) -> None:
    report = tmp_path / "attention.json"
    with pytest.raises(UsageError, match=r"record_attention must not exist yet, got .*meanwhile"):
        generator.generate(
            **{**HELIOS_CALL, "prompt": "a fox", "stream": True, "output_path": tmp_path / "a.mp4"},
            record_attention=report,
            on_chunk=lambda chunk: report.write_text("mine"),
        )
    assert {file.name for file in tmp_path.iterdir()} == {"a.mp4", "a.json", report.name}
    assert json.loads((tmp_path / "a.json").read_text())["interrupted"] is True
    assert report.read_text() == "mine"


@pytest.mark.slow
def test_nothing_of_a_stream_stays_with_the_pipeline(generator, whole) -> None:
    streamed(generator)
    again = generator.generate(prompt="a fox", seed=0, **HELIOS_CALL)
    assert np.array_equal(again.pixels[0], whole.pixels[0])


def test_a_long_video_is_made_in_calls_that_know_no_more_than_the_model_reads(
    generator, monkeypatch
) -> None:
    monkeypatch.setattr(pipelines, "_CHUNKS_OF_A_CALL", 1)
    calls, own = [], HeliosPipeline.__call__

    @functools.wraps(own)
    def call(self, **arguments):
        calls.append(arguments)
        return own(self, **arguments)

    settings = {**HELIOS_CALL, "num_frames": 26}
    whole = generator.generate(prompt="a fox", seed=0, **settings)
    monkeypatch.setattr(HeliosPipeline, "__call__", call)
    chunks = []
    made = generator.generate(
        prompt="a fox", seed=0, stream=True, on_chunk=chunks.append, **settings
    )
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])
    # Three calls of three latent frames; what they are given is all there is, up to seven.
    assert [x["num_frames"] for x in calls] == [9] * 3
    assert [x["video_latents"].shape[2] for x in calls[1:]] == [3, 6]
    assert made.latents.shape[2] == 3
    assert made.record["produced"] == whole.record["produced"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [HELIOS, HELIOS_PYRAMID], ids=["helios", "pyramid"])
@pytest.mark.parametrize("in_a_call", [1, 3])
def test_a_long_video_that_begins_with_an_image_is_made_in_calls_too(
    family, in_a_call, tmp_path, monkeypatch
) -> None:
    family.build(0).save_pretrained(tmp_path / "model")
    size = (family.height, family.width, 3)
    picture = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    call = {"height": family.height, "width": family.width, "num_frames": 43, "seed": 0}
    call |= {"prompt": "a fox", "image_path": tmp_path / "picture.png", "guidance_scale": 1.0}
    call |= {"pipeline_arg": dict(family.extra_kwargs)}
    if family is HELIOS:
        call["num_inference_steps"] = 1
    chunks, kind = [], getattr(diffusers, family.pipeline_class)
    with DiffGenerator.from_pretrained(tmp_path / "model") as loaded:
        whole = loaded.generate(**call)
        monkeypatch.setattr(pipelines, "_CHUNKS_OF_A_CALL", in_a_call)
        calls = counted_calls(kind, monkeypatch)
        loaded.generate(**call, stream=True, on_chunk=chunks.append)
    assert len(chunks) == 5
    assert calls == [9 * in_a_call] * (5 // in_a_call) + [9 * (5 % in_a_call)] * (in_a_call > 1)
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of imageio's pipes
def test_a_long_video_that_follows_on_another_is_made_in_calls_too(
    generator, tmp_path, monkeypatch
) -> None:
    call = {**HELIOS_CALL, "prompt": "a fox", "seed": 0}
    generator.generate(**call, output_path=tmp_path / "before.mp4")
    call |= {"video_path": tmp_path / "before.mp4", "num_frames": 43}
    whole, chunks = generator.generate(**call), []
    monkeypatch.setattr(pipelines, "_CHUNKS_OF_A_CALL", 2)
    calls = counted_calls(HeliosPipeline, monkeypatch)
    generator.generate(**call, stream=True, on_chunk=chunks.append)
    assert calls == [18, 18, 9]
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])


@pytest.mark.slow
def test_latents_that_are_saved_are_those_of_all_calls(generator, monkeypatch, tmp_path) -> None:
    settings = {**HELIOS_CALL, "prompt": "a fox", "seed": 0, "save_latents": True, "stream": True}
    settings["num_frames"] = 45
    whole = generator.generate(**settings, output_path=tmp_path / "whole")
    monkeypatch.setattr(pipelines, "_CHUNKS_OF_A_CALL", 2)
    saved = generator.generate(**settings, output_path=tmp_path / "parts")
    assert torch.equal(saved.latents, whole.latents)


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize(
    ("family", "frames"),
    [(SKYREELS, [9, 4, 4]), (HELIOS_PYRAMID, [9, 8])],
    ids=["skyreels", "pyramid"],
)
def test_other_pipelines_hand_on_the_frames_of_the_whole_video(
    family, frames, guidance, tmp_path
) -> None:
    family.build(0).save_pretrained(tmp_path / "model")
    call = {"height": family.height, "width": family.width, "num_frames": family.num_frames}
    call |= {"prompt": "a fox", "seed": 0, "guidance_scale": guidance}
    call |= {"pipeline_arg": dict(family.extra_kwargs)}
    if family is SKYREELS:
        call["num_inference_steps"] = 2
    (tmp_path / "prompts.txt").write_text("0.375 two dogs\n")
    chunks, later = [], []
    with DiffGenerator.from_pretrained(tmp_path / "model") as generator:
        whole = generator.generate(**call)
        made = generator.generate(**call, stream=True, on_chunk=chunks.append)
        prompts = {"prompts_file": tmp_path / "prompts.txt"}
        generator.generate(**call, **prompts, stream=True, on_chunk=later.append)
    assert [chunk.num_frames for chunk in chunks] == frames
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])
    assert made.record["produced"] == whole.record["produced"]
    assert [chunk.prompt for chunk in later] == ["a fox"] + ["two dogs"] * (len(frames) - 1)
    for n, (one, other) in enumerate(zip(chunks, later, strict=True)):
        assert np.array_equal(one.frames, other.frames) is (n < 1)


@pytest.mark.slow
@pytest.mark.parametrize("with_image", [False, True])
def test_a_long_video_is_made_in_calls_that_are_given_the_overlap(
    with_image, tmp_path, monkeypatch
) -> None:
    pipe = SKYREELS.build(0)
    call = {"height": 32, "width": 64, "num_frames": 24, "num_inference_steps": 2, "seed": 0}
    call |= {"prompt": "a fox", "guidance_scale": 2.0, "save_latents": True}
    call |= {"pipeline_arg": dict(SKYREELS.extra_kwargs)}
    if with_image:
        pipe = SkyReelsV2DiffusionForcingImageToVideoPipeline(**pipe.components)
        picture = np.random.default_rng(0).integers(0, 255, (32, 64, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / "picture.png")
        call["image_path"] = tmp_path / "picture.png"
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("0.9 two dogs\n")
    later, in_parts = {"prompts_file": tmp_path / "prompts.txt"}, []
    with DiffGenerator.from_pretrained(tmp_path / "model") as generator:
        whole = generator.generate(**call, output_path=tmp_path / "whole")
        once = generator.generate(**call, **later, stream=True, output_path=tmp_path / "a.mp4")
        monkeypatch.setattr(pipelines, "_CHUNKS_OF_A_CALL", 2)
        own, lengths = type(pipe).prepare_latents, []

        @functools.wraps(own)
        def prepare(self, *args, **kwargs):
            past = kwargs["video_latents"]
            lengths.append(0 if past is None else past.shape[2])
            return own(self, *args, **kwargs)

        monkeypatch.setattr(type(pipe), "prepare_latents", prepare)
        chunks = []
        made = generator.generate(
            **call, stream=True, on_chunk=chunks.append, output_path=tmp_path / "b.mp4"
        )
        other = generator.generate(
            **call, **later, stream=True, on_chunk=in_parts.append, output_path=tmp_path / "c.mp4"
        )
    assert lengths == [0, 2, 2, 2, 2] * 2
    assert [chunk.num_frames for chunk in chunks] == [9, 4, 4, 4, 4]
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])
    assert made.record["produced"] == whole.record["produced"]
    assert other.latents.shape[2] == 7
    assert torch.equal(other.latents, once.latents)
    assert not torch.equal(other.latents, made.latents)
    assert [chunk.prompt for chunk in in_parts] == ["a fox"] * 3 + ["two dogs"] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the image processor says that torchvision is missing
def test_sections_that_are_blended_give_the_frames_of_the_whole_video(tmp_path) -> None:
    FRAMEPACK.build(0).save_pretrained(tmp_path / "model")
    picture = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    call = {"height": 64, "width": 96, "num_frames": 20, "num_inference_steps": 1, "seed": 0}
    call |= {"prompt": "a fox", "image_path": tmp_path / "picture.png"}
    chunks, vanilla = [], {"pipeline_arg": dict(FRAMEPACK.extra_kwargs)}
    with DiffGenerator.from_pretrained(tmp_path / "model") as generator:
        whole = generator.generate(**call, **vanilla)
        generator.generate(**call, **vanilla, stream=True, on_chunk=chunks.append)
        with pytest.raises(UsageError, match="sampling_type=vanilla, got none: by default it"):
            generator.generate(**call, stream=True, on_chunk=chunks.append)
        (tmp_path / "prompts.txt").write_text("1 two dogs\n")
        with pytest.raises(UsageError, match="prompts_file must be left out with Hunyuan"):
            generator.generate(
                **call,
                **vanilla,
                stream=True,
                on_chunk=chunks.append,
                prompts_file=tmp_path / "prompts.txt",
            )
    assert [chunk.num_frames for chunk in chunks] == [12, 8, 8, 5]
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the image processor says that torchvision is missing
@pytest.mark.parametrize(("sections", "in_a_call"), [(3, 1), (5, 2), (14, 5)])
def test_sections_of_several_calls_give_the_frames_of_one(
    sections, in_a_call, tmp_path, monkeypatch
) -> None:
    FRAMEPACK.build(0).save_pretrained(tmp_path / "model")
    picture = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    call = {"height": 64, "width": 96, "num_frames": 5 * sections - 1, "num_inference_steps": 2}
    call |= {"prompt": "a fox", "image_path": tmp_path / "picture.png", "seed": 0}
    call |= {"pipeline_arg": dict(FRAMEPACK.extra_kwargs)}
    chunks = []
    with DiffGenerator.from_pretrained(tmp_path / "model") as generator:
        whole = generator.generate(**call)
        monkeypatch.setattr(pipelines, "_CHUNKS_OF_A_CALL", in_a_call)
        calls = counted_calls(HunyuanVideoFramepackPipeline, monkeypatch)
        made = generator.generate(**call, stream=True, on_chunk=chunks.append)
    assert len(calls) == -(-sections // in_a_call)
    assert sum(calls) == 5 * sections
    assert len(chunks) == sections
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])
    assert made.record["produced"] == whole.record["produced"]


@pytest.mark.slow
def test_parts_that_follow_an_image_give_the_frames_of_the_whole_video(tmp_path) -> None:
    parts = SKYREELS.build(0).components
    SkyReelsV2DiffusionForcingImageToVideoPipeline(**parts).save_pretrained(tmp_path / "model")
    picture = np.random.default_rng(0).integers(0, 255, (32, 64, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    call = {"height": 32, "width": 64, "num_frames": 17, "num_inference_steps": 1, "seed": 0}
    call |= {"prompt": "a fox", "image_path": tmp_path / "picture.png", "guidance_scale": 1.0}
    chunks = []
    with DiffGenerator.from_pretrained(tmp_path / "model") as generator:
        call["pipeline_arg"] = dict(SKYREELS.extra_kwargs)
        whole = generator.generate(**call)
        generator.generate(**call, stream=True, on_chunk=chunks.append)
        with pytest.raises(UsageError, match="last_image_path must be left out with stream"):
            generator.generate(
                **call,
                last_image_path=tmp_path / "picture.png",
                stream=True,
                on_chunk=chunks.append,
            )
    assert [chunk.num_frames for chunk in chunks] == [9, 4, 4]
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])


def test_a_step_cache_keeps_a_video_in_one_call() -> None:
    made = [ServerArgs(model_path="m", prompt="a", cache=x) for x in (None, "first_block")]
    assert [Streaming(args, lambda chunk: None).in_one_call for args in made] == [False, True]


def test_values_that_are_not_finite_are_counted() -> None:
    stream = Streaming(ServerArgs(model_path="m", prompt="a fox"), lambda chunk: None)
    frames = np.ones((2, 4, 4, 3))
    frames[0, 0, 0] = np.nan
    stream.hand_on(frames, 0)
    assert stream.produced()["non_finite_values"] == 3


def test_a_later_prompt_takes_over_with_the_chunk_that_begins_at_its_time(
    generator, whole, tmp_path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("# the second chunk begins at frame 9, of 24 a second\n\n0.375 two dogs\n")
    made, chunks = streamed(generator, prompts_file=file)
    assert [chunk.prompt for chunk in chunks] == ["a fox", "two dogs"]
    assert np.array_equal(chunks[0].frames, whole.pixels[0][:9])
    assert not np.allclose(chunks[1].frames, whole.pixels[0][9:], atol=1e-3)
    assert [part["prompt"] for part in made.record["stream"]["chunks"]] == ["a fox", "two dogs"]


@pytest.mark.slow
def test_a_prompt_of_a_later_time_does_not_take_over(generator, tmp_path, caplog) -> None:
    (tmp_path / "prompts.txt").write_text("0.376 two dogs\n")
    _, chunks = streamed(generator, prompts_file=tmp_path / "prompts.txt")
    assert [chunk.prompt for chunk in chunks] == ["a fox", "a fox"]
    assert "no chunk was made from the prompts of --prompts-file from 0.376 s on" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_model_that_encodes_its_past_anew_gives_the_frames_of_the_whole_video(
    guidance, tmp_path
) -> None:
    ANYFLOW_FAR.build(0).save_pretrained(tmp_path / "model")
    call = {"height": 32, "width": 64, "num_inference_steps": 1, "guidance_scale": guidance}
    call |= {"num_frames": 17, "pipeline_arg": {"chunk_partition": [1, 2, 1, 1]}, "seed": 0}
    (tmp_path / "prompts.txt").write_text("0.5 two dogs\n")
    with DiffGenerator.from_pretrained(tmp_path / "model") as generator:
        call |= {"prompt": "a fox", "backend": "diffusers"}
        whole = generator.generate(**call)
        chunks, later = [], []
        generator.generate(**call, stream=True, on_chunk=chunks.append)
        generator.generate(
            **call,
            stream=True,
            on_chunk=later.append,
            prompts_file=tmp_path / "prompts.txt",
        )
    assert [chunk.num_frames for chunk in chunks] == [1, 8, 4, 4]
    assert np.array_equal(np.concatenate([chunk.frames for chunk in chunks]), whole.pixels[0])
    assert [chunk.prompt for chunk in later] == ["a fox", "a fox", "two dogs", "two dogs"]
    for n, (one, other) in enumerate(zip(chunks, later, strict=True)):
        assert np.array_equal(one.frames, other.frames) is (n < 2)


def test_the_command_line_writes_a_video_and_says_how_fast(sglang, helios, tmp_path) -> None:
    found = sglang("generate", "--model-path", helios, *FLAGS, "--output-path", tmp_path / "a.mp4")
    assert found.code == 0, found.err
    assert "frames 1-9 after" in found.out
    assert "frames 10-17 after" in found.out
    assert "stream: first frames after" in found.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.mp4"]
    assert num_frames(tmp_path / "a.mp4") == 17
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["outputs"] == ["a.mp4"]
    stream = record["stream"]
    assert sum(part["num_frames"] for part in stream["chunks"]) == 17
    assert 0 < stream["time_to_first_frame_s"] <= stream["chunks"][-1]["seconds"]
    again = sglang("generate", "--model-path", helios, *FLAGS, "--output-path", tmp_path / "a.mp4")
    assert (again.code, "must not exist yet" in again.err) == (2, True)


def test_what_a_taker_of_chunks_raises_is_what_the_caller_gets(generator, tmp_path) -> None:
    def take(chunk) -> None:
        raise ValueError("the disk is full")

    call = {**HELIOS_CALL, "prompt": "a fox", "seed": 0, "stream": True}
    with pytest.raises(ValueError, match=r"^the disk is full$") as found:
        generator.generate(**call, on_chunk=take, output_path=tmp_path / "a.mp4")
    assert found.value.__cause__ is None
    assert num_frames(tmp_path / "a.mp4") == 9
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["interrupted"], record["outputs"]) == (True, ["a.mp4"])
    assert record["arguments"]["prompt"] == "a fox"


@pytest.mark.parametrize(("room", "left"), [(0, []), (1, ["a.json", "a.mp4"])])
def test_a_disk_that_fills_up_leaves_no_video_without_a_record(
    room: int, left: list[str], generator, tmp_path, monkeypatch
) -> None:
    """It is full when the first record, or the last one, is to be written."""
    call = {**HELIOS_CALL, "prompt": "a fox", "seed": 0, "stream": True}
    write, written = output.write_record, []

    def fill_up(record: dict[str, Any], path: Path) -> None:
        if len(written) == room:
            path.write_bytes(b"{")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        write(record, path)

    monkeypatch.setattr(output, "write_record", fill_up)
    with pytest.raises(UsageError, match=r"could not be .*No space left on device"):
        generator.generate(**call, output_path=tmp_path / "a.mp4")
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    if left:
        assert json.loads((tmp_path / "a.json").read_text())["interrupted"]


def test_a_video_without_a_byte_is_not_left(generator, tmp_path, monkeypatch) -> None:
    def takes_all(*_: object):
        while True:
            yield

    monkeypatch.setattr(output, "_encoder", takes_all)  # as ffmpeg does on a full disk
    call = {**HELIOS_CALL, "prompt": "a fox", "seed": 0, "stream": True}
    with pytest.raises(UsageError, match="check the space on the disk"):
        generator.generate(**call, output_path=tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_fails_prints_no_line_of_its_own(tmp_path, capfd) -> None:
    with pytest.raises(UsageError, match=r"video (must hold|could not be)"):
        output.write_video(torch.zeros(2, 16, 16, 3).numpy(), tmp_path / "none" / "a.mp4", 8)
    assert capfd.readouterr().err == ""


def test_ctrl_c_ends_the_video_with_what_is_done(sglang, helios, tmp_path, monkeypatch) -> None:
    def interrupt(chunk) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multimodal_gen.cli.generate._show", interrupt)
    flags = (*FLAGS, "--output-path", tmp_path / "a.mp4", "--save-latents")
    found = sglang("generate", "--model-path", helios, *flags)
    assert (found.code, "interrupted; the video ends" in found.err) == (130, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.mp4"]
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["interrupted"]
    assert record["produced"]["num_frames"] == num_frames(tmp_path / "a.mp4") == 9


@pytest.mark.slow
def test_an_interrupted_video_is_not_taken_for_done(sglang, helios, tmp_path, monkeypatch) -> None:
    test_ctrl_c_ends_the_video_with_what_is_done(sglang, helios, tmp_path, monkeypatch)
    monkeypatch.undo()
    flags = (*FLAGS, "--output-path", tmp_path / "a.mp4", "--resume", "--overwrite")
    found = sglang("generate", "--model-path", helios, *flags)
    assert (found.code, "done already" in found.out) == (0, False)
    assert num_frames(tmp_path / "a.mp4") == 17


def test_what_was_written_plays_while_the_video_grows_and_after_everything_was_killed(
    tmp_path, monkeypatch
) -> None:
    processes, started = [], subprocess.Popen

    def start(*args, **kwargs):
        processes.append(started(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr("imageio_ffmpeg._io.subprocess.Popen", start)
    path = tmp_path / "a.mp4"
    video = GrowingVideo(OutputTarget.plan(path, "video", stem="a"), fps=8)
    frames = np.random.default_rng(0).random((12, 32, 48, 3))
    for _ in range(3):
        video.write(frames)
    for _ in range(200):
        if path.stat().st_size and num_frames(path) >= 30:
            break
        time.sleep(0.02)
    assert num_frames(path) >= 30
    encoder = next(process for process in processes if "-frag_duration" in process.args)
    encoder.kill()
    encoder.wait()
    assert num_frames(path) >= 30
    with pytest.raises(UsageError, match="the video could not be encoded"):
        video.write(frames)
    for pipe in (encoder.stdin, encoder.stdout):
        with suppress(OSError):  # nobody is at its other end
            pipe.close()
    with suppress(UsageError):
        video.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of other threads, by fork
def test_a_killed_process_leaves_a_video_that_plays(
    helios, whole, pipeline_libraries, tmp_path
) -> None:
    """The process is a copy of this one, which has imported all it needs."""
    path = tmp_path / "a.mp4"
    flags = [str(x) for x in (*FLAGS, "--model-path", helios, "--output-path", path)]
    flags[flags.index("18")] = "900"
    process = os.fork()
    if not process:
        try:
            torch.set_num_threads(1)  # which the threads of this process, if any, are not
            main(["generate", *flags])
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and frames_so_far(path) < 18:
            time.sleep(0.1)
    finally:
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    left = decoded(path, 32, 64)
    assert 18 <= len(left) < 891
    # Two chunks of the video, but for what the codec loses.
    off = [np.abs(left[n] - whole.pixels[0][n]).mean() for n in range(17)]
    assert max(off) < 0.1 < np.abs(left[0] - whole.pixels[0][9]).mean(), off
    assert json.loads(path.with_suffix(".json").read_text())["interrupted"]


@pytest.mark.slow
def test_a_killed_command_leaves_a_video_that_plays(helios, tmp_path) -> None:
    command = [sys.executable, "-m", "multimodal_gen", "generate", "--model-path", str(helios)]
    flags = [*map(str, FLAGS), "--output-path", str(tmp_path / "a.mp4")]
    flags[flags.index("18")] = "900"
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        os.kill(process.pid, signal.SIGKILL)
    assert lines[2].startswith("frames ")
    for _ in range(100):  # the encoder ends by itself, once nobody gives it frames
        if num_frames(tmp_path / "a.mp4") >= 18:
            break
    assert num_frames(tmp_path / "a.mp4") >= 18


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts_file": "x.txt"}, "prompts_file needs stream"),
        ({"stream": True}, "stream needs output_path or on_chunk, got neither"),
        ({"on_chunk": print}, "on_chunk needs stream=True"),
        ({"stream": True, "on_chunk": 3}, "on_chunk must be a function that takes a chunk, got 3"),
        ({"stream": True, "on_chunk": print, "num_outputs": 2}, "num_outputs must be 1 with s"),
        (
            {"stream": True, "on_chunk": print, "prompts_file": "nowhere.txt"},
            "prompts_file must be a readable file",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, message, generator) -> None:
    with pytest.raises(UsageError, match=message):
        generator.generate(prompt="a fox", **HELIOS_CALL, **settings)


def test_prompts_may_follow_on_tabs_and_a_byte_order_mark(tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff1.5\ttwo dogs\r\n  3 \t a  cat \n".encode())
    assert stream.read_timed_prompts(file) == ((1.5, "two dogs"), (3.0, "a  cat"))
    file.write_bytes("\ufeff# x\n2\n".encode())
    with pytest.raises(ConfigError, match="line 2, must be a start in seconds above 0 and a pro"):
        stream.read_timed_prompts(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have prompts whose starts rise, got none"),
        ("2 a\n1 b\n", "must have prompts whose starts rise, got 2, 1"),
        ("0 a\n", "line 1, must be a start in seconds above 0 and a prompt"),
        ("# x\na fox\n", "line 2, must be a start in seconds above 0"),
        ("1.5\n", "line 1, must be a start in seconds above 0 and a prompt"),
    ],
)
def test_wrong_files_of_prompts_are_refused(text, message, generator, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text(text)
    with pytest.raises(UsageError, match=message):
        streamed(generator, prompts_file=tmp_path / "prompts.txt")


def test_pipelines_that_make_a_video_as_a_whole_are_refused(sglang, tiny_pipeline, tmp_path):
    flags = ("--prompt", "a fox", "--stream", "--output-path", tmp_path)
    found = sglang("generate", "--model-path", tiny_pipeline("wan"), *flags)
    assert found.code == 2
    assert "--stream must be left out for WanPipeline" in found.err
    assert ", ".join(pipelines.TAKEN) in found.err


def test_several_ranks_are_refused(generator, monkeypatch) -> None:
    groups = SimpleNamespace(mesh=Mesh(ulysses=2))
    monkeypatch.setattr("multimodal_gen.runtime.generator.stream.parallel_groups", lambda: groups)
    with pytest.raises(UsageError, match=r"stream must be left out on several ranks.* got 2 r"):
        streamed(generator)


def test_a_line_of_a_stream_has_a_row_of_its_own_beside_a_bar(capsys) -> None:
    from tqdm.auto import tqdm

    chunk = SimpleNamespace(first_frame=0, num_frames=9, seconds=3.0)
    with tqdm(total=2, file=sys.stderr) as bar:
        before = capsys.readouterr().err
        _show(chunk)
        shown = capsys.readouterr()
        assert before
        assert shown.out == "frames 1-9 after 3.0 s, 3.0 frames/s\n"
        assert shown.err.startswith("\r ")  # the bar is taken away, and drawn anew
        assert "0/2" in shown.err
        bar.close()
