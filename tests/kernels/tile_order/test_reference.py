"""Moving tokens in plain PyTorch, against indexing."""

import pytest
import torch

from multimodal_gen.kernels.tile_order.api import gather_tokens, scatter_tokens, tile_order
from tests.helpers.inputs import LAYOUTS, with_layout


def some_index(batch: int, tokens: int, num: int, *, per_batch: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch * 100 + tokens)
    orders = [torch.randperm(tokens, generator=generator)[:num].int() for _ in range(batch)]
    return torch.stack(orders) if per_batch else orders[0]


def by_loops(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    rows = index if index.ndim == 2 else [index] * tensor.shape[0]
    return torch.stack(
        [torch.stack([entry[int(t)] for t in row]) for entry, row in zip(tensor, rows, strict=True)]
    )


@pytest.mark.parametrize("per_batch", [False, True], ids=["one order", "an order per entry"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_tokens_are_the_indexed_ones_head_major(layout: str, per_batch: bool) -> None:
    query, key = torch.randn(3, 13, 4, 8), torch.randn(3, 13, 2, 8)
    index = some_index(3, 13, 9, per_batch=per_batch)
    found = gather_tokens((with_layout(query, layout), key), index)
    for moved, tensor in zip(found, (query, key), strict=True):
        assert torch.equal(moved, by_loops(tensor, index))
        assert moved.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("per_batch", [False, True], ids=["one order", "an order per entry"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scattered_tokens_land_on_their_index_and_others_stay(layout: str, per_batch: bool) -> None:
    source, kept = torch.randn(3, 9, 4, 8), torch.randn(3, 13, 4, 8)
    index = some_index(3, 13, 9, per_batch=per_batch)
    out = with_layout(kept, layout)
    scatter_tokens(with_layout(source, layout), index, out)
    rows = index if per_batch else index.expand(3, -1)
    for b in range(3):
        for token in range(13):
            at = (rows[b] == token).nonzero().flatten().tolist()
            expected = source[b, at[0]] if at else kept[b, token]
            assert torch.equal(out[b, token], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_size", [1, 33, 40, 128])
def test_tile_order_and_back_is_the_identity(head_size: int, dtype: torch.dtype) -> None:
    order = tile_order((5, 7, 9), (4, 4, 4))
    tensor = torch.randn(1, order.num_tokens, 2, head_size).to(dtype)
    (tiled,) = gather_tokens((tensor,), order.order)
    assert not torch.equal(tiled, tensor)
    out = torch.full_like(tensor, torch.nan)
    scatter_tokens(tiled, order.order, out)
    assert torch.equal(out, tensor)
    assert torch.equal(gather_tokens((tiled,), order.inverse)[0], tensor)


@pytest.mark.parametrize("per_batch", [False, True], ids=["one order", "an order per entry"])
def test_gradients_flow_through_both(per_batch: bool) -> None:
    index = some_index(2, 7, 5, per_batch=per_batch)
    leaf = torch.randn(2, 7, 3, 4, dtype=torch.float64, requires_grad=True)

    def there_and_back(tensor: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 7, 3, 4, dtype=torch.float64)
        scatter_tokens(gather_tokens((tensor,), index)[0] * 3.0, index, out)
        return out

    assert torch.autograd.gradcheck(there_and_back, (leaf,))


def test_no_tokens_are_moved_by_an_empty_index() -> None:
    tensor, index = torch.randn(2, 7, 3, 4), torch.empty(0, dtype=torch.int32)
    (moved,) = gather_tokens((tensor,), index)
    assert moved.shape == (2, 0, 3, 4)
    out = tensor.clone()
    scatter_tokens(moved, index, out)
    assert torch.equal(out, tensor)
