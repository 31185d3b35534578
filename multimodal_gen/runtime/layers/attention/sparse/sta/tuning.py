"""From what searches found to a strategy: the best window of every head.

Within a budget, that is the multiple-choice knapsack problem. A price per unit of cost splits it
into one small decision per item; the least price that keeps to the budget is found by bisection.
What that leaves of the budget is spent exactly, by dynamic programming over the items whose
decision the price does not settle. The price also bounds the loss of every assignment from below
(Lagrange duality), which tells those items, and proves the result.

T steps, N layers, H heads, I items, C choices: candidates.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.sta.search import (
    NEGATIVE,
    POSITIVE,
    SearchFile,
    find_searches,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.strategy import (
    Strategy,
    StrategyRecord,
    load_strategy,
)
from multimodal_gen.runtime.layers.attention.sparse.sta.windows import Window, is_full, tile_count

__all__ = ["Assignment", "Tuned", "assign", "tune", "tune_files", "tuned_strategy"]

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A tuned strategy.

    Attributes:
        strategy: a window per step, layer and head.
        tiles: the grid of tiles.
        density: share of tiles kept over all steps, the dense ones included.
        loss: the heads' mean squared differences from full attention, added up.
        bound: no strategy of that density, from these windows, has a smaller loss; None without a
            target density.
    """

    strategy: Strategy
    tiles: Window
    density: float
    loss: float
    bound: float | None = None


def tune_files(
    paths: Sequence[Path], *, skip_time_steps: int, target_density: float | None = None
) -> Tuned:
    """Tune on search files; see `tune`.

    Args:
        paths: the files, of both branches of guidance where both are to count.
        skip_time_steps: first denoising steps that stay dense.
        target_density: see `tune`.

    Raises:
        ConfigError: a file cannot be read, or files do not fit each other or the settings.
    """
    searches = {f"{path.parent.name}/{path.name}": SearchFile.read(path) for path in paths}
    return tune(searches, skip_time_steps=skip_time_steps, target_density=target_density)


def tune(
    searches: Mapping[str, SearchFile],
    *,
    skip_time_steps: int,
    target_density: float | None = None,
) -> Tuned:
    """Choose a window for every head, by its mean squared loss over all searches.

    Args:
        searches: what was found, by a name for messages.
        skip_time_steps: first denoising steps that stay dense.
        target_density: largest share of tiles kept, over all steps, layers and heads and the
            dense steps too; the windows, full ones among them, are then those with the least
            total loss. None: each head takes its best window that is not full.

    Raises:
        ConfigError: searches do not fit each other, all steps would be dense, or the density
            cannot be reached.
    """
    losses, windows, made_for = _mean(searches)
    tiles = made_for.tiles
    assert tiles is not None, "every search tells its grid"
    num_steps = losses.shape[1]
    if skip_time_steps >= num_steps:
        raise ConfigError(
            f"`skip_time_steps` must be below the {num_steps} steps of the searches, got "
            f"{skip_time_steps}: every step would stay dense"
        )
    sparse = losses[:, skip_time_steps:].flatten(1).T  # [(T - skip) * N * H, C]
    if target_density is None:
        windows, costs, sparse = _sorted_by_cost(windows, tiles, sparse)
        least = sparse.min(1)
        choices, loss, bound = least.indices, float(least.values.sum()), None
    else:
        windows = (*windows, tiles)
        costs = [tile_count(window, tiles) for window in windows]
        sparse = torch.cat((sparse, sparse.new_zeros(len(sparse), 1)), dim=1)
        budget = _budget(losses, costs, skip_time_steps, target_density)
        found = assign(sparse, costs, budget)
        choices, loss, bound = found.choices, found.loss, found.bound
    chosen = choices.view(num_steps - skip_time_steps, *losses.shape[2:])
    strategy = replace(
        _strategy(chosen, windows, tiles, skip_time_steps),
        made_for=made_for,
    )
    shares = strategy.density(tiles)
    density = sum(sum(step) / len(step) for step in shares) / len(shares)
    return Tuned(strategy=strategy, tiles=tiles, density=density, loss=loss, bound=bound)


def _mean(
    searches: Mapping[str, SearchFile],
) -> tuple[torch.Tensor, tuple[Window, ...], StrategyRecord]:
    """Return the mean loss [C, T, N, H] of the windows that are not full, and the grid."""
    (first_name, first), *others = searches.items()
    for name, other in others:
        for what, mine, its in (
            ("tiles", first.tiles, other.tiles),
            ("tile_size", first.tile_size, other.tile_size),
            ("windows", set(first.losses.windows), set(other.losses.windows)),
            (
                "steps, layers and heads",
                tuple(first.losses.l2.shape[1:]),
                tuple(other.losses.l2.shape[1:]),
            ),
        ):
            if mine != its:
                raise ConfigError(
                    f"searches must have the same {what}, got {_text(mine)} in {first_name} and "
                    f"{_text(its)} in {name}"
                )
    windows = tuple(w for w in first.losses.windows if not is_full(w, first.tiles))
    if not windows:
        raise ConfigError(f"{first_name} must have losses of a window that is not full, got none")
    total = torch.zeros(len(windows), *first.losses.l2.shape[1:], dtype=torch.float64)
    for search in searches.values():
        total += search.losses.l2[[search.losses.windows.index(window) for window in windows]]
    made_for = StrategyRecord(tiles=first.tiles, tile_size=first.tile_size)
    return total / len(searches), windows, made_for


def _sorted_by_cost(
    windows: tuple[Window, ...], tiles: Window, losses: torch.Tensor
) -> tuple[tuple[Window, ...], list[int], torch.Tensor]:
    """Put sparse windows first, so that ties go to them."""
    order = sorted(range(len(windows)), key=lambda i: tile_count(windows[i], tiles))
    ordered = tuple(windows[i] for i in order)
    return ordered, [tile_count(window, tiles) for window in ordered], losses[:, order]


def _budget(losses: torch.Tensor, costs: list[int], skip: int, target: float) -> int:
    """Return how many tiles the steps after the dense ones may keep."""
    _, num_steps, *rest = losses.shape
    per_step = rest[0] * rest[1]
    full = costs[-1]
    dense = skip * per_step * full
    # The tolerance undoes the rounding of a target such as 0.1 + 0.2.
    budget = int(target * num_steps * per_step * full * (1 + 1e-12)) - dense
    least = (num_steps - skip) * per_step * min(costs)
    if budget < least:
        reachable = (dense + least) / (num_steps * per_step * full)
        raise ConfigError(
            f"`target_density` must be at least {reachable:.4g}, which the sparsest window and "
            f"{skip} dense steps of {num_steps} leave, got {target}; skip fewer steps or search "
            f"sparser windows"
        )
    return budget


def _strategy(
    chosen: torch.Tensor, windows: tuple[Window, ...], tiles: Window, skip: int
) -> Strategy:
    _, layers, heads = chosen.shape
    dense = (((tiles,) * heads,) * layers,) * skip
    sparse = tuple(
        tuple(tuple(windows[choice] for choice in layer) for layer in step)
        for step in chosen.tolist()
    )
    return Strategy(windows=(*dense, *sparse), name="tuned mask strategy")


def _text(value: object) -> str:
    return ", ".join(map(str, sorted(value))) if isinstance(value, set) else str(value)


def tuned_strategy(
    searches: str, path: str, *, both: bool, skip_time_steps: int, target_density: float | None
) -> Strategy:
    """Tune on the searches in a folder, write the strategy and return it as read back.

    However many layers ask, it is done once, until a search changes.

    Args:
        searches: folder of the searches.
        path: the strategy file to write.
        both: whether to tune on both branches of guidance.
        skip_time_steps: first denoising steps that stay dense.
        target_density: see `tune`.

    Raises:
        ConfigError: see `tune_files`, or the file cannot be written.
    """
    folder = Path(searches).expanduser()
    branches = (POSITIVE, NEGATIVE) if both else (POSITIVE,)
    files = tuple(file for branch in branches for file in find_searches(folder, branch))
    versions = tuple(file.stat().st_mtime_ns for file in files)
    _tuned(files, versions, Path(path).expanduser(), skip_time_steps, target_density)
    return load_strategy(path)


@lru_cache(maxsize=4)
def _tuned(
    files: tuple[Path, ...],
    versions: tuple[int, ...],
    path: Path,
    skip_time_steps: int,
    target_density: float | None,
) -> None:
    del versions
    tuned = tune_files(files, skip_time_steps=skip_time_steps, target_density=target_density)
    tuned.strategy.write(path)
    logger.info("tuned %s to a density of %.3f of %d searches", path, tuned.density, len(files))
