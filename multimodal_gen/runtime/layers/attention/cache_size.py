"""How large a cache of chunks is, and whether it fits.

Shapes: B batch, S tokens, H key heads, D head size; L layers, N slots, C tokens of a slot.
"""

import os
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.slots import KeptChunks
from multimodal_gen.kernels.tile_order.api import TileOrder, tile_order
from multimodal_gen.runtime.distributed.collectives import partition_heads
from multimodal_gen.runtime.distributed.groups import parallel_groups

__all__ = ["CacheSize", "Pair", "is_pair", "key_heads_of_rank", "refuse_what_does_not_fit"]

Pair: TypeAlias = tuple[int, int]
"""Height and width, in tokens or in tiles."""

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """What a cache holds, and so how much memory it takes.

    Attributes:
        num_layers: L, attention layers of the model.
        batch: B.
        num_kv_heads: H on this rank; see `key_heads_of_rank`.
        head_size: D, of keys and of values.
        chunk_tokens: C, tokens of the longest chunk.
        window: chunks that one sees, itself included, without the sink.
        sink: first chunks that every later one sees.
        dtype: of the keys and values that layers bring.
        before_rope: whether keys come without their rotary embedding; rotated ones are kept too.
        bits: 8 to keep chunks as bytes with a scale per token and head; 16 as they come.
        grid: (height, width) of a latent frame in tokens; with `tile` alone.
        tile: (height, width) of the tiles in which the tokens of a chunk are kept, each of all its
            frames, so that views may see windows of them; None to keep tokens as they come.

    Raises:
        ConfigError: a size is below 1, `sink` below 0, bits are neither 8 nor 16, layers bring no
            such dtype, or chunks are not made of frames of the grid.
    """

    num_layers: int
    batch: int
    num_kv_heads: int
    head_size: int
    chunk_tokens: int
    window: int
    sink: int = 0
    dtype: torch.dtype = torch.bfloat16
    before_rope: bool = False
    bits: Literal[8, 16] = 16
    grid: Pair | None = None
    tile: Pair | None = None

    def __post_init__(self) -> None:
        sizes = ("num_layers", "batch", "num_kv_heads", "head_size", "chunk_tokens", "window")
        for name in (*sizes, "sink"):
            value, least = getattr(self, name), 0 if name == "sink" else 1
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")
        if self.bits not in (8, 16):
            raise ConfigError(f"bits must be 8, or 16 for what layers bring, got {self.bits!r}")
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"dtype must be that of what layers bring, one of {', '.join(map(str, _DTYPES))}, "
                f"got {self.dtype!r}; take bits=8 to keep chunks as bytes"
            )
        if self.bits == 8 and self.before_rope:
            raise ConfigError(
                "before_rope must be False where bits are 8: a chunk's place changes while it is "
                "kept, and bytes cannot be rotated in place; keep keys after their rotary "
                "embedding, or 16 bits"
            )
        self._check_tiles()

    def _check_tiles(self) -> None:
        for name, pair in (("grid", self.grid), ("tile", self.tile)):
            if pair is not None and not is_pair(pair):
                raise ConfigError(f"{name} must be (height, width) or None, got {pair!r}")
        if (self.grid is None) != (self.tile is None):
            raise ConfigError(
                f"grid and tile must be given together, got {self.grid} and {self.tile}"
            )
        if self.grid is None or self.tile is None:
            return
        if min(*self.grid, *self.tile) < 1 or self.chunk_tokens % (self.grid[0] * self.grid[1]):
            raise ConfigError(
                f"chunk_tokens must be whole frames of the grid, and tiles have a token, got "
                f"{self.chunk_tokens} tokens, grid {self.grid} and tile {self.tile}"
            )
        if self.before_rope:
            raise ConfigError(
                "before_rope must be False where chunks are kept in tiles, whose tokens are not "
                "in the order in which they are rotated; leave tile out"
            )

    @property
    def num_frames(self) -> int:
        """Latent frames of the longest chunk; 0 where no grid is given."""
        return 0 if self.grid is None else self.chunk_tokens // (self.grid[0] * self.grid[1])

    def tile_order(self, tokens: int, device: torch.device | str) -> TileOrder:
        """Return how a chunk of some tokens is kept tile by tile.

        Raises:
            UsageError: they are no whole frames of the grid.
        """
        assert self.grid is not None, "callers know"
        assert self.tile is not None, "callers know"
        frames, rest = divmod(tokens, self.grid[0] * self.grid[1])
        if rest:
            raise UsageError(f"tokens must be whole frames of {self.grid}, got {tokens}")
        fitted = (min(self.tile[0], self.grid[0]), min(self.tile[1], self.grid[1]))
        return tile_order((frames, *self.grid), (frames, *fitted), device)

    @property
    def kept(self) -> KeptChunks:
        """How chunks are kept."""
        return KeptChunks(self.chunk_tokens, self.num_frames, self.tile)

    @property
    def num_slots(self) -> int:
        """N, chunks that are kept at a time."""
        return self.sink + self.window

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values; the lists of slots, a few kilobytes, come on top."""
        return sum(count * width for _, count, width in self._parts())

    def arithmetic(self) -> str:
        """Return how `num_bytes` comes about."""
        parts = (f"{count:,} {what} x {width} B" for what, count, width in self._parts())
        rows = (
            f"{self.num_layers} layers x {self.batch} samples x {self.num_slots} slots x "
            f"{self.chunk_tokens} tokens x {self.num_kv_heads} heads x {self.head_size} channels"
        )
        return f"{' + '.join(parts)} = {_in_words(self.num_bytes)}, for {rows}"

    def _parts(self) -> tuple[tuple[str, int, int], ...]:
        rows = self.batch * self.num_slots * self.chunk_tokens * self.num_kv_heads
        layer, width = rows * self.head_size, self.dtype.itemsize
        every = self.num_layers * layer
        if self.bits == 8:
            scales = 2 * self.num_layers * rows
            bytes_and_scales = (("codes", 2 * every, 1), ("scales", scales, 4))
            return (*bytes_and_scales, ("values of one layer that is read", 2 * layer, width))
        rotated = (("rotated keys", every, width),) if self.before_rope else ()
        return (("keys and values", 2 * every, width), *rotated)


def is_pair(value: object) -> bool:
    """Whether a value is two whole numbers."""
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int for n in value)


def key_heads_of_rank(num_heads: int, num_kv_heads: int) -> int:
    """Return how many key heads a layer has on this rank once tokens were exchanged for heads.

    Args:
        num_heads: query heads of the layer, over all ranks.
        num_kv_heads: key heads, over all ranks.
    """
    groups = parallel_groups()
    if groups is None or groups.ulysses.size == 1:
        return num_kv_heads
    shares, me = partition_heads(num_heads, num_kv_heads, groups.ulysses.size), groups.ulysses.index
    first, stop = shares.keys[me]
    # Only where they divide evenly among the query heads; else there is one for each of those.
    return shares.arrange_keys(torch.empty(0, 0, stop - first, 0), me).shape[2]


def refuse_what_does_not_fit(
    size: CacheSize, device: torch.device, limit_bytes: int | None
) -> None:
    """Refuse a cache that is larger than allowed, or than what is free.

    Args:
        size: what it would hold.
        device: where.
        limit_bytes: the most that it may take; None for the free memory of a CUDA device, and for
            all memory of the machine on a CPU.

    Raises:
        UsageError: it does not fit.
    """
    whose = "the limit"
    if limit_bytes is None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit_bytes, whose = free + unused, f"what is free on {device}"
    elif limit_bytes is None and device.type == "cpu" and hasattr(os, "sysconf"):
        limit_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        whose = "what this machine has"
    if limit_bytes is None:
        return
    if size.num_bytes > limit_bytes:
        raise UsageError(
            f"the cache must fit into {_in_words(limit_bytes)}, {whose}, got "
            f"{size.arithmetic()}; take a smaller window or sink, bits=8, or more Ulysses ranks"
        )


def _in_words(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{num_bytes:,} B" + (f" ({gib:.2f} GiB)" if gib >= 0.01 else "")
