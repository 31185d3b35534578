"""Moving tokens on a GPU, bit by bit against the reference."""

import pytest
import torch

from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens, tile_order
from multimodal_gen.kernels.tile_order.reference import gather_reference, scatter_reference
from tests.helpers.inputs import LAYOUTS, with_layout

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)


def check(tensors: tuple[torch.Tensor, ...], index: torch.Tensor, out: torch.Tensor) -> None:
    """Gather the tensors, then scatter the first into `out`, which is written to."""
    found = gather_tokens(tensors, index)
    for moved, tensor in zip(found, tensors, strict=True):
        assert torch.equal(moved, gather_reference(tensor, index))
        assert moved.transpose(1, 2).is_contiguous()
    wanted = out.clone()
    scatter_reference(found[0], index, wanted)
    scatter_tokens(found[0], index, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 33, 40, 64, 80, 128])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_head_size_and_dtype_moves_exactly(batch: int, size: int, dtype: torch.dtype) -> None:
    order = tile_order((5, 7, 9), (4, 4, 4), "cuda")
    query, key, value = (
        draw(batch, order.num_tokens, heads, size, dtype=dtype) for heads in (12, 4, 4)
    )
    check((query, key, value), order.order, torch.zeros_like(query))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_and_written_in_place(layout: str) -> None:
    order = tile_order((21, 45, 80), (6, 8, 8), "cuda")
    query, key = (with_layout(draw(1, order.num_tokens, h, 128), layout) for h in (5, 2))
    check((query, key), order.order, with_layout(torch.zeros_like(query), layout))


def test_every_batch_entry_may_have_its_own_order() -> None:
    index = torch.stack([torch.randperm(900, device="cuda")[:777] for _ in range(3)]).int()
    tensors = tuple(draw(3, 900, heads, 128) for heads in (24, 24, 8, 1))
    check(tensors, index, torch.zeros_like(tensors[0]))


def test_views_off_16_bytes_are_right() -> None:
    tensor = draw(1, 900, 3, 72)[..., 3:67]
    check((tensor,), torch.randperm(900, device="cuda").int(), torch.zeros_like(tensor))


def test_one_form_is_served_wherever_it_lies() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        memory = torch.randn(900 * 3 * 64 + 8, device="cuda").to(dtype)
        for offset, first in ((0, 0), (1, 0), (8, 0), (0, 1), (1, 1)):
            tensor = memory[offset:][: 900 * 3 * 64].view(1, 900, 3, 64)
            index = torch.empty(901, device="cuda", dtype=torch.int32)[first:][:900]
            index.copy_(torch.randperm(900, device="cuda"))
            check((tensor, tensor), index, torch.zeros_like(tensor))


@pytest.mark.parametrize("batch", [1, 3])
def test_more_than_two_to_the_31_elements(batch: int) -> None:
    grid = (100 // batch, 90, 81)
    order = tile_order(grid, (4, 4, 4), "cuda")
    tensor = draw(batch, order.num_tokens, 24, 128)
    assert tensor.numel() > 2**31
    (tiled,) = gather_tokens((tensor,), order.order)
    for b in range(batch):
        for head in (0, 11, 23):
            expected = tensor[b, :, head][order.order.long()]
            assert torch.equal(tiled[b, :, head], expected)
    out = torch.full_like(tensor, torch.nan)
    scatter_tokens(tiled, order.order, out)
    assert torch.equal(out, tensor)


def test_a_gradient_takes_the_reference() -> None:
    order = tile_order((5, 7, 9), (4, 4, 4), "cuda")
    leaf = draw(1, order.num_tokens, 2, 64, dtype=torch.float32).requires_grad_()
    (tiled,) = gather_tokens((leaf,), order.order)
    weight = torch.randn_like(tiled)
    (tiled * weight).sum().backward()
    assert torch.equal(leaf.grad, gather_reference(weight, order.inverse))


def test_moving_does_not_wait_for_the_device() -> None:
    order = tile_order((5, 7, 9), (4, 4, 4), "cuda")
    tensors = tuple(draw(1, order.num_tokens, 4, 128) for _ in range(3))
    check(tensors, order.order, torch.zeros_like(tensors[0]))  # compiles
    out = torch.zeros_like(tensors[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        same = tile_order((5, 7, 9), (4, 4, 4), "cuda")
        scatter_tokens(gather_tokens(tensors, same.order)[0], same.order, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same is order
    assert torch.equal(out, tensors[0])


def test_it_replays_from_a_captured_graph() -> None:
    order = tile_order((5, 7, 9), (4, 4, 4), "cuda")
    tensor = draw(1, order.num_tokens, 4, 128)
    out = torch.zeros_like(tensor)
    check((tensor,), order.order, out.clone())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (tiled,) = gather_tokens((tensor,), order.order)
        scatter_tokens(tiled, order.order, out)
    tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert torch.equal(tiled, gather_reference(tensor, order.order))
    assert torch.equal(out, tensor)
