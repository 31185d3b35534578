"""AMD's AITER kernels: `aiter`, and `aiter_sage` with quantised operands.

Tested by simulation only: the calls are checked against a package with the same signatures.
"""

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from multimodal_gen.runtime.layers.attention.backends._common import (
    align_lse,
    align_rows,
    refuse_grad,
    refuse_mask,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    HALF_DTYPES,
    AttentionBackend,
    AttentionImpl,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

_ROCM = frozenset({PlatformEnum.ROCM})
_INSTALL = "install github.com/ROCm/aiter"


class AiterImpl(AttentionImpl):
    """Attention through `aiter.flash_attn_func`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module = importlib.import_module("aiter")
        self._dense = module.flash_attn_func
        self._varlen = module.flash_attn_varlen_func

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`."""
        refuse_mask(attn_mask, "aiter")
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            return align_rows(self.forward(align_rows(query, num_keys), key, value), num_queries)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            return self.forward_lse(query, key, value)[0]  # the package insists on it
        out: torch.Tensor = self._dense(
            query, key, value, softmax_scale=self.softmax_scale, causal=self.causal
        )
        return out

    def forward_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            out, lse = self.forward_lse(align_rows(query, num_keys), key, value)
            return align_rows(out, num_queries), align_lse(lse, num_queries)
        out, lse = self._dense(
            query,
            key,
            value,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            return_lse=True,
        )[:2]
        return out, lse

    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_varlen`."""
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        result = self._varlen(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            return_lse=grad,
        )
        out: torch.Tensor = result[0] if grad else result
        return out


class AiterBackend(AttentionBackend):
    """AITER's FlashAttention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.AITER
    summary: ClassVar[str] = "AITER FlashAttention for AMD GPUs"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="aiter",
            platforms=_ROCM,
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=256, multiple_of=8),
            features=frozenset(
                {
                    Feature.GQA,
                    Feature.CAUSAL,
                    Feature.VARLEN,
                    Feature.LSE,
                    Feature.RING,
                    Feature.BACKWARD,
                }
            ),
            packages=(PackageProbe(module="aiter", distribution="amd-aiter", install=_INSTALL),),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `AiterImpl`."""
        return AiterImpl


class AiterSageImpl(AttentionImpl):
    """Attention through AITER's SageAttention kernel, which computes in bf16 outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module = importlib.import_module("aiter.ops.triton.attention.fav3_sage")
        self._sage = module.fav3_sage_wrapper_func

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`."""
        refuse_mask(attn_mask, "aiter_sage")
        refuse_grad("aiter_sage", query, key, value)
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            return align_rows(self.forward(align_rows(query, num_keys), key, value), num_queries)
        out: torch.Tensor = self._sage(
            query,
            key,
            value,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            layout="bshd",
        )
        return out.to(query.dtype)


class AiterSageBackend(AttentionBackend):
    """AITER's SageAttention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.AITER_SAGE
    summary: ClassVar[str] = "AITER SageAttention for AMD GPUs: quantised operands"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="aiter_sage",
            platforms=_ROCM,
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 128)),
            features=frozenset({Feature.GQA, Feature.CAUSAL}),
            packages=(
                PackageProbe(
                    module="aiter.ops.triton.attention.fav3_sage",
                    distribution="amd-aiter",
                    install=_INSTALL,
                ),
            ),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `AiterSageImpl`."""
        return AiterSageImpl
