"""Tensors in every memory layout that inputs come in."""

import pytest
import torch

from multimodal_gen.testing.token_layouts import LAYOUTS, with_layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_values_are_kept_in_memory_of_their_own(layout: str) -> None:
    values = torch.randn(2, 5, 3, 8)
    found = with_layout(values, layout)
    assert torch.equal(found, values)
    assert found.data_ptr() != values.data_ptr()


def test_the_layouts_differ_in_their_strides() -> None:
    values = torch.randn(2, 5, 3, 8)
    assert len({with_layout(values, layout).stride() for layout in LAYOUTS}) == len(LAYOUTS)


def test_what_lies_around_a_slice_of_the_heads_is_nan() -> None:
    found = with_layout(torch.zeros(1, 2, 3, 8), "a slice of the heads")
    assert found._base is not None
    assert int(found._base.isnan().sum()) == 2 * 4 * 8
