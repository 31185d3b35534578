"""The authors' own kernels, of the packages vsa and fastvideo-kernel, where a call fits them.

They want every tile padded to 64 slots, one batch entry, and no text. `fastvideo_kernel` takes the
tiles that were selected here; `vsa` only does everything at once, so there the selection is its
own. Both add the coarse stage with weight 1 where no gate is given; here it is always weighed by
this package.

Shapes: B batch, L tokens, H heads, D head size, N tiles.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.tile_order.api import TileOrder

__all__ = ["UPSTREAM", "UpstreamCall", "attend_upstream"]

UPSTREAM = ("vsa", "fastvideo_kernel")

_SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamCall:
    """What decides whether the kernels can serve a call.

    Attributes:
        tokens_per_tile: tokens of a whole tile.
        text: number of tokens beyond the video's.
        masked: whether keys are masked out.
        scale: factor of the scores.
        head_size: D.
        heads: query heads.
        kv_heads: key and value heads.
    """

    tokens_per_tile: int
    text: int
    masked: bool
    scale: float
    head_size: int
    heads: int
    kv_heads: int

    def reasons(self) -> tuple[str, ...]:
        """Return every reason the kernels cannot serve the call, requirement then actual."""
        found = []
        if self.tokens_per_tile != _SLOTS:
            found.append(f"needs tiles of {_SLOTS} tokens, got {self.tokens_per_tile}")
        if self.text:
            found.append(f"needs sequences without text, got {self.text} text tokens")
        if self.masked:
            found.append("has no key mask, and keys are masked")
        if abs(self.scale * self.head_size**0.5 - 1) > 1e-6:
            found.append(
                f"needs the inverse root of the head size as scale, got {self.scale:.6g} for "
                f"{self.head_size}"
            )
        if self.kv_heads != self.heads:
            found.append(f"needs as many key heads as the {self.heads}, got {self.kv_heads}")
        return tuple(found)


def attend_upstream(
    package: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: TileOrder,
    select: Callable[[], torch.Tensor],
    kept: int,
    call: UpstreamCall,
) -> torch.Tensor:
    """Compute the fine stage with a package's kernel; does not wait for the device.

    Args:
        package: one of `UPSTREAM`.
        query: [B, L, H, D], the tokens of the grid in raster order.
        key: as `query`.
        value: as `query`.
        order: their tiles.
        select: gives the key tiles of every query tile, int32 [B, H, N, kept].
        kept: key tiles of every query tile.
        call: what the call is.

    Returns:
        [B, L, H, D].

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    reasons = call.reasons()
    if reasons:
        raise UnsupportedBackendError(
            f"kernel {package} of video_sparse_attn cannot serve this call: {'; '.join(reasons)}; "
            f"use kernel=auto"
        )
    module = importlib.import_module(package)
    slots = _slots(order)
    token = order.order.long()
    keep = None if package == "vsa" else _map(select(), len(order.starts))
    out = torch.empty_like(query)
    # One by one: some releases take one batch entry only.
    for b in range(query.shape[0]):
        q, k, v = (_padded(x[b, token], slots, len(order.starts)) for x in (query, key, value))
        if keep is None:
            nothing = q.new_zeros(()).expand(q.shape)
            padded = module.video_sparse_attn(q, k, v, order.lengths, kept, _tile(), nothing)
        else:
            padded, _ = _fine_stage(module)(q, k, v, keep[b : b + 1], order.lengths)
        out[b, token] = padded[0, :, slots].transpose(0, 1)
    return out


def _fine_stage(module: Any) -> Callable[..., Any]:
    """Return fastvideo-kernel's function; before 0.3 a submodule of the same name holds it."""
    found = getattr(module, "block_sparse_attn", None)
    if not callable(found):
        submodule = importlib.import_module("fastvideo_kernel.block_sparse_attn")
        found = submodule.block_sparse_attn
    return cast("Callable[..., Any]", found)


def _tile() -> tuple[int, int, int]:
    return (4, 4, 4)  # only its product counts


def _slots(order: TileOrder) -> torch.Tensor:
    """Return where each position in tile order lies when every tile has 64 slots: int64 [L]."""
    starts, device = order.starts.long(), order.starts.device
    tile = torch.repeat_interleave(order.lengths.long(), output_size=order.num_tokens)
    return tile * _SLOTS + torch.arange(order.num_tokens, device=device) - starts[tile]


def _padded(tiled: torch.Tensor, slots: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Return tokens [L, H, D] in tile order as [1, H, N * 64, D], zero where tiles are short."""
    _, heads, head_size = tiled.shape
    padded = tiled.new_zeros((1, heads, num_tiles * _SLOTS, head_size))
    padded[0, :, slots] = tiled.transpose(0, 1)
    return padded


def _map(indices: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Return lists of tiles as bool [B, H, N, N]."""
    keep = torch.zeros((*indices.shape[:3], num_tiles), dtype=torch.bool, device=indices.device)
    return keep.scatter_(-1, indices.long(), True)
