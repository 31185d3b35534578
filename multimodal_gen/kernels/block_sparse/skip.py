"""Leaving out, inside a pass over keys, the products that cannot count for much.

A kernel goes through the keys of a tile of rows in steps. Where every score of a step lies far
below the largest one that its row has seen so far, for every row of the tile, the step counts for
nothing: neither its weights nor their product with V are added.
"""

import math
from dataclasses import dataclass

import torch

from multimodal_gen.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Skip:
    """How far below, and where it is counted.

    Attributes:
        below: decibels, positive: a step is left out where all of its weights are at most
            10^(-below / 10) of the largest so far; 30 is a thousandth.
        counts: int64 [2] on the device of the tensors: steps left out, and all of them; kernels
            add to it. None counts nothing.

    Raises:
        UsageError: `below` is no positive number.
    """

    below: float
    counts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.below) and self.below > 0):
            raise UsageError(f"`below` must be a positive number of decibels, got {self.below}")

    @property
    def nats(self) -> float:
        """The same as a difference of scores."""
        return self.below * math.log(10.0) / 10.0

    def counts_on(self, device: torch.device) -> torch.Tensor:
        """Return where steps are counted, a new tensor where `counts` is None."""
        if self.counts is not None:
            return self.counts
        return torch.zeros(2, dtype=torch.int64, device=device)

    @property
    def octaves(self) -> float:
        """The same as a difference of scores to the base of 2."""
        return self.nats / math.log(2.0)
