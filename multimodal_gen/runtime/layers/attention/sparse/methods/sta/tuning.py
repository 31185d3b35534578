"""From what searches found to a strategy: the best window of every head.

Within a budget, that is the multiple-choice knapsack problem. A price per unit of cost (a Lagrange
multiplier) splits it into one small decision per item; the least price that keeps to the budget is
found by bisection, and what that leaves of the budget is spent greedily. The price also bounds the
loss of every assignment from below.

T steps, N layers, H heads, I items, C choices: candidates.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    SearchFile,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import (
    Strategy,
    StrategyRecord,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import (
    Window,
    is_full,
    tile_count,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """One choice per item.

    Attributes:
        choices: int64 [I].
        loss: their total loss.
        bound: no assignment within the budget has a smaller loss.
    """

    choices: torch.Tensor
    loss: float
    bound: float


def assign(losses: torch.Tensor, costs: Sequence[int], budget: int) -> Assignment:
    """Return an assignment of little loss whose cost keeps to the budget.

    Its loss exceeds the bound by less than what one item can gain. With the tens of thousands of
    items of a search that is next to nothing, and `bound` tells how much at most.

    Args:
        losses: fp64 [I, C], loss of each choice for each item.
        costs: cost of each choice, the same for all items, ascending: ties go to the cheapest.
        budget: largest total cost, at least I times the smallest cost.
    """
    cost = torch.tensor(costs, dtype=torch.float64)
    assert len(losses) * costs[0] <= budget, "the caller checks that the budget can be kept"

    def at_price(price: float) -> torch.Tensor:
        return (losses + price * cost).argmin(1)

    low, price = 0.0, 0.0
    if float(cost[at_price(price)].sum()) > budget:
        price = float(losses.max() - losses.min()) * 2 + 1e-300
        while low < (middle := (low + price) / 2) < price:
            if float(cost[at_price(middle)].sum()) > budget:
                low = middle
            else:
                price = middle
    choices = _spend_rest(at_price(price), losses, cost, budget)
    loss = float(losses.gather(1, choices[:, None]).sum())
    bound = float((losses + price * cost).amin(1).sum()) - price * budget
    if loss - bound <= 1e-12 * loss:  # but for the rounding of the sums
        bound = loss
    return Assignment(choices=choices, loss=loss, bound=bound)


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


def tune_files(
    paths: Sequence[Path], *, skip_time_steps: int, target_density: float | None = None
) -> tuple[Strategy, Assignment]:
    """Tune on search files, of both branches of guidance where both are to count; see `tune`.

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
) -> tuple[Strategy, Assignment]:
    """Choose a window for every head, by its mean squared loss over all searches.

    Args:
        searches: what was found, by a name for messages.
        skip_time_steps: first denoising steps that stay dense.
        target_density: largest share of tiles kept, over all steps, layers and heads and the
            dense steps too; the windows, full ones among them, are then those with the least
            total loss, or as near to it as `bound` tells. None: each head takes its best window
            that is not full.

    Returns:
        The strategy, and the assignment of windows to heads that it is made of: its loss is the
        heads' mean squared differences from full attention, added up.

    Raises:
        ConfigError: searches do not fit each other, all steps would be dense, or the density
            cannot be reached.
    """
    windows, losses, made_for = _mean(searches)
    tiles, (num_steps, layers, heads) = made_for.tiles, losses.shape[1:]
    assert tiles is not None, "every search tells its grid"
    if skip_time_steps >= num_steps:
        raise ConfigError(
            f"`skip_time_steps` must be below the {num_steps} steps of the searches, got "
            f"{skip_time_steps}: every step would stay dense"
        )
    if target_density is not None:
        windows = (*windows, tiles)
        losses = torch.cat((losses, torch.zeros_like(losses[:1])))
    costs = [tile_count(window, tiles) for window in windows]
    items = losses[:, skip_time_steps:].flatten(1).T  # [(T - skip) * N * H, C]
    budget = len(items) * costs[-1]
    if target_density is not None:
        budget = _budget(losses, costs, skip_time_steps, target_density)
    found = assign(items, costs, budget)
    chosen = found.choices.view(-1, layers, heads).tolist()
    dense_steps = (((tiles,) * heads,) * layers,) * skip_time_steps
    sparse_steps = tuple(
        tuple(tuple(windows[choice] for choice in layer) for layer in step) for step in chosen
    )
    windows_by_step = (*dense_steps, *sparse_steps)
    return Strategy(windows=windows_by_step, name="tuned mask strategy", made_for=made_for), found


def _mean(
    searches: Mapping[str, SearchFile],
) -> tuple[tuple[Window, ...], torch.Tensor, StrategyRecord]:
    """Return the windows that are not full, sparsest first, their mean loss and the grid."""
    first_name, first = next(iter(searches.items()))
    wanted = _kind(first)
    for name, other in searches.items():
        for what, its in _kind(other).items():
            if its != wanted[what]:
                raise ConfigError(
                    f"searches must have the same {what}, got {wanted[what]} in {first_name} and "
                    f"{its} in {name}"
                )
    sparse = (window for window in first.windows if not is_full(window, first.tiles))
    windows = tuple(sorted(sparse, key=lambda window: tile_count(window, first.tiles)))
    if not windows:
        raise ConfigError(f"{first_name} must have losses of a window that is not full, got none")
    each = [
        search.l2[[search.windows.index(window) for window in windows]]
        for search in searches.values()
    ]
    made_for = StrategyRecord(tiles=first.tiles, tile_size=first.tile_size)
    return windows, torch.stack(each).mean(0), made_for


def _kind(search: SearchFile) -> dict[str, str]:
    """Return what searches must agree in to be tuned on together."""
    return {
        "tiles": str(search.tiles),
        "tile_size": str(search.tile_size),
        "windows": ", ".join(map(str, sorted(search.windows))),
        "steps, layers and heads": str(tuple(search.l2.shape[1:])),
    }


def _budget(losses: torch.Tensor, costs: list[int], skip: int, target: float) -> int:
    """Return how many tiles the steps after the dense ones may keep."""
    num_steps, full = losses.shape[1], costs[-1]
    total = losses[0].numel() * full
    dense = total // num_steps * skip
    # The tolerance undoes the rounding of a target such as 0.1 + 0.2.
    budget = int(target * total * (1 + 1e-12)) - dense
    least = (total - dense) // full * costs[0]
    if budget < least:
        raise ConfigError(
            f"`target_density` must be at least {(dense + least) / total:.4g}, which the sparsest "
            f"window and {skip} dense steps of {num_steps} leave, got {target}; skip fewer steps "
            f"or search sparser windows"
        )
    return budget


@lru_cache(maxsize=4)
def tune_into(
    path: Path, versions: tuple[tuple[Path, int], ...], *, skip: int, target: float | None
) -> None:
    """Tune on search files and write the strategy; once, until one changes.

    Args:
        path: the strategy file to write.
        versions: the search files, and when each was changed.
        skip: first denoising steps that stay dense.
        target: the target density of `tune`.

    Raises:
        ConfigError: see `tune_files`, or the file cannot be written.
    """
    files = [file for file, _ in versions]
    strategy, _ = tune_files(files, skip_time_steps=skip, target_density=target)
    strategy.write(path)
    density = strategy.mean_density(strategy.grid)
    logger.info("tuned %s to a density of %.3f of %d searches", path, density, len(files))
