"""AMD's AITER kernels: `aiter`, and `aiter_sage` with quantised operands.

Tested by simulation only: the calls are checked against a package with the same signatures.
"""

import importlib
from typing import Any, ClassVar

import torch

from multimodal_gen.kernels.engine import records_gradient
from multimodal_gen.kernels.requirements import HeadSizes, PackageProbe
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    AlignedImpl,
    refuse_grad,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

_ROCM = frozenset({PlatformEnum.ROCM})
_INSTALL = "install github.com/ROCm/aiter"


class AiterImpl(AlignedImpl):
    """Attention through `aiter.flash_attn_func`."""

    label = "aiter"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module = importlib.import_module("aiter")
        self._dense = module.flash_attn_func
        self._varlen = module.flash_attn_varlen_func

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        grad = records_gradient(query, key, value)
        wanted = lse or grad  # with gradients the package insists on it
        result: Any = self._dense(
            query,
            key,
            value,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            return_lse=wanted,
        )
        return (result[0], result[1]) if wanted else (result, None)

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
        grad = records_gradient(query, key, value)
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


class AiterSageImpl(AlignedImpl):
    """Attention through AITER's SageAttention kernel, which computes in bf16 outside."""

    label = "aiter_sage"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module = importlib.import_module("aiter.ops.triton.attention.fav3_sage")
        self._sage = module.fav3_sage_wrapper_func

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        out: torch.Tensor = self._sage(
            query,
            key,
            value,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            layout="bshd",
        )
        return out.to(query.dtype), None


class AiterSageBackend(AttentionBackend):
    """AITER's SageAttention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.AITER_SAGE
    summary: ClassVar[str] = "AITER SageAttention for AMD GPUs: quantised operands"
    never_unasked: ClassVar[str] = "rounds to 8 bits"
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
