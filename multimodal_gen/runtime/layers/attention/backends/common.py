"""What several backends share: grouped heads, causal alignment, masks, strides.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import records_gradient
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext


def unit_stride(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors, copied only where the last dimension is not densely laid out."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


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


def align_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the last `num_rows` rows of [B, S, H, D], with zero rows in front where S is fewer.

    Bottom-right causal attention of Sq queries over Sk keys is square causal attention of
    `align_rows(q, Sk)`, whose result, aligned to Sq rows again, is zero where a query sees no key.
    """
    missing = num_rows - x.shape[1]
    if missing <= 0:
        return x[:, -missing:]
    return F.pad(x, (0, 0, 0, 0, missing, 0))


def align_lse(lse: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the last `num_rows` rows of [B, H, S], with -inf in front where S is fewer."""
    missing = num_rows - lse.shape[2]
    if missing <= 0:
        return lse[:, :, -missing:]
    return F.pad(lse, (missing, 0), value=-math.inf)


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


def rows_that_see(mask: torch.Tensor) -> torch.Tensor:
    """Return bool [..., Sq, 1]: whether a row of a bool or additive mask leaves any key."""
    keeps = mask if mask.dtype is torch.bool else mask > -math.inf
    return keeps.any(dim=-1, keepdim=True)


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


class AlignedImpl(AttentionImpl):
    """An implementation whose library leaves some of bottom-right causality to its caller.

    Subclasses write `_attend`. It gets no causal call with more queries than keys, whose first
    queries see no key; where `only_square`, it gets only causal calls of as many.

    Attributes:
        label: the backend's name in errors.
        only_square: whether the library is right about causality for equal lengths only.
    """

    label: ClassVar[str]
    only_square: ClassVar[bool] = False

    @abstractmethod
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and log-sum-exp as `forward_lse` does.

        The latter may be None where `lse` is false or the variant declares none.
        """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`; without masks."""
        refuse_mask(attn_mask, self.label)
        return self._attend_aligned(query, key, value, lse=False)[0]

    def forward_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        refuse_mask(keep, self.label)
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)  # torch's CPU operator divides by zero
        out, lse = self._attend_aligned(query, key, value, lse=True)
        if lse is None:
            return super().forward_lse(query, key, value, keep)
        return out, lse

    def _attend_aligned(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_queries, num_keys = query.shape[1], key.shape[1]
        fits = num_queries == num_keys if self.only_square else num_queries <= num_keys
        if fits or not self.causal:
            return self._attend(query, key, value, lse=lse)
        out, stats = self._attend(align_rows(query, num_keys), key, value, lse=lse)
        out = align_rows(out, num_queries)
        return out, None if stats is None else align_lse(stats, num_queries)
