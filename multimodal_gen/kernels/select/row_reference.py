"""Rows that choose chunks of keys, in plain PyTorch: any device, any floating dtype.

A score is the product of a query with the mean of a chunk's keys, in fp32, neither scaled nor
normalised. Other chunks are taken by falling score; "mass" is what they count towards `need`:

* topk: every chunk counts 1, and topk - 1 per query are needed;
* threshold: a chunk counts g = (score - least) / (largest - least) over the scope, own chunks
  included, and what is needed is threshold * (sum of g) less the g of own chunks, at least 0. At
  least one chunk is taken, and the one that reaches the need is the last.

Rows are then sorted by their choices, group of chunks by group, and the parts of a row merged. A
group's pattern is the bits of its chunks, the first at bit 0.

Shapes: B batch, S queries or keys, H heads, D head size, N chunks, G groups of them, W words of
bits.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError

Scope = Literal["query_head", "block", "overall", "head_global"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A number of chunks, or a share of the summed scores; a query's own chunk is always chosen.

    Attributes:
        topk: chunks per query, its own included; None to go by `threshold`. In scopes wider than
            `query_head` it is the mean over the scope. Not for the scope `block`.
        threshold: share of the summed scores, in [0, 1], that own and other chunks must reach.
        scope: over what scores compete: the chunks of one query and head (`query_head`), one chunk
            over heads and queries (`block`), one head (`head_global`), or all of a sample
            (`overall`).
    """

    topk: int | None = None
    threshold: float = 0.0
    scope: Scope = "query_head"

    def __post_init__(self) -> None:
        if self.topk is not None and self.topk < 1:
            raise UsageError(f"`topk` must be at least 1, got {self.topk}")
        if self.topk is not None and self.scope == "block":
            raise UsageError(
                "`scope` must be query_head, head_global or overall with `topk`, got block"
            )
        if not 0.0 <= self.threshold <= 1.0:
            raise UsageError(f"`threshold` must lie in [0, 1], got {self.threshold}")

    def keeps_all(self, num_chunks: int) -> bool:
        """Whether every query chooses every one of `num_chunks` chunks, whatever the scores."""
        if num_chunks == 1:
            return True
        return self.threshold == 1.0 if self.topk is None else self.topk >= num_chunks

    def keeps_own_only(self, num_chunks: int) -> bool:
        """Whether no query chooses more than its own of `num_chunks` chunks, whatever the scores.

        A threshold always adds a chunk to each scope, also where own chunks reach it already.
        """
        return num_chunks > 1 and self.topk == 1


_EPSILON = 1e-6
_WORD_BITS = 32
MAX_GROUP = 8

# Halvings of the range of scores; what they do not separate, fp32 hardly does.
_BISECTIONS = 32


def _scores(query: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Return the scores of queries [B, S, H, D] against means [B, Hkv, N, D]: [B, H, S, N]."""
    batch, _, heads, _ = query.shape
    kv_heads = means.shape[1]
    rows = query.transpose(1, 2).to(means.dtype)
    grouped = rows.reshape(batch, kv_heads, heads // kv_heads, *rows.shape[2:])
    scores = grouped @ means.unsqueeze(2).mT
    return scores.reshape(batch, heads, -1, means.shape[2])


def pack_bits(chosen: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., N] into int32 [..., ceil(N / 32)], entry n at bit n % 32."""
    missing = -chosen.shape[-1] % _WORD_BITS
    padded = F.pad(chosen, (0, missing))
    words = padded.view(*chosen.shape[:-1], -1, _WORD_BITS)
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=chosen.device)
    return (words.int() << shifts).sum(-1, dtype=torch.int32)


def bits_of(words: torch.Tensor, num: int) -> torch.Tensor:
    """Return the first `num` bits of int32 [..., words] as bool [..., num]; see `pack_bits`."""
    bit = torch.arange(num, device=words.device)
    return (words[..., bit // _WORD_BITS] >> (bit % _WORD_BITS).int()) & 1 != 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkMeans:
    """Means of the keys of every chunk.

    Attributes:
        means: [B, Hkv, N, D] in fp32 (fp64 for fp64); zero where a chunk has no key.
        counts: keys of every chunk, int32 [B, N], or [1, N] where no key is masked.
        masked: whether keys were masked, so that chunks may be empty.
    """

    means: torch.Tensor
    counts: torch.Tensor
    masked: bool


def select_chunks_reference(
    query: torch.Tensor,
    chunks: ChunkMeans,
    own: torch.Tensor,
    rule: Rule,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what every query chooses; see `rows.select_chunks`.

    Args:
        query: [B, S, H, D].
        chunks: what they are scored against.
        own: int32 [S].
        rule: how to choose.
        mask: bool [B, S], queries that count; None for all.

    Returns:
        bool [B, H, S, N].
    """
    scores = _scores(query, chunks.means)
    num_chunks = scores.shape[-1]
    is_own = own.long().unsqueeze(-1) == torch.arange(num_chunks, device=own.device)
    usable = torch.ones_like(is_own)[None, None]
    if chunks.masked:
        usable = ((chunks.counts > 0)[:, None, None, :] | is_own).expand(-1, 1, -1, -1)
    if mask is not None:
        usable = usable & mask[:, None, :, None]
    take = _take_sorted if rule.scope == "query_head" else _take_above
    return is_own | take(_Entries(scores, is_own, usable, rule))


class _Entries(NamedTuple):
    """Scores [B, H, S, N], which of them are of own chunks, which may be chosen, and how."""

    scores: torch.Tensor
    is_own: torch.Tensor
    usable: torch.Tensor
    rule: Rule


def _take_sorted(entries: _Entries) -> torch.Tensor:
    """Choose per query by sorting; equal scores go to the lowest chunk."""
    scores, is_own, usable, rule = entries
    others = usable & ~is_own
    mass, need = _mass(entries, (-1,))
    ranked = scores.masked_fill(~others, float("-inf"))
    order = ranked.sort(stable=True, dim=-1, descending=True).indices
    counted = torch.where(others, mass, 0.0).gather(-1, order)
    before = counted.cumsum(-1) - counted
    taken = before < need
    if rule.topk is None:
        taken[..., 0] = True
    return torch.zeros_like(taken).scatter_(-1, order, taken) & others


def _mass(entries: _Entries, scope: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what every entry counts, like `scores`, and the need of every scope, to broadcast."""
    scores, is_own, usable, rule = entries
    if rule.topk is not None:
        mass = torch.ones_like(scores)
        queries = (usable & is_own).expand(scores.shape).sum(scope, keepdim=True)
        return mass, (queries * (rule.topk - 1)).to(scores.dtype)
    least = scores.masked_fill(~usable, float("inf")).amin(scope, keepdim=True)
    largest = scores.masked_fill(~usable, float("-inf")).amax(scope, keepdim=True)
    spread = largest - least
    spread = torch.where(spread <= _EPSILON, 1.0, spread)
    mass = torch.where(usable, (scores - least) / spread, 0.0)
    # Sums over a scope can have more terms than fp32 has digits.
    total = mass.sum(scope, keepdim=True, dtype=torch.float64)
    own_mass = torch.where(is_own, mass, 0.0).sum(scope, keepdim=True, dtype=torch.float64)
    share = (rule.threshold - own_mass / (total + _EPSILON)).clamp_min(0.0)
    return mass, (share * (total + _EPSILON)).to(scores.dtype)


def _take_above(entries: _Entries) -> torch.Tensor:
    """Choose over wider scopes by bisection of the least score taken; equal scores stay together.

    The interval [low, high) always holds the crossing: what lies from `low` on reaches the need,
    or is everything, and what lies from `high` on does not.
    """
    scores, is_own, usable, rule = entries
    others = usable & ~is_own
    scope = {"block": (1, 2), "head_global": (2, 3), "overall": (1, 2, 3)}[rule.scope]
    mass, need = _mass(entries, scope)
    ranked = scores.masked_fill(~others, float("-inf"))
    low = scores.masked_fill(~others, float("inf")).amin(scope, keepdim=True)
    top = ranked.amax(scope, keepdim=True)
    high = torch.full_like(top, float("inf"))
    ceiling = top
    for _ in range(_BISECTIONS):
        middle = low + (ceiling - low) * 0.5
        reached = torch.where(ranked >= middle, mass, 0.0).sum(
            scope, keepdim=True, dtype=torch.float64
        )
        enough = reached >= need
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
        ceiling = torch.minimum(high, top)
    if rule.topk == 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    return (ranked >= torch.minimum(low, top)) & others


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroups:
    """Chunks cut in groups of neighbours.

    Attributes:
        num_chunks: N.
        size: chunks of a group, at most 8; the last group may have fewer.
    """

    num_chunks: int
    size: int

    def __post_init__(self) -> None:
        if self.num_chunks < 1 or not 1 <= self.size <= MAX_GROUP:
            raise UsageError(
                f"`size` must lie in [1, {MAX_GROUP}] and `num_chunks` be positive, got "
                f"{self.size} and {self.num_chunks}"
            )

    @property
    def num(self) -> int:
        """Number of groups."""
        return -(-self.num_chunks // self.size)


class SortedRows(NamedTuple):
    """The rows of every group in an order where neighbours choose alike.

    The G groups of a head are heads of their own here: head h and group g become h * G + g. A
    group's rows that are in use come first. S' is S rounded up to whole blocks of rows.

    Attributes:
        bits: int32 [B, H * G, S'], the chunks of its group that each row chose, the first at bit 0,
            and `extra` in the first group; arbitrary behind the rows in use.
        indices: int32 [B, H * G, S' / block, bits], the bits that any row of a block has.
        counts: int32 [B, H * G, S' / block].
        lengths: int32 [B, H * G, S' / block], rows in use of each block.
        position: int32 [B, H, G, S], where each row is.
        used: int32 [B, H, G], how many rows are in use.
    """

    bits: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    position: torch.Tensor
    used: torch.Tensor

    @property
    def room(self) -> int:
        """S'."""
        return self.bits.shape[2]

    def of_heads(self, heads: slice) -> "SortedRows":
        """Return the same of some heads."""
        if heads == slice(0, self.position.shape[1]):
            return self
        groups = self.position.shape[2]
        parts = slice(heads.start * groups, heads.stop * groups)
        bits, indices, counts, lengths = (x[:, parts] for x in self[:4])
        position, used = (x[:, heads] for x in self[4:])
        return SortedRows(bits, indices, counts, lengths, position, used)


def sort_rows_reference(
    bits: torch.Tensor, groups: ChunkGroups, *, block: int, extra: bool
) -> SortedRows:
    """Sort the rows of every group by their patterns, equal ones by their place; see `rows`."""
    patterns = _patterns(bits, groups)
    tokens = patterns.shape[-1]
    order = sort_keys(patterns, groups.size).argsort(stable=True, dim=-1)
    position = inverse_of(order).int()
    used = (patterns != 0).sum(-1, dtype=torch.int32)
    moved = patterns.gather(-1, order)
    if extra:
        used[:, :, 0] = tokens
        moved[:, :, 0] |= 1 << groups.size
    moved = F.pad(moved, (0, -tokens % block)).flatten(1, 2)
    lists = _block_lists(moved, used.flatten(1), block, groups.size + extra)
    return SortedRows(moved, *lists, position, used)


def _patterns(bits: torch.Tensor, groups: ChunkGroups) -> torch.Tensor:
    """Return the pattern of every row, of bits [B, H, S, W], in every group: int32 [B, H, G, S]."""
    chosen = bits_of(bits, groups.num_chunks).long()
    chosen = F.pad(chosen, (0, groups.num * groups.size - groups.num_chunks))
    chosen = chosen.view(*bits.shape[:-1], groups.num, groups.size)
    places = torch.arange(groups.size, device=bits.device)
    patterns: torch.Tensor = (chosen << places).sum(-1)
    return patterns.transpose(2, 3).int()


def sort_keys(patterns: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rank of each pattern in an order where neighbours differ in one bit.

    That is its rank in Gray's code, turned by one so that the empty pattern comes last.

    Args:
        patterns: int32.
        size: bits of a pattern, at most 8.
    """
    rank = patterns
    for shift in (1, 2, 4):
        rank = rank ^ (rank >> shift)
    turned: torch.Tensor = (rank - 1) % 2**size
    return turned


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """Return where every entry of permutations [..., S] is, int64."""
    places = torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    return torch.empty_like(places).scatter_(-1, order.long(), places)


def _block_lists(
    bits: torch.Tensor, used: torch.Tensor, block: int, num_bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bits that any row of each block has, as lists.

    Args:
        bits: int32 [B, H, S], S a multiple of `block`.
        used: int32 [B, H], rows in use.
        block: rows of a block.
        num_bits: how many bits there are.

    Returns:
        int32 [B, H, S / block, num_bits], increasing as far as counted; the counts; and how many
        rows of each block are in use.
    """
    blocks = bits.view(*bits.shape[:-1], -1, block)
    places = torch.arange(num_bits, device=bits.device)
    chosen = ((blocks.unsqueeze(-1) >> places) & 1).bool().any(-2)
    listed = torch.where(chosen, places, num_bits).sort(-1).values
    counts = chosen.sum(-1, dtype=torch.int32)
    starts = torch.arange(0, bits.shape[-1], block, device=bits.device)
    lengths = (used.unsqueeze(-1) - starts).clamp(0, block).int()
    return torch.where(listed < num_bits, listed, 0).int(), counts, lengths


def move_rows_reference(query: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Put queries [B, S, H, D] in the order of every group, zeros behind: [B, S', H * G, D]."""
    order = inverse_of(rows.position)
    q_rows = query.transpose(1, 2).unsqueeze(2).expand(-1, -1, order.shape[2], -1, -1)
    moved = q_rows.gather(3, order.unsqueeze(-1).expand(*order.shape, query.shape[3]))
    moved = F.pad(moved, (0, 0, 0, rows.room - query.shape[1]))
    return moved.flatten(1, 2).transpose(1, 2)


def merge_parts_reference(parts: torch.Tensor, lse: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Return every row's attention from that of its parts, summed in fp32 and rounded once.

    Args:
        parts: [B, S', H * G, D].
        lse: fp32 [B, H * G, S'], natural logarithm.
        rows: the order.

    Returns:
        [B, S, H, D] in the dtype of `parts`; zero where a row has no key at all.
    """
    batch, heads, groups, _ = rows.position.shape
    at = rows.position.long()
    compute = torch.promote_types(parts.dtype, torch.float32)
    parts = parts.transpose(1, 2).reshape(batch, heads, groups, *parts.shape[1::2])
    moved = parts.gather(3, at.unsqueeze(-1).expand(*at.shape, parts.shape[-1])).to(compute)
    weights = lse_in_order(lse, rows)
    nothing = (weights == -torch.inf).all(2, keepdim=True)
    weights = weights.masked_fill(nothing, 0.0).softmax(2).masked_fill(nothing, 0.0)
    moved = moved.masked_fill((weights == 0).unsqueeze(-1), 0.0)
    out: torch.Tensor = (moved * weights.unsqueeze(-1)).sum(2)
    return out.transpose(1, 2).to(parts.dtype)


def lse_in_order(lse: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Return the lse [B, H * G, S'] of every row's parts, [B, H, G, S]; -inf for those unused."""
    found = lse.view(*rows.position.shape[:3], -1).gather(3, rows.position.long())
    return found.masked_fill(rows.position >= rows.used.unsqueeze(-1), -torch.inf)
