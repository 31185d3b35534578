"""Gives every item one of several choices so that the total loss is least within a budget.

This is the multiple-choice knapsack problem. A price per unit of cost splits it into one small
decision per item; the least price that keeps to the budget is found by bisection. What that leaves
of the budget is spent exactly, by dynamic programming over the items whose decision the price does
not settle. The price also bounds the loss of every assignment from below (Lagrange duality), which
tells those items, and proves the result.

I items, C choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Assignment", "assign"]

# Entries of the table of the dynamic programme, one byte each.
_TABLE = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """One choice per item.

    Attributes:
        choices: int64 [I].
        loss: their total loss.
        cost: their total cost, at most the budget.
        bound: no assignment within the budget has a smaller loss.
    """

    choices: torch.Tensor
    loss: float
    cost: int
    bound: float


def assign(losses: torch.Tensor, costs: Sequence[int], budget: int) -> Assignment:
    """Return the assignment of least loss whose cost keeps to the budget.

    It is the best there is, and its loss the bound, unless so many items are nearly tied that the
    table of the dynamic programme would exceed 64 MiB; then `bound` tells how far from the best
    it can be at most.

    Args:
        losses: fp64 [I, C], loss of each choice for each item.
        costs: cost of each choice, the same for all items.
        budget: largest total cost, at least I times the smallest cost.
    """
    cheap_first = sorted(range(len(costs)), key=lambda choice: costs[choice])
    ordered = losses[:, cheap_first]
    cost = torch.tensor([costs[choice] for choice in cheap_first], dtype=torch.int64)
    assert len(losses) * int(cost[0]) <= budget, "the caller checks that the budget can be kept"
    problem = _Problem(losses=ordered, cost=cost, budget=budget)
    choices = problem.solve()
    loss, bound = problem.loss(choices), problem.bound
    return Assignment(
        choices=torch.tensor(cheap_first)[choices],
        loss=loss,
        cost=problem.spent(choices),
        bound=min(bound, loss),
    )


class _Problem:
    """The problem with its choices in order of their cost."""

    def __init__(self, *, losses: torch.Tensor, cost: torch.Tensor, budget: int) -> None:
        self.bound = -math.inf
        self._losses = losses
        self._cost = cost
        self._priced = cost.double()  # a Python float times integers would be fp32
        self._budget = budget

    def loss(self, choices: torch.Tensor) -> float:
        """Return the total loss."""
        return float(self._losses.gather(1, choices[:, None]).sum())

    def spent(self, choices: torch.Tensor) -> int:
        """Return the total cost."""
        return int(self._cost[choices].sum())

    def solve(self) -> torch.Tensor:
        """Return the best choices, int64 [I], and set `bound`."""
        free = self._at_price(0.0)
        if self.spent(free) <= self._budget:
            self.bound = self.loss(free)
            return free
        price, choices = self._price(free)
        scores = self._losses + price * self._priced
        self.bound = float(scores.amin(1).sum()) - price * self._budget
        # How much a choice adds to the bound: those that lift it above what is found are out.
        regret = scores - scores.amin(1, keepdim=True)
        open_choices = regret < self.loss(choices) - self.bound
        open_choices.scatter_(1, choices[:, None], True)
        core = (open_choices.sum(1) > 1).nonzero().flatten()
        core, left_out = self._affordable(core, regret)
        better = self._exact(choices, core)
        if self.loss(better) < self.loss(choices):
            choices = better
        if not left_out:
            self.bound = self.loss(choices)
        return choices

    def _at_price(self, price: float) -> torch.Tensor:
        # Ties go to the first, that is the cheapest, choice.
        return (self._losses + price * self._priced).argmin(1)

    def _price(self, free: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return the least price that keeps to the budget, and what it makes of the budget."""
        low, high = 0.0, float(self._losses.max() - self._losses.min()) * 2 + 1e-300
        over, within = free, self._at_price(high)
        while low < (middle := (low + high) / 2) < high:
            choices = self._at_price(middle)
            if self.spent(choices) <= self._budget:
                high, within = middle, choices
            else:
                low, over = middle, choices
        # At the price itself both are equally good: move to the dearer ones while they fit.
        room = self._budget - self.spent(within)
        choices = within.clone()
        for item in (over != within).nonzero().flatten().tolist():
            more = int(self._cost[over[item]] - self._cost[within[item]])
            if 0 < more <= room:
                choices[item] = over[item]
                room -= more
        return high, choices

    def _affordable(self, core: torch.Tensor, regret: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the most doubtful items that the table has room for, and how many are left out."""
        doubt = regret[core].topk(2, dim=1, largest=False).values[:, 1]
        core = core[doubt.argsort(stable=True)]
        span = int(self._cost[-1] - self._cost[0]) // self._unit()
        kept = core[: max(1, math.isqrt(_TABLE // max(span, 1)))]
        return kept, len(core) - len(kept)

    def _unit(self) -> int:
        return math.gcd(*(self._cost - self._cost[0]).tolist()) or 1

    def _exact(self, choices: torch.Tensor, core: torch.Tensor) -> torch.Tensor:
        """Return the best choices of the items of `core`, those of the others being given."""
        extra = ((self._cost - self._cost[0]) // self._unit()).tolist()
        room = self._budget - self.spent(choices) + int(self._cost[choices[core]].sum())
        room = (room - len(core) * int(self._cost[0])) // self._unit()
        room = min(room, len(core) * extra[-1])
        best = torch.zeros(room + 1, dtype=torch.float64)  # least loss by units spent at most
        table = torch.zeros(len(core), room + 1, dtype=torch.uint8)
        for row, item in enumerate(core.tolist()):
            found = torch.full_like(best, math.inf)
            for choice, units in enumerate(extra):
                if units > room:
                    break
                loss = best[: room + 1 - units] + self._losses[item, choice]
                better = loss < found[units:]
                found[units:] = torch.where(better, loss, found[units:])
                table[row, units:][better] = choice
            best = found
        solved = choices.clone()
        for row in range(len(core) - 1, -1, -1):
            choice = int(table[row, room])
            solved[core[row]] = choice
            room -= extra[choice]
        return solved
