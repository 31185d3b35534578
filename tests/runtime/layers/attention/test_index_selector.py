import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.index_selector import (
    FirstSteps,
    IndexSelector,
    first_of,
)


@pytest.mark.parametrize(
    ("value", "members", "others"),
    [
        ("0-3,38", (0, 3, 38), (4, 37, 39)),
        ("10-", (10, 10_000), (9,)),
        ("-5", (0, 5), (6,)),
        (" 1 , 4 - 5 ", (1, 4, 5), (2, 3, 6)),
        ("7", (7,), (6, 8)),
        (7, (7,), (6, 8)),
        ([0, 1, 38], (0, 1, 38), (2, 37)),
        ((2, "4-5"), (2, 4, 5), (3,)),
    ],
)
def test_a_selector_holds_what_is_written(value, members, others):
    selector = IndexSelector.parse(value)
    assert all(index in selector for index in members)
    assert not any(index in selector for index in others)
    assert "1" not in selector


@pytest.mark.parametrize(
    "value", ["", " ", "a", "1,,2", "1-2-3", "-", "--5", True, None, 1.5, {}, []]
)
def test_anything_else_is_refused(value):
    with pytest.raises(ConfigError, match=r"dense_steps must be indices from 0 such as '0-3,38'"):
        IndexSelector.parse(value, name="dense_steps")


def test_a_backward_range_is_refused():
    with pytest.raises(ConfigError, match=r"selector must have ranges that run upwards, got '5-3'"):
        IndexSelector.parse("1,5-3")


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20), st.booleans()), min_size=1, max_size=5
    )
)
def test_a_selector_is_the_union_of_its_ranges_and_reads_back_as_written(parts):
    ranges = tuple((first, None if open_ else first + more) for first, more, open_ in parts)
    selector = IndexSelector(ranges)
    assert IndexSelector.parse(str(selector)) == selector
    for index in range(100):
        expected = any(low <= index and (high is None or index <= high) for low, high in ranges)
        assert (index in selector) is expected


@pytest.mark.parametrize(
    ("share", "total", "first"),
    [(0.2, 50, 10), (0.03, 40, 1), (0.03, 30, 0), (0.29, 100, 29), (1.0, 7, 7), (0.5, 3, 1)],
)
def test_a_share_is_read_in_decimals_and_rounded_down(share, total, first):
    assert first_of(share, total) == first
    steps = FirstSteps(share)
    assert [step for step in range(total) if steps.holds(step, total)] == list(range(first))


def test_a_share_of_the_steps_may_be_among_others():
    steps = FirstSteps(0.5, IndexSelector.parse("2-3,8"))
    assert [step for step in range(10) if steps.holds(step, 10)] == [2, 3]
    assert str(steps) == "first 0.5 of all, among 2-3,8"
