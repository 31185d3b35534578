"""Linear attention next to block-sparse attention: validates, then runs Triton or the reference.

Shapes: B batch, S tokens, H query heads, Hkv key heads, D head size, N blocks.
"""

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import LINEAR, LINEAR_REST, choose_for
from multimodal_gen.kernels.linear_attention.reference import (
    FEATURE_MAPS,
    KeyState,
    Projection,
    Target,
    add_linear_reference,
    add_unselected_reference,
    key_means_reference,
    key_state_reference,
)
from multimodal_gen.kernels.tensors import unit_stride


def key_means(key: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the mean key of every block; does not wait for the device.

    Args:
        key: [B, S, Hkv, D], any strides.
        blocks: how the keys are cut, the same for all heads.

    Returns:
        [B, Hkv, N, D], fp32 (fp64 for fp64); 0 for blocks without tokens. Has no gradient.

    Raises:
        UsageError: shapes or devices do not fit each other.
    """
    _check_keys(key, None, blocks)
    key = unit_stride(key.detach())
    if choose_for(LINEAR, key, kv_size=blocks.size) == "triton":
        from multimodal_gen.kernels.linear_attention import linear_attention_kernel

        return linear_attention_kernel.key_means(key, blocks)
    return key_means_reference(key, blocks)


def key_state(
    key: torch.Tensor, value: torch.Tensor, blocks: Blocks, *, feature_map: str
) -> tuple[torch.Tensor, KeyState]:
    """Return the mean key of every block, and the state over all of them, in one pass.

    Args:
        key: [B, S, Hkv, D], any strides.
        value: as `key`.
        blocks: how they are cut, the same for all heads; tokens in no block do not count.
        feature_map: one of `FEATURE_MAPS`.

    Returns:
        What `key_means` returns, and the state.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other; no such feature map.
    """
    _check_keys(key, value, blocks)
    _check_feature_map(feature_map)
    given = (key, value)
    if choose_for(LINEAR, *given, gradients=given, kv_size=blocks.size) == "triton":
        from multimodal_gen.kernels.linear_attention import linear_attention_kernel

        k, v = unit_stride(key), unit_stride(value)
        return linear_attention_kernel.key_state(k, v, blocks, feature_map)
    return key_means(key, blocks), key_state_reference(key, value, blocks, feature_map)


def add_linear(
    out: torch.Tensor,
    query: torch.Tensor,
    state: KeyState,
    projection: Projection,
    *,
    rows: slice,
    feature_map: str,
) -> torch.Tensor:
    """Return `out` plus projected linear attention over everything in `state`.

    Args:
        out: [B, S, H, D], stride 1 along D; may be changed, where no gradient is recorded.
        query: [B, S, H, D], any strides.
        state: of the keys; query head h uses key head h // (H / Hkv).
        projection: what the result goes through.
        rows: the queries that get it, with start and stop.
        feature_map: one of `FEATURE_MAPS`.

    Returns:
        [B, S, H, D], summed in fp32 and rounded once.

    Raises:
        UsageError: shapes or devices do not fit each other; no such feature map.
    """
    target = Target(out, query, projection, feature_map)
    _check_target(target)
    wanted = (query.shape[0], state.sums.shape[1], query.shape[3])
    if tuple(state.sums.shape) != wanted or query.shape[2] % wanted[1]:
        raise UsageError(
            f"`state` must be of a batch of {wanted[0]}, a divisor of {query.shape[2]} heads and "
            f"head size {wanted[2]}, got {list(state.sums.shape)}"
        )
    tensors = (out, query, state.moments, projection.weight)
    if choose_for(LINEAR, query, gradients=tensors) == "triton":
        from multimodal_gen.kernels.linear_attention import linear_attention_kernel

        linear_attention_kernel.add_linear(target, state, rows)
        return out
    return add_linear_reference(target, state, rows)


def add_unselected(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockPlan,
    projection: Projection,
    *,
    feature_map: str,
) -> torch.Tensor:
    """Return `out` plus projected linear attention over the key blocks that `plan` leaves out.

    States of blocks are computed once, and then added up for each row; for some heads at a time,
    which bounds the memory.

    Args:
        out: [B, S, H, D], stride 1 along D; may be changed, where no gradient is recorded.
        query: [B, S, H, D], any strides.
        key: [B, Sk, Hkv, D], any strides.
        value: as `key`.
        plan: the selected blocks, cut alike for all heads.
        projection: what the result goes through.
        feature_map: one of `FEATURE_MAPS`.

    Returns:
        [B, S, H, D]; queries in no block keep their value.

    Raises:
        UsageError: shapes or devices do not fit each other; no such feature map.
    """
    target = Target(out, query, projection, feature_map)
    _check_target(target)
    _check_keys(key, value, plan.kv)
    chosen = choose_for(
        LINEAR_REST,
        query,
        key,
        value,
        gradients=(out, query, key, value, projection.weight),
        head_size=query.shape[3],
        kv_size=plan.kv.size,
    )
    if chosen == "triton":
        from multimodal_gen.kernels.linear_attention import linear_attention_kernel

        k, v = unit_stride(key), unit_stride(value)
        linear_attention_kernel.add_unselected(target, k, v, plan)
        return out
    return add_unselected_reference(target, key, value, plan)


def _check_feature_map(feature_map: str) -> None:
    if feature_map not in FEATURE_MAPS:
        raise UsageError(
            f"`feature_map` must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}"
        )


def _check_keys(key: torch.Tensor, value: torch.Tensor | None, blocks: Blocks) -> None:
    if key.ndim != 4 or key.shape[1] != blocks.total:
        raise UsageError(f"`key` must be [B, {blocks.total}, Hkv, D], got {list(key.shape)}")
    if value is not None and (value.shape != key.shape or value.dtype != key.dtype):
        raise UsageError(
            f"`value` must be {list(key.shape)} in {key.dtype}, as key, got {list(value.shape)} "
            f"in {value.dtype}"
        )
    if any(x.shape[1] != 1 for x in blocks.tensors()):
        raise UsageError("`blocks` must be the same for all heads, got bounds per head")


def _check_target(target: Target) -> None:
    out, query, projection, feature_map = target
    _check_feature_map(feature_map)
    if out.shape != query.shape or out.ndim != 4 or out.stride(3) != 1:
        raise UsageError(
            f"`out` must be [B, S, H, D] as query, {list(query.shape)}, with stride 1 along D, "
            f"got {list(out.shape)} with strides {list(out.stride())}"
        )
    head_size = query.shape[3]
    if tuple(projection.weight.shape) != (head_size, head_size):
        raise UsageError(
            f"`projection` must have a weight of [{head_size}, {head_size}], "
            f"got {list(projection.weight.shape)}"
        )
    if projection.weight.device != query.device:
        raise UsageError(
            f"`projection` must lie on {query.device}, as query, got {projection.weight.device}"
        )
