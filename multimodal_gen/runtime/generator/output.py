"""Where results go, and how they get there: complete, or not at all.

Every file is written under a temporary name in its folder and renamed at the end. Nothing is
replaced unless asked for: a file name must be free, in a folder the next free name is taken.
"""

import itertools
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from multimodal_gen.errors import UsageError

__all__ = ["Kind", "OutputNames", "OutputTarget", "Staging", "media_suffix"]

Kind = Literal["image", "video"]

# Suffixes that name a file rather than a folder; only .png and .mp4 are written.
_MEDIA = frozenset(
    {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".mp4", ".mov", ".mkv", ".avi", ".webm"}
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
    def taken(self) -> tuple[Path, ...]:
        """Those of the files that exist."""
        files = (*self.media, self.record, *([self.latents] if self.latents else []))
        return tuple(file for file in files if file.exists())


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTarget:
    """Where to write, settled before the pipeline is loaded.

    Attributes:
        path: the media file, or the folder to choose a name in.
        is_file: whether `path` is the file.
        stem: file name to start from in a folder, without a suffix.
        kind: what is written.
        overwrite: replace existing files.
        latents: whether latents are written too.
    """

    path: Path
    is_file: bool
    stem: str
    kind: Kind
    overwrite: bool = False
    latents: bool = False

    @classmethod
    def plan(
        cls, path: Path, kind: Kind, *, stem: str, overwrite: bool = False, latents: bool = False
    ) -> "OutputTarget":
        """Decide whether `path` is a file or a folder, and check that it can be written.

        Args:
            path: a path that ends like a media file is a file, anything else a folder.
            kind: what will be written.
            stem: what to call files in a folder; unusual characters become "-".
            overwrite: replace existing files.
            latents: whether latents are written too.

        Raises:
            UsageError: the suffix does not fit `kind`, or the folder cannot be written.
        """
        suffix = media_suffix(kind)
        is_file = not path.is_dir() and path.suffix.lower() in _MEDIA
        if is_file and path.suffix.lower() != suffix:
            raise UsageError(
                f"--output-path must end in {suffix} or be a folder, because this pipeline makes "
                f"{'a video' if kind == 'video' else 'images'}, got {str(path)!r}"
            )
        folder = path.parent if is_file else path
        _require_writable(folder)
        name = path.stem if is_file else re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")
        return cls(
            path=path, is_file=is_file, stem=name, kind=kind, overwrite=overwrite, latents=latents
        )

    def names(self, count: int = 1) -> OutputNames:
        """Return the names for `count` results as things stand on disk now.

        Raises:
            UsageError: the target is a file that exists, and `overwrite` is off.
        """
        if self.is_file:
            names = self._names(self.path.parent, self.stem, count)
            if names.taken and not self.overwrite:
                raise UsageError(
                    f"--output-path must not exist yet, got {str(self.path)!r} with "
                    f"{', '.join(file.name for file in names.taken)} there; choose another name, "
                    f"a folder, or pass --overwrite"
                )
            return names
        stems = itertools.chain([self.stem], (f"{self.stem}-{n}" for n in itertools.count(2)))
        candidates = (self._names(self.path, stem, count) for stem in stems)
        return next(names for names in candidates if self.overwrite or not names.taken)

    def _names(self, folder: Path, stem: str, count: int) -> OutputNames:
        suffix = media_suffix(self.kind)
        stems = [stem] if count == 1 else [f"{stem}_{n}" for n in range(1, count + 1)]
        return OutputNames(
            media=tuple(folder / f"{name}{suffix}" for name in stems),
            record=folder / f"{stem}.json",
            latents=folder / f"{stem}.safetensors" if self.latents else None,
        )


class Staging:
    """Files written under temporary names, renamed together when the `with` block succeeds.

    After any exception, Ctrl-C included, the temporary files are gone and no final name was
    touched.
    """

    def __init__(self) -> None:
        self._moves: list[tuple[Path, Path]] = []

    def path(self, final: Path) -> Path:
        """Return the temporary path to write for `final`; it has the same suffix."""
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{final.stem}.{uuid.uuid4().hex}.partial{final.suffix}")
        self._moves.append((temporary, final))
        return temporary

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                for temporary, final in self._moves:
                    temporary.replace(final)
        finally:
            for temporary, _ in self._moves:
                temporary.unlink(missing_ok=True)


def _require_writable(folder: Path) -> None:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise UsageError(
            f"--output-path must lie in a folder, got {str(folder)!r}, where {str(existing)!r} "
            f"is a file"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"--output-path must be writable, got {str(folder)!r}, which is not")
