from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.runtime.layers.attention.sparse.methods.sta.tuning import assign


def brute_force(losses, costs, budget) -> float:
    return min(
        sum(losses[item][choice] for item, choice in enumerate(choices))
        for choices in product(range(len(costs)), repeat=len(losses))
        if sum(costs[choice] for choice in choices) <= budget
    )


def check(found, losses, costs, budget) -> None:
    """The numbers of an assignment are those of its choices."""
    choices = found.choices.tolist()
    assert sum(costs[choice] for choice in choices) <= budget
    assert found.loss == pytest.approx(
        sum(losses[item][choice] for item, choice in enumerate(choices))
    )
    assert found.bound <= found.loss


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_small_problems_are_solved_up_to_what_one_item_can_gain(data) -> None:
    items = data.draw(st.integers(1, 5))
    costs = sorted(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)))
    loss = st.floats(0, 10, allow_nan=False) | st.sampled_from([0.0, 1.0, 2.0, 3.0])
    losses = data.draw(
        st.lists(
            st.lists(loss, min_size=len(costs), max_size=len(costs)), min_size=items, max_size=items
        )
    )
    budget = data.draw(st.integers(items * min(costs), items * max(costs) + 3))
    found = assign(torch.tensor(losses, dtype=torch.float64), costs, budget)
    check(found, losses, costs, budget)
    best, slack = brute_force(losses, costs, budget), 1e-9
    assert found.bound <= best + slack
    assert best <= found.loss + slack
    assert found.loss - found.bound <= max(max(row) - min(row) for row in losses) + slack


def test_choices_that_no_price_selects_are_found() -> None:
    # The middle choice lies above the line between the others, so that no price prefers it.
    losses = [[10.0, 6.0, 0.0]]
    found = assign(torch.tensor(losses, dtype=torch.float64), [1, 2, 3], 2)
    assert found.choices.tolist() == [1]


@pytest.mark.parametrize("distinct", [20_000, 1, 50], ids=["no ties", "all tied", "many ties"])
def test_a_large_problem_is_solved_within_a_sliver_of_its_bound(distinct) -> None:
    torch.manual_seed(0)
    costs = [18, 27, 30, 35, 60, 180]
    losses = (torch.rand(distinct, 6, dtype=torch.float64) ** 4).repeat(20_000 // distinct, 1)
    losses[:, -1] = 0
    budget = 20_000 * 40
    found = assign(losses, costs, budget)
    check(found, losses.tolist(), costs, budget)
    assert found.loss - found.bound <= 1e-4 * found.loss
    assert budget - sum(costs[choice] for choice in found.choices.tolist()) < max(costs)
    if distinct == len(losses):
        assert found.loss - found.bound <= 1e-5 * found.loss


@pytest.mark.parametrize(("budget", "choices"), [(2, [0, 0]), (200, [1, 1]), (101, [1, 0])])
def test_budgets_at_the_ends_take_the_cheapest_and_the_best(budget, choices) -> None:
    losses = torch.tensor([[5.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    assert assign(losses, [1, 100], budget).choices.tolist() == choices
