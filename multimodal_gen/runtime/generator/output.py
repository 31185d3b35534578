"""Where results go and how they are encoded: PNG, H.264, latents; complete, or not at all.

Every file is written under a temporary name in its folder and renamed at the end, all of them or
none. Nothing is replaced unless asked for, not even what appeared meanwhile: a file name must be
free, in a folder the next free name is taken. A video that is streamed is the exception: it has its
name from the first frames on, and is a whole video whenever writing ends.
"""

import importlib.metadata
import itertools
import json
import logging
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.files import atomic_write, is_taken, nearest_existing, require_writable
from multimodal_gen.runtime.generator.progress import each_frame
from multimodal_gen.runtime.layers.attention.report import Json

Kind = Literal["image", "video"]
logger = logging.getLogger(__name__)
_DISTRIBUTIONS = ("torch", "diffusers", "transformers", "accelerate", "triton")

# Suffixes that name a file rather than a folder; only .png and .mp4 are written.
_FILES = frozenset(
    {
        *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic"),
        *(".mp4", ".mov", ".mkv", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv"),
        *(".json", ".txt", ".safetensors", ".pt", ".npy", ".zip"),
    }
)


def media_suffix(kind: Kind) -> str:
    """Return the file type of a kind of result."""
    return ".mp4" if kind == "video" else ".png"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputNames:
    """The files of one generation.

    Attributes:
        media: one file per image or video.
        record: the JSON file with arguments, timings and the attention report.
        latents: the file with the last latents, or None.
    """

    media: tuple[Path, ...]
    record: Path
    latents: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file."""
        return (*self.media, self.record, *([self.latents] if self.latents else []))

    @property
    def taken(self) -> tuple[Path, ...]:
        """Those of the files that exist, links to nowhere among them."""
        return tuple(file for file in self.all if os.path.lexists(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTarget:
    """Where to write, settled before the pipeline is loaded.

    Attributes:
        path: the media file, or the folder to choose a name in.
        is_file: whether `path` is the file.
        folder: the folder that files are written to.
        stem: file name to start from, without a suffix.
        suffix: of the media.
        overwrite: replace existing files.
        latents: whether latents are written too.
    """

    path: Path
    is_file: bool
    folder: Path
    stem: str
    suffix: str
    overwrite: bool = False
    latents: bool = False

    @classmethod
    def plan(
        cls, path: Path, kind: Kind, *, stem: str, overwrite: bool = False, latents: bool = False
    ) -> "OutputTarget":
        """Decide whether `path` is a file or a folder, and check that it can be written.

        Args:
            path: a path that ends like a usual type of file is a file, anything else a folder.
            kind: what will be written.
            stem: what to call files in a folder; unusual characters become "-".
            overwrite: replace existing files.
            latents: whether latents are written too.

        Raises:
            UsageError: the suffix does not fit `kind`, or the folder cannot be written.
        """
        suffix = media_suffix(kind)
        is_taken(path)  # raises for a name that no file can have
        is_file = not path.is_dir() and path.suffix.lower() in _FILES
        if is_file and path.suffix.lower() != suffix:
            raise UsageError(
                f"--output-path must end in {suffix} or be a folder, because this pipeline makes "
                f"{'a video' if kind == 'video' else 'images'}, got {str(path)!r}"
            )
        folder = path.parent if is_file else path
        require_writable(folder)
        return cls(
            path=path,
            is_file=is_file,
            folder=folder,
            stem=path.stem if is_file else re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-."),
            # A file is called what the user called it, .PNG included.
            suffix=path.suffix if is_file else suffix,
            overwrite=overwrite,
            latents=latents,
        )

    def names(self, count: int = 1) -> OutputNames:
        """Return the names for `count` results as things stand on disk now.

        Raises:
            UsageError: the target is a file that exists, and `overwrite` is off; a name is longer
                than the file system allows, or is that of a folder.
        """
        stems = itertools.chain([self.stem], (f"{self.stem}-{n}" for n in itertools.count(2)))
        found = (self._names(stem, count) for stem in stems)
        names = next(each for each in found if self.is_file or self.overwrite or not each.taken)
        if names.taken and not self.overwrite:
            raise UsageError(
                f"--output-path must not exist yet, got {str(self.path)!r} with "
                f"{', '.join(file.name for file in names.taken)} there; choose another name, "
                f"a folder, or pass --overwrite"
            )
        _require_short(names)
        folders = [file for file in names.all if file.is_dir()]
        if folders:
            raise UsageError(f"--output-path must not need the name of a folder, got {folders[0]}")
        return names

    def _names(self, stem: str, count: int) -> OutputNames:
        stems = [stem] if count == 1 else [f"{stem}_{n}" for n in range(1, count + 1)]
        return OutputNames(
            media=tuple(self.folder / f"{name}{self.suffix}" for name in stems),
            record=self.folder / f"{stem}.json",
            latents=self.folder / f"{stem}.safetensors" if self.latents else None,
        )


def require_encoder(task: str = "writing an MP4", extra: str = "video") -> str:
    """Return the path of the ffmpeg that imageio-ffmpeg brings, before minutes are spent.

    Args:
        task: what needs it, for messages.
        extra: of this package, that has it.

    Raises:
        MissingDependencyError: imageio-ffmpeg or its ffmpeg is missing.
    """
    try:
        import imageio_ffmpeg

        found: str = imageio_ffmpeg.get_ffmpeg_exe()
        return found
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"{task} needs imageio-ffmpeg ({error}); install with: "
            f"pip install 'multimodal_gen[{extra}]'"
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
    import numpy as np

    data, note = _even(to_uint8(frames), path)
    writer = _encoder(path, data, fps)
    try:
        writer.send(None)
        for frame in each_frame(data, len(data)):
            writer.send(np.ascontiguousarray(frame))
    except OSError as error:
        raise UsageError(f"the video could not be encoded: {error}") from error
    finally:
        writer.close()
    _check_video(path, len(data))
    return note


def _encoder(path: Path, data: Any, fps: int, *options: str) -> Any:
    """Return what takes frames of the size of `data`, [T, H, W, 3], once it was sent None."""
    import imageio_ffmpeg

    height, width = data.shape[1:3]
    # A macro block size of 1 keeps ffmpeg from rescaling to a multiple of 16.
    return imageio_ffmpeg.write_frames(
        str(path.absolute()),  # a name in front may start with a dash, as an option does
        (width, height),
        fps=fps,
        codec="libx264",
        quality=8,
        macro_block_size=1,
        ffmpeg_log_level="quiet",  # what is wrong is told where the video is read back
        output_params=list(options),
    )


def _even(data: Any, path: Path) -> tuple[Any, str | None]:
    """Return frames of even sizes, extended by their last row or column, and a sentence on it."""
    import numpy as np

    height, width = data.shape[1:3]
    if height % 2 == 0 and width % 2 == 0:
        return data, None
    extended = np.pad(data, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return extended, (
        f"H.264 needs even sizes: {path.suffix} frames of {width}x{height} were extended to "
        f"{width + width % 2}x{height + height % 2} by repeating the last row or column"
    )


class GrowingVideo:
    """An MP4 in fragments, which plays while it is written, and wherever writing ends.

    It gets its name with the first frames: the target's, or a free one in its folder. So that it is
    never without a record, one that says it was interrupted is there until it is done.

    Args:
        target: where to write.
        fps: frames per second.
        record: what that says besides.

    Attributes:
        names: the files of the generation, once frames were written.
        note: see `write_video`.
        num_frames: frames that were written.
    """

    def __init__(
        self, target: OutputTarget, fps: int, record: Mapping[str, Json] = MappingProxyType({})
    ) -> None:
        self.names: OutputNames | None = None
        self.note: str | None = None
        self._target, self._fps, self._record = target, fps, record
        self.num_frames = 0
        self._writer: Any = None

    def write(self, frames: Any) -> None:
        """Add frames, float [T, H, W, 3] in [0, 1].

        Raises:
            UsageError: the name was taken meanwhile, or ffmpeg takes no frames.
        """
        import numpy as np

        try:
            if self.names is None:
                self.names = self._claimed()
            path = self.names.media[0]
            data, self.note = _even(to_uint8(frames), path)
            if self._writer is None:
                self._open(data, path)
            for frame in data:
                self._writer.send(np.ascontiguousarray(frame))
                self.num_frames += 1
        except OSError as error:
            raise UsageError(f"the video could not be encoded: {error}") from error

    def close(self) -> None:
        """End the video; one without a byte is removed, with its record.

        Raises:
            UsageError: it has not every frame, e.g. because the disk is full.
        """
        if self.names is None:
            return
        path, writer, self._writer = self.names.media[0], self._writer, None
        if writer is not None:
            writer.close()
        if path.exists() and not path.stat().st_size:
            path.unlink()
            self.names.record.unlink(missing_ok=True)
        if writer is not None:
            _check_video(path, self.num_frames)

    def _open(self, data: Any, path: Path) -> None:
        # The encoder looks at no frame ahead, and a fragment is written out every quarter second.
        growing = ["-tune", "zerolatency", "-g", str(2 * self._fps)]
        growing += ["-movflags", "+empty_moov+default_base_moof", "-frag_duration", "250000"]
        self._writer = _encoder(path, data, self._fps, *growing, "-flush_packets", "1")
        self._writer.send(None)

    def _claimed(self) -> OutputNames:
        """Return names that are this video's alone, the file itself made and empty."""
        while True:
            names = self._target.names()
            names.media[0].parent.mkdir(parents=True, exist_ok=True)
            if self._target.overwrite:  # replaced, not written through where it is a link
                names.media[0].unlink(missing_ok=True)
            try:
                os.close(os.open(names.media[0], os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o666))
            except FileExistsError:
                if self._target.is_file:
                    raise
                continue  # another run took the name in the folder meanwhile
            record = {**self._record, "outputs": [names.media[0].name], "interrupted": True}
            try:
                with atomic_write(names.record) as partial:
                    write_record(record, partial)
            except BaseException:
                names.media[0].unlink()
                raise
            return names


def write_latents(latents: Any, path: Path) -> None:
    """Write the tensor `latents` to a safetensors file, under the key "latents"."""
    from safetensors.torch import save

    # Through Python's own open: safetensors' `save_file` makes files only their owner can read.
    path.write_bytes(save({"latents": latents.detach().cpu().contiguous()}))


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as indented JSON."""
    path.write_text(
        json.dumps(record, indent=2, ensure_ascii=True, allow_nan=False) + "\n", "utf-8"
    )


def versions(device: torch.device) -> dict[str, Json]:
    """Return versions of Python and the libraries, and the device's name."""
    found: dict[str, Json] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # The module knows the local build, e.g. 2.13.0+cu130, which the metadata may leave out.
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    found["device"] = _device_name(device)
    return found


def require_own_files(
    targets: Sequence[OutputTarget], attention_records: Sequence[Path | str | None]
) -> None:
    """Refuse generations of one run that would write the same file.

    Args:
        targets: where each generation is to be written.
        attention_records: the file that each writes for its attention, or None.

    Raises:
        UsageError: names the file.
    """
    twice = _named_twice([target.path for target in targets if target.is_file])
    if twice is not None:
        raise UsageError(
            f"--output-path must be a folder where several generations go to it, got {twice}"
        )
    records = [Path(file).expanduser() for file in attention_records if file is not None]
    twice = _named_twice(records)
    if twice is not None:
        raise UsageError(
            f"--record-attention must be another file for each of several generations, got "
            f"{twice}; give it in the lines of --prompt-file"
        )


def _named_twice(files: Sequence[Path]) -> Path | None:
    """Return the first of several files that is there twice, as an absolute path."""
    files = [file.parent.resolve() / file.name for file in files]
    return next((file for file in files if files.count(file) > 1), None)


def _require_short(names: OutputNames) -> None:
    folder = nearest_existing(names.record.parent)
    limit = os.pathconf(folder, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    longest = max((file.name for file in names.all), key=lambda name: len(os.fsencode(name)))
    if len(os.fsencode(longest)) > limit:
        raise UsageError(
            f"--output-path must give file names of at most {limit} bytes, got {longest!r} with "
            f"{len(os.fsencode(longest))}"
        )


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


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
