"""The choice of chunks in plain PyTorch: any device, any floating dtype.

A score is the product of a query with the mean of a chunk's keys, in fp32, neither scaled nor
normalised. Other chunks are taken by falling score; "mass" is what they count towards `need`:

* topk: every chunk counts 1, and topk - 1 per query are needed;
* threshold: a chunk counts g = (score - least) / (largest - least) over the scope, own chunks
  included, and what is needed is threshold * (sum of g) less the g of own chunks, at least 0. At
  least one chunk is taken, and the one that reaches the need is the last.

Shapes: B batch, S queries or keys, H heads, D head size, N chunks.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from multimodal_gen.errors import UsageError

__all__ = [
    "EPSILON",
    "WORD_BITS",
    "Rule",
    "Scope",
    "chunk_means_reference",
    "chunk_scores",
    "pack_bits",
    "select_chunks_reference",
]

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


EPSILON = 1e-6
WORD_BITS = 32

# Halvings of the range of scores; what they do not separate, fp32 hardly does.
_BISECTIONS = 32


def chunk_means_reference(
    key: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
    keep: torch.Tensor | None,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return the mean of every chunk's kept keys, zero where there are none.

    Args:
        key: [B, S, H, D].
        starts: int32 [N].
        lengths: int32 [N].
        index: int32 [S'], or None.
        keep: bool [B, S], or None.
        counts: kept keys, int32 [B, N].

    Returns:
        [B, H, N, D] in fp32 (fp64 for fp64).
    """
    compute = torch.promote_types(key.dtype, torch.float32)
    batch, _, heads, head_size = key.shape
    means = key.new_zeros((batch, heads, len(starts), head_size), dtype=compute)
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        tokens = torch.arange(start, start + length, device=key.device)
        tokens = tokens if index is None else index[tokens].long()
        chunk = key[:, tokens].to(compute)
        if keep is not None:
            chunk = chunk.masked_fill(~keep[:, tokens, None, None], 0.0)
        means[:, :, n] = chunk.sum(1) / counts[:, n].clamp_min(1).view(-1, 1, 1)
    return means


def chunk_scores(query: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Return the scores of queries [B, S, H, D] against means [B, Hkv, N, D]: [B, H, S, N]."""
    batch, _, heads, _ = query.shape
    kv_heads = means.shape[1]
    rows = query.transpose(1, 2).to(means.dtype)
    grouped = rows.reshape(batch, kv_heads, heads // kv_heads, *rows.shape[2:])
    scores = grouped @ means.unsqueeze(2).mT
    return scores.reshape(batch, heads, -1, means.shape[2])


def pack_bits(chosen: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., N] into int32 [..., ceil(N / 32)], entry n at bit n % 32."""
    missing = -chosen.shape[-1] % WORD_BITS
    padded = torch.nn.functional.pad(chosen, (0, missing))
    words = padded.view(*chosen.shape[:-1], -1, WORD_BITS)
    shifts = torch.arange(WORD_BITS, device=chosen.device)
    packed = (words.long() << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def select_chunks_reference(
    query: torch.Tensor,
    means: torch.Tensor,
    own: torch.Tensor,
    rule: Rule,
    real: torch.Tensor | None,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what every query chooses; see `api.select_chunks`.

    Args:
        query: [B, S, H, D].
        means: [B, Hkv, N, D].
        own: int32 [S].
        rule: how to choose.
        real: bool [B, N], chunks that hold keys; None for all.
        keep: bool [B, S], queries that count; None for all.

    Returns:
        bool [B, H, S, N].
    """
    scores = chunk_scores(query, means)
    num_chunks = scores.shape[-1]
    is_own = own.long().unsqueeze(-1) == torch.arange(num_chunks, device=own.device)
    usable = torch.ones_like(is_own)[None, None]
    if real is not None:
        usable = (real[:, None, None, :] | is_own).expand(-1, 1, -1, -1)
    if keep is not None:
        usable = usable & keep[:, None, :, None]
    others = usable & ~is_own
    if rule.scope == "query_head":
        return is_own | _take_sorted(scores, is_own, others, usable, rule)
    return is_own | _take_above(scores, is_own, others, usable, rule)


def _take_sorted(
    scores: torch.Tensor,
    is_own: torch.Tensor,
    others: torch.Tensor,
    usable: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """Choose per query by sorting; equal scores go to the lowest chunk."""
    mass, need = _mass(scores, is_own, usable, rule, (-1,))
    ranked = scores.masked_fill(~others, float("-inf"))
    order = ranked.sort(stable=True, dim=-1, descending=True).indices
    counted = torch.where(others, mass, 0.0).gather(-1, order)
    before = counted.cumsum(-1) - counted
    taken = before < need
    if rule.topk is None:
        taken[..., 0] = True
    return torch.zeros_like(taken).scatter_(-1, order, taken) & others


def _mass(
    scores: torch.Tensor,
    is_own: torch.Tensor,
    usable: torch.Tensor,
    rule: Rule,
    scope: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what every entry counts, like `scores`, and the need of every scope, to broadcast."""
    if rule.topk is not None:
        mass = torch.ones_like(scores)
        queries = (usable & is_own).expand(scores.shape).sum(scope, keepdim=True)
        return mass, (queries * (rule.topk - 1)).to(scores.dtype)
    least = scores.masked_fill(~usable, float("inf")).amin(scope, keepdim=True)
    largest = scores.masked_fill(~usable, float("-inf")).amax(scope, keepdim=True)
    spread = largest - least
    spread = torch.where(spread <= EPSILON, 1.0, spread)
    mass = torch.where(usable, (scores - least) / spread, 0.0)
    # Sums over a scope can have more terms than fp32 has digits.
    total = mass.sum(scope, keepdim=True, dtype=torch.float64)
    own_mass = torch.where(is_own, mass, 0.0).sum(scope, keepdim=True, dtype=torch.float64)
    share = (rule.threshold - own_mass / (total + EPSILON)).clamp_min(0.0)
    return mass, (share * (total + EPSILON)).to(scores.dtype)


def _take_above(
    scores: torch.Tensor,
    is_own: torch.Tensor,
    others: torch.Tensor,
    usable: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """Choose over wider scopes by bisection of the least score taken; equal scores stay together.

    The interval [low, high) always holds the crossing: what lies from `low` on reaches the need,
    or is everything, and what lies from `high` on does not.
    """
    scope = {"block": (1, 2), "head_global": (2, 3), "overall": (1, 2, 3)}[rule.scope]
    mass, need = _mass(scores, is_own, usable, rule, scope)
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
