"""What the dense backends share: grouped heads, causal alignment, masks, strides.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
import torch.nn.functional as F
from typing_extensions import override

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import records_gradient
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext


class Segments(TypedDict):
    """Where the segments of packed tokens lie; see `AttentionImpl.forward_varlen`."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


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


def align_rows(x: torch.Tensor, num_rows: int, dim: int = 1, fill: float = 0.0) -> torch.Tensor:
    """Return the last `num_rows` rows of dimension `dim`, with rows of `fill` in front if too few.

    Bottom-right causal attention of Sq queries over Sk keys is square causal attention of
    `align_rows(q, Sk)`, whose result, aligned to Sq rows again, is zero where a query sees no key.
    """
    missing = num_rows - x.shape[dim]
    if missing <= 0:
        return x.narrow(dim, -missing, num_rows)
    return F.pad(x, (*(0, 0) * (x.dim() - 1 - dim), missing, 0), value=fill)


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


class DenseImpl(AttentionImpl):
    """Dense attention through a library, which may leave some of bottom-right causality to us.

    Subclasses write `_attend`. It gets no causal call with more queries than keys, whose first
    queries see no key; where `only_square`, it gets only causal calls of as many.

    Attributes:
        label: the backend's name in errors.
        function: "module:name" of the library's function, which is imported with the layer and
            then called as `self.run`; "" where a subclass finds its own.
        only_square: whether the library is right about causality for equal lengths only.
    """

    label: ClassVar[str]
    function: ClassVar[str] = ""
    only_square: bool = False
    run: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.function:
            self.run = resolve_name(self.function)

    @abstractmethod
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and log-sum-exp as `forward_lse` does.

        The latter may be None where `lse` is false or the variant declares none.
        """

    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the output under a mask as `forward` takes it."""
        refuse_mask(mask, self.label)
        raise AssertionError("refused above")

    @override
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_mask is not None:
            return self._attend_masked(query, key, value, attn_mask)
        attend = self._attend_aligned if self.causal else self._attend
        return attend(query, key, value, lse=False)[0]

    @override
    def forward_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        refuse_mask(keep, self.label)
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)  # torch's CPU operator divides by zero
        attend = self._attend_aligned if self.causal else self._attend
        out, lse = attend(query, key, value, lse=True)
        if lse is None:
            return super().forward_lse(query, key, value)
        return out, lse

    def _attend_aligned(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and log-sum-exp of a causal call."""
        num_queries, num_keys = query.shape[1], key.shape[1]
        if num_queries == num_keys or (num_queries < num_keys and not self.only_square):
            return self._attend(query, key, value, lse=lse)
        out, stats = self._attend(align_rows(query, num_keys), key, value, lse=lse)
        out = align_rows(out, num_queries)
        return out, None if stats is None else align_rows(stats, num_queries, 2, -math.inf)


class DenseBackend(AttentionBackend):
    """A backend whose implementation stands in the file of its declaration.

    Attributes:
        impl: the implementation.
    """

    impl: ClassVar[type[AttentionImpl]]

    @override
    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl
