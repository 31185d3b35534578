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
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    parse_json,
    read_text,
    write_text,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    Window,
    effective_window,
    tile_count,
)
from multimodal_gen.runtime.managers.generation import Generation, current_generation
from multimodal_gen.runtime.plain_values import short

__all__ = [
    "NEGATIVE",
    "POSITIVE",
    "SEARCH_STEM",
    "BranchLosses",
    "LossRecorder",
    "SearchFile",
    "SearchSession",
    "branch_folder",
    "branch_parts",
    "current_recorder",
    "default_candidates",
    "distinct_candidates",
    "find_searches",
    "head_losses",
    "record_into",
    "search_name",
    "session_for",
]

# Sliding Tile Attention, arXiv 2502.04507: what its authors searched, by grid of tiles.
_PUBLISHED: Mapping[Window, tuple[Window, ...]] = MappingProxyType(
    {
        (5, 6, 10): ((5, 3, 3), (3, 3, 5), (1, 6, 10), (5, 6, 1), (5, 1, 10)),
        (3, 6, 10): ((3, 1, 10), (1, 5, 7), (3, 3, 3), (1, 6, 5), (1, 3, 10), (3, 6, 1)),
    }
)


def default_candidates(tiles: Window) -> tuple[Window, ...]:
    """Return the windows to try on a grid of `tiles`, sparsest first.

    Heads look along few patterns: a small neighbourhood at all times, a larger one for a while,
    one moment in full, and one row or column at all times. Each is scaled to the grid; the
    windows published for a grid are added on it.

    Raises:
        UsageError: the grid is too small for a window that leaves something out.
    """
    time, height, width = tiles
    patterns = (
        (time, _odd(height / 2), _odd(width / 3)),
        (_odd(time * 0.6), _odd(height / 2), _odd(width / 2)),
        (1, height, width),
        (time, height, 1),
        (time, 1, width),
    )
    return distinct_candidates((*_PUBLISHED.get(tiles, ()), *patterns), tiles)


def distinct_candidates(windows: Iterable[Window], tiles: Window) -> tuple[Window, ...]:
    """Return what windows keep on a grid of `tiles`, each once, sparsest first.

    Raises:
        UsageError: none is left; full windows are none to try.
    """
    kept = {effective_window(window, tiles) for window in windows} - {tiles}
    if not kept:
        raise UsageError(
            f"a search must have a window smaller than the grid, which has "
            f"{'x'.join(map(str, tiles))} tiles; use a smaller tile_size or a larger output"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchLosses:
    """What a search found for one prompt in one branch.

    Attributes:
        windows: the candidates.
        l2: fp64 [C, T, N, H], mean squared difference from full attention.
        l1: fp64 [C, T, N, H], mean absolute difference.
    """

    windows: tuple[Window, ...]
    l2: torch.Tensor
    l1: torch.Tensor


class LossRecorder:
    """Gathers the losses of one generation; several calls of a layer at a step are averaged.

    Args:
        windows: what to try; by default what suits the grid.
    """

    def __init__(self, windows: Sequence[Window] = ()) -> None:
        self._asked = tuple(windows)
        self._windows: tuple[Window, ...] = ()
        self._tiles: Window | None = None
        self._found: dict[str, dict[tuple[int, int], list[torch.Tensor]]] = {}

    @property
    def tiles(self) -> Window | None:
        """The grid of tiles, once a layer asked for its candidates."""
        return self._tiles

    def candidates(self, tiles: Window) -> tuple[Window, ...]:
        """Return the windows to try on a grid of `tiles`.

        Raises:
            UsageError: the grid changed, as it does between sizes of the output, or is too small.
        """
        if self._tiles is None:
            asked = self._asked
            self._windows = (
                distinct_candidates(asked, tiles) if asked else default_candidates(tiles)
            )
            self._tiles = tiles
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

    def complete(self, branch: str, num_steps: int) -> bool:
        """Whether the last step has the losses of as many layers as the first one."""
        found = self._found.get(branch, {})
        of_step = [sum(step == wanted for step, _ in found) for wanted in (0, num_steps - 1)]
        return of_step[0] == of_step[1] > 0

    def ended(self, branch: str, num_steps: int) -> bool:
        """Whether the last step also has as many calls as the first one: no more will come.

        Unknown in a run of one step, where the answer is no.
        """
        found = self._found.get(branch, {})
        calls = [
            sum(len(losses) for (step, _), losses in found.items() if step == wanted)
            for wanted in (0, num_steps - 1)
        ]
        return num_steps > 1 and calls[1] >= calls[0]

    def discard(self, branch: str) -> None:
        """Forget the losses of a branch."""
        self._found.pop(branch, None)

    @property
    def is_empty(self) -> bool:
        """Whether no losses are held."""
        return not self._found

    def losses(self) -> dict[str, BranchLosses]:
        """Return what was found, by branch; waits for the device.

        Raises:
            UsageError: nothing was recorded, or a layer ran at some steps only.
        """
        if not self._found:
            raise UsageError(
                "a search must reach at least one attention layer with a latent grid, got none"
            )
        return {branch: self._stacked(branch) for branch in self._found}

    def _stacked(self, branch: str) -> BranchLosses:
        found = self._found[branch]
        steps, layers = (1 + max(key[axis] for key in found) for axis in (0, 1))
        absent = [
            (step, layer)
            for step in range(steps)
            for layer in range(layers)
            if (step, layer) not in found
        ]
        if absent:
            raise UsageError(
                f"a search must see every layer at every step, it saw {len(found)} of "
                f"{steps} steps x {layers} layers; first missing: step {absent[0][0]}, layer "
                f"{absent[0][1]}; nothing may skip layers or steps while it runs"
            )
        means = [torch.stack(found[key]).mean(0) for key in sorted(found)]
        stacked = torch.stack(means).double().cpu()  # [T * N, C, 2, H]
        both = stacked.view(steps, layers, *stacked.shape[1:]).permute(3, 2, 0, 1, 4)
        return BranchLosses(windows=self._windows, l2=both[0], l1=both[1])


_RECORDER: ContextVar[LossRecorder | None] = ContextVar("multimodal_gen_sta_recorder", default=None)


@contextmanager
def record_into(recorder: LossRecorder) -> Iterator[None]:
    """Let searching layers called inside the `with` block record into `recorder`."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def current_recorder() -> LossRecorder | None:
    """Return the recorder in use, or None."""
    return _RECORDER.get()


_FOLDERS: Mapping[str, str] = MappingProxyType(
    {POSITIVE: "mask_search_result_pos_", NEGATIVE: "mask_search_result_neg_"}
)
SEARCH_STEM = "mask_search_"
"""How the names of search files begin."""

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
        content = parse_json(read_text(path, what=_WHAT), name=name)
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
    return f"{SEARCH_STEM}{words}-{digest}.json"


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
    try:
        found = tuple(sorted(folder.glob(f"{SEARCH_STEM}*.json")))
        inside = sorted(path for path in folder.glob(f"{_FOLDERS[branch]}*") if path.is_dir())
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


class SearchSession:
    """The search over one generation.

    Args:
        recorder: gathers the losses.
        folder: where the search files go when the last layer of the last step is done; None where
            somebody else takes them from the recorder.
        request: identifies the generation; names the files where the prompt is unknown.
        generation: what is generated, or None where nobody said so. Its prompt names the files:
            those of a prompt that is generated again replace the older ones.
    """

    def __init__(
        self,
        recorder: LossRecorder,
        folder: Path | None = None,
        request: str = "",
        generation: Generation | None = None,
    ) -> None:
        self.recorder = recorder
        self._folder = folder
        self._request = request
        self._generation = generation

    def finish(self, branch: str, num_steps: int | None, grid: Window, tile: Window) -> None:
        """Write the file of a branch once it is complete.

        Args:
            branch: the branch that just recorded losses.
            num_steps: denoising steps, or None when unknown.
            grid: tokens along each axis.
            tile: tokens per tile along each axis.

        Raises:
            UsageError: the number of steps is unknown.
        """
        if self._folder is None:
            return
        if num_steps is None:
            raise UsageError(
                "STA_searching must run in a pipeline whose number of steps is known, got a model "
                "alone; pass num_steps to set_forward_context"
            )
        if not self.recorder.complete(branch, num_steps):
            return
        tiles = self.recorder.tiles
        assert tiles is not None, "a complete search had a grid"
        settings = {"grid": list(grid), "num_steps": num_steps}
        found = self.recorder.losses()[branch]
        made = self._generation
        if made is None:
            folder = branch_folder(self._folder, branch, width=grid[2], height=f"{grid[1]}-tokens")
            path = folder / f"mask_search_{self._request}.json"
        else:
            settings["prompt"] = made.prompt
            folder = branch_folder(self._folder, branch, width=made.width, height=made.height)
            path = folder / search_name(made.prompt)
        SearchFile(losses=found, tiles=tiles, settings=settings, tile_size=tile).write(path)
        if self.recorder.ended(branch, num_steps):
            self.recorder.discard(branch)
        if self.recorder.is_empty:
            _SESSIONS.pop((self._folder, self._request), None)


# Per process on purpose: the layers of a model share nothing but their configuration. A session
# leaves when its search is complete; of those that never are, only the latest stay.
_SESSIONS: OrderedDict[tuple[Path, str], SearchSession] = OrderedDict()
_MOST_SESSIONS = 4


def session_for(folder: str, request: str | None) -> SearchSession:
    """Return the session of the running generation; all of its layers share it.

    Args:
        folder: where search files go, unless a recorder is in use that gathers the losses.
        request: identifies the generation.
    """
    recorder = current_recorder()
    if recorder is not None:
        return SearchSession(recorder)
    key = (Path(folder).expanduser(), request or "unnamed")
    if key not in _SESSIONS:
        _SESSIONS[key] = SearchSession(LossRecorder(), *key, current_generation())
        while len(_SESSIONS) > _MOST_SESSIONS:
            _SESSIONS.popitem(last=False)
    return _SESSIONS[key]


def branch_parts(
    branch: str | None, out: torch.Tensor, full: torch.Tensor
) -> tuple[tuple[str, torch.Tensor, torch.Tensor], ...]:
    """Split outputs by the branch of guidance they belong to.

    Args:
        branch: "cond", "uncond", "both" (a batch of the negative half and the positive one), or
            None, which counts as "cond".
        out: [B, S, H, D].
        full: [B, S, H, D].

    Returns:
        (branch, its part of `out`, its part of `full`), for every branch.
    """
    if branch != "both":
        return ((NEGATIVE if branch == "uncond" else POSITIVE, out, full),)
    half = out.shape[0] // 2
    return ((NEGATIVE, out[:half], full[:half]), (POSITIVE, out[half:], full[half:]))
