"""The authors' own kernels, of the packages st-attn and fastvideo-kernel, where a call fits them.

They are compiled for three grids and some windows of each, and leave the output of any other
window unwritten, so everything is checked here.

Shapes: B batch, L tokens in tile order, H heads, D head size.
"""

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.layers.attention.backends.engine import refuse_upstream
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall, TiledSequence
from multimodal_gen.runtime.layers.attention.sparse.upstream import call_reasons
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.settings import by_axis

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


def upstream_reasons(
    call: SparseCall, order: TileOrder, windows: Sequence[Window]
) -> tuple[str, ...]:
    """Return every reason the kernels cannot serve a call, requirement then actual.

    Args:
        call: the call.
        order: how its video is cut into tiles.
        windows: one per query head, as what they keep on the grid.
    """
    found = []
    if order.grid not in _WINDOWS:
        grids = ", ".join(map(by_axis, _WINDOWS))
        found.append(f"needs a latent grid of {grids}, got {by_axis(order.grid)}")
    if order.tile != _TILE:
        found.append(f"needs tiles of {by_axis(_TILE)} tokens, got {by_axis(order.tile)}")
    if not found:
        found += _reasons_on_grid(call, order, windows)
    if call.query.shape[3] != _HEAD_SIZE:
        found.append(f"needs a head size of {_HEAD_SIZE}, got {call.query.shape[3]}")
    return (*found, *call_reasons(call, takes_text=True))


def _reasons_on_grid(call: SparseCall, order: TileOrder, windows: Sequence[Window]) -> list[str]:
    found, layout = [], call.layout
    unknown = sorted({*windows} - _WINDOWS[order.grid])
    if unknown:
        known = ", ".join(map(by_axis, sorted(_WINDOWS[order.grid])))
        found.append(f"needs windows among {known}, got {', '.join(map(by_axis, unknown))}")
    text = (layout.num_queries - layout.num_video, layout.num_keys - layout.num_video)
    if order.grid == _TEXT_GRID:
        if text[0] != text[1] or not 1 <= text[0] <= _MOST_TEXT:
            found.append(
                f"needs 1 to {_MOST_TEXT} text tokens on this grid, got {text[0]} queries and "
                f"{text[1]} keys"
            )
    elif text != (0, 0):
        found.append(f"needs no text on this grid, got {max(text)} text tokens")
    return found


def attend_upstream(
    call: SparseCall, keys: TiledSequence, windows: Sequence[Window], backend: str
) -> torch.Tensor:
    """Attend with the kernel of the package that `call.kernel` is, a key of `UPSTREAM`.

    Args:
        call: the call.
        keys: its keys in tiles.
        windows: one per query head, as what they keep on the grid.
        backend: the method, for messages.

    Returns:
        [B, L, H, D] in the order of the sequence.

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    package = call.kernel.name
    reasons = upstream_reasons(call, keys.order, windows)
    refuse_upstream(reasons, kernel=package, backend=backend)
    function = importlib.import_module(package).sliding_tile_attention
    order = keys.index.long()  # that of the queries too, where the kernels serve the call
    text = call.layout.num_queries - call.layout.num_video
    options = {UPSTREAM[package]: by_axis(keys.order.grid), "has_text": text > 0}
    out = torch.empty_like(call.query)
    # One by one: some releases take slices of heads for contiguous, which they are not in a batch.
    for b in range(out.shape[0]):
        parts = (call.query, call.key, call.value)
        q, k, v = (x[b, order].transpose(0, 1).contiguous()[None] for x in parts)
        tiled = function(q, k, v, list(windows), text, **options)
        out[b, order] = tiled[0].transpose(0, 1)
    return out
