"""The files of a comparison: written whole, found again by everything that they depend on.

    FOLDER/report.json, report.html
    FOLDER/clips/NAME-pP-sS-KEY.npy, .mp4 or .png    what was generated, and a small copy of it
    FOLDER/latents/KEY.npy                           latents of the reference along the steps
    FOLDER/records/KEY.json                          what a generation, a replay or a metric found

A record is written last, together with what belongs to it, so that where it is, all is there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.files import Staging, require_writable, sweep
from multimodal_gen.runtime.comparison.cost import Spent
from multimodal_gen.runtime.comparison.record import (
    LARGEST,
    FrameMetrics,
    Generation,
    read_record,
)
from multimodal_gen.runtime.generator import output
from multimodal_gen.settings import as_plain, option

_MARK = "compare-"
_PREVIEW_WIDTH = 480
_SAMPLES = 4096

_RecordT = TypeVar("_RecordT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGeneration:
    """A generation that finished.

    Attributes:
        generation: its record, without metrics.
        spent: what it took.
        attention: what its layers ran, a line per group.
        warm_up_seconds: of the backend, in the process that made it.
    """

    generation: Generation
    spent: Spent
    attention: tuple[str, ...]
    warm_up_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMetrics:
    """A clip against the reference's, and why some metrics are missing."""

    frames: FrameMetrics
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRepeat:
    """How long the reference took for a clip the second time."""

    seconds: float = option(ge=0, le=LARGEST)


class Store:
    """The folder of a comparison.

    Args:
        folder: where everything goes.
        depends: what all of it depends on, JSON data: the model, versions, settings.
        resume: take what is there already; otherwise the folder must be new or empty.

    Raises:
        UsageError: the folder has something in it, or cannot be made.
    """

    def __init__(self, folder: Path, depends: Mapping[str, Any], *, resume: bool) -> None:
        check_folder(folder, resume=resume)
        self.folder = folder
        self._depends = depends
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--output must be a folder that can be made, got {str(folder)!r} "
                f"({error.strerror})"
            ) from error
        for part in ("clips", "latents", "records"):
            sweep(folder / part, _MARK)

    def key(self, **depends: Any) -> str:
        """Return the key of what depends on `depends` and on what all depends on."""
        text = json.dumps({**self._depends, **depends}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def find(self, kind: type[_RecordT], key: str) -> _RecordT | None:
        """Return a record, or None where it is missing, half-written or lacks a whole file."""
        try:
            found = read_record(kind, self._record(key))
        except ConfigError:
            return None
        if isinstance(found, StoredGeneration):
            frames, preview = found.generation.frames_path, found.generation.preview_path
            if not (frames and self.has_array(frames)):
                return None
            copy = self.folder / (preview or "")
            if not (copy.is_file() and copy.stat().st_size):
                return None
        return found

    def write(
        self,
        key: str,
        record: Any,
        files: Mapping[str, Callable[[Path], object]] | None = None,
    ) -> None:
        """Write a record with the files that belong to it, all of them or none.

        Args:
            key: its key.
            record: the record.
            files: what writes each of the others, by its path in the folder.

        Raises:
            UsageError: they cannot be written.
        """
        try:
            with Staging(overwrite=True, mark=_MARK) as staging:
                for path, write in (files or {}).items():
                    write(staging.path(self.folder / path))
                output.write_record(as_plain(record), staging.path(self._record(key)))
        except OSError as error:
            left = ""
            if not error.errno:  # NumPy's tell nothing
                free = shutil.disk_usage(self.folder).free >> 20
                left = f"; the disk has {free} MiB of space left"
            raise UsageError(
                f"the comparison could not be written to {str(self.folder)!r}: {error}{left}"
            ) from error

    def has_array(self, path: str) -> bool:
        """Whether a file in the folder holds a whole array."""
        try:
            self.read_array(path)
        except (OSError, ValueError, EOFError):  # the last of an empty one
            return False
        return True

    def read_array(self, path: str) -> Any:
        """Return an array of a file in the folder, mapped into memory."""
        import numpy as np

        return np.load(self.folder / path, mmap_mode="r", allow_pickle=False)

    def _record(self, key: str) -> Path:
        return self.folder / "records" / f"{key}.json"


def check_folder(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that a comparison cannot be written to.

    Raises:
        UsageError: it is a file, cannot be written to, or has something in it and is not to be gone
            on with.
    """
    if os.path.exists(folder) and not folder.is_dir():
        raise UsageError(f"--output must be a folder, got {str(folder)!r}, which is a file")
    require_writable(folder, "--output")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"--output must be a new or empty folder, got {str(folder)!r}, which has files in it; "
            f"pass --resume to go on with it, or name another one"
        )


def clip_writers(
    stem: str, pixels: Any, fps: int
) -> tuple[str, str, dict[str, Callable[[Path], object]]]:
    """Return the paths of a clip's files, and what writes them.

    Args:
        stem: name without a suffix.
        pixels: floats in [0, 1], [T, H, W, C] of a video or [H, W, C] of an image.
        fps: frames per second.

    Returns:
        The path of the frames, that of the small copy, and the writers of both.
    """
    video = pixels.ndim == 4
    frames, preview = f"clips/{stem}.npy", f"clips/{stem}{'.mp4' if video else '.png'}"
    data = output.to_uint8(pixels)
    small = _smaller(data)

    def write_frames(path: Path) -> None:
        import numpy as np

        np.save(path, data if video else data[None], allow_pickle=False)

    def write_preview(path: Path) -> None:
        if video:
            output.write_video(small, path, fps)
        else:
            output.write_image(small, path)

    return frames, preview, {frames: write_frames, preview: write_preview}


def _smaller(data: Any) -> Any:
    """Return pixels as floats in [0, 1], rows and columns averaged in groups until they are few."""
    import numpy as np

    factor = -(-data.shape[-2] // _PREVIEW_WIDTH)
    height, width = (size // factor * factor for size in data.shape[-3:-1])
    shape = (*data.shape[:-3], height // factor, width // factor, data.shape[-1])
    total = np.zeros(shape, np.uint32)
    for row in range(factor):  # numpy's mean over two axes apart takes ten times as long
        for column in range(factor):
            total += data[..., row:height:factor, column:width:factor, :]
    return total / (255.0 * factor**2)


def weights_digest(pipe: Any) -> str:
    """Return what tells the weights of a loaded pipeline, and how it is configured, from others.

    Of every component that is its class and its configuration, but for where it came from, and of
    every parameter its shape and some of its values; of those that a library offloaded to where
    they cannot be read, the shape alone.
    """
    digest = hashlib.sha256()
    for name, component in sorted(pipe.components.items()):
        digest.update(f"{name} {type(component).__name__} {_configuration(component)}".encode())
        if not isinstance(component, torch.nn.Module):
            continue
        for key, value in component.state_dict().items():
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            if value.is_meta or not value.is_floating_point() or not value.numel():
                continue
            flat = value.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)].double().cpu()
            digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:24]


def _configuration(component: Any) -> str:
    """Return the configuration of a scheduler or a model as text, without names of folders."""
    config: Any = getattr(component, "config", None)
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping):
        return ""
    public = {name: value for name, value in given.items() if not name.startswith("_")}
    return json.dumps(public, sort_keys=True, default=str)
