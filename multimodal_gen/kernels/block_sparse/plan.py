"""Which keys every query attends to, as lists of blocks.

Shapes: B batch, H query heads, Sq and Sk tokens, Nq and Nk blocks. A leading `B|1` or `H|1` is
broadcast. Everything is counted per *query* head, also where several of them share a key head.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from multimodal_gen.errors import UsageError, short
from multimodal_gen.kernels.static_cache import static_cache, wait_for_devices
from multimodal_gen.kernels.tensors import unit_stride, usable_device

WORD_BITS = 32

_DerivedT = TypeVar("_DerivedT")


def _expect_kind(name: str, value: object, kind: type) -> None:
    # Whole numbers of other libraries; not the class int, nor arrays.
    whole = kind is int and hasattr(type(value), "__index__") and not getattr(value, "shape", ())
    if not whole and not isinstance(value, kind):
        raise UsageError(f"`{name}` must be of type {kind.__name__}, got {short(value)}")


def _expect_int32(name: str, tensor: torch.Tensor, shape: tuple[str, ...]) -> None:
    _expect_kind(name, tensor, torch.Tensor)
    if tensor.dtype != torch.int32:
        raise UsageError(f"`{name}` must be int32, got {tensor.dtype}; call .int() on it")
    if tensor.ndim != len(shape):
        raise UsageError(f"`{name}` must be [{', '.join(shape)}], got {list(tensor.shape)}")


def _expect_positive(name: str, value: int) -> None:
    _expect_kind(name, value, int)
    if value < 1:
        raise UsageError(f"`{name}` must be at least 1, got {value}")


def broadcast_leading(*tensors: torch.Tensor) -> tuple[int, int]:
    """Return the B|1 and H|1 that tensors [B|1, H|1, ...] have together."""
    return max(t.shape[0] for t in tensors), max(t.shape[1] for t in tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """How one side of the attention, queries or keys, is cut into disjoint blocks.

    Three forms, from the most to the least regular:

    * regular (`starts` and `lengths` None): block i covers rows
      [i * size, min((i + 1) * size, total));
    * padded (`lengths` given): block i owns rows [i * size, (i + 1) * size), of which the first
      lengths[i] are real and the rest padding;
    * ragged (`starts` and `lengths` given): block i covers [starts[i], starts[i] + lengths[i]).

    Attributes:
        num: number of blocks N.
        size: rows of a block; for padded and ragged blocks an upper bound of `lengths`.
        total: rows of the tensor that is cut (Sq or Sk), padding included.
        starts: int32 [B|1, H|1, N], or None.
        lengths: int32 [B|1, H|1, N] in [0, size], or None.
    """

    num: int
    size: int
    total: int
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("num", "size", "total"):
            _expect_positive(name, getattr(self, name))
        for name in ("starts", "lengths"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            _expect_int32(name, tensor, ("B|1", "H|1", "N"))
            if tensor.shape[2] != self.num:
                raise UsageError(
                    f"`{name}` must hold one value per block, got {tensor.shape[2]} values for "
                    f"{self.num} blocks"
                )
        if self.starts is not None and self.lengths is None:
            raise UsageError("`lengths` must be given with `starts`, got None")
        covered = self.num * self.size
        if self.lengths is None and not covered - self.size < self.total <= covered:
            raise UsageError(
                f"`num` must be ceil(total / size) = {-(-self.total // self.size)} for regular "
                f"blocks, got {self.num}"
            )
        if self.lengths is not None and self.starts is None and covered != self.total:
            raise UsageError(
                f"`total` must be num * size = {covered} for padded blocks, got {self.total}"
            )

    @classmethod
    def regular(cls, total: int, size: int) -> "Blocks":
        """Cut `total` rows into blocks of `size`; the last one may be short."""
        _expect_positive("size", size)
        _expect_kind("total", total, int)
        return cls(num=-(-total // size), size=size, total=total)

    @classmethod
    def padded(cls, lengths: torch.Tensor, size: int) -> "Blocks":
        """Blocks of `size` slots whose first `lengths` are real: int32 [N] or [B|1, H|1, N]."""
        _expect_kind("lengths", lengths, torch.Tensor)
        lengths = lengths.view(1, 1, -1) if lengths.ndim == 1 else lengths
        num = lengths.shape[-1]
        return cls(num=num, size=size, total=num * size, lengths=lengths)

    @classmethod
    def ragged(
        cls, starts: torch.Tensor, lengths: torch.Tensor, *, total: int, size: int
    ) -> "Blocks":
        """Blocks anywhere in `total` rows, each of at most `size`: int32 [N] or [B|1, H|1, N]."""
        _expect_kind("starts", starts, torch.Tensor)
        _expect_kind("lengths", lengths, torch.Tensor)
        starts = starts.view(1, 1, -1) if starts.ndim == 1 else starts
        lengths = lengths.view(1, 1, -1) if lengths.ndim == 1 else lengths
        return cls(num=starts.shape[-1], size=size, total=total, starts=starts, lengths=lengths)

    @property
    def is_regular(self) -> bool:
        """Whether every block follows from `size` and `total` alone."""
        return self.lengths is None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are present."""
        return tuple(t for t in (self.starts, self.lengths) if t is not None)

    def bounds(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return start and length of every block, int32 [B|1, H|1, N], whatever the form."""
        if self.starts is not None and self.lengths is not None:
            return self.starts, self.lengths
        starts, lengths = _regular_bounds(self.num, self.size, self.total, torch.device(device))
        return starts, lengths if self.lengths is None else self.lengths

    def to(self, device: torch.device | str) -> "Blocks":
        """Return the same blocks with their tensors on `device`."""
        return dataclasses.replace(self, **_moved(self, ("starts", "lengths"), device))


def _moved(
    owner: "Blocks | BlockPlan", names: Sequence[str], device: torch.device | str
) -> dict[str, Any]:
    """Return the named fields of `owner` that are not None, on `device`."""
    fields = {name: getattr(owner, name) for name in names}
    return {name: field.to(device) for name, field in fields.items() if field is not None}


@static_cache(maxsize=256)
def _regular_bounds(
    num: int, size: int, total: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.arange(num, dtype=torch.int32, device=device).view(1, 1, -1) * size
    return starts, (total - starts).clamp_max(size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPlan:
    """The pairs of a block-sparse attention.

    Query block i attends to the key blocks `indices[..., i, :counts[..., i]]`, which must be
    strictly increasing; entries past the count are never read. A query block without key blocks
    is allowed: its rows give 0 and lse -inf. Rows that belong to no query block do so as well.

    The constructor checks what can be checked without waiting for the device; `check` the rest,
    whether indices and counts lie in their ranges. Without it, a kernel on a GPU reads whatever
    memory a wrong index points to.

    Attributes:
        indices: int32 [B|1, H|1, Nq, Kmax]; stride 0 (an expanded tensor) is welcome.
        counts: int32 [B|1, H|1, Nq], each in [0, Kmax].
        q: how the queries are cut.
        kv: how the keys are cut.
        row_bits: int32 [B|1, H|1, Sq, ceil(Nk / 32)], or None. Row r keeps key block j of its list
            if bit j % 32 of word j // 32 is set: a choice per row inside the blocks of the list.
        uniform: whether all counts are equal. Saves sorting the rows by their work, also where
            ragged blocks make it differ a little.
        order: int32 [B|1 * H|1 * Nq], or None: the order in which kernels start the rows of
            `counts`, flattened. `longest_first` computes it once for a plan that is used often.
        causal: drop keys after the query, aligned to the last query and the last key. For plans
            that otherwise keep everything, as `dense` makes them; or, without gradients, nothing.
        shared: whether several streams read the plan: what is derived is waited for.
        cache: what kernels derive from the plan once; its tensors must not be written to.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    q: Blocks
    kv: Blocks
    row_bits: torch.Tensor | None = None
    uniform: bool = False
    order: torch.Tensor | None = None
    causal: bool = False
    shared: bool = False
    cache: dict[Any, Any] = dataclasses.field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        _expect_kind("q", self.q, Blocks)
        _expect_kind("kv", self.kv, Blocks)
        _expect_kind("uniform", self.uniform, bool)
        _expect_kind("causal", self.causal, bool)
        _expect_int32("indices", self.indices, ("B|1", "H|1", "Nq", "Kmax"))
        _expect_int32("counts", self.counts, ("B|1", "H|1", "Nq"))
        if self.indices.shape[:3] != self.counts.shape:
            raise UsageError(
                f"`counts` must have the shape of `indices` without its last dimension "
                f"{list(self.indices.shape[:3])}, got {list(self.counts.shape)}"
            )
        if self.counts.shape[2] != self.q.num:
            raise UsageError(
                f"`counts` must hold one value per query block ({self.q.num}), "
                f"got {self.counts.shape[2]}"
            )
        if not 1 <= self.indices.shape[3] <= self.kv.num:
            raise UsageError(
                f"`indices` must have room for 1 to {self.kv.num} key blocks per row, "
                f"got {self.indices.shape[3]}"
            )
        if self.row_bits is not None:
            self._check_row_bits(self.row_bits)
        if self.order is not None:
            _expect_int32("order", self.order, ("rows",))
            if self.order.numel() != self.counts.numel():
                raise UsageError(
                    f"`order` must hold one value per row of `counts` ({self.counts.numel()}), "
                    f"got {self.order.numel()}"
                )
        if self.causal and not (self.uniform and self.q.is_regular and self.kv.is_regular):
            raise UsageError(
                "`causal` must be given only with plans that keep every block, got another; make "
                "it with BlockPlan.dense on regular blocks"
            )
        if any(tensor.device != self.device for tensor in self.tensors()):
            devices = sorted({str(tensor.device) for tensor in self.tensors()})
            raise UsageError(f"`plan` must lie on one device, got {devices}")

    def _check_row_bits(self, row_bits: torch.Tensor) -> None:
        _expect_int32("row_bits", row_bits, ("B|1", "H|1", "Sq", "words"))
        wanted = (self.q.total, -(-self.kv.num // WORD_BITS))
        if tuple(row_bits.shape[2:]) != wanted:
            raise UsageError(
                f"`row_bits` must be [B|1, H|1, {wanted[0]}, {wanted[1]}], "
                f"got {list(row_bits.shape)}"
            )

    @classmethod
    def dense(
        cls, q: Blocks, kv: Blocks, device: torch.device | str, *, causal: bool = False
    ) -> "BlockPlan":
        """Every query block attends to every key block; one list, shared by expansion."""
        _expect_kind("q", q, Blocks)
        _expect_kind("kv", kv, Blocks)
        device = usable_device(device)
        every = torch.arange(kv.num, dtype=torch.int32, device=device)
        counts = torch.tensor(kv.num, dtype=torch.int32, device=device)
        return cls(
            indices=every.expand(1, 1, q.num, kv.num),
            counts=counts.expand(1, 1, q.num),
            q=q,
            kv=kv,
            uniform=True,
            causal=causal,
        )

    @classmethod
    def from_map(
        cls, block_mask: torch.Tensor, q: Blocks, kv: Blocks, *, max_count: int | None = None
    ) -> "BlockPlan":
        """Build the lists from a map, without waiting for the device.

        Args:
            block_mask: bool [B|1, H|1, Nq, Nk].
            q: how the queries are cut.
            kv: how the keys are cut.
            max_count: upper bound of the blocks kept per row, which bounds the lists' memory;
                Nk by default. A row that keeps more loses its last blocks.

        Returns:
            The plan.

        Raises:
            UsageError: `block_mask` is not a bool map of these blocks.
        """
        _expect_kind("block_mask", block_mask, torch.Tensor)
        if block_mask.dtype != torch.bool or block_mask.ndim != 4:
            raise UsageError(
                f"`block_mask` must be bool [B|1, H|1, Nq, Nk], got {block_mask.dtype} "
                f"{list(block_mask.shape)}"
            )
        if tuple(block_mask.shape[2:]) != (q.num, kv.num):
            raise UsageError(
                f"`block_mask` must map {q.num} query blocks to {kv.num} key blocks, "
                f"got {list(block_mask.shape[2:])}"
            )
        room = kv.num if max_count is None else min(max_count, kv.num)
        _expect_positive("max_count", room)
        slot = block_mask.cumsum(-1, dtype=torch.int32) - 1
        # Dropped blocks, and those past the room, go to one slot that is cut off again.
        slot = torch.where(block_mask & (slot < room), slot, room)
        every = torch.arange(kv.num, dtype=torch.int32, device=block_mask.device)
        indices = block_mask.new_zeros((*block_mask.shape[:3], room + 1), dtype=torch.int32)
        indices.scatter_(-1, slot.long(), every.expand(block_mask.shape))
        counts = block_mask.sum(-1, dtype=torch.int32).clamp_max(room)
        return cls(indices=indices[..., :room], counts=counts, q=q, kv=kv)

    @property
    def device(self) -> torch.device:
        """Where the lists lie."""
        return self.indices.device

    def remember(self, key: object, derived: _DerivedT) -> _DerivedT:
        """Return what was derived, and keep it in `cache` for calls to come.

        What is derived while a CUDA graph is captured holds nothing before the graph is replayed,
        and belongs to that graph alone: it is not kept.
        """
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            if self.shared:
                wait_for_devices(self.device)
            self.cache[key] = derived
        return derived

    def derive(self, key: object, make: Callable[..., _DerivedT], *arguments: object) -> _DerivedT:
        """Return what `cache` holds under `key`, else what `make` returns; see `remember`."""
        found: _DerivedT | None = self.cache.get(key)
        return self.remember(key, make(*arguments)) if found is None else found

    def form(self) -> tuple[Hashable, ...]:
        """Return what launches depend on of a plan, but for what its tensors hold."""
        q, kv = self.q, self.kv
        every = (self.indices, self.counts, self.row_bits, self.order)
        tensors = (*every, q.starts, q.lengths, kv.starts, kv.lengths)
        sizes = (q.num, q.size, q.total, kv.num, kv.size, kv.total, self.uniform, self.causal)
        forms = [
            x if x is None else (x.shape, x.stride(), x.device, x.data_ptr() % 16) for x in tensors
        ]
        return (*sizes, *forms)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the plan that is present."""
        optional = tuple(t for t in (self.row_bits, self.order) if t is not None)
        return (self.indices, self.counts, *self.q.tensors(), *self.kv.tensors(), *optional)

    def to(self, device: torch.device | str) -> "BlockPlan":
        """Return the same plan on `device`."""
        names = ("indices", "counts", "q", "kv", "row_bits", "order")
        return dataclasses.replace(self, **_moved(self, names, device))

    def longest_first(self) -> "BlockPlan":
        """Return the plan with `order` set: rows with the most blocks are started first."""
        if self.uniform or self.order is not None:
            return self
        order = torch.argsort(self.counts.flatten(), descending=True, stable=True)
        return dataclasses.replace(self, order=order.int())

    def head_by_head(self) -> "BlockPlan":
        """Return the plan with `order` set: heads follow each other, so caches hold what one reads.

        Inside a head the longest rows come first. Rows of more than twice the mean precede all
        heads: begun late they would end late.
        """
        work = self.counts.flatten().long()
        head = torch.arange(len(work), device=self.device) // self.counts.shape[2]
        turn = torch.where(work > 2 * work.double().mean(), -1, head)
        order = torch.argsort(turn * (self.kv.num + 1) - work, stable=True)
        return dataclasses.replace(self, order=order.int())

    def pairs(self, *, full: bool = False) -> torch.Tensor:
        """Return the kept (query, key) pairs per batch and head: int64 [B|1, H|1].

        Does not wait for the device.

        Args:
            full: whether the caller knows that every list is as long as there is room for.
        """
        if self.causal:
            seen = torch.arange(self.q.total, device=self.device) + 1
            seen = (seen + (self.kv.total - self.q.total)).clamp(0, self.kv.total)
            return seen.sum().view(1, 1)
        _, q_lengths = self.q.bounds(self.device)
        _, kv_lengths = self.kv.bounds(self.device)
        if full and self.row_bits is None and kv_lengths.shape[:2] == (1, 1):
            return (kv_lengths[0, 0][self.indices].sum(-1) * q_lengths).sum(-1)
        if self.row_bits is not None:
            return self._pairs_by_row(self.row_bits)
        valid = self.valid_slots()
        batch, heads = broadcast_leading(self.counts, kv_lengths)
        gathered = kv_lengths.expand(batch, heads, -1).gather(
            2, torch.where(valid, self.indices, 0).expand(batch, heads, -1, -1).flatten(2).long()
        )
        keys = (gathered.view(batch, heads, *self.indices.shape[2:]) * valid).sum(-1)
        return (keys.long() * q_lengths).sum(-1)

    def valid_slots(self) -> torch.Tensor:
        """Return which entries of `indices` count, bool [B|1, H|1, Nq, Kmax]."""
        slots = torch.arange(self.indices.shape[3], device=self.device)
        return slots < self.counts.unsqueeze(-1)

    def block_mask(self, num: int) -> torch.Tensor:
        """Return which of the first `num` key blocks are kept, bool [B|1, H|1, Nq, num]."""
        kept = self.valid_slots() & (self.indices < num)
        mask = kept.new_zeros((*self.counts.shape, num + 1))
        mask.scatter_(-1, torch.where(kept, self.indices, num).long(), True)
        return mask[..., :num].contiguous()

    def _pairs_by_row(self, row_bits: torch.Tensor) -> torch.Tensor:
        starts, q_lengths = self.q.bounds(self.device)
        _, kv_lengths = self.kv.bounds(self.device)
        mask = self.block_mask(self.kv.num)
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        rows = torch.arange(self.q.total, device=self.device)
        for i in range(self.q.num):
            inside = rows >= starts[..., i, None]
            inside = inside & (rows < starts[..., i, None] + q_lengths[..., i, None])
            for j in range(self.kv.num):
                word = row_bits[..., j // WORD_BITS] >> (j % WORD_BITS) & 1
                asking = (inside & word.bool()).sum(-1)
                total = total + asking * mask[:, :, i, j] * kv_lengths[..., j]
        return total

    def density(self) -> torch.Tensor:
        """Return kept pairs / all pairs of real rows, mean over batch and heads: 0-d float64.

        Does not wait for the device; `float(plan.density())` does.
        """
        queries = self.q.bounds(self.device)[1].sum(-1)
        keys = self.kv.bounds(self.device)[1].sum(-1)
        every = (queries.long() * keys.long()).clamp_min(1)
        return (self.pairs() / every.double()).mean()

    def check(self) -> "BlockPlan":
        """Check the values, which waits for the device; returns the plan.

        Raises:
            UsageError: a count, an index or a block lies outside what it refers to, blocks
                overlap, `order` leaves rows out, or `uniform` or `causal` is not true.
        """
        _check_lists(self)
        for name, blocks in (("q", self.q), ("kv", self.kv)):
            _check_blocks(name, blocks, self.device)
        if self.order is not None:
            rows = torch.arange(len(self.order), dtype=torch.int32, device=self.device)
            if not torch.equal(self.order.sort().values, rows):
                raise UsageError(
                    f"`order` must hold each of the {len(rows)} rows of `counts` once; "
                    f"longest_first() makes one"
                )
        return self


def key_tiles(plan: BlockPlan, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the lists of a plan in tiles of so many keys; does not wait for the device.

    Args:
        plan: regular key blocks, whose size is a multiple of `keys`.
        keys: keys of a tile.

    Returns:
        indices int32 [B|1, H|1, Nq, n], stride 1 along n, past the count anything; counts int32
        [B|1, H|1, Nq]; and int32 [B|1, H|1, Nq], 1 where a row has the tile that the keys end in.
    """
    kv, room = plan.kv, plan.indices.shape[3]
    per_block = kv.size // keys
    tiles = -(-kv.total // keys)
    # The last block is listed last, if at all, and may have fewer tiles.
    last = (plan.counts - 1).clamp_min(0).unsqueeze(-1)
    ends = plan.indices.gather(3, last.long()).squeeze(-1) == kv.num - 1
    ends = (ends & (plan.counts > 0)).int()
    counts = plan.counts * per_block - ends * (kv.num * per_block - tiles)
    within = torch.arange(per_block, dtype=torch.int32, device=plan.device)
    indices = (plan.indices.unsqueeze(-1) * per_block + within).flatten(3)
    # A row that lists every block has more entries than there are tiles.
    return indices[..., : min(room * per_block, tiles)], counts, ends


def bounds_of(
    blocks: Blocks, batch: int, heads: int, absent: torch.Tensor
) -> tuple[list[torch.Tensor], list[int]]:
    """Return starts and lengths as kernels take them, and their strides of batch and head.

    They stay where they are, so that what is written to them later holds; but those whose last
    stride is not 1 are copied.

    Args:
        blocks: how the rows are cut.
        batch: B.
        heads: H, of queries or of keys.
        absent: any tensor, which stands for those that regular blocks do not have.
    """
    tensors = [
        absent if t is None else unit_stride(t).expand(batch, heads, -1)
        for t in (blocks.starts, blocks.lengths)
    ]
    return tensors, [stride for t in tensors for stride in t.stride()[:2]]


def launch_order(plan: BlockPlan, counts: torch.Tensor) -> torch.Tensor | None:
    """Return the order in which to start the rows of `counts`, or None when it does not matter.

    Args:
        plan: the plan; its own order is taken where it fits.
        counts: work of each row, [B|1, H|1, Nq]: the plan's counts, or those of its steps.

    Returns:
        int32 [rows of counts], longest first, or None when every row has the same work.
    """
    if plan.uniform and not plan.causal:
        return None
    if plan.order is not None and plan.order.numel() == counts.numel():
        return plan.order
    return plan.derive(("order", counts.data_ptr()), _longest_first, plan, counts)


def _longest_first(plan: BlockPlan, counts: torch.Tensor) -> torch.Tensor:
    work = counts.flatten()
    if plan.causal:  # the last queries see the most keys
        work = torch.arange(counts.numel(), device=counts.device)
    return torch.argsort(work, descending=True, stable=True).int()


def _check_lists(plan: "BlockPlan") -> None:
    room, counts = plan.indices.shape[3], plan.counts
    if counts.numel() and bool(((counts < 0) | (counts > room)).any()):
        least, most = (int(bound) for bound in counts.aminmax())
        raise UsageError(f"`counts` must lie in [0, {room}], got {least} to {most}")
    valid = plan.valid_slots()
    if bool((valid & ((plan.indices < 0) | (plan.indices >= plan.kv.num))).any()):
        raise UsageError(f"`indices` must lie in [0, {plan.kv.num}) where they are counted")
    if bool((valid[..., 1:] & (plan.indices.diff(dim=-1) <= 0)).any()):
        raise UsageError("`indices` must be strictly increasing along every row")
    if plan.uniform and bool((counts != counts.flatten()[:1]).any()):
        raise UsageError("`uniform` must be given only where all counts are equal, they differ")
    if plan.causal and bool(((counts != plan.kv.num) & (counts != 0)).any()):
        raise UsageError(
            "`causal` must be given only with plans that keep every block, got another; make it "
            "with BlockPlan.dense"
        )


def _check_blocks(name: str, blocks: "Blocks", device: torch.device) -> None:
    starts, lengths = (bound.long() for bound in blocks.bounds(device))
    if bool(((lengths < 0) | (lengths > blocks.size)).any()):
        raise UsageError(f"`{name}.lengths` must lie in [0, {blocks.size}]")
    if bool(((starts < 0) | (starts + lengths > blocks.total)).any()):
        raise UsageError(f"`{name}` blocks must lie in [0, {blocks.total})")
    # Empty blocks overlap nothing, wherever they start.
    begins, order = torch.where(lengths > 0, starts, blocks.total).sort(dim=-1)
    ends = begins + lengths.expand_as(begins).gather(-1, order)
    if bool((ends[..., :-1] > begins[..., 1:]).any()):
        raise UsageError(f"`{name}` blocks must be disjoint, two of them overlap")


_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, scale: float | None
) -> None:
    """Raise unless tensors, a plan and a scale fit each other.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        plan: which pairs count.
        scale: factor of the scores, or None.

    Raises:
        UsageError: a type, shape, dtype or device does not fit.
    """
    if scale is not None:
        _validate_scale(scale)
    _validate_types(q, k, v, plan)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise UsageError(
                f"`{name}` must have q's dtype and device ({q.dtype}, {q.device}), "
                f"got {tensor.dtype}, {tensor.device}"
            )
    if q.dtype not in _FLOATING:
        raise UsageError(f"`q` must be float16, bfloat16, float32 or float64, got {q.dtype}")
    batch, queries, heads, head_size = q.shape
    keys, kv_heads = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != head_size:
        raise UsageError(f"`k` must be [{batch}, Sk, Hkv, {head_size}], got {list(k.shape)}")
    if v.shape != k.shape:
        raise UsageError(f"`v` must have the shape of k {list(k.shape)}, got {list(v.shape)}")
    if heads % kv_heads:
        raise UsageError(f"`q` must have a multiple of k's {kv_heads} heads, got {heads}")
    _validate_plan(plan, q.device, (batch, heads), queries, keys)


def _validate_types(q: object, k: object, v: object, plan: object) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"`{name}` must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4 or 0 in tensor.shape[1:]:
            raise UsageError(
                f"`{name}` must be [B, S, H, D], and S, H and D at least 1, "
                f"got {list(tensor.shape)}"
            )
    if not isinstance(plan, BlockPlan):
        raise UsageError(f"`plan` must be a BlockPlan, got {type(plan).__name__}")


def _validate_scale(scale: object) -> None:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise UsageError(f"`scale` must be a number or None, got {type(scale).__name__}")
    if not 0.0 < scale < math.inf:
        raise UsageError(f"`scale` must be positive and finite, got {scale}")


def _validate_plan(
    plan: BlockPlan, device: torch.device, leading: tuple[int, int], queries: int, keys: int
) -> None:
    if plan.device != device:
        raise UsageError(
            f"`plan` must be on the device of q ({device}), got {plan.device}; "
            f"call plan.to(q.device)"
        )
    for name, blocks, tokens in (("q", plan.q, queries), ("k", plan.kv, keys)):
        if blocks.total != tokens:
            raise UsageError(
                f"`{name}` must have the {blocks.total} tokens the plan was made for, got {tokens}"
            )
    for tensor in plan.tensors():
        if tensor.ndim == 1:
            continue  # `order`
        for name, size, wanted in zip(("batch", "heads"), tensor.shape[:2], leading, strict=True):
            if size not in (1, wanted):
                raise UsageError(f"`plan` must have 1 or {wanted} as {name}, got {size}")


def empty_results(
    q: torch.Tensor, plan: BlockPlan, return_lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse to write into; rows outside every query block hold 0 and -inf already.

    Args:
        q: [B, Sq, H, D], whose shape and dtype out has.
        plan: what will be computed.
        return_lse: whether lse is wanted.
        out: what to take where no row is left out; None for a new tensor.
    """
    batch, total, heads, _ = q.shape
    # Only blocks with starts of their own may leave rows out.
    if plan.q.starts is not None:
        out = q.new_zeros(q.shape)
    elif out is None:
        out = q.new_empty(q.shape)
    if not return_lse:
        return out, None
    lse = torch.empty((batch, heads, total), dtype=torch.float32, device=q.device)
    return out, lse if plan.q.starts is None else lse.fill_(float("-inf"))


def flatten(plan: BlockPlan) -> tuple[list[torch.Tensor], list[int]]:
    """Return a plan as arguments of an operator: the tensors that it has, and its sizes.

    The sizes begin with which of the tensors there are that it need not have, in bits.
    """
    q, kv = plan.q, plan.kv
    optional = (q.starts, q.lengths, kv.starts, kv.lengths, plan.row_bits, plan.order)
    present = sum(1 << i for i, tensor in enumerate(optional) if tensor is not None)
    sizes = [present, q.num, q.size, kv.num, kv.size, int(plan.uniform), int(plan.causal)]
    return [plan.indices, plan.counts, *(x for x in optional if x is not None)], sizes


def unflatten(
    q: torch.Tensor, k: torch.Tensor, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> BlockPlan:
    """Return the plan of queries [B, Sq, ...] and keys [B, Sk, ...] that `flatten` took apart."""
    present, q_num, q_size, kv_num, kv_size, uniform, causal = sizes
    indices, counts, *rest = tensors
    left = iter(rest)
    q_starts, q_lengths, kv_starts, kv_lengths, row_bits, order = (
        next(left) if present >> i & 1 else None for i in range(6)
    )
    return BlockPlan(
        indices=indices,
        counts=counts,
        q=Blocks(num=q_num, size=q_size, total=q.shape[1], starts=q_starts, lengths=q_lengths),
        kv=Blocks(num=kv_num, size=kv_size, total=k.shape[1], starts=kv_starts, lengths=kv_lengths),
        row_bits=row_bits,
        order=order,
        uniform=bool(uniform),
        causal=bool(causal),
    )
