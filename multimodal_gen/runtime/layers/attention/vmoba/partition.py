"""How V-MoBA cuts the tokens of a video into chunks.

Shapes: V video tokens, Sk keys, N chunks, G groups of chunks, H heads.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.kernels.row_groups.api import ChunkGroups
from multimodal_gen.runtime.layers.attention.backends.tiled import (
    SequenceLayout,
    TiledSequence,
    masked_keys,
    tiled_sequence,
)

__all__ = ["ChunkKind", "Partition", "chunk_kind", "chunk_shape", "partition"]

ChunkKind = Literal["temporal", "spatial", "st"]
_Grid = tuple[int, int, int]


def chunk_kind(layer: int, first: int, cycle: tuple[int, int, int]) -> ChunkKind:
    """Return the kind of chunk that a layer has.

    Args:
        layer: index of the layer.
        first: the layer that the cycles begin at.
        cycle: temporal, spatial and spatio-temporal layers of a cycle, in this order.
    """
    place = (layer - first) % sum(cycle)
    if place < cycle[0]:
        return "temporal"
    return "spatial" if place < cycle[0] + cycle[1] else "st"


def chunk_shape(kind: ChunkKind, size: tuple[int, ...], grid: _Grid) -> _Grid:
    """Return a chunk's tokens along time, height and width, at most those of the grid.

    Args:
        kind: what `size` means.
        size: frames; height and width; or time, height and width.
        grid: (T, H, W) of the video.
    """
    full = {
        "temporal": (size[0], grid[1], grid[2]),
        "spatial": (grid[0], *size[-2:]),
        "st": size,
    }[kind]
    t, h, w = (min(pair) for pair in zip(full, grid, strict=True))
    return t, h, w


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """The chunks of a video; shared between callers, not to be written to.

    Attributes:
        keys: the keys, chunk by chunk, then everything else; a block for each chunk, and one for
            the rest if there is any.
        own: int32 [V], the chunk of every token of the video, in the order of the sequence.
        in_order: whether the sequence already lies chunk by chunk.
    """

    keys: TiledSequence
    own: torch.Tensor
    in_order: bool

    @property
    def num_chunks(self) -> int:
        """N."""
        return len(self.keys.order.starts)

    @property
    def has_rest(self) -> bool:
        """Whether there are keys that are not of the video."""
        return self.keys.blocks.num > self.num_chunks

    def key_blocks(
        self, groups: ChunkGroups, heads: int, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, Blocks]:
        """Return where every key comes from, and the key blocks of all groups of all heads.

        Args:
            groups: how the chunks are grouped.
            heads: query heads.
            keep: bool [B, Sk], keys that may be attended to; None for all.

        Returns:
            The index, int32 [Sk] or [B, Sk]; and for head h * G + g the chunks of group g, those
            it lacks being empty, then the keys that are not of the video, if any.
        """
        index, blocks = self.keys.index, self.keys.blocks
        if keep is not None:
            index, blocks = masked_keys(self.keys, keep)
        starts, lengths = (_grouped(x, self, groups) for x in blocks.bounds(index.device))
        return index, Blocks.ragged(
            starts.repeat(1, heads, 1),
            lengths.repeat(1, heads, 1),
            total=blocks.total,
            size=blocks.size,
        )


def _grouped(bound: torch.Tensor, chunks: Partition, groups: ChunkGroups) -> torch.Tensor:
    """Arrange starts or lengths [B|1, 1, N (+ 1)] by group: [B|1, G, size (+ 1)]."""
    num = chunks.num_chunks
    missing = groups.num * groups.size - num
    by_group = torch.nn.functional.pad(bound[:, 0, :num], (0, missing))
    by_group = by_group.view(-1, groups.num, groups.size)
    if not chunks.has_rest:
        return by_group
    rest = bound[:, 0, num:].unsqueeze(1).expand(-1, groups.num, -1)
    return torch.cat((by_group, rest), dim=2)


def partition(layout: SequenceLayout, chunk: _Grid, device: torch.device) -> Partition:
    """Return the chunks of a video; the last 64 are cached.

    Args:
        layout: where the video lies.
        chunk: tokens of a chunk along (time, height, width); those at the edges may be smaller.
        device: where the tensors lie.
    """
    return _partition(layout, chunk, device)


@lru_cache(maxsize=64)
def _partition(layout: SequenceLayout, chunk: _Grid, device: torch.device) -> Partition:
    keys = tiled_sequence(layout, layout.num_keys, chunk, device)
    order = keys.order
    video, rest = layout.num_video, layout.num_keys - layout.num_video
    with torch.inference_mode(False), torch.device("cpu"):
        starts, lengths = order.starts.cpu(), order.lengths.cpu()
        own = torch.empty(video, dtype=torch.int32)
        chunks = torch.arange(len(starts), dtype=torch.int32)
        own[order.order.cpu().long()] = chunks.repeat_interleave(lengths)
        if rest:
            starts = torch.cat((starts, torch.tensor([video], dtype=torch.int32)))
            lengths = torch.cat((lengths, torch.tensor([rest], dtype=torch.int32)))
        blocks = Blocks.ragged(
            starts.to(device),
            lengths.to(device),
            total=layout.num_keys,
            size=max(order.largest, rest),
        )
        positions = torch.arange(layout.num_keys, dtype=torch.int32)
        in_order = bool((keys.index.cpu() == positions).all())
        return Partition(keys=replace(keys, blocks=blocks), own=own.to(device), in_order=in_order)
