"""The authors' own kernels, of the packages st-attn and fastvideo-kernel, where a call fits them.

They are compiled for three grids and some windows of each, and leave the output of any other
window unwritten, so everything is checked here.

Shapes: B batch, L tokens in tile order, H heads, D head size.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention.sparse.sta.windows import (
    Window,
    effective_window,
    tiles_of,
)

__all__ = ["UPSTREAM", "UpstreamCall", "attend_upstream"]

# Package, and what it calls the argument that names the grid.
UPSTREAM: Mapping[str, str] = MappingProxyType(
    {"st_attn": "dit_seq_shape", "fastvideo_kernel": "seq_shape"}
)

_TILE: Window = (6, 8, 8)
_HEAD_SIZE = 128
_MOST_TEXT = 256
_TEXT_GRID: Window = (30, 48, 80)  # compiled for sequences with text only, the others without


def _windows(text: str) -> frozenset[Window]:
    triples = (word.split("-") for word in text.split())
    return frozenset((int(t), int(h), int(w)) for t, h, w in triples)


_WINDOWS: Mapping[Window, frozenset[Window]] = MappingProxyType(
    {
        _TEXT_GRID: _windows(
            "3-3-3 3-3-5 5-3-3 3-5-5 5-6-1 5-3-5 5-5-5 5-5-7 5-6-10 5-1-1 1-6-10 5-1-10"
        ),
        (36, 48, 48): _windows(
            "3-3-3 3-3-6 6-3-3 3-6-6 3-6-3 6-3-6 6-6-6 6-1-1 6-1-6 6-6-1 1-6-6 1-1-6 1-6-1"
        ),
        (18, 48, 80): _windows(
            "3-3-3 3-3-5 3-5-5 3-6-1 3-5-7 3-5-9 3-6-10 3-6-3 3-1-1 1-6-10 1-5-10 1-6-7 1-5-7 "
            "1-5-9 3-1-10 3-3-10 1-3-10 1-6-5"
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamCall:
    """What decides whether the kernels can serve a call.

    Attributes:
        grid: (T, H, W) of the video tokens.
        tile: tokens per tile.
        windows: one per head.
        query_text: number of text queries.
        key_text: number of text keys.
        masked: whether keys are masked out.
        scale: factor of the scores.
        head_size: D.
        kv_heads: key and value heads.
    """

    grid: Window
    tile: Window
    windows: tuple[Window, ...]
    query_text: int
    key_text: int
    masked: bool
    scale: float
    head_size: int
    kv_heads: int

    def reasons(self) -> tuple[str, ...]:
        """Return every reason the kernels cannot serve the call, requirement then actual."""
        found = []
        if self.grid not in _WINDOWS:
            grids = ", ".join(map(_by_axis, _WINDOWS))
            found.append(f"needs a latent grid of {grids}, got {_by_axis(self.grid)}")
        if self.tile != _TILE:
            found.append(f"needs tiles of {_by_axis(_TILE)} tokens, got {_by_axis(self.tile)}")
        if not found:
            found += self._reasons_on_grid()
        if self.masked:
            found.append("has no key mask, and keys are masked")
        if self.head_size != _HEAD_SIZE or abs(self.scale * _HEAD_SIZE**0.5 - 1) > 1e-6:
            found.append(
                f"needs a head size of {_HEAD_SIZE} and its inverse root as scale, got "
                f"{self.head_size} and {self.scale:.6g}"
            )
        if self.kv_heads != len(self.windows):
            found.append(f"needs as many key heads as the {len(self.windows)}, got {self.kv_heads}")
        return tuple(found)

    def effective(self) -> list[Window]:
        """Return the windows in the kernels' spelling."""
        tiles = tiles_of(self.grid, self.tile)
        return [effective_window(window, tiles) for window in self.windows]

    def _reasons_on_grid(self) -> list[str]:
        found = []
        unknown = sorted(set(self.effective()) - _WINDOWS[self.grid])
        if unknown:
            known = ", ".join(map(_by_axis, sorted(_WINDOWS[self.grid])))
            found.append(f"needs windows among {known}, got {', '.join(map(_by_axis, unknown))}")
        text = (self.query_text, self.key_text)
        if self.grid == _TEXT_GRID:
            if text[0] != text[1] or not 1 <= text[0] <= _MOST_TEXT:
                found.append(
                    f"needs 1 to {_MOST_TEXT} text tokens on this grid, got {text[0]} queries and "
                    f"{text[1]} keys"
                )
        elif text != (0, 0):
            found.append(f"needs no text on this grid, got {max(text)} text tokens")
        return found


def attend_upstream(
    package: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    call: UpstreamCall,
) -> torch.Tensor:
    """Attend with a package's kernel.

    Args:
        package: a key of `UPSTREAM`.
        query: [B, L, H, D] in the order of the sequence.
        key: as `query`.
        value: as `query`.
        index: int32 [L], position in tile order -> position in the sequence.
        call: what the call is.

    Returns:
        [B, L, H, D] in the order of the sequence.

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    reasons = call.reasons()
    if reasons:
        raise UnsupportedBackendError(
            f"kernel {package} of sliding_tile_attn cannot serve this call: {'; '.join(reasons)}; "
            f"use kernel=auto"
        )
    function = importlib.import_module(package).sliding_tile_attention
    order = index.long()
    name = "x".join(map(str, call.grid))
    out = torch.empty_like(query)
    # One by one: some releases take slices of heads for contiguous, which they are not in a batch.
    for b in range(query.shape[0]):
        q, k, v = (x[b, order].transpose(0, 1).contiguous()[None] for x in (query, key, value))
        options = {UPSTREAM[package]: name, "has_text": call.query_text > 0}
        tiled = function(q, k, v, call.effective(), call.query_text, **options)
        out[b, order] = tiled[0].transpose(0, 1)
    return out


def _by_axis(sizes: Window) -> str:
    return "x".join(map(str, sizes))
