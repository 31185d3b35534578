"""Attention over tiles of a sequence is attention over the sequence."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.runtime.layers.attention.backends.engine import dense_plan, drop_masked
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import _plan_of_all, text_shard
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    attend_tiled,
    head_slices,
    layout_of,
    tiled_sequence,
    tiled_video,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext, TextSpan
from tests.helpers.reference import reference_attention

CPU = torch.device("cpu")
TILE = (2, 2, 2)
LAYOUTS = {
    "video alone": SequenceLayout(grid=(4, 4, 6), start=0, num_queries=96, num_keys=96),
    "ragged": SequenceLayout(grid=(3, 5, 3), start=0, num_queries=45, num_keys=45),
    "text behind": SequenceLayout(grid=(2, 4, 2), start=0, num_queries=29, num_keys=29),
    "text before": SequenceLayout(grid=(3, 2, 3), start=11, num_queries=29, num_keys=29),
    "text on both sides": SequenceLayout(grid=(3, 2, 3), start=5, num_queries=35, num_keys=35),
    "padded text dropped": SequenceLayout(grid=(3, 2, 3), start=0, num_queries=31, num_keys=20),
}


def draw(layout: SequenceLayout, kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(layout.num_queries, 4), (layout.num_keys, kv_heads), (layout.num_keys, kv_heads)]
    return tuple(
        torch.randn(2, tokens, heads, 16, generator=generator, dtype=torch.float64)
        for tokens, heads in shapes
    )


def attend_densely(
    layout: SequenceLayout,
    inputs: tuple[torch.Tensor, ...],
    token_mask: torch.Tensor | None = None,
    *,
    with_text: bool = False,
) -> torch.Tensor:
    queries = tiled_video(layout, TILE, CPU)
    if with_text:
        queries = tiled_sequence(layout, layout.num_queries, TILE, CPU)
    keys = tiled_sequence(layout, layout.num_keys, TILE, CPU)
    plan = BlockPlan.dense(queries.blocks, keys.blocks, CPU)
    query, key, value = inputs
    call = SparseCall(
        query=query,
        key=key,
        value=value,
        layout=layout,
        scale=0.25,
        kernel=SelectedKernel("reference"),
        mask=token_mask,
    )
    return attend_tiled(call, queries, keys, lambda heads: plan)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("with_text", [False, True])
def test_a_plan_that_keeps_everything_is_dense_attention(
    name: str, kv_heads: int, with_text: bool
) -> None:
    inputs = draw(LAYOUTS[name], kv_heads)
    expected, _ = reference_attention(*inputs, scale=0.25)
    out = attend_densely(LAYOUTS[name], inputs, with_text=with_text)
    torch.testing.assert_close(out, expected)


def test_no_text_means_one_index_for_both_sides() -> None:
    layout = LAYOUTS["ragged"]
    queries, keys = tiled_video(layout, TILE, CPU), tiled_sequence(layout, 45, TILE, CPU)
    assert queries.index is keys.index
    assert queries.rest == ()
    assert tiled_video(LAYOUTS["text on both sides"], TILE, CPU).rest == (
        slice(0, 5),
        slice(23, 35),
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_masked_keys_have_no_influence(name: str) -> None:
    layout = LAYOUTS[name]
    q, k, v = draw(layout)
    token_mask = torch.rand(2, layout.num_keys, generator=torch.Generator().manual_seed(1)) < 0.6
    token_mask[1, : layout.start + 8] = False  # whole tiles without a key
    expected, _ = reference_attention(q, k, v, scale=0.25, mask=token_mask[:, None, None, :])
    torch.testing.assert_close(attend_densely(layout, (q, k, v), token_mask), expected)


def test_the_tiled_order_is_every_token_once_video_first() -> None:
    layout = LAYOUTS["text on both sides"]
    side = tiled_sequence(layout, layout.num_keys, TILE, CPU)
    assert sorted(side.index.tolist()) == list(range(35))
    assert all(5 <= token < 23 for token in side.index[:18].tolist())
    assert side.num_tiles == 2 * 1 * 2
    assert side.num_text_blocks == 3  # 17 tokens in blocks of 8
    assert side.index[18:].tolist() == [*range(5), *range(23, 35)]


def test_tiles_that_divide_the_grid_are_regular_blocks() -> None:
    layout = LAYOUTS["text behind"]
    assert tiled_sequence(layout, 29, TILE, CPU).blocks.is_regular
    ragged = LAYOUTS["ragged"]
    assert not tiled_sequence(ragged, 45, TILE, CPU).blocks.is_regular


def test_the_layout_follows_the_context() -> None:
    context = ForwardContext(
        current_timestep=0, latent_grid=(3, 2, 3), text_span=TextSpan(start=0, length=11)
    )
    assert layout_of(29, 29, context, "a method") == LAYOUTS["text before"]


@pytest.mark.parametrize("context", [None, ForwardContext(current_timestep=0)])
def test_an_unknown_grid_is_an_error_that_says_how_to_tell_it(
    context: ForwardContext | None,
) -> None:
    with pytest.raises(UsageError, match=r"a method must know the latent grid .* got none; run"):
        layout_of(45, 45, context, "a method")


def test_a_sequence_too_short_for_the_grid_is_an_error_with_numbers() -> None:
    context = ForwardContext(current_timestep=0, latent_grid=(3, 5, 4))
    with pytest.raises(UsageError, match=r"60 tokens at least, got 45 queries and 45 keys"):
        layout_of(45, 45, context, "a method")


@pytest.mark.parametrize(
    ("tokens", "heads", "most"),
    [(3_000, 4, 4), (32_760, 12, 6), (32_760, 40, 3), (115_200, 24, 1)],
)
def test_shares_of_heads_are_small_but_keep_the_gpu_busy(
    tokens: int, heads: int, most: int
) -> None:
    """64 MiB of copies, or a twentieth of the heads; half of them where all are 512 MiB at most."""
    tensor = torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16, device="meta")
    slices = head_slices(tensor, tensor, heads)
    assert [part.start for part in slices[1:]] == [part.stop for part in slices[:-1]]
    assert (slices[0].start, slices[-1].stop) == (0, heads)
    assert max(part.stop - part.start for part in slices) == most


def test_plans_that_a_cache_holds_are_shared_and_those_of_one_call_are_not() -> None:
    keys = torch.zeros(1, 9, 2, 16)
    plan = dense_plan(9, 9, 4, 4, False, CPU)
    assert plan.shared
    assert _plan_of_all(9, text_shard(9, CPU)).shared
    assert not drop_masked(keys, keys, plan, torch.ones(1, 9, dtype=torch.bool))[2].shared
