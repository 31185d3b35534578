"""Writing a tiny pipeline to disk: all of it, or nothing."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from multimodal_gen.errors import MissingDependencyError, UsageError, nearest
from multimodal_gen.files import atomic_write
from multimodal_gen.testing.tiny_models.families import (
    COGVIDEOX,
    FLUX,
    FLUX2_KLEIN,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
    LTX,
    QWEN_IMAGE,
    WAN,
    WAN22,
)
from multimodal_gen.testing.tiny_models.family import TinyFamily
from multimodal_gen.testing.tiny_models.streaming import (
    ANYFLOW_FAR,
    FRAMEPACK,
    HELIOS,
    HELIOS_PYRAMID,
    SKYREELS,
)

FAMILIES: Final[Mapping[str, TinyFamily]] = MappingProxyType(
    {
        family.name: family
        for family in (
            WAN,
            WAN22,
            HUNYUAN_VIDEO,
            HUNYUAN_VIDEO_15,
            LTX,
            FLUX,
            FLUX2_KLEIN,
            QWEN_IMAGE,
            COGVIDEOX,
        )
    }
)
"""Families that make an image, or a video as a whole, by name."""

STREAMING_FAMILIES: Final[Mapping[str, TinyFamily]] = MappingProxyType(
    {family.name: family for family in (HELIOS, HELIOS_PYRAMID, ANYFLOW_FAR, SKYREELS, FRAMEPACK)}
)
"""Families that make a video chunk by chunk, by name."""

_SEED_LIMIT: Final = 2**31


def make_tiny_model(family: str, out: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Make a complete diffusers pipeline folder with tiny random weights.

    The folder has the real classes of its family, is under 20 MB, needs no download, and
    `DiffusionPipeline.from_pretrained` loads it. The same seed, torch and library versions give the
    same bytes.

    Args:
        family: A key of `FAMILIES` or `STREAMING_FAMILIES`.
        out: Folder to make; it must not exist, or be empty. Missing parents are made.
        seed: Seed of all weights, in [0, 2**31).

    Returns:
        The absolute path of the folder.

    Raises:
        UsageError: If the family is unknown, the seed is out of range, or `out` is in use.
        MissingDependencyError: If diffusers or transformers is missing or too old.
    """
    folder = check_request(family, out, seed=seed)
    pipeline = _build({**FAMILIES, **STREAMING_FAMILIES}[family], seed)
    _save(pipeline, folder)
    return folder


def check_request(family: str, out: str | os.PathLike[str], *, seed: int) -> Path:
    """Refuse what `make_tiny_model` would refuse, without importing torch.

    Args:
        family: A key of `FAMILIES` or `STREAMING_FAMILIES`.
        out: Folder to make.
        seed: Seed of all weights.

    Returns:
        The absolute path of the folder.

    Raises:
        UsageError: If the family is unknown, the seed is out of range, or `out` is in use.
    """
    known = (*FAMILIES, *STREAMING_FAMILIES)
    if family not in known:
        raise UsageError(
            f"family must be one of {', '.join(known)}, got {family!r}{nearest(family, known)}"
        )
    if not 0 <= seed < _SEED_LIMIT:
        raise UsageError(f"seed must be in [0, {_SEED_LIMIT}), got {seed}")
    folder = Path(out).resolve()
    _require_free(folder)
    return folder


def _require_free(folder: Path) -> None:
    if folder.is_dir():
        if any(folder.iterdir()):
            raise UsageError(
                f"out must be a new or empty folder, got {folder}, which has files in it; "
                "name another or empty it"
            )
        return
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"out must not be, or lie below, a file, got {folder}")
            return


def _build(family: TinyFamily, seed: int) -> Any:
    try:
        return family.build(seed)
    except ImportError as error:
        raise MissingDependencyError(
            f"a tiny {family.name} pipeline needs diffusers and transformers ({error}); "
            "install with: pip install 'multimodal_gen[video]'"
        ) from error


def _save(pipeline: Any, folder: Path) -> None:
    """Save all of it, or nothing."""
    with atomic_write(folder) as partial:
        pipeline.save_pretrained(partial)
        if folder.exists():
            folder.rmdir()  # fails, as it should, if something was put there meanwhile
