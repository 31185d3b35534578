"""Linear attention from the paper's formulas alone, token by token, in float64."""

import torch

from multimodal_gen.kernels.block_sparse.plan import Blocks

EPS = 1e-5


def naive_features(x: torch.Tensor, feature_map: str) -> torch.Tensor:
    """Return phi(x) as it is computed in the dtype of `x`, in float64."""
    wide = x.double()
    if feature_map == "softmax":
        found = (wide - wide.logsumexp(-1, keepdim=True)).exp()
    elif feature_map == "elu":
        found = torch.where(wide > 0, wide + 1, wide.exp())
    else:
        found = wide.clamp_min(0)
    return found.to(x.dtype).double()


def tokens_of(blocks: Blocks, b: int) -> list[range]:
    """Return the tokens of every block of one sample."""
    starts, lengths = blocks.bounds(torch.device("cpu"))
    batch = max(starts.shape[0], lengths.shape[0])
    starts, lengths = (x.expand(batch, 1, -1)[b % batch, 0].tolist() for x in (starts, lengths))
    return [range(start, start + n) for start, n in zip(starts, lengths, strict=True)]


def naive_linear(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    feature_map: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the projected branch, and the size of the sums it is made of.

    Args:
        query: [B, S, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        seen: bool [B, H, S, Sk], which tokens each query sees.
        feature_map: softmax, elu or relu.
        weight: [D, D].
        bias: [D] or None.
    """
    group = query.shape[2] // key.shape[2]
    # A token that no query sees may be no number.
    used = seen.any(2).view(seen.shape[0], key.shape[2], group, -1).any(2)
    used = used.transpose(1, 2).unsqueeze(-1)
    phi_q = naive_features(query, feature_map)
    phi_k = torch.where(used, naive_features(key, feature_map), 0.0)
    v = torch.where(used, value.double(), 0.0)
    phi_k, v = (x.repeat_interleave(group, dim=2) for x in (phi_k, v))
    pairs = torch.einsum("bqhd,bkhd->bhqk", phi_q, phi_k) * seen
    total = EPS + pairs.sum(-1, keepdim=True)
    linear = (torch.einsum("bhqk,bkhd->bhqd", pairs, v) / total).transpose(1, 2)
    size = (torch.einsum("bhqk,bkhd->bhqd", pairs, v.abs()) / total).transpose(1, 2)
    w = weight.double()
    branch, size = linear @ w.mT, size @ w.abs().mT
    return (branch, size) if bias is None else (branch + bias.double(), size + bias.double().abs())


def assert_added(
    found: torch.Tensor,
    before: torch.Tensor,
    branch: torch.Tensor,
    size: torch.Tensor,
    roundings: int = 5,
) -> None:
    """Assert that `found` is `before` + `branch`, but for the roundings of its dtype.

    Args:
        found: the sum.
        before: what was added to.
        branch: what was added.
        size: the same with absolute values, so that no sum in it cancels.
        roundings: how often a factor of the branch, or a part of it, is rounded to the dtype:
            weights of a row, state, its mean, projection and projected state; over unselected
            blocks also states and sums of blocks, twice each, and what goes into the projection.
    """
    eps = torch.finfo(found.dtype).eps
    exact = before.double() + branch
    budget = eps * exact.abs() + roundings * eps * size.amax(-1, keepdim=True)
    assert found.dtype == before.dtype
    error = (found.double() - exact).abs()
    assert (error <= budget).all(), float((error / budget).max())


UNSELECTED_ROUNDINGS = 10
