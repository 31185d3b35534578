"""Search files: what a search found for one prompt in one branch of guidance.

A file `mask_search_<prompt>.json` is `{"L2_loss": {"[3, 1, 10]": [steps][layers][heads], ...},
"L1_loss": {...}}`. Files written here have one key more, "search", with what was searched. Those of
the positive branch lie in a folder `mask_search_result_pos_<width>x<height>`, those of the negative
one in `mask_search_result_neg_<width>x<height>`.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.config_fields import short
from multimodal_gen.runtime.layers.attention.sta.files import read_text, write_text
from multimodal_gen.runtime.layers.attention.sta.losses import NEGATIVE, POSITIVE, BranchLosses
from multimodal_gen.runtime.layers.attention.sta.windows import Window

__all__ = ["SearchFile", "branch_folder", "find_searches", "search_name"]

_FOLDERS: Mapping[str, str] = MappingProxyType(
    {POSITIVE: "mask_search_result_pos_", NEGATIVE: "mask_search_result_neg_"}
)
_STEM = "mask_search_"
_WHAT = "search file"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFile:
    """One search file.

    Attributes:
        losses: what was found.
        tiles: the grid of tiles.
        settings: what was searched, JSON data; empty for files of other programs.
        tile_size: tokens per tile, or None where nothing tells.
    """

    losses: BranchLosses
    tiles: Window
    settings: Mapping[str, Any]
    tile_size: Window | None = None

    @classmethod
    def read(cls, path: Path) -> "SearchFile":
        """Read a search file.

        Raises:
            ConfigError: it cannot be read or is malformed.
        """
        name = f"{_WHAT} {str(path)!r}"
        text = read_text(path, what=_WHAT)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} must be JSON, got {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{name} must be a JSON object, got {short(content)}")
        windows, l2 = _losses(content, "L2_loss", name)
        also, l1 = _losses(content, "L1_loss", name)
        if also != windows or l1.shape != l2.shape:
            raise ConfigError(f"{name} must have the same windows and sizes in L1_loss and L2_loss")
        settings = content.get("search", {})
        settings = settings if isinstance(settings, dict) else {}
        tiles, tile_size = settings.get("tiles"), settings.get("tile_size")
        return cls(
            losses=BranchLosses(windows=windows, l2=l2, l1=l1),
            tiles=_largest(windows) if tiles is None else _window(tiles, name),
            settings=settings,
            tile_size=None if tile_size is None else _window(tile_size, name),
        )

    def write(self, path: Path) -> None:
        """Write the file, all of it or nothing.

        Raises:
            ConfigError: the file cannot be written.
        """
        grid: dict[str, Any] = {"tiles": list(self.tiles)}
        if self.tile_size is not None:
            grid["tile_size"] = list(self.tile_size)
        content = {
            "search": {**self.settings, **grid},
            "L2_loss": _as_lists(self.losses.windows, self.losses.l2),
            "L1_loss": _as_lists(self.losses.windows, self.losses.l1),
        }
        write_text(path, json.dumps(content), what=_WHAT)


def search_name(prompt: str) -> str:
    """Return the name of a prompt's file: readable, and different for different prompts."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", prompt).strip("-")[:60]
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_STEM}{words}-{digest}.json"


def branch_folder(root: Path, branch: str, *, width: int | str, height: int | str) -> Path:
    """Return the folder for the search files of a branch.

    Args:
        root: folder of the whole search.
        branch: `POSITIVE` or `NEGATIVE`.
        width: of the output, in pixels.
        height: of the output, in pixels.
    """
    return root / f"{_FOLDERS[branch]}{width}x{height}"


def find_searches(folder: Path, branch: str = POSITIVE) -> tuple[Path, ...]:
    """Return the search files of a branch, in order of their names.

    Args:
        folder: where they lie, or the folder of the whole search.
        branch: which of its folders to take.

    Raises:
        ConfigError: there are none, or several sizes to choose from.
    """
    found = tuple(sorted(folder.glob(f"{_STEM}*.json")))
    if found:
        return found
    inside = sorted(path for path in folder.glob(f"{_FOLDERS[branch]}*") if path.is_dir())
    if len(inside) > 1:
        names = ", ".join(path.name for path in inside)
        raise ConfigError(
            f"the searches must be of one size of output, got {names} in {str(folder)!r}; name one "
            f"of them"
        )
    found = tuple(sorted(inside[0].glob(f"{_STEM}*.json"))) if inside else ()
    if not found:
        raise ConfigError(
            f"the searches must be a folder with files {_STEM}*.json, got {str(folder)!r}; "
            f"`sglang attention sta search` makes them"
        )
    return found


def _losses(content: Mapping[str, Any], key: str, name: str) -> tuple[tuple[Window, ...], Any]:
    by_window = content.get(key)
    if not isinstance(by_window, dict) or not by_window:
        raise ConfigError(
            f"{name} must have losses by window under {key!r}, got {short(by_window)}"
        )
    windows = tuple(_window(text, name) for text in by_window)
    if len(set(windows)) != len(windows):
        raise ConfigError(f"{name} must have every window once under {key!r}")
    try:
        losses = torch.tensor(list(by_window.values()), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        losses = torch.empty(0)
    if losses.ndim != 4 or not losses.numel():
        raise ConfigError(
            f"{name} must have numbers by step, layer and head for every window under {key!r}, of "
            f"the same sizes"
        )
    if not bool(((losses >= 0) & (losses < math.inf)).all()):
        raise ConfigError(f"{name} must have finite losses >= 0 under {key!r}")
    return windows, losses


def _window(value: object, name: str) -> Window:
    sizes = value
    if isinstance(value, str):
        sizes = [int(size) for size in re.findall(r"\d{1,6}", value)]
        sizes = sizes if value.replace(" ", "") == str(sizes).replace(" ", "") else None
    listed = sizes if isinstance(sizes, list) else []
    if len(listed) == 3 and all(type(size) is int and size >= 1 for size in listed):
        return (listed[0], listed[1], listed[2])
    raise ConfigError(f'{name} must have windows such as "[3, 1, 10]", got {short(value)}')


def _largest(windows: tuple[Window, ...]) -> Window:
    # Candidates of other programs span each axis at least once.
    sizes = [max(window[axis] for window in windows) for axis in range(3)]
    return (sizes[0], sizes[1], sizes[2])


def _as_lists(windows: tuple[Window, ...], losses: torch.Tensor) -> dict[str, Any]:
    return {str(list(w)): values for w, values in zip(windows, losses.tolist(), strict=True)}
