import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.generator import media


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
    assert media.write_video(frames, tmp_path / "a.mp4", 12) is None
    stream, read = _read(tmp_path / "a.mp4", 40, 56)
    assert "yuv420p" in stream
    assert " 56x40" in stream
    assert " 12 fps" in stream
    assert len(read) == 5
    assert np.abs(read / 255 - frames).mean() < 0.02


def test_an_odd_size_is_extended_and_said_so(tmp_path) -> None:
    frames = _gradient(2, 33, 47)
    note = media.write_video(frames, tmp_path / "a.mp4", 8)
    assert note is not None
    assert "frames of 47x33 were extended to 48x34" in note
    stream, read = _read(tmp_path / "a.mp4", 34, 48)
    assert " 48x34" in stream
    assert len(read) == 2
    assert np.abs(read[:, :33, :47] / 255 - frames).mean() < 0.02


def test_an_image_keeps_every_pixel(tmp_path) -> None:
    from PIL import Image

    levels = np.arange(256, dtype=np.float32).reshape(16, 16, 1) / 255
    media.write_image(np.repeat(levels, 3, axis=2), tmp_path / "a.png")
    media.write_image(levels, tmp_path / "grey.png")
    for name in ("a.png", "grey.png"):
        pixels = np.asarray(Image.open(tmp_path / name))
        assert np.array_equal(pixels.reshape(256, -1)[:, 0], np.arange(256))


def test_values_out_of_range_are_clipped() -> None:
    values = np.array([-0.5, 0.0, 0.5, 1.0, 7.0])
    assert media.to_uint8(values).tolist() == [0, 0, 128, 255, 255]


def test_values_that_are_no_numbers_are_warned_about(caplog) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.2])
    assert media.to_uint8(values).tolist() == [0, 255, 0, 51]
    assert "3 of 4 output values are not finite" in caplog.text


def test_latents_come_back_as_they_were(tmp_path) -> None:
    latents = torch.randn(2, 3, 4).transpose(0, 1)
    media.write_latents(latents, tmp_path / "a.safetensors")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["latents"], latents)


def test_a_missing_encoder_is_named_with_its_install_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingDependencyError, match=r"needs imageio-ffmpeg .*pip install 'multim"):
        media.require_encoder()


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
        media.write_video(_gradient(2, 4, 4), tmp_path / "a.mp4", 8)
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
        media.write_video(_gradient(2, 4, 4), tmp_path / "a.mp4", 8)


def test_a_video_that_lacks_frames_is_an_error(tmp_path) -> None:
    path = tmp_path / "a.mp4"
    media.write_video(_gradient(3, 16, 16), path, 8)
    with pytest.raises(UsageError, match=r"must hold 4 frames, ffmpeg wrote 3"):
        media._check_video(path, 4)
