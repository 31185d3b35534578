"""How chunks are chosen from their scores."""

from dataclasses import dataclass
from typing import Literal

from multimodal_gen.errors import UsageError

__all__ = ["Rule", "Scope"]

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
