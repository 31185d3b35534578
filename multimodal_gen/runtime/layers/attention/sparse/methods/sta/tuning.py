"""From what searches found to a strategy: the best window of every head.

Within a budget, that is the multiple-choice knapsack problem. A price per unit of cost (a Lagrange
multiplier) splits it into one small decision per item; the least price that keeps to the budget is
found by bisection, and what that leaves of the budget is spent greedily. The price also bounds the
loss of every assignment from below.

T steps, N layers, H heads, I items, C choices: candidates.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    SearchFile,
    find_searches,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    Strategy,
    StrategyRecord,
    load_strategy,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    Window,
    is_full,
    tile_count,
)

__all__ = ["Assignment", "Tuned", "assign", "tune", "tune_files", "tuned_strategy"]

logger = logging.getLogger(__name__)


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
    """Return an assignment of little loss whose cost keeps to the budget.

    Its loss exceeds the bound by less than what one item can gain. With the tens of thousands of
    items of a search that is next to nothing, and `bound` tells how much at most.

    Args:
        losses: fp64 [I, C], loss of each choice for each item.
        costs: cost of each choice, the same for all items.
        budget: largest total cost, at least I times the smallest cost.
    """
    # Ties go to the first, that is the cheapest, choice.
    cheap_first = sorted(range(len(costs)), key=lambda choice: costs[choice])
    ordered = losses[:, cheap_first]
    cost = torch.tensor([costs[choice] for choice in cheap_first], dtype=torch.float64)
    assert len(losses) * float(cost[0]) <= budget, "the caller checks that the budget can be kept"

    def at_price(price: float) -> torch.Tensor:
        return (ordered + price * cost).argmin(1)

    low, price = 0.0, 0.0
    if float(cost[at_price(price)].sum()) > budget:
        price = float(losses.max() - losses.min()) * 2 + 1e-300
        while low < (middle := (low + price) / 2) < price:
            if float(cost[at_price(middle)].sum()) > budget:
                low = middle
            else:
                price = middle
    choices = _spend_rest(at_price(price), ordered, cost, budget)
    loss = float(ordered.gather(1, choices[:, None]).sum())
    bound = float((ordered + price * cost).amin(1).sum()) - price * budget
    if loss - bound <= 1e-12 * loss:  # but for the rounding of the sums
        bound = loss
    return Assignment(
        choices=torch.tensor(cheap_first)[choices],
        loss=loss,
        cost=int(cost[choices].sum()),
        bound=bound,
    )


def _spend_rest(
    choices: torch.Tensor, losses: torch.Tensor, cost: torch.Tensor, budget: int
) -> torch.Tensor:
    """Move items to dearer choices while the budget lasts, those first that gain most for it."""
    while True:
        room = budget - cost[choices].sum()
        extra = cost - cost[choices, None]
        gain = losses.gather(1, choices[:, None]) - losses
        fits = (extra > 0) & (extra <= room) & (gain > 0)
        best = torch.where(fits, gain / extra, 0.0).max(1)
        items = best.values.argsort(descending=True, stable=True)
        items = items[: int((best.values > 0).sum())]
        if not len(items):
            return choices
        items = items[extra[items, best.indices[items]].cumsum(0) <= room]
        choices = choices.index_copy(0, items, best.indices[items])


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
            total loss, or as near to it as `bound` tells. None: each head takes its best window
            that is not full.

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
