"""The authors' own kernels, of the packages vsa and fastvideo-kernel, where a call fits them.

They want every tile padded to 64 slots, one batch entry, and no text. `fastvideo_kernel` takes the
tiles that were selected here; `vsa` only does everything at once, so there the selection is its
own. Both add the coarse stage with weight 1 where no gate is given; here it is always weighed by
this package.

Shapes: B batch, L tokens, H heads, D head size, N tiles.
"""

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.layers.attention.backends.engine import refuse_upstream
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SparseCall,
    TiledSequence,
    lists_as_map,
)
from multimodal_gen.runtime.layers.attention.sparse.upstream import call_reasons

UPSTREAM = ("vsa", "fastvideo_kernel")

_SLOTS = 64
_TILE = (4, 4, 4)  # only its product counts


def upstream_reasons(call: SparseCall, order: TileOrder) -> tuple[str, ...]:
    """Return every reason the kernels cannot serve a call, requirement then actual."""
    found = []
    if order.largest != _SLOTS:
        found.append(f"needs tiles of {_SLOTS} tokens, got {order.largest}")
    return (*found, *call_reasons(call))


def attend_upstream(
    call: SparseCall,
    keys: TiledSequence,
    select: Callable[[], torch.Tensor],
    kept: int,
    backend: str,
) -> torch.Tensor:
    """Compute the fine stage with the kernel of the package `call.kernel`, one of `UPSTREAM`.

    Does not wait for the device.

    Args:
        call: the call.
        keys: its keys in tiles.
        select: gives the key tiles of every query tile, int32 [B, H, N, kept].
        kept: key tiles of every query tile.
        backend: the method, for messages.

    Returns:
        [B, L, H, D].

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    order = keys.order
    refuse_upstream(upstream_reasons(call, order), kernel=call.kernel.name, backend=backend)
    module = importlib.import_module(call.kernel.name)
    slots = _slots(order)
    token = order.order.long()
    block_mask = None if call.kernel.name == "vsa" else lists_as_map(select(), len(order.starts))
    out = torch.empty_like(call.query)
    # One by one: some releases take one batch entry only.
    for b in range(out.shape[0]):
        parts = (call.query, call.key, call.value)
        q, k, v = (_padded(x[b, token], slots, len(order.starts)) for x in parts)
        if block_mask is None:
            nothing = q.new_zeros(()).expand(q.shape)
            padded = module.video_sparse_attn(q, k, v, order.lengths, kept, _TILE, nothing)
        else:
            padded, _ = _fine_stage(module)(q, k, v, block_mask[b : b + 1], order.lengths)
        out[b, token] = padded[0, :, slots].transpose(0, 1)
    return out


def _fine_stage(module: Any) -> Callable[..., Any]:
    """Return fastvideo-kernel's function; before 0.3 a submodule of the same name holds it."""
    found = getattr(module, "block_sparse_attn", None)
    if not callable(found):
        submodule = importlib.import_module("fastvideo_kernel.block_sparse_attn")
        found = submodule.block_sparse_attn
    return cast("Callable[..., Any]", found)


def _slots(order: TileOrder) -> torch.Tensor:
    """Return where each position in tile order lies when every tile has 64 slots: int64 [L]."""
    tile, place = order.places()
    return tile * _SLOTS + place


def _padded(tiled: torch.Tensor, slots: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Return tokens [L, H, D] in tile order as [1, H, N * 64, D], zero where tiles are short."""
    _, heads, head_size = tiled.shape
    padded = tiled.new_zeros((1, heads, num_tiles * _SLOTS, head_size))
    padded[0, :, slots] = tiled.transpose(0, 1)
    return padded
