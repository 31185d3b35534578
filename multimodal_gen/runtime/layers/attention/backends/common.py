"""What the dense backends share: grouped heads, causal alignment, masks.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import math
from typing import TypedDict

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import records_gradient


class Segments(TypedDict):
    """Where the segments of packed tokens lie; see `AttentionImpl.forward_varlen`."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def expand_kv(x: torch.Tensor, num_heads: int, *, dim: int = 2) -> torch.Tensor:
    """Repeat key or value heads for kernels that want as many of them as query heads.

    Args:
        x: tensor with Hkv heads in dimension `dim`.
        num_heads: H, a multiple of Hkv.
        dim: the head dimension.

    Returns:
        `x` with H heads: `x` itself when Hkv is H, a view when Hkv is 1, else a copy.
    """
    num_kv_heads = x.shape[dim]
    if num_kv_heads == num_heads:
        return x
    if num_kv_heads == 1:
        sizes = list(x.shape)
        sizes[dim] = num_heads
        return x.expand(sizes)
    return x.repeat_interleave(num_heads // num_kv_heads, dim=dim)


def align_rows(x: torch.Tensor, num_rows: int, dim: int = 1, fill: float = 0.0) -> torch.Tensor:
    """Return the last `num_rows` rows of dimension `dim`, with rows of `fill` in front if too few.

    Bottom-right causal attention of Sq queries over Sk keys is square causal attention of
    `align_rows(q, Sk)`, whose result, aligned to Sq rows again, is zero where a query sees no key.
    """
    missing = num_rows - x.shape[dim]
    if missing <= 0:
        return x.narrow(dim, -missing, num_rows)
    return F.pad(x, (*(0, 0) * (x.dim() - 1 - dim), missing, 0), value=fill)


def to_e4m3(x: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a tensor to e4m3, with a scale for each sample and group of heads.

    Args:
        x: [B, S, H, D], with elements.
        num_groups: G, a divisor of H; the heads of a group are neighbours.

    Returns:
        e4m3 [B, S, H, D], dense, and fp32 [B, G] by which it is multiplied to have `x` again.
    """
    grouped = x.unflatten(2, (num_groups, -1))  # type: ignore[no-untyped-call]
    largest = torch.linalg.vector_norm(grouped, math.inf, (1, 3, 4), dtype=torch.float32)
    # A group of zeros has any scale but zero.
    scale = largest.clamp_min(1e-30) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (grouped / scale[:, None, :, None, None]).to(torch.float8_e4m3fn)
    return rounded.flatten(2, 3).contiguous(), scale


def attend_to_nothing(
    query: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of queries that see no key: zeros and -inf.

    Args:
        query: [B, Sq, H, D].
        value: [B, Sk, Hkv, Dv].

    Returns:
        [B, Sq, H, Dv] in the dtype of `query`, and fp32 [B, H, Sq].
    """
    batch, num_queries, num_heads = query.shape[:3]
    out = query.new_zeros(batch, num_queries, num_heads, value.shape[-1])
    lse = query.new_full((batch, num_heads, num_queries), -math.inf, dtype=torch.float32)
    return out, lse


def open_hidden_rows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask whose rows without keys attend to everything, and which rows had keys.

    Kernels disagree on rows without keys (zeros or NaN, and NaN gradients): what they give for
    such rows is to be dropped.

    Args:
        mask: bool or additive, [..., Sq, Sk].

    Returns:
        A mask of the same kind, and bool [..., Sq, 1].
    """
    if mask.dtype is torch.bool:
        sees = mask.any(dim=-1, keepdim=True)
        return mask | ~sees, sees
    sees = (mask > -math.inf).any(dim=-1, keepdim=True)
    return mask.masked_fill(~sees, 0.0), sees


def refuse_mask(attn_mask: torch.Tensor | None, backend: str) -> None:
    """Raise when a mask reaches a backend that declares none.

    Raises:
        UsageError: `attn_mask` is given.
    """
    if attn_mask is not None:
        raise UsageError(
            f"attn_mask must be None on {backend}, got a mask of shape {list(attn_mask.shape)}; "
            f"call it through a layer, which reroutes masked calls, or use torch_sdpa"
        )


def refuse_grad(backend: str, *tensors: torch.Tensor) -> None:
    """Raise when a kernel without a backward would cut the graph silently.

    Raises:
        UsageError: gradients are recorded and a tensor requires them.
    """
    if records_gradient(*tensors):
        raise UsageError(
            f"query, key and value must not require grad on {backend}, which has no backward; "
            f"call it under torch.no_grad() or use torch_sdpa"
        )
