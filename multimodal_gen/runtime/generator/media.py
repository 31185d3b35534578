"""Encoding results: PNG images, H.264 videos, latents."""

import logging
from pathlib import Path
from typing import Any

from multimodal_gen.errors import MissingDependencyError, UsageError

__all__ = ["require_encoder", "to_uint8", "write_image", "write_latents", "write_video"]

logger = logging.getLogger(__name__)

_INSTALL = "install with: pip install 'multimodal_gen[video]'"


def require_encoder() -> None:
    """Check that videos can be written, before minutes are spent on making one.

    Raises:
        MissingDependencyError: imageio-ffmpeg or its ffmpeg is missing.
    """
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"writing an MP4 needs imageio-ffmpeg ({error}); {_INSTALL}"
        ) from error


def to_uint8(values: Any) -> Any:
    """Return pixels in [0, 1] as bytes, rounded; what is not a number becomes 0, with a warning.

    Args:
        values: float array of any shape.
    """
    import numpy as np

    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        logger.warning(
            "%d of %d output values are not finite and become black; try --dtype bfloat16 or "
            "float32, or another attention backend",
            bad,
            values.size,
        )
        values = np.nan_to_num(values, nan=0.0, posinf=1.0, neginf=0.0)
    return (values.clip(0.0, 1.0) * 255.0).round().astype("uint8")


def write_image(pixels: Any, path: Path) -> None:
    """Write a PNG.

    Args:
        pixels: float [H, W, C] in [0, 1], C 1, 3 or 4.
        path: file to write.
    """
    from PIL import Image

    data = to_uint8(pixels)
    Image.fromarray(data[..., 0] if data.shape[-1] == 1 else data).save(path)


def write_video(frames: Any, path: Path, fps: int) -> str | None:
    """Write an MP4 with H.264 in 4:2:0, which every player knows.

    Args:
        frames: float [T, H, W, 3] in [0, 1].
        path: file to write.
        fps: frames per second.

    Returns:
        A sentence when a row or column was added: 4:2:0 needs even sizes. Nothing is cropped.

    Raises:
        UsageError: ffmpeg did not write every frame, e.g. because the disk is full.
    """
    import imageio_ffmpeg
    import numpy as np

    data = to_uint8(frames)
    height, width = data.shape[1:3]
    note = None
    if height % 2 or width % 2:
        data = np.pad(data, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        note = (
            f"H.264 needs even sizes: {path.suffix} frames of {width}x{height} were extended to "
            f"{data.shape[2]}x{data.shape[1]} by repeating the last row or column"
        )
    size = (data.shape[2], data.shape[1])
    # A macro block size of 1 keeps ffmpeg from rescaling to a multiple of 16.
    writer = imageio_ffmpeg.write_frames(
        str(path), size, fps=fps, codec="libx264", quality=8, macro_block_size=1
    )
    try:
        writer.send(None)
        for frame in data:
            writer.send(np.ascontiguousarray(frame))
    except OSError as error:
        raise UsageError(f"the video could not be encoded: {error}") from error
    finally:
        writer.close()
    _check_video(path, len(data))
    return note


def _check_video(path: Path, num_frames: int) -> None:
    """Read the video back: the writer hides what ffmpeg exits with."""
    import imageio_ffmpeg

    try:
        found, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    except (OSError, RuntimeError, ValueError):
        found = 0
    if found != num_frames:
        raise UsageError(
            f"the video must hold {num_frames} frames, ffmpeg wrote {found} that can be read; "
            f"check the space on the disk and the installed ffmpeg"
        )


def write_latents(latents: Any, path: Path) -> None:
    """Write the tensor `latents` to a safetensors file, under the key "latents"."""
    from safetensors.torch import save

    # Through Python's own open: safetensors' `save_file` makes files only their owner can read.
    path.write_bytes(save({"latents": latents.detach().cpu().contiguous()}))
