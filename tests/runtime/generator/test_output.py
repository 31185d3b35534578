"""."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.files import Staging
from multimodal_gen.runtime.generator import output
from multimodal_gen.runtime.generator.output import OutputTarget


def _plan(path, kind="image", **options) -> OutputTarget:
    return OutputTarget.plan(Path(path), kind, stem="a model/7", **options)


STEM = "a-model-7"


@pytest.mark.parametrize(
    ("path", "present", "count", "options", "names"),
    [
        ("fox.png", (), 1, {}, ("fox.png", "fox.json")),
        ("fox.PNG", (), 2, {}, ("fox_1.PNG", "fox_2.PNG", "fox.json")),
        ("fox.png", ("fox.png/",), 1, {}, (f"fox.png/{STEM}.png", f"fox.png/{STEM}.json")),
        ("out.d", (), 1, {"kind": "video"}, (f"out.d/{STEM}.mp4", f"out.d/{STEM}.json")),
        (".", (f"{STEM}.png",), 1, {}, (f"{STEM}-2.png", f"{STEM}-2.json")),
        (".", (f"{STEM}.json", f"{STEM}-2.png"), 1, {}, (f"{STEM}-3.png", f"{STEM}-3.json")),
        (".", (f"{STEM}.safetensors",), 1, {}, (f"{STEM}.png", f"{STEM}.json")),
        (
            ".",
            (f"{STEM}.safetensors",),
            1,
            {"latents": True},
            (f"{STEM}-2.png", f"{STEM}-2.json", f"{STEM}-2.safetensors"),
        ),
        (".", (f"{STEM}.png",), 1, {"overwrite": True}, (f"{STEM}.png", f"{STEM}.json")),
        (".", ("a link to nowhere",), 1, {}, (f"{STEM}-2.png", f"{STEM}-2.json")),
    ],
)
def test_files_have_the_names_of_the_path_or_free_ones_in_a_folder(
    path, present, count, options, names, tmp_path
) -> None:
    for name in present:
        if name == "a link to nowhere":
            (tmp_path / f"{STEM}.png").symlink_to(tmp_path / "nowhere")
        elif name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).touch()
    found = _plan(tmp_path / path, **options).names(count)
    assert [file.relative_to(tmp_path).as_posix() for file in found.all] == list(names)


@pytest.mark.parametrize("taken", ["fox_2.png", "fox.json"])
def test_a_file_whose_neighbours_exist_is_refused(tmp_path, taken: str) -> None:
    (tmp_path / taken).touch()
    target = _plan(tmp_path / "fox.png")
    with pytest.raises(UsageError, match=rf"must not exist yet, got .*with {taken} there; choose"):
        target.names(2)
    assert _plan(tmp_path / "fox.png", overwrite=True).names(2).taken == (tmp_path / taken,)


@pytest.mark.parametrize(
    ("name", "kind", "rule"),
    [
        ("fox.mp4", "image", r"\.png or be a folder, because this pipeline makes images"),
        ("fox.png", "video", r"\.mp4 or be a folder, because this pipeline makes a video"),
        ("fox.webm", "video", r"\.mp4"),
        ("fox.TIFF", "image", r"\.png or be a folder, .*, got"),
        ("fox.json", "image", r"\.png"),
    ],
)
def test_a_suffix_of_something_else_is_refused_and_makes_no_folder(
    tmp_path, name: str, kind, rule: str
) -> None:
    with pytest.raises(UsageError, match=f"must end in {rule}"):
        _plan(tmp_path / name, kind)
    assert not list(tmp_path.iterdir())


def test_a_folder_below_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"must lie in a folder, got .*file' is none"):
        _plan(tmp_path / "file" / "deeper")


def test_a_folder_below_a_link_to_nowhere_is_refused(tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for path in (tmp_path / "link", tmp_path / "link" / "fox.png"):
        with pytest.raises(UsageError, match=r"must lie in a folder, got .*link' is none"):
            OutputTarget.plan(path, "image", stem="fox")


@pytest.mark.parametrize(
    ("name", "way"), [("fox.png", "TemporaryFile"), ("new", "TemporaryDirectory")]
)
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path, monkeypatch, name: str, way: str
) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    monkeypatch.setattr(f"tempfile.{way}", refuse)
    rule = r"--output-path must be writable, got .*, which is not \(Permission denied\)$"
    with pytest.raises(UsageError, match=rule):
        _plan(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("path", ["/proc/fox.png", "/proc/new", "/proc/new/fox.png"])
def test_a_file_system_that_takes_no_files_is_refused_early(path: str) -> None:
    with pytest.raises(UsageError, match=r"--output-path must be writable, got '/proc.*, which"):
        _plan(path)


def test_planning_creates_nothing(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "fox.png", tmp_path / "new"):
        _plan(path).names()
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_a_folder_allows_can_be_written(tmp_path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - len(".json")
    (final,) = _plan(tmp_path / f"{'x' * longest}.png").names().media
    with Staging() as staging:
        staging.path(final).write_text("long")
    assert final.read_text() == "long"


def test_a_name_too_long_for_a_file_beside_the_media_is_refused(tmp_path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - len(".json")
    target = _plan(tmp_path / f"{'x' * longest}.png", latents=True)
    with pytest.raises(UsageError, match=r"file names of at most \d+ bytes, got 'x+\.safetensors'"):
        target.names()


def test_the_name_of_a_folder_is_refused_even_for_overwriting(tmp_path) -> None:
    (tmp_path / "fox.json").mkdir()
    target = _plan(tmp_path / "fox.png", overwrite=True)
    with pytest.raises(UsageError, match=r"must not need the name of a folder, got .*fox\.json"):
        target.names()


def _read(path, height: int, width: int) -> tuple[str, np.ndarray]:
    """Return what ffmpeg says of the stream, and its frames."""
    import imageio_ffmpeg

    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    command = [ffmpeg, "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    (stream,) = [line for line in done.stderr.decode().splitlines() if "Video: h264" in line]
    return stream, np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


def _gradient(frames: int, height: int, width: int) -> np.ndarray:
    ramp = np.linspace(0.1, 0.9, width)[None, None, :, None]
    fade = np.linspace(0.5, 1.0, frames)[:, None, None, None]
    return np.broadcast_to(ramp * fade, (frames, height, width, 3)).astype(np.float32)


def test_a_video_keeps_its_size_rate_and_pictures(tmp_path) -> None:
    frames = _gradient(5, 40, 56)  # neither is a multiple of 16
    assert output.write_video(frames, tmp_path / "a.mp4", 12) is None
    stream, read = _read(tmp_path / "a.mp4", 40, 56)
    assert "yuv420p" in stream
    assert " 56x40" in stream
    assert " 12 fps" in stream
    assert len(read) == 5
    assert np.abs(read / 255 - frames).mean() < 0.02


def test_an_odd_size_is_extended_and_said_so(tmp_path) -> None:
    frames = _gradient(2, 33, 47)
    note = output.write_video(frames, tmp_path / "a.mp4", 8)
    assert note is not None
    assert "frames of 47x33 were extended to 48x34" in note
    stream, read = _read(tmp_path / "a.mp4", 34, 48)
    assert " 48x34" in stream
    assert len(read) == 2
    assert np.abs(read[:, :33, :47] / 255 - frames).mean() < 0.02


def test_an_image_keeps_every_pixel(tmp_path) -> None:
    from PIL import Image

    levels = np.arange(256, dtype=np.float32).reshape(16, 16, 1) / 255
    output.write_image(np.repeat(levels, 3, axis=2), tmp_path / "a.png")
    output.write_image(levels, tmp_path / "grey.png")
    for name in ("a.png", "grey.png"):
        pixels = np.asarray(Image.open(tmp_path / name))
        assert np.array_equal(pixels.reshape(256, -1)[:, 0], np.arange(256))


def test_values_out_of_range_are_clipped() -> None:
    values = np.array([-0.5, 0.0, 0.5, 1.0, 7.0])
    assert output.to_uint8(values).tolist() == [0, 0, 128, 255, 255]


def test_values_that_are_no_numbers_are_warned_about(caplog) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.2])
    assert output.to_uint8(values).tolist() == [0, 255, 0, 51]
    assert "3 of 4 output values are not finite" in caplog.text


def test_latents_come_back_as_they_were(tmp_path) -> None:
    latents = torch.randn(2, 3, 4).transpose(0, 1)
    output.write_latents(latents, tmp_path / "a.safetensors")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["latents"], latents)


def test_a_missing_encoder_is_named_with_its_install_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingDependencyError, match=r"needs imageio-ffmpeg .*pip install 'multim"):
        output.require_encoder()


def test_an_interrupted_encoder_is_closed(tmp_path, monkeypatch) -> None:
    import imageio_ffmpeg

    closed = []

    def write_frames(*args, **kwargs):
        try:
            while True:
                yield
        finally:
            closed.append(True)

    def interrupted(array):
        raise KeyboardInterrupt

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", write_frames)
    monkeypatch.setattr(np, "ascontiguousarray", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output.write_video(_gradient(2, 4, 4), tmp_path / "a.mp4", 8)
    assert closed == [True]


def _encoder_that_leaves(content: bytes):
    def write_frames(path, *args, **kwargs):
        try:
            while True:
                yield
        finally:
            with open(path, "wb") as file:
                file.write(content)

    return write_frames


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_video_that_cannot_be_read_back_is_an_error(tmp_path, monkeypatch, content) -> None:
    import imageio_ffmpeg

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", _encoder_that_leaves(content))
    with pytest.raises(UsageError, match=r"must hold 2 frames, ffmpeg wrote 0 .*disk"):
        output.write_video(_gradient(2, 4, 4), tmp_path / "a.mp4", 8)


def test_a_video_that_lacks_frames_is_an_error(tmp_path) -> None:
    path = tmp_path / "a.mp4"
    output.write_video(_gradient(3, 16, 16), path, 8)
    with pytest.raises(UsageError, match=r"must hold 4 frames, ffmpeg wrote 3"):
        output._check_video(path, 4)
