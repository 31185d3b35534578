"""Strategy files: a window per denoising step, layer and head.

A file is one flat JSON object, `{"step_layer_head": [time, height, width], ...}`: indices from 0,
windows in tiles, an entry for every head of every layer at every step. It names neither the grid
of tiles nor the number of steps it was made for; the latter is its size, the former is told by its
first step where that is dense.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.config_fields import short
from multimodal_gen.runtime.layers.attention.sta.files import read_text, write_text
from multimodal_gen.runtime.layers.attention.sta.windows import (
    AXES,
    Window,
    tile_density,
)

__all__ = ["Strategy", "load_strategy"]

# No leading zeros: two spellings of one entry would be two keys.
_KEY = re.compile(r"(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})", re.ASCII)


# Compared by identity: hashing tens of thousands of windows takes longer than using them.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """A window for every step, layer and head.

    Attributes:
        windows: by step, then layer, then head.
        name: what messages call it, usually its file.
    """

    windows: tuple[tuple[tuple[Window, ...], ...], ...]
    name: str = "mask strategy"

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

    @property
    def tiles(self) -> Window | None:
        """The grid of tiles the strategy was made for, or None where it does not tell.

        It tells where every head starts with one window that is the largest along each axis, and
        others come later: dense first steps.
        """
        first = {window for layer in self.windows[0] for window in layer}
        if len(first) == 1 and len(self.counts()) > 1 and first == {self.largest}:
            return self.largest
        return None

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
        try:
            pairs = json.loads(text, object_pairs_hook=_Pairs)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} must be JSON, got {error}") from None
        if not isinstance(pairs, _Pairs):
            raise ConfigError(
                f'{name} must be a JSON object such as {{"0_0_0": [3, 3, 3]}}, got {short(pairs)}'
            )
        return cls(windows=_nested(_entries(pairs, name), name), name=name)

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
        """Write the file, all of it or nothing.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_text(Path(path), self.to_json(), what="mask strategy")

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
        self, *, tiles: Window, num_steps: int | None = None, retarget: bool = False
    ) -> tuple["Strategy", tuple[str, ...]]:
        """Return the strategy for a run, and a sentence for each thing that was rescaled.

        Steps are rescaled by relative position: step i of n takes the windows of the step that
        holds the middle of [i/n, (i+1)/n). Windows keep their share of each axis, rounded to an
        odd number of tiles; those that span an axis still do.

        Args:
            tiles: the run's grid of tiles.
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
        made_for = self._made_for(tiles)
        if made_for is not None:
            if not retarget:
                mine, run = _by_axis(made_for), _by_axis(tiles)
                raise self._misfit("tiles", mine, run, remedy=_RETARGET)
            fitted = fitted._with_tiles(made_for, tiles)
            notes.append(
                f"{self.name} is for {_by_axis(made_for)} tiles and its windows were rescaled to "
                f"{_by_axis(tiles)}"
            )
        return fitted, tuple(notes)

    def _made_for(self, tiles: Window) -> Window | None:
        """Return the grid the strategy was made for where that is not `tiles`."""
        made_for = self.tiles
        if made_for is None and any(w > n for w, n in zip(self.largest, tiles, strict=True)):
            made_for = self.largest
        return None if made_for == tiles else made_for

    def _with_steps(self, num_steps: int) -> "Strategy":
        old = self.num_steps
        rows = tuple(self.windows[(2 * i + 1) * old // (2 * num_steps)] for i in range(num_steps))
        return Strategy(windows=rows, name=self.name)

    def _with_tiles(self, old: Window, new: Window) -> "Strategy":
        scaled = {window: _rescaled(window, old, new) for window in self.counts()}
        windows = tuple(
            tuple(tuple(scaled[window] for window in layer) for layer in step)
            for step in self.windows
        )
        return Strategy(windows=windows, name=self.name)

    def _misfit(self, what: str, mine: object, run: object, *, remedy: str = "") -> ConfigError:
        return ConfigError(
            f"{self.name} must fit the run: it is for {mine} {what}, the run has {run}"
            f"{remedy or '; make one for this model with `sglang attention sta search`'}"
        )


_RETARGET = (
    "; give retarget=true to rescale it, or make one for this run with "
    "`sglang attention sta search`"
)


class _Pairs(list[tuple[str, Any]]):
    """The members of a JSON object in their order, repeated ones too."""


def load_strategy(path: str | os.PathLike[str]) -> Strategy:
    """Read a strategy file; read once however many layers ask for it.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    path = Path(path).expanduser().absolute()
    try:
        status = path.stat()
        version = (status.st_mtime_ns, status.st_size)
    except OSError:
        version = (0, 0)
    return _load(path, version)


# Keyed by the file's time and size too, so that a rewritten file is read again.
@lru_cache(maxsize=4)
def _load(path: Path, version: tuple[int, int]) -> Strategy:
    del version
    return Strategy.parse(read_text(path, what="mask strategy"), name=f"mask strategy {path.name}")


def _entries(pairs: _Pairs, name: str) -> dict[tuple[int, int, int], Window]:
    found: dict[tuple[int, int, int], Window] = {}
    # One object per distinct window: files have tens of thousands of entries.
    shared: dict[Window, Window] = {}
    for key, value in pairs:
        match = _KEY.fullmatch(key)
        if match is None:
            raise ConfigError(
                f'{name} must have keys "step_layer_head" of three indices such as "0_12_3", got '
                f"{short(key)}"
            )
        step, layer, head = (int(text) for text in match.groups())
        if (step, layer, head) in found:
            raise ConfigError(f"{name} must have every entry once, got {key!r} twice")
        window = _window(value)
        if window is None:
            raise ConfigError(
                f"{name} must have windows of three integers >= 1, got {short(_plain(value))} for "
                f"{key!r}"
            )
        found[step, layer, head] = shared.setdefault(window, window)
    if not found:
        raise ConfigError(f"{name} must have an entry per step, layer and head, got none")
    return found


def _window(value: object) -> Window | None:
    if isinstance(value, _Pairs) or not isinstance(value, list) or len(value) != len(AXES):
        return None
    if not all(type(size) is int and size >= 1 for size in value):
        return None
    return (value[0], value[1], value[2])


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, _Pairs) else value


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
