"""The Triton kernels against the reference, bit by bit, under the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.launch.launcher import form_of
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.kernels.tile_order.reference import gather_reference, scatter_reference
from tests.helpers.inputs import LAYOUTS, with_layout

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def orders(batch: int, tokens: int, num: int, *, per_batch: bool, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(tokens, generator=generator)[:num].int() for _ in range(batch)]
    return torch.stack(drawn) if per_batch else drawn[0]


def gather(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from multimodal_gen.kernels.tile_order.tile_order_kernel import prepare_gather

    return prepare_gather(tuple(map(form_of, tensors)), form_of(index))(tensors, index)


def scatter(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    from multimodal_gen.kernels.tile_order.tile_order_kernel import prepare_scatter

    prepare_scatter(form_of(source), form_of(index), form_of(out))(source, index, out)


def check(tensors: tuple[torch.Tensor, ...], index: torch.Tensor, out: torch.Tensor) -> None:
    """Gather the tensors, then scatter the first into `out`, which is written to."""
    found = gather(tensors, index)
    assert len(found) == len(tensors)
    for moved, tensor in zip(found, tensors, strict=True):
        expected = gather_reference(tensor, index)
        assert torch.equal(moved, expected)
        assert moved.transpose(1, 2).is_contiguous()
        assert moved.dtype == tensor.dtype
    wanted = out.clone()
    scatter_reference(found[0], index, wanted)
    scatter(found[0], index, out)
    assert torch.equal(out, wanted)


@given(
    batch=st.sampled_from([1, 3]),
    num=st.integers(1, 60),
    heads=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    size=st.sampled_from([1, 8, 33, 40, 64]),
    layout=st.sampled_from(list(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    per_batch=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=8, deadline=None)
def test_any_tensors_and_any_order_agree_with_the_reference(
    batch: int,
    num: int,
    heads: list[int],
    size: int,
    layout: str,
    dtype: torch.dtype,
    per_batch: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tensors = [with_layout(torch.randn(batch, 60, h, size).to(dtype), layout) for h in heads]
    index = orders(batch, 60, num, per_batch=per_batch, seed=seed)
    out = with_layout(torch.randn(batch, 60, heads[0], size).to(dtype), layout)
    check(tuple(tensors), index, out)


@pytest.mark.slow_cases("40-torch.bfloat16", "40-torch.float32", "64-torch.float16")
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (32, torch.float32),
        (40, torch.bfloat16),
        (40, torch.float32),
        (64, torch.float16),
        (128, torch.bfloat16),
    ],
    ids=str,
)
def test_a_ragged_grid_moves_exactly_at_every_head_size(size: int, dtype: torch.dtype) -> None:
    order = tile_order((5, 7, 9), (4, 4, 4))
    query, key, value = (
        torch.randn(1, order.num_tokens, heads, size).to(dtype) for heads in (5, 2, 2)
    )
    check((query, key, value), order.order, torch.randn_like(query))


def test_rows_longer_than_a_program_are_cut_into_pieces() -> None:
    tensor = torch.randn(2, 40, 24, 128).bfloat16()
    check((tensor, tensor[:, :, :3]), orders(2, 40, 33, per_batch=True), torch.randn_like(tensor))


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("offset", [1, 4])
def test_views_that_no_vector_fits_are_copied_element_by_element(offset: int) -> None:
    tensor = torch.randn(1, 20, 3, 24).half()[..., offset : offset + 16]
    check((tensor,), orders(1, 20, 20, per_batch=False), torch.randn_like(tensor))


def test_an_index_with_gaps_between_its_values_is_read() -> None:
    index = orders(2, 20, 20, per_batch=True)
    spread = torch.stack([index, index], -1)[..., 0]
    assert not spread.is_contiguous()
    tensor = torch.randn(2, 20, 3, 16)
    check((tensor,), spread, torch.zeros_like(tensor))


def test_an_expanded_index_and_an_expanded_tensor_are_read_in_place() -> None:
    index = orders(1, 20, 20, per_batch=False).expand(3, -1)
    tensor = torch.randn(1, 20, 1, 16).expand(3, -1, 4, -1)
    check((tensor,), index, torch.zeros(3, 20, 4, 16))


def test_nothing_is_launched_for_an_empty_index() -> None:
    tensor, index = torch.randn(2, 7, 3, 8), torch.empty(0, dtype=torch.int32)
    (moved,) = gather((tensor,), index)
    assert moved.shape == (2, 0, 3, 8)
    out = tensor.clone()
    scatter(moved, index, out)
    assert torch.equal(out, tensor)


@given(
    batch=st.sampled_from([1, 3]),
    heads=st.sampled_from([1, 5]),
    num=st.integers(1, 150),
    count=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 8, 33, 40, 128]),
    layout=st.sampled_from(list(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=6, deadline=None)
def test_an_order_per_head_agrees_with_the_reference(
    batch: int,
    heads: int,
    num: int,
    count: int,
    size: int,
    layout: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    from multimodal_gen.kernels.tile_order.tile_order_kernel import (
        gather_per_head,
        scatter_per_head,
    )

    torch.manual_seed(seed)
    shape = (batch, 150, heads, size)
    tensors = tuple(with_layout(torch.randn(shape).to(dtype), layout) for _ in range(count))
    index = orders(batch * heads, 150, num, per_batch=True, seed=seed).view(batch, heads, num)
    found = gather_per_head(tensors, index)
    for moved, tensor in zip(found, tensors, strict=True):
        assert torch.equal(moved, gather_reference(tensor, index))
        assert moved.transpose(1, 2).is_contiguous()
    out = with_layout(torch.randn(shape).to(dtype), layout)
    wanted = out.clone()
    scatter_reference(found[0], index, wanted)
    scatter_per_head(found[0], index, out)
    assert torch.equal(out, wanted)
