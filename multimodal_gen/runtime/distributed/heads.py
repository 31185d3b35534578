"""How heads are dealt out to the ranks of a Ulysses group: as evenly as they can be.

Heads need not divide. Query heads differ by one at most between ranks, because they are what the
time goes by; a rank gets every key head that its query heads read, so a key head may be on several.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from multimodal_gen.errors import UsageError

__all__ = ["HeadShares", "Span", "share_heads"]

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShares:
    """The heads of every rank, as half-open spans.

    Attributes:
        num_heads: query heads in all.
        num_kv_heads: key and value heads in all.
        queries: span of query heads of each rank.
        keys: span of key heads of each rank.
    """

    num_heads: int
    num_kv_heads: int
    queries: tuple[Span, ...]
    keys: tuple[Span, ...]

    def arrange_keys(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the key or value heads of a rank as its query heads read them in equal groups.

        Args:
            x: [B, S, h, D], the heads in `keys[rank]`.
            rank: whose they are.

        Returns:
            `x` where query heads of the rank divide into equal groups, one per key head; else
            one key head per query head.
        """
        first, stop = self.queries[rank]
        group = self.num_heads // self.num_kv_heads
        read = [head // group - self.keys[rank][0] for head in range(first, stop)]
        each = len(read) // max(1, x.shape[2])
        if read == [i // max(1, each) for i in range(len(read))]:
            return x
        return x.index_select(2, torch.tensor(read, device=x.device))

    def in_chunks(self, count: int) -> tuple["HeadShares", ...]:
        """Return the heads of every rank in `count` runs, each as even as can be.

        Args:
            count: at most the query heads of any rank.
        """
        return _in_chunks(self, count)


@lru_cache(maxsize=256)
def share_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadShares:
    """Deal heads out to `num_ranks` ranks.

    Raises:
        UsageError: there are fewer heads than ranks.
    """
    if num_heads < num_ranks:
        raise UsageError(
            f"a layer must have a head for each of the {num_ranks} ranks of a Ulysses group, got "
            f"{num_heads} heads; use --ulysses-degree {num_heads} or less, and a ring for the rest"
        )
    group = num_heads // num_kv_heads
    queries = _runs(0, num_heads, num_ranks)
    keys = tuple((start // group, (stop - 1) // group + 1) for start, stop in queries)
    return HeadShares(num_heads=num_heads, num_kv_heads=num_kv_heads, queries=queries, keys=keys)


@lru_cache(maxsize=256)
def _in_chunks(shares: HeadShares, count: int) -> tuple[HeadShares, ...]:
    group = shares.num_heads // shares.num_kv_heads
    runs = [_runs(start, stop, count) for start, stop in shares.queries]
    return tuple(
        HeadShares(
            num_heads=shares.num_heads,
            num_kv_heads=shares.num_kv_heads,
            queries=queries,
            keys=tuple((start // group, (stop - 1) // group + 1) for start, stop in queries),
        )
        for queries in zip(*runs, strict=True)
    )


def _runs(start: int, stop: int, count: int) -> tuple[Span, ...]:
    """Cut a span into `count` spans whose sizes differ by one at most."""
    size, larger = divmod(stop - start, count)
    return tuple(pairwise(start + i * size + min(i, larger) for i in range(count + 1)))
