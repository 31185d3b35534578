"""The search for windows: what is tried, how far it is from full attention, and its files.

Losses stay on the device as long as the search runs: reading them would make every layer wait.

A file `mask_search_<prompt>.json` is `{"L2_loss": {"[3, 1, 10]": [steps][layers][heads], ...},
"L1_loss": {...}}`. Files written here have one key more, "search", with what was searched. Those of
the positive branch of guidance lie in a folder `mask_search_result_pos_<width>x<height>`, those of
the negative one in `mask_search_result_neg_<width>x<height>`.

C candidates, T steps, N layers, H heads.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.files import save_text
from multimodal_gen.records import read_file
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    as_window,
    largest_of,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    Window,
    effective_window,
    tile_count,
)
from multimodal_gen.runtime.managers.forward_context import set_for_block
from multimodal_gen.runtime.managers.generation import current_generation
from multimodal_gen.settings import by_axis

# Sliding Tile Attention, arXiv 2502.04507: what its authors searched, by grid of tiles.
_PUBLISHED: Mapping[Window, tuple[Window, ...]] = MappingProxyType(
    {
        (5, 6, 10): ((5, 3, 3), (3, 3, 5), (1, 6, 10), (5, 6, 1), (5, 1, 10)),
        (3, 6, 10): ((3, 1, 10), (1, 5, 7), (3, 3, 3), (1, 6, 5), (1, 3, 10), (3, 6, 1)),
    }
)


def candidates(tiles: Window, asked: Sequence[Window] = ()) -> tuple[Window, ...]:
    """Return what the windows to try keep on a grid of `tiles`, each once, sparsest first.

    Heads look along few patterns: a small neighbourhood at all times, a larger one for a while,
    one moment in full, and one row or column at all times. Each is scaled to the grid; the
    windows published for a grid are added on it.

    Args:
        tiles: the grid.
        asked: what to try instead.

    Raises:
        UsageError: none is left, as full windows are none to try, or the grid is too small.
    """
    time, height, width = tiles
    patterns = (
        (time, _odd(height / 2), _odd(width / 3)),
        (_odd(time * 0.6), _odd(height / 2), _odd(width / 2)),
        (1, height, width),
        (time, height, 1),
        (time, 1, width),
    )
    windows = asked or (*_PUBLISHED.get(tiles, ()), *patterns)
    kept = {effective_window(window, tiles) for window in windows} - {tiles}
    if not kept:
        raise UsageError(
            f"a search must have a window smaller than the grid, which has {by_axis(tiles)} tiles; "
            f"use a smaller tile_size or a larger output"
        )
    return tuple(sorted(kept, key=lambda window: (tile_count(window, tiles), window)))


def _odd(size: float) -> int:
    """Return the largest odd number of at most `size`, at least 1."""
    return max(1, 2 * int((size - 1) // 2) + 1)


POSITIVE = "positive"
"""The branch of classifier-free guidance that follows the prompt."""
NEGATIVE = "negative"
"""The branch that follows the negative prompt."""


def head_losses(out: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return how far each head's output is from that of full attention.

    Args:
        out: output of a candidate, [B, S, H, D].
        full: output of full attention, [B, S, H, D].

    Returns:
        fp32 [2, H]: mean over B, S and D of the squared and of the absolute difference.
    """
    losses = []
    for head in range(out.shape[2]):  # one at a time: fp32 copies of everything are too large
        difference = out[:, :, head].float() - full[:, :, head].float()
        losses.append(torch.stack((difference.square().mean(), difference.abs().mean())))
    return torch.stack(losses, dim=1)


def branch_rows(branch: str | None, batch: int) -> dict[str, slice]:
    """Return which rows of a batch belong to which branch of guidance.

    Args:
        branch: "cond", "uncond", "both" (a batch of the negative half and the positive one), or
            None, which counts as "cond".
        batch: the number of rows.
    """
    if branch == "both":
        return {NEGATIVE: slice(batch // 2), POSITIVE: slice(batch // 2, batch)}
    return {NEGATIVE if branch == "uncond" else POSITIVE: slice(batch)}


SEARCH_STEM = "mask_search_"
"""How the names of search files begin."""

_WHAT = "search file"
_FOLDER = "mask_search_result_"  # with the first three letters of the branch behind it
_WINDOW = re.compile(r"\[([1-9]\d{0,5}),([1-9]\d{0,5}),([1-9]\d{0,5})\]", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFile:
    """What a search found for one prompt in one branch of guidance.

    Attributes:
        windows: the candidates.
        l2: fp64 [C, T, N, H], mean squared difference from full attention.
        l1: fp64 [C, T, N, H], mean absolute difference.
        tiles: the grid of tiles.
        settings: what was searched, JSON data; empty for files of other programs.
        tile_size: tokens per tile, or None where nothing tells.
    """

    windows: tuple[Window, ...]
    l2: torch.Tensor
    l1: torch.Tensor
    tiles: Window
    settings: Mapping[str, Any] = field(default_factory=dict)
    tile_size: Window | None = None

    @classmethod
    def read(cls, path: Path) -> "SearchFile":
        """Read a search file.

        Raises:
            ConfigError: it cannot be read or is malformed.
        """
        name = f"{_WHAT} {str(path)!r}"
        content = read_file(path, name)
        if not isinstance(content, dict):
            raise ConfigError(f"{name} must be a JSON object, got {short(content)}")
        windows, l2 = _losses(content, "L2_loss", name)
        also, l1 = _losses(content, "L1_loss", name)
        if also != windows or l1.shape != l2.shape:
            raise ConfigError(f"{name} must have the same windows and sizes in L1_loss and L2_loss")
        settings = content.get("search", {})
        settings = settings if isinstance(settings, dict) else {}
        for side in ("height", "width"):
            given = settings.get(side)
            if given is not None and not (type(given) is int and given >= 1):
                raise ConfigError(f"{name} must have pixels as search.{side}, got {short(given)}")
        tiles, tile_size = settings.get("tiles"), settings.get("tile_size")
        return cls(
            windows=windows,
            l2=l2,
            l1=l1,
            # Candidates of other programs span each axis at least once.
            tiles=largest_of(windows) if tiles is None else _window(tiles, name, "tiles"),
            settings=settings,
            tile_size=None if tile_size is None else _window(tile_size, name, "a tile_size"),
        )

    def write(self, path: Path) -> None:
        """Write the file, all of it or nothing.

        Raises:
            ConfigError: the file cannot be written.
        """
        settings = {**self.settings, "tiles": self.tiles, "tile_size": self.tile_size}
        names = [str(list(window)) for window in self.windows]
        content = {
            "search": settings,
            "L2_loss": dict(zip(names, self.l2.tolist(), strict=True)),
            "L1_loss": dict(zip(names, self.l1.tolist(), strict=True)),
        }
        save_text(path, json.dumps(content), what=_WHAT)


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


def _window(value: object, name: str, what: str = "windows") -> Window:
    listed = value
    if isinstance(value, str):
        match = _WINDOW.fullmatch(value.replace(" ", ""))
        listed = [int(size) for size in match.groups()] if match else None
    window = as_window(listed)
    if window is None:
        raise ConfigError(f'{name} must have {what} such as "[3, 1, 10]", got {short(value)}')
    return window


def search_name(prompt: str) -> str:
    """Return the name of a prompt's file: readable, and different for different prompts."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", prompt).strip("-")[:60]
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{SEARCH_STEM}{words}-{digest}.json"


def branch_folder(root: Path, branch: str, *, width: int | str, height: int | str) -> Path:
    """Return the folder for the search files of a branch.

    Args:
        root: folder of the whole search.
        branch: `POSITIVE` or `NEGATIVE`.
        width: of the output, in pixels.
        height: of the output, in pixels.
    """
    return root / f"{_FOLDER}{branch[:3]}_{width}x{height}"


def find_searches(folder: Path, branch: str = POSITIVE) -> tuple[Path, ...]:
    """Return the search files of a branch, in order of their names.

    Args:
        folder: where they lie, or the folder of the whole search.
        branch: which of its folders to take.

    Raises:
        ConfigError: there are none, or several sizes to choose from.
    """
    try:
        found = tuple(sorted(folder.glob(f"{SEARCH_STEM}*.json")))
        inside = sorted(path for path in folder.glob(f"{_FOLDER}{branch[:3]}_*") if path.is_dir())
    except OSError as error:  # a name that is too long, or a folder that cannot be read
        raise ConfigError(
            f"the searches must be a folder that can be read, got {str(folder)[:80]!r}: "
            f"{error.strerror}"
        ) from error
    if found:
        return found
    if len(inside) > 1:
        names = ", ".join(path.name for path in inside)
        raise ConfigError(
            f"the searches must be of one size of output, got {names} in {str(folder)!r}; name one "
            f"of them"
        )
    found = tuple(sorted(inside[0].glob(f"{SEARCH_STEM}*.json"))) if inside else ()
    if not found:
        raise ConfigError(
            f"the searches must be a folder with files {SEARCH_STEM}*.json, got {str(folder)!r}; "
            f"`sglang attention sta search` makes them"
        )
    return found


@dataclass(eq=False)
class LossRecorder:
    """Gathers the losses of one generation; several calls of a layer at a step are averaged.

    Attributes:
        asked: what to try; by default what suits the grid.
        folder: where the search files go when the last layer of the last step is done; None where
            they are made of `losses`.
        request: identifies the generation; names the files where the prompt is unknown. Those of a
            prompt that is generated again replace the older ones.
    """

    asked: Sequence[Window] = ()
    folder: Path | None = None
    request: str = ""
    _windows: tuple[Window, ...] = ()
    _tiles: Window | None = None
    # By branch, then by step and layer.
    _found: dict[str, dict[tuple[int, int], list[torch.Tensor]]] = field(default_factory=dict)

    def candidates(self, tiles: Window) -> tuple[Window, ...]:
        """Return the windows to try on a grid of `tiles`.

        Raises:
            UsageError: the grid changed, as it does between sizes of the output, or is too small.
        """
        if self._tiles is None:
            self._windows, self._tiles = candidates(tiles, self.asked), tiles
        elif tiles != self._tiles:
            raise UsageError(
                f"a search must keep to one grid, got {tiles} tiles after {self._tiles}; search "
                f"one size of output at a time"
            )
        return self._windows

    def add(self, losses: torch.Tensor, *, step: int, layer: int, branch: str) -> None:
        """Record the losses of one call.

        Args:
            losses: fp32 [C, 2, H], squared and absolute, of each of `candidates`.
            step: denoising step.
            layer: attention layer.
            branch: `POSITIVE` or `NEGATIVE`.
        """
        self._found.setdefault(branch, {}).setdefault((step, layer), []).append(losses)

    def losses(self) -> dict[str, SearchFile]:
        """Return what was found, by branch; waits for the device.

        Raises:
            UsageError: nothing was recorded, or a layer ran at some steps only.
        """
        if not self._found:
            raise UsageError(
                "a search must reach at least one attention layer with a latent grid, got none"
            )
        return {branch: self._stacked(branch) for branch in self._found}

    def _stacked(self, branch: str) -> SearchFile:
        found = self._found[branch]
        steps, layers = (1 + max(indices) for indices in zip(*found, strict=True))
        places = list(product(range(steps), range(layers)))
        absent = [place for place in places if place not in found]
        if absent:
            raise UsageError(
                f"a search must see every layer at every step, it saw {len(found)} of "
                f"{steps} steps x {layers} layers; first missing: step {absent[0][0]}, layer "
                f"{absent[0][1]}; nothing may skip layers or steps while it runs"
            )
        means = torch.stack([torch.stack(found[place]).mean(0) for place in places])
        by_place = means.double().cpu().view(steps, layers, *means.shape[1:])
        l2, l1 = by_place.permute(3, 2, 0, 1, 4)
        assert self._tiles is not None, "losses need a grid"
        return SearchFile(windows=self._windows, l2=l2, l1=l1, tiles=self._tiles)

    def finish(self, branch: str, num_steps: int | None, grid: Window, tile: Window) -> None:
        """Write the file of a branch once its last step has the losses of all layers.

        Args:
            branch: the branch that just recorded losses.
            num_steps: denoising steps, or None when unknown.
            grid: tokens along each axis.
            tile: tokens per tile along each axis.

        Raises:
            UsageError: the number of steps is unknown.
        """
        if self.folder is None:
            return
        if num_steps is None:
            raise UsageError(
                "STA_searching must run in a pipeline whose number of steps is known, got a model "
                "alone; pass num_steps to set_forward_context"
            )
        first, last = (self._calls(branch, step) for step in (0, num_steps - 1))
        if not 0 < len(first) == len(last):
            return
        settings: dict[str, Any] = {"grid": grid, "num_steps": num_steps}
        made, name = current_generation(), f"{SEARCH_STEM}{self.request}.json"
        size: tuple[int | str, int | str] = (grid[2], f"{grid[1]}-tokens")
        if made is not None:
            settings["prompt"] = made.prompt
            name, size = search_name(made.prompt), (made.width, made.height)
        found = replace(self._stacked(branch), settings=settings, tile_size=tile)
        found.write(branch_folder(self.folder, branch, width=size[0], height=size[1]) / name)
        # With as many calls as the first step has, no more will come; one step does not tell.
        if num_steps > 1 and sum(last) >= sum(first):
            del self._found[branch]
        if not self._found:
            self._tiles = None  # the next generation of that name may be of another size

    def _calls(self, branch: str, step: int) -> list[int]:
        """Return how often each layer was called at a step."""
        found = self._found.get(branch, {})
        return [len(losses) for (at, _), losses in found.items() if at == step]


_RECORDER: ContextVar[LossRecorder | None] = ContextVar("multimodal_gen_sta_recorder", default=None)


def record_into(recorder: LossRecorder) -> AbstractContextManager[None]:
    """Let searching layers called inside the `with` block record into `recorder`."""
    return set_for_block(_RECORDER, recorder)


def recorder_for(folder: str, request: str | None) -> LossRecorder:
    """Return the recorder of the running generation; all of its layers share it.

    Args:
        folder: where search files go, unless a recorder is in use that gathers the losses.
        request: identifies the generation.
    """
    return _RECORDER.get() or _shared(Path(folder).expanduser(), request or "unnamed")


# Per process on purpose: the layers of a model share nothing but their configuration. A recorder
# holds nothing when its search is complete; of those that never are, only the latest stay.
@lru_cache(maxsize=4)
def _shared(folder: Path, request: str) -> LossRecorder:
    return LossRecorder((), folder, request)
