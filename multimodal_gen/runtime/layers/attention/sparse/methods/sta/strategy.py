"""Strategy files: a window per denoising step, layer and head; and what becomes of it in a run.

A file is one flat JSON object, `{"step_layer_head": [time, height, width], ...}`: indices from 0,
windows in tiles, an entry for every head of every layer at every step. The number of steps it was
made for is its size.

A strategy file has room for windows only, and other programs read every key of it as three
indices. So `mask_strategy.json` has its record in `mask_strategy.json.meta.json`:

    {"tiles": [5, 6, 10], "tile_size": [6, 8, 8], "sha256": "..."}

Each key may be left out: a record for a file of another program needs its tiles only. The digest is
that of the strategy file, so that a record is not taken for that of a file that replaced it.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from operator import gt
from pathlib import Path

from multimodal_gen.errors import ConfigError, short
from multimodal_gen.files import MalformedError, read_text, save_text
from multimodal_gen.records import from_plain, read_file
from multimodal_gen.runtime.layers.attention.sparse.windows import Window, tile_density
from multimodal_gen.settings import as_plain, by_axis, option, read_json


def as_window(value: object) -> Window | None:
    """Return a list of three integers >= 1 as a window, and None for anything else."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    if not all(type(size) is int and size >= 1 for size in value):
        return None
    return (value[0], value[1], value[2])


def largest_of(windows: Iterable[Window]) -> Window:
    """Return the largest window along each axis."""
    time, height, width = (max(sizes) for sizes in zip(*windows, strict=True))
    return (time, height, width)


_RECORD = "record of a mask strategy"
_REMEDY = "delete it, or tune again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRecord:
    """What a strategy was made for, as far as it is known.

    Attributes:
        tiles: tiles along (time, height, width), or None.
        tile_size: tokens per tile along each axis, or None.
        sha256: in a file, the digest of the strategy; elsewhere None.
    """

    tiles: Window | None = option(None, ge=1)
    tile_size: Window | None = option(None, ge=1)
    sha256: str | None = None

    @classmethod
    def read(cls, path: Path, text: str) -> "StrategyRecord":
        """Read the record of a strategy file; an empty one where there is none.

        Args:
            path: the strategy file.
            text: what it holds.

        Raises:
            ConfigError: the record cannot be read, is malformed, or is that of another strategy.
        """
        file = record_path(path)
        if not file.exists():
            return cls()
        name = f"{_RECORD} {str(file)!r}"
        try:
            found = from_plain(cls, read_file(file, name), name)
        except ConfigError as error:
            raise ConfigError(f"{error}; {_REMEDY}") from None
        if found.sha256 not in (None, _digest(text)):
            raise ConfigError(
                f"{name} must belong to {path.name!r}, got that of another strategy, which the "
                f"file held before; {_REMEDY}"
            )
        return replace(found, sha256=None)

    def write(self, path: Path, text: str) -> None:
        """Write it; an empty record leaves none, not even an older one.

        Args:
            path: the strategy file.
            text: what it holds.

        Raises:
            ConfigError: the record cannot be written.
        """
        known = {key: value for key, value in as_plain(self).items() if value is not None}
        file = record_path(path)
        if known:
            save_text(file, json.dumps({**known, "sha256": _digest(text)}) + "\n", what=_RECORD)
        else:
            file.unlink(missing_ok=True)


def record_path(path: Path) -> Path:
    """Return where the record of a strategy file lies."""
    return path.parent / f"{path.name}.meta.json"  # of "/", which has no name, too


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


# No leading zeros: two spellings of one entry would be two keys.
_KEY = re.compile(r"(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})", re.ASCII)

_Windows = tuple[tuple[tuple[Window, ...], ...], ...]


# Compared by identity: hashing tens of thousands of windows takes longer than using them.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """A window for every step, layer and head.

    Attributes:
        windows: by step, then layer, then head.
        name: what messages call it, usually its file.
        made_for: the grid it was made for, as far as it is known.
    """

    windows: _Windows
    name: str = "mask strategy"
    made_for: StrategyRecord = StrategyRecord()

    @property
    def num_steps(self) -> int:
        """Denoising steps."""
        return len(self.windows)

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.windows[0])

    @property
    def num_heads(self) -> int:
        """Heads per layer."""
        return len(self.windows[0][0])

    @property
    def largest(self) -> Window:
        """The largest window along each axis."""
        return largest_of(self.counts())

    @property
    def grid(self) -> Window:
        """The grid it was made for, or the largest window where that is unknown."""
        return self.made_for.tiles or self.largest

    def counts(self) -> Counter[Window]:
        """Return how often each window occurs."""
        return Counter(w for step in self.windows for layer in step for w in layer)

    def density(self, tiles: Window) -> tuple[tuple[float, ...], ...]:
        """Return the share of tiles kept by step and layer, as a mean over heads."""
        share = {window: tile_density(window, tiles) for window in self.counts()}
        return tuple(
            tuple(sum(share[w] for w in layer) / len(layer) for layer in step)
            for step in self.windows
        )

    def mean_density(self, tiles: Window) -> float:
        """Return the share of tiles kept over all steps, layers and heads."""
        counts = self.counts()
        return sum(tile_density(w, tiles) * n for w, n in counts.items()) / counts.total()

    @classmethod
    def parse(cls, text: str, *, name: str = "mask strategy") -> "Strategy":
        """Read a strategy from JSON.

        Raises:
            ConfigError: it is not a JSON object, a key or a value is malformed, a key repeats, or
                an entry is missing.
        """
        try:
            found = read_json(text)
        except MalformedError as error:
            raise ConfigError(f"{name} must be JSON; {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(
                f'{name} must be a JSON object such as {{"0_0_0": [3, 3, 3]}}, got {short(found)}'
            )
        return cls(windows=_nested(_entries(found, name), name), name=name)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, all of it or nothing, and its record next to it.

        Raises:
            ConfigError: a file cannot be written.
        """
        lines = (
            f'"{step}_{layer}_{head}": {list(window)}'
            for step, layers in enumerate(self.windows)
            for layer, heads in enumerate(layers)
            for head, window in enumerate(heads)
        )
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        save_text(Path(path), text, what="mask strategy")
        self.made_for.write(Path(path), text)

    def check_sizes(self, *, num_heads: int, num_layers: int | None = None, layer: int = 0) -> None:
        """Check what a model has, which no retargeting mends.

        Args:
            num_heads: heads of the model's layers, those of other processes included.
            num_layers: its self-attention layers, or None when unknown.
            layer: a layer it has.

        Raises:
            ConfigError: the strategy is for another number of layers or heads.
        """
        if self.num_heads != num_heads:
            raise _refused(self, f"is for {self.num_heads} heads per layer", num_heads)
        if num_layers not in (None, self.num_layers):
            raise _refused(self, f"is for {self.num_layers} layers", num_layers)
        if layer >= self.num_layers:
            raise _refused(self, f"is for {self.num_layers} layers", f"at least {layer + 1}")


def _refused(
    strategy: Strategy,
    mismatch: str,
    run: object,
    remedy: str = "make one for this model with `sglang attention sta search`",
) -> ConfigError:
    return ConfigError(
        f"{strategy.name} must fit the run: it {mismatch}, the run has {run}; {remedy}"
    )


def _entries(content: Mapping[str, object], name: str) -> dict[tuple[int, int, int], Window]:
    found: dict[tuple[int, int, int], Window] = {}
    # One object per distinct window: files have tens of thousands of entries.
    shared: dict[Window, Window] = {}
    for key, value in content.items():
        match, window = _KEY.fullmatch(key), as_window(value)
        if match is None:
            raise ConfigError(
                f'{name} must have keys "step_layer_head" of three indices such as "0_12_3", got '
                f"{short(key)}"
            )
        if window is None:
            raise ConfigError(
                f"{name} must have windows of three integers >= 1, got {short(value)} for {key!r}"
            )
        step, layer, head = map(int, match.groups())
        found[step, layer, head] = shared.setdefault(window, window)
    if not found:
        raise ConfigError(f"{name} must have an entry per step, layer and head, got none")
    return found


def _nested(entries: Mapping[tuple[int, int, int], Window], name: str) -> _Windows:
    steps, layers, heads = (range(1 + max(indices)) for indices in zip(*entries, strict=True))
    sizes = (len(steps), len(layers), len(heads))
    absent = math.prod(sizes) - len(entries)
    if absent:
        missing = (place for place in product(steps, layers, heads) if place not in entries)
        first = ", ".join("_".join(map(str, place)) for place in islice(missing, min(absent, 3)))
        raise ConfigError(
            f"{name} must have an entry per step, layer and head, got {len(entries)} of "
            f"{' x '.join(map(str, sizes))}; missing: {first}{', ...' if absent > 3 else ''}"
        )
    return tuple(tuple(tuple(entries[t, n, h] for h in heads) for n in layers) for t in steps)


def load_strategy(path: str | os.PathLike[str]) -> Strategy:
    """Read a strategy file; read once however many layers ask for it.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    path = Path(path).expanduser().absolute()
    return _load(path, _version(path), _version(record_path(path)))


def _version(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


# Keyed by the files' times and sizes too, so that a rewritten file is read again.
@lru_cache(maxsize=4)
def _load(path: Path, *versions: tuple[int, int]) -> Strategy:
    text = read_text(path, what="mask strategy")
    strategy = Strategy.parse(text, name=f"mask strategy {path.name}")
    return replace(strategy, made_for=StrategyRecord.read(path, text))


_RETARGET = (
    "give retarget=true to rescale it, or make one for this run with `sglang attention sta search`"
)


@lru_cache(maxsize=8)
def fitted(
    strategy: Strategy,
    *,
    tiles: Window,
    tile_size: Window | None = None,
    num_steps: int | None = None,
    retarget: bool = False,
) -> tuple[Strategy, tuple[str, ...]]:
    """Return a strategy for a run, and a sentence for each thing rescaled or in doubt; cached.

    Steps are rescaled by relative position: step i of n takes the windows of the step that holds
    the middle of [i/n, (i+1)/n). Windows keep their share of each axis, rounded to an odd number of
    tiles; those that span an axis still do.

    Args:
        strategy: what was made for this run or another one.
        tiles: the run's grid of tiles.
        tile_size: its tokens per tile, or None when unknown.
        num_steps: the run's denoising steps, or None when unknown.
        retarget: rescale what does not fit, instead of refusing it.

    Raises:
        ConfigError: steps or grid do not fit and `retarget` is off.
    """
    found, notes, old_steps = strategy, [], strategy.num_steps
    if num_steps is not None and num_steps != old_steps:
        if not retarget:
            raise _refused(strategy, f"is for {old_steps} steps", num_steps, _RETARGET)
        middles = ((2 * i + 1) * old_steps // (2 * num_steps) for i in range(num_steps))
        found = replace(found, windows=tuple(strategy.windows[step] for step in middles))
        notes.append(
            f"{strategy.name} is for {old_steps} steps and was rescaled to {num_steps} by relative "
            f"position"
        )
    mismatch = _grid_mismatch(strategy, tiles, tile_size)
    if mismatch is not None:
        if not retarget:
            raise _refused(strategy, *mismatch, _RETARGET)
        found = _with_tiles(found, strategy.made_for.tiles or _grid_of(strategy, tiles), tiles)
        notes.append(
            f"{strategy.name} {mismatch[0]}, the run has {mismatch[1]}; its windows were rescaled"
        )
    elif _looks_dense_elsewhere(strategy, tiles):
        notes.append(
            f"{strategy.name} does not say which grid it is for; its first step has windows of "
            f"{by_axis(strategy.largest)} tiles only, the run has {by_axis(tiles)}; if that is the "
            f'grid, a file beside it named as it is with .meta.json appended, {{"tiles": '
            f"{list(strategy.largest)}}}, says so"
        )
    return found, tuple(notes)


def _grid_mismatch(
    strategy: Strategy, tiles: Window, tile_size: Window | None
) -> tuple[str, str] | None:
    """Return what grid a strategy is for and what grid a run has, where they differ."""
    mine, size = strategy.made_for.tiles, strategy.made_for.tile_size
    if mine is None and _grid_of(strategy, tiles) != tiles:
        return f"has windows of up to {by_axis(strategy.largest)} tiles", by_axis(tiles)
    mine = mine or tiles
    if size is None or tile_size is None:
        return None if mine == tiles else (f"is for {by_axis(mine)} tiles", by_axis(tiles))
    pairs = zip(size, tile_size, tiles, strict=True)
    # A single tile spans its axis, whatever its size.
    if mine == tiles and not any(old != new and count > 1 for old, new, count in pairs):
        return None
    was = f"is for {by_axis(mine)} tiles of {by_axis(size)} tokens"
    return was, f"{by_axis(tiles)} of {by_axis(tile_size)}"


def _grid_of(strategy: Strategy, tiles: Window) -> Window:
    """Return the grid of a strategy that does not say it: that of the run, if its windows fit."""
    return strategy.largest if any(map(gt, strategy.largest, tiles)) else tiles


def _looks_dense_elsewhere(strategy: Strategy, tiles: Window) -> bool:
    """Whether the first step holds the largest window everywhere, and `tiles` is larger."""
    first = {window for layer in strategy.windows[0] for window in layer}
    known = strategy.made_for.tiles is not None or len(strategy.counts()) == 1
    return not known and first == {strategy.largest} and strategy.largest != tiles


def _with_tiles(strategy: Strategy, old: Window, new: Window) -> Strategy:
    scaled = {window: _rescaled(window, old, new) for window in strategy.counts()}
    windows = tuple(
        tuple(tuple(scaled[window] for window in layer) for layer in step)
        for step in strategy.windows
    )
    return replace(strategy, windows=windows, made_for=StrategyRecord())


def _rescaled(window: Window, old: Window, new: Window) -> Window:
    # The nearest odd number; a tie goes to the larger one.
    time, height, width = (
        n if w >= o else min(2 * ((w | 1) * n // (2 * o)) + 1, n)
        for w, o, n in zip(window, old, new, strict=True)
    )
    return (time, height, width)
