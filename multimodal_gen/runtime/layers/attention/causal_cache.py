"""Keys and values of past chunks, for models that make a video chunk by chunk.

A chunk lies in a fixed slot of rows for as long as it is kept, and the next one overwrites the slot
of the chunk that left the window: nothing is moved, joined or gathered. Softmax is a sum, and a key
after its rotary embedding carries its position, so the order of the slots has no influence.

    slots:   | sink 0 .. sink n-1 |  chunks c with (c - sink) % window = 0 .. window-1  |

Chunk c sees the chunks c' <= c that are in the sink (c' < sink) or in its window (c' > c - window).
What differs from chunk to chunk (rows to write, lists of slots) lies in tensors that are changed in
place, so that a captured CUDA graph replays on the next chunk.

With 4 or 2 bits the chunks of the window become codes when they are no longer among the newest:

    16 bits: | sink 0 .. sink n-1 | chunks c with (c - sink) % (keep_recent_chunks + 1) = 0, 1 .. |
    codes:   | older chunks c of the window with (c - sink) % (window - keep_recent_chunks) = 0 .. |

One place in 16 bits is free between chunks. The running chunk is there, be it a new one or one that
is in codes and is written anew; `commit` turns what lies in the place that is free next into codes.

Shapes: B batch, S tokens, H key heads, D head size; L layers, N slots, C tokens of a slot.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.slots import (
    CacheCut,
    KeptChunks,
    SlotLists,
    TileLists,
    VisibleTiles,
)
from multimodal_gen.kernels.coded_attention.codes import (
    OF_KEYS,
    OF_VALUES,
    Coded,
    Grouping,
    dequantise,
    quantise,
)
from multimodal_gen.kernels.tensors import usable_device
from multimodal_gen.kernels.tile_order.api import TileOrder, tile_order
from multimodal_gen.runtime.distributed.collectives import Span, partition_heads
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.layers.attention.sparse.windows import kept_indices
from multimodal_gen.settings import expect

Pair: TypeAlias = tuple[int, int]
"""Height and width, in tokens or in tiles."""

Rotate: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""Gives keys [B, S, H, D] their rotary embedding, the first of them at a position in tokens."""

_LEVELS = 127.0  # of a signed byte, in either direction

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
        bits: 16 to keep chunks as they come; 8 to keep them as bytes with a scale per token and
            head; 4 or 2 to keep those of the window that are not among the newest as codes, with a
            middle and a step, in bf16, for 64 of them, see `kernels.coded_attention.codes`.
        keep_recent_chunks: newest past chunks that stay in 16 bits where `bits` is 4 or 2, as the
            sink and the running chunk do.
        grid: (height, width) of a latent frame in tokens; with `tile` alone.
        tile: (height, width) of the tiles in which the tokens of a chunk are kept, each of all its
            frames, so that views may see windows of them; None to keep tokens as they come.

    Raises:
        ConfigError: a size is below 1, `sink` below 0, bits are none of 2, 4, 8 and 16, layers
            bring no such dtype, chunks are not made of frames of the grid, or there would be
            no codes to read, or they cannot be kept.
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
    bits: Literal[2, 4, 8, 16] = 16
    keep_recent_chunks: int = 1
    grid: Pair | None = None
    tile: Pair | None = None

    def __post_init__(self) -> None:
        sizes = ("num_layers", "batch", "num_kv_heads", "head_size", "chunk_tokens", "window")
        for name in (*sizes, "sink", "keep_recent_chunks"):
            value, least = getattr(self, name), int(name in sizes)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be a whole number >= {least}, got {short(value)}")
        expect("before_rope", self.before_rope, bool, "True or False")
        if type(self.bits) is not int or self.bits not in (2, 4, 8, 16):
            raise ConfigError(
                f"bits must be 2, 4 or 8, or 16 as layers bring it, got {short(self.bits)}"
            )
        if not any(self.dtype is each for each in _DTYPES):
            raise ConfigError(
                f"dtype must be that of what layers bring, one of {', '.join(map(str, _DTYPES))}, "
                f"got {short(self.dtype)}; take bits=8 to keep chunks as bytes"
            )
        if self.bits < 16 and self.before_rope:
            raise ConfigError(
                f"before_rope must be False where bits are {self.bits}: a chunk's place changes "
                "while it is kept, and bytes cannot be rotated in place; keep keys after their "
                "rotary embedding, or 16 bits"
            )
        self._check_codes()
        self._check_tiles()

    def _check_codes(self) -> None:
        if self.bits >= 8:
            if self.keep_recent_chunks != 1:
                raise ConfigError(
                    f"keep_recent_chunks must be left out where bits are {self.bits}, got "
                    f"{self.keep_recent_chunks}; it says what stays in 16 bits with bits=4 or 2"
                )
            return
        exact = self.keep_recent_chunks + 1
        if self.window <= exact:
            raise ConfigError(
                f"window must be above {exact}, the running chunk and keep_recent_chunks, where "
                f"bits are {self.bits}, got {self.window}, of which none would be read in codes"
            )
        if self.head_size * self.bits % 8:
            raise ConfigError(
                f"head_size must be a multiple of {8 // self.bits} where bits are {self.bits}, for "
                f"codes fill bytes, got {self.head_size}"
            )
        if self.tile is not None:
            raise ConfigError(
                f"tile must be None where bits are {self.bits}: attention reads all codes of a "
                "chunk, and no blocks of it; take bits=8, or leave grid and tile out"
            )

    def _check_tiles(self) -> None:
        for name, pair in (("grid", self.grid), ("tile", self.tile)):
            if pair is not None and not _is_pair(pair):
                raise ConfigError(f"{name} must be (height, width) or None, got {short(pair)}")
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
    def num_coded(self) -> int:
        """How many of the chunks are kept in codes, once the window is full."""
        return self.window - self.keep_recent_chunks if self.bits < 8 else 0

    @property
    def num_places(self) -> int:
        """How many chunks have rows that are written and read as they come, or as bytes."""
        # A chunk in codes that is written anew, or else the running one, takes one more.
        return self.num_slots - self.num_coded + (self.num_coded > 0)

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
        rows = self.batch * self.num_places * self.chunk_tokens * self.num_kv_heads
        layer, width = rows * self.head_size, self.dtype.itemsize
        every = self.num_layers * layer
        if self.bits == 8:
            scales = 2 * self.num_layers * rows
            bytes_and_scales = (("codes", 2 * every, 1), ("scales", scales, 4))
            return (*bytes_and_scales, ("values of one layer that is read", 2 * layer, width))
        if self.bits < 8:
            chunks = self.num_layers * self.batch * self.num_coded * self.num_kv_heads
            codes = 2 * chunks * self.chunk_tokens * (self.head_size * self.bits // 8)
            groups = sum(
                tokens * channels
                for tokens, channels in (
                    grouping.of(self.chunk_tokens, self.head_size)
                    for grouping in (OF_KEYS, OF_VALUES)
                )
            )
            exact = ("keys and values of the sink and the newest chunks", 2 * every, width)
            return (exact, ("codes", codes, 1), ("middles and steps", 2 * chunks * groups, 2))
        rotated = (("rotated keys", every, width),) if self.before_rope else ()
        return (("keys and values", 2 * every, width), *rotated)


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


class _Chunk(NamedTuple):
    """What a slot holds: the chunk's number, its first token in the video, and its tokens."""

    number: int
    start: int
    tokens: int


class SeenCodes(NamedTuple):
    """What the running chunk sees in codes.

    Attributes:
        keys: of all slots that hold codes.
        values: the same.
        lengths: int32 [slots], how many rows of each are seen.
        bits: of a code.
    """

    keys: Coded
    values: Coded
    lengths: torch.Tensor
    bits: int


class Visible(NamedTuple):
    """What the running chunk sees.

    Attributes:
        keys: [B, N * C, H, D], of all slots; of those in 16 bits where others are in codes.
        values: the same.
        stretch: first row and number of rows, where what is seen lies in one piece; else None.
        plan: the lists for as many queries as the chunk has tokens, in the order of `tiles`.
        tiles: the windows in space of the tiles of queries; None where all is seen.
        codes: what is seen in codes besides; None where nothing is.
    """

    keys: torch.Tensor
    values: torch.Tensor
    stretch: tuple[int, int] | None
    plan: BlockPlan
    tiles: VisibleTiles | None = None
    codes: SeenCodes | None = None


class _Part(NamedTuple):
    """What one append writes: a layer's samples and key heads, all of them when None."""

    layer: int
    samples: Span | None
    heads: Span | None


class _View(NamedTuple):
    """What a layer sees of what is kept: chunks of the sink and the window, and blocks of these."""

    sink: int
    window: int
    cut: CacheCut | None


class CausalCache:
    """The keys and values that a causal video model keeps, of all its layers.

    `begin` places a chunk before its first forward; layers then write it and see it, as often as
    there are denoising steps; `commit` makes it past. One cache serves one video and one guidance
    branch (or both, as two samples of the batch).

    A new chunk that a layer did not write would show what its slot held before, so `commit` refuses
    it. The replay of a CUDA graph says nothing of what it writes: what was written while a graph
    was captured counts as written in every later chunk, and is for the caller to see to.

    Args:
        size: what it holds; `size.num_bytes` are allocated here, and nothing later on.
        device: where.
        rotate: gives keys their rotary embedding; demanded and allowed where `size.before_rope`.
        positions: of keys that come without: "start", their place in the video, or "window", their
            place among what is seen, which stays bounded however long the video is.
        limit_bytes: refuse to be larger; default: the free memory of a CUDA device, or all memory
            of the machine on a CPU.

    Raises:
        UsageError: it does not fit, or `rotate` is missing or too much.
    """

    def __init__(
        self,
        size: CacheSize,
        device: torch.device | str = "cpu",
        *,
        rotate: Rotate | None = None,
        positions: Literal["start", "window"] = "start",
        limit_bytes: int | None = None,
    ) -> None:
        expect("size", size, CacheSize, "a CacheSize")
        expect("rotate", rotate, Callable | None, "a function of keys and a position, or None")
        expect("limit_bytes", limit_bytes, int | None, "a whole number or None")
        if (rotate is not None) != size.before_rope:
            raise UsageError(
                "rotate must be given exactly where the cache keeps keys before their rotary "
                f"embedding, got before_rope={size.before_rope} and rotate={short(rotate)}"
            )
        if not isinstance(positions, str) or positions not in ("start", "window"):
            raise UsageError(f'positions must be "start" or "window", got {short(positions)}')
        self.size = size
        self.device = usable_device(device)
        _refuse_what_does_not_fit(size, self.device, limit_bytes)
        self._rotate, self._positions = rotate, positions
        with torch.inference_mode(False):  # made under any mode, all may write to it
            self._store = _Store(size, self.device)
            self._rows = torch.arange(size.chunk_tokens, dtype=torch.int64, device=self.device)
            self._rows_of_slot_0 = self._rows.clone()
        self._views: dict[_View, SlotLists | TileLists] = {}
        self._lengths: dict[_View, torch.Tensor] = {}  # rows seen of every slot of codes
        self._captured: set[_Part] = set()  # what graphs write, whenever they are replayed
        self.layers = tuple(
            LayerCache(cache=self, layer=i, sink=size.sink, window=size.window)
            for i in range(size.num_layers)
        )
        self.reset()

    def reset(self, start: int = 0) -> None:
        """Forget every chunk; the next one begins at token `start` of the video.

        Raises:
            UsageError: `start` is no whole number, or below 0.
        """
        _check_start(start)
        self._slots: dict[int, _Chunk] = {}
        self._next, self._end = 0, start
        self._running: _Chunk | None = None
        self._is_new = False  # whether the running chunk was never committed
        self._written: set[_Part] = set()  # of the running chunk, since it was begun
        self._half: _Chunk | None = None  # kept, and maybe written anew by some layers alone
        # By slot: the position that its rotated keys have, of chunks that are past.
        self._rotated: dict[int, int] = {}

    @property
    def is_running(self) -> bool:
        """Whether a chunk was begun, and neither committed nor discarded."""
        return self._running is not None

    @property
    def running(self) -> _Chunk:
        """The chunk that was begun: its number, its first token in the video, and its tokens.

        Raises:
            UsageError: there is none.
        """
        if self._running is None:
            raise UsageError("a chunk must be running, got none; call begin(start, tokens) first")
        return self._running

    @property
    def position(self) -> int:
        """Where the queries of the running chunk are, in tokens, as `positions` counts."""
        return self._places()[self._slot_of(self.running.number)]

    @property
    def kind(self) -> tuple[object, ...]:
        """What a CUDA graph of a chunk depends on; chunks of one kind replay the same graph."""
        chunk = self.running
        seen = tuple(
            (view, lists.kind, bool(self._tokens_seen(view)[1]))
            for view, lists in self._views.items()
        )
        return chunk.tokens, self.position if self._rotate else None, seen

    def begin(self, start: int, tokens: int) -> None:
        """Make a chunk the running one: a new one, or one that is kept and shall be written anew.

        A new chunk takes the slot of the one that leaves the window. To be called once per chunk,
        or once per denoising step; outside of CUDA graphs, whose lists it changes.

        Args:
            start: the chunk's first token in the video: where the last one ends, or the start of a
                chunk that is kept.
            tokens: its tokens, at most `size.chunk_tokens`.

        Raises:
            UsageError: the chunk is too long, or neither follows the last one nor is kept; the
                running one was neither committed nor discarded; or `recache` was broken off.
        """
        if self._running is not None:
            if self._running[1:] == (start, tokens):
                return
            raise UsageError(
                f"the chunk at token {self._running.start} must be finished before another begins, "
                f"got {tokens} tokens at {start}; call commit(), or discard() to drop it"
            )
        _check_start(start)
        if type(tokens) is not int or not 1 <= tokens <= self.size.chunk_tokens:
            raise UsageError(f"tokens must be in [1, {self.size.chunk_tokens}], got {tokens!r}")
        kept = {chunk.start: chunk for chunk in self._slots.values()}
        chunk = kept.get(start) or _Chunk(self._next, start, tokens)
        if (start not in kept and start != self._end) or chunk.tokens != tokens:
            there = ", ".join(f"{c.start} ({c.tokens})" for c in kept.values())
            raise UsageError(
                f"a chunk must follow the last one, at token {self._end}, or be one that is kept, "
                f"with its length: {there or 'none'}; got {tokens} tokens at {start}"
            )
        if self._half is not None and chunk.number > self._half.number:
            raise UsageError(
                f"the chunk at token {self._half.start} must be written anew first, because "
                f"recache() was broken off there, got {tokens} tokens at {start}; go through "
                "recache() to its end, or call reset()"
            )
        slot, order = self._slot_of(chunk.number), self._rows_of_slot_0[:tokens]
        if self.size.tile is not None:
            order = self.size.tile_order(tokens, self.device).inverse
        self._slots[slot] = self._running = chunk
        self._written.clear()
        self._is_new = chunk.number == self._next
        self._next, self._end = max(self._next, chunk.number + 1), max(self._end, start + tokens)
        place = self._place_of(chunk.number)
        torch.add(order, place * self.size.chunk_tokens, out=self._rows[:tokens])
        if self._is_coded(chunk.number):
            self._store.unpack(self._code_of(chunk.number), place, tokens)
        for view in self._views:
            self._update(view)
        self._rotate_past(slot)

    def commit(self) -> None:
        """Make the running chunk past, as its last forward wrote it.

        A chunk that is kept may also be left as it was, by all layers. With 4 or 2 bits one chunk
        becomes codes here, so that it is to be called outside of CUDA graphs, as `begin` is.

        Raises:
            UsageError: a layer did not write it, or wrote a part of its samples or heads alone.
        """
        chunk, slot = self.running, self._slot_of(self.running.number)
        missing = self._unwritten(self._written | self._captured)
        if missing and (self._is_new or self._written or chunk == self._half):
            raise UsageError(
                f"all of the {self.size.num_layers} layers must write the chunk at token "
                f"{chunk.start} before commit(), got nothing or a part of it from layers "
                f"{', '.join(map(str, missing[:9]))}; run the model on it, or call discard() or "
                "reset()"
            )
        if self._unwritten(self._written):  # by a graph, maybe, or not at all
            self._rotated.pop(slot, None)
        else:
            self._rotated[slot] = self.position
        if chunk == self._half:
            self._half = None
        self._running = None
        self._pack(chunk)

    def _pack(self, chunk: _Chunk) -> None:
        """Turn into codes what a chunk that was committed leaves no place for in 16 bits."""
        size = self.size
        if self._is_new:
            number = chunk.number - size.keep_recent_chunks
        elif self._is_coded(chunk.number) and (self._written or self._captured):
            number = chunk.number
        else:
            return
        if self._is_coded(number):
            place, tokens = self._place_of(number), self._slots[self._slot_of(number)].tokens
            self._store.pack(self._code_of(number), place, tokens)

    def discard(self) -> None:
        """Drop the running chunk, and what its slot held before; the next one takes its place.

        Raises:
            UsageError: it is one that was committed before, whose slot was written anew.
        """
        chunk = self.running
        if not self._is_new:
            raise UsageError(
                f"the chunk at token {chunk.start} must be committed again, because its slot was "
                "written anew; call commit()"
            )
        del self._slots[self._slot_of(chunk.number)]
        self._next, self._end = chunk.number, chunk.start
        self._rotated.pop(self._slot_of(chunk.number), None)
        self._running = None

    def recache(self, *, sink: bool = True) -> Iterator[tuple[int, int]]:
        """Yield start and tokens of every chunk that is kept, oldest first, each of them running.

        For what changes the past, such as a new prompt: the caller lets the model forward each
        chunk once more. It sees what is before it, written anew already.

        The chunk is committed then, unless the caller has done so.

        A loop that is left early, by an error too, leaves no chunk running: those before it are
        written anew, those after it are as they were, and the one itself may be either by layer. So
        `begin` refuses later chunks until it was written anew, by `recache` once more, or `reset`.

        Args:
            sink: whether the chunks of the sink are among them.

        Raises:
            UsageError: a chunk is running, or layers did not write one that others wrote.
        """
        if self._running is not None:
            raise UsageError(
                f"no chunk must be running, got the one at token {self._running.start}; call "
                "commit() or discard()"
            )
        for chunk in sorted(self._slots.values()):
            if sink or chunk.number >= self.size.sink:
                self.begin(chunk.start, chunk.tokens)
                done = False
                try:
                    yield chunk.start, chunk.tokens
                    if self._running is not None:
                        self.commit()
                    done = True
                finally:
                    if not done:
                        self._half, self._running = chunk, None

    def _unwritten(self, parts: set[_Part]) -> list[int]:
        """Return the layers that some parts do not make up."""
        samples, heads = (0, self.size.batch), (0, self.size.num_kv_heads)
        missing = []
        for layer in range(self.size.num_layers):
            if _Part(layer, None, None) in parts:
                continue
            spans = ((x.samples or samples, x.heads or heads) for x in parts if x.layer == layer)
            cells = {cell for s, h in spans for cell in product(range(*s), range(*h))}
            if len(cells) < samples[1] * heads[1]:
                missing.append(layer)
        return missing

    def _slot_of(self, number: int) -> int:
        sink = self.size.sink
        return number if number < sink else sink + (number - sink) % self.size.window

    def _is_coded(self, number: int) -> bool:
        """Whether a chunk is past, and in codes; the running one is in 16 bits besides."""
        if not self.size.num_coded:
            return False
        newest = self._next - 1 - (self._running is not None and self._is_new)
        return self.size.sink <= number <= newest - self.size.keep_recent_chunks

    def _code_of(self, number: int) -> int:
        """Return which of the slots of codes a chunk has."""
        return (number - self.size.sink) % self.size.num_coded

    def _place_of(self, number: int) -> int:
        """Return which rows a chunk has that are written; one in codes has those that are free."""
        size = self.size
        if not size.num_coded or number < size.sink:
            return self._slot_of(number)
        if self._is_coded(number):
            number = self._next
        return size.sink + (number - size.sink) % (size.keep_recent_chunks + 1)

    def _seen(self, sink: int, window: int) -> dict[int, _Chunk]:
        """Return what the running chunk sees of the slots, by slot, in the order of time."""
        now = self.running.number
        return {
            slot: chunk
            for slot, chunk in sorted(self._slots.items(), key=lambda item: item[1])
            if chunk.number <= now and (chunk.number < sink or chunk.number > now - window)
        }

    def _lists_of(self, view: _View) -> SlotLists | TileLists:
        """Return the lists of a view, which are kept up to date from its first use on."""
        if view not in self._views:
            size = self.size
            with torch.inference_mode(False):
                self._views[view] = (
                    SlotLists(size.num_places, size.chunk_tokens, self.device)
                    if view.cut is None
                    else self._tile_lists(view.cut)
                )
                self._lengths[view] = torch.zeros(
                    size.num_coded, dtype=torch.int32, device=self.device
                )
            self._update(view)
        return self._views[view]

    def _update(self, view: _View) -> None:
        """Write what the running chunk sees into the lists of a view."""
        places, codes = self._tokens_seen(view)
        self._views[view].update(places)
        lengths = [codes.get(slot, 0) for slot in range(self.size.num_coded)]
        self._lengths[view].copy_(torch.tensor(lengths, dtype=torch.int32))

    def _tile_lists(self, cut: CacheCut) -> TileLists:
        size = self.size
        slots, rows = size.num_slots, size.chunk_tokens
        if cut.window is not None:
            kept = kept_indices((1, *cut.window), size.tile_order(rows, "cpu").tiles)
            return TileLists(slots, rows, size.tile_order, kept, self.device)
        assert cut.rows is not None, "a cut has one of them"
        block = min(cut.rows, rows)
        every = torch.arange(-(-rows // block), dtype=torch.int32)

        def pieces(tokens: int, device: torch.device | str) -> TileOrder:
            return tile_order((1, 1, tokens), (1, 1, min(block, tokens)), device)

        kept = every.expand(len(every), -1)
        return TileLists(slots, rows, pieces, kept, self.device, in_order=True)

    def _tokens_seen(self, view: _View) -> tuple[dict[int, int], dict[int, int]]:
        """Return the tokens that a view sees by place, and those that it sees by slot of codes."""
        places, codes = {}, {}
        for chunk in self._seen(view.sink, view.window).values():
            if chunk is not self._running and self._is_coded(chunk.number):
                codes[self._code_of(chunk.number)] = chunk.tokens
            else:
                places[self._place_of(chunk.number)] = chunk.tokens
        return places, codes

    def _places(self) -> dict[int, int]:
        """Return the position of every slot that the running chunk sees."""
        seen = self._seen(self.size.sink, self.size.window)
        if self._positions == "start":
            return {slot: chunk.start for slot, chunk in seen.items()}
        places, before = {}, 0
        for slot, chunk in seen.items():
            places[slot] = before
            before += chunk.tokens
        return places

    def _rotate_past(self, running: int) -> None:
        """Rotate the kept chunks whose positions changed, once per chunk."""
        if self._rotate is None:
            return
        for slot, position in self._places().items():
            if slot != running and self._rotated.get(slot) != position:
                first, tokens = slot * self.size.chunk_tokens, self._slots[slot].tokens
                for raw, rotated in zip(self._store.raw, self._store.keys, strict=True):
                    keys = raw[:, first : first + tokens]
                    rotated[:, first : first + tokens].copy_(self._turned(keys, position))
                self._rotated[slot] = position

    def _turned(self, keys: torch.Tensor, position: int) -> torch.Tensor:
        """Return keys with the rotary embedding that `rotate` gives them."""
        assert self._rotate is not None, "callers know"
        out = self._rotate(keys, position)
        if not isinstance(out, torch.Tensor):
            raise UsageError(f"rotate must return a tensor, got a {type(out).__name__}")
        got, wanted = ((list(x.shape), x.dtype, x.device) for x in (out, keys))
        if got != wanted:
            raise UsageError(
                f"rotate must return keys like those it is given, {wanted[0]} {wanted[1]} on "
                f"{wanted[2]}, got {got[0]} {got[1]} on {got[2]}"
            )
        return out


class _Store:
    """The memory of a cache: `keys` and `values` are what attention reads, [L, B, N * C, H, D].

    Where keys come before their rotary embedding, `raw` holds those. With 8 bits `codes` and
    `scales` hold keys and values, [2, L, B, N * C, H, D | 1], and what attention reads is that of
    one layer, made anew at each read. With 4 or 2 bits `coded` are keys and values of older chunks,
    [L, B, rows, H, ...], which attention reads as they are.
    """

    def __init__(self, size: CacheSize, device: torch.device) -> None:
        rows = (size.batch, size.num_places * size.chunk_tokens, size.num_kv_heads)
        eight = size.bits == 8
        shape = (1 if eight else size.num_layers, *rows, size.head_size)
        # Zeros, because kernels read rows of no chunk with others.
        self.keys, self.values = (
            torch.zeros(shape, dtype=size.dtype, device=device) for _ in range(2)
        )
        self.raw = torch.zeros_like(self.keys) if size.before_rope else self.keys
        both = (2, size.num_layers, *rows) if eight else (2, 0, *rows)
        self.codes = torch.zeros((*both, size.head_size), dtype=torch.int8, device=device)
        self.scales = torch.zeros((*both, 1), dtype=torch.float32, device=device)
        self._size = size
        self.coded = tuple(self._zeros(grouping, device) for grouping in (OF_KEYS, OF_VALUES))

    def _zeros(self, grouping: Grouping, device: torch.device) -> Coded:
        size = self._size
        groups, parts = grouping.of(size.chunk_tokens, size.head_size)
        codes, scales = (
            (size.num_layers, size.batch, size.num_coded * rows, size.num_kv_heads, *entry)
            for rows, entry in (
                (size.chunk_tokens, (size.head_size * size.bits // 8,)),
                (groups, (parts, 2)),
            )
        )
        return Coded(
            torch.zeros(codes, dtype=torch.uint8, device=device),
            torch.zeros(scales, dtype=torch.bfloat16, device=device),
        )

    def pack(self, slot: int, place: int, tokens: int) -> None:
        """Write the codes of a chunk of all layers into a slot of them, from its place."""
        for rows, coded, grouping in self._chunk(slot, place, tokens):
            for kept, made in zip(coded, quantise(rows, self._size.bits, grouping), strict=True):
                kept.copy_(made)

    def unpack(self, slot: int, place: int, tokens: int) -> None:
        """Write what the codes of a chunk stand for into a place, of all layers."""
        for rows, coded, grouping in self._chunk(slot, place, tokens):
            rows.copy_(dequantise(coded, self._size.bits, grouping, rows.dtype))

    def _chunk(
        self, slot: int, place: int, tokens: int
    ) -> Iterator[tuple[torch.Tensor, Coded, Grouping]]:
        """Yield the rows of a chunk and its codes, keys and values of one layer after another."""
        first, size = place * self._size.chunk_tokens, self._size
        sides = zip((self.keys, self.values), self.coded, (OF_KEYS, OF_VALUES), strict=True)
        for exact, coded, grouping in sides:
            lengths = (tokens, grouping.of(tokens, size.head_size)[0])
            for layer in range(size.num_layers):
                codes, scales = (
                    torch.unflatten(x[layer], 1, (size.num_coded, -1))[:, slot, :length]
                    for x, length in zip(coded, lengths, strict=True)
                )
                yield exact[layer, :, first : first + tokens], Coded(codes, scales), grouping


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCache:
    """What one layer has of a cache; `cache.layers[i]` are those of a model.

    Attributes:
        cache: whose part it is.
        layer: index of the layer.
        sink: how many chunks of the sink the layer sees.
        window: how many chunks its window has.
        cut: the blocks that it sees of every chunk; all of it in one when None.
        samples: first and last + 1 of the samples of the batch that calls have; all when None.
        heads: the same for the key heads.
    """

    cache: CausalCache = field(repr=False)
    layer: int
    sink: int
    window: int
    cut: CacheCut | None = None
    samples: Span | None = None
    heads: Span | None = None

    def view(
        self, sink: int | None = None, window: int | None = None, space: Pair | None = None
    ) -> "LayerCache":
        """Return the same, for a layer that sees less of what is kept.

        What is left out stays as it is: all, unless this is a view already.

        Args:
            sink: chunks of the sink.
            window: chunks of the window, the running one included.
            space: height and width of a window in space, in tiles of the cache: of every chunk
                that is seen, a tile of queries sees the tiles around its own place, as many at the
                borders as elsewhere.

        Raises:
            UsageError: the cache keeps fewer chunks, or keeps them without tiles.
        """
        size = self.cache.size
        bounds = (("sink", sink, 0, size.sink), ("window", window, 1, size.window))
        for name, value, least, most in bounds:
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise UsageError(
                    f"{name} must be a whole number in [{least}, {most}], what the cache keeps, "
                    f"got {short(value)}"
                )
        if space is not None and (size.tile is None or not _is_pair(space) or min(space) < 1):
            raise UsageError(
                f"space must be two ints of at least 1, in tiles of a cache that has some, got "
                f"{space} with tiles {size.tile}; give CacheSize a grid and a tile"
            )
        cut = None if space is None else CacheCut(window=space)
        return self._with(sink=sink, window=window, cut=cut)

    def part(self, *, samples: Span | None = None, heads: Span | None = None) -> "LayerCache":
        """Return the same, for calls that have some samples of the batch, or some key heads.

        Args:
            samples: first and last + 1 of them, of all in the cache; as they are by default.
            heads: the same for the key heads.

        Raises:
            UsageError: the cache has fewer.
        """
        size = self.cache.size
        spans = (("samples", samples, size.batch), ("heads", heads, size.num_kv_heads))
        for name, span, most in spans:
            if span is not None and not (_is_pair(span) and 0 <= span[0] < span[1] <= most):
                raise UsageError(
                    f"{name} must be two whole numbers, first and last + 1, in [0, {most}], got "
                    f"{short(span)}"
                )
        return self._with(samples=samples, heads=heads)

    def _with(self, **changes: Any) -> "LayerCache":
        """Return the same with what is given; None leaves a part as it is."""
        return replace(self, **{name: x for name, x in changes.items() if x is not None})

    def append(self, key: torch.Tensor, value: torch.Tensor, start: int | None = None) -> None:
        """Write the running chunk, over what an earlier denoising step wrote.

        Args:
            key: [B, S, H, D], S the tokens of the chunk.
            value: [B, S, H, D].
            start: the chunk's first token in the video, to begin it here; None where it runs.

        Raises:
            UsageError: the tensors are not those of the running chunk, or see `CausalCache.begin`.
        """
        cache = self.cache
        for name, x in (("key", key), ("value", value)):
            expect(name, x, torch.Tensor, "a torch.Tensor [B, S, H, D]")
        if start is not None:
            cache.begin(start, key.shape[1] if key.dim() == 4 else 0)
        chunk, store = cache.running, cache._store
        self._check(key, value, chunk.tokens)
        rows = cache._rows[: chunk.tokens]
        if cache.size.bits == 8:
            sides = ((key, store.keys), (value, store.values))
            for kept, scale_of, (x, read) in zip(store.codes, store.scales, sides, strict=True):
                codes, scales = self._of(kept[self.layer]), self._of(scale_of[self.layer])
                scale, code = _quantised(x)
                codes.index_copy_(1, rows, code)
                scales.index_copy_(1, rows, scale)
                # Attention reads the layer's chunks from here, the running one as it comes.
                torch.mul(codes, scales, out=self._of(read[0]))
        elif cache._rotate is not None:
            self._of(store.raw[self.layer]).index_copy_(1, rows, key)
            key = cache._turned(key, cache.position)
        at = 0 if cache.size.bits == 8 else self.layer
        self._of(store.keys[at]).index_copy_(1, rows, key)
        self._of(store.values[at]).index_copy_(1, rows, value)
        parts = cache._captured if _is_captured(key) else cache._written
        parts.add(_Part(self.layer, self.samples, self.heads))

    def visible(self) -> Visible:
        """Return what the running chunk sees, in the last `append` of this layer itself."""
        cache = self.cache
        at = 0 if cache.size.bits == 8 else self.layer
        view = _View(self.sink, self.window, self.cut)
        lists = cache._lists_of(view)
        tokens = cache.running.tokens
        keys, values = (self._of(x[at]) for x in (cache._store.keys, cache._store.values))
        if isinstance(lists, SlotLists):
            codes = None
            if cache.size.num_coded and cache._tokens_seen(view)[1]:
                of_keys, of_values = (
                    Coded(*(self._of(x[at]) for x in coded)) for coded in cache._store.coded
                )
                codes = SeenCodes(of_keys, of_values, cache._lengths[view], cache.size.bits)
            return Visible(keys, values, lists.stretch, lists.plan(tokens), codes=codes)
        tiles = lists.seen_by(tokens)
        return Visible(keys, values, None, tiles.plan, tiles)

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        for axis, span in ((0, self.samples), (2, self.heads)):
            if span is not None:
                x = x.narrow(axis, span[0], span[1] - span[0])
        return x

    def _check(self, key: torch.Tensor, value: torch.Tensor, tokens: int) -> None:
        like = self._of(self.cache._store.keys[0])
        wanted = (like.shape[0], tokens, *like.shape[2:])
        for name, x in (("key", key), ("value", value)):
            if tuple(x.shape) != wanted or x.dtype != like.dtype or x.device != like.device:
                raise UsageError(
                    f"{name} must be {list(wanted)} {like.dtype} on {like.device}, the running "
                    f"chunk of the cache, got {list(x.shape)} {x.dtype} on {x.device}"
                )


def _is_captured(x: torch.Tensor) -> bool:
    """Tell whether a CUDA graph records what is done with a tensor, in place of doing it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_start(start: int) -> None:
    if type(start) is not int or start < 0:
        raise UsageError(f"start must be a whole number >= 0, got {short(start)}")


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 scales [B, S, H, 1] and codes int8 [B, S, H, D]: x = code * scale, rounded."""
    scale = x.abs().amax(-1, keepdim=True).float() / _LEVELS
    safe = torch.where(scale > 0, scale, 1.0)
    return scale, (x / safe).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)


def _is_pair(value: object) -> bool:
    """Whether a value is two whole numbers."""
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int for n in value)


def _refuse_what_does_not_fit(
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
            f"{size.arithmetic()}; take a smaller window or sink, fewer bits, or more Ulysses ranks"
        )


def _in_words(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{num_bytes:,} B" + (f" ({gib:.2f} GiB)" if gib >= 0.01 else "")
