"""The definition of linear attention in plain PyTorch: any device, any floating dtype.

With features phi of queries and keys, over the tokens T(i) that query i sees,

    linear(i) = phi(q_i) H(i) / (EPSILON + phi(q_i) . z(i))
    H(i) = sum_{j in T(i)} phi(k_j)^T v_j,    z(i) = sum_{j in T(i)} phi(k_j)

and what is added to an output is linear(i) W^T + b. Features are rounded to the inputs' dtype;
everything else is in fp32 (fp64 for fp64).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks

EPSILON = 1e-5
FEATURE_MAPS = ("softmax", "elu", "relu")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyState:
    """What linear attention keeps of keys and values.

    Attributes:
        moments: phi(k)^T v over all blocks, [B, Hkv, D, D], fp32 (fp64 for fp64).
        sums: phi(k) over all blocks, [B, Hkv, D], the same dtype.
    """

    moments: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear map of the channels of every head.

    Attributes:
        weight: [D, D], output by input channels.
        bias: [D], or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project the last dimension, in the dtype of `x`."""
        bias = None if self.bias is None else self.bias.to(x)
        return F.linear(x, self.weight.to(x), bias)


class Target(NamedTuple):
    """What linear attention is added to, and how.

    Attributes:
        out: [B, S, H, D].
        query: [B, S, H, D].
        projection: what the result goes through.
        feature_map: one of `FEATURE_MAPS`.
    """

    out: torch.Tensor
    query: torch.Tensor
    projection: Projection
    feature_map: str


def features(x: torch.Tensor, feature_map: str) -> torch.Tensor:
    """Return phi(x) in the dtype of `x`: softmax over the channels, elu + 1, or relu."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if feature_map == "softmax":
        mapped = wide.softmax(dim=-1)
    elif feature_map == "elu":
        # exp(x) where x is negative: elu(x) + 1 would round small features away.
        mapped = torch.where(wide > 0, wide + 1, wide.clamp_max(0.0).exp())
    else:
        mapped = wide.relu()
    return mapped.to(x.dtype)


def _token_weights(blocks: Blocks, device: torch.device) -> torch.Tensor:
    """Return which tokens belong to which block: bool [B|1, N, S]."""
    starts, lengths = (x[:, 0].long().unsqueeze(-1) for x in blocks.bounds(device))
    token = torch.arange(blocks.total, device=device)
    return (token >= starts) & (token < starts + lengths)


def key_means_reference(key: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the mean key of every block.

    Args:
        key: [B, S, Hkv, D].
        blocks: how the keys are cut, the same for all heads.

    Returns:
        [B, Hkv, N, D], fp32 (fp64 for fp64); 0 for blocks without tokens.
    """
    wide = key.to(torch.promote_types(key.dtype, torch.float32))
    starts, lengths = (x[:, 0].expand(key.shape[0], -1).long() for x in blocks.bounds(key.device))
    total = torch.zeros_like(wide[:, :1]).expand(-1, blocks.num, -1, -1)
    batch = torch.arange(key.shape[0], device=key.device).unsqueeze(-1)
    for i in range(blocks.size):
        real = lengths > i
        token = wide[batch, torch.where(real, starts + i, 0)]
        total = total + torch.where(real[..., None, None], token, 0.0)
    return (total / lengths.clamp_min(1)[..., None, None]).transpose(1, 2)


def key_state_reference(
    key: torch.Tensor, value: torch.Tensor, blocks: Blocks, feature_map: str
) -> KeyState:
    """Return the state over the tokens of all blocks.

    Args:
        key: [B, S, Hkv, D].
        value: as `key`.
        blocks: how they are cut; tokens in no block do not count, and may hold anything.
        feature_map: one of `FEATURE_MAPS`.
    """
    counted = _token_weights(blocks, key.device).any(1)
    return _state(key, value, counted.unsqueeze(-1).expand(key.shape[:3]), feature_map)


def _state(
    key: torch.Tensor, value: torch.Tensor, counted: torch.Tensor, feature_map: str
) -> KeyState:
    """Return the state over the tokens that `counted` [B, S, H] keeps, per head of it."""
    compute = torch.promote_types(key.dtype, torch.float32)
    group = counted.shape[2] // key.shape[2]
    phi = features(key, feature_map).to(compute).repeat_interleave(group, dim=2)
    v = value.to(compute).repeat_interleave(group, dim=2)
    # Not a product with 0: what does not count may be no number.
    phi, v = (torch.where(counted.unsqueeze(-1), x, 0.0) for x in (phi, v))
    return KeyState(moments=torch.einsum("bshd,bshe->bhde", phi, v), sums=phi.sum(1))


def _linear(query: torch.Tensor, state: KeyState, feature_map: str) -> torch.Tensor:
    """Return linear attention of queries [B, S, H, D] over one state per head."""
    phi = features(query, feature_map).to(state.sums.dtype)
    total = torch.einsum("bshd,bhde->bshe", phi, state.moments)
    return total / (EPSILON + torch.einsum("bshd,bhd->bsh", phi, state.sums)).unsqueeze(-1)


def add_linear_reference(target: Target, state: KeyState, rows: slice) -> torch.Tensor:
    """Return `out` plus projected linear attention over everything in `state`, rounded once.

    Args:
        target: what it is added to.
        state: of the keys, per key head.
        rows: the queries that get it.
    """
    out, query, projection, feature_map = target
    group = query.shape[2] // state.sums.shape[1]
    per_head = KeyState(
        moments=state.moments.repeat_interleave(group, dim=1),
        sums=state.sums.repeat_interleave(group, dim=1),
    )
    added = projection(_linear(query[:, rows], per_head, feature_map))
    result = out.clone()
    result[:, rows] = (out[:, rows].to(added.dtype) + added).to(out.dtype)
    return result


def add_unselected_reference(
    target: Target, key: torch.Tensor, value: torch.Tensor, plan: BlockPlan
) -> torch.Tensor:
    """Return `out` plus projected linear attention over the key blocks that `plan` leaves out.

    Args:
        target: what it is added to.
        key: [B, Sk, Hkv, D].
        value: as `key`.
        plan: the selected blocks, cut alike for all heads.
    """
    out, query, projection, feature_map = target
    batch, _, heads, _ = query.shape
    inside = _token_weights(plan.kv, key.device)
    starts, lengths = (x[0, 0].tolist() for x in plan.q.bounds(key.device))
    kept = plan.block_mask(plan.kv.num)
    result = out.clone()
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        left = ~kept[:, :, i].expand(batch, heads, -1)
        counted = (left.unsqueeze(-1) & inside.unsqueeze(1)).any(2).transpose(1, 2)
        rows = slice(start, start + length)
        state = _state(key, value, counted, feature_map)
        added = projection(_linear(query[:, rows], state, feature_map))
        result[:, rows] = (out[:, rows].to(added.dtype) + added).to(out.dtype)
    return result
