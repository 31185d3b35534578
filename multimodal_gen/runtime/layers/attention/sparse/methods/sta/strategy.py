"""Strategy files: a window per denoising step, layer and head; and what a layer takes of them.

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
import logging
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    AXES,
    Window,
    tile_density,
)
from multimodal_gen.runtime.plain_values import (
    MalformedError,
    read_json,
    read_small_file,
    short,
)

__all__ = [
    "Strategy",
    "StrategyRecord",
    "WindowSource",
    "load_strategy",
    "parse_json",
    "read_record",
    "read_text",
    "record_path",
    "write_record",
    "write_text",
]

logger = logging.getLogger(__name__)


def read_text(path: Path, *, what: str) -> str:
    """Return a file's text.

    Args:
        path: the file.
        what: what it holds, for messages.

    Raises:
        ConfigError: the file is missing, unreadable or not UTF-8.
    """
    try:
        return read_small_file(path)
    except MalformedError as error:
        raise ConfigError(f"{what} must be a readable file, got {str(path)!r}: {error}") from None


def parse_json(text: str, *, name: str, remedy: str = "") -> object:
    """Return the value of a JSON text.

    Args:
        text: the text.
        name: where it comes from, for messages.
        remedy: what to do about a text that is malformed.

    Raises:
        ConfigError: it is not JSON, repeats a key or holds a number that is not finite.
    """
    try:
        return read_json(text)
    except MalformedError as error:
        raise ConfigError(f"{name} must be JSON; {error}{remedy and f'; {remedy}'}") from None


def write_text(path: Path, text: str, *, what: str) -> None:
    """Write a file under another name and rename it: what has its name is always complete.

    Args:
        path: the file; missing folders are made, an existing file is replaced.
        text: what to write.
        what: what it holds, for messages.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = None
    try:
        partial = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except (OSError, ValueError) as error:  # a name that is none, or that cannot be encoded
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{what} must be written to a file, got {str(path)!r}: {reason}"
        ) from None
    finally:
        if partial is not None:
            with suppress(OSError, ValueError):
                partial.unlink()


_WHAT = "record of a mask strategy"
_DIGEST = "sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRecord:
    """What a strategy was made for, as far as it is known.

    Attributes:
        tiles: tiles along (time, height, width), or None.
        tile_size: tokens per tile along each axis, or None.
    """

    tiles: Window | None = None
    tile_size: Window | None = None


_SIZES = ("tiles", "tile_size")


def record_path(path: Path) -> Path:
    """Return where the record of a strategy file lies."""
    return path.parent / f"{path.name}.meta.json"  # of "/", which has no name, too


def read_record(path: Path, text: str) -> StrategyRecord:
    """Read the record of a strategy file; an empty one where there is none.

    Args:
        path: the strategy file.
        text: what it holds.

    Raises:
        ConfigError: the record cannot be read, is malformed, or is that of another strategy.
    """
    beside = record_path(path)
    if not beside.exists():
        return StrategyRecord()
    name = f"{_WHAT} {str(beside)!r}"
    content = parse_json(read_text(beside, what=_WHAT), name=name, remedy=_REMEDY)
    if not isinstance(content, dict) or not content.keys() <= {*_SIZES, _DIGEST}:
        raise ConfigError(
            f"{name} must be a JSON object with tiles, tile_size and sha256 at most, got "
            f"{short(content)}; {_REMEDY}"
        )
    if content.get(_DIGEST) not in (None, _digest(text)):
        raise ConfigError(
            f"{name} must belong to {path.name!r}, got that of another strategy, which the file "
            f"held before; {_REMEDY}"
        )
    tiles, tile_size = (_sizes(content.get(key), key, name) for key in _SIZES)
    return StrategyRecord(tiles=tiles, tile_size=tile_size)


def write_record(path: Path, text: str, record: StrategyRecord) -> None:
    """Write the record of a strategy file; an empty record leaves none, not even an older one.

    Args:
        path: the strategy file.
        text: what it holds.
        record: what it was made for.

    Raises:
        ConfigError: the record cannot be written.
    """
    sizes = {key: getattr(record, key) for key in _SIZES}
    known = {key: list(size) for key, size in sizes.items() if size is not None}
    beside = record_path(path)
    if known:
        write_text(beside, json.dumps({**known, _DIGEST: _digest(text)}) + "\n", what=_WHAT)
        return
    with suppress(FileNotFoundError):
        beside.unlink()


_REMEDY = "delete it, or tune again"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _sizes(value: object, key: str, name: str) -> Window | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == len(AXES):
        time, height, width = value
        if all(type(size) is int and size >= 1 for size in value):
            return (time, height, width)
    raise ConfigError(
        f"{name} must have three integers >= 1 as {key}, got {short(value)}; {_REMEDY}"
    )


# No leading zeros: two spellings of one entry would be two keys.
_KEY = re.compile(r"(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})", re.ASCII)

_UNKNOWN = StrategyRecord()


# Compared by identity: hashing tens of thousands of windows takes longer than using them.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """A window for every step, layer and head.

    Attributes:
        windows: by step, then layer, then head.
        name: what messages call it, usually its file.
        made_for: the grid it was made for, as far as it is known.
    """

    windows: tuple[tuple[tuple[Window, ...], ...], ...]
    name: str = "mask strategy"
    made_for: StrategyRecord = _UNKNOWN

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
        distinct = self.counts()
        return (
            max(window[0] for window in distinct),
            max(window[1] for window in distinct),
            max(window[2] for window in distinct),
        )

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

    def head_windows(
        self, step: int, layer: int, *, first_head: int = 0, num_heads: int | None = None
    ) -> tuple[Window, ...]:
        """Return the windows of a layer's heads at one step.

        Args:
            step: denoising step.
            layer: attention layer.
            first_head: first head wanted; where heads are split over processes, rank times the
                heads of a process.
            num_heads: heads wanted; by default all from `first_head` on.
        """
        stop = self.num_heads if num_heads is None else first_head + num_heads
        assert 0 <= first_head < stop <= self.num_heads, (first_head, stop, self.num_heads)
        return self.windows[step][layer][first_head:stop]

    @classmethod
    def uniform(
        cls, window: Window, *, num_steps: int, num_layers: int, num_heads: int
    ) -> "Strategy":
        """Return the strategy that has the same window everywhere."""
        return cls(windows=(((window,) * num_heads,) * num_layers,) * num_steps)

    @classmethod
    def parse(cls, text: str, *, name: str = "mask strategy") -> "Strategy":
        """Read a strategy from JSON.

        Raises:
            ConfigError: it is not a JSON object, a key or a value is malformed, a key repeats, or
                an entry is missing.
        """
        found = parse_json(text, name=name)
        if not isinstance(found, dict):
            raise ConfigError(
                f'{name} must be a JSON object such as {{"0_0_0": [3, 3, 3]}}, got {short(found)}'
            )
        return cls(windows=_nested(_entries(found, name), name), name=name)

    def to_json(self) -> str:
        """Return the file's text; `parse` reads it back."""
        lines = (
            f'"{step}_{layer}_{head}": {list(window)}'
            for step, layers in enumerate(self.windows)
            for layer, heads in enumerate(layers)
            for head, window in enumerate(heads)
        )
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, all of it or nothing, and its record beside it.

        Raises:
            ConfigError: a file cannot be written.
        """
        text = self.to_json()
        write_text(Path(path), text, what="mask strategy")
        write_record(Path(path), text, self.made_for)

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
            raise self._misfit("heads per layer", self.num_heads, num_heads)
        if num_layers is not None and self.num_layers != num_layers:
            raise self._misfit("layers", self.num_layers, num_layers)
        if layer >= self.num_layers:
            raise self._misfit("layers", self.num_layers, f"at least {layer + 1}")

    def fitted(
        self,
        *,
        tiles: Window,
        tile_size: Window | None = None,
        num_steps: int | None = None,
        retarget: bool = False,
    ) -> tuple["Strategy", tuple[str, ...]]:
        """Return the strategy for a run, and a sentence for each thing rescaled or in doubt.

        Steps are rescaled by relative position: step i of n takes the windows of the step that
        holds the middle of [i/n, (i+1)/n). Windows keep their share of each axis, rounded to an
        odd number of tiles; those that span an axis still do.

        Args:
            tiles: the run's grid of tiles.
            tile_size: its tokens per tile, or None when unknown.
            num_steps: the run's denoising steps, or None when unknown.
            retarget: rescale what does not fit, instead of refusing it.

        Raises:
            ConfigError: steps or grid do not fit and `retarget` is off.
        """
        fitted, notes = self, []
        if num_steps is not None and num_steps != self.num_steps:
            if not retarget:
                raise self._misfit("steps", self.num_steps, num_steps, remedy=_RETARGET)
            fitted = fitted._with_steps(num_steps)
            notes.append(
                f"{self.name} is for {self.num_steps} steps and was rescaled to {num_steps} by "
                f"relative position"
            )
        misfit = self._grid_misfit(tiles, tile_size)
        if misfit:
            if not retarget:
                raise self._refused(f"it {misfit}", _RETARGET)
            old = self.made_for.tiles or (self.largest if self._exceeds(tiles) else tiles)
            fitted = fitted._with_tiles(old, tiles)
            notes.append(f"{self.name} {misfit}; its windows were rescaled")
        elif self._looks_dense_elsewhere(tiles):
            notes.append(
                f"{self.name} does not say which grid it is for; its first step has windows of "
                f"{_by_axis(self.largest)} tiles only, the run has {_by_axis(tiles)}; if that is "
                f'the grid, a file beside it named as it is with .meta.json appended, {{"tiles": '
                f"{list(self.largest)}}}, says so"
            )
        return fitted, tuple(notes)

    def _grid_misfit(self, tiles: Window, tile_size: Window | None) -> str:
        """Return how the grids of the strategy and of a run differ, or nothing."""
        mine, size = self.made_for.tiles, self.made_for.tile_size
        if mine is None and self._exceeds(tiles):
            largest = _by_axis(self.largest)
            return f"has windows of up to {largest} tiles, the run has {_by_axis(tiles)}"
        mine = mine or tiles
        if size is not None and tile_size is not None:
            pairs = zip(size, tile_size, tiles, strict=True)
            # A single tile spans its axis, whatever its size.
            if mine != tiles or any(old != new and count > 1 for old, new, count in pairs):
                return (
                    f"is for {_by_axis(mine)} tiles of {_by_axis(size)} tokens, the run has "
                    f"{_by_axis(tiles)} of {_by_axis(tile_size)}"
                )
        if mine != tiles:
            return f"is for {_by_axis(mine)} tiles, the run has {_by_axis(tiles)}"
        return ""

    def _exceeds(self, tiles: Window) -> bool:
        return any(w > n for w, n in zip(self.largest, tiles, strict=True))

    def _looks_dense_elsewhere(self, tiles: Window) -> bool:
        """Whether the first step holds the largest window everywhere, and `tiles` is larger."""
        first = {window for layer in self.windows[0] for window in layer}
        known = self.made_for.tiles is not None or len(self.counts()) == 1
        return not known and first == {self.largest} and self.largest != tiles

    def _with_steps(self, num_steps: int) -> "Strategy":
        old = self.num_steps
        rows = tuple(self.windows[(2 * i + 1) * old // (2 * num_steps)] for i in range(num_steps))
        return replace(self, windows=rows)

    def _with_tiles(self, old: Window, new: Window) -> "Strategy":
        scaled = {window: _rescaled(window, old, new) for window in self.counts()}
        windows = tuple(
            tuple(tuple(scaled[window] for window in layer) for layer in step)
            for step in self.windows
        )
        return replace(self, windows=windows, made_for=_UNKNOWN)

    def _misfit(self, what: str, mine: object, run: object, *, remedy: str = "") -> ConfigError:
        return self._refused(f"it is for {mine} {what}, the run has {run}", remedy or _REMAKE)

    def _refused(self, misfit: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.name} must fit the run: {misfit}{remedy}")


_REMAKE = "; make one for this model with `sglang attention sta search`"
_RETARGET = (
    "; give retarget=true to rescale it, or make one for this run with "
    "`sglang attention sta search`"
)


def load_strategy(path: str | os.PathLike[str]) -> Strategy:
    """Read a strategy file; read once however many layers ask for it.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    path = Path(path).expanduser().absolute()
    return _load(path, (_version(path), _version(record_path(path))))


def _version(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


# Keyed by the files' times and sizes too, so that a rewritten file is read again.
@lru_cache(maxsize=4)
def _load(path: Path, versions: tuple[tuple[int, int], tuple[int, int]]) -> Strategy:
    del versions
    text = read_text(path, what="mask strategy")
    strategy = Strategy.parse(text, name=f"mask strategy {path.name}")
    return replace(strategy, made_for=read_record(path, text))


class WindowSource:
    """The windows of one layer.

    Args:
        strategy: a strategy, or None for `window` everywhere.
        window: the window everywhere; used without a strategy.
        retarget: rescale a strategy that does not fit the run, instead of refusing it.
        layer: index of the layer; None where it is unknown, which a strategy cannot serve.
        num_layers: self-attention layers of the model, or None when unknown.
        num_heads: heads of the layer, those of other processes included.
        tile_size: tokens per tile, which a strategy may be for; None where nobody knows.

    Raises:
        ConfigError: the strategy is for another number of layers or heads.
        UsageError: the strategy needs to know the layer, and it is not known.
    """

    def __init__(
        self,
        *,
        strategy: Strategy | None,
        window: Window | None = None,
        retarget: bool = False,
        layer: int | None = None,
        num_layers: int | None = None,
        num_heads: int,
        tile_size: Window | None = None,
    ) -> None:
        assert strategy is not None or window is not None, "the configuration checks that"
        if strategy is not None and layer is None:
            raise UsageError(
                "a mask strategy must know the layer's index, got a layer without one; construct "
                "it with a `prefix` such as 'blocks.3.attn', or use `window`"
            )
        self._strategy = strategy
        self._window = window
        self._retarget = retarget
        self._layer = layer or 0
        self._tile_size = tile_size
        if strategy is not None:
            strategy.check_sizes(num_heads=num_heads, num_layers=num_layers, layer=self._layer)

    def check(self, tiles: Window, num_steps: int | None) -> None:
        """Refuse a strategy for another grid of tiles or, where it is known, other steps.

        Raises:
            ConfigError: it is, and nobody asked to rescale it.
        """
        if self._strategy is not None:
            self._fitted(self._strategy, tiles, num_steps)

    def windows(
        self,
        tiles: Window,
        *,
        step: int,
        num_steps: int | None,
        first_head: int,
        num_heads: int,
    ) -> tuple[Window, ...]:
        """Return a window per head.

        Args:
            tiles: the grid of tiles.
            step: denoising step.
            num_steps: denoising steps of the run, or None when unknown.
            first_head: the first head of this process.
            num_heads: heads of this process.

        Raises:
            ConfigError: the strategy is for other steps or another grid.
            UsageError: the strategy has no such step.
        """
        if self._strategy is None:
            assert self._window is not None
            return (self._window,) * num_heads
        fitted = self._fitted(self._strategy, tiles, num_steps)
        if step >= fitted.num_steps:
            raise UsageError(
                f"{fitted.name} must have every step of the run, it has {fitted.num_steps} and "
                f"this is step {step}"
            )
        return fitted.head_windows(step, self._layer, first_head=first_head, num_heads=num_heads)

    def _fitted(self, strategy: Strategy, tiles: Window, num_steps: int | None) -> Strategy:
        return _fitted(strategy, tiles, self._tile_size, num_steps, self._retarget)


@lru_cache(maxsize=8)
def _fitted(
    strategy: Strategy,
    tiles: Window,
    tile_size: Window | None,
    num_steps: int | None,
    retarget: bool,
) -> Strategy:
    fitted, notes = strategy.fitted(
        tiles=tiles, tile_size=tile_size, num_steps=num_steps, retarget=retarget
    )
    for note in notes:
        logger.warning("%s", note)
    return fitted


def _entries(content: Mapping[str, object], name: str) -> dict[tuple[int, int, int], Window]:
    found: dict[tuple[int, int, int], Window] = {}
    # One object per distinct window: files have tens of thousands of entries.
    shared: dict[Window, Window] = {}
    for key, value in content.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ConfigError(
                f'{name} must have keys "step_layer_head" of three indices such as "0_12_3", got '
                f"{short(key)}"
            )
        step, layer, head = (int(text) for text in match.groups())
        window = _window(value)
        if window is None:
            raise ConfigError(
                f"{name} must have windows of three integers >= 1, got {short(value)} for {key!r}"
            )
        found[step, layer, head] = shared.setdefault(window, window)
    if not found:
        raise ConfigError(f"{name} must have an entry per step, layer and head, got none")
    return found


def _window(value: object) -> Window | None:
    if not isinstance(value, list) or len(value) != len(AXES):
        return None
    if not all(type(size) is int and size >= 1 for size in value):
        return None
    return (value[0], value[1], value[2])


def _nested(
    entries: Mapping[tuple[int, int, int], Window], name: str
) -> tuple[tuple[tuple[Window, ...], ...], ...]:
    steps, layers, heads = (1 + max(key[axis] for key in entries) for axis in range(3))
    absent = steps * layers * heads - len(entries)
    if absent:
        missing = _missing(entries, (steps, layers, heads))
        first = ", ".join("_".join(map(str, next(missing))) for _ in range(min(absent, 3)))
        raise ConfigError(
            f"{name} must have an entry per step, layer and head, got {len(entries)} of "
            f"{steps} x {layers} x {heads}; missing: {first}{', ...' if absent > 3 else ''}"
        )
    return tuple(
        tuple(tuple(entries[t, n, h] for h in range(heads)) for n in range(layers))
        for t in range(steps)
    )


def _missing(
    entries: Mapping[tuple[int, int, int], Window], sizes: tuple[int, int, int]
) -> Iterator[tuple[int, int, int]]:
    for step, layer, head in product(*map(range, sizes)):
        if (step, layer, head) not in entries:
            yield step, layer, head


def _rescaled(window: Window, old: Window, new: Window) -> Window:
    sizes = [_rescaled_axis(w, o, n) for w, o, n in zip(window, old, new, strict=True)]
    return (sizes[0], sizes[1], sizes[2])


def _rescaled_axis(size: int, old: int, new: int) -> int:
    # The nearest odd number; a tie goes to the larger one.
    return new if size >= old else min(2 * ((size | 1) * new // (2 * old)) + 1, new)


def _by_axis(tiles: Window) -> str:
    return "x".join(map(str, tiles))
