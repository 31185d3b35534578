"""Runs a router over blocks of raster order where they lie, and adds what a linear branch finds.

It is an executor apart from `local`: there, tokens move into tiles, a share of the heads at
a time, and means are made for the choice alone. Here nothing moves, blocks of queries and of keys
have sizes of their own, and one pass over the keys gives their means and the state of the linear
branch, which is a sum over all tokens; in a ring ranks add up what they hold.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.api import (
    add_linear,
    add_unselected,
    key_means,
    key_state,
)
from multimodal_gen.kernels.linear_attention.reference import KeyState, Projection
from multimodal_gen.kernels.select.api import pool_tiles
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.sparse.density import density_of_plan
from multimodal_gen.runtime.layers.attention.sparse.executors.kept import Chosen
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import record_plan
from multimodal_gen.runtime.layers.attention.sparse.raster import (
    RasterBlocks,
    raster_blocks,
    static_shares,
)
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import sum_over_ring, text_shard
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    KnownCall,
    Router,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    Shard,
    SparseCall,
    attend_text,
    kept_first,
    uniform_plan,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext

FEW_BLOCKS = 256  # of more, one that is cut short changes the density by less than a point

_TEXT_BLOCK = 64  # one that the kernel of the state takes


def attend_in_place(
    router: Router[Any],
    settings: Any,
    known: KnownCall,
    call: SparseCall,
    context: ForwardContext,
    found: Chosen | None = None,
) -> torch.Tensor:
    """Return the method's attention of a call, [B, S, H, D]; the linear branch included.

    The arguments are those of `attend_locally`.
    """
    layout, layer, cut, budget = call.layout, router.layer, known.cut, known.budget
    blocks = raster_blocks(layout, cut.tile[2], cut.of_keys[2], call.query.device)
    assert budget is not None, "others are refused"
    router.check_call(settings, budget, projected=call.projection is not None)
    out = router.attend_upstream(settings, call, None, None) if call.on_package else None
    density: float | torch.Tensor | None = known.share
    if out is None:
        out, plan = _attend_both(router, settings, call, blocks, budget, found)
        # A block that is cut short, which counts for little in long sequences, or a mask.
        is_cut = layout.num_video % cut.of_keys[2] > 0 and blocks.num_video <= FEW_BLOCKS
        if (is_cut or call.mask is not None) and budget.kept < budget.blocks:
            density = density_of_plan(plan, layout, call.mask)
    layer.note(context, density, call.query.shape[2])
    return out


def _attend_both(
    router: Router[Any],
    settings: Any,
    call: SparseCall,
    blocks: RasterBlocks,
    budget: Budget,
    found: Chosen | None,
) -> tuple[torch.Tensor, BlockPlan]:
    """Return exact attention over what the router chooses, plus the linear branch, and the plan."""
    layout, given = call.layout, call.query.dtype
    dtype = router.compute_dtype(settings, given)
    q, k, v = call.query, call.key, call.value
    if dtype != given:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    keys, index = blocks.keys, None
    if call.mask is not None:
        index, keys = kept_first(blocks.order, blocks.ordered, call.mask)
        k, v = gather_tokens((k, v), index)
    branch = None if call.projection is None else router.linear(settings)
    state: KeyState | None = None
    if branch is None or branch.unselected:
        means = key_means(k, keys)
    else:
        means, state = key_state(k, v, keys, feature_map=branch.feature_map)
    if budget.kept == budget.blocks:
        plan = BlockPlan.dense(blocks.queries, keys, q.device)
    else:
        lists = None if found is None else found.get()
        if lists is None:
            stats = block_stats(q, means, keys, blocks, scale=call.scale, mask=call.mask)
            lists = router.chosen(settings, stats, budget)
            if found is not None:
                found.set(lists, blocks.num_video + blocks.num_text)
        plan = uniform_plan(lists, blocks.queries, keys)
    record_plan(slice(0, q.shape[2]), plan, (q.shape[1], k.shape[1]), keys=index)
    mean = None if call.engine is None else means.mean(2).float()  # any that is close will do
    out = call.attend(plan, q, k, v, call.tail_of(blocks.num_video, slice(None)), mean)
    if layout.text and out.requires_grad:
        out = out.clone()  # the backward pass of the sparse branch reads what it gave
    attend_text(call, out)
    if branch is None or call.projection is None:
        return out.to(given), plan
    weights, feature_map = _weights(call.projection, q.device), branch.feature_map
    if state is None:
        out = add_unselected(out, q, k, v, plan, weights, feature_map=feature_map)
    else:
        rows = layout.video
        out = add_linear(out, q, state, weights, rows=rows, feature_map=feature_map)
    return out.to(given), plan


def block_stats(
    query: torch.Tensor,
    means: torch.Tensor,
    keys: Blocks,
    blocks: RasterBlocks,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
) -> BlockStats:
    """Return what blocks of queries choose among the video's blocks of keys by.

    Args:
        query: [B, Sq, H, D].
        means: means of the key blocks, fp32 or fp64 [B, Hkv, Nk, D].
        keys: the key blocks, which may have become shorter than those of `blocks`.
        blocks: the blocks.
        scale: factor of the scores.
        mask: bool [B, Sk], keys that may be attended to; None for all.
    """
    if mask is not None:  # the video lies at the same positions on both sides
        query = query[:, : mask.shape[1]]
    (pooled,) = pool_tiles((query.detach(),), blocks.of_queries, mask=mask)
    real = shares = None
    if keys is blocks.keys:
        lengths, shares = blocks.lengths, static_shares(blocks, means.dtype)
    else:
        lengths = keys.bounds(query.device)[1][:, 0, : blocks.num_video]
        # A block whose keys are all masked has no mean, and attending to it would be for nothing.
        real = lengths > 0
    return BlockStats(
        query=pooled,
        key=means[:, :, : blocks.num_video] if blocks.num_text else means,
        real=(None, real),
        order=blocks.tiles,
        scale=scale,
        counts=lengths,
        shares=shares,
        always=blocks.num_text,
    )


def _weights(linear: nn.Linear, device: torch.device) -> Projection:
    """Return the weights of a projection, on `device`."""
    bias = None if linear.bias is None else linear.bias.to(device)
    return Projection(weight=linear.weight.to(device), bias=bias)


def add_linear_in_ring(
    out: torch.Tensor,
    inputs: RingInputs,
    shards: Sequence[Shard | None],
    layout: SequenceLayout,
    linear: nn.Linear,
    feature_map: str,
) -> torch.Tensor:
    """Return `out`, this rank's queries, plus the branch; every rank calls it.

    Args:
        out: the exact attention; may be changed.
        inputs: what this rank holds.
        shards: the tokens of every rank.
        layout: where the video lies in the sequence.
        linear: the layer's projection.
        feature_map: of the branch.
    """
    call = inputs.call
    state = _ring_state(inputs, shards, feature_map)
    mine = shards[call.group.index]
    first = max(layout.start - sum(call.lengths[: call.group.index]), call.prefix)
    rows = slice(first, first + (0 if mine is None else mine.num_video))
    if rows.start == rows.stop:
        return out
    weights = _weights(linear, out.device)
    return add_linear(out, inputs.query, state, weights, rows=rows, feature_map=feature_map)


def _ring_state(inputs: RingInputs, shards: Sequence[Shard | None], feature_map: str) -> KeyState:
    """Return the state over the keys of all ranks, those that all hold counted once."""
    call, key = inputs.call, inputs.key
    batch, _, heads, size = key.shape
    mine = shards[call.group.index]
    precise = torch.promote_types(key.dtype, torch.float32)
    own = key.new_zeros((batch, heads, size + 1, size), dtype=precise)
    if mine is not None:
        own = _shard_state(key, inputs.value, mine, call.mask_of(call.group.index), feature_map)
    total = sum_over_ring(own, call.group)
    if inputs.shared_key is not None and inputs.shared_value is not None:
        text = text_shard(inputs.shared_key.shape[1], key.device, _TEXT_BLOCK)
        shared = inputs.shared_key, inputs.shared_value
        total = total + _shard_state(*shared, text, call.shared_mask, feature_map)
    return KeyState(moments=total[:, :, :-1], sums=total[:, :, -1])


def _shard_state(
    key: torch.Tensor,
    value: torch.Tensor,
    shard: Shard,
    mask: torch.Tensor | None,
    feature_map: str,
) -> torch.Tensor:
    """Return moments and sums of a shard as one tensor, [B, H, D + 1, D]."""
    blocks = Blocks.regular(key.shape[1], shard.keys.order.largest)
    if mask is not None:
        index, blocks = kept_first(shard.keys.index, shard.keys.blocks, mask)
        key, value = gather_tokens((key, value), index)
    _, state = key_state(key, value, blocks, feature_map=feature_map)
    return torch.cat((state.moments, state.sums.unsqueeze(2)), dim=2)
